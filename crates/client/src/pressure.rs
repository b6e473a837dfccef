//! Memory pressure events.

use rustix::event::{PollFd, PollFlags, poll};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A source of memory pressure events.
pub trait Pressure: Send {
    /// Waits until memory is short (`true`), or until `stop` is readable.
    ///
    /// # Errors
    ///
    /// The source has ended.
    fn wait(&mut self, stop: BorrowedFd<'_>) -> io::Result<bool>;
}

/// A trigger of the kernel's pressure stall information (Documentation/accounting/psi.rst).
pub struct Trigger {
    file: File,
    path: PathBuf,
    stalls: Stalls,
}

/// The kernel's total of the time that tasks have waited for memory, in microseconds since boot.
///
/// A trigger without `CAP_SYS_RESOURCE` at first compares with a counter of another origin (`psi_trigger_create` reads
/// `PSI_POLL`, `psi_avgs_work` `PSI_AVGS`; seen on Linux 6.18). So the first stall of a microsecond fires it.
struct Stalls {
    last: u64,
    /// The stall time per window for which the trigger is set.
    threshold: u64,
}

impl Stalls {
    /// `trigger`: "some", the threshold, the window.
    fn new(trigger: &str, pressure: &str) -> Option<Stalls> {
        let threshold = trigger.split(' ').nth(1)?.parse().ok()?;
        Some(Stalls { last: Stalls::total(pressure)?, threshold })
    }

    fn total(pressure: &str) -> Option<u64> {
        let some = pressure.lines().find(|line| line.starts_with("some "))?;
        some.split(' ').find_map(|field| field.strip_prefix("total="))?.parse().ok()
    }

    /// Whether the total has grown by the threshold since the last call. If it cannot be read, trusts the trigger.
    fn have_grown(&mut self, pressure: &str) -> bool {
        let Some(total) = Stalls::total(pressure) else { return true };
        let grown = total.saturating_sub(self.last);
        self.last = total;
        grown >= self.threshold
    }
}

/// Some task waited for memory for a tenth of two seconds; unprivileged users may set such windows too (6.5).
pub const SHORT: &str = "some 200000 2000000";

impl Trigger {
    /// # Errors
    ///
    /// The file is missing, or this trigger may not be set on it.
    pub fn set(path: &Path, trigger: &str) -> io::Result<Trigger> {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        let before = std::fs::read_to_string(path)?;
        let stalls = Stalls::new(trigger, &before).ok_or(io::ErrorKind::InvalidData)?;
        file.write_all(format!("{trigger}\0").as_bytes())?;
        Ok(Trigger { file, path: path.to_owned(), stalls })
    }

    /// A trigger on this process's cgroup, else on the whole machine.
    #[must_use]
    pub fn of_system(trigger: &str) -> Option<Trigger> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = own_group(&groups).map(|group| Path::new("/sys/fs/cgroup").join(group));
        let own = own.map(|group| group.join("memory.pressure"));
        let found = own.into_iter().chain(["/proc/pressure/memory".into()]);
        found.into_iter().find_map(|path| match Trigger::set(&path, trigger) {
            Ok(trigger) => Some(trigger),
            Err(error) => {
                tracing::debug!(target: "nigh::pressure", %error, path = %path.display(), "nothing is told by that");
                None
            }
        })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The process's path in the cgroup v2 hierarchy; `None` for its root, which is the whole machine.
fn own_group(groups: &str) -> Option<&str> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(path).filter(|path| !path.is_empty() && !path.split('/').any(|part| part == ".."))
}

impl Pressure for Trigger {
    fn wait(&mut self, stop: BorrowedFd<'_>) -> io::Result<bool> {
        let mut fds =
            [PollFd::new(&self.file, PollFlags::PRI), PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
        loop {
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !fds[1].revents().is_empty() {
                return Ok(false);
            }
            if fds[0].revents() != PollFlags::PRI {
                return Err(io::Error::other("its cgroup is gone"));
            }
            if self.stalls.have_grown(&std::fs::read_to_string(&self.path).unwrap_or_default()) {
                return Ok(true);
            }
        }
    }
}

/// Freed memory at the end of a heap that the allocator keeps, in bytes. A stream of replies frees and allocates megabytes all
/// the time; page faults for them took a third of a server's time.
#[cfg(target_env = "gnu")]
const KEPT: libc::c_int = 8 << 20;
/// Blocks of at least this length are mapped on their own, in bytes. Replies are shorter.
#[cfg(target_env = "gnu")]
const MAPPED: libc::c_int = 1 << 20;

/// How many heaps the threads of a process share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heaps {
    /// Memory freed by one thread serves all. With a heap for each thread, one walk of a large tree took 1.5 to 2.4 times the
    /// memory of the cached data.
    One,
    /// For threads that allocate at once.
    Few,
}

/// Configures the allocator. Call it before threads start.
pub fn configure_allocator(heaps: Heaps) {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, if heaps == Heaps::One { 1 } else { 4 });
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = heaps;
}

/// Returns free heap pages to the system. Freed blocks lie between used ones, so the allocator does not do it alone.
pub(crate) fn give_back_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and may be called by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Free bytes in the heap, and its size.
#[cfg(target_env = "gnu")]
fn heap() -> (u64, u64) {
    // SAFETY: it takes no pointers, and may be called by any thread.
    let info = unsafe { libc::mallinfo2() };
    (info.fordblks as u64, info.arena as u64)
}

#[cfg(not(target_env = "gnu"))]
fn heap() -> (u64, u64) {
    (0, 0)
}

/// Checks at intervals whether enough was freed to return it, as after a listing that exceeded the budget.
pub(crate) struct Freed {
    looked: Instant,
    /// Least free memory since the last return. (Returned pages count as free.)
    least: u64,
}

impl Freed {
    const EVERY: Duration = Duration::from_secs(10);
    /// Giving back takes the longer the larger the heap is.
    const WORTH: u64 = 8 << 20;
    const PART: u64 = 8;

    pub fn begin() -> Freed {
        Freed { looked: Instant::now(), least: 0 }
    }

    pub fn look(&mut self) {
        if self.looked.elapsed() >= Freed::EVERY {
            self.looked = Instant::now();
            let (free, all) = heap();
            if self.is_worth(free, all) {
                give_back_freed();
            }
        }
    }

    fn is_worth(&mut self, free: u64, all: u64) -> bool {
        self.least = self.least.min(free);
        let is_worth = free - self.least >= Freed::WORTH.max(all / Freed::PART);
        if is_worth {
            self.least = free;
        }
        is_worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pressure(some: u64) -> String {
        let line = |kind, total| format!("{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n");
        line("some", some) + &line("full", some / 2)
    }

    #[test]
    fn pressure_trigger_without_sufficient_stalls_is_ignored() {
        let mut stalls = Stalls::new(SHORT, &pressure(1_917_529)).unwrap();
        assert!(!stalls.have_grown(&pressure(1_917_532)), "3 microseconds after seconds since boot");
        assert!(stalls.have_grown(&pressure(2_117_532)));
        assert!(!stalls.have_grown(&pressure(2_317_531)));
        assert!(stalls.have_grown(""), "it cannot be read");
    }

    #[test]
    fn large_freed_heap_is_returned_once_to_the_system() {
        let mut freed = Freed::begin();
        assert!(!freed.is_worth(7 << 20, 20 << 20), "it is little");
        assert!(freed.is_worth(9 << 20, 20 << 20));
        assert!(!freed.is_worth(9 << 20, 20 << 20), "it was given back");
        assert!(!freed.is_worth(1 << 20, 20 << 20), "it is used again");
        assert!(freed.is_worth(9 << 20, 20 << 20));
        assert!(!freed.is_worth(20 << 20, 128 << 20), "it is little of that");
        assert!(freed.is_worth(25 << 20, 128 << 20));
    }

    #[test]
    fn pressure_uses_only_the_process_own_cgroup() {
        assert_eq!(own_group("0::/user.slice/session-1.scope\n"), Some("user.slice/session-1.scope"));
        assert_eq!(own_group("9:name=systemd:/\n4:memory:/a\n0::/\n"), None);
        assert_eq!(own_group("0::/../../other\n"), None);
        assert_eq!(own_group(""), None);
    }
}
