//! Begin, lapse, loss and restoration of the session: what ends with it, what waits, and which replies are given
//! meanwhile.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::config::OnDisconnect;
use crate::config::Prefetch;
use crate::op::{Caller, Op, OpReply, Output};
use crate::session::SessionState;
use nigh_types::{CallId, Errno, Name, OpId, SessionParams, Time};

impl Cache {
    /// Returns whether requests are answered from stale facts, and from nothing else.
    pub(crate) fn answers_stale(&self) -> bool {
        self.config.on_disconnect == OnDisconnect::Stale && self.session.is_away()
    }

    /// Returns whether replies, or the kernel's facts, may be stale.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        let served = self.config.on_disconnect == OnDisconnect::Stale || self.session.is_kernel_slow();
        self.answers_stale() || served && self.is_flushing_all()
    }

    /// Returns whether the kernel may still hold facts of ended grants.
    #[must_use]
    pub fn is_flushing_all(&self) -> bool {
        self.session.flush().is_some_and(|id| self.kernel.is_pending(id))
    }

    /// Returns whether replies of a new session have to wait: the kernel may hold facts of ended grants, and is not
    /// slow.
    pub(crate) fn waits_for_kernel(&self) -> bool {
        self.is_flushing_all() && !self.session.is_kernel_slow()
    }

    /// Returns whether a reply came before the kernel has dropped its facts. Reclaims wait for nothing.
    pub(crate) fn is_deferred(&self, call: CallId) -> bool {
        let waits = |flight: &InflightCall| {
            !(flight.purpose.is_reclaim() || matches!(flight.purpose, CallKind::ResolvePath { .. }))
        };
        self.session.state() == SessionState::Reclaiming && self.calls.get(call).is_some_and(waits)
    }

    /// Handles a request without a session.
    pub(crate) fn start_disconnected(
        &mut self,
        now: Time,
        id: OpId,
        caller: Caller,
        op: Op,
    ) -> Option<OpReply> {
        if !self.answers_stale() {
            self.calls.queue(id, caller, op);
            return None;
        }
        match refused_while_stale(&op) {
            Some(errno) => Some(OpReply::Failed(errno)),
            None => self.start(now, id, caller, op),
        }
    }

    /// Handles the replies and requests that waited for a session and the kernel.
    pub(crate) fn start_queued(&mut self, now: Time) {
        for (call, response) in self.session.take_deferred() {
            self.handle_response(now, call, response);
        }
        for (op, (caller, what)) in self.calls.take_queued() {
            let pages = what.pages();
            if let Some(answer) = self.start(now, op, caller, what) {
                self.counters.waits += 1;
                self.reply(op, answer);
                self.drop_after_reply(&[op], pages);
            }
        }
        // The kernel left out pages that a write had locked: their unwritten parts are stale.
        self.calls.drop_pages_of_all();
    }

    /// Ends all grants: the term has run out. Calls in flight stay in flight.
    pub(crate) fn handle_lapsed(&mut self, now: Time, why: &str) {
        if self.session.is_attached() {
            self.cancel_all_jobs(now);
            tracing::warn!(target: "nigh::session", why, "the server is away for longer than its term");
            self.on_grants_ended();
            self.leave_active(now, SessionState::Expired);
        }
    }

    /// Ends the session: no call in flight gets a reply.
    pub(crate) fn handle_lost(&mut self, now: Time, why: &str) {
        tracing::warn!(target: "nigh::session", why, "the session is lost");
        let stood = self.session.is_attached();
        self.calls.ids().into_iter().for_each(|call| self.log_unknown_outcome(call));
        let mut left_out = Vec::new();
        for flight in self.calls.take_all() {
            let pages = flight.purpose.pages().filter(|_| flight.drop_data);
            if let Some(sequence) = flight.sequence {
                self.calls.finish_mutation(sequence);
            }
            let answer =
                if flight.purpose.releases_locks() { OpReply::Done } else { OpReply::Failed(Errno::IO) };
            self.reply_all(&flight.waiters, &answer);
            left_out.push((flight.waiters, pages));
        }
        self.session.take_deferred();
        self.prefetch.forget();
        self.open.names.forget();
        self.store.dirs_mut().for_each(|directory| directory.listing = None);
        self.open.locks.mark_all_lost();
        self.open.locks.forget_calls();
        self.forget_session();
        if stood {
            self.on_grants_ended();
            self.leave_active(now, SessionState::Lost);
        } else {
            self.session.lose();
        }
        left_out.into_iter().for_each(|(ops, pages)| self.drop_after_reply(&ops, pages));
    }

    /// Drops messages to a session that is forgotten: they mean nothing to another one.
    fn forget_session(&mut self) {
        self.kernel.forget_actions();
        self.session.forget();
        self.open.locks.forget_unwanted();
    }

    /// Ends all grants: replies to calls in flight are not cached.
    fn on_grants_ended(&mut self) {
        self.counters.lapses += 1;
        self.watches.note_gap(self.clock);
        self.statfs_cache = None;
        self.calls.mark_all_grants_ended();
        self.calls.queue_all(self.store.suspended.clear());
    }

    /// Drops all facts, here and in the kernel. `unbroken`: the grants end before their time, with a session that is
    /// forgotten.
    fn flush_all(&mut self, unbroken: bool) {
        self.flush_invalidations();
        let flush = self.drop_everything(unbroken);
        self.session.begin_flush(flush);
    }

    fn leave_active(&mut self, now: Time, to: SessionState) {
        let stale = self.config.on_disconnect == OnDisconnect::Stale;
        if !stale {
            // Handles released by this are released as in an active session.
            self.flush_all(false);
        }
        self.session.leave(to);
        self.end_signalled_waits();
        if !stale {
            return;
        }
        self.mark_facts_stale();
        self.calls.waiting_ops().into_iter().for_each(|op| self.abort(op, Errno::IO));
        for (op, (caller, what)) in self.calls.take_queued() {
            let pages = what.pages();
            if let Some(answer) = self.start_disconnected(now, op, caller, what) {
                self.reply(op, answer);
                self.drop_after_reply(&[op], pages);
            }
        }
    }

    /// Handles a new session. Without `kept` it knows no open file and no lock.
    pub(crate) fn handle_session(&mut self, now: Time, session: SessionParams, kept: bool) {
        match self.session.state() {
            SessionState::Active | SessionState::Reclaiming => {
                self.cancel_all_jobs(now);
                self.on_grants_ended();
                self.flush_all(!kept);
            }
            // Drops facts that were served after their grants had ended.
            SessionState::Expired | SessionState::Lost
                if self.config.on_disconnect == OnDisconnect::Stale =>
            {
                self.flush_all(false);
            }
            _ => {}
        }
        let first = self.session.state() == SessionState::Connecting;
        let same = first
            || (self.store.key() == session.cookie_key
                && self.store.id_of(self.store.root()) == Some(session.root));
        self.session.begin_reclaiming();
        if !kept {
            self.forget_session();
            self.forget_reclaims();
            self.requeue_writebacks();
        }
        if !same {
            self.on_export_replaced();
        }
        self.apply_session_params(session);
        if kept {
            let unreleased = self.session.take_unreleased();
            self.release_handles(unreleased);
            self.pin_open_all();
        } else if !first {
            self.reclaim_all(now);
        }
        self.session.limit_flush(now, self.is_flushing_all());
        self.finish_reclaim(now);
    }

    /// Prefetches the root's attributes, which callers ask for first, if prefetch is on.
    pub fn prefetch_root(&mut self, now: Time) {
        self.clock = now;
        if self.prefetch.is_possible() && self.config.prefetch != Prefetch::Off && self.session.is_attached()
        {
            let _ = self.fetch_attr(now, self.store.root());
        }
    }

    fn apply_session_params(&mut self, session: SessionParams) {
        if self.store.key() != session.cookie_key {
            // The server lost the secrets from which it makes ids, or is another one: it would take our ids for forged.
            self.store.invalidate_all_ids();
        }
        self.session.apply(&session);
        self.prefetch.set_possible(session.supports_prefetch);
        self.store.set_export(session.root.ino, session.cookie_key);
        let root = self.inode(session.root);
        root.nlookup = root.nlookup.max(1);
    }

    /// Answers a request without its call: `INTR`, because its caller is dead or the wait was interrupted, or `IO`. A
    /// call that changes something goes on, and its reply is applied.
    pub(crate) fn abort(&mut self, op: OpId, errno: Errno) {
        let mut answer = OpReply::Failed(errno);
        if let Some(what) = self.calls.remove_queued(op) {
            self.reply(op, answer);
            return self.drop_after_reply(&[op], what.pages());
        }
        if self.store.suspended.abort(op) {
            return self.reply(op, answer);
        }
        if self.deliver_now(op) {
            return;
        }
        let Some(waiting) = self.calls.remove_waiter(op) else { return };
        let away = !self.session.is_attached();
        let Some(flight) = self.calls.get_mut(waiting.call) else { return self.reply(op, answer) };
        flight.waiters.retain(|&waiter| waiter != op);
        let ends_locks = flight.purpose.releases_locks();
        if ends_locks && errno == Errno::IO {
            // A close leaves the owner without locks, whatever the reply.
            answer = OpReply::Done;
        }
        let told = matches!(flight.purpose, CallKind::Lock { cancelled: true, .. });
        // An unlock goes on whether a request waits for it or not.
        let goes_on = told
            || matches!(
                flight.purpose,
                CallKind::List { .. } | CallKind::ListNames { .. } | CallKind::Unlock { .. }
            );
        let cancel = (flight.waiters.is_empty() && !goes_on).then(|| flight.purpose.clone());
        let left_out = flight.drop_data.then(|| flight.purpose.pages()).flatten();
        if away || errno == Errno::IO {
            self.log_unknown_outcome(waiting.call);
        }
        self.reply(op, answer);
        self.drop_after_reply(&[op], left_out);
        if let Some(purpose) = cancel {
            // New requests must not join the cancelled call: it is answered `EINTR`.
            self.calls.leave_joins(waiting.call, &purpose);
            self.out.push_back(Output::Cancel(waiting.call));
        }
    }

    /// Logs a change that was sent, whose caller does not learn the outcome.
    fn log_unknown_outcome(&self, call: CallId) {
        let Some(flight) = self.calls.get(call).filter(|flight| flight.is_mutation()) else { return };
        let names = flight.purpose.names().into_iter();
        let mut paths: Vec<String> = names.map(|(dir, name)| self.shown_name(dir, name)).collect();
        match flight.purpose {
            CallKind::Open { ino, .. } | CallKind::Change { ino, .. } | CallKind::Write { ino, .. } => {
                paths.push(self.shown_path(ino));
            }
            _ => {}
        }
        let (operation, path) = (flight.call_name, paths.join(" to "));
        tracing::warn!(target: "nigh::unknown", operation, path, "it may have taken effect, or yet take effect");
    }

    fn shown_name(&self, dir: u64, name: &Name) -> String {
        format!("{}/{}", self.shown_path(dir), String::from_utf8_lossy(name.as_bytes()))
    }

    /// Sets the mount point, with which paths in the log begin.
    pub fn show_paths_below(&mut self, mountpoint: &str) {
        mountpoint.clone_into(&mut self.shown_root);
    }

    /// Returns an inode's path below the mount point, for log lines.
    pub(crate) fn shown_path(&self, ino: u64) -> String {
        let names = self.store.id_of(ino).and_then(|id| self.path_to(id));
        let Some(names) = names else { return format!("inode {ino} of {}", self.shown_root) };
        let names = names.iter().map(|name| String::from_utf8_lossy(name.as_bytes()));
        names.fold(self.shown_root.clone(), |path, name| format!("{path}/{name}"))
    }
}

/// Returns the errno of requests that stale facts cannot answer.
fn refused_while_stale(op: &Op) -> Option<Errno> {
    match op {
        Op::SetAttr { .. }
        | Op::Symlink { .. }
        | Op::Mknod { .. }
        | Op::Mkdir { .. }
        | Op::Unlink { .. }
        | Op::Rmdir { .. }
        | Op::Rename { .. }
        | Op::Link { .. }
        | Op::Create { .. }
        | Op::Tmpfile { .. }
        | Op::Write { .. }
        | Op::SetXattr { .. }
        | Op::RemoveXattr { .. }
        | Op::Fallocate { .. }
        | Op::CopyRange { .. } => Some(Errno::ROFS),
        Op::Open { access, .. } if access.write || access.truncate => Some(Errno::ROFS),
        Op::SetLock { .. } | Op::Unlock { .. } | Op::TestLock { .. } | Op::Fsync { .. } => Some(Errno::IO),
        _ => None,
    }
}
