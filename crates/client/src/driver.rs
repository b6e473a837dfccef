//! Carries outputs between cache, remote, kernel and link.
//!
//! Locks, in this order: `gate` (shared, from before a reply is composed until it is written), then `core`, then the
//! queues of the notifier and of the inotify replays, each alone. No thread writes to the kernel or the link while it
//! holds `core`; invalidations and replays are queued under `core`, in the order in which the cache puts them out.
//! The notifier takes `gate` exclusively for a moment, so every reply composed before a recall reaches the kernel
//! before the recall's invalidation (invariant 2).
//!
//! Before each input, on any thread, the driver processes all expired timers. So a process that was stopped, or a
//! machine that was suspended, serves no reply from expired facts.

mod pending;
mod size_barrier;
#[cfg(test)]
pub(crate) mod tests;

use crate::clock::{Clock, wall_time};
use crate::credentials::{self, Callers};
use crate::events::{Events, ReplayReply};
use crate::host::{Host, Submounts};
use crate::idmap::IdMap;
use crate::notifier::Notifier;
use crate::open_credentials::OpenCredentials;
use crate::page_fills::{PageFill, PageFills};
use crate::reply::{self, ReplyFormat};
use crate::reply_barrier::ReplyBarrier;
use crate::revalidations::Revalidations;
use crate::size_notify::SizeNotifier;
use crate::timer::Timer;
use nigh_cache::{Cache, Caller, Op, OpReply, Output, Page};
use nigh_fuse::{Header, Notification, Operation, Transport, abi::ROOT_ID};
use nigh_link::Link;
use nigh_remote::{Compressor, Counters, Event, Output as RemoteOutput, ResumableRemote};
use nigh_types::{Credentials, Errno, Name, OpId, Request, Span, Time, Timestamp};
use parking_lot::{Condvar, Mutex, RwLock};
use pending::{Pending, Role, Sent};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// FUSE opcodes are smaller than this.
const OPCODES: usize = 64;

/// Frames for a link.
pub(crate) struct Outgoing {
    pub link: Link,
    pub frames: Vec<Arc<Vec<u8>>>,
    /// Compression of the frames.
    pub packer: Option<Compressor>,
    /// Whether these are the link's last frames.
    pub last: bool,
}

/// State under the one lock.
pub(crate) struct Core {
    pub cache: Cache,
    pub remote: Box<dyn ResumableRemote>,
    /// Requests that wait for a reply.
    pending: BTreeMap<OpId, Pending>,
    /// The link that carries the session, if there is one.
    link: Option<Link>,
    open_credentials: OpenCredentials,
    /// Frames for the link, in this order.
    outbox: VecDeque<Arc<Vec<u8>>>,
    /// Number of `pending` requests with a delayed reply ([`Pending::delayed`]).
    delayed_count: usize,
    /// Whether the outbox holds the link's last frames, and whether a writer has taken them.
    closing: bool,
    closed: bool,
    next_timeout: Time,
    /// Why the latest connection attempt failed, or the latest connection ended; for people.
    pub problem: String,
    earlier: Counters,
}

impl Core {
    /// Replaces a lost session by a new one; the counters of the old session are kept.
    pub fn replace_session(&mut self, remote: Box<dyn ResumableRemote>, link: Link) {
        let old = self.remote_counters();
        self.earlier = old;
        self.remote = remote;
        self.attach_link(link);
    }

    /// Continues the session over another link.
    pub fn connect(&mut self, now: Time, link: Link) {
        self.attach_link(link);
        self.remote.handle_connect(now);
    }

    fn attach_link(&mut self, link: Link) {
        self.outbox.clear();
        (self.closing, self.closed) = (false, false);
        self.link = Some(link);
    }

    /// Traffic counters over all sessions.
    pub fn remote_counters(&self) -> Counters {
        let mut sum = self.earlier.clone();
        sum.add(&self.remote.counters());
        sum
    }
}

/// Work to do after `core` is unlocked.
#[derive(Default)]
struct Batch {
    /// Before `answers`.
    fills: Vec<PageFill>,
    answers: Vec<Sent>,
    transmits: bool,
    /// A link that is to be shut down.
    dead_link: Option<Link>,
}

/// Driver of one mount.
pub(crate) struct Driver {
    core: Mutex<Core>,
    gate: RwLock<()>,
    outgoing: Condvar,
    timer: Timer,
    clock: Clock,
    pub transport: Arc<dyn Transport>,
    /// The kernel under which callers run.
    pub host: Arc<dyn Host>,
    pub notifier: Notifier,
    pub events: Events,
    pub reply_barrier: ReplyBarrier,
    pub revalidations: Revalidations,
    size_notifier: SizeNotifier,
    page_fills: Arc<PageFills>,
    /// Mapping between local ids and the server's.
    pub ids: IdMap,
    own: Credentials,
    callers: Callers,
    opcodes: [AtomicU64; OPCODES],
    stopped: AtomicBool,
    /// Where the transport is mounted, if it is.
    pub mountpoint: OnceLock<PathBuf>,
    root: AtomicU64,
}

impl Driver {
    pub fn new(
        cache: Cache,
        (remote, link): (Box<dyn ResumableRemote>, Link),
        (transport, host): (Box<dyn Transport>, Arc<dyn Host>),
        (ids, callers): (IdMap, Callers),
        clock: Clock,
    ) -> io::Result<Driver> {
        Ok(Driver {
            core: Mutex::new(Core {
                cache,
                remote,
                pending: BTreeMap::new(),
                delayed_count: 0,
                link: Some(link),
                open_credentials: OpenCredentials::default(),
                outbox: VecDeque::new(),
                closing: false,
                closed: false,
                problem: String::new(),
                next_timeout: Time::FAR,
                earlier: Counters::default(),
            }),
            gate: RwLock::new(()),
            outgoing: Condvar::new(),
            timer: Timer::new()?,
            clock,
            transport: Arc::from(transport),
            notifier: Notifier::new()?,
            events: Events::new()?,
            reply_barrier: ReplyBarrier::new(Arc::clone(&host)),
            revalidations: Revalidations::new(Arc::clone(&host)),
            size_notifier: SizeNotifier::default(),
            page_fills: Arc::default(),
            ids,
            own: credentials::own(),
            callers,
            opcodes: [const { AtomicU64::new(0) }; OPCODES],
            stopped: AtomicBool::new(false),
            mountpoint: OnceLock::new(),
            host,
            root: AtomicU64::new(0),
        })
    }

    /// Mounts below the mount, if it has a place on this machine.
    pub fn submounts(&self) -> Submounts {
        self.mountpoint.get().map_or_else(Submounts::none, |mountpoint| self.host.submounts(mountpoint))
    }

    pub fn count(&self, opcode: u32) {
        if let Some(counter) = usize::try_from(opcode).ok().and_then(|at| self.opcodes.get(at)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Inode number of the export's root, once the session is established.
    pub fn root(&self) -> u64 {
        self.root.load(Ordering::Relaxed)
    }

    /// Requests received, by opcode.
    pub fn opcode_counts(&self) -> Vec<(u32, u64)> {
        let counts =
            (0u32..).zip(&self.opcodes).map(|(code, counter)| (code, counter.load(Ordering::Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// Handles one request of the kernel. If the reply comes from memory, this thread sends it.
    pub fn operate(&self, unique: u64, op_id: OpId, caller: Caller, shape: ReplyFormat, op: Op) {
        let reads = matches!(op, Op::Open { access, .. } | Op::Create { access, .. } if access.read);
        let caller = if reads { self.callers.identified(caller) } else { caller };
        let gate = self.gate.read();
        let mut core = self.core.lock();
        let (now, mut batch) = self.catch_up(&mut core);
        // Only a change of attributes needs the wall clock.
        let wall = if matches!(op, Op::SetAttr { .. }) { wall_time() } else { Timestamp::default() };
        let done = match core.cache.answer_if_removed(wall, op) {
            Ok(answer) => Err(answer),
            Err(op) => core.cache.resolve_nodeid(op).map_err(OpReply::Failed),
        };
        let op = match done {
            Ok(op) => op,
            Err(answer) => {
                drop(core);
                let answer = self.ids.shown(shape, answer);
                self.reply(unique, shape, answer);
                return self.finish(gate, batch);
            }
        };
        self.notifier.note_overlay(&op);
        let (role, pid, locks) = (Role::of(&op, &core.cache), caller.pid, size_barrier::locked_file(&op));
        let pending = Pending { unique, shape, pid, role, locked_file: locks, delayed: None };
        let answer = match core.cache.handle_op(now, op_id, caller, op) {
            Some(answer) => core.delay_for_size(&self.size_notifier, op_id, pending, answer),
            None => {
                core.pending.insert(op_id, pending);
                None
            }
        };
        self.drive(&mut core, now, &mut batch);
        drop(core);
        self.store(&mut batch);
        answer.into_iter().for_each(|sent| self.send(sent));
        self.finish(gate, batch);
    }

    /// Handles a request of a replay child. Returns whether it was answered; if not, it is an ordinary request.
    pub fn answer_replay(&self, header: &Header, operation: &Operation<'_>) -> bool {
        let Some(said) = self.events.replay_filter.reply_to(|n| self.resolve_nodeid(n), header, operation)
        else {
            return false;
        };
        // From memory alone: the child holds kernel locks that other threads wait for.
        let gate = self.gate.read();
        let mut core = self.core.lock();
        let (now, mut batch) = self.catch_up(&mut core);
        let cache = &mut core.cache;
        let answer = match said {
            ReplayReply::Answer(answer) => answer,
            ReplayReply::CurrentAttrs { ino } => {
                let answer =
                    cache.attributes_without_timeout(now, ino).unwrap_or(OpReply::Failed(Errno::CANCELED));
                self.ids.shown(ReplyFormat::Natural, answer)
            }
            ReplayReply::Done { number, names } => {
                let overtaken = names.iter().any(|(dir, name)| cache.is_superseded(number, *dir, name));
                if overtaken { OpReply::Failed(Errno::CANCELED) } else { OpReply::Done }
            }
            ReplayReply::Created { number, dir, name, .. } if cache.is_superseded(number, dir, &name) => {
                OpReply::Failed(Errno::CANCELED)
            }
            ReplayReply::Created { dir, name, kind, otherwise, .. } => {
                let answer = cache.cached_lookup(now, dir, &name, kind).unwrap_or(otherwise);
                self.ids.shown(ReplyFormat::Natural, answer)
            }
        };
        self.drive(&mut core, now, &mut batch);
        drop(core);
        self.reply(header.unique, ReplyFormat::Natural, answer);
        self.finish(gate, batch);
        true
    }

    fn resolve_nodeid(&self, node: u64) -> u64 {
        if node == ROOT_ID { self.root() } else { self.core.lock().cache.inode_of_nodeid(node) }
    }

    /// The nodeids of an inode and of earlier inodes with its number; `None`: the nodeid is the inode number.
    pub fn nodeids_of(&self, ino: u64) -> Option<Vec<u64>> {
        let core = self.core.lock();
        (!core.cache.nodeids_are_inode_numbers()).then(|| core.cache.nodeids_of(ino))
    }

    /// Applies any other input and its consequences.
    pub fn with<R>(&self, input: impl FnOnce(&mut Core, Time) -> R) -> R {
        let gate = self.gate.read();
        let mut core = self.core.lock();
        let (now, mut batch) = self.catch_up(&mut core);
        let result = input(&mut core, now);
        self.drive(&mut core, now, &mut batch);
        drop(core);
        self.finish(gate, batch);
        result
    }

    /// Processes expired timers before any input. Returns the current time and the outputs.
    fn catch_up(&self, core: &mut Core) -> (Time, Batch) {
        let now = (self.clock)();
        let mut batch = Batch::default();
        if now >= core.next_timeout {
            core.cache.handle_timeout(now);
            core.remote.handle_timeout(now);
            self.drive(core, now, &mut batch);
        }
        (now, batch)
    }

    /// Moves outputs until cache and remote are quiet.
    fn drive(&self, core: &mut Core, now: Time, batch: &mut Batch) {
        loop {
            let cache_timeout = self.drive_cache(core, now, batch);
            let (moved, remote_timeout) = drive_remote(core, now, batch);
            if moved {
                continue;
            }
            if core.remote.wants_connection().is_some() {
                core.outbox.clear();
                batch.dead_link = core.link.take().or(batch.dead_link.take());
            } else if core.remote.is_lost() && core.link.is_some() && !core.closing {
                core.closing = true;
                batch.transmits = true;
            }
            let next = cache_timeout.min(remote_timeout);
            if next < core.next_timeout {
                // With `core` held: a later timeout must not replace an earlier one.
                self.timer.set(next);
            }
            core.next_timeout = next;
            self.events.queue(std::iter::from_fn(|| core.cache.poll_change()).collect());
            self.root.store(core.cache.root(), Ordering::Relaxed);
            return;
        }
    }

    fn drive_cache(&self, core: &mut Core, now: Time, batch: &mut Batch) -> Time {
        loop {
            match core.cache.poll_output() {
                Output::Answer { op, answer } => {
                    if let Some(pending) = core.pending.remove(&op) {
                        batch.answers.extend(core.delay_for_size(&self.size_notifier, op, pending, answer));
                        core.release_ready(&self.size_notifier, op, &mut batch.answers);
                    }
                }
                Output::Call { id, caller, mutation_id: name, call } => {
                    let credentials = match caller {
                        Some(caller) => self.callers.credentials(caller, &call),
                        None => self.own.clone(),
                    };
                    let credentials = self.ids.map_caller(credentials);
                    let credentials = core.open_credentials.credentials(id, &call, credentials);
                    core.remote.handle_call(now, id, Request { credentials, mutation_id: name, call });
                }
                Output::Cancel(id) => core.remote.handle_cancel(now, id),
                Output::Store { ino, data } => {
                    batch.fills.push(self.page_fills.begin(ino, core.cache.nodeid_of(ino), data));
                }
                Output::Acknowledge(id) => core.remote.handle_acknowledge(now, id),
                Output::Return(grants) => core.remote.handle_return(now, grants),
                Output::Reclaimed => {
                    core.open_credentials.on_reclaimed();
                    core.remote.handle_reclaimed(now);
                }
                Output::Invalidate { id, stale, urgency } => self.notifier.queue(id, stale, urgency),
                Output::Prune => self.notifier.prune(),
                Output::Timeout(at, _) => return at,
            }
        }
    }

    fn send(&self, Sent { unique, shape, answer, role, pid, length, invalidates_attrs: forgets }: Sent) {
        match (role, &answer) {
            (Some(Role::Opens(ino) | Role::Sets(ino)), _) => self.page_fills.wait(ino),
            (_, OpReply::Created(node, _)) => self.page_fills.wait(node.id.ino),
            _ => {}
        }
        match (role, &answer) {
            (Some(Role::Changes(ino) | Role::Sets(ino)), _) => self.reply_barrier.wait(ino, pid),
            (Some(Role::Unlinks), OpReply::Done) => self.reply_barrier.wait_for_all(pid),
            // Attributes without a timeout may be older than those in earlier replies.
            (_, OpReply::Node(n)) if n.attr_valid == Span::ZERO => self.reply_barrier.wait(n.id.ino, pid),
            (_, OpReply::Page(Page { drops: Some(dir), .. })) => self.invalidate_listing(*dir),
            _ => {}
        }
        if let Some(notice) = length {
            if notice.waits_for_earlier {
                self.size_notifier.wait(notice.sequence, notice.nodeid);
            }
            if let Some(size) = notice.notify_size {
                self.size_notifier.notify(&self.transport, notice.sequence, (notice.nodeid, size));
            }
        }
        forgets.into_iter().for_each(|ino| self.invalidate_attrs(ino));
        let brings_attributes = matches!(answer, OpReply::Attr(..) | OpReply::Node(_));
        let revalidates = match (role, &answer) {
            (Some(Role::Looks(name)), OpReply::Node(node)) if node.known && node.entry_valid > Span::ZERO => {
                Some((name, node.id.ino))
            }
            _ => None,
        };
        self.reply(unique, shape, self.ids.shown(shape, answer));
        if let Some(Role::Reads(ino) | Role::Changes(ino) | Role::Sets(ino)) =
            role.filter(|_| brings_attributes)
        {
            self.reply_barrier.note(ino, pid);
        }
        if let Some((name, ino)) = revalidates {
            self.revalidations.note(name, ino, pid);
        }
    }

    fn reply(&self, unique: u64, shape: ReplyFormat, answer: OpReply) {
        reply::send((&*self.transport, &*self.host), self.root(), unique, shape, answer);
    }

    /// A local change cleared set-user-ID or set-group-ID bits that the kernel still caches (`nigh_cache`'s
    /// `ops/privs.rs`). An invalidation of attributes never blocks in the kernel.
    fn invalidate_attrs(&self, ino: u64) {
        let numbers = self.nodeids_of(ino).unwrap_or_else(|| vec![ino]);
        for number in numbers {
            if let Err(error) = self.transport.notify(&Notification::attributes(number)) {
                tracing::debug!(target: "nigh::kernel", %error, ino, "attributes are not dropped");
            }
        }
        self.core.lock().cache.handle_set_id_forgotten(ino);
    }

    /// The directory's reader has none of its pages locked while it waits for a reply, so this cannot block.
    fn invalidate_listing(&self, dir: u64) {
        let number = || self.core.lock().cache.nodeid_of(dir);
        let node = if dir == self.root() { nigh_fuse::abi::ROOT_ID } else { number() };
        if let Err(error) = self.transport.notify(&Notification::contents(node)) {
            tracing::debug!(target: "nigh::kernel", %error, dir, "a listing is not dropped");
        }
    }

    /// Stores files in the kernel's page cache. Call without `core`, before any reply is sent.
    fn store(&self, batch: &mut Batch) {
        batch.fills.drain(..).for_each(|fill| fill.store(&*self.transport));
    }

    /// Call without `core`. The gate stays held until the replies are written, so that later invalidations come after
    /// them.
    fn finish(&self, gate: parking_lot::RwLockReadGuard<'_, ()>, mut batch: Batch) {
        self.store(&mut batch);
        batch.answers.into_iter().for_each(|sent| self.send(sent));
        drop(gate);
        if let Some(link) = batch.dead_link {
            link.shutdown();
        }
        if batch.transmits {
            self.outgoing.notify_one();
        }
    }

    /// Waits until every reply composed so far has reached the kernel.
    pub fn drain_replies(&self) {
        drop(self.gate.write());
    }

    /// Frames for the link; waits for some. `None`: the mount has ended.
    pub fn next_outgoing(&self) -> Option<Outgoing> {
        let mut core = self.core.lock();
        loop {
            let closing = core.closing && !core.closed;
            if let Some(link) = core.link.clone().filter(|_| closing || !core.outbox.is_empty()) {
                core.closed = core.closing;
                let (frames, packer) = (core.outbox.drain(..).collect(), core.remote.compressor());
                return Some(Outgoing { link, frames, packer, last: closing });
            }
            if self.stopped.load(Ordering::Relaxed) {
                return None;
            }
            self.outgoing.wait(&mut core);
        }
    }

    /// Handles timeouts until the mount ends.
    pub fn run_timer(&self) {
        let mut freed = crate::pressure::Freed::begin();
        while let core = self.core.lock()
            && !self.stopped.load(Ordering::Relaxed)
        {
            self.timer.set(core.next_timeout);
            drop(core);
            self.timer.wait();
            self.with(|_, _| ());
            freed.look();
        }
    }

    /// The thread whose request waits; `None` if it has its reply.
    pub fn caller_of(&self, op: OpId) -> Option<u32> {
        self.core.lock().pending.get(&op).map(|p| p.pid)
    }

    /// Any signal ends a wait for a lock, as soon as the server reports the outcome.
    pub fn note_signal(&self, op: OpId) {
        self.with(|core, _| core.cache.handle_interrupt(op, false));
    }

    /// A fatal signal ends a wait.
    pub fn end_wait(&self, op: OpId) {
        let held = self.core.lock().release_delayed(&self.size_notifier, op);
        match held {
            Some(sent) => self.send(sent),
            None => self.with(|core, _| core.cache.handle_interrupt(op, true)),
        }
    }

    /// Parent and name of the kernel's latest lookup of an inode.
    pub fn parent_entry_of(&self, ino: u64) -> Option<(u64, Name)> {
        self.core.lock().cache.parent_entry_of(ino)
    }

    /// Shuts the link down, with or without unwritten frames.
    pub fn shut_link_down(&self) {
        let link = self.core.lock().link.take();
        if let Some(link) = link {
            link.shutdown();
        }
    }

    pub fn stop(&self) {
        let _core = self.core.lock();
        self.stopped.store(true, Ordering::Relaxed);
        self.outgoing.notify_all();
        self.timer.set(Time(0));
    }
}

/// Moves the remote's outputs; the flag says whether any reached the cache.
fn drive_remote(core: &mut Core, now: Time, batch: &mut Batch) -> (bool, Time) {
    let mut moved = false;
    loop {
        match core.remote.poll_output() {
            RemoteOutput::Event(event) => {
                moved = true;
                match &event {
                    Event::Response { call, response } => core.open_credentials.on_reply(*call, response),
                    Event::Lost { .. } => core.open_credentials.on_session_lost(),
                    Event::Restored { kept: false, .. } => core.open_credentials.on_session_replaced(),
                    _ => {}
                }
                core.cache.handle_event(now, event);
            }
            RemoteOutput::Transmit(bytes) => {
                core.outbox.push_back(bytes);
                batch.transmits = true;
            }
            RemoteOutput::Timeout(at, _) => return (moved, at),
        }
    }
}
