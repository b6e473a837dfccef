//! What the kernel holds: of each inode, and beside inodes invalidations that it has yet to do, timers for the ends of its
//! timeouts, and its negative dentries.

mod inode_queue;
mod known_inode;
mod level;
mod nodeid_map;
mod queue;
mod recent_dirs;

pub(crate) use inode_queue::KernelInodeQueue;
pub(crate) use known_inode::{KnownInode, UntimedCopy, set_id};
pub use level::NotifyLevel;
pub(crate) use nodeid_map::NodeIdMap;
#[cfg(test)]
pub(crate) use queue::MAX_REPLY_WAIT;
use queue::QueuedItem;
pub(crate) use queue::{DeferredReply, QueuedKind};
pub(crate) use recent_dirs::RecentDirLookups;

use crate::op::InvalidationId;
use nigh_types::{GrantId, Name, RecallId, Time};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Above this number of dentries the epoch drops all dentries at once.
pub(crate) const MAX_SINGLE_DENTRIES: u64 = 200;

/// Action after a done invalidation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum OnInvalidated {
    Acknowledge(RecallId),
    Return(Vec<GrantId>),
}

/// Invalidations, timers and negative dentries of one mount's kernel.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    level: NotifyLevel,
    last_id: u64,
    /// Invalidations that the kernel has not done yet, queued ones among them.
    pending: BTreeSet<InvalidationId>,
    after: BTreeMap<InvalidationId, OnInvalidated>,
    /// Files of which an invalidation drops pages, and whether all.
    page_drops: BTreeMap<InvalidationId, BTreeMap<u64, bool>>,
    /// Invalidation of all dentries because of a mount below.
    dentry_flush: Option<InvalidationId>,
    /// Ends of grants on inodes that the kernel holds open, and of its copies without a timeout.
    timers: BTreeSet<(Time, u64)>,
    /// Negative dentries that the kernel may have, by directory.
    negative_dentries: BTreeSet<(u64, Name)>,
    most_negative_dentries: u64,
    pub nodeids: NodeIdMap,
    pub inodes: KernelInodeQueue,
    pub recent_dirs: RecentDirLookups,
    /// Invalidations and replies that follow an outstanding GETATTR reply, in order.
    queue: VecDeque<QueuedItem>,
}

impl Kernel {
    pub fn new(level: NotifyLevel, most_negative_dentries: u64) -> Kernel {
        Kernel {
            level,
            last_id: 0,
            pending: BTreeSet::new(),
            after: BTreeMap::new(),
            page_drops: BTreeMap::new(),
            dentry_flush: None,
            timers: BTreeSet::new(),
            negative_dentries: BTreeSet::new(),
            most_negative_dentries,
            nodeids: NodeIdMap::default(),
            inodes: KernelInodeQueue::default(),
            recent_dirs: RecentDirLookups::default(),
            queue: VecDeque::new(),
        }
    }

    pub fn level(&self) -> NotifyLevel {
        self.level
    }

    pub fn can_notify(&self) -> bool {
        self.level.can_notify()
    }

    /// Lowers the level, because of a mount below.
    pub fn give_up_epochs(&mut self) {
        self.level = NotifyLevel::NoEpoch;
    }

    pub fn new_invalidation(&mut self) -> InvalidationId {
        self.last_id += 1;
        let id = InvalidationId(self.last_id);
        self.pending.insert(id);
        id
    }

    pub fn last_invalidation(&self) -> InvalidationId {
        InvalidationId(self.last_id)
    }

    pub fn is_pending(&self, id: InvalidationId) -> bool {
        self.pending.contains(&id)
    }

    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Records what follows once the invalidation is done.
    pub fn then(&mut self, id: InvalidationId, action: OnInvalidated) {
        self.after.insert(id, action);
    }

    /// Returns whether the invalidation is for a recall or an update.
    pub fn is_recalled(&self, id: InvalidationId) -> bool {
        matches!(self.after.get(&id), Some(OnInvalidated::Acknowledge(_)))
    }

    /// Forgets what was to follow: it means nothing to another session.
    pub fn forget_actions(&mut self) {
        self.after.clear();
    }

    /// Records a done invalidation. Returns what follows, and the files of which it dropped pages, with whether all.
    pub fn done(&mut self, id: InvalidationId) -> (Option<OnInvalidated>, Vec<(u64, bool)>) {
        self.pending.remove(&id);
        self.dentry_flush.take_if(|flush| *flush == id);
        let drops = self.page_drops.remove(&id).unwrap_or_default();
        (self.after.remove(&id), drops.into_iter().collect())
    }

    pub fn note_page_drops(&mut self, id: InvalidationId, files: Vec<(u64, bool)>) {
        for (ino, all) in files {
            *self.page_drops.entry(id).or_default().entry(ino).or_default() |= all;
        }
    }

    /// Records that an invalidation drops pages of a file.
    pub fn note_page_drop(&mut self, id: InvalidationId, ino: u64) {
        self.page_drops.entry(id).or_default().entry(ino).or_default();
    }

    /// Returns whether a pending invalidation drops pages of a file.
    pub fn is_dropping_pages(&self, ino: u64) -> bool {
        self.page_drops.values().any(|files| files.contains_key(&ino))
    }

    /// Returns whether an invalidation drops all pages of a file, as far as is recorded.
    pub fn drops_all_pages(&self, id: InvalidationId, ino: u64) -> bool {
        self.page_drops.get(&id).is_some_and(|files| files.get(&ino) == Some(&true))
    }

    /// Begins the invalidation of all dentries that a mount below requires.
    pub fn begin_dentry_flush(&mut self) -> InvalidationId {
        let id = self.new_invalidation();
        self.dentry_flush = Some(id);
        id
    }

    pub fn is_flushing_dentries(&self) -> bool {
        self.dentry_flush.is_some()
    }

    pub fn add_timer(&mut self, due: Time, ino: u64) {
        self.timers.insert((due, ino));
    }

    pub fn next_timer(&self) -> Option<Time> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Takes a timer that is due, and returns its inode.
    pub fn take_timer(&mut self, now: Time) -> Option<u64> {
        self.timers.first().filter(|(due, _)| *due <= now)?;
        self.timers.pop_first().map(|(_, ino)| ino)
    }

    /// Records a negative dentry. False: the kernel may not get another one.
    pub fn add_negative_dentry(&mut self, dir: u64, name: &Name) -> bool {
        let has_room = (self.negative_dentries.len() as u64) < self.most_negative_dentries;
        if has_room {
            self.negative_dentries.insert((dir, name.clone()));
        }
        has_room
    }

    pub fn take_negative_dentry(&mut self, dir: u64, name: &Name) -> bool {
        self.negative_dentries.remove(&(dir, name.clone()))
    }

    pub fn take_all_negative_dentries(&mut self) -> BTreeSet<(u64, Name)> {
        std::mem::take(&mut self.negative_dentries)
    }

    /// Takes the negative dentries that the kernel may have in a directory. `None`: together with `others` they are too
    /// many for single invalidations. (After an epoch the kernel detaches every dentry that it visits, also one in
    /// use.)
    pub fn take_negative_dentries(&mut self, dir: u64, others: u64) -> Option<Vec<(u64, Name)>> {
        let room = usize::try_from(MAX_SINGLE_DENTRIES.checked_sub(others)?).ok()?;
        let first = Name::new(&[1]).ok()?;
        let of_dir = self.negative_dentries.range((dir, first)..).take_while(|(at, _)| *at == dir);
        let missing: Vec<(u64, Name)> = of_dir.take(room + 1).cloned().collect();
        if missing.len() > room {
            return None;
        }
        for name in &missing {
            self.negative_dentries.remove(name);
        }
        Some(missing)
    }

    #[cfg(test)]
    pub fn timers(&self) -> usize {
        self.timers.len()
    }
}
