//! Scheduler state of a thread (proc_pid_stat(5)).

use std::fs;

/// Scheduler state of a thread at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadState {
    state: char,
    /// Text of schedstat: time on processors, time in run queues, number of time slices. `None`: this machine does
    /// not count them.
    schedstat: Option<String>,
}

impl ThreadState {
    /// A thread of this process.
    pub fn of_own(thread: u32) -> Option<ThreadState> {
        ThreadState::below("/proc/self/task", thread)
    }

    /// A thread below a directory of threads. `None`: it has ended, or belongs to another pid namespace (0).
    pub(crate) fn below(directory: &str, thread: u32) -> Option<ThreadState> {
        let read = |file: &str| fs::read_to_string(format!("{directory}/{thread}/{file}")).ok();
        let stat = read("stat").filter(|_| thread != 0)?;
        // The thread's name in parentheses may contain any characters.
        let (_, rest) = stat.rsplit_once(')')?;
        let state = rest.trim_start().chars().next()?;
        Some(ThreadState { state, schedstat: read("schedstat").filter(|text| text.trim() != "0 0 0") })
    }

    /// Whether it runs or waits for a processor: it was woken, and has not slept since.
    pub fn is_runnable(&self) -> bool {
        matches!(self.state, 'R' | 'W')
    }

    /// Whether it sleeps uninterruptibly in the kernel.
    pub fn is_uninterruptible(&self) -> bool {
        self.state == 'D'
    }

    /// Whether the state shows if the thread has run since.
    pub fn has_schedstat(&self) -> bool {
        self.schedstat.is_some()
    }
}
