//! Scheduling of replays, and their results.
//!
//! Changes of one directory are replayed in order. A child blocked in the mount (its directory is locked for a
//! request that waits) delays only its own directories; another child, up to a limit, serves the others.

#[cfg(test)]
mod tests;

use super::command::Command;
use super::replay_filter::{MOST_PROCESSES, ReplayedChange};
use super::replay_process::{Program, ReplayProcess, Task};
use super::{Events, MOST_WAITING};
use crate::driver::Driver;
use crate::host::Submounts;
use nigh_cache::RemoteChange;
use nigh_types::{Name, NodeId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Most repeats of a replay in which another lookup interfered.
const TRIES: u32 = 3;
/// Unit of the delay before a repeat: 2, 4 and 8 units, by which time the kernel has invalidated its dentry. If only
/// the server is asked meanwhile, 4, 16 and 64 units.
const AGAIN: Duration = Duration::from_millis(10);
/// Most waiting changes examined for one that can be replayed.
const LOOKS_AHEAD: usize = 256;
/// Pause between attempts to start a child.
const PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Scheduler<'a> {
    events: &'a Events,
    driver: &'a Arc<Driver>,
    program: Program,
    processes: Vec<ReplayProcess>,
    waiting: VecDeque<Task>,
    submounts: Submounts,
    start_again: Option<Instant>,
    /// Directories for which a refusal is already logged.
    refused: BTreeSet<u64>,
    /// Directories with a pending notice that unknown changes were lost.
    gaps: BTreeSet<u64>,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The requests that a replay may make, and its command.
type Replay = (ReplayedChange, Command);

impl<'a> Scheduler<'a> {
    pub fn new(events: &'a Events, driver: &'a Arc<Driver>, program: Program) -> Scheduler<'a> {
        Scheduler {
            events,
            driver,
            program,
            processes: Vec::new(),
            waiting: VecDeque::new(),
            submounts: driver.submounts(),
            start_again: None,
            refused: BTreeSet::new(),
            gaps: BTreeSet::new(),
        }
    }

    pub fn enqueue(&mut self, changes: VecDeque<(u64, RemoteChange)>) {
        for (number, change) in changes {
            if matches!(change, RemoteChange::Removed { replaced: true, .. }) {
                // The kernel reports it with the rename that replaced the name.
                self.mark_replayed(&change);
                continue;
            }
            // There are at most as many gaps as directories.
            if self.waiting.len() >= MOST_WAITING && !matches!(change, RemoteChange::Gap { .. }) {
                self.drop_change(&change);
                continue;
            }
            self.waiting.push_back(Task { change, number, tries: 0, not_before: None });
        }
    }

    /// Gives the children the replays that can run now. Returns the time on which the choice was based, for `wait`.
    pub fn run_due(&mut self) -> Instant {
        self.collect_results();
        self.submounts.refresh();
        let mut locked: BTreeSet<u64> = BTreeSet::new();
        self.processes
            .iter()
            .filter_map(ReplayProcess::task)
            .for_each(|task| locked.extend(dirs(&task.change)));
        let (mut at, now) = (0, Instant::now());
        while at < self.waiting.len().min(LOOKS_AHEAD) {
            let task = &self.waiting[at];
            let dirs = dirs(&task.change);
            let free = task.not_before.is_none_or(|moment| moment <= now);
            if !free || dirs.iter().any(|dir| locked.contains(dir)) {
                locked.extend(dirs);
                at += 1;
                continue;
            }
            let Some(player) = self.idle_process(now) else { break };
            let Some(task) = self.waiting.remove(at) else { break };
            if self.start(player, task) {
                locked.extend(dirs);
            }
        }
        let stuck = self.processes.iter().filter(|player| player.is_blocked(now)).count();
        self.events.counts.stuck.store(stuck as u64, Ordering::Relaxed);
        now
    }

    /// Waits for a result, a queued change, or a timer that was not due at `now`.
    pub fn wait(&self, now: Instant) {
        let late = self.processes.iter().filter_map(ReplayProcess::blocked_at);
        let again = self.waiting.iter().take(LOOKS_AHEAD).filter_map(|task| task.not_before);
        let start = self.start_again.filter(|_| !self.waiting.is_empty());
        let due = late.chain(again).chain(start).filter(|due| *due > now).min();
        let timeout = due.map(|due| {
            let span = due.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            let seconds = i64::try_from(span.as_secs()).unwrap_or(i64::MAX);
            Timespec { tv_sec: seconds, tv_nsec: i64::from(span.subsec_nanos()) }
        });
        let mut polled = vec![PollFd::new(&self.events.wake, PollFlags::IN)];
        polled.extend(self.processes.iter().map(ReplayProcess::polled));
        // If interrupted, the caller checks and waits again.
        let _ = poll(&mut polled, timeout.as_ref());
    }

    pub fn end(self) {
        for player in self.processes {
            player.end(&self.events.replay_filter);
        }
    }

    /// Index of an idle child; starts one more if all others are blocked.
    fn idle_process(&mut self, now: Instant) -> Option<usize> {
        if let Some(idle) = self.processes.iter().position(ReplayProcess::is_idle) {
            return Some(idle);
        }
        let may = self.processes.len() < MOST_PROCESSES
            && self.processes.iter().all(|player| player.is_blocked(now));
        if !may || self.start_again.is_some_and(|again| now < again) {
            return None;
        }
        match ReplayProcess::start(&self.program, &self.events.replay_filter) {
            Ok(player) => {
                self.processes.push(player);
                Some(self.processes.len() - 1)
            }
            Err(error) => {
                tracing::warn!(target: "nigh::events", %error, "watchers get no events: no process can be started");
                self.start_again = Some(Instant::now() + PAUSE);
                None
            }
        }
    }

    /// Starts a replay. Returns whether a child runs it.
    fn start(&mut self, player: usize, task: Task) -> bool {
        if let RemoteChange::Gap { dir } = task.change {
            // Later losses need a new gap.
            self.gaps.remove(&dir);
        }
        let left = self.driver.with(|core, _| core.cache.unreported_part(task.number, &task.change));
        let Some(change) = left else {
            self.mark_replayed(&task.change);
            return false;
        };
        let Some((part, command)) = self.prepare(&change) else {
            self.drop_change(&task.change);
            return false;
        };
        tracing::trace!(target: "nigh::events", change = ?task.change);
        if self.processes[player].start_task(&self.events.replay_filter, task, part, &command).is_err() {
            self.replace_process(player);
            return false;
        }
        true
    }

    /// Reads the results of the children.
    fn collect_results(&mut self) {
        let mut at = 0;
        while at < self.processes.len() {
            let mut polled = [self.processes[at].polled()];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if poll(&mut polled, Some(&now)).unwrap_or(0) == 0 {
                at += 1;
                continue;
            }
            match self.processes[at].take_result(&self.events.replay_filter) {
                Ok((Some(task), errno)) => self.on_result(task, errno),
                Ok((None, _)) => {}
                Err(_) => {
                    self.replace_process(at);
                    continue;
                }
            }
            at += 1;
        }
    }

    /// Removes a child that has ended, and retries its task.
    fn replace_process(&mut self, at: usize) {
        let task = self.processes.swap_remove(at).end(&self.events.replay_filter);
        self.start_again = Some(Instant::now() + PAUSE);
        if let Some(task) = task {
            self.retry(task);
        }
    }

    fn retry(&mut self, mut task: Task) {
        task.tries += 1;
        if task.tries > TRIES {
            return self.drop_change(&task.change);
        }
        count(&self.events.counts.repeated);
        let factor = if names(&task.change).is_empty() { 4_u32 } else { 2 };
        task.not_before = Some(Instant::now() + AGAIN * factor.pow(task.tries));
        self.waiting.push_front(task);
    }

    fn on_result(&mut self, task: Task, errno: i32) {
        let counts = &self.events.counts;
        match errno {
            0 => {
                count(&counts.replayed);
                self.mark_replayed(&task.change);
            }
            libc::EACCES | libc::EPERM | libc::EROFS => {
                count(&counts.refused);
                for dir in dirs(&task.change) {
                    if self.refused.insert(dir) {
                        let why = Errno::from_raw_os_error(errno);
                        tracing::info!(target: "nigh::events", dir, %why, "no remote change is reported here: the user who mounted may not write to the directory");
                    }
                }
                self.mark_replayed(&task.change);
                self.report_gap(&task.change);
            }
            // The kernel had the dentry cached and sent no LOOKUP, or the path does not exist.
            libc::ECANCELED | libc::ENOENT | libc::EEXIST | libc::ENOTDIR | libc::EISDIR | libc::ESTALE => {
                for (dir, name) in names(&task.change) {
                    self.driver.with(|core, _| core.cache.invalidate_name(dir, &name));
                }
                self.retry(task);
            }
            _ => {
                let error = Errno::from_raw_os_error(errno);
                tracing::debug!(target: "nigh::events", %error, change = ?task.change, "not told");
                self.drop_change(&task.change);
            }
        }
    }

    fn mark_replayed(&self, change: &RemoteChange) {
        self.driver.with(|core, _| core.cache.handle_reported(change));
    }

    fn drop_change(&mut self, change: &RemoteChange) {
        count(&self.events.counts.lost);
        self.mark_replayed(change);
        self.report_gap(change);
    }

    /// Reports an unknown change in the directories of a lost change. No comparison finds the change again, because the
    /// snapshots already contain it. A lost gap is given up.
    fn report_gap(&mut self, change: &RemoteChange) {
        if matches!(change, RemoteChange::Gap { .. }) {
            return;
        }
        for dir in dirs(change) {
            if self.gaps.insert(dir) {
                self.driver.with(|core, _| core.cache.handle_unreportable(dir));
            }
        }
    }

    /// Prepares a replay; `None`: the path no longer exists, or leads into a mount below.
    fn prepare(&self, change: &RemoteChange) -> Option<Replay> {
        let path = |dir: u64, name: &Name| {
            let path = self.driver.with(|core, _| core.cache.path_of(dir, name))?;
            (!self.submounts.leads_to_mount(&path)).then_some(path)
        };
        let touch = |ino: u64| ReplayedChange::Touch { ino };
        Some(match change {
            RemoteChange::Made { dir, name, kind } => {
                let part = ReplayedChange::Make { dir: *dir, name: name.clone(), kind: *kind };
                (part, Command::Make { path: path(*dir, name)?, kind: *kind })
            }
            RemoteChange::Removed { dir, name, kind, .. } => {
                let part = ReplayedChange::Remove { dir: *dir, name: name.clone(), kind: *kind };
                (part, Command::Remove { path: path(*dir, name)?, kind: *kind })
            }
            RemoteChange::Moved { from, name, to, new_name, kind, .. } => {
                let command = Command::Move { path: path(*from, name)?, new_path: path(*to, new_name)? };
                let (name, new_name) = (name.clone(), new_name.clone());
                (ReplayedChange::Move { from: *from, name, to: *to, new_name, kind: *kind }, command)
            }
            RemoteChange::Written { dir, name, node: NodeId { ino, .. } } => {
                (touch(*ino), Command::Written { path: path(*dir, name)? })
            }
            RemoteChange::Attributes { dir, name, node: NodeId { ino, .. } } => {
                (touch(*ino), Command::Attributes { path: path(*dir, name)? })
            }
            RemoteChange::Gap { dir } => {
                let path = self.driver.with(|core, _| core.cache.path_of_directory(*dir))?;
                (touch(*dir), Command::Attributes { path })
            }
        })
    }
}

fn dirs(change: &RemoteChange) -> Vec<u64> {
    let (dir, other) = change.dirs();
    [Some(dir), other].into_iter().flatten().collect()
}

/// The names for which the kernel must send a LOOKUP.
fn names(change: &RemoteChange) -> Vec<(u64, Name)> {
    match change {
        RemoteChange::Made { dir, name, .. } | RemoteChange::Removed { dir, name, .. } => {
            vec![(*dir, name.clone())]
        }
        RemoteChange::Moved { from, name, to, new_name, .. } => {
            vec![(*from, name.clone()), (*to, new_name.clone())]
        }
        RemoteChange::Written { .. } | RemoteChange::Attributes { .. } | RemoteChange::Gap { .. } => {
            Vec::new()
        }
    }
}
