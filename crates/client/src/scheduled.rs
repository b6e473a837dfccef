//! What a thread does, as the machine's scheduler has it (proc_pid_stat(5)).

use std::fs;

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Scheduled {
    state: char,
    /// Its time on processors, its time in wait for one, and how often it got one; as text. `None`: this machine does not count them.
    so_far: Option<String>,
}

impl Scheduled {
    /// A thread of any process. `None`: it is not known, as it is gone or of another namespace (0).
    pub fn of(thread: u32) -> Option<Scheduled> {
        Scheduled::at(thread, "/proc")
    }

    /// One of ours.
    pub fn of_own(thread: u32) -> Option<Scheduled> {
        Scheduled::at(thread, "/proc/self/task")
    }

    fn at(thread: u32, all: &str) -> Option<Scheduled> {
        let read = |file: &str| fs::read_to_string(format!("{all}/{thread}/{file}")).ok();
        let stat = read("stat").filter(|_| thread != 0)?;
        // Its name, which may hold anything, is in parentheses.
        let (_, rest) = stat.rsplit_once(')')?;
        let state = rest.trim_start().chars().next()?;
        Some(Scheduled { state, so_far: read("schedstat").filter(|text| text.trim() != "0 0 0") })
    }

    /// It runs or waits for a processor: it was woken, and has not gone to sleep since.
    pub fn wants(&self) -> bool {
        matches!(self.state, 'R' | 'W')
    }

    /// It sleeps in the kernel, and takes no signals.
    pub fn is_locked(&self) -> bool {
        self.state == 'D'
    }

    /// Whether it can be told from this whether it has run since.
    pub fn is_counted(&self) -> bool {
        self.so_far.is_some()
    }
}
