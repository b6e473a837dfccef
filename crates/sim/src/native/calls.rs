//! The life of a call: it may wait for other clients, it is executed, and its reply is sent a little later.

use super::server::Server;
use super::session::{PendingReply, Work};
use nigh_lease::{Change, ChangeId, GrantRequest, Granted, Holder, LeaseKey, Object, ParkResult, ReadGrant};
use nigh_types::{
    Call, CallId, Errno, Grant, Handle, LeaseScope, Mode, NodeId, Request, Response, Span, Time, WriteFlags,
};

/// A call without a reply.
#[derive(Clone, Debug)]
pub(super) struct PendingCall {
    pub(super) session: u64,
    pub(super) call: CallId,
    pub(super) request: Request,
    /// The change that it has begun in the lease table.
    pub(super) change: Option<ChangeId>,
}

/// Returns a node's key in the lease table.
pub(super) fn key(node: NodeId, covers: LeaseScope) -> LeaseKey {
    LeaseKey { object: Object { filesystem: 1, ino: node.ino, birth: node.generation }, covers }
}

/// A request for a read grant on a file's data.
fn reading(holder: Holder, node: NodeId) -> GrantRequest {
    GrantRequest { holder, key: key(node, LeaseScope::Data), node, mode: Mode::Read }
}

impl Server {
    pub(super) fn request(&mut self, now: Time, id: u64, call: CallId, mut request: Request, again: bool) {
        if let (true, Call::Write { flags: WriteFlags { since: Some(since), .. }, .. }) =
            (again, &mut request.call)
        {
            // A grant named in it belongs to the session on which the request was first sent.
            since.under = None;
        }
        match &request.call {
            Call::Release { handles } => {
                let session = self.sessions.get_mut(&id).expect("it asks");
                let own: Vec<Handle> =
                    handles.iter().filter(|handle| session.handles.remove(handle)).copied().collect();
                self.tree.release(&own);
                return;
            }
            Call::PinOpen { handle, .. } => {
                self.tree.execute(now, &request);
                if self.tree.opened(*handle).is_some() {
                    self.sessions.get_mut(&id).expect("it asks").handles.insert(*handle);
                }
                return;
            }
            _ => {}
        }
        if again && self.answer_again(now, id, call, &request) {
            return;
        }
        let waits = self.grace.must_wait(&request.call);
        let job = PendingCall { session: id, call, request, change: None };
        if waits {
            self.counts.graced += 1;
            return self.grace.park(job);
        }
        let when = now.after(self.service());
        self.later(when, Work::Begin(job));
    }

    /// Replies from the remembered results of the client's forgotten sessions.
    fn answer_again(&mut self, now: Time, id: u64, call: CallId, request: &Request) -> bool {
        let Some(name) = request.mutation_id else { return false };
        let session = self.sessions.get_mut(&id).expect("it asks");
        let who = session.who;
        let adopt = |kept| {
            session.handles.insert(kept);
            Ok(kept)
        };
        let Some(replies) = self.reply_cache.get_mut(&who) else { return false };
        let Some(known) = replies.take(name.sequence) else { return false };
        if replies.count() == 0 {
            self.reply_cache.remove(&who);
        }
        let response = known.into_response(adopt);
        self.counts.again += 1;
        let due = PendingReply { session: id, who, call, sequence: Some(name.sequence), response };
        self.later(now, Work::Answer(due));
        true
    }

    /// Cancels a call: if it has to wait for other clients it is aborted.
    pub(super) fn cancel(&mut self, now: Time, id: u64, call: CallId) {
        if let Some(job) = self.take_back(id, call) {
            self.give_up(now, job);
        }
    }

    fn give_up(&mut self, now: Time, job: PendingCall) {
        self.end_change(now, job.change);
        self.answer(now, &job, vec![Response::plain(Err(Errno::INTR))]);
    }

    pub(super) fn end_change(&mut self, now: Time, change: Option<ChangeId>) {
        if let Some(change) = change {
            self.sequencer.handle_done(now, change);
            self.settle(now);
        }
    }

    /// Executes a call on a free thread, or parks it.
    pub(super) fn attempt(&mut self, now: Time, mut job: PendingCall) {
        let holder = Holder(job.session);
        match &job.request.call {
            Call::Read { node, .. } if self.tree.attr(node.node).is_some() => {
                let request = reading(holder, node.node);
                let given = match job.change {
                    Some(reader) => self.sequencer.take_granted(reader),
                    None => match self.sequencer.handle_read(now, request) {
                        ReadGrant::Granted(granted) => Some(granted),
                        ReadGrant::Refused => None,
                        ReadGrant::Waits(reader) => {
                            self.settle(now);
                            job.change = Some(reader);
                            return self.park(now, reader, job);
                        }
                    },
                };
                self.settle(now);
                self.execute(now, job, given);
            }
            Call::Fsync { node, .. } if job.change.is_none() => {
                let key = key(node.node, LeaseScope::Data);
                let change = self.sequencer.table_mut().handle_sync_barrier(now, holder, key);
                self.settle(now);
                job.change = Some(change);
                self.park(now, change, job);
            }
            call if call.is_mutation() && !matches!(call, Call::Fsync { .. }) => {
                let changes = self.changes(call);
                if changes.is_empty() && job.change.is_none() {
                    return self.execute(now, job, None);
                }
                let flush = call.is_write_back();
                let table = self.sequencer.table_mut();
                let change = match job.change {
                    Some(begun) => {
                        table.handle_extend(now, begun, &changes);
                        begun
                    }
                    None if flush => table.handle_write_back(now, holder, &changes),
                    None => table.handle_change(now, Some(holder), &changes),
                };
                job.change = Some(change);
                let ready = self.sequencer.table().is_ready(change);
                self.settle(now);
                match ready {
                    true => self.execute(now, job, None),
                    false => self.park(now, change, job),
                }
            }
            _ => self.execute(now, job, None),
        }
    }

    fn park(&mut self, now: Time, change: ChangeId, job: PendingCall) {
        match self.sequencer.park(change, job, |_| true) {
            ParkResult::Parked => self.counts.parked += 1,
            ParkResult::Ready(job) => self.later(now, Work::Begin(job)),
            ParkResult::Cancelled(job) => self.give_up(now, job),
        }
    }

    fn changes(&self, call: &Call) -> Vec<Change> {
        let change = |change: nigh_remote::model_fs::Change| Change {
            writes: change.covers == LeaseScope::Data,
            can_update: change.covers == LeaseScope::Attributes
                || change.covers == LeaseScope::Directory && !change.names.is_empty(),
            key: key(change.node, change.covers),
            names: change.names,
        };
        self.tree.affected(call).into_iter().map(change).collect()
    }

    fn execute(&mut self, now: Time, mut job: PendingCall, given: Option<Granted>) {
        let holder = Holder(job.session);
        let back = self.begin_write_back(now, &mut job);
        let before = written_node(&job.request.call).and_then(|node| self.tree.attr(node));
        let mut responses = self.affect(now, &job.request);
        if let (Some(node), Some(name)) = (written_node(&job.request.call), job.request.mutation_id)
            && self.tree.attr(node) != before
        {
            self.written.push((name.client, node.ino));
        }
        let mut given = given.map(|granted| (LeaseScope::Data, granted));
        if let Some(change) = job.change {
            let is_done = responses.iter().all(|response| response.result.is_ok());
            self.note_data(change, &job.request.call, back, is_done);
            // The holders that it waited for get the committed state.
            let table = self.sequencer.table_mut();
            let looked = table.observation_point();
            let is_last = table.handle_observed(change, looked);
            assert!(is_last, "nothing ends between an effect and its end");
            let changed =
                written_node(&job.request.call).filter(|_| responses.iter().all(|r| r.result.is_ok()));
            match changed {
                Some(node) => {
                    let granted = self.sequencer.handle_written(now, change, reading(holder, node));
                    given = granted.map(|granted| (LeaseScope::Data, granted));
                }
                None => self.sequencer.handle_done(now, change),
            }
            self.settle(now);
        }
        for response in &mut responses {
            let wanted = std::mem::take(&mut response.grants);
            response.grants =
                wanted.into_iter().filter_map(|g| self.grant(now, holder, g, &mut given)).collect();
            if let Some(handle) = response.opened_handle().copied() {
                self.sessions.get_mut(&job.session).expect("it asks").handles.insert(handle);
            }
        }
        if let Some((_, granted)) = given {
            self.sequencer.handle_withdraw(now, holder, &[granted.id]);
            self.settle(now);
        }
        self.answer(now, &job, responses);
    }

    /// Without latency, gives every change a distinct time.
    fn affect(&mut self, now: Time, request: &Request) -> Vec<Response> {
        if self.dice.is_some() || !request.call.is_mutation() {
            return self.tree.execute(now, request);
        }
        let responses = self.tree.execute(now.after(Span(self.effects + 1)), request);
        self.effects += u64::from(responses.iter().all(|response| response.result.is_ok()));
        responses
    }

    /// Returns the grant that the tree offers, if the lease table allows it; a grant from before the wait comes first.
    fn grant(
        &mut self,
        now: Time,
        holder: Holder,
        wanted: Grant,
        given: &mut Option<(LeaseScope, Granted)>,
    ) -> Option<Grant> {
        let term = self.sessions.get(&holder.0)?.term;
        let had = given.take_if(|(covers, _)| *covers == wanted.covers).map(|(_, granted)| granted);
        let Grant { node, covers, mode, .. } = wanted;
        let request = GrantRequest { holder, key: key(node, covers), node, mode };
        let granted = had.or_else(|| self.sequencer.handle_grant(now, request));
        self.settle(now);
        Some(granted?.into_grant(&request, term))
    }

    fn answer(&mut self, now: Time, job: &PendingCall, responses: Vec<Response>) {
        let Some(session) = self.sessions.get(&job.session) else { return };
        let (who, sequence) = (session.who, job.request.mutation_id.map(|name| name.sequence));
        // A change's reply takes its place in the stream at once: the locks on what it depends on are held until then.
        let at_once = job.request.call.is_mutation();
        let mut when = now;
        for response in responses {
            let due = PendingReply { session: job.session, who, call: job.call, sequence, response };
            if at_once {
                self.put(now, due);
                continue;
            }
            when = when.after(self.service());
            self.later(when, Work::Answer(due));
        }
    }

    /// Returns a random service time.
    fn service(&mut self) -> Span {
        self.dice.as_mut().map_or(Span::ZERO, |dice| Span(dice.below(3) * 400_000))
    }
}

/// Returns the file whose data a call changes, for calls that change nothing else.
fn written_node(call: &Call) -> Option<NodeId> {
    match call {
        Call::Write { node, .. } | Call::Fallocate { node, .. } | Call::CopyRange { to: node, .. } => {
            Some(node.node)
        }
        _ => None,
    }
}
