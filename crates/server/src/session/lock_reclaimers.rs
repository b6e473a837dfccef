//! Sessions with locks left to be reclaimed (docs/decisions/0011-locks.md): discarded sessions, and their successors
//! that have not completed their reclaim.

use crate::limits::fair_share;
use crate::session::registry::ClientIncarnation;
use nigh_link::Peer;
use std::collections::VecDeque;

/// Limits on such sessions and their ranges. Beyond them the oldest session of the client with most ranges is
/// dropped.
const MOST: usize = 1_024;
const MOST_RANGES: u64 = 1 << 18;

/// Sessions with entries left in the lock table, oldest first.
#[derive(Default)]
pub(crate) struct LockReclaimers(VecDeque<LockReclaimer>);

struct LockReclaimer {
    session: u64,
    who: ClientIncarnation,
    peer: Peer,
}

impl LockReclaimers {
    /// Adds a session, which must not be present.
    pub(crate) fn add(&mut self, session: u64, who: ClientIncarnation, peer: &Peer) {
        self.0.push_back(LockReclaimer { session, who, peer: peer.clone() });
    }

    pub(crate) fn remove(&mut self, session: u64) {
        self.0.retain(|claimant| claimant.session != session);
    }

    /// Removes and returns all sessions of a client.
    pub(crate) fn take(&mut self, who: ClientIncarnation, peer: &Peer) -> Vec<u64> {
        let theirs = |claimant: &LockReclaimer| claimant.who == who && claimant.peer.has_same_rights(peer);
        let taken = self.0.iter().filter(|claimant| theirs(claimant)).map(|claimant| claimant.session);
        let taken = taken.collect();
        self.0.retain(|claimant| !theirs(claimant));
        taken
    }

    /// Removes one session if there are too many; it may reclaim nothing more. `ranges` returns a session's number of
    /// ranges.
    pub(crate) fn evict(&mut self, ranges: impl Fn(u64) -> u64) -> Option<u64> {
        let all = self.0.iter().map(|claimant| ranges(claimant.session));
        if self.0.len() <= MOST && all.sum::<u64>() <= MOST_RANGES {
            return None;
        }
        let client = |claimant: &LockReclaimer| (claimant.peer.origin(), claimant.who.0);
        let shares = self.0.iter().map(|c| (client(c), 1 + ranges(c.session), c.session));
        let most = fair_share::largest_user(shares)?;
        let at = self.0.iter().position(|claimant| client(claimant) == most)?;
        self.0.remove(at).map(|claimant| claimant.session)
    }
}
