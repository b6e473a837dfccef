//! Probe of a mount from a child process, so that the caller never blocks in the mount.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// A child process that reads the attributes of a mount's root. It holds no descriptor: one of `/dev/fuse` would keep a
/// connection alive after its daemon.
#[derive(Debug)]
pub struct Probe {
    child: Pid,
    ended: OwnedFd,
}

impl Probe {
    /// Starts a probe; `None` if no process can be started.
    #[must_use]
    pub fn start(mountpoint: &Path) -> Option<Probe> {
        let path = CString::new(mountpoint.as_os_str().as_bytes()).ok()?;
        // SAFETY: the child calls only close_range, close, statx and _exit, which are safe after fork in any program.
        let child = unsafe { libc::fork() };
        if child == 0 {
            close_all();
            // SAFETY: as above.
            unsafe { libc::_exit(attributes_errno(&path)) };
        }
        let child = Pid::from_raw(child)?;
        match rustix::process::pidfd_open(child, PidfdFlags::empty()) {
            Ok(ended) => Some(Probe { child, ended }),
            Err(_) => {
                kill(child);
                None
            }
        }
    }

    /// The errno (0: the mount answered), or `None` after `limit`.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> Option<i32> {
        if !ends_within(&self.ended, limit) {
            return None;
        }
        let (_, status) = rustix::process::waitpid(Some(self.child), WaitOptions::empty()).ok()??;
        status.exit_status()
    }

    /// Kills the child and waits for its end, which may take as long as the mount blocks it.
    pub fn end(self) {
        kill(self.child);
        let _ = rustix::process::waitpid(Some(self.child), WaitOptions::empty());
    }
}

/// Probes a mount once. A child that waits longer than `limit` is killed and abandoned.
pub(super) fn probe(mountpoint: &Path, limit: Duration) -> Option<i32> {
    let probe = Probe::start(mountpoint)?;
    let answer = probe.wait(limit);
    if answer.is_none() {
        kill(probe.child);
    }
    answer
}

fn kill(child: Pid) {
    let _ = rustix::process::kill_process(child, Signal::KILL);
}

fn close_all() {
    // SAFETY: this process uses no descriptor from here on.
    unsafe {
        if libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0) != 0 {
            // Linux 5.8 has no close_range(2).
            let most = libc::sysconf(libc::_SC_OPEN_MAX).clamp(0, 1 << 20);
            (0..i32::try_from(most).unwrap_or(i32::MAX)).for_each(|fd| {
                libc::close(fd);
            });
        }
    }
}

fn attributes_errno(path: &std::ffi::CStr) -> i32 {
    let mut stat = std::mem::MaybeUninit::<libc::statx>::uninit();
    // SAFETY: the path is terminated and the kernel writes no more than one statx.
    let result = unsafe {
        libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_STATX_FORCE_SYNC | libc::AT_NO_AUTOMOUNT,
            libc::STATX_BASIC_STATS,
            stat.as_mut_ptr(),
        )
    };
    // SAFETY: the address of this thread's errno is always valid.
    if result == 0 { 0 } else { unsafe { *libc::__errno_location() } }
}

fn ends_within(pidfd: &OwnedFd, limit: Duration) -> bool {
    let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
    loop {
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&limit)) {
            Err(Errno::INTR) => {}
            Ok(ready) => return ready > 0,
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[test]
    fn a_probe_tells_the_error() {
        assert_eq!(probe(Path::new("/"), LIMIT), Some(0));
        assert_eq!(probe(Path::new("/nowhere at all"), LIMIT), Some(libc::ENOENT));
    }

    /// Otherwise a probe that waits in its own daemon's mount would keep the connection alive after the daemon.
    #[test]
    fn probe_that_runs_holds_no_descriptor_of_its_parent() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let probe = Probe::start(Path::new("/")).unwrap();
        drop(write);
        assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0), "the other end is closed");
        probe.end();
    }
}
