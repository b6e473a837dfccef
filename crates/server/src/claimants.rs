//! Whose locks are left for them to claim (docs/decisions/0011-locks.md): of forgotten sessions, and of those that
//! took their place and have not claimed yet.

use crate::register::Who;
use crate::room;
use nigh_link::Peer;
use std::collections::VecDeque;

/// So many sessions are remembered, and so many ranges of theirs; then the earliest goes of the client of which most
/// is left.
const MOST: usize = 1_024;
const MOST_RANGES: u64 = 1 << 18;

/// Sessions of which the table of locks has something left; the latest is last.
#[derive(Default)]
pub(crate) struct Claimants(VecDeque<Claimant>);

struct Claimant {
    session: u64,
    who: Who,
    peer: Peer,
}

impl Claimants {
    /// A session that is not among them.
    pub(crate) fn add(&mut self, session: u64, who: Who, peer: &Peer) {
        self.0.push_back(Claimant { session, who, peer: peer.clone() });
    }

    pub(crate) fn remove(&mut self, session: u64) {
        self.0.retain(|claimant| claimant.session != session);
    }

    /// Takes out all sessions of a client.
    pub(crate) fn take(&mut self, who: Who, peer: &Peer) -> Vec<u64> {
        let theirs = |claimant: &Claimant| claimant.who == who && claimant.peer.is_same(peer);
        let taken = self.0.iter().filter(|claimant| theirs(claimant)).map(|claimant| claimant.session);
        let taken = taken.collect();
        self.0.retain(|claimant| !theirs(claimant));
        taken
    }

    /// Takes out one that is to claim nothing any more, if there is too much. `ranges`: how many a session has left.
    pub(crate) fn make_way(&mut self, ranges: impl Fn(u64) -> u64) -> Option<u64> {
        let all = self.0.iter().map(|claimant| ranges(claimant.session));
        if self.0.len() <= MOST && all.sum::<u64>() <= MOST_RANGES {
            return None;
        }
        let client = |claimant: &Claimant| (claimant.peer.origin(), claimant.who.0);
        let shares = self.0.iter().map(|c| (client(c), 1 + ranges(c.session), c.session));
        let most = room::most(shares)?;
        let at = self.0.iter().position(|claimant| client(claimant) == most)?;
        self.0.remove(at).map(|claimant| claimant.session)
    }
}
