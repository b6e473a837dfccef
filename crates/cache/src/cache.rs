//! The cache and its contract: the façade that hands inputs on to the modules for them.

use crate::config::{Config, OnDisconnect};
use crate::counters::{Counters, Gauges};
use crate::facts::forgetting;
use crate::inotify::{RemoteChange, WatchStatus};
use crate::inputs::{recall, responses, session_events, timers, updates};
use crate::kernel::NotifyLevel;
use crate::memory::pressure;
use crate::op::{Caller, InvalidationId, Op, OpReply, Output, Reason};
use crate::ops::file_prefetch::{self, FileRead};
use crate::ops::{aborting, begin, closing, locks, lookup, page_fill, privs, readdir, removed, restart};
use crate::out::{prune, queue};
use crate::page_cache::{full_pages, ranges};
use crate::state::State;
use crate::view::{self, locked, paths};
use crate::watching::{local_changes, looks};
use nigh_types::{Errno, Event, Kind, Name, NodeId, OpId, Time, Timestamp};
use std::collections::BTreeSet;

/// The metadata cache of one mount.
///
/// **Contract.** Inputs are the `handle_` methods; each takes `now`, which never goes backwards. After every input the
/// driver calls [`Cache::poll_output`] until it returns [`Output::Timeout`], does the outputs in order, and calls
/// `handle_timeout` no later than the moment in that timeout. After each [`Output::Invalidate`] that the kernel has
/// done it calls `handle_invalidated`. Invalidations are done one by one in order, except urgent ones; no other output
/// waits for them. Then it drains [`Cache::poll_change`].
///
/// `handle_op` answers at once from memory if it can. Otherwise it returns `None` and the reply comes as
/// [`Output::Answer`], exactly once, unless `handle_interrupt` replied first.
///
/// **Invariants.** A fact is served only while its grant lives. The kernel's timeouts end with the grant, or the kernel
/// is invalidated before a recall is acknowledged.
#[derive(Clone, Debug)]
pub struct Cache {
    pub(crate) state: State,
}

impl Cache {
    #[must_use]
    pub fn new(config: Config) -> Cache {
        Cache { state: State::new(config) }
    }

    /// Handles a request of the kernel. `None`: the reply comes as an output.
    pub fn handle_op(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
        let state = &mut self.state;
        state.clock = now;
        let limit = match state.config.on_disconnect {
            OnDisconnect::Fail(span) => Some(now.after(span)),
            _ => None,
        };
        full_pages::note_write_started(state, &op);
        let read = op.as_read();
        let answer = match op {
            Op::Release { fh, flock } => closing::release(state, now, fh, flock),
            Op::ReleaseDir { fh } => readdir::release_dir(state, now, fh),
            Op::Flush { ino, owner } => locks::flush(state, now, id, caller, ino, owner),
            op if state.session.is_active() => begin::start(state, now, id, caller, op),
            op => restart::start_disconnected(state, now, id, caller, op),
        };
        if let Some((ino, fh, offset, size)) = read {
            page_fill::note_read(state, offset, answer.as_ref());
            let (is_hit, is_queued) = (answer.is_some(), state.calls.queued_op(id).is_some());
            file_prefetch::note_read(state, now, FileRead { ino, fh, offset, size, is_hit, is_queued });
        }
        if answer.is_some() {
            state.counters.hits += 1;
            tracing::trace!(target: "nigh::hit", op = id.0);
        } else {
            if let Some(due) = limit {
                state.calls.begin_deadline(id, due);
            }
            tracing::trace!(target: "nigh::miss", op = id.0);
        }
        answer
    }

    /// Handles an event from the remote.
    pub fn handle_event(&mut self, now: Time, event: Event) {
        let state = &mut self.state;
        state.clock = now;
        match event {
            Event::Attached(session) => session_events::handle_session(state, now, session, false),
            Event::Restored { session, kept } => session_events::handle_session(state, now, session, kept),
            Event::Expired { why } => session_events::handle_lapsed(state, now, &why),
            Event::Response { call, response } if state.is_deferred(call) => {
                state.session.defer(call, response)
            }
            Event::Response { call, response } => responses::handle_response(state, now, call, response),
            Event::Recall(recall) => recall::handle_recall(state, recall),
            Event::UpdatePrepare(hold) => updates::handle_update_prepare(state, now, hold),
            Event::UpdateCommit(commit) => updates::handle_update_commit(state, now, commit),
            Event::Lost { why } => session_events::handle_lost(state, now, &why),
        }
    }

    /// Handles a signal for an application's thread. Only a fatal one ends a wait, except a wait for a lock (S8).
    pub fn handle_interrupt(&mut self, op: OpId, fatal: bool) {
        let state = &mut self.state;
        if !fatal {
            return locks::interrupt_lock(state, op);
        }
        aborting::abort(state, op, Errno::INTR);
    }

    /// Returns the next action.
    pub fn poll_output(&mut self) -> Output {
        let state = &mut self.state;
        if state.out.is_empty() && !state.watches.is_empty() {
            looks::compare_watched(state);
        }
        if let Some(output) = state.out.pop_front() {
            return output;
        }
        queue::flush_due(state);
        if let Some(output) = state.out.pop_front() {
            return output;
        }
        let dues = [
            (state.kernel.next_timer(), Reason::GrantEnd),
            (state.calls.next_deadline(), Reason::RequestDeadline),
            (state.session.flush_due(), Reason::SlowKernel),
            (state.store.suspended.due(), Reason::Commit),
            (queue::queue_due(state), Reason::NotifierQueue),
            (state.idle_due, Reason::IdleDirectories),
            (state.watches.due().filter(|_| state.session.is_active()), Reason::Watch),
        ];
        let first =
            dues.into_iter().filter_map(|(due, reason)| Some((due?, reason))).min_by_key(|(due, _)| *due);
        let (due, reason) = first.unwrap_or((Time::FAR, Reason::Idle));
        Output::Timeout(due, reason)
    }

    /// Returns the gauges; visits all directories.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let state = &self.state;
        let mut gauges = Gauges {
            bytes: state.bytes(),
            contents_bytes: state.contents.bytes(),
            contents_files: state.contents.files() as u64,
            pending_operations: state.calls.pending_mutations(),
            inodes: state.store.inode_count() as u64,
            open_files: state.open.files.count(),
            ..Gauges::default()
        };
        state.store.dirs().for_each(|(_, directory)| {
            let (there, missing) = directory.dentry_leases.count();
            gauges.entries += directory.rows.existing().max(there);
            gauges.negative += directory.rows.absent() + missing;
            gauges.complete_directories += u64::from(directory.complete);
            gauges.count_grant(state.clock, directory.held.as_ref());
        });
        state.store.inodes().for_each(|inode| {
            gauges.count_grant(state.clock, inode.own_attr().map(|(_, held)| held));
            gauges.count_grant(state.clock, inode.pages().grant());
        });
        gauges
    }

    #[must_use]
    pub fn is_waiting(&self, op: OpId) -> bool {
        self.state.calls.is_waiting(op)
    }

    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.state.session.is_attached()
    }

    /// Returns the inode number of the export's root.
    #[must_use]
    pub fn root(&self) -> u64 {
        self.state.store.root()
    }

    #[must_use]
    pub fn counters(&self) -> Counters {
        let contents = self.state.contents.totals();
        Counters {
            contents_fetched: contents.fetched,
            contents_used: contents.used,
            contents_wasted: contents.wasted,
            ..self.state.counters
        }
    }

    /// Records that a page could not be tried: the kernel may keep it in full.
    pub fn note_not_dropped(&mut self, ino: u64) {
        ranges::note_not_dropped(&mut self.state, ino);
    }

    /// Returns whether write-backs overlap a part of a file (offset, length) that is to be dropped for a recall, and
    /// must be done first: whether any is in progress, and whether there may be stores that the kernel has not sent
    /// yet.
    #[must_use]
    pub fn writeback_overlaps(&self, why: InvalidationId, ino: u64, part: (u64, u64)) -> (bool, bool) {
        ranges::writeback_overlaps(&self.state, why, ino, part)
    }

    /// Returns pages that [`Cache::droppable_ranges`] leaves out (offset, length) and the kernel may have in full: those of
    /// which local writes bring a part, or all at an offset that the remote chooses. They are to be dropped one by one.
    /// A locked page waits for the reply to its write, and need not be waited for.
    #[must_use]
    pub fn partial_pages(&self, ino: u64, range: (u64, u64)) -> Vec<(u64, u64)> {
        ranges::partial_pages(&self.state, ino, range)
    }

    /// Sets the watched inodes: directories, and files in their directories. `all`: also every directory with a
    /// complete listing in memory.
    pub fn handle_watch(&mut self, now: Time, inos: &BTreeSet<u64>, all: bool) {
        looks::handle_watch(&mut self.state, now, inos, all);
    }

    /// Returns the next change for watchers, and its sequence number; the caller answers with
    /// [`Cache::handle_reported`].
    pub fn poll_change(&mut self) -> Option<(u64, RemoteChange)> {
        self.state.watches.poll()
    }

    /// Records that a change was reported to watchers, or cannot be.
    pub fn handle_reported(&mut self, change: &RemoteChange) {
        self.state.watches.note_reported(change);
    }

    /// Reports a gap: the changes in a directory could not be reported to watchers.
    pub fn handle_unreportable(&mut self, dir: u64) {
        self.state.watches.report_gap(dir);
    }

    /// Invalidates a dentry, so that the kernel looks the name up.
    pub fn invalidate_name(&mut self, dir: u64, name: &Name) {
        looks::invalidate_name(&mut self.state, dir, name);
    }

    /// Returns an inode's cached attributes, without a timeout; if there are none, they are fetched so that the cache
    /// soon has them.
    pub fn attributes_without_timeout(&mut self, now: Time, ino: u64) -> Option<OpReply> {
        looks::attributes_without_timeout(&mut self.state, now, ino)
    }

    #[must_use]
    pub fn watching(&self) -> WatchStatus {
        self.state.watches.status()
    }

    /// Returns whether the kernel knows the inode.
    #[must_use]
    pub fn knows(&self, node: NodeId) -> bool {
        view::knows(&self.state, node)
    }

    /// Returns whether a local change of the name has a reply since the change with that number was put out: the kernel
    /// has reported what came later.
    #[must_use]
    pub fn is_superseded(&self, number: u64, dir: u64, name: &Name) -> bool {
        self.state.watches.is_superseded(number, dir, name)
    }

    /// Returns the part of a change that is still to be reported; `None`: local changes have overtaken it.
    #[must_use]
    pub fn unreported_part(&self, number: u64, change: &RemoteChange) -> Option<RemoteChange> {
        local_changes::unreported_part(&self.state, number, change)
    }

    /// Returns whether a caller waits for attributes and will read up to the size in the reply.
    #[must_use]
    pub fn has_size_waiter(&self, ino: u64) -> bool {
        queue::has_size_waiter(&self.state, ino)
    }

    /// Returns whether a caller may read up to the size in a GETATTR reply for this inode.
    #[must_use]
    pub fn reads_by_size(&self, ino: u64) -> bool {
        view::reads_by_size(&self.state, ino)
    }

    /// Returns whether an invalidation or a reply is queued.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        self.state.kernel.has_queued()
    }

    /// Returns whether the kernel may have a directory locked for a waiting request: invalidating a dentry in it waits
    /// for the lock.
    #[must_use]
    pub fn is_locked(&self, dir: u64) -> bool {
        locked::is_locked(&self.state, dir)
    }

    /// Returns whether a LOOKUP waits. If it is part of rename(2), the kernel has another directory locked too
    /// (`do_renameat2`), which the request does not name.
    #[must_use]
    pub fn has_waiting_lookup(&self) -> bool {
        locked::has_waiting_lookup(&self.state)
    }

    /// Returns the cached inode of a name, if it is of that kind; counts as a lookup.
    pub fn cached_lookup(&mut self, now: Time, dir: u64, name: &Name, kind: Kind) -> Option<OpReply> {
        lookup::cached_lookup(&mut self.state, now, dir, name, kind)
    }

    /// Halves the memory in use, except for directories that are being read, and the number of inodes that the kernel
    /// knows.
    pub fn handle_pressure(&mut self, now: Time) {
        pressure::handle_pressure(&mut self.state, now);
    }

    /// Returns a request with the inode numbers that its node ids stand for. A request through an open file means the
    /// opened inode, whichever inode has the number now.
    ///
    /// # Errors
    ///
    /// `ESTALE`: a node id stands for an inode that is gone. The kernel looks the name up again.
    pub fn resolve_nodeid(&self, op: Op) -> Result<Op, Errno> {
        paths::resolve_nodeid(&self.state, op)
    }

    /// Returns the inode that a node id stands for, or stood for if it is gone.
    #[must_use]
    pub fn inode_of_nodeid(&self, number: u64) -> u64 {
        paths::inode_of_nodeid(&self.state, number)
    }

    /// Returns the node id by which the kernel knows an inode. [`Cache::nodeids_of`] adds those of earlier inodes with
    /// the number that the kernel still remembers.
    #[must_use]
    pub fn nodeid_of(&self, ino: u64) -> u64 {
        self.state.kernel.nodeids.nodeid(ino)
    }

    #[must_use]
    pub fn nodeids_of(&self, ino: u64) -> Vec<u64> {
        self.state.kernel.nodeids.all_nodeids(ino)
    }

    /// Returns whether all node ids equal the inode numbers.
    #[must_use]
    pub fn nodeids_are_inode_numbers(&self) -> bool {
        self.state.kernel.nodeids.is_identity()
    }

    /// Handles a FORGET of `count` lookups of a node id.
    pub fn handle_forget(&mut self, number: u64, count: u64) {
        forgetting::handle_forget(&mut self.state, number, count);
    }

    /// Returns the directory and name under which the kernel last looked an inode up, if it still knows the inode.
    #[must_use]
    pub fn parent_entry_of(&self, ino: u64) -> Option<(u64, Name)> {
        paths::parent_entry_of(&self.state, ino)
    }

    /// Returns the known path from the root to `name` in a directory.
    #[must_use]
    pub fn path_of(&self, dir: u64, name: &Name) -> Option<Vec<Name>> {
        paths::path_of(&self.state, dir, name)
    }

    /// Returns the known path from the root to a directory.
    #[must_use]
    pub fn path_of_directory(&self, dir: u64) -> Option<Vec<Name>> {
        paths::path_of_directory(&self.state, dir)
    }

    /// Returns node ids of some of the oldest inodes, for the kernel to forget; after [`Output::Prune`] until there are
    /// none. The kernel sends a FORGET for each that it drops.
    pub fn poll_prune(&mut self) -> Vec<u64> {
        prune::poll_prune(&mut self.state)
    }

    /// Handles a done invalidation.
    pub fn handle_invalidated(&mut self, now: Time, id: InvalidationId) {
        timers::handle_invalidated(&mut self.state, now, id);
    }

    /// Handles a mount below. An epoch would detach that mount, so from now on the kernel gets no dentry under a grant
    /// that can be recalled ([`NotifyLevel::NoEpoch`]). Returns the dentries that the kernel holds: the caller drops them
    /// before all queued invalidations, then calls `handle_invalidated`. `None`: there was a mount below already.
    pub fn handle_mounted_below(&mut self) -> Option<(InvalidationId, Vec<(u64, Name)>)> {
        recall::handle_mounted_below(&mut self.state)
    }

    /// Returns which invalidations the kernel supports.
    #[must_use]
    pub fn level(&self) -> NotifyLevel {
        self.state.kernel.level()
    }

    /// Returns the parts (offset, length) of a range of a file (length 0: to the end) that the kernel can drop now.
    /// Pages of local reads and writes in flight are left out, since dropping them would deadlock; they are dropped
    /// right after the replies. Write-back of mmap stores is waited for if a recall is to be acknowledged: the stores
    /// must reach the remote before any other client's change.
    pub fn droppable_ranges(&mut self, why: InvalidationId, ino: u64, range: (u64, u64)) -> Vec<(u64, u64)> {
        ranges::droppable_ranges(&mut self.state, why, ino, range)
    }

    /// Returns whether reads and writes that came after [`Cache::droppable_ranges`] have pages in these ranges locked:
    /// dropping them waits for these.
    #[must_use]
    pub fn blocks_drop(&self, why: InvalidationId, ino: u64, dropping: &[(u64, u64)]) -> bool {
        ranges::blocks_drop(&self.state, why, ino, dropping)
    }

    /// Returns whether the kernel may be reading or writing the file.
    #[must_use]
    pub fn is_open(&self, ino: u64) -> bool {
        view::is_open(&self.state, ino)
    }

    pub fn handle_timeout(&mut self, now: Time) {
        timers::handle_timeout(&mut self.state, now);
    }

    /// Returns whether the kernel must drop an inode's attributes before the reply to a local change of it.
    #[must_use]
    pub fn is_set_id_gone(&self, ino: u64) -> bool {
        privs::is_set_id_gone(&self.state, ino)
    }

    /// Records that the kernel has dropped these attributes.
    pub fn handle_set_id_forgotten(&mut self, ino: u64) {
        privs::handle_set_id_forgotten(&mut self.state, ino);
    }

    /// Answers a request about a directory that a local change removed, before [`Cache::resolve_nodeid`]. `wall`: the time of day.
    ///
    /// # Errors
    ///
    /// The request, if it is to be handled as any other.
    pub fn answer_if_removed(&mut self, wall: Timestamp, op: Op) -> Result<OpReply, Op> {
        removed::answer_if_removed(&mut self.state, wall, op)
    }

    /// Returns whether replies, or the kernel's facts, may be stale.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.state.is_stale()
    }

    /// Returns whether the kernel may still hold facts of ended grants.
    #[must_use]
    pub fn is_flushing_all(&self) -> bool {
        self.state.is_flushing_all()
    }

    /// Prefetches the root's attributes, which callers ask for first, if prefetch is on.
    pub fn prefetch_root(&mut self, now: Time) {
        session_events::prefetch_root(&mut self.state, now);
    }

    /// Sets the mount point, with which paths in the log begin.
    pub fn show_paths_below(&mut self, mountpoint: &str) {
        mountpoint.clone_into(&mut self.state.shown_root);
    }

    /// Returns whether a dentry that other clients removed or replaced may be dropped: no later reply bound the name,
    /// and no local change of the directory that may bind it is in flight.
    #[must_use]
    pub fn is_dentry_removed(&self, dir: u64, name: &Name) -> bool {
        updates::is_dentry_removed(&self.state, dir, name)
    }
}
