//! Calls in flight, the requests that wait for them, and requests that begin later.
//!
//! The owner records which requests wait for which call, and what has changed since a call was sent. It has no facts: the
//! modules in `ops` and `inputs` interpret replies.

mod deadlines;
mod inflight;
mod joins;
mod kernel_locks;
mod kind;
mod mutations;
mod race_log;
mod races;

pub(crate) use inflight::{InflightCall, Waiter, attr_after};
pub(crate) use kernel_locks::PageRange;
pub(crate) use kind::{CallKind, OpenParams, ReplyKind};
pub(crate) use race_log::{ConcurrentDentry, RaceLog};

use crate::op::{Caller, Fh, Op};
use deadlines::RequestDeadlines;
use joins::Joins;
use mutations::PendingMutations;
use nigh_types::{CallId, MutationId, OpId, Time};
use std::collections::{BTreeMap, BTreeSet};

/// Calls in flight and waiting requests of one mount.
#[derive(Clone, Debug)]
pub(crate) struct Calls {
    last_id: u64,
    inflight: BTreeMap<CallId, InflightCall>,
    waiters: BTreeMap<OpId, Waiter>,
    /// Requests that begin later: there is no session, or they follow a write in flight.
    queued: BTreeMap<OpId, (Caller, Op)>,
    /// Of these, reads for which reads ahead were sent.
    asking: BTreeSet<OpId>,
    joins: Joins,
    deadlines: RequestDeadlines,
    mutations: PendingMutations,
}

impl Calls {
    pub fn new(client: u64, incarnation: u64) -> Calls {
        Calls {
            last_id: 0,
            inflight: BTreeMap::new(),
            waiters: BTreeMap::new(),
            queued: BTreeMap::new(),
            asking: BTreeSet::new(),
            joins: Joins::default(),
            deadlines: RequestDeadlines::default(),
            mutations: PendingMutations::new(client, incarnation),
        }
    }

    /// Returns the id of another call.
    pub fn new_id(&mut self) -> CallId {
        self.last_id += 1;
        CallId(self.last_id)
    }

    pub fn last_id(&self) -> CallId {
        CallId(self.last_id)
    }

    pub fn insert(&mut self, id: CallId, call: InflightCall) {
        self.inflight.insert(id, call);
    }

    pub fn remove(&mut self, id: CallId) -> Option<InflightCall> {
        self.inflight.remove(&id)
    }

    pub fn inflight(&self, id: CallId) -> Option<&InflightCall> {
        self.inflight.get(&id)
    }

    pub fn inflight_mut(&mut self, id: CallId) -> Option<&mut InflightCall> {
        self.inflight.get_mut(&id)
    }

    pub fn contains(&self, id: CallId) -> bool {
        self.inflight.contains_key(&id)
    }

    pub fn is_empty(&self) -> bool {
        self.inflight.is_empty()
    }

    pub fn ids(&self) -> Vec<CallId> {
        self.inflight.keys().copied().collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = (CallId, &InflightCall)> {
        self.inflight.iter().map(|(id, call)| (*id, call))
    }

    pub fn values(&self) -> impl Iterator<Item = &InflightCall> {
        self.inflight.values()
    }

    /// Returns the calls for which a request waits.
    pub fn awaited(&self) -> impl Iterator<Item = &InflightCall> {
        self.inflight.values().filter(|call| !call.waiters.is_empty())
    }

    /// Takes all calls: the session is over.
    pub fn take_all(&mut self) -> Vec<InflightCall> {
        self.joins = Joins::default();
        std::mem::take(&mut self.inflight).into_values().collect()
    }

    /// Forgets reclaim calls: another session takes over. Its listings go on: entries that came before serve the
    /// waiters, whether they come again or not.
    pub fn forget_reclaims(&mut self) {
        self.inflight.retain(|_, call| !call.purpose.is_reclaim());
        for call in self.inflight.values_mut().filter(|call| call.has_chunk) {
            call.detached_entries.get_or_insert_default();
            call.grants.clear();
        }
    }

    /// Makes a request wait for a call.
    pub fn wait(&mut self, op: OpId, waiter: Waiter) {
        if let Some(call) = self.inflight.get_mut(&waiter.call) {
            call.waiters.push(op);
        }
        self.waiters.insert(op, waiter);
    }

    pub fn is_waiting(&self, op: OpId) -> bool {
        self.waiters.contains_key(&op)
    }

    pub fn waiter(&self, op: OpId) -> Option<&Waiter> {
        self.waiters.get(&op)
    }

    /// Removes a request that is answered, or begins again. The call keeps it in its list of waiters.
    pub fn remove_waiter(&mut self, op: OpId) -> Option<Waiter> {
        self.waiters.remove(&op)
    }

    pub fn waiting_ops(&self) -> Vec<OpId> {
        self.waiters.keys().copied().collect()
    }

    /// Records the open files through which a waiting request goes.
    pub fn note_open_files(&mut self, op: OpId, open_files: [Option<Fh>; 2]) {
        if let Some(waiter) = self.waiters.get_mut(&op) {
            waiter.open_files = open_files;
        }
    }

    /// Returns the waiting requests that use one of these open files.
    pub fn ops_through(&self, files: &BTreeSet<Fh>) -> Vec<OpId> {
        let uses = |waiter: &Waiter| waiter.open_files.iter().flatten().any(|fh| files.contains(fh));
        self.waiters.iter().filter(|(_, waiter)| uses(waiter)).map(|(op, _)| *op).collect()
    }

    /// Returns the waiters that came after the call was sent.
    pub fn late_joiners(&self, waiters: &[OpId]) -> Vec<OpId> {
        let is_late = |op: &OpId| self.waiters.get(op).is_some_and(|waiter| waiter.reply_may_predate);
        waiters.iter().copied().filter(is_late).collect()
    }

    /// Makes requests wait for another call, which was sent after they came.
    pub fn move_waiters(&mut self, ops: Vec<OpId>, to: CallId) {
        for op in &ops {
            if let Some(waiter) = self.waiters.get_mut(op) {
                (waiter.call, waiter.reply_may_predate) = (to, false);
            }
        }
        if let Some(call) = self.inflight.get_mut(&to) {
            call.waiters.extend(ops);
        }
    }

    /// Makes a waiting request wait for another call. `joined`: the call was sent before the request came.
    pub fn join(&mut self, op: OpId, call: CallId, joined: bool) {
        let (Some(waiter), Some(inflight)) = (self.waiters.get_mut(&op), self.inflight.get_mut(&call)) else {
            return;
        };
        (waiter.call, waiter.reply_may_predate) = (call, joined);
        inflight.waiters.push(op);
    }

    /// Makes a request wait for another call of the same kind.
    pub fn wait_instead(&mut self, op: OpId, call: CallId) {
        if let Some(waiter) = self.waiters.get_mut(&op) {
            waiter.call = call;
        }
        if let Some(call) = self.inflight.get_mut(&call) {
            call.waiters.push(op);
        }
    }

    /// Queues a request, to begin later.
    pub fn queue(&mut self, op: OpId, caller: Caller, what: Op) {
        self.queued.insert(op, (caller, what));
    }

    /// Queues a read behind reads ahead; `asks`: some of them were sent for it.
    pub fn queue_read(&mut self, op: OpId, caller: Caller, what: Op, asks: bool) {
        self.queue(op, caller, what);
        if asks {
            self.asking.insert(op);
        }
    }

    /// Returns whether reads ahead were sent for a request. It sends none again: those that came may have given way.
    pub fn is_asking(&self, op: OpId) -> bool {
        self.asking.contains(&op)
    }

    /// Forgets that reads ahead were sent for a request, unless it is queued. Returns whether they were.
    pub fn take_asking(&mut self, op: OpId) -> bool {
        !self.queued.contains_key(&op) && self.asking.remove(&op)
    }

    pub fn queue_all(&mut self, mut ops: BTreeMap<OpId, (Caller, Op)>) {
        self.queued.append(&mut ops);
    }

    pub fn queued(&self) -> impl Iterator<Item = (OpId, &Op)> {
        self.queued.iter().map(|(op, (_, what))| (*op, what))
    }

    pub fn queued_op(&self, op: OpId) -> Option<&Op> {
        self.queued.get(&op).map(|(_, what)| what)
    }

    pub fn remove_queued(&mut self, op: OpId) -> Option<Op> {
        self.asking.remove(&op);
        self.queued.remove(&op).map(|(_, what)| what)
    }

    pub fn take_queued(&mut self) -> BTreeMap<OpId, (Caller, Op)> {
        self.asking.clear();
        std::mem::take(&mut self.queued)
    }

    /// Takes the queued reads of a file.
    pub fn take_queued_reads(&mut self, ino: u64) -> BTreeMap<OpId, (Caller, Op)> {
        let is_read =
            |(_, (_, op)): &(OpId, (Caller, Op))| matches!(op, Op::Read { ino: file, .. } if *file == ino);
        let (reads, rest) = std::mem::take(&mut self.queued).into_iter().partition(is_read);
        self.queued = rest;
        reads
    }

    pub fn begin_deadline(&mut self, op: OpId, due: Time) {
        self.deadlines.begin(op, due);
    }

    pub fn end_deadline(&mut self, op: OpId) {
        self.deadlines.end(op);
    }

    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.next()
    }

    /// Takes the requests whose deadline has passed.
    pub fn take_expired(&mut self, now: Time) -> Vec<OpId> {
        std::iter::from_fn(|| self.deadlines.take_expired(now)).collect()
    }

    /// Names the next mutation, which takes names from these inodes.
    pub fn begin_mutation(&mut self, losing_name: Vec<u64>) -> MutationId {
        self.mutations.begin(losing_name)
    }

    pub fn mutation_id(&self, sequence: u64) -> MutationId {
        self.mutations.name(sequence)
    }

    /// Ends a mutation: the remote has replied, or never will.
    pub fn finish_mutation(&mut self, sequence: u64) {
        self.mutations.finish(sequence);
    }

    /// Returns whether a mutation in flight takes a name from this inode.
    pub fn is_losing_name(&self, ino: u64) -> bool {
        self.mutations.is_losing_name(ino)
    }

    pub fn pending_mutations(&self) -> u64 {
        self.mutations.operations()
    }
}
