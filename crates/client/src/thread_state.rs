//! Scheduler state of a thread (proc_pid_stat(5)).

use std::fs;

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Scheduled {
    state: char,
    /// Text of schedstat: time on processors, time in run queues, number of time slices. `None`: this machine does
    /// not count them.
    so_far: Option<String>,
}

impl Scheduled {
    /// A thread of any process. `None`: it has ended, or belongs to another pid namespace (0).
    pub fn of(thread: u32) -> Option<Scheduled> {
        Scheduled::at(thread, "/proc")
    }

    /// A thread of this process.
    pub fn of_own(thread: u32) -> Option<Scheduled> {
        Scheduled::at(thread, "/proc/self/task")
    }

    fn at(thread: u32, all: &str) -> Option<Scheduled> {
        let read = |file: &str| fs::read_to_string(format!("{all}/{thread}/{file}")).ok();
        let stat = read("stat").filter(|_| thread != 0)?;
        // The thread's name in parentheses may contain any characters.
        let (_, rest) = stat.rsplit_once(')')?;
        let state = rest.trim_start().chars().next()?;
        Some(Scheduled { state, so_far: read("schedstat").filter(|text| text.trim() != "0 0 0") })
    }

    /// Whether it runs or waits for a processor: it was woken, and has not slept since.
    pub fn wants(&self) -> bool {
        matches!(self.state, 'R' | 'W')
    }

    /// Whether it sleeps uninterruptibly in the kernel.
    pub fn is_locked(&self) -> bool {
        self.state == 'D'
    }

    /// Whether the state shows if the thread has run since.
    pub fn is_counted(&self) -> bool {
        self.so_far.is_some()
    }
}
