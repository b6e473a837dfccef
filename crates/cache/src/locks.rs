//! Locks. The remote keeps them; here stands only who may hold some, so that closing a file costs nothing
//! where nobody does. See docs/decisions/0011-locks.md.

use crate::cache::Cache;
use crate::flight::{Flight, Purpose};
use crate::op::{Answer, Caller, Fh, LockSpan, Op, Output};
use nigh_types::{Call, Errno, LockKind, OpId, Reply, Response, Time};
use std::collections::{BTreeMap, BTreeSet};

/// The last byte that the kernel locks (`OFFSET_MAX`): a lock up to it goes to the end of the file.
const LAST_BYTE: u64 = i64::MAX.cast_unsigned();

/// Whose locks on which inode. Owners of flock(2) locks are numbers of their own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Holder {
    ino: u64,
    flock: bool,
    owner: u64,
}

/// What is known of one holder.
#[derive(Debug, Default)]
struct Held {
    /// Open files through which it set locks.
    files: BTreeSet<Fh>,
    /// Its calls for locks that are under way.
    calls: u32,
    /// How many were granted, ever.
    grants: u64,
    /// Some may still be held.
    holds: bool,
    /// They went with a session.
    lost: bool,
}

/// Who may hold locks. A holder stands here from its first call for a lock until it has unlocked the whole
/// file, closes it, or was granted none.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    holders: BTreeMap<Holder, Held>,
    /// Open files on which lost locks were set: nothing is read or written through them.
    lost_files: BTreeSet<Fh>,
}

impl Locks {
    /// Whether a request goes through an open file whose locks were lost.
    pub(crate) fn are_lost(&self, op: &Op) -> bool {
        if self.lost_files.is_empty() {
            return false;
        }
        let lost = |fh: &Fh| self.lost_files.contains(fh);
        match op {
            Op::Read { fh, .. }
            | Op::Write { fh, .. }
            | Op::Fallocate { fh, .. }
            | Op::Seek { fh, .. }
            | Op::SetLock { fh, .. }
            | Op::SetAttr { fh: Some(fh), .. }
            | Op::Fsync { fh: Some(fh), .. } => lost(fh),
            Op::CopyRange { fh, to_fh, .. } => lost(fh) || lost(to_fh),
            _ => false,
        }
    }

    /// The session is over: who held something has lost it.
    pub(crate) fn lose_all(&mut self) {
        self.holders.retain(|_, held| held.holds || held.lost);
        for held in self.holders.values_mut() {
            (held.calls, held.holds, held.lost) = (0, false, true);
            self.lost_files.extend(&held.files);
        }
    }

    fn is_lost(&self, holder: Holder) -> bool {
        self.holders.get(&holder).is_some_and(|held| held.lost)
    }

    /// A holder closes the file. True: the remote must be told.
    fn close(&mut self, holder: Holder) -> bool {
        let Some(held) = self.holders.get_mut(&holder) else { return false };
        let tell = !held.lost && (held.holds || held.calls > 0);
        held.holds = false;
        if held.calls == 0 {
            let files = std::mem::take(&mut held.files);
            self.holders.remove(&holder);
            for fh in files {
                if !self.is_lost_by_another(fh) {
                    self.lost_files.remove(&fh);
                }
            }
        }
        tell
    }

    fn is_lost_by_another(&self, fh: Fh) -> bool {
        self.holders.values().any(|held| held.lost && held.files.contains(&fh))
    }

    /// An open file is gone. Those who set locks through it and through no other have closed it with its
    /// last descriptor: open file descriptions, and flock(2), whose locks end so.
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
        let Some(node) = self.place(ino) else { return Some(Answer::Failed(Errno::STALE)) };
        let held = self.locks.holders.entry(holder).or_default();
        held.files.insert(fh);
        held.calls += 1;
        if let Some(inode) = self.inodes.get_mut(&ino).filter(|_| !flock) {
            inode.locked = true;
        }
        let purpose = Purpose::Lock { holder, start, end, wait, cancelled: false };
        let call = Call::Lock { node, owner, flock, kind, start, end, wait, pid };
        self.ask(now, op, caller, purpose, call)
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
        let purpose = Purpose::Unlock { holder, whole_after: whole.then_some(held.grants), closing: false };
        let Some(node) = self.place(ino) else { return Some(Answer::Failed(Errno::STALE)) };
        self.ask(now, op, caller, purpose, Call::Unlock { node, owner, flock, start, end })
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
        let Some(node) = self.place(ino) else { return Some(Answer::Failed(Errno::STALE)) };
        let call = Call::GetLock { node, owner, flock, kind, start, end };
        self.ask(now, op, caller, Purpose::TestLock, call)
    }

    /// A process closes one of its descriptors: with that all its fcntl(2) locks on the file end. It waits
    /// until they have, so that nobody finds them who was told of it.
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
            Some(call) => self.wait(op, caller, call, crate::flight::Want::Reply, false),
            None => Some(Answer::Done),
        }
    }

    /// Ends the locks that go with an open file; `flock` is its number as an owner, if it was used as one.
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
        let Holder { ino, flock, owner } = holder;
        let node = self.place(ino)?;
        let purpose = Purpose::Unlock { holder, whole_after: None, closing: true };
        let call = Call::Unlock { node, owner, flock, start: 0, end: u64::MAX };
        Some(self.send(now, None, purpose, call))
    }

    /// Of a lock that nobody waits for any more, its caller being dead, the locked range is freed again: the
    /// cancellation came too late.
    pub(crate) fn lock_arrived(&mut self, now: Time, flight: &Flight, response: &Response) -> Answer {
        let Purpose::Lock { holder, start, end, cancelled, .. } = flight.purpose else {
            return Answer::Failed(Errno::PROTO);
        };
        let wanted = !flight.waiters.is_empty();
        if let Some(held) = self.locks.holders.get_mut(&holder) {
            held.calls = held.calls.saturating_sub(1);
            if response.result.is_ok() && wanted {
                held.grants += 1;
                held.holds = true;
            }
            if held.calls == 0 && !held.holds && !held.lost {
                self.locks.holders.remove(&holder);
            }
        }
        match &response.result {
            Ok(Reply::Done) if wanted => Answer::Done,
            Ok(Reply::Done) => {
                if let Some(node) = self.place(holder.ino) {
                    let Holder { owner, flock, .. } = holder;
                    let purpose = Purpose::Unlock { holder, whole_after: None, closing: true };
                    self.send(now, None, purpose, Call::Unlock { node, owner, flock, start, end });
                }
                Answer::Done
            }
            Ok(_) => Answer::Failed(Errno::PROTO),
            Err(_) if cancelled => Answer::Failed(Errno::INTR),
            Err(errno) => Answer::Failed(*errno),
        }
    }

    pub(crate) fn unlock_arrived(&mut self, flight: &Flight, response: &Response) -> Answer {
        let Purpose::Unlock { holder, whole_after, closing } = flight.purpose else {
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
            // Who closes a file holds nothing of it any more, come what may.
            _ if closing => Answer::Done,
            Ok(_) => Answer::Failed(Errno::PROTO),
            Err(errno) => Answer::Failed(errno),
        }
    }

    /// A signal ends the wait for a lock, if it is one: by cancelling the call. Its answer, which may be that
    /// the lock was just granted, is the request's.
    pub(crate) fn interrupt_lock(&mut self, op: OpId) {
        if let Some((_, Op::SetLock { wait: true, .. })) = self.parked.get(&op) {
            self.parked.remove(&op);
            self.out.push_back(Output::Answer { op, answer: Answer::Failed(Errno::INTR) });
            return;
        }
        let Some(call) = self.waiting.get(&op).map(|waiting| waiting.call) else { return };
        let Some(flight) = self.flights.get_mut(&call) else { return };
        if let Purpose::Lock { wait: true, cancelled, .. } = &mut flight.purpose
            && !std::mem::replace(cancelled, true)
        {
            self.out.push_back(Output::Cancel(call));
        }
    }
}

#[cfg(test)]
mod tests;
