//! Fids: numbers that stand for files at the server. A fid is reference-counted; its last drop clunks it.

use nigh_pathclient::DropQueue;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// State of a fid at the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FidState {
    /// The message that makes it has no reply yet.
    Asked,
    Live,
    /// The server has released it.
    Ended,
}

/// Allocation of fid numbers.
#[derive(Debug, Default)]
pub(crate) struct Fids {
    next: u32,
    spare: BTreeSet<u32>,
    /// Fids to be clunked once no message in flight refers to them.
    pub deferred: BTreeSet<u32>,
}

impl Fids {
    pub fn take(&mut self) -> u32 {
        self.spare.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    pub fn free(&mut self, number: u32) {
        self.spare.insert(number);
    }

    /// Numbers in use.
    pub fn in_use(&self) -> u32 {
        self.next - u32::try_from(self.spare.len()).unwrap_or(u32::MAX)
    }
}

/// What a coroutine has dropped, and the session is to release.
#[derive(Debug)]
pub(crate) enum Dropped {
    /// A reply that was not awaited to its end, by the slot of its message.
    Reply(u64),
    Fid {
        number: u32,
        epoch: u64,
        state: FidState,
    },
}

/// A fid. It is clunked when its last reference is dropped.
#[derive(Debug)]
pub(crate) struct Fid {
    number: u32,
    epoch: u64,
    state: Mutex<FidState>,
    dropped: DropQueue<Dropped>,
}

impl Fid {
    /// A fid with an unused number, whose message was not sent yet.
    pub fn new(number: u32, epoch: u64, dropped: DropQueue<Dropped>) -> Fid {
        Fid { number, epoch, state: Mutex::new(FidState::Asked), dropped }
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// Notes that the server has it.
    pub fn mark_live(&self) {
        self.set(FidState::Live);
    }

    /// Notes that the server has released it by itself.
    pub fn mark_ended(&self) {
        self.set(FidState::Ended);
    }

    fn set(&self, state: FidState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }
}

impl Drop for Fid {
    fn drop(&mut self) {
        let state = *self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.dropped.push(Dropped::Fid { number: self.number, epoch: self.epoch, state });
    }
}
