//! A server without threads and sockets: the real state machines of the protocol and the leases, over a model tree.
//!
//! Grace period, replies to resend and leases of discarded sessions are those of the real server; which connection of a
//! session counts is decided here once more. Inode locks, real files and file locks are absent.

mod scheduling;

use super::calls::PendingCall;
use super::counts::Counts;
use super::session::{ClientKey, Hello, PendingReply, Session, Work, params};
use crate::random::Dice;
use nigh_lease::{
    ClientOrigin, DiscardedLeases, Grace, Holder, LeaseConfig, LeaseSequencer, LeaseTerms, Replies,
    SequencerOutput, StoredReply, UpdatedKey,
};
use nigh_native::{EXCLUSIVE_DIR_LEASES, ServerConfig, ServerEvent, ServerSession, UPDATES};
use nigh_remote::model_fs::ModelFs;
use nigh_types::{
    Call, CallId, Credentials, Errno, Handle, NodeId, NodeRef, Origin, Request, Response, Span, Time,
    UpdateCommit, UpdatedFact,
};
use std::collections::BTreeMap;

/// How long an expired session is kept, in terms.
const DORMANCY: u64 = 2;

/// Output of the server for a connection.
#[derive(Clone)]
pub(super) enum ServerOutput {
    Frame(u64, Vec<u8>),
    Close(u64),
}

#[derive(Clone)]
pub(super) struct Server {
    pub(super) tree: ModelFs,
    pub(super) sequencer: LeaseSequencer<PendingCall>,
    pub(super) sessions: BTreeMap<u64, Session>,
    /// Connections before their hello.
    unauthenticated: BTreeMap<u64, ServerSession>,
    work: BTreeMap<(Time, u64), Work>,
    sequence: u64,
    sequencer_due: Time,
    /// Replies to forgotten sessions that their clients may not have received.
    pub(super) reply_cache: BTreeMap<ClientKey, Replies<Handle>>,
    /// Durable: sessions, their clients, and the time until which the clients may rely on leases (`None`: the session
    /// is active).
    session_registry: BTreeMap<u64, (ClientKey, Option<Time>)>,
    pub(super) grace: Grace<ClientKey, PendingCall>,
    /// Leases of forgotten sessions.
    forgotten_leases: DiscardedLeases<ClientKey>,
    last_session: u64,
    last_kept: u64,
    pub(super) config: LeaseConfig,
    /// Random service times; `None`: no service time.
    pub(super) dice: Option<Dice>,
    pub(super) outputs: Vec<ServerOutput>,
    pub(super) written: Vec<(u64, u64)>,
    /// Number of changes, if there is no service time: each change gets a distinct later time.
    pub(super) effects: u64,
    pub(super) counts: Counts,
    /// Events that are errors unless a fault was present.
    pub(super) alarms: Vec<(Time, String)>,
}

impl Server {
    pub(super) fn new(tree: ModelFs, config: LeaseConfig, dice: Option<Dice>) -> Server {
        Server {
            tree,
            sequencer: LeaseSequencer::new(config),
            sessions: BTreeMap::new(),
            unauthenticated: BTreeMap::new(),
            work: BTreeMap::new(),
            sequence: 0,
            sequencer_due: Time::FAR,
            reply_cache: BTreeMap::new(),
            session_registry: BTreeMap::new(),
            grace: Grace::default(),
            forgotten_leases: DiscardedLeases::default(),
            last_session: 0,
            last_kept: 0,
            config,
            dice,
            outputs: Vec::new(),
            written: Vec::new(),
            effects: 0,
            counts: Counts::default(),
            alarms: Vec::new(),
        }
    }

    pub(super) fn connected(&mut self, now: Time, link: u64) {
        self.last_session += 1;
        let config = ServerConfig {
            session_id: self.last_session,
            session_term: self.config.term,
            ..ServerConfig::default()
        };
        self.unauthenticated.insert(link, ServerSession::new(now, config));
    }

    /// Bytes arrived on a connection.
    pub(super) fn heard(&mut self, now: Time, link: u64, bytes: &[u8]) {
        let of_link = self.sessions.iter().find(|(_, session)| session.link == link).map(|(id, _)| *id);
        if let Some(id) = of_link {
            return self.handle_bytes(now, id, bytes);
        }
        let Some(mut connection) = self.unauthenticated.remove(&link) else { return };
        if connection.handle_input(now, bytes).is_err() {
            return self.outputs.push(ServerOutput::Close(link));
        }
        match connection.poll_event().and_then(Hello::of) {
            Some(hello) => self.admit(now, link, connection, &hello),
            None => drop(self.unauthenticated.insert(link, connection)),
        }
    }

    pub(super) fn hung_up(&mut self, _now: Time, link: u64) {
        self.unauthenticated.remove(&link);
        if let Some(session) = self.sessions.values_mut().find(|session| session.link == link) {
            session.connection.handle_disconnect();
            session.link = 0;
        }
        self.outputs.push(ServerOutput::Close(link));
    }

    fn admit(&mut self, now: Time, link: u64, mut connection: ServerSession, hello: &Hello) {
        if let Some(resume) = hello.resume
            && self.sessions.get(&resume.session_id).is_some_and(|session| session.who == hello.who)
            && self.resume(now, resume.session_id, (link, hello.moment, resume.received))
        {
            return;
        }
        let id = connection.session_id();
        let later = |other: &Session| other.who == hello.who && other.moment > hello.moment;
        if self.sessions.values().any(later) {
            connection.refuse(Errno::STALE, "a later connection of this client is served");
            while let Some(frame) = connection.poll_transmit() {
                self.outputs.push(ServerOutput::Frame(link, frame.to_vec()));
            }
            return self.outputs.push(ServerOutput::Close(link));
        }
        let whole = hello.resume.is_none();
        let earlier = self.sessions.iter().filter(|(_, session)| session.who == hello.who);
        for earlier in earlier.map(|(id, _)| *id).collect::<Vec<u64>>() {
            self.forget(now, earlier, whole);
        }
        self.session_registry.insert(id, (hello.who, None));
        let Hello { who, term, features, moment, .. } = *hello;
        let (dormant, handles) = (None, std::collections::BTreeSet::new());
        let session = Session { connection, link, moment, who, term, features, expired_at: dormant, handles };
        self.sessions.insert(id, session);
        if whole {
            let table = self.sequencer.table_mut();
            self.forgotten_leases.handle_dropped((table, now), |absent| *absent == who);
        }
        self.begin_lease(now, id);
        self.settle(now);
        if whole {
            self.returned(now, who);
        }
        let agreed = params(&self.tree, term);
        let session = self.sessions.get_mut(&id).expect("it was just begun");
        session.connection.accept(agreed);
        self.flush(id);
    }

    /// Resumes the session on this connection. Returns true if it did, or if the session has a later connection.
    fn resume(&mut self, now: Time, id: u64, (link, moment, received): (u64, u64, u64)) -> bool {
        let session = &self.sessions[&id];
        if session.moment > moment {
            self.outputs.push(ServerOutput::Close(link));
            return true;
        }
        let (term, holder) = (session.term, Holder(id));
        self.sequencer.table_mut().handle_renewal(now, holder);
        let lapsed = !self.sequencer.table().is_known(holder);
        self.settle(now);
        if lapsed {
            self.begin_lease(now, id);
            self.settle(now);
        }
        let agreed = params(&self.tree, term);
        let session = self.sessions.get_mut(&id).expect("it stands");
        if session.connection.is_ended() {
            return false;
        }
        session.expired_at = None;
        let before = std::mem::replace(&mut session.link, link);
        session.moment = moment;
        let resumed = session.connection.resume(now, received, lapsed, agreed);
        if before != 0 {
            self.outputs.push(ServerOutput::Close(before));
        }
        self.counts.resumed += 1;
        self.flush(id);
        if resumed.is_err() {
            self.forget(now, id, false);
        }
        true
    }

    fn begin_lease(&mut self, now: Time, id: u64) {
        let session = &self.sessions[&id];
        let client = ClientOrigin { client: session.who, origin: Origin::default() };
        let terms = LeaseTerms {
            client: Some(client),
            needs_exclusive_dir_lease: session.features & EXCLUSIVE_DIR_LEASES != 0,
            takes_updates: session.features & UPDATES != 0,
            ..LeaseTerms::plain(session.term)
        };
        self.sequencer.table_mut().handle_begin(now, Holder(id), &terms);
    }

    /// Handles input. A client gets replies only while its lease is renewed by that input.
    fn handle_bytes(&mut self, now: Time, id: u64, mut bytes: &[u8]) {
        let heard = self.is_heard(now, id);
        loop {
            let Some(session) = self.sessions.get_mut(&id) else { return };
            session.connection.mute(!heard);
            let taken = session.connection.handle_some(now, &mut bytes);
            let goes_on = self.take_all(now, id);
            self.flush(id);
            if taken.is_err() && goes_on {
                return self.forget(now, id, false);
            }
            if !goes_on {
                return;
            }
            if bytes.is_empty() {
                break;
            }
        }
        if !heard
            && self.is_heard(now, id)
            && let Some(session) = self.sessions.get_mut(&id)
        {
            session.connection.mute(false);
            // A reply sent now renews the lease, on this side too.
            let _ = session.connection.handle_input(now, &[]);
            self.take_all(now, id);
            self.flush(id);
        }
    }

    fn is_heard(&mut self, now: Time, id: u64) -> bool {
        let heard = self.sequencer.table_mut().handle_renewal(now, Holder(id));
        self.settle(now);
        heard
    }

    /// Handles the connection's events; false: the session has ended.
    fn take_all(&mut self, now: Time, id: u64) -> bool {
        while let Some(session) = self.sessions.get_mut(&id) {
            let Some(event) = session.connection.poll_event() else { return true };
            let holder = Holder(id);
            match event {
                ServerEvent::Attach { .. } => {}
                ServerEvent::Request { call, request, resent: again } => {
                    self.request(now, id, call, request, again)
                }
                ServerEvent::Cancel(call) => self.cancel(now, id, call),
                ServerEvent::Acknowledge(recall) => {
                    self.sequencer.table_mut().handle_acknowledge(now, holder, recall);
                    self.settle(now);
                }
                ServerEvent::Return(grants) => {
                    self.sequencer.table_mut().handle_return(now, holder, &grants);
                    self.settle(now);
                }
                ServerEvent::Reclaimed => {
                    let who = session.who;
                    self.returned(now, who);
                }
                ServerEvent::Bye { .. } => self.forget(now, id, true),
            }
        }
        false
    }

    /// Executes all outputs of the lease table. A reply just given to it takes its place in the stream.
    pub(super) fn settle_with(&mut self, now: Time, mut answer: Option<PendingReply>) {
        loop {
            match self.sequencer.poll_output() {
                SequencerOutput::Recall { holder, recall } => {
                    self.counts.recalls += 1;
                    if let Some(session) = self.sessions.get_mut(&holder.0) {
                        session.connection.recall(recall);
                        self.flush(holder.0);
                    }
                }
                SequencerOutput::Prepare { holder, hold } => {
                    self.counts.holds += 1;
                    if let Some(session) = self.sessions.get_mut(&holder.0) {
                        session.connection.prepare(hold);
                        self.flush(holder.0);
                    }
                }
                SequencerOutput::Commit { holder, id, told } => {
                    let facts = told.into_iter().filter_map(|told| self.committed_fact(told)).collect();
                    if let Some(session) = self.sessions.get_mut(&holder.0) {
                        session.connection.commit(UpdateCommit { id, facts });
                        self.flush(holder.0);
                    }
                }
                SequencerOutput::Reply { grants, .. } => {
                    let mut due = answer.take().expect("one input brings one answer at the most");
                    due.response.grants = grants;
                    self.transmit(due);
                }
                SequencerOutput::Ready(job) => self.later(now, Work::Begin(job)),
                SequencerOutput::Suspect(holder) => {
                    self.counts.suspects += 1;
                    self.alarms.push((now, format!("session {} gives nothing back", holder.0)));
                }
                SequencerOutput::Trusted(_) => {}
                SequencerOutput::Fenced(holder) => {
                    self.counts.fences += 1;
                    self.alarms.push((now, format!("session {} is fenced", holder.0)));
                    self.forgotten_leases.handle_fenced(holder);
                    self.lapse(now, holder.0);
                }
                SequencerOutput::Timeout(due, _) => {
                    self.sequencer_due = due;
                    return;
                }
            }
        }
    }

    /// Returns the committed state of an updated fact.
    fn committed_fact(&self, told: UpdatedKey) -> Option<UpdatedFact> {
        let UpdatedKey { node, name, .. } = told;
        match name {
            Some(name) => {
                let entry = self.tree.entry(node, &name)?;
                Some(UpdatedFact::Name { dir: node, name, entry })
            }
            None => self.tree.attr(node).map(|attr| UpdatedFact::Attr { node, attr }),
        }
    }

    pub(super) fn settle(&mut self, now: Time) {
        self.settle_with(now, None);
    }

    fn lapse(&mut self, now: Time, id: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.connection.handle_disconnect();
        session.expired_at = Some(now);
        let link = std::mem::take(&mut session.link);
        self.outputs.push(ServerOutput::Close(link));
        self.later(now, Work::Tend(id));
        self.later(now.after(Span(self.config.term.0 * DORMANCY)), Work::Tend(id));
    }

    fn tend(&mut self, now: Time, id: u64) {
        let Some(session) = self.sessions.get(&id) else { return };
        let Some(since) = session.expired_at else { return };
        let connection = &session.connection;
        let holds =
            connection.outstanding() > 0 || connection.kept_bytes() > 0 || !session.handles.is_empty();
        if !holds || now >= since.after(Span(self.config.term.0 * DORMANCY)) {
            self.forget(now, id, false);
        }
    }

    pub(super) fn forget(&mut self, now: Time, id: u64, goodbye: bool) {
        let Some(mut session) = self.sessions.remove(&id) else { return };
        self.counts.forgotten += 1;
        let lapses = if session.expired_at.is_some() { Time(0) } else { session.connection.lapses() };
        let who = session.who;
        if !goodbye {
            for (sequence, response) in session.connection.unconfirmed_replies() {
                self.remember(now, (who, sequence), response);
            }
        }
        session.connection.abandon();
        self.outputs.push(ServerOutput::Close(session.link));
        let theirs = |work: &Work| match work {
            Work::Begin(job) => job.session == id,
            Work::Answer(due) => due.session == id,
            Work::Tend(_) | Work::Sweep(_) => false,
        };
        let over = self.take_work(theirs);
        let parked = self.sequencer.take_parked(|job| job.session == id);
        self.grace.take_parked(|job| job.session == id);
        let holder = Holder(id);
        let table = self.sequencer.table_mut();
        self.forgotten_leases.end_session((table, now), (holder, who), goodbye);
        for work in over {
            match work {
                Work::Begin(job) => self.end_change(now, job.change),
                Work::Answer(due) => self.put(now, due),
                Work::Tend(_) | Work::Sweep(_) => {}
            }
        }
        parked.into_iter().for_each(|job| self.end_change(now, job.change));
        self.settle(now);
        let handles: Vec<Handle> = session.handles.into_iter().collect();
        self.tree.release(&handles);
        match goodbye {
            true => drop(self.session_registry.remove(&id)),
            false => drop(self.session_registry.insert(id, (who, Some(lapses)))),
        }
        if goodbye {
            self.returned(now, who);
        }
    }

    /// Remembers a reply that the client may not have received, for when it sends the request again.
    fn remember(&mut self, now: Time, (who, sequence): (ClientKey, u64), response: Response) {
        let reply = StoredReply::new(response, |handle| {
            let node = self.tree.opened(handle)?;
            self.keep(now, node)
        });
        if let Some(reply) = reply {
            let left = self.reply_cache.entry(who).or_default().insert(sequence, reply);
            assert!(left.is_none(), "an operation is executed once, and few replies are stored");
        }
    }

    /// Keeps a file open under a handle of the server's own.
    pub(super) fn keep(&mut self, now: Time, node: NodeId) -> Option<Handle> {
        self.last_kept += 1;
        let handle = Handle(1 << 40 | self.last_kept);
        let call = Call::PinOpen { node: NodeRef::without_hint(node), names: Vec::new(), handle };
        self.tree.execute(now, &Request { credentials: Credentials::default(), mutation_id: None, call });
        (self.tree.opened(handle) == Some(node)).then_some(handle)
    }

    fn returned(&mut self, now: Time, who: ClientKey) {
        self.grace.handle_return(&who);
        self.end_grace(now);
    }

    pub(super) fn in_grace(&self) -> bool {
        self.grace.is_active()
    }

    fn end_grace(&mut self, now: Time) {
        if !self.grace.can_end() {
            return;
        }
        let parked = self.grace.end();
        let sessions = &self.sessions;
        self.session_registry.retain(|id, (_, until)| sessions.contains_key(id) || until.is_some());
        parked.into_iter().for_each(|job| self.later(now, Work::Begin(job)));
    }

    /// Kills the server process and starts a new one.
    pub(super) fn restart(&mut self, now: Time) {
        self.counts.restarts += 1;
        let sessions = std::mem::take(&mut self.sessions);
        let links = sessions.values().map(|session| session.link).chain(self.unauthenticated.keys().copied());
        self.outputs.extend(links.map(ServerOutput::Close));
        self.unauthenticated.clear();
        let mut orphans = Vec::new();
        for handle in sessions.values().flat_map(|session| &session.handles) {
            let node = self.tree.opened(*handle);
            orphans.extend(node.and_then(|node| self.keep(now, node)));
            self.tree.release(&[*handle]);
        }
        let kept = self.reply_cache.values().flat_map(Replies::files).copied();
        self.tree.release(&kept.collect::<Vec<Handle>>());
        self.work.clear();
        (self.reply_cache, self.forgotten_leases) = (BTreeMap::new(), DiscardedLeases::default());
        self.sequencer = LeaseSequencer::new(self.config);
        self.session_registry.retain(|_, (_, until)| until.is_none_or(|until| until > now));
        let absent = self.session_registry.values().map(|(who, _)| (*who, true)).collect();
        let until = now.after(self.config.lapse());
        self.grace = Grace::new(absent, until);
        self.later(until, Work::Sweep(orphans));
        self.end_grace(now);
        self.settle(now);
    }

    /// Returns when the next event is due.
    pub(super) fn due(&self) -> Time {
        let work = self.work.keys().next().map_or(Time::FAR, |(due, _)| *due);
        let grace = self.grace.due();
        work.min(self.sequencer_due).min(grace)
    }

    /// Returns when the next event is due that needs no thread.
    pub(super) fn clock_due(&self) -> Time {
        self.sequencer_due.min(self.grace.due())
    }

    /// Executes the due events that need no thread.
    pub(super) fn time_passes(&mut self, now: Time) {
        if self.grace.due() <= now {
            self.grace.handle_timeout(now);
            self.end_grace(now);
        }
        if self.sequencer_due <= now {
            self.sequencer.handle_timeout(now);
            self.settle(now);
        }
    }

    /// Executes one event that is due by now.
    pub(super) fn step(&mut self, now: Time) {
        if self.clock_due() <= now {
            return self.time_passes(now);
        }
        self.work_at(now, 0);
    }

    /// Executes one of the tasks that wait for a thread.
    pub(super) fn work_at(&mut self, now: Time, at: usize) {
        let key = self.work.keys().nth(at).copied().filter(|(due, _)| *due <= now);
        let Some(work) = key.and_then(|key| self.work.remove(&key)) else { return };
        match work {
            Work::Begin(job) => self.attempt(now, job),
            Work::Answer(due) => self.put(now, due),
            Work::Tend(id) => self.tend(now, id),
            Work::Sweep(handles) => self.tree.release(&handles),
        }
    }

    pub(super) fn later(&mut self, when: Time, work: Work) {
        self.sequence += 1;
        self.work.insert((when, self.sequence), work);
    }

    fn take_work(&mut self, is_such: impl Fn(&Work) -> bool) -> Vec<Work> {
        let such = self.work.iter().filter(|(_, work)| is_such(work)).map(|(key, _)| *key);
        let such: Vec<(Time, u64)> = such.collect();
        such.into_iter().filter_map(|key| self.work.remove(&key)).collect()
    }

    /// Takes back a call that waits for a thread or a reply.
    pub(super) fn take_back(&mut self, session: u64, call: CallId) -> Option<PendingCall> {
        let is_it = |job: &PendingCall| job.session == session && job.call == call;
        let begins = |work: &Work| matches!(work, Work::Begin(job) if is_it(job));
        if let Some(Work::Begin(job)) = self.take_work(begins).pop() {
            return Some(job);
        }
        let parked = self.grace.take_parked(is_it).pop();
        parked.or_else(|| self.sequencer.take_parked(is_it).pop())
    }

    /// Sends a reply, at its place in the stream.
    pub(super) fn put(&mut self, now: Time, mut due: PendingReply) {
        if !self.sessions.contains_key(&due.session) {
            let grants = due.grants();
            self.sequencer.handle_withdraw(now, Holder(due.session), &grants);
            self.settle(now);
            if let Some(sequence) = due.sequence {
                self.remember(now, (due.who, sequence), due.response);
            }
        } else if due.response.grants.is_empty() {
            self.transmit(due);
        } else {
            let grants = std::mem::take(&mut due.response.grants);
            self.sequencer.handle_reply(now, Holder(due.session), grants);
            self.settle_with(now, Some(due));
        }
    }

    fn transmit(&mut self, due: PendingReply) {
        if let Some(session) = self.sessions.get_mut(&due.session) {
            session.connection.respond(due.call, &due.response);
            self.flush(due.session);
        }
    }

    pub(super) fn flush(&mut self, id: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        while let Some(frame) = session.connection.poll_transmit() {
            self.outputs.push(ServerOutput::Frame(session.link, frame.to_vec()));
        }
    }
}
