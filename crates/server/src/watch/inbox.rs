//! Events that the reader has read and the resolver has not handled yet. Events at equal locations are merged.

use super::event::Spot;
use nigh_types::GrantId;
use rustc_hash::FxHashMap;
use std::{fmt, io};

#[derive(Default)]
pub(super) struct Inbox {
    /// By group token.
    groups: FxHashMap<u64, Heap>,
    /// The mount table has changed.
    pub(super) mounts: bool,
    pub(super) stopping: bool,
}

/// Pending events of one filesystem.
#[derive(Default)]
pub(super) struct Heap {
    pub(super) spots: FxHashMap<Spot, u64>,
    /// Events that affect grants up to this one may be lost.
    pub(super) lost: Option<(GrantId, Why)>,
}

/// Why events count as lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Why {
    Queue,
    Room,
    Strange,
    Read(i32),
    LookedUp(i32),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = io::Error::from_raw_os_error;
        match self {
            Why::Queue => {
                f.write_str("the kernel's queue ran over (a larger fs.fanotify.max_queued_events helps)")
            }
            Why::Room => write!(f, "more than {MOST} places changed at one time"),
            Why::Strange => f.write_str("the kernel does not tell where"),
            Why::Read(errno) => write!(f, "they cannot be read: {}", error(*errno)),
            Why::LookedUp(errno) => write!(f, "what was changed cannot be looked up: {}", error(*errno)),
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
    pub(super) fn hear(&mut self, token: u64, mask: u64, spot: Spot) -> bool {
        let spots = &mut self.groups.entry(token).or_default().spots;
        if spots.len() >= MOST && !spots.contains_key(&spot) {
            spots.clear();
            return false;
        }
        *spots.entry(spot).or_default() |= mask;
        true
    }

    pub(super) fn lose(&mut self, token: u64, until: GrantId, why: Why) {
        let heap = self.groups.entry(token).or_default();
        if heap.lost.is_none_or(|(before, _)| before <= until) {
            heap.lost = Some((until, why));
        }
    }

    pub(super) fn take(&mut self) -> Vec<(u64, Heap)> {
        self.groups.drain().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::FileHandle;

    fn spot(n: u64) -> Spot {
        Spot { dir: None, own: FileHandle::told(1, &n.to_ne_bytes()) }
    }

    #[test]
    fn inbox_merges_equal_locations_and_reports_overflow() {
        let mut inbox = Inbox::default();
        assert!(inbox.is_empty());
        assert!(inbox.hear(3, 1, spot(1)) && inbox.hear(3, 2, spot(1)) && inbox.hear(4, 4, spot(1)));
        let mut taken = inbox.take();
        taken.sort_by_key(|(token, _)| *token);
        assert_eq!(taken.len(), 2);
        assert_eq!(taken[0].1.spots, FxHashMap::from_iter([(spot(1), 3)]));
        for n in 0..MOST as u64 {
            assert!(inbox.hear(3, 1, spot(n)));
        }
        assert!(inbox.hear(3, 1, spot(0)) && !inbox.hear(3, 1, spot(u64::MAX)));
        inbox.lose(3, GrantId(7), Why::Queue);
        inbox.lose(3, GrantId(5), Why::Room);
        let (_, heap) = inbox.take().remove(0);
        assert!(heap.spots.is_empty());
        assert_eq!(heap.lost, Some((GrantId(7), Why::Queue)));
    }
}
