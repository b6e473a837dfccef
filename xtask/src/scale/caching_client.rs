//! A simulated client with a real cache between a small model kernel and its session.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use nigh_cache::{Cache, Caller, Config, InvalidationId, KernelInvalidation, Node, Op, OpReply, Output};
use nigh_native::ClientSession;
use nigh_remote::{Event, Remote};
use nigh_types::{Attr, Credentials, LeaseScope, Name, NodeId, OpId, RecallId, Request, Time};

use super::sim_client::EmulatedLink;

/// The expected stat(2) result of an existing name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpectedStat {
    pub ino: u64,
    pub mode: u32,
    /// Bytes.
    pub size: u64,
    pub nlink: u32,
    /// Seconds and nanoseconds.
    pub mtime: (i64, u32),
    pub ctime: (i64, u32),
}

impl ExpectedStat {
    fn of(id: NodeId, attr: &Attr) -> ExpectedStat {
        let Attr { mode, size, nlink, mtime, ctime, .. } = *attr;
        ExpectedStat { ino: id.ino, mode, size, nlink, mtime: mtime.pair(), ctime: ctime.pair() }
    }
}

/// Number of lookups and attribute reads, by the component that answered them.
#[derive(Clone, Copy, Default)]
pub struct ReadCounts {
    pub kernel: u64,
    pub memory: u64,
    pub server: u64,
}

/// The dentries and attributes of one mount, with their expiry.
#[derive(Default)]
struct Kernel {
    names: BTreeMap<(u64, Name), (Option<u64>, Time)>,
    attrs: BTreeMap<u64, (ExpectedStat, Time)>,
}

/// A read in progress, and its expected result.
#[derive(Debug)]
struct PendingRead {
    what: ReadTarget,
    expected: Option<ExpectedStat>,
    from_memory: bool,
}

#[derive(Clone, Debug)]
enum ReadTarget {
    Name(u64, Name),
    Inode(u64),
}

/// A client's cache and its kernel.
pub struct CachingClient {
    pub cache: Cache,
    kernel: Kernel,
    who: Credentials,
    /// How long the kernel takes to invalidate.
    pub invalidation_delay: Duration,
    telling: VecDeque<(Instant, InvalidationId, Vec<KernelInvalidation>)>,
    ops: u64,
    pending_reads: BTreeMap<OpId, PendingRead>,
    pub read_counts: ReadCounts,
    /// The first read with a wrong result.
    pub wrong: Option<String>,
    /// Replies to all requests other than reads.
    pub answers: BTreeMap<OpId, OpReply>,
    /// Prepared updates received, and for those with an outstanding acknowledgement, their names.
    pub prepared: u64,
    prepared_names: BTreeMap<RecallId, Vec<Name>>,
    /// When the acknowledgement of the latest prepared update of a name was sent.
    pub acknowledged: BTreeMap<Name, Instant>,
}

impl Kernel {
    fn forget(&mut self, stale: &KernelInvalidation) {
        match stale {
            KernelInvalidation::Attr { ino } | KernelInvalidation::Data { ino, .. } => {
                self.attrs.remove(ino);
            }
            KernelInvalidation::Entry { dir, name } | KernelInvalidation::RemovedDentry { dir, name } => {
                self.names.remove(&(*dir, name.clone()));
            }
            KernelInvalidation::AllDentries(_) => self.names.clear(),
        }
    }

    fn node(&mut self, now: Time, at: (u64, Name), node: &Node) {
        self.names.insert(at, (Some(node.id.ino), now.after(node.entry_valid)));
        self.attributes(now, node.id, &node.attr, now.after(node.attr_valid));
    }

    fn attributes(&mut self, now: Time, id: NodeId, attr: &Attr, until: Time) {
        match now < until {
            true => drop(self.attrs.insert(id.ino, (ExpectedStat::of(id, attr), until))),
            false => drop(self.attrs.remove(&id.ino)),
        }
    }

    fn fact(&self, now: Time, ino: u64) -> Option<ExpectedStat> {
        self.attrs.get(&ino).filter(|(_, until)| now < *until).map(|(fact, _)| *fact)
    }

    /// Returns the cached result, or the request that the kernel would send.
    fn look(&self, now: Time, what: &ReadTarget) -> Result<Option<ExpectedStat>, Op> {
        match what {
            ReadTarget::Name(dir, name) => {
                let dentry = self.names.get(&(*dir, name.clone())).filter(|(_, until)| now < *until);
                match dentry {
                    Some((None, _)) => Ok(None),
                    Some((Some(ino), _)) => self.look(now, &ReadTarget::Inode(*ino)),
                    None => Err(Op::Lookup { dir: *dir, name: name.clone() }),
                }
            }
            ReadTarget::Inode(ino) => self.fact(now, *ino).map(Some).ok_or(Op::GetAttr { ino: *ino }),
        }
    }

    /// Applies a reply; returns its result for the read.
    fn answered(
        &mut self,
        now: Time,
        what: &ReadTarget,
        answer: &OpReply,
    ) -> Result<Option<ExpectedStat>, String> {
        match (what, answer) {
            (ReadTarget::Name(dir, name), OpReply::Node(node)) => {
                self.node(now, (*dir, name.clone()), node);
                Ok(Some(ExpectedStat::of(node.id, &node.attr)))
            }
            (ReadTarget::Name(dir, name), OpReply::Missing(valid)) => {
                self.names.insert((*dir, name.clone()), (None, now.after(*valid)));
                Ok(None)
            }
            (_, OpReply::Attr(id, attr, valid)) => {
                self.attributes(now, *id, attr, now.after(*valid));
                Ok(Some(ExpectedStat::of(*id, attr)))
            }
            _ => Err(format!("{answer:?}")),
        }
    }
}

impl CachingClient {
    pub fn new(who: Credentials, number: u64) -> CachingClient {
        let config = Config { client: number, incarnation: number, ..Config::default() };
        CachingClient {
            cache: Cache::new(config),
            kernel: Kernel::default(),
            who,
            invalidation_delay: Duration::ZERO,
            telling: VecDeque::new(),
            ops: 0,
            pending_reads: BTreeMap::new(),
            read_counts: ReadCounts::default(),
            wrong: None,
            answers: BTreeMap::new(),
            prepared: 0,
            prepared_names: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
        }
    }

    /// Sends a request of the kernel; its reply is put into `answers`.
    pub fn ask(&mut self, now: Time, op: Op) -> OpId {
        self.ops += 1;
        let id = OpId(self.ops);
        if let Some(answer) = self.cache.handle_op(now, id, Caller::default(), op) {
            self.answers.insert(id, answer);
        }
        id
    }

    /// Reads a name, as a process does, and checks the result.
    pub fn look(&mut self, now: Time, dir: u64, name: &Name, expected: Option<ExpectedStat>) {
        self.begin(now, ReadTarget::Name(dir, name.clone()), expected);
    }

    /// Reads an open inode, and checks the result.
    pub fn look_at(&mut self, now: Time, ino: u64, expected: ExpectedStat) {
        self.begin(now, ReadTarget::Inode(ino), Some(expected));
    }

    fn begin(&mut self, now: Time, what: ReadTarget, expected: Option<ExpectedStat>) {
        match self.kernel.look(now, &what) {
            Ok(found) => {
                self.read_counts.kernel += 1;
                self.check(&what, expected, Ok(found), "the kernel");
            }
            Err(op) => {
                self.ops += 1;
                let id = OpId(self.ops);
                let answer = self.cache.handle_op(now, id, Caller::default(), op);
                self.pending_reads.insert(id, PendingRead { what, expected, from_memory: answer.is_some() });
                if let Some(answer) = answer {
                    self.answered(now, id, answer);
                }
            }
        }
    }

    /// Returns whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.pending_reads.is_empty() && self.telling.is_empty() && self.prepared_names.is_empty()
    }

    fn answered(&mut self, now: Time, id: OpId, answer: OpReply) {
        let Some(PendingRead { what, expected, from_memory }) = self.pending_reads.remove(&id) else {
            self.answers.insert(id, answer);
            return;
        };
        let found = self.kernel.answered(now, &what, &answer);
        match from_memory {
            true => self.read_counts.memory += 1,
            false => self.read_counts.server += 1,
        }
        self.check(&what, expected, found, if from_memory { "memory" } else { "the server" });
    }

    fn check(
        &mut self,
        what: &ReadTarget,
        expected: Option<ExpectedStat>,
        found: Result<Option<ExpectedStat>, String>,
        by: &str,
    ) {
        if found != Ok(expected) && self.wrong.is_none() {
            self.wrong = Some(format!("{what:?} is {expected:?}, and {by} says {found:?}"));
        }
    }

    /// Handles a session event.
    pub fn handle_event(&mut self, now: Time, event: Event) {
        if let Event::UpdatePrepare(hold) = &event {
            let names = hold.facts.iter().filter(|held| held.covers == LeaseScope::Directory);
            let names = names.flat_map(|held| held.names.iter().cloned()).collect();
            self.prepared_names.insert(hold.id, names);
            self.prepared += 1;
        }
        self.cache.handle_event(now, event);
    }

    /// Executes the cache's output; returns whether there was any, and the next deadline.
    pub fn drive(
        &mut self,
        session: &mut ClientSession,
        link: EmulatedLink,
        at: Instant,
    ) -> (bool, Option<Instant>) {
        let now = link.time(at);
        let mut moved = false;
        loop {
            match self.cache.poll_output() {
                Output::Answer { op, answer } => self.answered(now, op, answer),
                Output::Call { id, mutation_id: name, call, .. } => {
                    session.handle_call(
                        now,
                        id,
                        Request { credentials: self.who.clone(), mutation_id: name, call },
                    );
                }
                Output::Cancel(id) => session.handle_cancel(now, id),
                Output::Acknowledge(id) => {
                    for name in self.prepared_names.remove(&id).unwrap_or_default() {
                        self.acknowledged.insert(name, at);
                    }
                    session.handle_acknowledge(now, id);
                }
                Output::Return(grants) => session.handle_return(now, grants),
                Output::Prune | Output::Store { .. } => {}
                Output::Reclaimed => session.handle_reclaimed(now),
                Output::Invalidate { id, stale, .. } => {
                    let behind = self.telling.back().map_or(at, |(due, ..)| at.max(*due));
                    self.telling.push_back((behind + self.invalidation_delay, id, stale));
                }
                Output::Timeout(due, _) => {
                    let next = self.telling.front().map(|(due, ..)| *due);
                    if next.is_none_or(|next| next > at) {
                        return (moved, link.instant(due).into_iter().chain(next).min());
                    }
                    let Some((_, id, stale)) = self.telling.pop_front() else { continue };
                    stale.iter().for_each(|stale| self.kernel.forget(stale));
                    self.cache.handle_invalidated(now, id);
                }
            }
            moved = true;
        }
    }
}

impl ReadCounts {
    pub fn and(self, other: ReadCounts) -> ReadCounts {
        ReadCounts {
            kernel: self.kernel + other.kernel,
            memory: self.memory + other.memory,
            server: self.server + other.server,
        }
    }

    /// Returns the difference from an earlier count.
    pub fn since(self, then: ReadCounts) -> ReadCounts {
        ReadCounts {
            kernel: self.kernel - then.kernel,
            memory: self.memory - then.memory,
            server: self.server - then.server,
        }
    }
}
