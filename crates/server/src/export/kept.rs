//! What an export keeps open of files for calls to come: a file that has lost its last name takes space until that ends.
//!
//! Where the disk or a quota is full, all of it that no client has open is given back, and the call that was refused is
//! attempted once more.

use super::Export;
use crate::error::{Fault, Result};
use crate::ops::Context;
use nigh_types::Errno;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// How often space was given back. Locked while it is: a call that is refused meanwhile waits, and is attempted again.
#[derive(Debug, Default)]
pub(crate) struct GivenBack {
    rounds: AtomicU64,
    turn: Mutex<()>,
}

impl GivenBack {
    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::SeqCst)
    }

    /// Closes what these exports keep. Whether anything was given back since there were so many rounds.
    pub(crate) fn since(&self, rounds: u64, exports: impl FnOnce() -> u64) -> bool {
        let _turn = self.turn.lock();
        if self.rounds() == rounds && exports() > 0 {
            self.rounds.fetch_add(1, Ordering::SeqCst);
        }
        self.rounds() != rounds
    }
}

/// Attempts a call, or a part of one that may be made again; where there is no space, once more after space was given back.
pub(crate) fn with_space<T>(cx: Context<'_>, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let leases = &cx.files.holding().leases;
    let rounds = leases.given_back.rounds();
    match attempt() {
        Err(Fault(Errno::NOSPC | Errno::DQUOT)) if leases.give_back_space(cx.export, rounds) => attempt(),
        other => other,
    }
}

impl Export {
    /// Closes what is kept for calls to come and no client has open; how many files.
    pub(crate) fn close_kept(&self) -> u64 {
        self.readers.close_all() + self.reach.departed.close_all()
    }
}
