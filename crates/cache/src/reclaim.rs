//! Reclaim of open files and locks in a session that has forgotten them. Files go first, since only an open file may be
//! locked.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, OpenParams};
use crate::op::{Fh, Op, OpReply, Output};
use crate::open::OpenFile;
use crate::session::SessionState;
use crate::store::ChangeToken;
use nigh_types::{Access, Call, CallId, Errno, Handle, NodeRef, OpId, Reply, Response, Time};

/// Access mode of a handle that pins an inode: reading.
const PIN_ACCESS: Access =
    Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };

impl Cache {
    /// Sends reclaim calls for everything that was open. Locks follow.
    pub(crate) fn reclaim_all(&mut self, now: Time) {
        self.session.begin_reclaims();
        self.assign_pins();
        let mut files = Vec::new();
        for (fh, file) in self.open.files.iter() {
            files.extend(
                file.handle.map(|handle| (file.ino, Some(fh), handle, file.access, Some(file.caller))),
            );
        }
        let mut pins: Vec<_> = self.store.inodes().filter_map(|i| Some((i.id.ino, i.pin_handle?))).collect();
        pins.sort_unstable();
        files.extend(pins.into_iter().map(|(ino, handle)| (ino, None, handle, PIN_ACCESS, None)));
        for (ino, fh, handle, access, caller) in files {
            let generation = fh.and_then(|fh| self.open.files.get(fh)).map(|file| file.generation);
            match self.node_ref(ino) {
                Some(node) if generation.is_none_or(|opened| opened == node.node.generation) => {
                    self.session.add_reclaim();
                    let purpose = CallKind::Reopen { ino, fh, handle };
                    self.send(now, caller, purpose, Call::Reopen { node, handle, access });
                }
                // Another inode has the number by now.
                _ => self.mark_file_lost(ino, fh, handle, Errno::STALE),
            }
        }
        self.reclaim_deferred(now);
        self.reclaim_locks(now);
    }

    /// Reclaims locks when all files have their replies: the server may grant a lock only on an open file.
    fn reclaim_locks(&mut self, now: Time) {
        if !self.session.take_lock_reclaims() {
            return;
        }
        let asked = self.calls.values().filter_map(|flight| match flight.purpose {
            CallKind::Lock { holder, range, .. } if !flight.is_unwanted_lock() => Some((holder, range)),
            _ => None,
        });
        for (holder, range) in self.open.locks.locks_to_reclaim(&asked.collect::<Vec<_>>()) {
            if self.reclaim_lock(now, holder, range) {
                self.session.add_reclaim();
            }
        }
    }

    /// Handles deferred replies of the forgotten session. Files that they opened are reclaimed with the rest, under the
    /// same handle. A lock call is sent again, since its caller has no reply yet.
    fn reclaim_deferred(&mut self, now: Time) {
        let mut left = Vec::new();
        for (call, mut response) in self.session.take_deferred() {
            let Some(flight) = self.calls.get(call) else { continue };
            let is_lock = matches!(flight.purpose, CallKind::Lock { .. }) && response.result.is_ok();
            if is_lock && self.resend_call(now, call) {
                continue;
            }
            let opened = self.calls.get(call).and_then(|flight| opened_file_of_reply(flight, &response));
            match (&mut response.result, opened) {
                (result, _) if is_lock => *result = Err(Errno::INTR),
                // A holder that has the removed file open reclaims it under a handle that the client assigned.
                (Ok(Reply::Removed { pinned: kept, .. } | Reply::Renamed { pinned: kept, .. }), _) => {
                    *kept = None
                }
                (_, Some((node, handle, file))) => {
                    self.session.add_reclaim();
                    let access = Access { truncate: false, ..file.access };
                    let purpose = CallKind::Reopen { ino: node.node.ino, fh: None, handle };
                    self.send(now, Some(file.caller), purpose, Call::Reopen { node, handle, access });
                }
                _ => {}
            }
            left.push((call, response));
        }
        self.session.set_deferred(left);
    }

    /// Sends a call again. Returns false if no request waits for it.
    fn resend_call(&mut self, now: Time, id: CallId) -> bool {
        let Some(flight) = self.calls.get_mut(id).filter(|flight| !flight.is_unwanted_lock()) else {
            return false;
        };
        let Some(call) = flight.resend.clone() else { return false };
        flight.sent = now;
        let caller = flight.caller;
        self.out.push_back(Output::Call { id, caller, mutation_id: None, call });
        true
    }

    /// Returns the deferred reply that opened a file under this handle.
    fn deferred_open(&mut self, handle: Handle) -> Option<&mut Response> {
        self.session.deferred_mut().find(|response| opened_handle(response) == Some(handle))
    }

    /// Forgets reclaim calls in flight: another session takes over.
    pub(crate) fn forget_reclaims(&mut self) {
        self.calls.forget_reclaims();
    }

    /// Returns whether a handle is being reclaimed.
    pub(crate) fn is_reclaiming(&self, handle: Handle) -> bool {
        let claims = |flight: &InflightCall| matches!(flight.purpose, CallKind::Reopen { handle: h, .. } if h == handle);
        self.session.has_pending_reclaims() && self.calls.values().any(claims)
    }

    /// Handles the reply to a reclaim call.
    pub(crate) fn on_reclaim_reply(&mut self, now: Time, flight: &InflightCall, response: &Response) {
        match flight.purpose {
            CallKind::Reopen { ino, fh, handle } => {
                self.on_reopen_reply(now, flight, (ino, fh, handle), response)
            }
            CallKind::ReclaimLock { holder, range } => {
                self.on_reclaim_lock_reply(now, holder, range, response)
            }
            _ => return,
        }
        self.session.end_reclaim();
        self.reclaim_locks(now);
        self.finish_reclaim(now);
    }

    fn on_reopen_reply(
        &mut self,
        now: Time,
        flight: &InflightCall,
        (ino, fh, handle): (u64, Option<Fh>, Handle),
        response: &Response,
    ) {
        let attr = match &response.result {
            Ok(Reply::Opened { handle: opened, attr }) if *opened == handle => *attr,
            Ok(_) => return self.mark_file_lost(ino, fh, handle, Errno::PROTO),
            Err(errno) => return self.mark_file_lost(ino, fh, handle, *errno),
        };
        if self.deferred_open(handle).is_some() {
            return;
        }
        let wanted = match fh {
            Some(fh) => self.open.files.get(fh).is_some_and(|file| file.handle == Some(handle)),
            None => self.store.inode(ino).is_some_and(|inode| inode.pin_handle == Some(handle)),
        };
        match self.store.id_of(ino).filter(|_| wanted) {
            Some(id) => {
                self.apply_attr(now, flight, id, attr, &response.grants);
                self.begin_data_grant(now, flight, id, Some(ChangeToken::of(&attr)), response);
                // A file that is open for reading only has no write-back.
                if fh.and_then(|fh| self.open.files.get(fh)).is_some_and(|file| file.access.write) {
                    self.keep_pages_in_new_session(now, flight, (id, &attr), response);
                }
            }
            None => self.release_handle(handle),
        }
    }

    /// Ends reclaiming once all is reclaimed and the kernel has dropped its facts: other clients may make changes, and
    /// queued requests begin.
    pub(crate) fn finish_reclaim(&mut self, now: Time) {
        if self.session.state() != SessionState::Reclaiming
            || self.session.has_pending_reclaims()
            || self.waits_for_kernel()
        {
            return;
        }
        if self.session.finish_reclaim() {
            self.out.push_back(Output::Reclaimed);
        }
        self.start_queued(now);
        self.drop_stale_pages();
    }

    /// Marks an open file as lost: it could not be reclaimed. It fails until it is closed, and so do its requests in
    /// flight. A file opened without a handle may still be read by its node reference, if it still exists.
    fn mark_file_lost(&mut self, ino: u64, fh: Option<Fh>, handle: Handle, errno: Errno) {
        if let Some(response) = self.deferred_open(handle) {
            response.result = Err(errno);
        }
        let mut lost = Vec::new();
        match fh {
            Some(fh) => lost.push(fh),
            None => {
                let Some(inode) = self.store.inode_mut(ino).filter(|i| i.pin_handle == Some(handle)) else {
                    return;
                };
                inode.ext_mut().pin_handle = None;
                let id = inode.id;
                let pinned = |file: &OpenFile| file.ino == ino && file.lacks_handle_for(id);
                if errno == Errno::STALE {
                    lost.extend(self.open.files.iter().filter(|(_, file)| pinned(file)).map(|(fh, _)| fh));
                }
            }
        }
        for fh in &lost {
            let Some(had_handle) = self.open.files.lose(*fh) else { continue };
            if had_handle && let Some(inode) = self.store.inode_mut(ino) {
                inode.ext_mut().unpinned_opens += 1;
            }
            let path = self.shown_path(ino);
            tracing::warn!(target: "nigh::session", path, %errno, "an open file could not be opened again");
        }
        self.fail_requests_through(&lost.into_iter().collect());
        let needs = |flight: &&InflightCall| flight.handles.contains(&Some(handle));
        let waiters = self.calls.values().filter(needs).flat_map(|flight| flight.waiters.iter().copied());
        let waiters: Vec<OpId> = waiters.collect();
        waiters.into_iter().for_each(|op| self.abort(op, Errno::IO));
    }

    /// Fails all open files: the server exports another directory, or has lost the secrets from which it makes ids.
    pub(crate) fn on_export_replaced(&mut self) {
        tracing::error!(
            target: "nigh::session",
            "the server exports something else than what was mounted: what was open fails; unmount and mount again"
        );
        self.open.files.lose_all();
        let all = self.store.inodes_mut().filter_map(|inode| inode.ext_if_any());
        all.for_each(|more| (more.unpinned_opens, more.pin_handle) = (0, None));
        for file in self.open.files.values() {
            if let Some(inode) = self.store.inode_mut(file.ino) {
                inode.ext_mut().unpinned_opens += 1;
            }
        }
        self.open.locks.mark_all_lost();
        self.session.deferred_mut().for_each(|response| response.result = Err(Errno::IO));
        for call in self.calls.ids() {
            let Some(flight) = self.calls.get_mut(call) else { continue };
            let waiters = std::mem::take(&mut flight.waiters);
            let pages = flight.purpose.pages().filter(|_| flight.drop_data);
            self.reply_all(&waiters, &OpReply::Failed(Errno::IO));
            self.drop_after_reply(&waiters, pages);
            self.out.push_back(Output::Cancel(call));
        }
        self.open.names.forget();
    }

    /// Returns whether a request uses an open file that could not be reclaimed, or whose locks could not.
    pub(crate) fn is_lost(&self, op: &Op) -> bool {
        let lost =
            |fh: &Fh| self.open.locks.are_lost(*fh) || self.open.files.get(*fh).is_some_and(|file| file.lost);
        op.open_files().iter().flatten().any(lost)
    }
}

/// Returns the handle under which a reply says that a file was opened.
fn opened_handle(response: &Response) -> Option<Handle> {
    match &response.result {
        Ok(Reply::Opened { handle, .. }) => Some(*handle),
        Ok(Reply::Created { handle, .. }) => *handle,
        _ => None,
    }
}

/// Returns that handle with the file's node reference and open parameters.
fn opened_file_of_reply(flight: &InflightCall, response: &Response) -> Option<(NodeRef, Handle, OpenParams)> {
    let handle = opened_handle(response)?;
    let made = match &response.result {
        Ok(Reply::Created { entry, .. }) => Some(entry.id),
        _ => None,
    };
    match (&flight.purpose, &flight.resend, made) {
        (CallKind::Open { file, .. }, Some(Call::Open { node, .. }), None) => {
            Some((node.clone(), handle, *file))
        }
        (CallKind::Create { name, file: Some(file), .. }, Some(Call::Create { dir, .. }), Some(node)) => {
            Some((NodeRef { node, path_hint: Some((dir.node, name.clone())) }, handle, *file))
        }
        (CallKind::Tmpfile { file }, _, Some(node)) => Some((NodeRef::without_hint(node), handle, *file)),
        _ => None,
    }
}
