//! Fids: numbers that stand for files at the server. A fid is reference-counted; its last drop clunks it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

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

/// An object dropped at a place where the lock may be held.
#[derive(Debug)]
pub(crate) enum Dropped {
    Asked(u64),
    Fid { number: u32, epoch: u64, state: FidState },
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ClunkQueue(Arc<Mutex<Vec<Dropped>>>);

impl ClunkQueue {
    pub fn queue_clunk(&self, gone: Dropped) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(gone);
    }

    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub fn take(&self) -> Vec<Dropped> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A fid. It is clunked when its last reference is dropped.
#[derive(Debug)]
pub(crate) struct Fid {
    number: u32,
    epoch: u64,
    state: Mutex<FidState>,
    clunk_queue: ClunkQueue,
}

impl Fid {
    /// A fid with an unused number, whose message was not sent yet.
    pub fn new(number: u32, epoch: u64, clunk_queue: ClunkQueue) -> Fid {
        Fid { number, epoch, state: Mutex::new(FidState::Asked), clunk_queue }
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
        self.clunk_queue.queue_clunk(Dropped::Fid { number: self.number, epoch: self.epoch, state });
    }
}
