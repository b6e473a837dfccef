//! What the kernel has of one inode: its lookup count, its timeouts, and copies without a timeout.

use nigh_types::{Attr, Span, Time};

/// Returns the set-user-ID and set-group-ID bits of a mode (`mode >> 9`).
pub(crate) fn set_id(attr: &Attr) -> u8 {
    u8::try_from(attr.mode >> 9 & 0o6).unwrap_or(0o6)
}

/// Kernel copies without a timeout (`ops/targets.rs`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UntimedCopy {
    Target = 1,
    Acls = 2,
}

/// The kernel's part of an inode's record.
#[derive(Clone, Debug)]
pub(crate) struct KnownInode {
    /// The kernel's lookup count: replies that brought the inode, less forgets.
    lookups: u64,
    /// End of the time in which the kernel looks neither the inode's parent entry nor its attributes up.
    attr_valid_until: Time,
    /// End of the entry timeout that the kernel was given under the parent entry.
    entry_valid_until: Time,
    /// Position in the kernel's inode queue, see [`crate::kernel::KernelInodeQueue`].
    queue_seq: u32,
    /// The kernel has attributes with a timeout, and no invalidation of them has followed.
    has_attr: bool,
    /// Set-user-ID and set-group-ID bits among those attributes (`mode >> 9`).
    set_id: u8,
    /// A local change cleared some of these bits: the kernel must drop the attributes before the reply to that change.
    set_id_cleared: bool,
    /// Bit set of the [`UntimedCopy`] that the kernel may have.
    copies: u8,
}

impl KnownInode {
    pub fn new(lookups: u64) -> KnownInode {
        KnownInode {
            lookups,
            attr_valid_until: Time(0),
            entry_valid_until: Time(0),
            queue_seq: 0,
            has_attr: false,
            set_id: 0,
            set_id_cleared: false,
            copies: 0,
        }
    }

    /// Ends the timeouts, because another inode has taken the inode number. The kernel keeps the rest until it forgets
    /// the number or an invalidation drops it.
    pub fn note_number_reused(&mut self) {
        (self.attr_valid_until, self.entry_valid_until) = (Time(0), Time(0));
    }
}

/// Lookup count.
impl KnownInode {
    /// Returns whether the kernel knows the inode: a reply brought it, and no FORGET has followed.
    pub fn is_known(&self) -> bool {
        self.lookups > 0
    }

    /// Counts a reply that brings the inode. Returns whether the kernel did not know the inode.
    pub fn note_lookup(&mut self) -> bool {
        self.lookups += 1;
        self.lookups == 1
    }

    /// Counts further replies that bring the inode, or those that an earlier record counted.
    pub fn add_lookups(&mut self, count: u64) {
        self.lookups += count;
    }

    /// Counts the kernel's root inode, which no reply brings.
    pub fn note_root(&mut self) {
        self.lookups = self.lookups.max(1);
    }

    /// Handles a FORGET of `count` lookups.
    pub fn forget(&mut self, count: u64) {
        self.lookups = self.lookups.saturating_sub(count);
    }

    /// Takes the lookup count, for another node id of the inode. `None`: the kernel does not know the inode.
    pub fn take_lookups(&mut self) -> Option<u64> {
        Some(std::mem::take(&mut self.lookups)).filter(|lookups| *lookups > 0)
    }

    #[cfg(test)]
    pub fn lookups(&self) -> u64 {
        self.lookups
    }

    /// Records the inode's place in the kernel's inode queue.
    pub fn note_queued(&mut self, seq: u32) {
        self.queue_seq = seq;
    }

    /// Returns whether the kernel still knows the inode under that place in the queue.
    pub fn is_queued_as(&self, seq: u32) -> bool {
        self.is_known() && self.queue_seq == seq
    }
}

/// Timeouts.
impl KnownInode {
    /// Records the timeouts in a reply to a lookup.
    pub fn note_timeouts(&mut self, now: Time, entry_valid: Span, attr_valid: Span) {
        self.attr_valid_until = now.after(entry_valid.min(attr_valid));
        // The kernel may apply two replies in the reverse order: the longer timeout lasts until the dentry is
        // dropped.
        self.entry_valid_until = self.entry_valid_until.max(now.after(entry_valid));
    }

    /// Returns whether the kernel uses the parent entry and the attributes without a lookup.
    pub fn needs_no_lookup(&self, now: Time) -> bool {
        self.is_known() && now < self.attr_valid_until
    }

    /// Returns whether the kernel may have a dentry of a name with a running timeout. If the name is not the parent
    /// entry, its timeout is not recorded.
    pub fn may_have_dentry(&self, now: Time, is_parent_entry: bool) -> bool {
        self.is_known() && (now < self.entry_valid_until || !is_parent_entry)
    }

    /// Records that the kernel looks the inode up again before it uses its attributes.
    pub fn end_attr_timeout(&mut self) {
        self.attr_valid_until = Time(0);
    }

    /// Records that the kernel does not trust the dentry at the parent entry any more.
    pub fn end_entry_timeout(&mut self) {
        self.entry_valid_until = Time(0);
    }

    /// Records that the kernel may have a dentry whose timeout is not recorded.
    pub fn lose_entry_timeout(&mut self) {
        self.entry_valid_until = Time::FAR;
    }

    /// Records that a listing has the inode under another name than its parent entry. The kernel may have a dentry of
    /// that name.
    pub fn note_listed_elsewhere(&mut self) {
        self.end_attr_timeout();
        if self.is_known() {
            self.lose_entry_timeout();
        }
    }
}

/// Attributes, and copies without a timeout.
impl KnownInode {
    /// Records a reply that gives the kernel attributes with a timeout.
    pub fn note_attr(&mut self, attr: &Attr) {
        self.has_attr = true;
        self.set_id |= set_id(attr);
    }

    /// Records an invalidation of the attributes. Returns whether the kernel has anything that it drops.
    pub fn note_attr_invalidated(&mut self) -> bool {
        std::mem::take(&mut self.has_attr) || self.has_copy(UntimedCopy::Acls)
    }

    /// Records the set-user-ID and set-group-ID bits that a local change left.
    pub fn note_set_id_left(&mut self, left: u8) {
        self.set_id_cleared |= self.set_id & !left != 0;
        self.set_id &= left;
    }

    /// Returns whether the kernel must drop the attributes before the reply to a local change.
    pub fn is_set_id_cleared(&self) -> bool {
        self.set_id_cleared
    }

    /// Records that the kernel has dropped the attributes with the cleared bits.
    pub fn note_set_id_dropped(&mut self) {
        self.set_id_cleared = false;
    }

    /// Returns whether the kernel may have a copy.
    pub fn has_copy(&self, of: UntimedCopy) -> bool {
        self.copies & of as u8 != 0
    }

    /// Records a reply that gives the kernel a copy.
    pub fn note_copy(&mut self, of: UntimedCopy) {
        self.copies |= of as u8;
    }

    /// Records an invalidation of the attributes or of all pages: both drop the ACLs, and the pages have the target.
    pub fn note_copies_dropped(&mut self, with_pages: bool) {
        self.copies &= !(UntimedCopy::Acls as u8);
        if with_pages {
            self.copies &= !(UntimedCopy::Target as u8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_beyond_the_lookup_count_leave_the_inode_unknown() {
        let mut known = KnownInode::new(0);
        assert!(known.note_lookup(), "the kernel did not know the inode");
        assert!(!known.note_lookup());
        known.forget(1);
        assert!(known.is_known());
        known.forget(5);
        assert!(!known.is_known());
        assert_eq!(known.take_lookups(), None);
    }

    #[test]
    fn invalidation_of_attributes_keeps_the_copy_of_the_target() {
        let mut known = KnownInode::new(1);
        known.note_copy(UntimedCopy::Target);
        known.note_copy(UntimedCopy::Acls);
        known.note_copies_dropped(false);
        assert_eq!((known.has_copy(UntimedCopy::Target), known.has_copy(UntimedCopy::Acls)), (true, false));
        known.note_copies_dropped(true);
        assert!(!known.has_copy(UntimedCopy::Target));
    }
}
