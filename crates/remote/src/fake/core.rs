//! Server side of the fake: sessions, plans, recalls.

use super::disconnect::Disconnection;
use super::pending::Pending;
use super::prefetch::PrefetchJob;
use super::{CallFilter, CallPlan, Event, ModelFs, ModelFsConfig, Output, Reason, SessionParams};
use crate::locks::{Answered, Locks};
use nigh_types::{
    Call, CallId, Errno, Features, Grant, GrantId, Handle, LeaseScope, MutationId, NodeId, Recall, RecallId,
    Reply, Request, Response, Span, Term, Time, WriteFlags,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(super) struct Core {
    pub(super) tree: ModelFs,
    pub(super) pending: Vec<Pending>,
    pub(super) locks: Locks,
    now: Time,
    pub(super) clients: BTreeMap<u64, Client>,
    next_recall: u64,
    sequence: u64,
    /// Replies to completed mutations by id, for retransmissions.
    pub(super) remembered: BTreeMap<MutationId, Vec<Response>>,
    /// Writes that changed a file, in order: the client by the mutation id, and the inode.
    pub(super) written: Vec<(u64, u64)>,
}

/// The latest number of a grant, and the time until which it binds the server.
pub(super) struct Granted {
    pub(super) id: GrantId,
    /// The number with which the unbroken grant began.
    pub(super) first: GrantId,
    until: Time,
}

/// One session, as the server sees it.
#[derive(Default)]
pub(super) struct Client {
    pub(super) plans: Vec<(CallFilter, CallPlan)>,
    pub(super) calls: BTreeMap<&'static str, u64>,
    pub(super) acknowledged: BTreeSet<RecallId>,
    pub(super) cancelled: Vec<CallId>,
    pub(super) handles: BTreeSet<Handle>,
    lost: bool,
    /// Sent and undelivered, by time of delivery and order of sending.
    pub(super) events: BTreeMap<(Time, u64), Event>,
    /// Calls in transit to the server.
    pub(super) arriving: BTreeMap<(Time, u64), (CallId, Request, CallPlan)>,
    pub(super) held: BTreeMap<CallId, (Request, CallPlan)>,
    pub(super) held_replies: BTreeMap<CallId, VecDeque<Response>>,
    /// A later grant replaces an earlier one, as on a server.
    pub(super) grants: BTreeMap<(NodeId, LeaseScope), Granted>,
    /// Returned grants by latest number: replies in transit no longer hand out earlier ones.
    returned: BTreeMap<(NodeId, LeaseScope), GrantId>,
    pub(super) recalls: BTreeMap<RecallId, Recall>,
    /// Whether it takes updates instead of recalls; below, its unacknowledged ones.
    pub(super) takes_updates: bool,
    pub(super) prepared: BTreeSet<RecallId>,
    /// Calls whose last response is undelivered.
    pub(super) outstanding: BTreeMap<CallId, Request>,
    pub(super) disconnection: Disconnection,
    pub(super) prefetches: BTreeMap<CallId, PrefetchJob>,
}

impl Client {
    pub(super) fn held_calls(&self) -> Vec<CallId> {
        self.held.keys().chain(self.held_replies.keys()).copied().collect()
    }

    pub(super) fn holds(&self, now: Time, node: NodeId, covers: LeaseScope) -> bool {
        self.grants.get(&(node, covers)).is_some_and(|granted| now < granted.until)
    }

    pub(super) fn plan_for(&self, call: CallId, request: &Request) -> CallPlan {
        let rank = |which: &CallFilter| match which {
            CallFilter::Every => Some(0),
            CallFilter::Type(name) => (*name == request.call.type_name()).then_some(1),
            CallFilter::Call(id) => (*id == call).then_some(2),
        };
        let fitting = self.plans.iter().filter_map(|(which, fate)| Some((rank(which)?, *fate)));
        fitting.max_by_key(|(rank, _)| *rank).map(|(_, fate)| fate).unwrap_or_default()
    }

    fn next_due(&self) -> Option<Time> {
        let event = self.events.keys().next().filter(|_| !self.disconnection.is_disconnected);
        event.into_iter().chain(self.arriving.keys().next()).map(|(due, _)| *due).min()
    }
}

impl Core {
    pub(super) fn new(config: ModelFsConfig) -> Core {
        Core {
            tree: ModelFs::new(config),
            pending: Vec::new(),
            locks: Locks::default(),
            now: Time(0),
            clients: BTreeMap::new(),
            next_recall: 1,
            sequence: 0,
            remembered: BTreeMap::new(),
            written: Vec::new(),
        }
    }

    /// Whether a client holds a living grant.
    pub(super) fn holds(&self, client: u64, node: NodeId, covers: LeaseScope) -> bool {
        self.client(client).holds(self.now, node, covers)
    }

    pub(super) fn client(&self, client: u64) -> &Client {
        &self.clients[&client]
    }

    pub(super) fn client_mut(&mut self, client: u64) -> &mut Client {
        self.clients.get_mut(&client).expect("a client of this server")
    }

    pub(super) fn connect(&mut self, now: Time) -> u64 {
        self.advance(now);
        let id = self.clients.len() as u64;
        self.clients.insert(id, Client::default());
        self.send(id, Span::ZERO, Event::Attached(self.session()));
        id
    }

    pub(super) fn session(&self) -> SessionParams {
        let term = self.tree.config().term;
        SessionParams {
            supports: Features {
                prefetch: true,
                reversed_prefetch: true,
                list_names: true,
                lookup_number: true,
                uniform_rights: true,
                ..Features::default()
            },
            ..self.tree.session(term)
        }
    }

    /// Advances the time and delivers calls.
    pub(super) fn advance(&mut self, now: Time) {
        while self.step(now) {}
    }

    /// Delivers one call that is due by now.
    pub(super) fn step(&mut self, now: Time) -> bool {
        self.now = self.now.max(now);
        let Some((client, key)) = self.arrived() else { return false };
        let arrived = self.client_mut(client).arriving.remove(&key);
        let (call, request, fate) = arrived.expect("it was just found");
        self.arrive(client, call, request, fate);
        true
    }

    /// The first of the calls that are due by now.
    fn arrived(&self) -> Option<(u64, (Time, u64))> {
        let first =
            self.clients.iter().filter_map(|(id, client)| Some((*id, *client.arriving.keys().next()?)));
        first.filter(|(_, (due, _))| *due <= self.now).min_by_key(|(_, key)| *key)
    }

    pub(super) fn handle_call(&mut self, now: Time, client: u64, call: CallId, request: Request) {
        self.advance(now);
        if self.client(client).lost {
            return;
        }
        let session = self.client_mut(client);
        *session.calls.entry(request.call.type_name()).or_default() += 1;
        if request.call.has_reply() {
            session.outstanding.insert(call, request.clone());
        }
        self.put_in_turn(client, call, request);
    }

    /// Sends a call.
    pub(super) fn put(&mut self, client: u64, call: CallId, request: Request) {
        let now = self.now;
        let fate = self.client(client).plan_for(call, &request);
        let key = self.later(fate.arrives_after);
        self.client_mut(client).arriving.insert(key, (call, request, fate));
        self.advance(now);
    }

    /// Replies `EINTR` if nothing was executed. Otherwise the call's reply comes unchanged.
    pub(super) fn handle_cancel(&mut self, now: Time, client: u64, call: CallId) {
        self.advance(now);
        self.client_mut(client).cancelled.push(call);
        if !self.cancel_while_away(client, call) {
            self.cancel(client, call);
        }
    }

    pub(super) fn cancel(&mut self, client: u64, call: CallId) {
        let session = self.client_mut(client);
        let before = session.arriving.len() + session.held.len();
        session.arriving.retain(|_, (arriving, ..)| *arriving != call);
        session.held.remove(&call);
        let walked = session.prefetches.remove(&call).is_some();
        let stopped = walked || session.arriving.len() + session.held.len() < before;
        let waiting = self.pending.len();
        self.drop_pending(|pending| (pending.client, pending.call) == (client, call));
        let unlocked = self.locks.cancel(client, call);
        if stopped || unlocked || self.pending.len() < waiting {
            let response = Response::plain(Err(Errno::INTR));
            self.send(client, Span::ZERO, Event::Response { call, response });
        }
    }

    pub(super) fn handle_acknowledge(&mut self, now: Time, client: u64, recall: RecallId) {
        self.advance(now);
        let session = self.client_mut(client);
        if session.lost {
            return;
        }
        if session.prepared.remove(&recall) {
            session.acknowledged.insert(recall);
            return self.settle(&[recall]);
        }
        let Some(recalled) = session.recalls.remove(&recall) else {
            if session.disconnection.recalls.contains(&recall) {
                return;
            }
            panic!("recall {} was acknowledged but is not outstanding", recall.0);
        };
        session.acknowledged.insert(recall);
        session.grants.remove(&(recalled.node, recalled.covers));
        self.settle(&[recall]);
    }

    pub(super) fn handle_return(&mut self, now: Time, client: u64, grants: &[GrantId]) {
        self.advance(now);
        let session = self.client_mut(client);
        let ended = session.grants.iter().filter(|(_, granted)| grants.contains(&granted.id));
        session.returned.extend(ended.map(|(key, granted)| (*key, granted.id)));
        session.grants.retain(|_, granted| !grants.contains(&granted.id));
    }

    pub(super) fn next_recall(&mut self) -> RecallId {
        let id = RecallId(self.next_recall);
        self.next_recall += 1;
        id
    }

    pub(super) fn client_ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.clients.keys().copied()
    }

    pub(super) fn lose(&mut self, client: u64, why: &str) {
        let session = self.client_mut(client);
        if session.lost {
            return;
        }
        let owed: Vec<RecallId> = session.recalls.keys().chain(&session.prepared).copied().collect();
        let handles: Vec<Handle> = session.handles.iter().copied().collect();
        *session = Client {
            plans: std::mem::take(&mut session.plans),
            calls: std::mem::take(&mut session.calls),
            acknowledged: std::mem::take(&mut session.acknowledged),
            cancelled: std::mem::take(&mut session.cancelled),
            takes_updates: session.takes_updates,
            lost: true,
            ..Client::default()
        };
        self.tree.release(&handles);
        self.drop_pending(|pending| pending.client == client);
        self.send(client, Span::ZERO, Event::Lost { why: why.to_owned() });
        let answered = self.locks.end(client);
        self.lock_answers(answered);
        self.settle(&owed);
    }

    pub(super) fn release(&mut self, client: u64, call: CallId) {
        let session = self.client_mut(client);
        if let Some((request, fate)) = session.held.remove(&call) {
            self.submit(client, call, request, fate);
        } else {
            let replies = session.held_replies.remove(&call);
            for response in replies.expect("the call is held") {
                self.send(client, Span::ZERO, Event::Response { call, response });
            }
        }
    }

    pub(super) fn release_chunk(&mut self, client: u64, call: CallId) {
        let replies = self.client_mut(client).held_replies.get_mut(&call);
        let response = replies.and_then(VecDeque::pop_front).expect("an answer to the call is held");
        if response.last {
            self.client_mut(client).held_replies.remove(&call);
        }
        self.send(client, Span::ZERO, Event::Response { call, response });
    }

    pub(super) fn poll(&mut self, client: u64) -> Output {
        let now = self.now;
        let session = self.client_mut(client);
        if let Some(event) = session.disconnection.client_events.pop_front() {
            return Output::Event(event);
        }
        let here = !session.disconnection.is_disconnected;
        let first = session.events.first_entry().filter(|first| here && first.key().0 <= now);
        if let Some(mut event) = first.map(|first| first.remove()) {
            if let Event::Response { call, response } = &mut event {
                let ended =
                    |grant: &Grant| session.returned.get(&(grant.node, grant.covers)) >= Some(&grant.id);
                response.grants.retain(|grant| !ended(grant));
                if response.last {
                    session.outstanding.remove(call);
                }
            }
            return Output::Event(event);
        }
        match session.next_due() {
            Some(due) => Output::Timeout(due, Reason::Delay),
            None => Output::Timeout(Time::FAR, Reason::Idle),
        }
    }

    /// Key of an event `span` from now, after all other events at this time.
    pub(super) fn later(&mut self, span: Span) -> (Time, u64) {
        self.sequence += 1;
        (self.now.after(span), self.sequence)
    }

    pub(super) fn send(&mut self, client: u64, delay: Span, event: Event) {
        let key = self.later(delay);
        self.client_mut(client).events.insert(key, event);
    }

    fn arrive(&mut self, client: u64, call: CallId, request: Request, fate: CallPlan) {
        if let Some(errno) = fate.refuse {
            let response = Response::plain(Err(errno));
            self.send(client, fate.answered_after, Event::Response { call, response });
        } else if fate.hold_call {
            self.client_mut(client).held.insert(call, (request, fate));
        } else {
            self.submit(client, call, request, fate);
        }
    }

    pub(super) fn execute(&mut self, client: u64, call: CallId, request: &Request, fate: CallPlan) {
        if let Some(responses) = self.remembered_reply(client, request) {
            return self.reply(client, call, responses, fate);
        }
        if let Call::Release { handles } = &request.call {
            self.client_mut(client).handles.retain(|handle| !handles.contains(handle));
        }
        if let Call::PinOpen { handle, .. } = &request.call {
            self.client_mut(client).handles.insert(*handle);
        }
        if matches!(request.call, Call::Lock { .. } | Call::Unlock { .. } | Call::GetLock { .. }) {
            return self.execute_lock(client, call, &request.call, fate);
        }
        if matches!(request.call, Call::Prefetch { .. }) {
            return self.prefetch(client, call, request.clone(), fate);
        }
        if matches!(request.call, Call::PrefetchCredit { .. }) {
            return self.steer(client, &request.call);
        }
        self.note_unbroken_grant(client, request);
        let mut responses = self.execute_and_log(request);
        for response in &mut responses {
            self.register(client, response, fate);
        }
        if let Some(name) =
            request.mutation_id.filter(|_| responses.iter().all(|response| response.result.is_ok()))
        {
            self.remembered.insert(name, responses.clone());
        }
        self.reply(client, call, responses, fate);
    }

    fn execute_and_log(&mut self, request: &Request) -> Vec<Response> {
        let Call::Write { node, .. } = &request.call else { return self.tree.execute(self.now, request) };
        let before = self.tree.attr(node.node);
        let responses = self.tree.execute(self.now, request);
        if let Some(name) = request.mutation_id.filter(|_| self.tree.attr(node.node) != before) {
            self.written.push((name.client, node.node.ino));
        }
        responses
    }

    /// If the writer has held the affected facts without a break since it had the pages, no other client has changed
    /// them.
    fn note_unbroken_grant(&mut self, client: u64, request: &Request) {
        let Call::Write { node, flags: WriteFlags { since: Some(since), .. }, .. } = &request.call else {
            return;
        };
        let Some((name, (grant, covers))) = request.mutation_id.zip(since.under) else { return };
        let unbroken = |change: &crate::model_fs::Change| {
            let held = self.client(client).grants.get(&(change.node, change.covers));
            change.covers == covers && held.is_some_and(|held| self.now < held.until && held.first <= grant)
        };
        if self.tree.affected(&request.call).iter().any(unbroken) {
            self.tree.record_own_version(name.client, node.node, since.stamp);
        }
    }

    fn execute_lock(&mut self, client: u64, call: CallId, what: &Call, fate: CallPlan) {
        let (Call::Lock { node, .. } | Call::Unlock { node, .. } | Call::GetLock { node, .. }) = what else {
            return;
        };
        // A server that lets clients lock only files that they have open.
        let reopens = |request: &Request| matches!(request.call, Call::Reopen { .. });
        let reopens = self.client(client).outstanding.values().any(reopens);
        let mut answered = match (self.tree.lockable(node), what) {
            (_, Call::Lock { reclaim: true, .. }) if reopens => vec![(client, call, Err(Errno::ACCES))],
            (Ok(node), what) => self.locks.execute(client, call, node, what),
            // An unreachable file can still be unlocked.
            (Err(_), Call::Unlock { .. }) => self.locks.execute(client, call, node.node, what),
            (Err(errno), _) => vec![(client, call, Err(errno))],
        };
        let own = answered.pop_if(|(by, answered, _)| (*by, *answered) == (client, call));
        self.lock_answers(answered);
        if let Some((_, _, result)) = own {
            self.reply(client, call, vec![Response::plain(result)], fate);
        }
    }

    /// Replies to lock calls that waited and are granted now.
    pub(super) fn lock_answers(&mut self, answered: Vec<Answered>) {
        for (client, call, result) in answered {
            let response = Response::plain(result);
            self.send(client, Span::ZERO, Event::Response { call, response });
        }
    }

    fn reply(&mut self, client: u64, call: CallId, responses: Vec<Response>, fate: CallPlan) {
        if fate.drop_reply {
            return;
        }
        if fate.hold_reply && !responses.is_empty() {
            self.client_mut(client).held_replies.insert(call, responses.into());
            return;
        }
        let mut delay = fate.answered_after;
        for response in responses {
            self.send(client, delay, Event::Response { call, response });
            delay = Span(delay.0.saturating_add(fate.chunk_pause.0));
        }
    }

    /// Records the grants of a response, and removes those of recalled facts.
    pub(super) fn register(&mut self, client: u64, response: &mut Response, fate: CallPlan) {
        let changing = |node: NodeId, covers: LeaseScope| {
            let mut changes = self.pending.iter().flat_map(|pending| &pending.changes);
            let mut recalls = self.clients[&client].recalls.values();
            changes.any(|change| (change.node, change.covers) == (node, covers))
                || recalls.any(|recall| (recall.node, recall.covers) == (node, covers))
        };
        let away = self.clients[&client].disconnection.is_disconnected;
        response.grants.retain(|grant| !away && !fate.ungranted && !changing(grant.node, grant.covers));
        let now = self.now;
        let session = self.client_mut(client);
        for grant in &response.grants {
            let until = match grant.term {
                Term::Session => Time::FAR,
                Term::Limited(span) => now.after(span),
            };
            let key = (grant.node, grant.covers);
            let before = session.grants.get(&key).filter(|granted| now < granted.until);
            let first = before.map_or(grant.id, |granted| granted.first);
            session.grants.insert(key, Granted { id: grant.id, first, until });
        }
        session.handles.extend(response.result.as_ref().ok().and_then(handle));
    }
}

fn handle(reply: &Reply) -> Option<Handle> {
    match reply {
        Reply::Opened { handle, .. } => Some(*handle),
        Reply::Created { handle, .. } => *handle,
        Reply::Removed { pinned: kept, .. } | Reply::Renamed { pinned: kept, .. } => *kept,
        _ => None,
    }
}
