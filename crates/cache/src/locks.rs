//! File locks. The remote owns the lock table. The cache records which owners may hold locks, so that closing a file
//! costs nothing without one, and what they hold, to reclaim it from a remote that has forgotten it. See
//! docs/decisions/0011-locks.md.

mod lock_reclaim;

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::op::{Answer, Caller, Fh, LockSpan, Op, Output};
use crate::session_state::SessionState;
use nigh_types::{Call, Errno, LockInfo, LockKind, LockRanges, OpId, Reply, Response, Time};
use std::collections::{BTreeMap, BTreeSet};

/// The last byte that the kernel locks (`OFFSET_MAX`): a lock up to it goes to the end of the file.
const LAST_BYTE: u64 = i64::MAX.cast_unsigned();

/// Lock owner on an inode. Owners of flock(2) locks have a number space of their own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Holder {
    ino: u64,
    flock: bool,
    owner: u64,
}

/// Locks of one owner.
#[derive(Clone, Debug, Default)]
struct Held {
    /// Open files through which the owner set locks.
    files: BTreeSet<Fh>,
    /// Lock calls in flight.
    calls: u32,
    /// Number of locks granted so far.
    grants: u64,
    /// The owner may still hold locks.
    holds: bool,
    /// Granted locks without an unlock call.
    ranges: LockRanges,
    /// Locks granted after the last waiter was gone: see [`Cache::set_right`].
    unwanted: LockRanges,
    /// The locks could not be reclaimed.
    lost: bool,
}

/// Owners that may hold locks. An entry lasts from the owner's first lock call until the owner unlocks the whole file,
/// closes it, or was granted no lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Locks {
    holders: BTreeMap<Holder, Held>,
    /// Open files with lost locks: reads and writes through them fail.
    lost_files: BTreeSet<Fh>,
}

impl Locks {
    /// Returns whether locks that were set through an open file are lost.
    pub(crate) fn are_lost(&self, fh: Fh) -> bool {
        self.lost_files.contains(&fh)
    }

    /// Marks all locks as lost.
    pub(crate) fn lose_all(&mut self) {
        let holders: Vec<Holder> = self.holders.keys().copied().collect();
        for holder in holders {
            self.lose(holder);
        }
    }

    /// Forgets lock calls: the session is over.
    pub(crate) fn forget_calls(&mut self) {
        self.holders.retain(|_, held| held.holds || held.lost);
        self.holders.values_mut().for_each(|held| held.calls = 0);
    }

    /// Forgets unwanted locks: the remote holds no lock any more.
    pub(crate) fn forget_unwanted(&mut self) {
        self.holders.values_mut().for_each(|held| held.unwanted = LockRanges::default());
    }

    /// Returns all locks to reclaim, in a fixed order. `asked` are lock calls without a reply: where one asks for a
    /// weaker lock than is held, the remote may hold only the weaker one.
    pub(crate) fn claims(&self, asked: &[(Holder, LockInfo)]) -> Vec<(Holder, LockInfo)> {
        let mut claims = Vec::new();
        for (holder, held) in self.holders.iter().filter(|(_, held)| held.holds && !held.lost) {
            let mut ranges = held.ranges.clone();
            asked.iter().filter(|(of, _)| of == holder).for_each(|(_, range)| ranges.weaken(range));
            claims.extend(ranges.iter().map(|range| (*holder, range)));
        }
        claims
    }

    /// Marks an owner's locks as lost until it closes. Returns the open files through which it set them; `None`: it
    /// held none.
    fn lose(&mut self, holder: Holder) -> Option<BTreeSet<Fh>> {
        let held = self.holders.get_mut(&holder).filter(|held| held.holds)?;
        (held.holds, held.lost, held.ranges) = (false, true, LockRanges::default());
        self.lost_files.extend(&held.files);
        Some(held.files.clone())
    }

    /// Returns the open files through which an owner set locks.
    fn files_of(&self, holder: Holder) -> impl Iterator<Item = &Fh> {
        self.holders.get(&holder).into_iter().flat_map(|held| &held.files)
    }

    fn is_lost(&self, holder: Holder) -> bool {
        self.holders.get(&holder).is_some_and(|held| held.lost)
    }

    /// Closes a file for an owner. Returns whether the remote must be told.
    fn close(&mut self, holder: Holder) -> bool {
        let Some(held) = self.holders.get_mut(&holder) else { return false };
        let tell = held.holds || held.calls > 0;
        let was_lost = std::mem::take(&mut held.lost);
        (held.holds, held.ranges) = (false, LockRanges::default());
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
    fn file_gone(&mut self, ino: u64, fh: Fh) -> Vec<Holder> {
        self.lost_files.remove(&fh);
        let first = Holder { ino, flock: false, owner: 0 };
        let last = Holder { ino, flock: true, owner: u64::MAX };
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
    ) -> Option<Answer> {
        let LockSpan { owner, flock, start, end } = span;
        let holder = Holder { ino, flock, owner };
        if self.locks.is_lost(holder) {
            return Some(Answer::Failed(Errno::IO));
        }
        if !self.files.contains_key(&fh) {
            return Some(Answer::Failed(Errno::BADF));
        }
        let Some(node) = self.node_ref(ino) else { return Some(Answer::Failed(Errno::STALE)) };
        let held = self.locks.holders.entry(holder).or_default();
        held.files.insert(fh);
        held.calls += 1;
        if flock && held.ranges.iter().any(|range| range.kind != kind) {
            // The remote releases the old lock first, whether it grants the other one or not.
            held.ranges = LockRanges::default();
        }
        if let Some(inode) = self.inodes.get_mut(&ino).filter(|_| !flock) {
            inode.more().locked = true;
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
    ) -> Option<Answer> {
        let LockSpan { owner, flock, start, end } = span;
        let holder = Holder { ino, flock, owner };
        let Some(held) = self.locks.holders.get(&holder) else { return Some(Answer::Done) };
        if held.lost {
            return Some(Answer::Failed(Errno::IO));
        }
        let whole = flock || start == 0 && end >= LAST_BYTE;
        let purpose = CallKind::Unlock { holder, whole_after: whole.then_some(held.grants), closing: false };
        let Some(node) = self.node_ref(ino) else { return Some(Answer::Failed(Errno::STALE)) };
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
    ) -> Option<Answer> {
        let LockSpan { owner, flock, start, end } = span;
        if self.locks.is_lost(Holder { ino, flock, owner }) {
            return Some(Answer::Failed(Errno::IO));
        }
        let Some(node) = self.node_ref(ino) else { return Some(Answer::Failed(Errno::STALE)) };
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
    ) -> Option<Answer> {
        let holder = Holder { ino, flock: false, owner };
        match self.locks.close(holder).then(|| self.end_locks(now, holder)).flatten() {
            // The call goes out in any case; only stale mode does not wait for the reply.
            Some(call) if !self.answers_stale() => {
                self.wait(op, caller, call, crate::calls::ReplyKind::Reply, false)
            }
            _ => Some(Answer::Done),
        }
    }

    /// Releases the locks that end with an open file; `flock` is its flock(2) owner, if it was used as one.
    pub(crate) fn locks_end_with(&mut self, now: Time, ino: u64, fh: Fh, flock: Option<u64>) {
        let mut gone = self.locks.file_gone(ino, fh);
        gone.extend(flock.map(|owner| Holder { ino, flock: true, owner }));
        for holder in gone {
            if self.locks.close(holder) {
                self.end_locks(now, holder);
            }
        }
    }

    fn end_locks(&mut self, now: Time, holder: Holder) -> Option<nigh_types::CallId> {
        // A lost session has no locks.
        (self.standing != SessionState::Lost).then_some(())?;
        self.end_range(now, holder, 0, u64::MAX)
    }

    fn end_range(&mut self, now: Time, holder: Holder, start: u64, end: u64) -> Option<nigh_types::CallId> {
        let Holder { ino, flock, owner } = holder;
        let node = self.node_ref(ino)?;
        let purpose = CallKind::Unlock { holder, whole_after: None, closing: true };
        Some(self.send(now, None, purpose, Call::Unlock { node, owner, flock, start, end }))
    }

    pub(crate) fn lock_arrived(&mut self, now: Time, flight: &InflightCall, response: &Response) -> Answer {
        let CallKind::Lock { holder, range, cancelled, .. } = flight.purpose else {
            return Answer::Failed(Errno::PROTO);
        };
        let granted = response.result == Ok(Reply::Done);
        let mut lost = false;
        if let Some(held) = self.locks.holders.get_mut(&holder) {
            held.calls = held.calls.saturating_sub(1);
            lost = held.lost;
            if granted && !lost && !flight.waiters.is_empty() {
                held.grants += 1;
                held.holds = true;
                held.ranges.set(range);
                held.unwanted.clear(range.start, range.end);
            } else if granted {
                // The caller is dead, or got another reply.
                held.unwanted.set(range);
            }
            self.set_right(now, holder);
        }
        match &response.result {
            _ if lost => Answer::Failed(Errno::IO),
            Ok(Reply::Done) => Answer::Done,
            Ok(_) => Answer::Failed(Errno::PROTO),
            Err(_) if cancelled => Answer::Failed(Errno::INTR),
            Err(errno) => Answer::Failed(*errno),
        }
    }

    pub(crate) fn unlock_arrived(&mut self, flight: &InflightCall, response: &Response) -> Answer {
        let CallKind::Unlock { holder, whole_after, closing } = flight.purpose else {
            return Answer::Failed(Errno::PROTO);
        };
        match response.result {
            Ok(Reply::Done) => {
                let same = |held: &Held| Some(held.grants) == whole_after && held.calls == 0 && !held.lost;
                if self.locks.holders.get(&holder).is_some_and(same) {
                    self.locks.holders.remove(&holder);
                }
                Answer::Done
            }
            // A close leaves the owner without locks, whatever the reply.
            _ if closing => Answer::Done,
            Ok(_) => Answer::Failed(Errno::PROTO),
            Err(errno) => Answer::Failed(errno),
        }
    }

    /// Ends a blocking lock request on a signal, by cancelling the call. The reply to the call answers the request; it
    /// may say that the lock was just granted.
    pub(crate) fn interrupt_lock(&mut self, op: OpId) {
        if let Some((_, Op::SetLock { wait: true, .. })) = self.queued_ops.get(&op) {
            self.queued_ops.remove(&op);
            return self.reply(op, Answer::Failed(Errno::INTR));
        }
        let Some(call) = self.waiting.get(&op).map(|waiting| waiting.call) else { return };
        let Some(flight) = self.flights.get_mut(&call) else { return };
        if let CallKind::Lock { wait: true, cancelled, .. } = &mut flight.purpose
            && !std::mem::replace(cancelled, true)
        {
            self.out.push_back(Output::Cancel(call));
            if self.standing != SessionState::Active {
                // The reply may be long in coming. A lock that is granted after all is released.
                self.abort(op, Errno::INTR);
            }
        }
    }

    /// Returns whether a request waits for a lock of another owner, at a remote that replies.
    pub(crate) fn waits_for_others(&self, op: OpId) -> bool {
        let flight = self.waiting.get(&op).and_then(|waiting| self.flights.get(&waiting.call));
        let waits = |flight: &InflightCall| matches!(flight.purpose, CallKind::Lock { wait: true, .. });
        self.standing == SessionState::Active && flight.is_some_and(waits)
    }

    /// Ends the lock waits that a signal has cancelled: the remote is away.
    pub(crate) fn end_signalled_waits(&mut self) {
        let signalled =
            |flight: &&InflightCall| matches!(flight.purpose, CallKind::Lock { cancelled: true, .. });
        let ops: Vec<OpId> =
            self.flights.values().filter(signalled).flat_map(|f| f.waiters.clone()).collect();
        ops.into_iter().for_each(|op| self.abort(op, Errno::INTR));
    }
}

#[cfg(test)]
mod tests;
