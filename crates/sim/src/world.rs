//! Clients of one fake server, stepped by hand.

mod backend;
mod facts;
mod local_changes;
mod mmap_stores;
mod notifier_model;
mod trace_text;

use crate::kernel::Kernel;
pub use backend::Backend;
pub use facts::{Fact, Facts, XATTR};
use local_changes::{Effect, names_of};
use mmap_stores::PendingStores;
use nigh_cache::{Cache, Caller, Config, NotifyLevel, OnDisconnect, Op, OpReply, Output};
use nigh_remote::fake::FakeServer;
use nigh_remote::model_fs::ModelFsConfig;
use nigh_remote::{Event, Output as RemoteOutput, Remote};
use nigh_types::{Attr, Name, OpId, Span, Time, WriteFlags};
use notifier_model::NotifierModel;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use trace_text::{commit_line, prepare_line, session_line, words};
pub use trace_text::{has_unknown_outcome, name_of, short};

/// The inodes of a name over time, each with the tick from which it was so.
pub type Past = Vec<(u64, Option<u64>)>;

/// One mount: a cache, its remote, and the kernel that it serves.
#[derive(Clone)]
pub struct Client<B: Backend = FakeServer> {
    pub cache: Cache,
    pub control: B::Control,
    pub kernel: Kernel,
    /// Holds back kernel notifications, except urgent ones,
    pub hold_invalidations: bool,
    /// or all of them. Otherwise they are delivered at once.
    pub asleep: bool,
    /// Waiting requests may fail: they time out, or the session was expired for a while.
    may_fail: bool,
    /// Page invalidations block until this is cleared.
    pub invalidates_slowly: bool,
    /// The server pushes other clients' changes to this client instead of recalling its leases.
    takes_pushes: bool,
    /// Limit of page invalidations that may block at the same time.
    pub workers: u32,
    notifier: NotifierModel,
    /// Inodes that the cache asked its kernel to forget, as far as it may.
    pub pruned: Vec<u64>,
    pub(crate) remote: B::Remote,
    pub(crate) ops: BTreeMap<OpId, Op>,
    /// Changes whose callers were killed: the outcome is unknown until the remote has replied.
    abandoned: Vec<(Op, Vec<u64>)>,
    /// Inodes whose names the kernel has locked for a request.
    locked: BTreeMap<OpId, Vec<u64>>,
    /// The kernel's attribute version at the time of each request.
    request_versions: BTreeMap<OpId, u64>,
    /// Observed effects of namespace changes in flight.
    effects: BTreeMap<OpId, Effect>,
    /// The inode of each write-back, and the tick at which it began.
    write_backs: BTreeMap<OpId, (u64, u64)>,
    /// Names whose dentries kept an older expiry over a local rename: they are invalidated after the rename's reply.
    moved_dentries: Vec<(u64, Name)>,
}

/// Server, clients and virtual time. Clones share their server.
#[derive(Clone)]
pub struct World<B: Backend = FakeServer> {
    pub now: Time,
    pub server: B,
    pub clients: Vec<Client<B>>,
    /// Events since it was last taken, one per line.
    pub trace: Vec<String>,
    /// Replies since they were last taken: client, request, reply.
    pub replies: Vec<(usize, OpId, Op, OpReply)>,
    /// Replies among them that were marked as possibly stale ([`Cache::is_stale`]).
    pub stale_replies: BTreeSet<OpId>,
    /// For each GETATTR of an open file, the size that its caller then sees.
    pub sizes: BTreeMap<OpId, u64>,
    /// Replies sent before a kernel had dropped what it held from an expired session.
    pub early_replies: BTreeSet<OpId>,
    /// Watched names, with their inodes over time. Time is counted in ticks: each event that may have changed the tree
    /// begins a new tick.
    pub past: BTreeMap<(u64, Name), Past>,
    pub tick: u64,
    /// Watched data and xattrs of inodes, recorded in the same way.
    pub facts: Facts,
    /// Dirty stores into maps, by client and inode,
    stores: BTreeMap<(usize, u64), PendingStores>,
    /// and stores that are being written back.
    writing_back: BTreeMap<OpId, PendingStores>,
    /// Bytes whose write may or may not have taken effect: inode, offset, byte.
    uncertain_bytes: BTreeSet<(u64, u64, u8)>,
    /// Grants have deadlines; then stores may be refused.
    pub limited: bool,
    /// Stores that were lost, or that overwrote what other clients wrote after them.
    pub lost_stores: Vec<String>,
    /// Whether the trace shows requests and calls in full.
    pub verbose: bool,
    /// Number of threads that send requests in turn; the first one is not shown.
    pub threads: u64,
    /// Time passes without the caches' timers; they fire when it next passes.
    pub timers_are_late: bool,
    pub(crate) next_op: u64,
}

impl World {
    #[must_use]
    pub fn new(config: ModelFsConfig) -> World {
        World::over(FakeServer::new(config))
    }

    /// Adds a client and returns its number.
    pub fn connect(&mut self, level: NotifyLevel) -> usize {
        self.connect_with(Config { level, ..Config::default() })
    }

    /// Adds a client with the given configuration, except for its identity.
    pub fn connect_with(&mut self, config: Config) -> usize {
        let remote = self.server.connect(self.now);
        self.join(config, remote.control(), remote)
    }

    /// Subscribes a client to pushes, in later sessions too.
    pub fn take_pushes(&mut self, at: usize) {
        self.clients[at].takes_pushes = true;
        self.clients[at].control.takes_updates(true);
    }

    /// Replaces a client's lost session by a new one.
    pub fn reconnect(&mut self, at: usize) {
        let remote = self.server.connect(self.now);
        remote.control().takes_updates(self.clients[at].takes_pushes);
        self.clients[at].control = remote.control();
        self.clients[at].remote = remote;
        self.settle();
    }
}

impl<B: Backend> World<B> {
    /// Creates a world without clients.
    #[must_use]
    pub fn over(server: B) -> World<B> {
        World {
            now: Time(Span::from_secs(1).0),
            server,
            clients: Vec::new(),
            trace: Vec::new(),
            replies: Vec::new(),
            stale_replies: BTreeSet::new(),
            sizes: BTreeMap::new(),
            early_replies: BTreeSet::new(),
            past: BTreeMap::new(),
            tick: 0,
            facts: Facts::default(),
            stores: BTreeMap::new(),
            writing_back: BTreeMap::new(),
            uncertain_bytes: BTreeSet::new(),
            limited: false,
            lost_stores: Vec::new(),
            verbose: false,
            threads: 1,
            timers_are_late: false,
            next_op: 0,
        }
    }

    /// Adds a client with the given end of a session, and returns its number.
    pub(crate) fn join(&mut self, config: Config, control: B::Control, remote: B::Remote) -> usize {
        let at = self.clients.len();
        let client = self.clients.len() as u64;
        self.clients.push(Client {
            cache: Cache::new(Config { client, incarnation: 1, ..config }),
            control,
            kernel: Kernel::default(),
            hold_invalidations: false,
            asleep: false,
            may_fail: matches!(config.on_disconnect, OnDisconnect::Fail(_)),
            invalidates_slowly: false,
            takes_pushes: false,
            workers: 64,
            notifier: NotifierModel::default(),
            pruned: Vec::new(),
            remote,
            ops: BTreeMap::new(),
            abandoned: Vec::new(),
            locked: BTreeMap::new(),
            request_versions: BTreeMap::new(),
            effects: BTreeMap::new(),
            write_backs: BTreeMap::new(),
            moved_dentries: Vec::new(),
        });
        self.settle();
        at
    }

    /// Returns whether a client's process runs.
    #[must_use]
    pub fn is_awake(&self, at: usize) -> bool {
        self.server.runs(at)
    }

    /// Returns the time on a client's clock.
    #[must_use]
    pub fn time(&self, at: usize) -> Time {
        self.server.clock(at, self.now)
    }

    /// Sends one request from a client's kernel.
    pub fn send_request(&mut self, at: usize, op: Op) -> OpId {
        let id = self.put(at, op);
        self.settle();
        id
    }

    fn put(&mut self, at: usize, op: Op) -> OpId {
        self.next_op += 1;
        let id = OpId(self.next_op);
        let now = self.time(at);
        let client = &mut self.clients[at];
        let heard = |(dir, name): &(u64, Name)| client.kernel.last_known_ino(*dir, name);
        let mut locked: Vec<u64> = names_of(&op).iter().filter_map(heard).collect();
        if let Op::Rename { to, new_name, .. } = &op {
            // The kernel has just looked up the replaced entry.
            locked.extend(self.server.edit(|tree| tree.child_of(*to, new_name)));
        }
        client.locked.insert(id, locked);
        client.request_versions.insert(id, client.kernel.version());
        client.kernel.begin_request(&op);
        let names = names_of(&op);
        if !names.is_empty() {
            let effect = Effect::awaited(names.iter().map(|(dir, name)| self.server_ino(*dir, name)));
            self.clients[at].effects.insert(id, effect);
        }
        self.begin_flush(at, id, &op);
        let client = &mut self.clients[at];
        if let Op::Write { ino, flags: WriteFlags { write_back: true, .. }, .. } = &op {
            client.write_backs.insert(id, (*ino, self.tick));
        }
        let pid = u32::try_from(id.0 % self.threads).unwrap_or(0);
        let answer = client.cache.handle_op(now, id, Caller { pid, ..Caller::default() }, op.clone());
        client.ops.insert(id, op);
        match answer {
            Some(answer) => self.answered(at, id, answer, true),
            None => {
                let what = self.of(&self.clients[at].ops[&id]);
                self.trace.push(format!("{} waits{what}", name_of(at)));
            }
        }
        id
    }

    /// Sends one request and returns its reply.
    ///
    /// # Panics
    /// If the request waits and nothing in flight can end that.
    pub fn request(&mut self, at: usize, op: Op) -> OpReply {
        let id = self.send_request(at, op);
        let answer = self.replies.iter().rev().find(|(_, of, ..)| *of == id).map(|(.., a)| a.clone());
        answer.unwrap_or_else(|| panic!("{id:?} is not answered:\n{}", self.trace.join("\n")))
    }

    /// Records the current inodes of the watched names.
    pub fn observe(&mut self) {
        self.tick += 1;
        let tick = self.tick;
        for ((dir, name), past) in &mut self.past {
            let now = self.server.edit(|tree| tree.child_of(*dir, name));
            if past.last().map(|(_, ino)| *ino) != Some(now) {
                past.push((tick, now));
            }
        }
        self.note_effects();
        self.facts.observe(&self.server, self.now, tick);
        self.check_changed_bytes();
        self.facts.observe_attributes(&self.server, tick);
    }

    /// Returns whether a request still waits.
    #[must_use]
    pub fn is_pending(&self, at: usize, op: OpId) -> bool {
        self.clients[at].ops.contains_key(&op)
    }

    /// Interrupts a request by a signal that is not fatal.
    pub fn signal(&mut self, at: usize, op: OpId) {
        self.clients[at].cache.handle_interrupt(op, false);
        self.settle();
    }

    pub fn interrupt(&mut self, at: usize, op: OpId) {
        self.clients[at].cache.handle_interrupt(op, true);
        self.settle();
    }

    /// Advances time; events happen in the order in which they fall due.
    pub fn advance(&mut self, span: Span) {
        let until = self.now.after(span);
        let mut at_once = 0;
        loop {
            let next = self.settle();
            if next > until {
                break;
            }
            at_once = if next > self.now { 0 } else { at_once + 1 };
            assert!(at_once < 1_000, "time stands still:\n{}", self.trace.join("\n"));
            self.now = self.now.max(next);
            while self.server.step(self.now) {
                self.observe();
            }
            for at in 0..self.clients.len() {
                self.pass(at);
            }
        }
        self.now = until;
        self.settle();
    }

    /// Passes the time to a client's cache.
    pub(crate) fn pass(&mut self, at: usize) {
        if !self.server.runs(at) {
            return;
        }
        let now = self.time(at);
        if !self.timers_are_late {
            self.clients[at].cache.handle_timeout(now);
        }
        self.clients[at].remote.handle_timeout(now);
        self.observe();
    }

    /// Drives all components until no output is left, and returns when the next event is due.
    pub fn settle(&mut self) -> Time {
        loop {
            let mut moved = false;
            let mut next = self.server.due();
            for at in (0..self.clients.len()).filter(|at| self.server.runs(*at)).collect::<Vec<usize>>() {
                let (any, due) = self.drive(at);
                moved |= any;
                next = next.min(due);
            }
            if !moved {
                return next;
            }
        }
    }

    fn drive(&mut self, at: usize) -> (bool, Time) {
        let (mut moved, mut cache_due) = self.drain(at);
        moved |= self.deliver(at);
        let remote_due = loop {
            let client = &mut self.clients[at];
            match client.remote.poll_output() {
                RemoteOutput::Timeout(due, _) => break due,
                RemoteOutput::Transmit(_) => {}
                RemoteOutput::Event(event) => {
                    moved = true;
                    client.may_fail |= matches!(
                        event,
                        Event::Expired { .. } | Event::Lost { .. } | Event::Restored { kept: false, .. }
                    );
                    if let Some(line) = session_line(at, &event) {
                        self.trace.push(line);
                    } else if let Event::Recall(recall) = &event {
                        let line = format!(
                            "{} is asked to give back {:?} of {}",
                            name_of(at),
                            recall.covers,
                            recall.node.ino
                        );
                        self.trace.push(line);
                    } else if let Event::UpdatePrepare(hold) = &event {
                        self.trace.push(format!("{} is to hold back {}", name_of(at), prepare_line(hold)));
                    } else if let Event::UpdateCommit(commit) = &event {
                        self.trace.push(format!("{} hears that {}", name_of(at), commit_line(commit)));
                    } else if self.verbose {
                        self.trace.push(format!("{} hears {event:?}", name_of(at)));
                    }
                    let now = self.server.clock(at, self.now);
                    client.cache.handle_event(now, event);
                    if B::ONE_BY_ONE {
                        cache_due = self.drain(at).1;
                    }
                }
            }
        };
        (moved, self.server.moment(at, cache_due.min(remote_due)))
    }

    /// Returns when a client's next timer is due.
    pub(crate) fn timer(&mut self, at: usize) -> Time {
        self.drive(at).1
    }

    /// Writes a client's state, except its end of the session, as text, equal for equal states.
    pub(crate) fn write_client(&self, at: usize, out: &mut String) -> fmt::Result {
        let Client {
            cache,
            kernel,
            notifier: telling,
            ops,
            abandoned,
            locked,
            request_versions: asked,
            effects,
            moved_dentries: carried,
            ..
        } = &self.clients[at];
        write!(out, "{cache:?}{telling:?}{ops:?}{abandoned:?}{locked:?}{effects:?}{carried:?}")?;
        kernel.write(asked, out)
    }

    /// Executes a cache's outputs.
    fn drain(&mut self, at: usize) -> (bool, Time) {
        let mut moved = false;
        loop {
            match self.clients[at].cache.poll_output() {
                Output::Timeout(_, _) if self.timers_are_late => return (moved, Time::FAR),
                Output::Timeout(due, _) => return (moved, due),
                output => {
                    moved = true;
                    self.carry(at, output);
                }
            }
        }
    }

    fn carry(&mut self, at: usize, output: Output) {
        let now = self.time(at);
        match output {
            Output::Answer { op, answer } => self.answered(at, op, answer, false),
            Output::Call { id, caller: _, mutation_id: name, call } => {
                let what = if self.verbose { format!(" {call:?} as {id:?}") } else { String::new() };
                self.trace.push(format!("{} calls {}{what}", name_of(at), call.type_name()));
                let credentials = nigh_types::Credentials::default();
                let request = nigh_types::Request { credentials, mutation_id: name, call };
                self.clients[at].remote.handle_call(now, id, request);
                self.observe();
            }
            Output::Store { ino, data } => {
                self.trace.push(format!("{} stores a file of {} bytes", name_of(at), data.len()));
                self.clients[at].kernel.page_cache.fill(ino, data);
            }
            Output::Cancel(id) => {
                self.trace.push(format!("{} cancels", name_of(at)));
                self.clients[at].remote.handle_cancel(now, id);
            }
            Output::Acknowledge(id) => {
                self.trace.push(format!("{} acknowledges", name_of(at)));
                self.clients[at].remote.handle_acknowledge(now, id);
                self.observe();
            }
            Output::Return(grants) => self.clients[at].remote.handle_return(now, grants),
            Output::Reclaimed => {
                self.trace.push(format!("{} has claimed what it had", name_of(at)));
                self.clients[at].remote.handle_reclaimed(now);
                self.observe();
            }
            Output::Invalidate { id, stale, urgency } => self.queue(at, id, stale, urgency),
            Output::Prune => {
                let cache = &mut self.clients[at].cache;
                let inos = std::iter::from_fn(|| Some(cache.poll_prune()).filter(|inos| !inos.is_empty()));
                let inos: Vec<u64> = inos.flatten().collect();
                self.clients[at].pruned.extend(inos);
            }
            Output::Timeout(..) => {}
        }
    }

    fn answered(&mut self, at: usize, id: OpId, answer: OpReply, from_memory: bool) {
        let Some(op) = self.clients[at].ops.remove(&id) else {
            panic!("{} answers request {id:?} twice", name_of(at));
        };
        self.clients[at].write_backs.remove(&id);
        let locked = self.clients[at].locked.remove(&id).unwrap_or_default();
        self.clients[at].effects.remove(&id);
        if has_unknown_outcome(&answer) {
            // The kernel may drop a dentry before the attributes of its inode, so both are noted as of the time of
            // giving up.
            let client = &mut self.clients[at];
            let named = local_changes::names_of(&op);
            let heard = named.iter().filter_map(|(dir, name)| client.kernel.last_known_ino(*dir, name));
            let hit = locked.iter().copied().chain(heard).collect();
            client.abandoned.push((op.clone(), hit));
        }
        if self.has_drained_notifications(at) {
            self.clients[at].moved_dentries.clear();
        }
        self.forget_set_id(at, &op);
        self.apply_reply(at, id, (&op, &answer), &locked);
        if let Op::Write { ino, flags: WriteFlags { write_back: true, .. }, .. } = &op {
            self.check_write_back(at, (id, *ino), &answer);
        }
        if let (Op::Write { ino, offset, data, .. }, OpReply::Failed(_)) = (&op, &answer) {
            self.uncertain_bytes.extend((*offset..).zip(data).map(|(at, byte)| (*ino, at, *byte)));
        }
        let memory = if from_memory { " from memory" } else { "" };
        let what = self.of(&op);
        let goes_by = match (&answer, self.sizes.get(&id)) {
            (OpReply::Attr(_, attr, _), Some(bytes)) if attr.size != *bytes => format!(", and reads {bytes}"),
            _ => String::new(),
        };
        self.trace.push(format!("{} is answered{memory}: {}{goes_by}{what}", name_of(at), short(&answer)));
        if self.clients[at].cache.is_stale() {
            self.stale_replies.insert(id);
        }
        let client = &self.clients[at];
        let ends = matches!(op, Op::Release { .. } | Op::ReleaseDir { .. } | Op::Flush { .. });
        if client.cache.is_flushing_all()
            && !client.cache.is_stale()
            && !ends
            && !has_unknown_outcome(&answer)
        {
            self.early_replies.insert(id);
        }
        self.replies.push((at, id, op, answer));
    }

    /// Returns the tick since which a kernel has been writing back stores into a file.
    pub(crate) fn flushes_since(&self, at: usize, ino: u64) -> Option<u64> {
        let flushes = self.clients[at].write_backs.values();
        flushes.filter(|(of, _)| *of == ino).map(|(_, since)| *since).min()
    }

    fn of(&self, op: &Op) -> String {
        if self.verbose { format!(" ({op:?}, {:?})", self.now) } else { String::new() }
    }

    /// Checks invariant 2 for all clients: no kernel holds a dentry or attributes that differ from the server's.
    /// (Not for changes that the host made without the server.)
    pub fn check_kernels(&self) -> Result<(), String> {
        for (at, client) in
            self.clients.iter().enumerate().filter(|(at, client)| self.must_be_coherent(*at, client))
        {
            let (mut own_names, own_inos) = self.pending_changes(client);
            if !self.has_drained_notifications(at) {
                own_names.extend(client.moved_dentries.iter().cloned());
            }
            for (dir, name, dentry) in client.kernel.valid_dentries(self.time(at)) {
                if own_names.contains(&(dir, name.clone())) {
                    continue;
                }
                let truth = self.server_ino(dir, name);
                if truth != dentry.ino {
                    return Err(format!(
                        "{} believes {dir}/{name} is {:?}, it is {truth:?}",
                        name_of(at),
                        dentry.ino
                    ));
                }
            }
            for believed in client.kernel.partly_valid_attrs(self.time(at)) {
                let ino = believed.id.ino;
                // Attributes of a file without names matter only where it is open; a local removal in flight may have
                // removed another client's new file.
                let is_open = || client.kernel.page_cache.files().any(|(_, file, _)| file == ino);
                let removes =
                    || client.ops.values().any(|op| matches!(op, Op::Unlink { .. } | Op::Rename { .. }));
                let asks =
                    |truth: &Attr| (truth.nlink > 0 || is_open() && !removes()) && !own_inos.contains(&ino);
                let truth = self.attributes(believed.id).filter(asks);
                if truth.is_some_and(|truth| !believed.matches(&truth)) && !self.server.owes(at, ino, true) {
                    return Err(format!("{} believes of {ino} {believed:?}, it is {truth:?}", name_of(at)));
                }
            }
        }
        Ok(())
    }

    /// Returns the inode of a name in the server's tree.
    #[must_use]
    pub fn server_ino(&self, dir: u64, name: &Name) -> Option<u64> {
        self.server.edit(|tree| tree.child_of(dir, name))
    }

    fn attributes(&self, id: nigh_types::NodeId) -> Option<nigh_types::Attr> {
        self.server.edit(|tree| tree.attr(id))
    }
}
