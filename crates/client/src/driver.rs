//! Carries outputs between cache, remote, kernel and link.
//!
//! Locks, in this order: `gate` (shared, from before an answer is composed until it is written), then
//! `core`. Nothing is sent to the kernel or the link with `core` held. The notifier takes `gate` alone
//! for a moment, so that every answer composed before a recall has reached the kernel before the kernel
//! is told to forget (invariant 2).
//!
//! Every input comes after what is due by then, whichever thread brings it: a process that was stopped, or a
//! machine that slept, answers nothing from what has expired meanwhile.

#[cfg(test)]
pub(crate) mod tests;

use crate::alarm::Alarm;
use crate::answers::{self, Shape};
use crate::clock::Clock;
use crate::credentials;
use crate::idmap::IdMap;
use crate::notifier::Notifier;
use nigh_cache::{Answer, Cache, Caller, Invalidation, Op, Output, Stale};
use nigh_fuse::Transport;
use nigh_native::{ClientSession, Counters};
use nigh_remote::{Output as RemoteOutput, Remote};
use nigh_types::{Credentials, Name, OpId, Request, Time};
use parking_lot::{Condvar, Mutex, RwLock};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Opcodes of FUSE are below this.
const OPCODES: usize = 64;

/// What stands under the one lock.
pub(crate) struct Core {
    pub cache: Cache,
    pub remote: ClientSession,
    /// Requests that wait: how to answer them, and whose they are.
    pending: BTreeMap<OpId, Pending>,
    /// Counts sessions: what was meant for one is never sent on another.
    session: u64,
    /// For the link, in this order.
    outbox: VecDeque<Vec<u8>>,
    next_timeout: Time,
    earlier: Counters,
}

impl Core {
    /// A new session takes the place of a lost one; what was sent on the old goes on counting. Its number.
    pub fn adopt(&mut self, remote: ClientSession) -> u64 {
        let old = self.remote_counters();
        self.earlier = old;
        self.remote = remote;
        self.outbox.clear();
        self.session += 1;
        self.session
    }

    /// What went to the remote over all sessions.
    pub fn remote_counters(&self) -> Counters {
        let mut sum = self.earlier.clone();
        let now = self.remote.counters();
        sum.requests += now.requests;
        sum.renewals += now.renewals;
        sum.bytes_sent += now.bytes_sent;
        sum.bytes_received += now.bytes_received;
        for (kind, count) in &now.by_type {
            *sum.by_type.entry(kind).or_default() += count;
        }
        sum
    }
}

struct Pending {
    unique: u64,
    shape: Shape,
    pid: u32,
}

/// What is to be done once the lock is free.
#[derive(Default)]
struct Batch {
    answers: Vec<(u64, Shape, Answer)>,
    stale: Vec<(Invalidation, Vec<Stale>)>,
    transmits: bool,
}

/// One mount's engine.
pub(crate) struct Driver {
    core: Mutex<Core>,
    gate: RwLock<()>,
    outgoing: Condvar,
    alarm: Alarm,
    clock: Clock,
    pub transport: Box<dyn Transport>,
    pub notifier: Notifier,
    /// Who is who on the other side.
    pub ids: IdMap,
    own: Credentials,
    opcodes: [AtomicU64; OPCODES],
    stopped: AtomicBool,
    /// Where the transport is mounted, if it is.
    pub mountpoint: OnceLock<PathBuf>,
    root: AtomicU64,
}

impl Driver {
    pub fn new(
        cache: Cache,
        remote: ClientSession,
        transport: Box<dyn Transport>,
        ids: IdMap,
        clock: Clock,
    ) -> io::Result<Driver> {
        Ok(Driver {
            core: Mutex::new(Core {
                cache,
                remote,
                pending: BTreeMap::new(),
                session: 0,
                outbox: VecDeque::new(),
                next_timeout: Time::FAR,
                earlier: Counters::default(),
            }),
            gate: RwLock::new(()),
            outgoing: Condvar::new(),
            alarm: Alarm::new()?,
            clock,
            transport,
            notifier: Notifier::new()?,
            ids,
            own: credentials::own(),
            opcodes: [const { AtomicU64::new(0) }; OPCODES],
            stopped: AtomicBool::new(false),
            mountpoint: OnceLock::new(),
            root: AtomicU64::new(0),
        })
    }

    pub fn count(&self, opcode: u32) {
        if let Some(counter) = usize::try_from(opcode).ok().and_then(|at| self.opcodes.get(at)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The number of the export's root, once the session stands.
    pub fn root(&self) -> u64 {
        self.root.load(Ordering::Relaxed)
    }

    /// Requests received, by opcode.
    pub fn opcode_counts(&self) -> Vec<(u32, u64)> {
        let counts =
            (0u32..).zip(&self.opcodes).map(|(code, counter)| (code, counter.load(Ordering::Relaxed)));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// One request of the kernel; answered on this thread if memory can.
    pub fn operate(&self, unique: u64, op_id: OpId, caller: Caller, shape: Shape, op: Op) {
        let gate = self.gate.read();
        let mut core = self.core.lock();
        let (now, mut batch) = self.catch_up(&mut core);
        match core.cache.handle_op(now, op_id, caller, op) {
            Some(answer) => {
                self.drive(&mut core, now, &mut batch);
                drop(core);
                answers::send(&*self.transport, self.root(), unique, shape, self.ids.shown(shape, answer));
                self.finish(gate, batch);
            }
            None => {
                core.pending.insert(op_id, Pending { unique, shape, pid: caller.pid });
                self.drive(&mut core, now, &mut batch);
                drop(core);
                self.finish(gate, batch);
            }
        }
    }

    /// Any other input, then all that follows from it.
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

    /// What is due is done, before anything else is taken in. Now, and what follows from it.
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
            let next = cache_timeout.min(remote_timeout);
            if next < core.next_timeout {
                // With the lock held: a later moment must not take the place of an earlier one.
                self.alarm.set(next);
            }
            core.next_timeout = next;
            self.root.store(core.cache.root(), Ordering::Relaxed);
            return;
        }
    }

    fn drive_cache(&self, core: &mut Core, now: Time, batch: &mut Batch) -> Time {
        loop {
            match core.cache.poll_output() {
                Output::Answer { op, answer } => {
                    if let Some(pending) = core.pending.remove(&op) {
                        batch.answers.push((pending.unique, pending.shape, answer));
                    }
                }
                Output::Call { id, caller, name, call } => {
                    let credentials = caller.map_or_else(|| self.own.clone(), credentials::of_caller);
                    let credentials = self.ids.caller(credentials);
                    core.remote.handle_call(now, id, Request { credentials, name, call });
                }
                Output::Cancel(id) => core.remote.handle_cancel(now, id),
                Output::Acknowledge(id) => core.remote.handle_acknowledge(now, id),
                Output::Return(grants) => core.remote.handle_return(now, grants),
                Output::Invalidate { id, stale } => batch.stale.push((id, stale)),
                Output::Timeout(at, _) => return at,
            }
        }
    }

    /// With the lock free: answers first, so that what is dropped right after them is dropped after.
    fn finish(&self, gate: parking_lot::RwLockReadGuard<'_, ()>, batch: Batch) {
        for (unique, shape, answer) in batch.answers {
            answers::send(&*self.transport, self.root(), unique, shape, self.ids.shown(shape, answer));
        }
        drop(gate);
        if batch.transmits {
            self.outgoing.notify_one();
        }
        for (id, stale) in batch.stale {
            self.notifier.queue(id, stale);
        }
    }

    /// Waits until every answer composed so far has reached the kernel.
    pub fn pass_gate(&self) {
        drop(self.gate.write());
    }

    /// Bytes for the link of a session; waits for some. `None`: the mount has ended.
    pub fn next_outgoing(&self) -> Option<(u64, Vec<u8>)> {
        let mut core = self.core.lock();
        loop {
            if !core.outbox.is_empty() {
                let bytes = core.outbox.drain(..).collect::<Vec<_>>().concat();
                return Some((core.session, bytes));
            }
            if self.stopped.load(Ordering::Relaxed) {
                return None;
            }
            self.outgoing.wait(&mut core);
        }
    }

    /// Does what falls due though nothing comes in, until the mount ends.
    pub fn run_timer(&self) {
        loop {
            {
                let core = self.core.lock();
                if self.stopped.load(Ordering::Relaxed) {
                    return;
                }
                self.alarm.set(core.next_timeout);
            }
            self.alarm.wait();
            self.with(|_, _| ());
        }
    }

    /// The thread whose request waits; `None` if it was answered.
    pub fn caller_of(&self, op: OpId) -> Option<u32> {
        self.core.lock().pending.get(&op).map(|p| p.pid)
    }

    /// Any signal ends a wait for a lock, as soon as the server says how it ended.
    pub fn note_signal(&self, op: OpId) {
        self.with(|core, _| core.cache.handle_interrupt(op, false));
    }

    /// A fatal signal ends a wait.
    pub fn end_wait(&self, op: OpId) {
        self.with(|core, _| core.cache.handle_interrupt(op, true));
    }

    /// The name under which the kernel last looked an inode up.
    pub fn home_of(&self, ino: u64) -> Option<(u64, Name)> {
        self.core.lock().cache.home_of(ino)
    }

    pub fn stop(&self) {
        let _core = self.core.lock();
        self.stopped.store(true, Ordering::Relaxed);
        self.outgoing.notify_all();
        self.alarm.set(Time(0));
    }
}

/// Moves the remote's outputs; the flag says whether any reached the cache.
fn drive_remote(core: &mut Core, now: Time, batch: &mut Batch) -> (bool, Time) {
    let mut moved = false;
    loop {
        match core.remote.poll_output() {
            RemoteOutput::Event(event) => {
                moved = true;
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
