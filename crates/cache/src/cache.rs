//! The cache and its contract.

use crate::calls::{CallKind, InflightCall, NewFile, Waiter};
use crate::config::{Config, OnDisconnect};
use crate::counters::{Counters, Gauges};
use crate::dead_dentries::LastTold;
use crate::forgotten::Forgotten;
use crate::inotify::Watches;
use crate::invalidation_queue::{Behinds, DeferredReply};
use crate::listing_snapshots::Snapshots;
use crate::locks::Locks;
use crate::names_only_listing::NameStreams;
use crate::nodeid_map::NodeIdMap;
use crate::op::{Answer, Caller, Fh, Invalidation, Op, Output, Reason};
use crate::oversized::Oversized;
use crate::pending_mutations::Overlay;
use crate::prefetch::PrefetchJobs;
use crate::prune::KernelInodeQueue;
use crate::readdirplus_heuristic::Readers;
use crate::recall::OnInvalidated;
use crate::request_deadlines::Limits;
use crate::session_state::SessionState;
use crate::state::{Directory, Inode, OpenDir, OpenFile};
use crate::ungranted::UngrantedPages;
use crate::updates::SuspendedFacts;
use nigh_types::{
    Call, CallId, CookieKey, Errno, Event, GrantId, Handle, Name, NodeId, OpId, Reply, Response, Term, Time,
};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The metadata cache of one mount.
///
/// **Contract.** Inputs are the `handle_` methods; each takes `now`, which never goes backwards. After every input the
/// driver calls [`Cache::poll_output`] until it returns [`Output::Timeout`], does the outputs in order, and calls
/// `handle_timeout` no later than the moment in that timeout. After each [`Output::Invalidate`] that the kernel has
/// done it calls `handle_invalidated`. Invalidations are done one by one in order, except those with `first`; nothing
/// else waits for them. Then it drains [`Cache::poll_change`].
///
/// `handle_op` answers at once from memory if it can. Otherwise it returns `None` and the reply comes as
/// [`Output::Answer`], exactly once, unless `handle_interrupt` replied first.
///
/// **Invariants.** A fact is served only while its grant lives. The kernel's timeouts end with the grant, or the kernel
/// is invalidated before a recall is acknowledged.
#[derive(Clone, Debug)]
pub struct Cache {
    pub(crate) config: Config,
    pub(crate) key: CookieKey,
    pub(crate) has_acls: bool,
    pub(crate) standing: SessionState,
    /// Latest `now` of an input.
    pub(crate) clock: Time,
    /// Longest time for which facts may be valid.
    pub(crate) term: Term,
    /// Inode number of the export's root; 0 before the first session.
    pub(crate) root: u64,
    /// Boxed: a hash table with churn is twice as large as need be, and three times while it grows.
    pub(crate) inodes: FxHashMap<u64, Box<Inode>>,
    pub(crate) dirs: FxHashMap<u64, Directory>,
    pub(crate) order: VecDeque<u64>,
    pub(crate) row_bytes: u64,
    /// Queue of the inodes that the kernel knows, and the time of the next search for idle directories.
    pub(crate) told: KernelInodeQueue,
    pub(crate) idle_due: Option<Time>,
    pub(crate) files: BTreeMap<Fh, OpenFile>,
    pub(crate) open_dirs: BTreeMap<Fh, OpenDir>,
    pub(crate) snapshots: Snapshots,
    /// Mount point of the root for log lines; empty if there is none.
    pub(crate) shown_root: String,
    pub(crate) dirents: NameStreams,
    pub(crate) oversized: Oversized,
    /// Directory leases that were returned with calls in flight: a reply with an earlier grant on them begins no lease.
    pub(crate) returned: BTreeMap<NodeId, GrantId>,
    /// Invalidation of all dentries that is queued because of a mount below.
    pub(crate) names_going: Option<crate::op::Invalidation>,
    pub(crate) tells_dirents: bool,
    pub(crate) finds_numbers: bool,
    pub(crate) readers: Readers,
    /// Directory that was opened or read last.
    pub(crate) last_read: u64,
    /// Eviction that could not keep to the budget waits until more bytes are in use.
    pub(crate) trim_above: u64,
    /// Number of `files` without a handle.
    pub(crate) opens_without_handle: u64,
    pub(crate) numbers: NodeIdMap,
    pub(crate) last_told: LastTold,
    pub(crate) forgotten: Forgotten,
    pub(crate) flights: BTreeMap<CallId, InflightCall>,
    pub(crate) waiting: BTreeMap<OpId, Waiter>,
    /// Requests queued while there is no session.
    pub(crate) queued_ops: BTreeMap<OpId, (Caller, Op)>,
    pub(crate) limits: Limits,
    /// Reclaim calls without a reply; whether lock reclaims are to be sent; whether [`Output::Reclaimed`] is owed.
    pub(crate) claims: u64,
    pub(crate) claims_locks: bool,
    pub(crate) reclaims: bool,
    /// Handles closed while the remote was away.
    pub(crate) unreleased: Vec<Handle>,
    /// Invalidation of everything that the kernel held when all grants ended. Before it is done a new session answers no
    /// request (`SessionState::Reclaiming`). After `forget_by` the kernel counts as slow, and requests no longer wait.
    pub(crate) forgetting: Option<Invalidation>,
    pub(crate) forget_by: Option<Time>,
    pub(crate) kernel_is_slow: bool,
    /// Replies of a new session that wait for that invalidation.
    pub(crate) deferred_replies: Vec<(CallId, Response)>,
    /// Calls in flight that requests may join.
    pub(crate) lookups: FxHashMap<(u64, Name), CallId>,
    pub(crate) attrs: FxHashMap<u64, CallId>,
    pub(crate) xattrs: FxHashMap<u64, CallId>,
    pub(crate) walks: PrefetchJobs,
    pub(crate) overlay: Overlay,
    pub(crate) locks: Locks,
    pub(crate) holds: SuspendedFacts,
    pub(crate) after_invalidation: BTreeMap<Invalidation, OnInvalidated>,
    /// Invalidations that are not done, in their order.
    pub(crate) untold: BTreeSet<Invalidation>,
    /// Files of which an invalidation drops pages, and whether all.
    pub(crate) dropping: BTreeMap<Invalidation, Vec<(u64, bool)>>,
    pub(crate) ungranted: UngrantedPages,
    /// Timers for grants on open inodes.
    pub(crate) expiry_timers: BTreeSet<(Time, u64)>,
    /// Negative dentries that the kernel may have, by directory; at most `kernel_missing_most`.
    pub(crate) missing_given: BTreeSet<(u64, Name)>,
    /// Cached statfs reply for an inode, and its end.
    pub(crate) space: Option<(u64, nigh_types::Space, Time)>,
    pub(crate) next_call: u64,
    pub(crate) next_fh: u64,
    pub(crate) next_invalidation: u64,
    pub(crate) counters: Counters,
    /// Directories with inotify watchers.
    pub(crate) watches: Watches,
    /// Queued invalidations and replies.
    pub(crate) behind: Behinds,
    pub(crate) out: VecDeque<Output>,
}

impl Cache {
    #[must_use]
    pub fn new(config: Config) -> Cache {
        Cache {
            config,
            key: CookieKey::default(),
            has_acls: false,
            standing: SessionState::Connecting,
            clock: Time(0),
            term: Term::Session,
            root: 0,
            inodes: FxHashMap::default(),
            dirs: FxHashMap::default(),
            order: VecDeque::new(),
            row_bytes: 0,
            told: KernelInodeQueue::default(),
            idle_due: None,
            files: BTreeMap::new(),
            open_dirs: BTreeMap::new(),
            readers: Readers::default(),
            snapshots: Snapshots::default(),
            shown_root: String::new(),
            dirents: NameStreams::default(),
            oversized: Oversized::default(),
            returned: BTreeMap::new(),
            names_going: None,
            tells_dirents: false,
            finds_numbers: false,
            last_read: 0,
            trim_above: 0,
            opens_without_handle: 0,
            numbers: NodeIdMap::default(),
            last_told: LastTold::default(),
            forgotten: Forgotten::default(),
            flights: BTreeMap::new(),
            waiting: BTreeMap::new(),
            queued_ops: BTreeMap::new(),
            limits: Limits::default(),
            claims: 0,
            claims_locks: false,
            reclaims: false,
            unreleased: Vec::new(),
            forgetting: None,
            forget_by: None,
            kernel_is_slow: false,
            deferred_replies: Vec::new(),
            lookups: FxHashMap::default(),
            attrs: FxHashMap::default(),
            xattrs: FxHashMap::default(),
            walks: PrefetchJobs::default(),
            overlay: Overlay::new(config.client, config.incarnation),
            locks: Locks::default(),
            holds: SuspendedFacts::default(),
            after_invalidation: BTreeMap::new(),
            untold: BTreeSet::new(),
            dropping: BTreeMap::new(),
            ungranted: UngrantedPages::new(),
            expiry_timers: BTreeSet::new(),
            missing_given: BTreeSet::new(),
            space: None,
            next_call: 0,
            next_fh: 0,
            next_invalidation: 0,
            counters: Counters::default(),
            watches: Watches::default(),
            behind: Behinds::default(),
            out: VecDeque::new(),
        }
    }

    /// Handles a request of the kernel. `None`: the reply comes as an output.
    pub fn handle_op(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<Answer> {
        self.clock = now;
        let limit = match self.config.on_disconnect {
            OnDisconnect::Fail(span) => Some(now.after(span)),
            _ => None,
        };
        self.write_begins(&op);
        let answer = match op {
            Op::Release { fh, flock } => self.release(now, fh, flock),
            Op::ReleaseDir { fh } => self.release_dir(now, fh),
            Op::Flush { ino, owner } => self.flush(now, id, caller, ino, owner),
            op if self.standing == SessionState::Active => self.start(now, id, caller, op),
            op => self.start_away(now, id, caller, op),
        };
        if answer.is_some() {
            self.counters.hits += 1;
            tracing::trace!(target: "nigh::hit", op = id.0);
        } else {
            if let Some(due) = limit {
                self.limits.begin(id, due);
            }
            tracing::trace!(target: "nigh::miss", op = id.0);
        }
        answer
    }

    pub(crate) fn start(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<Answer> {
        if self.is_lost(&op) {
            return Some(Answer::Failed(Errno::IO));
        }
        let through = op.through();
        let answer = self.begin_op(now, id, caller, op);
        if answer.is_none()
            && let Some(waiting) = self.waiting.get_mut(&id)
        {
            waiting.through = through;
        }
        answer
    }

    fn begin_op(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<Answer> {
        match op {
            Op::Lookup { dir, name } => self.lookup(now, id, caller, dir, name),
            Op::LookupSelf { ino } => self.lookup_self(now, id, caller, ino),
            Op::LookupParent { ino } => self.lookup_parent(now, id, caller, ino),
            Op::GetAttr { ino } => self.attributes(now, id, caller, ino),
            Op::ReadLink { ino } => self.read_link(now, id, caller, ino),
            Op::OpenDir { ino } => self.open_dir(now, id, caller, ino),
            Op::ReadDir { ino, fh, offset, size, plus } => {
                self.read_dir(now, id, caller, ino, fh, offset, size, plus)
            }
            Op::Open { ino, access, append } => self.open(now, id, caller, ino, access, append),
            Op::Read { ino, fh, offset, size } => self.read(now, id, caller, (ino, fh), offset, size),
            Op::Write { ino, fh, offset, data, flags } => {
                self.write(now, id, caller, (ino, fh), (offset, data), flags)
            }
            Op::GetXattr { ino, name, size } => self.xattr(now, id, caller, ino, name, size),
            Op::ListXattr { ino, size } => self.list_xattr(now, id, caller, ino, size),
            Op::SetLock { ino, fh, span, kind, pid, wait } => {
                self.set_lock(now, id, caller, (ino, fh), span, kind, (pid, wait))
            }
            Op::Unlock { ino, span } => self.unlock(now, id, caller, ino, span),
            Op::TestLock { ino, span, kind } => self.test_lock(now, id, caller, ino, span, kind),
            Op::SetAttr { ino, fh, set } => self.set_attr(now, id, caller, (ino, fh), set),
            op @ Op::Rename { .. } => self.rename(now, id, caller, op),
            Op::Unlink { dir, name } => self.unlink(now, id, caller, dir, name),
            Op::Rmdir { dir, name } => self.rmdir(now, id, caller, dir, name),
            Op::StatFs { ino } => self.stat_fs(now, id, caller, ino),
            op => self.start_making(now, id, caller, op),
        }
    }

    fn start_making(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<Answer> {
        match op {
            Op::Symlink { dir, name, target } => {
                self.make(now, id, caller, dir, name, None, |dir, name| Call::Symlink { dir, name, target })
            }
            Op::Mknod { dir, name, kind, mode, umask, rdev } => {
                self.make(now, id, caller, dir, name, None, |dir, name| Call::Mknod {
                    dir,
                    name,
                    kind,
                    mode,
                    umask,
                    rdev,
                })
            }
            Op::Mkdir { dir, name, mode, umask } => {
                self.make(now, id, caller, dir, name, None, |dir, name| Call::Mkdir {
                    dir,
                    name,
                    mode,
                    umask,
                })
            }
            Op::Link { ino, dir, name } => {
                let Some(node) = self.node_ref(ino) else { return Some(Answer::Failed(Errno::STALE)) };
                // With another name its attributes stand under another grant.
                self.keep_open(ino);
                self.make(now, id, caller, dir, name, None, |dir, name| Call::Link { node, dir, name })
            }
            Op::Create { dir, name, mode, umask, exclusive, access, append } => {
                let file = NewFile { append, access, caller };
                self.make(now, id, caller, dir, name, Some(file), |dir, name| Call::Create {
                    dir,
                    name,
                    mode,
                    umask,
                    exclusive,
                    access,
                })
            }
            Op::Tmpfile { dir, mode, umask, access } => {
                let Some(dir) = self.node_ref(dir) else { return Some(Answer::Failed(Errno::STALE)) };
                let file = NewFile { append: false, access, caller };
                let call = Call::Tmpfile { dir, mode, umask, access };
                self.send_for(now, id, caller, CallKind::Tmpfile { file }, call)
            }
            op => self.start_on_inode(now, id, caller, op),
        }
    }

    fn start_on_inode(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<Answer> {
        let (ino, fh) = match &op {
            Op::SetXattr { ino, .. } | Op::RemoveXattr { ino, .. } => (*ino, None),
            Op::GetFlags { ino } => (*ino, None),
            Op::Fsync { ino, fh, .. } => (*ino, *fh),
            Op::Fallocate { ino, fh, .. } | Op::Seek { ino, fh, .. } => (*ino, Some(*fh)),
            Op::CopyRange { to_ino, to_fh, .. } => (*to_ino, Some(*to_fh)),
            _ => return Some(Answer::Failed(Errno::NOSYS)),
        };
        if let Op::SetXattr { name, .. } | Op::RemoveXattr { name, .. } = &op
            && self.is_unsupported(name)
        {
            return Some(Answer::Failed(Errno::OPNOTSUPP));
        }
        let Some((node, handle)) = self.handle_for(ino, fh) else {
            return Some(Answer::Failed(Errno::STALE));
        };
        let (purpose, call) = match op {
            Op::SetXattr { name, value, flags, kill_sgid, .. } => (
                CallKind::Change { ino, xattrs: true },
                Call::SetXattr { node, name, value, flags, kill_sgid },
            ),
            Op::RemoveXattr { name, .. } => {
                (CallKind::Change { ino, xattrs: true }, Call::RemoveXattr { node, name })
            }
            Op::GetFlags { .. } => (CallKind::Flags, Call::GetFlags { node }),
            Op::Fsync { data_only, .. } => (CallKind::Fsync { ino }, Call::Fsync { node, handle, data_only }),
            Op::Fallocate { mode, offset, length, .. } => (
                CallKind::Change { ino, xattrs: false },
                Call::Fallocate { node, handle, mode, offset, length },
            ),
            Op::Seek { offset, data, .. } => (CallKind::Seek, Call::Seek { node, handle, offset, data }),
            Op::CopyRange { ino: from_ino, fh: from_fh, offset: from_offset, to_offset, length, .. } => {
                let Some((from, from_handle)) = self.handle_for(from_ino, Some(from_fh)) else {
                    return Some(Answer::Failed(Errno::STALE));
                };
                (
                    CallKind::Write {
                        ino,
                        offset: to_offset,
                        size: length,
                        flush: false,
                        append: false,
                        direct: None,
                    },
                    Call::CopyRange {
                        from,
                        from_handle,
                        from_offset,
                        to: node,
                        to_handle: handle,
                        to_offset,
                        length,
                    },
                )
            }
            _ => return Some(Answer::Failed(Errno::NOSYS)),
        };
        self.send_for(now, id, caller, purpose, call)
    }

    /// Handles an event from the remote.
    pub fn handle_event(&mut self, now: Time, event: Event) {
        self.clock = now;
        match event {
            Event::Attached(session) => self.handle_session(now, session, false),
            Event::Restored { session, kept } => self.handle_session(now, session, kept),
            Event::Lapsed { why } => self.handle_lapsed(now, &why),
            Event::Response { call, response } if self.is_early(call) => {
                self.deferred_replies.push((call, response))
            }
            Event::Response { call, response } => self.handle_response(now, call, response),
            Event::Recall(recall) => self.handle_recall(recall),
            Event::UpdatePrepare(hold) => self.handle_hold(now, hold),
            Event::UpdateCommit(commit) => self.handle_commit(now, commit),
            Event::Lost { why } => self.handle_lost(now, &why),
        }
    }

    pub(crate) fn handle_reply(&mut self, now: Time, flight: InflightCall, response: Response) {
        if self.asked_for_another(&flight) {
            if let Ok(Reply::Opened { handle, .. }) = response.result {
                self.release_handle(handle);
            }
            return self.answer_all(&flight.waiters, &Answer::Failed(Errno::STALE));
        }
        if self.may_precede_write(&flight, &response) {
            return self.answer_unchanged(now, &flight);
        }
        let files = self.changed_while_asked(&flight.purpose, &response);
        self.note_rights_after(&flight, &response);
        let answer = match &flight.purpose {
            CallKind::Lookup { dir, name } => {
                let (dir, name) = (*dir, name.clone());
                return self.on_lookup_reply(now, flight, dir, &name, response);
            }
            CallKind::Attr { .. } => return self.attr_arrived(now, flight, response),
            CallKind::Target { ino } => return self.target_arrived(now, &flight, *ino, response),
            CallKind::Xattrs { ino } => return self.on_xattrs_reply(now, &flight, *ino, response),
            CallKind::Xattr { ino } => return self.on_xattr_value_reply(now, &flight, *ino, &response),
            CallKind::Read { ino, fh, offset, size } => {
                return self.read_arrived(now, &flight, (*ino, *fh), (*offset, *size), response);
            }
            CallKind::Reopen { .. } | CallKind::Reclaim { .. } => {
                return self.claim_answered(now, &flight, &response);
            }
            CallKind::Renew { ino } => return self.renewed(now, &flight, *ino, &response),
            CallKind::Walk { then } => return self.after_walk(now, *then, response.result.map(drop)),
            CallKind::List { .. } | CallKind::Dirents { .. } | CallKind::Ahead => return,
            CallKind::Open { ino, file } => self.open_arrived(now, &flight, *ino, *file, &response),
            CallKind::Make { dir, name, file } => {
                self.on_create_reply(now, &flight, (*dir, name), *file, &response)
            }
            CallKind::Tmpfile { file } => self.tmpfile_made(now, &flight, *file, &response),
            CallKind::Remove { dir, name } => self.on_remove_reply(now, &flight, (*dir, name), &response),
            CallKind::Rename { .. } => self.on_rename_reply(now, &flight, &response),
            CallKind::Change { ino, xattrs } => {
                self.on_change_reply(now, &flight, (*ino, *xattrs), &response)
            }
            CallKind::Write { ino, offset, .. } => self.write_arrived(now, &flight, *ino, *offset, &response),
            CallKind::Space { ino } => self.space_arrived(&flight, *ino, &response),
            CallKind::Lock { .. } => self.lock_arrived(now, &flight, &response),
            CallKind::Unlock { .. } => self.unlock_arrived(&flight, &response),
            CallKind::Flags | CallKind::Seek | CallKind::Fsync { .. } | CallKind::TestLock => {
                plain(&response)
            }
        };
        let sent = Cache::may_be_older(&flight).then_some(flight.sent);
        let name = match &flight.purpose {
            CallKind::Make { dir, name, .. } => Some((*dir, name.clone())),
            _ => None,
        };
        self.enqueue_reply(&files, &flight.waiters, DeferredReply { answer, sent, name });
        self.own_change_answered(&flight, &response);
        if flight.sequence.is_some() && flight.waiters.is_empty() {
            self.tell_abandoned(&flight, &response);
        }
        self.drop_written(now, &flight, &response);
        if let CallKind::Write { ino, flush: false, .. } = flight.purpose {
            self.start_reads(now, ino);
        }
    }

    /// Lets requests join a call that was just sent, but not a call that was not put out (see [`Cache::send`]).
    pub(crate) fn enter_joins(&mut self, id: CallId, purpose: CallKind) {
        if !self.flights.contains_key(&id) {
            return;
        }
        match purpose {
            CallKind::Lookup { dir, name } => drop(self.lookups.insert((dir, name), id)),
            CallKind::Attr { ino } => drop(self.attrs.insert(ino, id)),
            CallKind::Xattrs { ino } => drop(self.xattrs.insert(ino, id)),
            _ => {}
        }
    }

    pub(crate) fn leave_joins(&mut self, id: CallId, purpose: &CallKind) {
        let removed = match purpose {
            CallKind::Lookup { dir, name } => {
                let key = (*dir, name.clone());
                if self.lookups.get(&key) == Some(&id) { self.lookups.remove(&key) } else { None }
            }
            CallKind::Attr { ino } if self.attrs.get(ino) == Some(&id) => self.attrs.remove(ino),
            CallKind::Xattrs { ino } if self.xattrs.get(ino) == Some(&id) => self.xattrs.remove(ino),
            _ => None,
        };
        debug_assert!(removed.is_none_or(|call| call == id), "a call leaves for itself");
    }

    /// Handles a signal for an application's thread. Only a fatal one ends a wait, except a wait for a lock (S8).
    pub fn handle_interrupt(&mut self, op: OpId, fatal: bool) {
        if !fatal {
            return self.interrupt_lock(op);
        }
        self.abort(op, Errno::INTR);
    }

    /// Replies to a request that waited: the only place that does.
    pub(crate) fn reply(&mut self, op: OpId, answer: Answer) {
        self.limits.end(op);
        self.out.push_back(Output::Answer { op, answer });
    }

    #[must_use]
    pub fn is_waiting(&self, op: OpId) -> bool {
        self.waiting.contains_key(&op)
    }

    #[must_use]
    pub fn is_attached(&self) -> bool {
        matches!(self.standing, SessionState::Active | SessionState::Reclaiming)
    }

    /// Returns the inode number of the export's root.
    #[must_use]
    pub fn root(&self) -> u64 {
        self.root
    }

    /// Returns the next action.
    pub fn poll_output(&mut self) -> Output {
        if self.out.is_empty() && !self.watches.is_empty() {
            self.look_at_watched();
        }
        if let Some(output) = self.out.pop_front() {
            return output;
        }
        self.flush_due();
        if let Some(output) = self.out.pop_front() {
            return output;
        }
        let dues = [
            (self.expiry_timers.first().map(|(due, _)| *due), Reason::GrantEnd),
            (self.limits.next(), Reason::RequestLimit),
            (self.forget_by, Reason::SlowKernel),
            (self.holds.due(), Reason::Commit),
            (self.behind_due(), Reason::Behind),
            (self.idle_due, Reason::Idleness),
            (self.watches.due().filter(|_| self.standing == SessionState::Active), Reason::Watch),
        ];
        let first =
            dues.into_iter().filter_map(|(due, reason)| Some((due?, reason))).min_by_key(|(due, _)| *due);
        let (due, reason) = first.unwrap_or((Time::FAR, Reason::Idle));
        Output::Timeout(due, reason)
    }

    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the gauges; visits all directories.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let mut gauges = Gauges {
            bytes: self.bytes(),
            pending_operations: self.overlay.operations(),
            inodes: self.inodes.len() as u64,
            open_files: self.files.len() as u64,
            ..Gauges::default()
        };
        self.dirs.values().for_each(|directory| {
            let (there, missing) = directory.singles.count();
            gauges.entries += directory.rows.there().max(there);
            gauges.negative += directory.rows.missing() + missing;
            gauges.complete_directories += u64::from(directory.complete);
            gauges.count_grant(self.clock, directory.held.as_ref());
        });
        self.inodes.values().for_each(|inode| {
            gauges.count_grant(self.clock, inode.own.as_ref().map(|(_, held)| held));
            gauges.count_grant(self.clock, inode.data.held.as_ref());
        });
        gauges
    }

    pub(crate) fn new_fh(&mut self) -> Fh {
        self.next_fh += 1;
        Fh(self.next_fh)
    }
}

fn plain(response: &Response) -> Answer {
    match &response.result {
        Ok(Reply::Flags(flags)) => Answer::Flags(*flags),
        Ok(Reply::Offset(offset)) => Answer::Offset(*offset),
        Ok(Reply::Locked(info)) => Answer::Locked(*info),
        Ok(Reply::Done) => Answer::Done,
        Ok(_) => Answer::Failed(Errno::PROTO),
        Err(errno) => Answer::Failed(*errno),
    }
}
