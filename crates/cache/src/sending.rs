//! Calls: how they are sent and waited for, and where their replies go.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, ReplyKind, Waiter};
use crate::op::{Caller, OpReply, Output};
use nigh_types::{Call, CallId, Errno, Handle, OpId, Response, Time};

impl Cache {
    /// Sends a call without a waiter.
    pub(crate) fn send(
        &mut self,
        now: Time,
        caller: Option<Caller>,
        purpose: CallKind,
        call: Call,
    ) -> CallId {
        let id = self.calls.new_id();
        if self.answers_stale() && !purpose.releases_locks() {
            // The call is not sent, and no request waits for it: see `wait`.
            return id;
        }
        let name = call.is_mutation().then(|| {
            let leaving = self.suspend_victims(&purpose);
            self.calls.begin_mutation(leaving)
        });
        let handled = match &call {
            Call::Read { handle, .. } | Call::Write { handle, .. } => handle.is_some(),
            Call::ResolvePath { .. } | Call::Prefetch { .. } | Call::ListNames { .. } => true,
            _ => false,
        };
        let goes = self.expected_victim(&purpose);
        tracing::trace!(target: "nigh::fetch", call = id.0, kind = call.type_name());
        self.calls.insert(
            id,
            InflightCall {
                handles: handles_of(&call),
                caller,
                resend: (!handled).then(|| call.clone()),
                sequence: name.map(|n| n.sequence),
                victim_dir: goes,
                ..InflightCall::new(purpose, call.type_name(), now)
            },
        );
        self.out.push_back(Output::Call { id, caller, mutation_id: name, call });
        id
    }

    /// Makes a request wait for a call.
    pub(crate) fn wait(
        &mut self,
        op: OpId,
        caller: Caller,
        call: CallId,
        want: ReplyKind,
        joined: bool,
    ) -> Option<OpReply> {
        if self.answers_stale() {
            return Some(OpReply::Failed(Errno::IO));
        }
        self.counters.misses += 1;
        let waiter = Waiter { call, caller, want, joined, reply_may_predate: joined, open_files: [None; 2] };
        self.calls.wait(op, waiter);
        None
    }

    /// Resends a call for late waiters: a reply without a grant was composed before they came.
    pub(crate) fn resend_for_joiners(&mut self, now: Time, late: Vec<OpId>, purpose: CallKind, call: Call) {
        if late.is_empty() {
            return;
        }
        let id = self.send(now, None, purpose.clone(), call);
        self.calls.move_waiters(late, id);
        self.calls.enter_joins(id, purpose);
    }

    /// Sends a call for one request.
    pub(crate) fn send_for(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        purpose: CallKind,
        call: Call,
    ) -> Option<OpReply> {
        let on_behalf = (call.is_mutation() || matches!(call, Call::Open { .. })).then_some(caller);
        let id = self.send(now, on_behalf, purpose, call);
        self.wait(op, caller, id, ReplyKind::Reply, false)
    }

    /// Replies to a waiting request.
    pub(crate) fn reply_to(&mut self, op: OpId, answer: OpReply) {
        if let Some(waiting) = self.calls.remove_waiter(op) {
            self.counters.waits += 1;
            self.counters.joins += u64::from(waiting.joined);
            self.reply(op, answer);
        }
    }

    pub(crate) fn reply_all(&mut self, waiters: &[OpId], answer: &OpReply) {
        for &op in waiters {
            self.reply_to(op, answer.clone());
        }
    }

    /// Handles a call's response, or a chunk of it.
    pub(crate) fn handle_response(&mut self, now: Time, id: CallId, response: Response) {
        if let Some(&CallKind::List { dir }) = self.calls.get(id).map(|flight| &flight.purpose) {
            // A deadline that passed in mid-listing detaches the entries so far, before more come.
            self.live_directory(now, dir);
        }
        let Some(mut flight) = self.calls.remove(id) else { return };
        let lost_its_way = response.result == Err(Errno::STALE) && !flight.is_unwanted_lock();
        if lost_its_way && self.resolve_again(now, id, &mut flight) {
            self.calls.insert(id, flight);
            return;
        }
        if let CallKind::List { dir } = flight.purpose {
            if let Some(flight) = self.on_listing_chunk(now, id, dir, flight, response) {
                self.calls.insert(id, flight);
            }
            return self.after_listing_chunk(now, dir);
        }
        if let CallKind::ListNames { dir, fh } = flight.purpose {
            return self.on_names_reply(now, id, (dir, fh), flight, response);
        }
        if matches!(flight.purpose, CallKind::Prefetch) {
            self.on_prefetch_reply(now, id, flight, response);
            return self.trim(now);
        }
        if let Some(sequence) = flight.sequence {
            self.calls.finish_mutation(sequence);
        }
        self.calls.leave_joins(id, &flight.purpose);
        self.refresh_grant_ids(&flight, &response.grants);
        self.handle_reply(now, flight, response);
        self.trim(now);
    }

    /// Sends a `ResolvePath` when the remote cannot find an inode: gives it the names from the root. Once for each
    /// inode that the call names.
    fn resolve_again(&mut self, now: Time, id: CallId, flight: &mut InflightCall) -> bool {
        let Some(call) = &flight.resend else { return false };
        let anchors = crate::node_ref::nodes_to_resolve(call);
        let (node, names) = match (anchors.get(flight.resolve_attempts), anchors[0]) {
            (Some(Some(node)), _) => (*node, self.path_to(*node)),
            // A reclaimed inode may have moved by a change that took effect and has no reply yet.
            (_, Some(node)) if flight.purpose.is_reclaim() && flight.resolve_attempts == 1 => {
                let moved = self.path_by(node, |cache, at| cache.parent_after_renames(at));
                (node, moved.filter(|moved| self.path_to(node).as_ref() != Some(moved)))
            }
            _ => return false,
        };
        let Some(names) = names else { return false };
        flight.resolve_attempts += 1;
        self.send(now, None, CallKind::ResolvePath { then: id }, Call::ResolvePath { node, names });
        true
    }

    /// Handles the reply to a `ResolvePath`: resends the call that waited for it, or fails it for good.
    pub(crate) fn on_resolved(&mut self, now: Time, then: CallId, result: Result<(), Errno>) {
        let Some(flight) = self.calls.get_mut(then) else { return };
        if flight.is_abandoned() {
            // The call was not sent yet, so the change is not made (S8).
            flight.resend = None;
            return self.handle_response(now, then, Response::plain(Err(Errno::INTR)));
        }
        match (result, &flight.resend) {
            (Ok(()), Some(call)) if !flight.is_unwanted_lock() => {
                flight.sent = now;
                let (call, caller) = (call.clone(), flight.caller);
                let name = flight.sequence.map(|s| self.calls.mutation_id(s));
                self.out.push_back(Output::Call { id: then, caller, mutation_id: name, call });
            }
            _ => {
                if !flight.purpose.is_reclaim() {
                    flight.resend = None;
                }
                self.handle_response(now, then, Response::plain(Err(Errno::STALE)));
            }
        }
    }
}

/// Returns the handles that a call names.
fn handles_of(call: &Call) -> [Option<Handle>; 2] {
    match call {
        Call::Read { handle, .. }
        | Call::Write { handle, .. }
        | Call::Seek { handle, .. }
        | Call::SetAttr { handle, .. }
        | Call::Fallocate { handle, .. }
        | Call::Fsync { handle, .. } => [*handle, None],
        Call::CopyRange { from_handle, to_handle, .. } => [*from_handle, *to_handle],
        _ => [None, None],
    }
}
