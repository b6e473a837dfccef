//! The kernel's connection behind a mount: its number, whether it lives, how to end it.

use super::{locate, mountinfo};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const FUSECTL: &str = "/sys/fs/fuse/connections";

/// The number of the FUSE connection of a mount, under which fusectl shows it; `None` if nothing of FUSE
/// is mounted there. Never asks the mount itself, which might hang.
#[must_use]
pub fn connection_id(mountpoint: &Path) -> Option<u32> {
    let mount = mountinfo::topmost(&locate(mountpoint))?;
    let is_fuse = mount.fstype == "fuse" || mount.fstype.starts_with("fuse.");
    (is_fuse && mount.device.0 == 0).then_some(mount.device.1)
}

/// Ends a connection: requests in flight fail, and so does every later use of the mount (ENOTCONN). As root it
/// mounts fusectl where it is missing; a user may abort only what is his and only where it is there.
pub fn abort(mountpoint: &Path) -> io::Result<()> {
    let id = connection_id(mountpoint).ok_or(io::ErrorKind::NotFound)?;
    let file = PathBuf::from(FUSECTL).join(id.to_string()).join("abort");
    match std::fs::write(&file, "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            rustix::mount::mount(c"fusectl", FUSECTL, c"fusectl", MountFlags::empty(), None)?;
            std::fs::write(&file, "1")
        }
        result => result,
    }
}

/// Asks a mount for its root's attributes, from a process of its own since the question cannot be taken
/// back: the error number (0: it answered), or `None` if `limit` passed.
pub(super) fn probe(mountpoint: &Path, limit: Duration) -> Option<i32> {
    let path = CString::new(mountpoint.as_os_str().as_bytes()).ok()?;
    // SAFETY: the child calls only statx and _exit, which are safe after fork in any program.
    let child = unsafe { libc::fork() };
    if child == 0 {
        unsafe { libc::_exit(attributes_errno(&path)) };
    }
    let child = rustix::process::Pid::from_raw(child)?;
    let ended = wait_for_end(child, limit);
    if !ended {
        let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
        return None;
    }
    let (_, status) = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty()).ok()??;
    status.exit_status()
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

fn wait_for_end(child: rustix::process::Pid, limit: Duration) -> bool {
    let Ok(pidfd) = rustix::process::pidfd_open(child, rustix::process::PidfdFlags::empty()) else {
        return false;
    };
    let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
    loop {
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)) {
            Err(Errno::INTR) => {}
            Ok(ready) => return ready > 0,
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_of_fuse_has_no_connection() {
        assert_eq!(connection_id(Path::new("/proc")), None);
        assert_eq!(connection_id(Path::new("/nowhere")), None);
        assert_eq!(abort(Path::new("/proc")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_probe_tells_the_error() {
        let limit = Duration::from_secs(5);
        assert_eq!(probe(Path::new("/"), limit), Some(0));
        assert_eq!(probe(Path::new("/nowhere at all"), limit), Some(libc::ENOENT));
    }
}
