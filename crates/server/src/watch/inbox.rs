//! What the reader heard and the doer has not looked at yet. Equal places are one.

use super::event::Spot;
use nigh_types::GrantId;
use rustc_hash::FxHashMap;
use std::{fmt, io};

#[derive(Default)]
pub(super) struct Inbox {
    /// By the token of their group.
    groups: FxHashMap<u64, Heap>,
    /// Something was mounted or unmounted.
    pub(super) mounts: bool,
    pub(super) stopping: bool,
}

/// What was heard of one filesystem.
#[derive(Default)]
pub(super) struct Heap {
    pub(super) spots: FxHashMap<Spot, u64>,
    /// Changes of what was granted up to then may have been missed.
    pub(super) lost: Option<(GrantId, Why)>,
}

/// Why changes count as lost.
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

/// More places at one time count as lost: about 20 MiB.
const MOST: usize = 1 << 16;

impl Inbox {
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty() && !self.mounts && !self.stopping
    }

    /// False: there is no room, and all of that group counts as lost.
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
    fn equal_places_are_one_and_too_many_are_lost() {
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
