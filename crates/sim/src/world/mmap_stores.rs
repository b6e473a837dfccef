//! Stores into maps, from the store to the write-back, and the check of which clients may change a byte of a file.

use super::{Backend, World, name_of};
use nigh_cache::{Fh, NotifyLevel, Op, OpReply};
use nigh_types::{Errno, OpId, WriteFlags};
use std::collections::BTreeMap;

/// Stores into one file of one client that are written back together.
#[derive(Clone, Debug)]
pub(super) struct PendingStores {
    /// The tick of the first store.
    since: u64,
    /// The writes that the tree had then executed, if the kernel's page was current.
    before: Option<Vec<(u64, u64)>>,
    bytes: BTreeMap<u64, u8>,
}

impl<B: Backend> World<B> {
    /// Stores into a map of an open file. The write-back is checked if the kernel's page was current at the store.
    pub fn store(&mut self, at: usize, ino: u64, fh: Fh, (offset, bytes): (u64, &[u8])) {
        let client = &self.clients[at];
        let is_present = self.must_be_coherent(at, client)
            && client.cache.level() != NotifyLevel::None
            && !client.notifier.has_queued_invalidation(ino)
            && !self.pending_changes(client).1.contains(&ino);
        let before = || is_present.then(|| self.server.written());
        let stored = self.stores.entry((at, ino));
        let stored = stored.or_insert_with(|| PendingStores {
            since: self.tick,
            before: before(),
            bytes: BTreeMap::new(),
        });
        stored.bytes.extend((offset..).zip(bytes.iter().copied()));
        self.clients[at].kernel.page_cache.store(ino, fh, (offset, bytes));
    }

    /// Begins a write-back.
    pub(super) fn begin_flush(&mut self, at: usize, id: OpId, op: &Op) {
        if let Op::Write { ino, offset, data, flags: WriteFlags { write_back: true, .. }, .. } = op {
            let Some(mut stored) = self.stores.remove(&(at, *ino)) else { return };
            let pages: BTreeMap<u64, u8> = (*offset..).zip(data.iter().copied()).collect();
            // A store into a page that the kernel has dropped is never written back.
            stored.bytes.retain(|at, byte| pages.get(at) == Some(byte));
            self.writing_back.insert(id, stored);
        }
    }

    /// Checks a finished write-back: no other client wrote between a store and its write-back, or both are in the
    /// file.
    pub(super) fn check_write_back(&mut self, at: usize, (id, ino): (OpId, u64), answer: &OpReply) {
        let Some(stored) = self.writing_back.remove(&id) else { return };
        if matches!(answer, OpReply::Failed(_)) {
            self.uncertain_bytes.extend(stored.bytes.iter().map(|(at, byte)| (ino, *at, *byte)));
        }
        let lost =
            stored.bytes.iter().find(|(at, byte)| !self.facts.had_byte(ino, stored.since, (**at, **byte)));
        // The fake's effects are not observed one by one.
        if let (Some((offset, byte)), OpReply::Written(_), true) = (lost, answer, B::FLUSHES_FIRST) {
            let lie =
                format!("{} has stored {byte} at {offset} of {ino}, and it was never there", name_of(at));
            self.lost_stores.push(lie);
        }
        let Some(before) = stored.before else { return };
        let written = self.server.written();
        let since = written.strip_prefix(before.as_slice()).unwrap_or_default();
        let by: Vec<u64> = since.iter().filter(|(_, of)| *of == ino).map(|(by, _)| *by).collect();
        let own = by.contains(&(at as u64));
        let is_alone = by.iter().all(|by| *by == at as u64);
        let merges = B::FLUSHES_FIRST && !self.limited;
        if *answer == OpReply::Failed(Errno::IO) && !self.clients[at].may_fail && (is_alone || merges) {
            let and = if is_alone { ", and no other client wrote" } else { ", and was never cut off" };
            self.lost_stores.push(format!("{} was refused stores into {ino}{and}", name_of(at)));
        }
        if !B::FLUSHES_FIRST
            && matches!(answer, OpReply::Written(_))
            && own
            && by.first() != Some(&(at as u64))
        {
            self.lost_stores.push(format!("{} has undone what was written into {ino}", name_of(at)));
        }
    }

    /// Checks that a client with a pending request was writing, or had stored, each changed byte.
    pub(super) fn check_changed_bytes(&mut self) {
        let changed = std::mem::take(&mut self.facts.changed);
        for (ino, at, byte) in changed.into_iter().filter(|_| B::FLUSHES_FIRST) {
            let is_it = |stored: &PendingStores| stored.bytes.get(&at) == Some(&byte);
            let writes = |(id, op): (&OpId, &Op)| match op {
                Op::Write { ino: of, flags: WriteFlags { write_back: true, .. }, .. } => {
                    *of == ino && self.writing_back.get(id).is_some_and(is_it)
                }
                Op::Write { ino: of, offset, data, .. } => {
                    *of == ino && (*offset..).zip(data).any(|there| there == (at, &byte))
                }
                _ => false,
            };
            let is_written = self.clients.iter().any(|client| client.ops.iter().any(writes));
            if !is_written && !self.uncertain_bytes.contains(&(ino, at, byte)) {
                self.lost_stores
                    .push(format!("{ino} has {byte} at {at}, which no other client has written there now"));
            }
        }
    }
}
