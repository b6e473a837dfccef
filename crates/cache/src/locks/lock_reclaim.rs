//! Reclaim of locks, locks that could not be reclaimed, and locks that were granted too late.

use crate::cache::Cache;
use crate::calls::CallKind;
use crate::op::Fh;
use crate::open::{Correction, LockOwner};
use nigh_types::{Call, Errno, LockInfo, NodeId, Reply, Response, Time};
use std::collections::BTreeSet;

impl Cache {
    /// Reclaims a lock of a session that the remote has forgotten.
    pub(crate) fn reclaim_lock(&mut self, now: Time, holder: LockOwner, range: LockInfo) -> bool {
        let other = |id: NodeId| {
            self.open
                .locks
                .files_of(holder)
                .any(|fh| self.open.files.get(*fh).is_some_and(|f| f.generation != id.generation))
        };
        if self.node_ref(holder.ino).is_none_or(|place| other(place.node)) {
            self.fail_owner(holder);
            return false;
        }
        self.send_lock(now, holder, range, CallKind::ReclaimLock { holder, range })
    }

    /// Sends a lock call. False: no path leads to the file any more.
    fn send_lock(&mut self, now: Time, holder: LockOwner, range: LockInfo, purpose: CallKind) -> bool {
        let Some(node) = self.node_ref(holder.ino) else { return false };
        let (LockOwner { flock, owner, .. }, LockInfo { start, end, kind, pid }) = (holder, range);
        let reclaim = purpose.is_reclaim();
        let call = Call::Lock { node, owner, flock, kind, start, end, wait: false, pid, reclaim };
        self.send(now, None, purpose, call);
        true
    }

    pub(crate) fn on_reclaim_lock_reply(
        &mut self,
        now: Time,
        holder: LockOwner,
        range: LockInfo,
        response: &Response,
    ) {
        let errno = match &response.result {
            Ok(Reply::Done) => return self.on_lock_reclaimed(now, holder, range),
            Ok(_) => Errno::PROTO,
            Err(errno) => *errno,
        };
        let path = self.shown_path(holder.ino);
        tracing::warn!(target: "nigh::session", path, %errno, "a lock could not be taken again");
        self.fail_and_release(now, holder);
    }

    /// Handles a reclaimed lock. Its owner may have unlocked some of it meanwhile, or closed the file.
    fn on_lock_reclaimed(&mut self, now: Time, holder: LockOwner, range: LockInfo) {
        match self.open.locks.reclaimed(holder, range) {
            Some(true) => self.correct_remote(now, holder),
            Some(false) => {}
            None => drop(self.release_range(now, holder, range.start, range.end)),
        }
    }

    /// Marks an owner's locks as lost until it closes. Requests sent under the locks and without a reply fail, and are
    /// not done if they were not. True: the owner held some.
    fn fail_owner(&mut self, holder: LockOwner) -> bool {
        let files = self.open.locks.mark_lost(holder);
        files.as_ref().into_iter().for_each(|files| self.fail_requests_through(files));
        files.is_some()
    }

    /// Marks locks as lost and releases those that the owner may still hold, which would block all others. The release
    /// follows all reclaims.
    fn fail_and_release(&mut self, now: Time, holder: LockOwner) {
        if self.fail_owner(holder) {
            self.release_locks(now, holder);
        }
    }

    /// Fails requests that use these open files.
    pub(crate) fn fail_requests_through(&mut self, files: &BTreeSet<Fh>) {
        self.calls.ops_through(files).into_iter().for_each(|op| self.abort(op, Errno::IO));
    }

    /// Corrects the remote's state after unwanted locks were granted: a call says what the owner does hold.
    pub(super) fn correct_remote(&mut self, now: Time, holder: LockOwner) {
        for correction in self.open.locks.take_corrections(holder) {
            match correction {
                Correction::Release(part) => drop(self.release_range(now, holder, part.start, part.end)),
                Correction::Weaken(part) => {
                    let purpose = CallKind::Lock { holder, range: part, wait: false, cancelled: false };
                    if self.send_lock(now, holder, part, purpose) {
                        self.open.locks.begin_correction(holder);
                    }
                }
                Correction::Fail => self.fail_and_release(now, holder),
            }
        }
    }
}
