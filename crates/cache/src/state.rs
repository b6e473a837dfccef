//! State of a cache: its owners.

use crate::calls::{CallKind, Calls, InflightCall};
use crate::config::{Config, OnDisconnect};
use crate::contents::Contents;
use crate::counters::Counters;
use crate::inotify::Watches;
use crate::kernel::Kernel;
use crate::op::Output;
use crate::open::Open;
use crate::pages::UngrantedPages;
use crate::prefetch::PrefetchJobs;
use crate::session::{Session, SessionState};
use crate::store::{DIRECTORY_BYTES, INODE_BYTES, Store};
use nigh_types::{CallId, Time};
use std::collections::VecDeque;

/// Share of the budget that names keep at least.
const LEFT_FOR_NAMES: u64 = 4;

/// Credit of a job's first request, in entries.
const FIRST_WINDOW: u64 = 1_024;

const LARGEST_WINDOW: u64 = 65_536;

/// Approximate size of an entry in the cache, in bytes.
const ENTRY_BYTES: u64 = 160;

/// All state of a cache: its owners, each with private fields, and what belongs to none of them.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) calls: Calls,
    pub(crate) kernel: Kernel,
    pub(crate) session: Session,
    pub(crate) open: Open,
    /// Latest `now` of an input.
    pub(crate) clock: Time,
    /// Time of the next search for idle directories.
    pub(crate) idle_due: Option<Time>,
    /// Mount point of the root for log lines; empty if there is none.
    pub(crate) shown_root: String,
    /// Eviction that could not keep to the budget waits until more bytes are in use.
    pub(crate) trim_above: u64,
    pub(crate) prefetch: PrefetchJobs,
    pub(crate) contents: Contents,
    pub(crate) ungranted: UngrantedPages,
    /// Cached statfs reply for an inode, and its end.
    pub(crate) statfs_cache: Option<(u64, nigh_types::Space, Time)>,
    pub(crate) counters: Counters,
    /// Directories with inotify watchers.
    pub(crate) watches: Watches,
    pub(crate) out: VecDeque<Output>,
}

impl State {
    pub fn new(config: Config) -> State {
        State {
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
            contents: Contents::new(config.data_budget_bytes, config.readahead_bytes),
            ungranted: UngrantedPages::default(),
            statfs_cache: None,
            counters: Counters::default(),
            watches: Watches::default(),
            out: VecDeque::new(),
        }
    }

    /// Drops the contents of a file: they may not be served any more.
    pub(crate) fn drop_contents(&mut self, ino: u64) {
        self.contents.drop_file(ino);
        self.prefetch.files.note_gone(ino);
    }

    /// Drops the contents of a part of a file that a local write is about to change.
    pub(crate) fn drop_changing_contents(&mut self, ino: u64, offset: u64, length: u64) {
        self.contents.drop_changing(ino, offset, length);
        if self.contents.tag(ino).is_none() {
            self.prefetch.files.note_gone(ino);
        }
    }

    /// Drops the contents of all files.
    pub(crate) fn drop_all_contents(&mut self) {
        self.contents.drop_all();
        self.prefetch.files.forget();
    }

    /// Returns whether an inode's facts are suspended: an update by another client is prepared, or a local change in
    /// flight takes its name.
    pub(crate) fn is_suspended(&self, ino: u64) -> bool {
        self.store.suspended.has_inode(ino) || self.calls.is_losing_name(ino)
    }

    pub(crate) fn changes_frequently(&self, now: Time, dir: u64) -> bool {
        self.store.dir(dir).is_some_and(|directory| directory.changes_frequently(now))
    }

    /// Returns the memory in use, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let inodes = self.store.inode_count() as u64 * INODE_BYTES + self.kernel.inodes.bytes();
        self.names_bytes() + inodes + self.open.dirs.snapshot_bytes() + self.open.names.bytes()
    }

    /// Returns the bytes that eviction can free.
    pub(crate) fn names_bytes(&self) -> u64 {
        self.store.entry_bytes() + self.store.dir_count() as u64 * DIRECTORY_BYTES
    }

    /// Returns whether eviction goes on. Inodes that the kernel knows stay until it forgets them: however many there
    /// are, a quarter of the budget is left for names.
    pub(crate) fn exceeds(&self, budget: u64) -> bool {
        self.has_too_many_dirs() || self.exceeds_bytes(budget)
    }

    pub(crate) fn has_too_many_dirs(&self) -> bool {
        self.store.dir_count() as u64 > self.config.most_dirs
    }

    pub(crate) fn exceeds_bytes(&self, budget: u64) -> bool {
        self.bytes() > budget && self.names_bytes() > self.config.budget_bytes / LEFT_FOR_NAMES
    }

    /// Returns the initial window of a job, in entries.
    pub(crate) fn first_window(&self) -> u64 {
        self.largest_window().min(FIRST_WINDOW)
    }

    /// Returns the largest window; also no more directories than half of those that the cache may hold.
    pub(crate) fn largest_window(&self) -> u64 {
        let entries = (self.config.budget_bytes / ENTRY_BYTES / 8).clamp(FIRST_WINDOW, LARGEST_WINDOW);
        entries.min((self.config.most_dirs / 2).max(1))
    }

    /// Returns whether requests are answered from stale facts, and from nothing else.
    pub(crate) fn answers_stale(&self) -> bool {
        self.config.on_disconnect == OnDisconnect::Stale && self.session.is_away()
    }

    /// Returns whether replies, or the kernel's facts, may be stale.
    #[must_use]
    pub(crate) fn is_stale(&self) -> bool {
        let served = self.config.on_disconnect == OnDisconnect::Stale || self.session.is_kernel_slow();
        self.answers_stale() || served && self.is_flushing_all()
    }

    /// Returns whether the kernel may still hold facts of ended grants.
    #[must_use]
    pub(crate) fn is_flushing_all(&self) -> bool {
        self.session.flush().is_some_and(|id| self.kernel.is_pending(id))
    }

    /// Returns whether replies of a new session have to wait: the kernel may hold facts of ended grants, and is not
    /// slow.
    pub(crate) fn waits_for_kernel(&self) -> bool {
        self.is_flushing_all() && !self.session.is_kernel_slow()
    }

    /// Returns whether a reply came before the kernel has dropped its facts. Reclaims wait for nothing.
    pub(crate) fn is_deferred(&self, call: CallId) -> bool {
        let waits = |flight: &InflightCall| {
            !(flight.purpose.is_reclaim() || matches!(flight.purpose, CallKind::ResolvePath { .. }))
        };
        self.session.state() == SessionState::Reclaiming && self.calls.inflight(call).is_some_and(waits)
    }
}
