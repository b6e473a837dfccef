//! Calls in flight: their kind, the requests that wait for them, and concurrent changes that their replies may predate.

use crate::cache::Cache;
use crate::locks::LockOwner;
use crate::op::{Caller, Fh, Op, OpReply, Output};
use nigh_types::{
    Access, Attr, Bug, Call, CallId, Errno, Grant, Handle, LeaseScope, LockInfo, Name, NodeId, OpId,
    Response, Time, planted,
};

mod race_log;

pub(crate) use race_log::{ConcurrentDentry, RaceLog};

/// Kind of a call, with the arguments that its reply needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum CallKind {
    Lookup {
        dir: u64,
        name: Name,
    },
    Attr {
        ino: u64,
    },
    List {
        dir: u64,
    },
    /// Names-only listing for one open directory.
    ListNames {
        dir: u64,
        fh: Fh,
    },
    /// Prefetch of directories that no caller has asked for yet.
    Prefetch,
    ReadLink {
        ino: u64,
    },
    Xattrs {
        ino: u64,
    },
    /// One xattr value that was too large for the set of all xattrs.
    Xattr {
        ino: u64,
    },
    StatFs {
        ino: u64,
    },
    Flags,
    Read {
        ino: u64,
        fh: Fh,
        offset: u64,
        size: u32,
    },
    Seek,
    Open {
        ino: u64,
        file: OpenParams,
    },
    /// Creates a name; `file` is set if the call also opens it.
    Create {
        dir: u64,
        name: Name,
        file: Option<OpenParams>,
    },
    Tmpfile {
        file: OpenParams,
    },
    Remove {
        dir: u64,
        name: Name,
    },
    Rename {
        from: u64,
        name: Name,
        to: u64,
        new_name: Name,
        exchange: bool,
        whiteout: bool,
    },
    /// Changes attributes or xattrs of one inode.
    Change {
        ino: u64,
        xattrs: bool,
    },
    Write {
        ino: u64,
        offset: u64,
        size: u64,
        /// Write-back of mmap stores by the kernel.
        writeback: bool,
        /// The remote chooses the offset.
        append: bool,
        /// The write bypasses the kernel's page cache, through this open file.
        direct: Option<Fh>,
    },
    Fsync {
        ino: u64,
    },
    Lock {
        holder: LockOwner,
        range: LockInfo,
        wait: bool,
        /// A cancel was sent: the remote ends the wait.
        cancelled: bool,
    },
    Unlock {
        holder: LockOwner,
        /// For an unlock of the whole file: the number of locks granted to its owner so far.
        whole_after: Option<u64>,
        closing: bool,
    },
    TestLock,
    /// Reopens a file in a new session: an open file, or without `fh` the handle that pins the inode.
    Reopen {
        ino: u64,
        fh: Option<Fh>,
        handle: Handle,
    },
    /// Reclaims a lock in a new session.
    ReclaimLock {
        holder: LockOwner,
        range: LockInfo,
    },
    /// Revalidates the pages that the kernel holds of an open file.
    Revalidate {
        ino: u64,
    },
    /// Gives the remote an inode's path again; `then` is resent afterwards.
    ResolvePath {
        then: CallId,
    },
}

impl CallKind {
    /// Returns whether the call releases the locks of a closed file or a dead caller.
    pub(crate) fn releases_locks(&self) -> bool {
        matches!(self, CallKind::Unlock { closing: true, .. })
    }

    /// Returns whether the call reclaims state in a session that has forgotten it.
    pub(crate) fn is_reclaim(&self) -> bool {
        matches!(self, CallKind::Reopen { .. } | CallKind::ReclaimLock { .. })
    }

    /// Returns whether the call writes back mmap stores.
    pub(crate) fn is_writeback(&self) -> bool {
        matches!(self, CallKind::Write { writeback: true, .. })
    }

    /// Returns whether the reply updates the cache.
    pub(crate) fn updates_cache(&self) -> bool {
        !matches!(
            self,
            CallKind::Lock { .. }
                | CallKind::Unlock { .. }
                | CallKind::TestLock
                | CallKind::ReclaimLock { .. }
                | CallKind::ResolvePath { .. }
                | CallKind::StatFs { .. }
                | CallKind::Seek
                | CallKind::Flags
        )
    }

    /// Returns whether concurrent changes are recorded for the call. (A lock call may wait for hours.)
    pub(crate) fn tracks_races(&self) -> bool {
        !matches!(self, CallKind::Lock { .. })
    }

    /// Returns the names that a change binds or unbinds.
    pub(crate) fn names(&self) -> Vec<(u64, &Name)> {
        match self {
            CallKind::Create { dir, name, .. } | CallKind::Remove { dir, name } => vec![(*dir, name)],
            CallKind::Rename { from, name, to, new_name, .. } => vec![(*from, name), (*to, new_name)],
            _ => Vec::new(),
        }
    }

    /// Returns whether the change binds or unbinds this name.
    pub(crate) fn binds(&self, dir: u64, name: &Name) -> bool {
        self.names().contains(&(dir, name))
    }

    /// Returns whether the change binds or unbinds a name of this directory.
    pub(crate) fn binds_in(&self, dir: u64) -> bool {
        self.names().iter().any(|(of, _)| *of == dir)
    }
}

/// Open parameters of a file about to be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OpenParams {
    pub append: bool,
    pub access: Access,
    pub caller: Caller,
}

/// Form of the reply that a waiting request needs once the call has its reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ReplyKind {
    /// As the call's kind says.
    Reply,
    Xattr {
        name: Vec<u8>,
        size: u32,
    },
    XattrNames {
        size: u32,
    },
    Page {
        fh: Fh,
        offset: nigh_types::Cookie,
        size: u32,
        plus: bool,
    },
    OpenDir {
        ino: u64,
    },
    /// Attributes for a lookup by inode number.
    SelfLookup,
}

/// Request that waits for a call.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub call: CallId,
    pub caller: Caller,
    pub want: ReplyKind,
    pub joined: bool,
    /// The request came after the call was sent. The reply may predate the request, so it answers the request only if a
    /// grant says that nothing has changed since.
    pub reply_may_predate: bool,
    /// Open files that the request uses.
    pub open_files: [Option<Fh>; 2],
}

#[derive(Clone, Debug)]
pub(crate) struct InflightCall {
    pub purpose: CallKind,
    /// [`Call::type_name`].
    pub call_name: &'static str,
    /// Handles that the call uses.
    pub handles: [Option<Handle>; 2],
    pub sent: Time,
    pub caller: Option<Caller>,
    /// Kept to resend the call after a `ResolvePath`; `None` if the call is never resent.
    pub resend: Option<Call>,
    /// Number of `ResolvePath` calls sent for this call.
    pub resolve_attempts: usize,
    /// The number of the mutation id; `None`: the call is no mutation.
    pub sequence: Option<u64>,
    pub waiters: Vec<OpId>,
    pub race_log: RaceLog,
    /// A chunk of the reply has arrived.
    pub has_chunk: bool,
    /// For a listing: the grants of its chunks.
    pub grants: Vec<Grant>,
    /// For a listing that no grant covers: its entries.
    pub detached_entries: Option<Box<crate::dir_entries::DirEntries>>,
    /// For a listing over the memory bound: later chunks are dropped.
    pub abandoned: bool,
    /// The pages of this call are invalidated right after its reply, for example because a data recall has passed it.
    pub drop_data: bool,
    /// For a removal: the directory that the kernel takes for the victim.
    pub victim_dir: Option<NodeId>,
    /// For a read: a local write of its pages was sent after it.
    pub read_before_write: bool,
    /// For a write-back of mmap stores: the request, to start it again.
    pub writeback_op: Option<Box<Op>>,
}

impl InflightCall {
    pub fn new(purpose: CallKind, call_name: &'static str, sent: Time) -> InflightCall {
        InflightCall {
            purpose,
            call_name,
            handles: [None; 2],
            sent,
            caller: None,
            resend: None,
            resolve_attempts: 0,
            sequence: None,
            waiters: Vec::new(),
            race_log: RaceLog::default(),
            has_chunk: false,
            grants: Vec::new(),
            detached_entries: None,
            abandoned: false,
            drop_data: false,
            victim_dir: None,
            read_before_write: false,
            writeback_op: None,
        }
    }

    /// Returns whether these facts were recalled after the call was sent: the reply may be older than the cache.
    pub fn recalled(&self, node: NodeId, covers: LeaseScope) -> bool {
        let tainted = self.race_log.all_grants_ended || self.race_log.recalled.contains(&(node, covers));
        tainted && !planted(Bug::ForgetsRecalls)
    }

    pub fn is_mutation(&self) -> bool {
        self.sequence.is_some()
    }

    /// Returns whether this is a lock call without a waiter.
    pub fn is_unwanted_lock(&self) -> bool {
        matches!(self.purpose, CallKind::Lock { cancelled, .. } if cancelled || self.waiters.is_empty())
    }

    /// Returns whether this is a change without a waiter.
    fn is_abandoned(&self) -> bool {
        self.is_mutation() && self.waiters.is_empty()
    }

    /// Returns whether a later reply bound the name to something else than `id`.
    pub fn is_contradicted(&self, dir: u64, name: &Name, id: Option<NodeId>) -> bool {
        self.race_log.name(dir, name).is_some_and(|learned| learned.id != id)
    }

    /// Returns whether the reply to a change may be older than the directory lease: the lease came after the call was
    /// sent, and the reply carries none.
    pub fn may_predate_lease(&self, dir: NodeId, grants: &[Grant]) -> bool {
        self.race_log.granted_dirs.contains(&dir.ino)
            && self.granted(grants, dir, LeaseScope::Directory).is_none()
    }

    /// Returns the reply's grant on these facts, unless a recall overtook the reply.
    pub fn granted<'a>(&self, grants: &'a [Grant], node: NodeId, covers: LeaseScope) -> Option<&'a Grant> {
        if self.recalled(node, covers) { None } else { crate::grants::on(grants, node, covers) }
    }
}

impl Cache {
    /// Sends a call without a waiter.
    pub(crate) fn send(
        &mut self,
        now: Time,
        caller: Option<Caller>,
        purpose: CallKind,
        call: Call,
    ) -> CallId {
        self.next_call += 1;
        let id = CallId(self.next_call);
        if self.answers_stale() && !purpose.releases_locks() {
            // The call is not sent, and no request waits for it: see `wait`.
            return id;
        }
        let name = call.is_mutation().then(|| {
            let leaving = self.suspend_victims(&purpose);
            self.pending_mutations.begin(leaving)
        });
        let handled = match &call {
            Call::Read { handle, .. } | Call::Write { handle, .. } => handle.is_some(),
            Call::ResolvePath { .. } | Call::Prefetch { .. } | Call::ListNames { .. } => true,
            _ => false,
        };
        let goes = self.expected_victim(&purpose);
        tracing::trace!(target: "nigh::fetch", call = id.0, kind = call.type_name());
        self.flights.insert(
            id,
            InflightCall {
                handles: handles_of(&call),
                caller,
                resend: (!handled).then(|| call.clone()),
                sequence: name.map(|n| n.sequence),
                victim_dir: goes,
                ..InflightCall::new(purpose, call.type_name(), now)
            },
        );
        self.out.push_back(Output::Call { id, caller, mutation_id: name, call });
        id
    }

    /// Makes a request wait for a call.
    pub(crate) fn wait(
        &mut self,
        op: OpId,
        caller: Caller,
        call: CallId,
        want: ReplyKind,
        joined: bool,
    ) -> Option<OpReply> {
        if self.answers_stale() {
            return Some(OpReply::Failed(Errno::IO));
        }
        self.counters.misses += 1;
        if let Some(flight) = self.flights.get_mut(&call) {
            flight.waiters.push(op);
        }
        self.waiting.insert(
            op,
            Waiter { call, caller, want, joined, reply_may_predate: joined, open_files: [None; 2] },
        );
        None
    }

    /// Returns the waiters that came after the call was sent.
    pub(crate) fn late_joiners(&self, waiters: &[OpId]) -> Vec<OpId> {
        waiters
            .iter()
            .copied()
            .filter(|op| self.waiting.get(op).is_some_and(|w| w.reply_may_predate))
            .collect()
    }

    /// Resends a call for late waiters: a reply without a grant was composed before they came.
    pub(crate) fn resend_for_joiners(&mut self, now: Time, late: Vec<OpId>, purpose: CallKind, call: Call) {
        if late.is_empty() {
            return;
        }
        let id = self.send(now, None, purpose.clone(), call);
        for op in &late {
            if let Some(waiting) = self.waiting.get_mut(op) {
                waiting.call = id;
                waiting.reply_may_predate = false;
            }
        }
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.waiters = late;
        }
        self.enter_joins(id, purpose);
    }

    /// Sends a call for one request.
    pub(crate) fn send_for(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        purpose: CallKind,
        call: Call,
    ) -> Option<OpReply> {
        let on_behalf = (call.is_mutation() || matches!(call, Call::Open { .. })).then_some(caller);
        let id = self.send(now, on_behalf, purpose, call);
        self.wait(op, caller, id, ReplyKind::Reply, false)
    }

    /// Replies to a waiting request.
    pub(crate) fn reply_to(&mut self, op: OpId, answer: OpReply) {
        if let Some(waiting) = self.waiting.remove(&op) {
            self.counters.waits += 1;
            self.counters.joins += u64::from(waiting.joined);
            self.reply(op, answer);
        }
    }

    pub(crate) fn reply_all(&mut self, waiters: &[OpId], answer: &OpReply) {
        for &op in waiters {
            self.reply_to(op, answer.clone());
        }
    }

    /// Handles a call's response, or a chunk of it.
    pub(crate) fn handle_response(&mut self, now: Time, id: CallId, response: Response) {
        if let Some(&CallKind::List { dir }) = self.flights.get(&id).map(|flight| &flight.purpose) {
            // A deadline that passed in mid-listing detaches the entries so far, before more come.
            self.live_directory(now, dir);
        }
        let Some(mut flight) = self.flights.remove(&id) else { return };
        let lost_its_way = response.result == Err(Errno::STALE) && !flight.is_unwanted_lock();
        if lost_its_way && self.resolve_again(now, id, &mut flight) {
            self.flights.insert(id, flight);
            return;
        }
        if let CallKind::List { dir } = flight.purpose {
            if let Some(flight) = self.on_listing_chunk(now, id, dir, flight, response) {
                self.flights.insert(id, flight);
            }
            return self.after_listing_chunk(now, dir);
        }
        if let CallKind::ListNames { dir, fh } = flight.purpose {
            return self.on_names_reply(now, id, (dir, fh), flight, response);
        }
        if matches!(flight.purpose, CallKind::Prefetch) {
            self.on_prefetch_reply(now, id, flight, response);
            return self.trim(now);
        }
        if let Some(sequence) = flight.sequence {
            self.pending_mutations.finish(sequence);
        }
        self.leave_joins(id, &flight.purpose);
        self.refresh_grant_ids(&flight, &response.grants);
        self.handle_reply(now, flight, response);
        self.trim(now);
    }

    /// Sends a `ResolvePath` when the remote cannot find an inode: gives it the names from the root. Once for each
    /// inode that the call names.
    fn resolve_again(&mut self, now: Time, id: CallId, flight: &mut InflightCall) -> bool {
        let Some(call) = &flight.resend else { return false };
        let anchors = crate::node_ref::nodes_to_resolve(call);
        let (node, names) = match (anchors.get(flight.resolve_attempts), anchors[0]) {
            (Some(Some(node)), _) => (*node, self.path_to(*node)),
            // A reclaimed inode may have moved by a change that took effect and has no reply yet.
            (_, Some(node)) if flight.purpose.is_reclaim() && flight.resolve_attempts == 1 => {
                let moved = self.path_by(node, |cache, at| cache.parent_after_renames(at));
                (node, moved.filter(|moved| self.path_to(node).as_ref() != Some(moved)))
            }
            _ => return false,
        };
        let Some(names) = names else { return false };
        flight.resolve_attempts += 1;
        self.send(now, None, CallKind::ResolvePath { then: id }, Call::ResolvePath { node, names });
        true
    }

    /// Handles the reply to a `ResolvePath`: resends the call that waited for it, or fails it for good.
    pub(crate) fn on_resolved(&mut self, now: Time, then: CallId, result: Result<(), Errno>) {
        let Some(flight) = self.flights.get_mut(&then) else { return };
        if flight.is_abandoned() {
            // The call was not sent yet, so the change is not made (S8).
            flight.resend = None;
            return self.handle_response(now, then, Response::plain(Err(Errno::INTR)));
        }
        match (result, &flight.resend) {
            (Ok(()), Some(call)) if !flight.is_unwanted_lock() => {
                flight.sent = now;
                let (call, caller) = (call.clone(), flight.caller);
                let name = flight.sequence.map(|s| self.pending_mutations.name(s));
                self.out.push_back(Output::Call { id: then, caller, mutation_id: name, call });
            }
            _ => {
                if !flight.purpose.is_reclaim() {
                    flight.resend = None;
                }
                self.handle_response(now, then, Response::plain(Err(Errno::STALE)));
            }
        }
    }
}

/// Returns the attributes of an inode that a reply carried.
pub(crate) fn attr_after(response: &Response, ino: u64) -> Option<Attr> {
    response.after.iter().find(|(node, _)| node.ino == ino).map(|(_, attr)| *attr)
}

/// Returns the handles that a call names.
fn handles_of(call: &Call) -> [Option<Handle>; 2] {
    match call {
        Call::Read { handle, .. }
        | Call::Write { handle, .. }
        | Call::Seek { handle, .. }
        | Call::SetAttr { handle, .. }
        | Call::Fallocate { handle, .. }
        | Call::Fsync { handle, .. } => [*handle, None],
        Call::CopyRange { from_handle, to_handle, .. } => [*from_handle, *to_handle],
        _ => [None, None],
    }
}
