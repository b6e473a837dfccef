//! The reader and resolver threads.

use super::Watch;
use super::event::{Event, EventLocation, parse};
use super::group::{Group, MarkStrategy};
use super::inbox::{LossReason, PendingEvents};
use super::keys::{OWN_DELETE_SELF, directory_of_rights, keys};
use super::mounts::Table;
use crate::os::error::Fault;
use nigh_lease::{Change, LeaseKey};
use nigh_types::Name;
use rustix::event::epoll;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Epoll tokens of the stop event and the mount table; larger tokens are groups.
pub(super) const STOP: u64 = 0;
pub(super) const MOUNTS: u64 = 1;

/// Size of a read: some thousand events.
const BYTES: usize = 256 << 10;
/// Consecutive reads of one filesystem.
const IN_A_ROW: u32 = 8;
/// Keys recalled under one lock.
const AT_ONCE: usize = 256;
/// This many overflows within [`WINDOW`] end grants without a time limit, until there was none for that time.
const MOST_OVERFLOWS: usize = 3;
const WINDOW: Duration = Duration::from_secs(10);

impl Watch {
    /// Starts the threads with the first watched filesystem.
    pub(super) fn start(self: &Arc<Watch>) -> io::Result<()> {
        let mut started = self.started.lock();
        if *started {
            return Ok(());
        }
        let mounts = File::open("/proc/self/mountinfo")?;
        let data = epoll::EventData::new_u64(MOUNTS);
        epoll::add(&self.epoll, &mounts, data, epoll::EventFlags::PRI | epoll::EventFlags::ERR)?;
        let table = Table::read(&mounts)?;
        let watch = Arc::clone(self);
        let thread = || std::thread::Builder::new();
        // If the second thread cannot be started the first one ends; otherwise each grant would start another one
        // while threads are scarce.
        let (go, both) = std::sync::mpsc::channel::<()>();
        let read = move || both.recv().into_iter().for_each(|()| watch.read());
        thread().name("nigh-watch".into()).spawn(read)?;
        let watch = Arc::clone(self);
        thread().name("nigh-watched".into()).spawn(move || Resolver::new(mounts, table).run(&watch))?;
        *started = go.send(()).is_ok();
        Ok(())
    }

    fn read(&self) {
        let _over = EndGuard(self);
        let mut buffer = vec![0_u8; BYTES];
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let waited = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None);
            if waited.is_err_and(|errno| errno != rustix::io::Errno::INTR) {
                return;
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    MOUNTS => {
                        self.inbox.lock().mounts = true;
                        self.wake.notify_one();
                    }
                    token => self.read_group(token, &mut buffer),
                }
            }
        }
    }

    fn read_group(&self, token: u64, buffer: &mut [u8]) {
        let Some(group) = self.group_of(token) else { return };
        // Epoll reports the rest again, after other filesystems' events.
        for _ in 0..IN_A_ROW {
            let count = match rustix::io::read(&group.fd, &mut *buffer) {
                Ok(0) | Err(rustix::io::Errno::AGAIN) => return,
                Err(rustix::io::Errno::INTR) => continue,
                Ok(count) => count,
                Err(errno) => {
                    return self.lose(token, &group, LossReason::Read(errno.raw_os_error()));
                }
            };
            self.handle_events(token, &group, &buffer[..count]);
        }
    }

    fn handle_events(&self, token: u64, group: &Group, bytes: &[u8]) {
        let us = rustix::process::getpid().as_raw_nonzero().get();
        let (mut events, mut own, mut unmarks, mut lost) = (0, 0, false, None);
        let room = |there: bool| (!there).then_some(LossReason::InboxFull);
        let marked = matches!(group.strategy, MarkStrategy::Objects(_));
        let mut inbox = self.inbox.lock();
        parse(bytes, |heard| {
            events += 1;
            match heard {
                Event::Change { pid, mask, spot } if pid == us => {
                    own += 1;
                    let spot = EventLocation { dir: None, ..spot };
                    if marked && mask & libc::FAN_DELETE_SELF != 0 {
                        unmarks = true;
                        lost = lost.or(room(inbox.add(token, OWN_DELETE_SELF, spot)));
                    }
                }
                Event::Change { mask, spot, .. } => lost = lost.or(room(inbox.add(token, mask, spot))),
                Event::Overflow => lost = Some(LossReason::QueueOverflow),
                Event::Malformed => lost = lost.or(Some(LossReason::Malformed)),
            }
        });
        drop(inbox);
        group.counts.events.fetch_add(events, Ordering::Relaxed);
        group.counts.own.fetch_add(own, Ordering::Relaxed);
        if let Some(why) = lost {
            self.lose(token, group, why);
        } else if own < events || unmarks {
            self.wake.notify_one();
        }
    }

    /// Handles lost events: every grant so far may be stale.
    fn lose(&self, token: u64, group: &Group, why: LossReason) {
        group.counts.overflows.fetch_add(1, Ordering::Relaxed);
        let until = self.leases.with_table(|table, _| table.latest_grant());
        self.inbox.lock().lose(token, until, why);
        self.wake.notify_one();
    }

    fn group_of(&self, token: u64) -> Option<Arc<Group>> {
        let groups = self.groups.read();
        groups.values().find(|(its, _)| *its == token).and_then(|(_, group)| group.upgrade())
    }
}

/// Ends the watch when a thread ends, for whatever reason.
struct EndGuard<'a>(&'a Watch);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        if !self.0.inbox.lock().stopping {
            tracing::error!("the watch of the server's own disk has ended: grants have a limit from now on");
            self.0.stop_watching();
        }
    }
}

/// State of the resolver thread.
struct Resolver {
    mounts: File,
    table: Table,
    losses: Losses,
    /// When marks without grants were last removed.
    last_mark_cleanup: Instant,
}

/// Recent losses of events, by group.
#[derive(Default)]
struct Losses(Vec<(u64, Instant)>);

impl Losses {
    /// Records a loss. Returns whether there are too many.
    fn are_many(&mut self, token: u64, now: Instant) -> bool {
        self.0.push((token, now));
        let lately = |at: &Instant| now.saturating_duration_since(*at) < WINDOW;
        self.0.iter().filter(|(of, at)| *of == token && lately(at)).count() >= MOST_OVERFLOWS
    }

    /// Whether there was no loss for a while.
    fn are_over(&mut self, token: u64, now: Instant) -> bool {
        self.0.retain(|(_, at)| now.saturating_duration_since(*at) < WINDOW);
        !self.0.iter().any(|(of, _)| *of == token)
    }
}

impl Resolver {
    fn new(mounts: File, table: Table) -> Resolver {
        Resolver { mounts, table, losses: Losses::default(), last_mark_cleanup: Instant::now() }
    }

    fn run(mut self, watch: &Arc<Watch>) {
        let _over = EndGuard(watch);
        loop {
            let (heaps, mounts) = {
                let mut inbox = watch.inbox.lock();
                if inbox.is_empty() {
                    let pause = if self.losses.0.is_empty() { WINDOW } else { WINDOW / 10 };
                    watch.wake.wait_for(&mut inbox, pause);
                }
                if inbox.stopping {
                    return;
                }
                (inbox.take(), std::mem::take(&mut inbox.mounts))
            };
            for (token, heap) in heaps {
                if let Some(group) = watch.group_of(token) {
                    self.handle_pending(watch, (token, &group), heap);
                }
            }
            if mounts {
                self.look_at_mounts(watch);
            }
            self.resume(watch);
            if self.last_mark_cleanup.elapsed() > WINDOW {
                self.last_mark_cleanup = Instant::now();
                watch.all_groups().iter().for_each(|(_, group)| group.make_room());
            }
        }
    }

    fn handle_pending(&mut self, watch: &Watch, (token, group): (u64, &Group), heap: PendingEvents) {
        if let Some((until, why)) = heap.lost {
            tracing::warn!(
                filesystem = group.label,
                "changes were lost: {why}. What was granted there is recalled"
            );
            group.recall_until(until);
            if self.losses.are_many(token, Instant::now()) && !group.paused.load(Ordering::Relaxed) {
                group.pause();
            }
        }
        let (mut changes, mut lost) = (Vec::new(), None);
        for (spot, mask) in heap.locations {
            match group.resolve(mask, &spot) {
                Ok(hint) => {
                    if let Some(directory) = directory_of_rights(&hint) {
                        watch.leases.with_table(|table, now| table.handle_rights_changed(now, directory));
                    }
                    keys(&hint, &mut changes);
                }
                Err(Fault(errno)) => lost = Some(LossReason::LookedUp(errno.raw())),
            }
            if changes.len() >= AT_ONCE {
                recall(watch, group, &mut changes);
            }
        }
        recall(watch, group, &mut changes);
        if let Some(why) = lost {
            watch.lose(token, group, why);
        }
    }

    /// Ends time limits on groups without recent losses.
    fn resume(&mut self, watch: &Watch) {
        if self.losses.0.is_empty() {
            return;
        }
        for (token, group) in watch.all_groups() {
            if self.losses.are_over(token, Instant::now()) && group.paused.load(Ordering::Relaxed) {
                group.resume();
                // The reader may have ended meanwhile and paused the group before.
                if watch.current.lock().ended {
                    group.pause();
                }
            }
        }
    }

    fn look_at_mounts(&mut self, watch: &Watch) {
        match Table::read(&self.mounts) {
            Ok(table) => {
                let before = std::mem::replace(&mut self.table, table);
                watch.mounts_changed(&before, &self.table);
            }
            Err(error) => {
                tracing::warn!(%error, "the table of mounts cannot be read");
                watch.all_groups().iter().for_each(|(_, group)| group.remark_all());
            }
        }
    }
}

/// Recalls changed keys without waiting for their return: the disk has changed already.
fn recall(watch: &Watch, group: &Group, changes: &mut Vec<Change>) {
    if changes.is_empty() {
        return;
    }
    let changes = merged(std::mem::take(changes));
    let before = watch.leases.with_table(|table, now| {
        let before = table.recall_count();
        let change = table.handle_change(now, None, &changes);
        table.handle_done(now, change);
        table.recall_count() - before
    });
    group.counts.recalls.fetch_add(before, Ordering::Relaxed);
}

/// Merges changes: each key once, with all its names.
fn merged(changes: Vec<Change>) -> Vec<Change> {
    let mut keys = BTreeMap::<LeaseKey, Option<BTreeSet<Name>>>::new();
    for Change { key, names, .. } in changes {
        let all = keys.entry(key).or_insert_with(|| Some(BTreeSet::new()));
        match all {
            Some(all) if !names.is_empty() => all.extend(names),
            _ => *all = None,
        }
    }
    let names = |names: Option<BTreeSet<Name>>| names.into_iter().flatten().collect();
    keys.into_iter()
        .map(|(key, some)| Change { key, names: names(some), writes: false, can_update: false })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_lease::Object;
    use nigh_types::LeaseScope;

    #[test]
    fn three_event_losses_within_window_pause_watch_until_window_without_loss() {
        let begun = Instant::now();
        let at = |secs| begun + Duration::from_secs(secs);
        let mut losses = Losses::default();
        assert!(!losses.are_many(3, at(0)) && !losses.are_many(3, at(9)) && !losses.are_many(4, at(9)));
        assert!(!losses.are_many(3, at(11)) && losses.are_many(3, at(12)));
        assert!(!losses.are_over(3, at(21)) && losses.are_over(3, at(22)) && losses.are_over(4, at(22)));
        assert!(losses.0.is_empty());
    }

    #[test]
    fn changes_of_one_key_are_merged_with_their_names() {
        let object = Object { filesystem: 1, ino: 2, birth: 3 };
        let change = |covers, names: &[&str]| {
            let names = names.iter().map(|name| Name::new(name.as_bytes()).unwrap()).collect();
            Change { key: LeaseKey { object, covers }, names, writes: false, can_update: false }
        };
        let all = |named: &[&str]| {
            let changes = vec![
                change(LeaseScope::Directory, &["b"]),
                change(LeaseScope::Attributes, &[]),
                change(LeaseScope::Directory, named),
            ];
            merged(changes)
        };
        assert_eq!(
            all(&["a", "b"]),
            [change(LeaseScope::Directory, &["a", "b"]), change(LeaseScope::Attributes, &[])]
        );
        assert_eq!(all(&[]), [change(LeaseScope::Directory, &[]), change(LeaseScope::Attributes, &[])]);
    }
}
