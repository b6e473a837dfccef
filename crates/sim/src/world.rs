//! Clients of one fake server, stepped by hand.

mod backend;
mod facts;
mod own;
mod stores;
mod taken;
mod telling;
mod words;

use crate::kernel::Kernel;
pub use backend::Backend;
pub use facts::{Fact, Facts, XATTR};
use nigh_cache::{Answer, Cache, Caller, Config, Level, OnDisconnect, Op, Output};
use nigh_remote::fake::FakeServer;
use nigh_remote::tree::TreeConfig;
use nigh_remote::{Event, Output as RemoteOutput, Remote};
use nigh_types::{Attr, Name, OpId, Span, Time, WriteFlags};
use own::{Effect, names_of};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use stores::Stored;
use telling::Telling;
use words::{away_line, became_line, held_line, words};
pub use words::{given_up, name_of, short};

/// What a name led to, and since which tick.
pub type Past = Vec<(u64, Option<u64>)>;

/// One mount: a cache, its remote, and the kernel that it serves.
#[derive(Clone)]
pub struct Client<B: Backend = FakeServer> {
    pub cache: Cache,
    pub control: B::Control,
    pub kernel: Kernel,
    /// Invalidations are carried out at once unless these are held,
    pub hold_invalidations: bool,
    /// all of them, and not only those that wait for their turn.
    pub asleep: bool,
    /// What waits may fail: it gives up after a while, or its server was away for longer than its term.
    may_fail: bool,
    /// Dropping pages takes until this is taken back.
    pub drops_slowly: bool,
    /// Others' changes are told to it in the place of recalls.
    takes_pushes: bool,
    /// So many droppings of pages may be stuck at the same time.
    pub workers: u32,
    telling: Telling,
    /// What its kernel was asked to forget, and may.
    pub pruned: Vec<u64>,
    pub(crate) remote: B::Remote,
    pub(crate) ops: BTreeMap<OpId, Op>,
    /// Changes whose callers were killed: their outcome is unknown until the remote has answered.
    abandoned: Vec<(Op, Vec<u64>)>,
    /// Inodes whose names a request holds on to until it is answered.
    locked: BTreeMap<OpId, Vec<u64>>,
    /// What its kernel went by when it asked.
    asked: BTreeMap<OpId, u64>,
    /// What changes of names that are not answered have done.
    effects: BTreeMap<OpId, Effect>,
    /// When its kernel began to write stores back.
    flushes: BTreeMap<OpId, (u64, u64)>,
    /// Names to which an own rename took along for how long the old ones were believed: they are dropped behind its answer.
    carried: Vec<(u64, Name)>,
}

/// Everything there is. Clones share their server.
#[derive(Clone)]
pub struct World<B: Backend = FakeServer> {
    pub now: Time,
    pub server: B,
    pub clients: Vec<Client<B>>,
    /// What happened since it was last taken, a line each.
    pub trace: Vec<String>,
    /// Answers since they were last taken: client, request, answer.
    pub answers: Vec<(usize, OpId, Op, Answer)>,
    /// Of these, the ones that did not claim to be so ([`Cache::is_stale`]).
    pub stale_answers: BTreeSet<OpId>,
    /// By which size of an open file who asked for its attributes goes on.
    pub sizes: BTreeMap<OpId, u64>,
    /// And those that came before a kernel had forgotten what it held before its client was away.
    pub early_answers: BTreeSet<OpId>,
    /// Names whose past is recorded: what each led to, from which moment on. Moments are counted by `tick`:
    /// whatever may have changed the tree begins a new one.
    pub past: BTreeMap<(u64, Name), Past>,
    pub tick: u64,
    /// Data and xattrs of inodes, recorded in the same way.
    pub facts: Facts,
    /// Stores into maps by client and inode,
    stores: BTreeMap<(usize, u64), Stored>,
    /// and those that are being written back.
    flushed: BTreeMap<OpId, Stored>,
    /// Bytes of files whose writers were not told whether they are there: inode, offset, byte.
    doubtful: BTreeSet<(u64, u64, u8)>,
    /// Grants end of themselves: then stores may be refused.
    pub limited: bool,
    /// Stores that are lost, or were written over what others had written since they were made.
    pub undone: Vec<String>,
    /// The trace names requests and calls whole.
    pub wordy: bool,
    /// Requests are by so many threads by turns, the first of which is not visible.
    pub threads: u64,
    /// Time passes without the caches' timers, which fire when it passes again.
    pub timers_are_late: bool,
    pub(crate) next_op: u64,
}

impl World {
    #[must_use]
    pub fn new(config: TreeConfig) -> World {
        World::over(FakeServer::new(config))
    }

    /// A new client; its number.
    pub fn connect(&mut self, level: Level) -> usize {
        self.connect_with(Config { level, ..Config::default() })
    }

    /// The same with settings of its own (but for who it is).
    pub fn connect_with(&mut self, config: Config) -> usize {
        let remote = self.server.connect(self.now);
        self.join(config, remote.control(), remote)
    }

    /// From now on, and in later sessions too.
    pub fn take_pushes(&mut self, at: usize) {
        self.clients[at].takes_pushes = true;
        self.clients[at].control.takes_pushes(true);
    }

    /// A session takes the place of the one that a client lost.
    pub fn reconnect(&mut self, at: usize) {
        let remote = self.server.connect(self.now);
        remote.control().takes_pushes(self.clients[at].takes_pushes);
        self.clients[at].control = remote.control();
        self.clients[at].remote = remote;
        self.settle();
    }
}

impl<B: Backend> World<B> {
    /// With nobody in it.
    #[must_use]
    pub fn over(server: B) -> World<B> {
        World {
            now: Time(Span::from_secs(1).0),
            server,
            clients: Vec::new(),
            trace: Vec::new(),
            answers: Vec::new(),
            stale_answers: BTreeSet::new(),
            sizes: BTreeMap::new(),
            early_answers: BTreeSet::new(),
            past: BTreeMap::new(),
            tick: 0,
            facts: Facts::default(),
            stores: BTreeMap::new(),
            flushed: BTreeMap::new(),
            doubtful: BTreeSet::new(),
            limited: false,
            undone: Vec::new(),
            wordy: false,
            threads: 1,
            timers_are_late: false,
            next_op: 0,
        }
    }

    /// A client whose end of its session is that; its number.
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
            drops_slowly: false,
            takes_pushes: false,
            workers: 64,
            telling: Telling::default(),
            pruned: Vec::new(),
            remote,
            ops: BTreeMap::new(),
            abandoned: Vec::new(),
            locked: BTreeMap::new(),
            asked: BTreeMap::new(),
            effects: BTreeMap::new(),
            flushes: BTreeMap::new(),
            carried: Vec::new(),
        });
        self.settle();
        at
    }

    /// Whether a client's process runs.
    #[must_use]
    pub fn is_awake(&self, at: usize) -> bool {
        self.server.runs(at)
    }

    /// What a client's clock says now.
    #[must_use]
    pub fn time(&self, at: usize) -> Time {
        self.server.clock(at, self.now)
    }

    /// One request of a client's kernel.
    pub fn ask(&mut self, at: usize, op: Op) -> OpId {
        let id = self.put(at, op);
        self.settle();
        id
    }

    fn put(&mut self, at: usize, op: Op) -> OpId {
        self.next_op += 1;
        let id = OpId(self.next_op);
        let now = self.time(at);
        let client = &mut self.clients[at];
        let heard = |(dir, name): &(u64, Name)| client.kernel.last_heard(*dir, name);
        let mut locked: Vec<u64> = names_of(&op).iter().filter_map(heard).collect();
        if let Op::Rename { to, new_name, .. } = &op {
            // What is replaced the kernel has just looked up.
            locked.extend(self.server.edit(|tree| tree.child_of(*to, new_name)));
        }
        client.locked.insert(id, locked);
        client.asked.insert(id, client.kernel.version());
        client.kernel.begins(&op);
        let names = names_of(&op);
        if !names.is_empty() {
            let effect = Effect::awaited(names.iter().map(|(dir, name)| self.truth(*dir, name)));
            self.clients[at].effects.insert(id, effect);
        }
        self.begin_flush(at, id, &op);
        let client = &mut self.clients[at];
        if let Op::Write { ino, flags: WriteFlags { flush: true, .. }, .. } = &op {
            client.flushes.insert(id, (*ino, self.tick));
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

    /// One request and its answer.
    ///
    /// # Panics
    /// If it has to wait, with nothing under way that could end that.
    pub fn answer(&mut self, at: usize, op: Op) -> Answer {
        let id = self.ask(at, op);
        let answer = self.answers.iter().rev().find(|(_, of, ..)| *of == id).map(|(.., a)| a.clone());
        answer.unwrap_or_else(|| panic!("{id:?} is not answered:\n{}", self.trace.join("\n")))
    }

    /// Notes what the watched names lead to now.
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
        self.judge_bytes();
        self.facts.observe_attributes(&self.server, tick);
    }

    /// Whether a request still waits.
    #[must_use]
    pub fn waits(&self, at: usize, op: OpId) -> bool {
        self.clients[at].ops.contains_key(&op)
    }

    /// A signal that is not fatal.
    pub fn signal(&mut self, at: usize, op: OpId) {
        self.clients[at].cache.handle_interrupt(op, false);
        self.settle();
    }

    pub fn interrupt(&mut self, at: usize, op: OpId) {
        self.clients[at].cache.handle_interrupt(op, true);
        self.settle();
    }

    /// Time passes; what falls due happens in its order.
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

    /// A client is told the time.
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

    /// Moves outputs until all is quiet; the next moment at which something is due.
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
        moved |= self.tell(at);
        let remote_due = loop {
            let client = &mut self.clients[at];
            match client.remote.poll_output() {
                RemoteOutput::Timeout(due, _) => break due,
                RemoteOutput::Transmit(_) => {}
                RemoteOutput::Event(event) => {
                    moved = true;
                    client.may_fail |= matches!(
                        event,
                        Event::Lapsed { .. } | Event::Lost { .. } | Event::Restored { kept: false, .. }
                    );
                    if let Some(line) = away_line(at, &event) {
                        self.trace.push(line);
                    } else if let Event::Recall(recall) = &event {
                        let line = format!(
                            "{} is asked to give back {:?} of {}",
                            name_of(at),
                            recall.covers,
                            recall.node.ino
                        );
                        self.trace.push(line);
                    } else if let Event::Hold(hold) = &event {
                        self.trace.push(format!("{} is to hold back {}", name_of(at), held_line(hold)));
                    } else if let Event::Commit(commit) = &event {
                        self.trace.push(format!("{} hears that {}", name_of(at), became_line(commit)));
                    } else if self.wordy {
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

    /// When a client has something to do that nobody brings.
    pub(crate) fn timer(&mut self, at: usize) -> Time {
        self.drive(at).1
    }

    /// What makes a client's future, but for its end of the session, as text that is the same for the same state.
    pub(crate) fn write_client(&self, at: usize, out: &mut String) -> fmt::Result {
        let Client { cache, kernel, telling, ops, abandoned, locked, asked, effects, carried, .. } =
            &self.clients[at];
        write!(out, "{cache:?}{telling:?}{ops:?}{abandoned:?}{locked:?}{effects:?}{carried:?}")?;
        kernel.write(asked, out)
    }

    /// Does what a cache puts out.
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
            Output::Call { id, caller: _, name, call } => {
                let what = if self.wordy { format!(" {call:?} as {id:?}") } else { String::new() };
                self.trace.push(format!("{} calls {}{what}", name_of(at), call.type_name()));
                let credentials = nigh_types::Credentials::default();
                let request = nigh_types::Request { credentials, name, call };
                self.clients[at].remote.handle_call(now, id, request);
                self.observe();
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
            Output::Invalidate { id, stale, first } => self.queue(at, id, stale, first),
            Output::Prune => {
                let cache = &mut self.clients[at].cache;
                let inos = std::iter::from_fn(|| Some(cache.poll_prune()).filter(|inos| !inos.is_empty()));
                let inos: Vec<u64> = inos.flatten().collect();
                self.clients[at].pruned.extend(inos);
            }
            Output::Timeout(..) => {}
        }
    }

    fn answered(&mut self, at: usize, id: OpId, answer: Answer, from_memory: bool) {
        let Some(op) = self.clients[at].ops.remove(&id) else {
            panic!("{} answers request {id:?} twice", name_of(at));
        };
        self.clients[at].flushes.remove(&id);
        let locked = self.clients[at].locked.remove(&id).unwrap_or_default();
        self.clients[at].effects.remove(&id);
        if given_up(&answer) {
            // As it knew them when it gave up: it may forget a name before the attributes of what that leads to.
            let client = &mut self.clients[at];
            let named = own::names_of(&op);
            let heard = named.iter().filter_map(|(dir, name)| client.kernel.last_heard(*dir, name));
            let hit = locked.iter().copied().chain(heard).collect();
            client.abandoned.push((op.clone(), hit));
        }
        if self.is_told(at) {
            self.clients[at].carried.clear();
        }
        self.forget_set_id(at, &op);
        self.take_in(at, id, (&op, &answer), &locked);
        if let Op::Write { ino, flags: WriteFlags { flush: true, .. }, .. } = &op {
            self.judge_store(at, (id, *ino), &answer);
        }
        if let (Op::Write { ino, offset, data, .. }, Answer::Failed(_)) = (&op, &answer) {
            self.doubtful.extend((*offset..).zip(data).map(|(at, byte)| (*ino, at, *byte)));
        }
        let memory = if from_memory { " from memory" } else { "" };
        let what = self.of(&op);
        let goes_by = match (&answer, self.sizes.get(&id)) {
            (Answer::Attr(_, attr, _), Some(bytes)) if attr.size != *bytes => format!(", and reads {bytes}"),
            _ => String::new(),
        };
        self.trace.push(format!("{} is answered{memory}: {}{goes_by}{what}", name_of(at), short(&answer)));
        if self.clients[at].cache.is_stale() {
            self.stale_answers.insert(id);
        }
        let client = &self.clients[at];
        let ends = matches!(op, Op::Release { .. } | Op::ReleaseDir { .. } | Op::Flush { .. });
        if client.cache.is_forgetting() && !client.cache.is_stale() && !ends && !given_up(&answer) {
            self.early_answers.insert(id);
        }
        self.answers.push((at, id, op, answer));
    }

    /// Since when a kernel writes back stores into that file.
    pub(crate) fn flushes_since(&self, at: usize, ino: u64) -> Option<u64> {
        let flushes = self.clients[at].flushes.values();
        flushes.filter(|(of, _)| *of == ino).map(|(_, since)| *since).min()
    }

    fn of(&self, op: &Op) -> String {
        if self.wordy { format!(" ({op:?}, {:?})", self.now) } else { String::new() }
    }

    /// Invariant 2, for all clients: no kernel believes of a name or of attributes what is not so.
    /// (Not for changes that the host made behind the server's back.)
    pub fn check_kernels(&self) -> Result<(), String> {
        for (at, client) in self.clients.iter().enumerate().filter(|(at, client)| self.is_judged(*at, client))
        {
            let (mut own_names, own_inos) = self.under_way(client);
            if !self.is_told(at) {
                own_names.extend(client.carried.iter().cloned());
            }
            for (dir, name, dentry) in client.kernel.names(self.time(at)) {
                if own_names.contains(&(dir, name.clone())) {
                    continue;
                }
                let truth = self.truth(dir, name);
                if truth != dentry.ino {
                    return Err(format!(
                        "{} believes {dir}/{name} is {:?}, it is {truth:?}",
                        name_of(at),
                        dentry.ino
                    ));
                }
            }
            for believed in client.kernel.believed(self.time(at)) {
                let ino = believed.id.ino;
                // Of what has no name any more only who has it open can ask; an own removal that is out may have hit what
                // another has put there.
                let is_open = || client.kernel.kept.files().any(|(_, file, _)| file == ino);
                let removes =
                    || client.ops.values().any(|op| matches!(op, Op::Unlink { .. } | Op::Rename { .. }));
                let asks =
                    |truth: &Attr| (truth.nlink > 0 || is_open() && !removes()) && !own_inos.contains(&ino);
                let truth = self.attributes(believed.id).filter(asks);
                if truth.is_some_and(|truth| !believed.is_so(&truth)) && !self.server.owes(at, ino, true) {
                    return Err(format!("{} believes of {ino} {believed:?}, it is {truth:?}", name_of(at)));
                }
            }
        }
        Ok(())
    }

    /// What a name leads to in the tree.
    #[must_use]
    pub fn truth(&self, dir: u64, name: &Name) -> Option<u64> {
        self.server.edit(|tree| tree.child_of(dir, name))
    }

    fn attributes(&self, id: nigh_types::NodeId) -> Option<nigh_types::Attr> {
        self.server.edit(|tree| tree.attr(id))
    }
}
