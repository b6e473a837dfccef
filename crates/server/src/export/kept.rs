//! What an export keeps open of files for calls to come: a file that has lost its last name takes space until that ends.
//!
//! Where the disk or a quota is full, all of it that no client has open is given back, and the call that was refused is
//! attempted once more.

use super::{Export, READER_IDLE, Reader};
use crate::error::{Fault, Result};
use crate::ops::Context;
use crate::reach::Node;
use nigh_native::lease::Object;
use nigh_types::{Errno, NodeId};
use parking_lot::Mutex;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

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
    /// Closes descriptors that nothing has used for a while, and removes what an earlier server left and nobody
    /// came back for. To be called every few seconds.
    pub fn close_idle(&self, now: Instant) {
        self.reach.orphans.sweep(now);
        let mut idle = Vec::new();
        let mut readers = self.readers.lock();
        while let Some((_, reader)) = readers.peek_lru() {
            if now.saturating_duration_since(reader.used) < READER_IDLE {
                break;
            }
            idle.extend(readers.pop_lru());
        }
        drop(readers); // closing may wait for the disk
        self.reach.departed.close_old(now);
    }

    /// Closes what is kept for calls to come and no client has open; how many files.
    pub(crate) fn close_kept(&self) -> u64 {
        let mut readers = self.readers.lock();
        let kept: Vec<_> = std::iter::from_fn(|| readers.pop_lru()).collect();
        drop(readers); // closing may wait for the disk
        kept.len() as u64 + self.reach.departed.close_all()
    }

    pub(crate) fn passing_reader(&self, node: NodeId) -> Option<(Object, Arc<OwnedFd>)> {
        let mut readers = self.readers.lock();
        let reader = readers.get_mut(&node)?;
        reader.used = Instant::now();
        Some((reader.object, Arc::clone(&reader.fd)))
    }

    pub(crate) fn note_passing_reader(&self, node: &Node, fd: &Arc<OwnedFd>) {
        if self.reach.may_hold(node) {
            let reader = Reader { object: node.object, fd: Arc::clone(fd), used: Instant::now() };
            let evicted = self.readers.lock().push(node.id, reader);
            drop(evicted);
        }
    }

    pub(crate) fn forget_passing_reader(&self, node: NodeId) {
        let held = self.readers.lock().pop(&node);
        drop(held);
    }
}
