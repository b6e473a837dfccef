//! Fids: numbers that stand for things at the server. A fid belongs to who holds it here; nobody any more, and it is clunked.

use super::desk::Desk;
use std::collections::BTreeSet;
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
    state: Mutex<FidState>,
    grave: Grave,
}

impl Fid {
    /// A number that nobody uses.
    pub fn new(desk: &Desk) -> Arc<Fid> {
        let mut shared = desk.shared();
        let (number, epoch) = (shared.fids.take(), shared.epoch);
        Arc::new(Fid { number, epoch, state: Mutex::new(FidState::Asked), grave: desk.grave.clone() })
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// The server has it.
    pub fn stands(&self) {
        self.set(FidState::Stands);
    }

    /// The server has let go of it by itself.
    pub fn ended(&self) {
        self.set(FidState::Ended);
    }

    fn set(&self, state: FidState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }
}

impl Drop for Fid {
    fn drop(&mut self) {
        let state = *self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.grave.bury(Gone::Fid { number: self.number, epoch: self.epoch, state });
    }
}
