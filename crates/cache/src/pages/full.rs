//! Tracker of files of which the kernel may have full pages, for local writes of partial pages.
//!
//! If the kernel has a full page, it does not keep the page locked until the reply to a write of a part
//! (`fuse_fill_write_pages`). The rest of the page would hide remote changes, so an invalidation must drop it. A page
//! that the kernel has not in full stays locked, and is read anew after the reply; trying to drop it is in vain and
//! takes time. So the cache tracks for each file whether the kernel may have full pages: reads and writes of full pages
//! bring some, until all are dropped.

use crate::op::InvalidationId;

/// Count of full pages that the kernel got and dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FullPageTracker {
    /// Number of times the kernel got some.
    filled: u64,
    /// Of these, the number of which none is left.
    dropped: u64,
    /// Invalidation of all pages that is running, with the value of `made` when it began.
    in_progress: Option<(InvalidationId, u64)>,
}

impl FullPageTracker {
    pub const fn none() -> FullPageTracker {
        FullPageTracker { filled: 0, dropped: 0, in_progress: None }
    }

    /// Returns whether there are none, and no invalidation of all pages is running.
    pub fn is_none(self) -> bool {
        !self.may_exist() && self.in_progress.is_none()
    }

    /// Records the begin or the reply of a read or a full-page write.
    pub fn note_filled(&mut self) {
        self.filled += 1;
    }

    /// Records a reply to a write, of full pages or parts: the running invalidation may have left out its parts.
    pub fn note_reply(&mut self, whole: bool) {
        self.filled += u64::from(whole || self.in_progress.is_some());
    }

    pub fn note_drop_started(&mut self, id: InvalidationId) {
        self.in_progress = Some((id, self.filled));
    }

    pub fn note_drop_done(&mut self, id: InvalidationId) {
        if let Some((_, made)) = self.in_progress.take_if(|(told, _)| *told == id) {
            self.dropped = made;
        }
    }

    pub fn may_exist(self) -> bool {
        self.filled > self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_during_a_full_invalidation_may_leave_full_pages() {
        let mut whole = FullPageTracker::none();
        assert!(!whole.may_exist());
        whole.note_filled();
        whole.note_drop_started(InvalidationId(1));
        whole.note_drop_done(InvalidationId(2));
        assert!(whole.may_exist(), "that was another one");
        whole.note_drop_done(InvalidationId(1));
        assert!(!whole.may_exist());
        whole.note_filled();
        whole.note_drop_started(InvalidationId(3));
        whole.note_filled();
        whole.note_drop_done(InvalidationId(3));
        assert!(whole.may_exist());
        whole.note_drop_started(InvalidationId(4));
        whole.note_reply(false);
        whole.note_drop_done(InvalidationId(4));
        assert!(whole.may_exist(), "of what was being written a part may have been left out");
        whole.note_drop_started(InvalidationId(5));
        whole.note_drop_done(InvalidationId(5));
        whole.note_reply(false);
        assert!(!whole.may_exist());
        whole.note_reply(true);
        assert!(whole.may_exist());
    }
}
