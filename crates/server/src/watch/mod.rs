//! Host watch: detects changes by other processes on the server's own disk, and recalls the affected leases. See
//! docs/decisions/0015-host-watch.md.
//!
//! ```text
//! kernel ── bytes ──▶ reader ── hints ──▶ inbox ──▶ resolver ── keys ──▶ lease table ──▶ clients
//! ```
//!
//! The reader thread never blocks, so that the kernel's event queue does not overflow. The resolver thread resolves
//! the events. The server's own changes went through the lease table before they were made: their events carry this
//! process's pid, and are dropped.

pub(crate) mod event;
mod fanotify;
mod group;
mod inbox;
mod keys;
mod local;
mod mounts;
mod threads;

pub(crate) use group::Group;

use crate::export::ObjectWatch;
use crate::lease::leases::Leases;
use crate::os::error::Result;
use crate::os::filesystem::{Filesystem, identify};
use crate::os::stat::Stat;
use group::MarkStrategy;
use inbox::Inbox;
use nigh_lease::Object;
use parking_lot::{Condvar, Mutex, RwLock};
use rustc_hash::FxHashMap;
use rustix::event::{EventfdFlags, epoll, eventfd};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Host watch of a server.
///
/// **Lock order.** `alive` comes before `groups`, `started` and the lease table; no other lock is taken under
/// `refused`. The inbox comes last.
pub(crate) struct Watch {
    leases: Arc<Leases>,
    epoll: OwnedFd,
    stop: OwnedFd,
    groups: RwLock<FxHashMap<u64, (u64, Weak<Group>)>>,
    last_token: AtomicU64,
    current: Arc<Mutex<CurrentGroups>>,
    /// Filesystems that cannot be watched, with the reasons.
    refused: Mutex<BTreeMap<u64, String>>,
    inbox: Mutex<Inbox>,
    /// Signals input in the inbox.
    wake: Condvar,
    started: Mutex<bool>,
    method: WatchMethod,
}

/// The current group of each filesystem: an ending group may be older than its successor.
#[derive(Default)]
pub(crate) struct CurrentGroups {
    tokens: FxHashMap<u64, u64>,
    /// A thread has ended, so events are no longer handled.
    ended: bool,
}

/// How changes on the server's own disk are detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WatchMethod {
    /// The best way that the kernel permits this process.
    #[default]
    Best,
    /// The way of an unprivileged user: one mark per granted object.
    Objects,
    /// No watch: grants have a time limit.
    Off,
}

/// The watched filesystems of one export. A filesystem's watch ends with its last export.
pub(crate) struct ExportWatch {
    watch: Arc<Watch>,
    root: std::result::Result<Arc<Group>, String>,
    /// Filesystems mounted inside the export.
    inner: RwLock<FxHashMap<u64, std::result::Result<Arc<Group>, String>>>,
}

impl Watch {
    pub(crate) fn new(leases: &Arc<Leases>, way: WatchMethod) -> io::Result<Arc<Watch>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(threads::STOP), epoll::EventFlags::IN)?;
        Ok(Arc::new(Watch {
            leases: Arc::clone(leases),
            epoll,
            stop,
            groups: RwLock::default(),
            last_token: AtomicU64::new(threads::MOUNTS),
            current: Arc::default(),
            refused: Mutex::default(),
            inbox: Mutex::default(),
            wake: Condvar::new(),
            started: Mutex::new(false),
            method: way,
        }))
    }

    pub(crate) fn stop(&self) {
        self.inbox.lock().stopping = true;
        self.wake.notify_all();
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// Watches the filesystem of an export's root, before the first grant on it.
    pub(crate) fn watch_export(
        self: &Arc<Watch>,
        root: &OwnedFd,
        stat: &Stat,
        filesystem: Filesystem,
    ) -> Arc<ExportWatch> {
        let group = self.group(root, (stat, filesystem), self.method == WatchMethod::Best);
        if let Err(why) = &group {
            tracing::info!(why, "changes on the server's own disk are not seen: grants have a limit");
        }
        Arc::new(ExportWatch { watch: Arc::clone(self), root: group, inner: RwLock::default() })
    }

    fn group(
        self: &Arc<Watch>,
        fd: &OwnedFd,
        (stat, filesystem): (&Stat, Filesystem),
        whole: bool,
    ) -> std::result::Result<Arc<Group>, String> {
        let key = stat.object(filesystem.overlay).filesystem;
        let mut alive = self.current.lock();
        if let Some(group) = self.groups.read().get(&key).and_then(|(_, group)| group.upgrade()) {
            return Ok(group);
        }
        if self.method == WatchMethod::Off || alive.ended {
            return Err("nothing is to be watched".into());
        }
        self.start().map_err(|error| format!("nothing can be watched: {error}"))?;
        let token = self.last_token.fetch_add(1, Ordering::Relaxed) + 1;
        let made = Group::new(fd, (stat, filesystem), whole, (&self.leases, &self.current, token)).and_then(
            |group| {
                let data = epoll::EventData::new_u64(token);
                epoll::add(&self.epoll, &group.fd, data, epoll::EventFlags::IN)
                    .map_err(|error| format!("nothing can be watched: {error}"))?;
                Ok(Arc::new(group))
            },
        );
        match made {
            Ok(group) => {
                self.refused.lock().remove(&key);
                // Events queued since the mark was set are read from here on.
                self.groups.write().insert(key, (token, Arc::downgrade(&group)));
                group.begin();
                alive.tokens.insert(key, token);
                Ok(group)
            }
            Err(why) => {
                self.refused.lock().insert(key, why.clone());
                Err(why)
            }
        }
    }

    /// Handles the end of a thread: no more events are handled.
    fn stop_watching(&self) {
        self.current.lock().ended = true;
        self.all_groups().iter().for_each(|(_, group)| group.pause());
    }

    fn all_groups(&self) -> Vec<(u64, Arc<Group>)> {
        let groups = self.groups.read();
        groups.values().filter_map(|(token, group)| Some((*token, group.upgrade()?))).collect()
    }

    /// Reports watched and unwatched filesystems, for status.
    pub(crate) fn report(&self) -> Value {
        let mut groups: Vec<Arc<Group>> = self.all_groups().into_iter().map(|(_, group)| group).collect();
        groups.sort_by_key(|group| group.filesystem);
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let watched = groups.iter().map(|group| {
            json!({
                "filesystem": group.label,
                "way": match &group.strategy { MarkStrategy::Whole(_) => "filesystem", MarkStrategy::Objects(_) => "objects" },
                "marks": group.marks(),
                "unmarked": count(&group.counts.refused),
                "paused": group.paused.load(Ordering::Relaxed),
                "events": count(&group.counts.events),
                "own": count(&group.counts.own),
                "recalls": count(&group.counts.recalls),
                "overflows": count(&group.counts.overflows),
            })
        });
        let refused = self.refused.lock();
        let unwatched = refused.values().map(|why| json!({ "way": "none", "why": why }));
        watched.chain(unwatched).collect()
    }
}

impl ObjectWatch for ExportWatch {
    fn watch(&self, object: Object, fd: &OwnedFd) {
        match &self.root {
            Ok(group) if group.filesystem == object.filesystem => group.watch(object, fd),
            _ => self.watch_inner(object, fd),
        }
    }

    fn note_directory(&self, object: Object, fd: &OwnedFd) {
        self.root.iter().for_each(|group| group.note_directory(object, fd));
    }

    fn wants(&self, object: Object) -> bool {
        match &self.root {
            Ok(group) if group.filesystem == object.filesystem => {
                matches!(group.strategy, MarkStrategy::Objects(_))
            }
            _ => true,
        }
    }

    fn why_not(&self) -> Option<&str> {
        self.root.as_ref().err().map(String::as_str)
    }
}

impl ExportWatch {
    fn watch_inner(&self, object: Object, fd: &OwnedFd) {
        if let Some(known) = self.inner.read().get(&object.filesystem) {
            return known.iter().for_each(|group| group.watch(object, fd));
        }
        let Ok((stat, filesystem)) = look(fd) else { return };
        if stat.object(filesystem.overlay).filesystem != object.filesystem {
            return;
        }
        // Never marked as a whole: the descriptor for that would keep the filesystem from being unmounted.
        let group = self.watch.group(fd, (&stat, filesystem), false);
        group.iter().for_each(|group| group.watch(object, fd));
        self.inner.write().insert(object.filesystem, group);
    }
}

impl std::fmt::Debug for ExportWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watched")
    }
}

fn look(fd: &OwnedFd) -> Result<(Stat, Filesystem)> {
    let stat = crate::os::stat::of_fd(fd)?;
    let filesystem = identify(fd, &stat)?;
    Ok((stat, filesystem))
}

#[cfg(test)]
mod tests;
