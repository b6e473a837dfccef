//! Events that the reader has read and the resolver has not handled yet. Events at equal locations are merged.

use super::event::EventLocation;
use nigh_types::GrantId;
use rustc_hash::FxHashMap;
use std::{fmt, io};

#[derive(Default)]
pub(super) struct Inbox {
    /// By group token.
    groups: FxHashMap<u64, PendingEvents>,
    /// The mount table has changed.
    pub(super) mounts: bool,
    pub(super) stopping: bool,
}

/// Pending events of one filesystem.
#[derive(Default)]
pub(super) struct PendingEvents {
    pub(super) locations: FxHashMap<EventLocation, u64>,
    /// Events that affect grants up to this one may be lost.
    pub(super) lost: Option<(GrantId, LossReason)>,
}

/// Why events count as lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LossReason {
    QueueOverflow,
    InboxFull,
    Malformed,
    Read(i32),
    LookedUp(i32),
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = io::Error::from_raw_os_error;
        match self {
            LossReason::QueueOverflow => {
                f.write_str("the kernel's queue ran over (a larger fs.fanotify.max_queued_events helps)")
            }
            LossReason::InboxFull => write!(f, "more than {MOST} places changed at one time"),
            LossReason::Malformed => f.write_str("the kernel does not tell where"),
            LossReason::Read(errno) => write!(f, "they cannot be read: {}", error(*errno)),
            LossReason::LookedUp(errno) => {
                write!(f, "what was changed cannot be looked up: {}", error(*errno))
            }
        }
    }
}

/// Maximum number of pending locations, about 20 MiB; beyond it events are lost.
const MOST: usize = 1 << 16;

impl Inbox {
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty() && !self.mounts && !self.stopping
    }

    /// Adds an event. Returns false if there is no room; all events of the group then count as lost.
    pub(super) fn add(&mut self, token: u64, mask: u64, spot: EventLocation) -> bool {
        let spots = &mut self.groups.entry(token).or_default().locations;
        if spots.len() >= MOST && !spots.contains_key(&spot) {
            spots.clear();
            return false;
        }
        *spots.entry(spot).or_default() |= mask;
        true
    }

    pub(super) fn lose(&mut self, token: u64, until: GrantId, why: LossReason) {
        let heap = self.groups.entry(token).or_default();
        if heap.lost.is_none_or(|(before, _)| before <= until) {
            heap.lost = Some((until, why));
        }
    }

    pub(super) fn take(&mut self) -> Vec<(u64, PendingEvents)> {
        self.groups.drain().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::handle::FileHandle;

    fn spot(n: u64) -> EventLocation {
        EventLocation { dir: None, own: FileHandle::from_kernel(1, &n.to_ne_bytes()) }
    }

    #[test]
    fn inbox_merges_equal_locations_and_reports_overflow() {
        let mut inbox = Inbox::default();
        assert!(inbox.is_empty());
        assert!(inbox.add(3, 1, spot(1)) && inbox.add(3, 2, spot(1)) && inbox.add(4, 4, spot(1)));
        let mut taken = inbox.take();
        taken.sort_by_key(|(token, _)| *token);
        assert_eq!(taken.len(), 2);
        assert_eq!(taken[0].1.locations, FxHashMap::from_iter([(spot(1), 3)]));
        for n in 0..MOST as u64 {
            assert!(inbox.add(3, 1, spot(n)));
        }
        assert!(inbox.add(3, 1, spot(0)) && !inbox.add(3, 1, spot(u64::MAX)));
        inbox.lose(3, GrantId(7), LossReason::QueueOverflow);
        inbox.lose(3, GrantId(5), LossReason::InboxFull);
        let (_, heap) = inbox.take().remove(0);
        assert!(heap.locations.is_empty());
        assert_eq!(heap.lost, Some((GrantId(7), LossReason::QueueOverflow)));
    }
}
