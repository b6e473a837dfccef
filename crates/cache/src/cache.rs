//! The cache and its contract.

use crate::calls::{CallKind, Calls, InflightCall, OpenParams};
use crate::config::{Config, OnDisconnect};
use crate::counters::{Counters, Gauges};
use crate::inotify::Watches;
use crate::kernel::{DeferredReply, Kernel};
use crate::op::{Caller, Op, OpReply, Output, Reason};
use crate::open::Open;
use crate::pages::UngrantedPages;
use crate::prefetch::PrefetchJobs;
use crate::session::Session;
use crate::store::Store;
use nigh_types::{Call, Errno, Event, OpId, Reply, Response, Time};
use std::collections::VecDeque;

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
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) calls: Calls,
    pub(crate) kernel: Kernel,
    pub(crate) session: Session,
    pub(crate) open: Open,
    /// Latest `now` of an input.
    pub(crate) clock: Time,
    /// Queue of the inodes that the kernel knows, and the time of the next search for idle directories.
    pub(crate) idle_due: Option<Time>,
    /// Mount point of the root for log lines; empty if there is none.
    pub(crate) shown_root: String,
    /// Eviction that could not keep to the budget waits until more bytes are in use.
    pub(crate) trim_above: u64,
    pub(crate) prefetch: PrefetchJobs,
    pub(crate) ungranted: UngrantedPages,
    /// Cached statfs reply for an inode, and its end.
    pub(crate) statfs_cache: Option<(u64, nigh_types::Space, Time)>,
    pub(crate) counters: Counters,
    /// Directories with inotify watchers.
    pub(crate) watches: Watches,
    pub(crate) out: VecDeque<Output>,
}

impl Cache {
    #[must_use]
    pub fn new(config: Config) -> Cache {
        Cache {
            config,
            store: Store::default(),
            calls: Calls::new(config.client, config.incarnation),
            kernel: Kernel::new(config.level, config.kernel_negative_most),
            session: Session::default(),
            open: Open::default(),
            clock: Time(0),
            idle_due: None,
            shown_root: String::new(),
            trim_above: 0,
            prefetch: PrefetchJobs::default(),
            ungranted: UngrantedPages::default(),
            statfs_cache: None,
            counters: Counters::default(),
            watches: Watches::default(),
            out: VecDeque::new(),
        }
    }

    /// Handles a request of the kernel. `None`: the reply comes as an output.
    pub fn handle_op(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
        self.clock = now;
        let limit = match self.config.on_disconnect {
            OnDisconnect::Fail(span) => Some(now.after(span)),
            _ => None,
        };
        self.note_write_started(&op);
        let answer = match op {
            Op::Release { fh, flock } => self.release(now, fh, flock),
            Op::ReleaseDir { fh } => self.release_dir(now, fh),
            Op::Flush { ino, owner } => self.flush(now, id, caller, ino, owner),
            op if self.session.is_active() => self.start(now, id, caller, op),
            op => self.start_disconnected(now, id, caller, op),
        };
        if answer.is_some() {
            self.counters.hits += 1;
            tracing::trace!(target: "nigh::hit", op = id.0);
        } else {
            if let Some(due) = limit {
                self.calls.begin_deadline(id, due);
            }
            tracing::trace!(target: "nigh::miss", op = id.0);
        }
        answer
    }

    pub(crate) fn start(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
        if self.is_lost(&op) {
            return Some(OpReply::Failed(Errno::IO));
        }
        let through = op.open_files();
        let answer = self.begin_op(now, id, caller, op);
        if answer.is_none() {
            self.calls.note_open_files(id, through);
        }
        answer
    }

    fn begin_op(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
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
            op => self.start_create(now, id, caller, op),
        }
    }

    fn start_create(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
        match op {
            Op::Symlink { dir, name, target } => {
                self.create(now, id, caller, dir, name, None, |dir, name| Call::Symlink { dir, name, target })
            }
            Op::Mknod { dir, name, kind, mode, umask, rdev } => {
                self.create(now, id, caller, dir, name, None, |dir, name| Call::Mknod {
                    dir,
                    name,
                    kind,
                    mode,
                    umask,
                    rdev,
                })
            }
            Op::Mkdir { dir, name, mode, umask } => {
                self.create(now, id, caller, dir, name, None, |dir, name| Call::Mkdir {
                    dir,
                    name,
                    mode,
                    umask,
                })
            }
            Op::Link { ino, dir, name } => {
                let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
                // With another name its attributes stand under another grant.
                self.pin_open(ino);
                self.create(now, id, caller, dir, name, None, |dir, name| Call::Link { node, dir, name })
            }
            Op::Create { dir, name, mode, umask, exclusive, access, append } => {
                let file = OpenParams { append, access, caller };
                self.create(now, id, caller, dir, name, Some(file), |dir, name| Call::Create {
                    dir,
                    name,
                    mode,
                    umask,
                    exclusive,
                    access,
                })
            }
            Op::Tmpfile { dir, mode, umask, access } => {
                let Some(dir) = self.node_ref(dir) else { return Some(OpReply::Failed(Errno::STALE)) };
                let file = OpenParams { append: false, access, caller };
                let call = Call::Tmpfile { dir, mode, umask, access };
                self.send_for(now, id, caller, CallKind::Tmpfile { file }, call)
            }
            op => self.start_on_inode(now, id, caller, op),
        }
    }

    fn start_on_inode(&mut self, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
        let (ino, fh) = match &op {
            Op::SetXattr { ino, .. } | Op::RemoveXattr { ino, .. } => (*ino, None),
            Op::GetFlags { ino } => (*ino, None),
            Op::Fsync { ino, fh, .. } => (*ino, *fh),
            Op::Fallocate { ino, fh, .. } | Op::Seek { ino, fh, .. } => (*ino, Some(*fh)),
            Op::CopyRange { to_ino, to_fh, .. } => (*to_ino, Some(*to_fh)),
            _ => return Some(OpReply::Failed(Errno::NOSYS)),
        };
        if let Op::SetXattr { name, .. } | Op::RemoveXattr { name, .. } = &op
            && self.is_unsupported(name)
        {
            return Some(OpReply::Failed(Errno::OPNOTSUPP));
        }
        let Some((node, handle)) = self.handle_for(ino, fh) else {
            return Some(OpReply::Failed(Errno::STALE));
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
                    return Some(OpReply::Failed(Errno::STALE));
                };
                (
                    CallKind::Write {
                        ino,
                        offset: to_offset,
                        size: length,
                        writeback: false,
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
            _ => return Some(OpReply::Failed(Errno::NOSYS)),
        };
        self.send_for(now, id, caller, purpose, call)
    }

    /// Handles an event from the remote.
    pub fn handle_event(&mut self, now: Time, event: Event) {
        self.clock = now;
        match event {
            Event::Attached(session) => self.handle_session(now, session, false),
            Event::Restored { session, kept } => self.handle_session(now, session, kept),
            Event::Expired { why } => self.handle_lapsed(now, &why),
            Event::Response { call, response } if self.is_deferred(call) => {
                self.session.defer(call, response)
            }
            Event::Response { call, response } => self.handle_response(now, call, response),
            Event::Recall(recall) => self.handle_recall(recall),
            Event::UpdatePrepare(hold) => self.handle_update_prepare(now, hold),
            Event::UpdateCommit(commit) => self.handle_update_commit(now, commit),
            Event::Lost { why } => self.handle_lost(now, &why),
        }
    }

    pub(crate) fn handle_reply(&mut self, now: Time, flight: InflightCall, response: Response) {
        if self.is_for_old_inode(&flight) {
            if let Ok(Reply::Opened { handle, .. }) = response.result {
                self.release_handle(handle);
            }
            return self.reply_all(&flight.waiters, &OpReply::Failed(Errno::STALE));
        }
        if self.may_precede_write(&flight, &response) {
            return self.answer_unchanged(now, &flight);
        }
        let files = self.changed_files_awaited(&flight.purpose, &response);
        self.note_set_id_after(&flight, &response);
        let answer = match &flight.purpose {
            CallKind::Lookup { dir, name } => {
                let (dir, name) = (*dir, name.clone());
                return self.on_lookup_reply(now, flight, dir, &name, response);
            }
            CallKind::Attr { .. } => return self.on_getattr_reply(now, flight, response),
            CallKind::ReadLink { ino } => return self.on_readlink_reply(now, &flight, *ino, response),
            CallKind::Xattrs { ino } => return self.on_xattrs_reply(now, &flight, *ino, response),
            CallKind::Xattr { ino } => return self.on_xattr_value_reply(now, &flight, *ino, &response),
            CallKind::Read { ino, fh, offset, size } => {
                return self.on_read_reply(now, &flight, (*ino, *fh), (*offset, *size), response);
            }
            CallKind::Reopen { .. } | CallKind::ReclaimLock { .. } => {
                return self.on_reclaim_reply(now, &flight, &response);
            }
            CallKind::Revalidate { ino } => return self.on_revalidate_reply(now, &flight, *ino, &response),
            CallKind::ResolvePath { then } => {
                return self.on_resolved(now, *then, response.result.map(drop));
            }
            CallKind::List { .. } | CallKind::ListNames { .. } | CallKind::Prefetch => return,
            CallKind::Open { ino, file } => self.on_open_reply(now, &flight, *ino, *file, &response),
            CallKind::Create { dir, name, file } => {
                self.on_create_reply(now, &flight, (*dir, name), *file, &response)
            }
            CallKind::Tmpfile { file } => self.on_tmpfile_reply(now, &flight, *file, &response),
            CallKind::Remove { dir, name } => self.on_remove_reply(now, &flight, (*dir, name), &response),
            CallKind::Rename { .. } => self.on_rename_reply(now, &flight, &response),
            CallKind::Change { ino, xattrs } => {
                self.on_change_reply(now, &flight, (*ino, *xattrs), &response)
            }
            CallKind::Write { ino, offset, .. } => self.on_written(now, &flight, *ino, *offset, &response),
            CallKind::StatFs { ino } => self.on_statfs_reply(&flight, *ino, &response),
            CallKind::Lock { .. } => self.on_lock_reply(now, &flight, &response),
            CallKind::Unlock { .. } => self.on_unlock_reply(&flight, &response),
            CallKind::Flags | CallKind::Seek | CallKind::Fsync { .. } | CallKind::TestLock => {
                plain(&response)
            }
        };
        let sent = Cache::may_predate_replies(&flight).then_some(flight.sent);
        let name = match &flight.purpose {
            CallKind::Create { dir, name, .. } => Some((*dir, name.clone())),
            _ => None,
        };
        self.enqueue_reply(&files, &flight.waiters, DeferredReply { answer, sent, name });
        self.note_local_change(&flight, &response);
        if flight.is_mutation() && flight.waiters.is_empty() {
            self.invalidate_abandoned(&flight, &response);
        }
        self.drop_pages_after_write(now, &flight, &response);
        if let CallKind::Write { ino, writeback: false, .. } = flight.purpose {
            self.start_queued_reads(now, ino);
        }
    }

    /// Handles a signal for an application's thread. Only a fatal one ends a wait, except a wait for a lock (S8).
    pub fn handle_interrupt(&mut self, op: OpId, fatal: bool) {
        if !fatal {
            return self.interrupt_lock(op);
        }
        self.abort(op, Errno::INTR);
    }

    /// Replies to a request that waited: the only place that does.
    pub(crate) fn reply(&mut self, op: OpId, answer: OpReply) {
        self.calls.end_deadline(op);
        self.out.push_back(Output::Answer { op, answer });
    }

    #[must_use]
    pub fn is_waiting(&self, op: OpId) -> bool {
        self.calls.is_waiting(op)
    }

    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.session.is_attached()
    }

    /// Returns the inode number of the export's root.
    #[must_use]
    pub fn root(&self) -> u64 {
        self.store.root()
    }

    /// Returns the next action.
    pub fn poll_output(&mut self) -> Output {
        if self.out.is_empty() && !self.watches.is_empty() {
            self.compare_watched();
        }
        if let Some(output) = self.out.pop_front() {
            return output;
        }
        self.flush_due();
        if let Some(output) = self.out.pop_front() {
            return output;
        }
        let dues = [
            (self.kernel.next_timer(), Reason::GrantEnd),
            (self.calls.next_deadline(), Reason::RequestDeadline),
            (self.session.flush_due(), Reason::SlowKernel),
            (self.store.suspended.due(), Reason::Commit),
            (self.queue_due(), Reason::InvalidationQueue),
            (self.idle_due, Reason::IdleDirectories),
            (self.watches.due().filter(|_| self.session.is_active()), Reason::Watch),
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
            pending_operations: self.calls.pending_mutations(),
            inodes: self.store.inode_count() as u64,
            open_files: self.open.files.count(),
            ..Gauges::default()
        };
        self.store.dirs().for_each(|(_, directory)| {
            let (there, missing) = directory.dentry_leases.count();
            gauges.entries += directory.rows.existing().max(there);
            gauges.negative += directory.rows.absent() + missing;
            gauges.complete_directories += u64::from(directory.complete);
            gauges.count_grant(self.clock, directory.held.as_ref());
        });
        self.store.inodes().for_each(|inode| {
            gauges.count_grant(self.clock, inode.own.as_ref().map(|(_, held)| held));
            gauges.count_grant(self.clock, inode.data.held.as_ref());
        });
        gauges
    }
}

fn plain(response: &Response) -> OpReply {
    match &response.result {
        Ok(Reply::Flags(flags)) => OpReply::Flags(*flags),
        Ok(Reply::Offset(offset)) => OpReply::Offset(*offset),
        Ok(Reply::LockConflict(info)) => OpReply::Locked(*info),
        Ok(Reply::Done) => OpReply::Done,
        Ok(_) => OpReply::Failed(Errno::PROTO),
        Err(errno) => OpReply::Failed(*errno),
    }
}
