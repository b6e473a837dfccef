//! File locks. The remote owns the lock table. The cache records which owners may hold locks, so that closing a file
//! costs nothing without one, and what they hold, to reclaim it from a remote that has forgotten it. See
//! docs/decisions/0011-locks.md.

mod lock_reclaim;

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::op::{Caller, Fh, LockSpan, Op, OpReply, Output};
use crate::session::SessionState;
use nigh_types::{Call, Errno, LockInfo, LockKind, LockRanges, OpId, Reply, Response, Time};
use std::collections::{BTreeMap, BTreeSet};

/// The last byte that the kernel locks (`OFFSET_MAX`): a lock up to it goes to the end of the file.
const LAST_BYTE: u64 = i64::MAX.cast_unsigned();

/// Lock owner on an inode. Owners of flock(2) locks have a number space of their own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LockOwner {
    ino: u64,
    flock: bool,
    owner: u64,
}

/// Locks of one owner.
#[derive(Clone, Debug, Default)]
struct OwnerLocks {
    /// Open files through which the owner set locks.
    files: BTreeSet<Fh>,
    /// Lock calls in flight.
    calls: u32,
    /// Number of locks granted so far.
    grants: u64,
    /// The owner may still hold locks.
    may_hold: bool,
    /// Granted locks without an unlock call.
    ranges: LockRanges,
    /// Locks granted after the last waiter was gone: see [`Cache::correct_remote`].
    unwanted: LockRanges,
    /// The locks could not be reclaimed.
    lost: bool,
}

/// Owners that may hold locks. An entry lasts from the owner's first lock call until the owner unlocks the whole file,
/// closes it, or was granted no lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct LockRecords {
    holders: BTreeMap<LockOwner, OwnerLocks>,
    /// Open files with lost locks: reads and writes through them fail.
    lost_files: BTreeSet<Fh>,
}

impl LockRecords {
    /// Returns whether locks that were set through an open file are lost.
    pub(crate) fn are_lost(&self, fh: Fh) -> bool {
        self.lost_files.contains(&fh)
    }

    /// Marks all locks as lost.
    pub(crate) fn mark_all_lost(&mut self) {
        let holders: Vec<LockOwner> = self.holders.keys().copied().collect();
        for holder in holders {
            self.mark_lost(holder);
        }
    }

    /// Forgets lock calls: the session is over.
    pub(crate) fn forget_calls(&mut self) {
        self.holders.retain(|_, held| held.may_hold || held.lost);
        self.holders.values_mut().for_each(|held| held.calls = 0);
    }

    /// Forgets unwanted locks: the remote holds no lock any more.
    pub(crate) fn forget_unwanted(&mut self) {
        self.holders.values_mut().for_each(|held| held.unwanted = LockRanges::default());
    }

    /// Returns all locks to reclaim, in a fixed order. `asked` are lock calls without a reply: where one asks for a
    /// weaker lock than is held, the remote may hold only the weaker one.
    pub(crate) fn locks_to_reclaim(&self, asked: &[(LockOwner, LockInfo)]) -> Vec<(LockOwner, LockInfo)> {
        let mut claims = Vec::new();
        for (holder, held) in self.holders.iter().filter(|(_, held)| held.may_hold && !held.lost) {
            let mut ranges = held.ranges.clone();
            asked.iter().filter(|(of, _)| of == holder).for_each(|(_, range)| ranges.weaken(range));
            claims.extend(ranges.iter().map(|range| (*holder, range)));
        }
        claims
    }

    /// Marks an owner's locks as lost until it closes. Returns the open files through which it set them; `None`: it
    /// held none.
    fn mark_lost(&mut self, holder: LockOwner) -> Option<BTreeSet<Fh>> {
        let held = self.holders.get_mut(&holder).filter(|held| held.may_hold)?;
        (held.may_hold, held.lost, held.ranges) = (false, true, LockRanges::default());
        self.lost_files.extend(&held.files);
        Some(held.files.clone())
    }

    /// Returns the open files through which an owner set locks.
    fn files_of(&self, holder: LockOwner) -> impl Iterator<Item = &Fh> {
        self.holders.get(&holder).into_iter().flat_map(|held| &held.files)
    }

    fn is_lost(&self, holder: LockOwner) -> bool {
        self.holders.get(&holder).is_some_and(|held| held.lost)
    }

    /// Closes a file for an owner. Returns whether the remote must be told.
    fn close(&mut self, holder: LockOwner) -> bool {
        let Some(held) = self.holders.get_mut(&holder) else { return false };
        let tell = held.may_hold || held.calls > 0;
        let was_lost = std::mem::take(&mut held.lost);
        (held.may_hold, held.ranges) = (false, LockRanges::default());
        let files = if was_lost { std::mem::take(&mut held.files) } else { BTreeSet::new() };
        if held.calls == 0 {
            self.holders.remove(&holder);
        }
        for fh in files {
            if !self.is_lost_by_another(fh) {
                self.lost_files.remove(&fh);
            }
        }
        tell
    }

    fn is_lost_by_another(&self, fh: Fh) -> bool {
        self.holders.values().any(|held| held.lost && held.files.contains(&fh))
    }

    /// Removes an open file. Returns the owners that set locks through it and no other open file, since its last
    /// descriptor closes it for them: open file descriptions, and flock(2), whose locks end with the description.
    fn file_gone(&mut self, ino: u64, fh: Fh) -> Vec<LockOwner> {
        self.lost_files.remove(&fh);
        let first = LockOwner { ino, flock: false, owner: 0 };
        let last = LockOwner { ino, flock: true, owner: u64::MAX };
        let mut ended = Vec::new();
        for (holder, held) in self.holders.range_mut(first..=last) {
            if held.files.remove(&fh) && held.files.is_empty() {
                ended.push(*holder);
            }
        }
        ended
    }
}

impl Cache {
    #[allow(clippy::too_many_arguments, reason = "the fields of one FUSE request")]
    pub(crate) fn set_lock(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        (ino, fh): (u64, Fh),
        span: LockSpan,
        kind: LockKind,
        (pid, wait): (u32, bool),
    ) -> Option<OpReply> {
        let LockSpan { owner, flock, start, end } = span;
        let holder = LockOwner { ino, flock, owner };
        if self.locks.is_lost(holder) {
            return Some(OpReply::Failed(Errno::IO));
        }
        if !self.files.contains_key(&fh) {
            return Some(OpReply::Failed(Errno::BADF));
        }
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        let held = self.locks.holders.entry(holder).or_default();
        held.files.insert(fh);
        held.calls += 1;
        if flock && held.ranges.iter().any(|range| range.kind != kind) {
            // The remote releases the old lock first, whether it grants the other one or not.
            held.ranges = LockRanges::default();
        }
        if let Some(inode) = self.inodes.get_mut(&ino).filter(|_| !flock) {
            inode.ext_mut().has_locks = true;
        }
        let range = if flock { (0, u64::MAX) } else { (start, end) };
        let range = LockInfo { start: range.0, end: range.1, kind, pid };
        let purpose = CallKind::Lock { holder, range, wait, cancelled: false };
        let call = Call::Lock { node, owner, flock, kind, start, end, wait, pid, reclaim: false };
        self.send_for(now, op, caller, purpose, call)
    }

    pub(crate) fn unlock(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        ino: u64,
        span: LockSpan,
    ) -> Option<OpReply> {
        let LockSpan { owner, flock, start, end } = span;
        let holder = LockOwner { ino, flock, owner };
        let Some(held) = self.locks.holders.get(&holder) else { return Some(OpReply::Done) };
        if held.lost {
            return Some(OpReply::Failed(Errno::IO));
        }
        let whole = flock || start == 0 && end >= LAST_BYTE;
        let purpose = CallKind::Unlock { holder, whole_after: whole.then_some(held.grants), closing: false };
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        let all = if flock { (0, u64::MAX) } else { (start, end) };
        if let Some(held) = self.locks.holders.get_mut(&holder) {
            held.ranges.clear(all.0, all.1);
            held.unwanted.clear(all.0, all.1);
        }
        self.send_for(now, op, caller, purpose, Call::Unlock { node, owner, flock, start, end })
    }

    pub(crate) fn test_lock(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        ino: u64,
        span: LockSpan,
        kind: LockKind,
    ) -> Option<OpReply> {
        let LockSpan { owner, flock, start, end } = span;
        if self.locks.is_lost(LockOwner { ino, flock, owner }) {
            return Some(OpReply::Failed(Errno::IO));
        }
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        let call = Call::GetLock { node, owner, flock, kind, start, end };
        self.send_for(now, op, caller, CallKind::TestLock, call)
    }

    /// Releases a process's fcntl(2) locks on a file when the process closes one of its descriptors. The close waits
    /// for the release, so that no other process finds the locks after it.
    pub(crate) fn flush(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        ino: u64,
        owner: u64,
    ) -> Option<OpReply> {
        let holder = LockOwner { ino, flock: false, owner };
        match self.locks.close(holder).then(|| self.release_locks(now, holder)).flatten() {
            // The call goes out in any case; only stale mode does not wait for the reply.
            Some(call) if !self.answers_stale() => {
                self.wait(op, caller, call, crate::calls::ReplyKind::Reply, false)
            }
            _ => Some(OpReply::Done),
        }
    }

    /// Releases the locks that end with an open file; `flock` is its flock(2) owner, if it was used as one.
    pub(crate) fn release_with_file(&mut self, now: Time, ino: u64, fh: Fh, flock: Option<u64>) {
        let mut gone = self.locks.file_gone(ino, fh);
        gone.extend(flock.map(|owner| LockOwner { ino, flock: true, owner }));
        for holder in gone {
            if self.locks.close(holder) {
                self.release_locks(now, holder);
            }
        }
    }

    fn release_locks(&mut self, now: Time, holder: LockOwner) -> Option<nigh_types::CallId> {
        // A lost session has no locks.
        (self.session.state() != SessionState::Lost).then_some(())?;
        self.release_range(now, holder, 0, u64::MAX)
    }

    fn release_range(
        &mut self,
        now: Time,
        holder: LockOwner,
        start: u64,
        end: u64,
    ) -> Option<nigh_types::CallId> {
        let LockOwner { ino, flock, owner } = holder;
        let node = self.node_ref(ino)?;
        let purpose = CallKind::Unlock { holder, whole_after: None, closing: true };
        Some(self.send(now, None, purpose, Call::Unlock { node, owner, flock, start, end }))
    }

    pub(crate) fn on_lock_reply(&mut self, now: Time, flight: &InflightCall, response: &Response) -> OpReply {
        let CallKind::Lock { holder, range, cancelled, .. } = flight.purpose else {
            return OpReply::Failed(Errno::PROTO);
        };
        let granted = response.result == Ok(Reply::Done);
        let mut lost = false;
        if let Some(held) = self.locks.holders.get_mut(&holder) {
            held.calls = held.calls.saturating_sub(1);
            lost = held.lost;
            if granted && !lost && !flight.waiters.is_empty() {
                held.grants += 1;
                held.may_hold = true;
                held.ranges.set(range);
                held.unwanted.clear(range.start, range.end);
            } else if granted {
                // The caller is dead, or got another reply.
                held.unwanted.set(range);
            }
            self.correct_remote(now, holder);
        }
        match &response.result {
            _ if lost => OpReply::Failed(Errno::IO),
            Ok(Reply::Done) => OpReply::Done,
            Ok(_) => OpReply::Failed(Errno::PROTO),
            Err(_) if cancelled => OpReply::Failed(Errno::INTR),
            Err(errno) => OpReply::Failed(*errno),
        }
    }

    pub(crate) fn on_unlock_reply(&mut self, flight: &InflightCall, response: &Response) -> OpReply {
        let CallKind::Unlock { holder, whole_after, closing } = flight.purpose else {
            return OpReply::Failed(Errno::PROTO);
        };
        match response.result {
            Ok(Reply::Done) => {
                let same =
                    |held: &OwnerLocks| Some(held.grants) == whole_after && held.calls == 0 && !held.lost;
                if self.locks.holders.get(&holder).is_some_and(same) {
                    self.locks.holders.remove(&holder);
                }
                OpReply::Done
            }
            // A close leaves the owner without locks, whatever the reply.
            _ if closing => OpReply::Done,
            Ok(_) => OpReply::Failed(Errno::PROTO),
            Err(errno) => OpReply::Failed(errno),
        }
    }

    /// Ends a blocking lock request on a signal, by cancelling the call. The reply to the call answers the request; it
    /// may say that the lock was just granted.
    pub(crate) fn interrupt_lock(&mut self, op: OpId) {
        if let Some(Op::SetLock { wait: true, .. }) = self.calls.queued_op(op) {
            self.calls.remove_queued(op);
            return self.reply(op, OpReply::Failed(Errno::INTR));
        }
        let Some(call) = self.calls.waiter(op).map(|waiting| waiting.call) else { return };
        let Some(flight) = self.calls.get_mut(call) else { return };
        if let CallKind::Lock { wait: true, cancelled, .. } = &mut flight.purpose
            && !std::mem::replace(cancelled, true)
        {
            self.out.push_back(Output::Cancel(call));
            if !self.session.is_active() {
                // The reply may be long in coming. A lock that is granted after all is released.
                self.abort(op, Errno::INTR);
            }
        }
    }

    /// Returns whether a request waits for a lock of another owner, at a remote that replies.
    pub(crate) fn waits_for_lock(&self, op: OpId) -> bool {
        let flight = self.calls.waiter(op).and_then(|waiting| self.calls.get(waiting.call));
        let waits = |flight: &InflightCall| matches!(flight.purpose, CallKind::Lock { wait: true, .. });
        self.session.is_active() && flight.is_some_and(waits)
    }

    /// Ends the lock waits that a signal has cancelled: the remote is away.
    pub(crate) fn end_signalled_waits(&mut self) {
        let signalled =
            |flight: &&InflightCall| matches!(flight.purpose, CallKind::Lock { cancelled: true, .. });
        let ops: Vec<OpId> = self.calls.values().filter(signalled).flat_map(|f| f.waiters.clone()).collect();
        ops.into_iter().for_each(|op| self.abort(op, Errno::INTR));
    }
}

#[cfg(test)]
mod tests;
