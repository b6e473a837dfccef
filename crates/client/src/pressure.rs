//! Hears when the machine is short of memory.

use rustix::event::{PollFd, PollFlags, poll};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// Something that tells when memory is short.
pub trait Pressure: Send {
    /// Waits until it is (`true`), or until `stop` can be read from.
    ///
    /// # Errors
    ///
    /// It will not tell any more.
    fn wait(&mut self, stop: BorrowedFd<'_>) -> io::Result<bool>;
}

/// A trigger of the kernel's pressure stall information (Documentation/accounting/psi.rst).
pub struct Trigger {
    file: File,
    path: PathBuf,
}

/// Somebody waited for memory for a tenth of two seconds; of such windows users may ask for too (6.5).
pub const SHORT: &str = "some 200000 2000000";

impl Trigger {
    /// # Errors
    ///
    /// There is no such file, or this trigger may not be set on it.
    pub fn set(path: &Path, trigger: &str) -> io::Result<Trigger> {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        file.write_all(format!("{trigger}\0").as_bytes())?;
        Ok(Trigger { file, path: path.to_owned() })
    }

    /// That of our own cgroup, else that of the whole machine.
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

/// The path of a process in the one hierarchy of version 2; not its root, which is the whole machine.
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
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !fds[1].revents().is_empty() {
            return Ok(false);
        }
        match fds[0].revents() {
            PollFlags::PRI => Ok(true),
            _ => Err(io::Error::other("its cgroup is gone")),
        }
    }
}

/// Threads share a heap, so that what one of them frees serves all: with a heap each the same walk of a large tree took 1.5 to 2.4 times
/// the memory of what was held. To be called before there are threads.
pub fn share_a_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// What was freed lies between what is used, and goes back to the system only when that is asked for.
pub(crate) fn give_back_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and may be called by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_group_of_ones_own_is_asked() {
        assert_eq!(own_group("0::/user.slice/session-1.scope\n"), Some("user.slice/session-1.scope"));
        assert_eq!(own_group("9:name=systemd:/\n4:memory:/a\n0::/\n"), None);
        assert_eq!(own_group("0::/../../other\n"), None);
        assert_eq!(own_group(""), None);
    }
}
