//! Fids: numbers that stand for things at the server. A fid belongs to who holds it here; nobody any more, and it is clunked.

use super::desk::Desk;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// How it is with a fid at the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FidState {
    /// The message that makes it was not answered.
    Asked,
    Stands,
    /// The server has let go of it.
    Ended,
}

/// Numbers of fids: those free, and those that stand.
#[derive(Debug, Default)]
pub(crate) struct Fids {
    next: u32,
    spare: BTreeSet<u32>,
    /// To be clunked once nothing in flight speaks of them.
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

/// What was let go of where the lock may be held.
#[derive(Debug)]
pub(crate) enum Gone {
    Asked(u64),
    Fid { number: u32, epoch: u64, state: FidState },
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Grave(Arc<Mutex<Vec<Gone>>>);

impl Grave {
    pub fn bury(&self, gone: Gone) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(gone);
    }

    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub fn take(&self) -> Vec<Gone> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A fid. The last who drops it has it clunked.
#[derive(Debug)]
pub(crate) struct Fid {
    number: u32,
    epoch: u64,
    state: AtomicU8,
    grave: Grave,
}

impl Fid {
    /// A number that nobody uses.
    pub fn new(desk: &Desk) -> Arc<Fid> {
        let mut shared = desk.shared();
        let (number, epoch) = (shared.fids.take(), shared.epoch);
        Arc::new(Fid { number, epoch, state: AtomicU8::new(0), grave: desk.grave.clone() })
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// The server has it.
    pub fn stands(&self) {
        self.state.store(1, Ordering::Relaxed);
    }

    /// The server has let go of it by itself.
    pub fn ended(&self) {
        self.state.store(2, Ordering::Relaxed);
    }

    fn state(&self) -> FidState {
        match self.state.load(Ordering::Relaxed) {
            0 => FidState::Asked,
            1 => FidState::Stands,
            _ => FidState::Ended,
        }
    }
}

impl Drop for Fid {
    fn drop(&mut self) {
        self.grave.bury(Gone::Fid { number: self.number, epoch: self.epoch, state: self.state() });
    }
}
