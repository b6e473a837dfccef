//! File locks. The remote owns the lock table. The cache records which owners may hold locks, so that closing a file
//! costs nothing without one, and what they hold, to reclaim it from a remote that has forgotten it. See
//! docs/decisions/0011-locks.md.

mod lock_reclaim;

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::op::{Caller, Fh, LockSpan, Op, OpReply, Output};
use crate::open::LockOwner;
use crate::session::SessionState;
use nigh_types::{Call, Errno, LockInfo, LockKind, OpId, Reply, Response, Time};

/// The last byte that the kernel locks (`OFFSET_MAX`): a lock up to it goes to the end of the file.
const LAST_BYTE: u64 = i64::MAX.cast_unsigned();

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
        if self.open.locks.is_lost(holder) {
            return Some(OpReply::Failed(Errno::IO));
        }
        if self.open.files.get(fh).is_none() {
            return Some(OpReply::Failed(Errno::BADF));
        }
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        self.open.locks.begin_call(holder, fh, flock.then_some(kind));
        if let Some(inode) = self.store.inode_mut(ino).filter(|_| !flock) {
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
        let Some(grants) = self.open.locks.grants_of(holder) else { return Some(OpReply::Done) };
        if self.open.locks.is_lost(holder) {
            return Some(OpReply::Failed(Errno::IO));
        }
        let whole = flock || start == 0 && end >= LAST_BYTE;
        let purpose = CallKind::Unlock { holder, whole_after: whole.then_some(grants), closing: false };
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        let all = if flock { (0, u64::MAX) } else { (start, end) };
        self.open.locks.unlock(holder, all);
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
        if self.open.locks.is_lost(LockOwner { ino, flock, owner }) {
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
        match self.open.locks.close(holder).then(|| self.release_locks(now, holder)).flatten() {
            // The call goes out in any case; only stale mode does not wait for the reply.
            Some(call) if !self.answers_stale() => {
                self.wait(op, caller, call, crate::calls::ReplyKind::Reply, false)
            }
            _ => Some(OpReply::Done),
        }
    }

    /// Releases the locks that end with an open file; `flock` is its flock(2) owner, if it was used as one.
    pub(crate) fn release_with_file(&mut self, now: Time, ino: u64, fh: Fh, flock: Option<u64>) {
        let mut gone = self.open.locks.file_gone(ino, fh);
        gone.extend(flock.map(|owner| LockOwner { ino, flock: true, owner }));
        for holder in gone {
            if self.open.locks.close(holder) {
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
        let known = self.open.locks.end_call(holder, range, granted, !flight.waiters.is_empty());
        if known.is_some() {
            self.correct_remote(now, holder);
        }
        let lost = known == Some(true);
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
                self.open.locks.end_whole_unlock(holder, whole_after);
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
