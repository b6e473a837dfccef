//! System calls that std does not wrap, with `io::Result`.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub fn c(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn check(ret: libc::c_int) -> io::Result<libc::c_int> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

fn check_long(ret: i64) -> io::Result<u64> {
    u64::try_from(ret).map_err(|_| io::Error::last_os_error())
}

#[must_use]
pub fn uid() -> u32 {
    unsafe { libc::getuid() }
}

pub fn set_umask(mask: u32) {
    unsafe { libc::umask(mask) };
}

pub fn kill_group(process: u32) {
    if let Ok(pid) = i32::try_from(process) {
        unsafe { libc::kill(-pid, libc::SIGKILL) };
    }
}

/// `flags` and `mode` as open(2).
pub fn open(path: &Path, flags: i32, mode: u32) -> io::Result<OwnedFd> {
    let path = c(path)?;
    let fd = check(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, mode) })?;
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// close(2) with its result, which a drop would hide.
pub fn close(fd: OwnedFd) -> bool {
    unsafe { libc::close(std::os::fd::IntoRawFd::into_raw_fd(fd)) == 0 }
}

pub fn rename2(from: &Path, to: &Path, flags: u32) -> io::Result<()> {
    let (from, to) = (c(from)?, c(to)?);
    let ret = unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) };
    check(ret).map(drop)
}

/// Gives an unnamed file a name.
pub fn link_fd(fd: &impl AsRawFd, to: &Path) -> io::Result<()> {
    let from = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let to = c(to)?;
    let flags = libc::AT_SYMLINK_FOLLOW;
    check(unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) })
        .map(drop)
}

pub fn mknod(path: &Path, mode: u32, device: u64) -> io::Result<()> {
    let path = c(path)?;
    check(unsafe { libc::mknod(path.as_ptr(), mode, device) }).map(drop)
}

pub fn access(path: &Path, mode: i32) -> io::Result<()> {
    let path = c(path)?;
    check(unsafe { libc::access(path.as_ptr(), mode) }).map(drop)
}

pub fn chmod(path: &Path, mode: u32) -> io::Result<()> {
    let path = c(path)?;
    check(unsafe { libc::chmod(path.as_ptr(), mode) }).map(drop)
}

/// `u32::MAX` leaves an id unchanged.
pub fn chown(path: &Path, uid: u32, gid: u32) -> io::Result<()> {
    let path = c(path)?;
    check(unsafe { libc::lchown(path.as_ptr(), uid, gid) }).map(drop)
}

/// Times are (seconds, nanoseconds), where nanoseconds may be `UTIME_NOW` or `UTIME_OMIT`.
pub fn utimens(path: &Path, atime: (i64, i64), mtime: (i64, i64)) -> io::Result<()> {
    let path = c(path)?;
    let spec = |(tv_sec, tv_nsec)| libc::timespec { tv_sec, tv_nsec };
    let times = [spec(atime), spec(mtime)];
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    check(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), flags) }).map(drop)
}

pub fn statx(path: &Path, mask: u32) -> io::Result<libc::statx> {
    let path = c(path)?;
    let mut out: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    check(unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, mask, &raw mut out) })?;
    Ok(out)
}

pub fn statvfs(path: &Path) -> io::Result<libc::statvfs> {
    let path = c(path)?;
    let mut out: libc::statvfs = unsafe { std::mem::zeroed() };
    check(unsafe { libc::statvfs(path.as_ptr(), &raw mut out) })?;
    Ok(out)
}

pub fn seek(fd: &impl AsRawFd, offset: i64, whence: i32) -> io::Result<u64> {
    check_long(unsafe { libc::lseek(fd.as_raw_fd(), offset, whence) })
}

/// Sets flags that fcntl(2) can change on an open file, such as `O_APPEND`.
pub fn set_flags(fd: &impl AsRawFd, flags: i32) -> io::Result<()> {
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) }).map(drop)
}

/// Writes out all filesystems (sync(2)).
pub fn sync() {
    unsafe { libc::sync() }
}

pub fn fallocate(fd: &impl AsRawFd, mode: i32, offset: i64, length: i64) -> io::Result<()> {
    check(unsafe { libc::fallocate(fd.as_raw_fd(), mode, offset, length) }).map(drop)
}

pub fn ftruncate(fd: &impl AsRawFd, length: i64) -> io::Result<()> {
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), length) }).map(drop)
}

/// Copies between files within the kernel; returns the number of bytes copied.
pub fn copy_range(
    from: &impl AsRawFd,
    mut at: i64,
    to: &impl AsRawFd,
    mut to_at: i64,
    len: u32,
) -> io::Result<u64> {
    let ret = unsafe {
        libc::copy_file_range(
            from.as_raw_fd(),
            &raw mut at,
            to.as_raw_fd(),
            &raw mut to_at,
            len as libc::size_t,
            0,
        )
    };
    check_long(i64::try_from(ret).unwrap_or(-1))
}

pub fn ioctl_int(fd: &impl AsRawFd, request: u64) -> io::Result<i32> {
    let mut value: libc::c_long = 0;
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut value) })?;
    Ok(i32::try_from(value & 0x7fff_ffff).unwrap_or(0))
}

pub fn flock(fd: &impl AsRawFd, operation: i32) -> io::Result<()> {
    check(unsafe { libc::flock(fd.as_raw_fd(), operation) }).map(drop)
}

/// `command` is `F_SETLK`, `F_SETLKW`, `F_GETLK` or their open-file forms; `kind` is `F_RDLCK`… Returns the lock type
/// and owner that the kernel filled in.
pub fn lock(fd: &impl AsRawFd, command: i32, kind: i32, start: i64, len: i64) -> io::Result<(i32, i32)> {
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).unwrap_or(-1);
    lock.l_whence = 0;
    lock.l_start = start;
    lock.l_len = len;
    check(unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) })?;
    Ok((i32::from(lock.l_type), lock.l_pid))
}

pub fn set_xattr(path: &Path, name: &str, value: &[u8], flags: i32) -> io::Result<()> {
    let (path, name) = (c(path)?, CString::new(name)?);
    let at = value.as_ptr().cast();
    check(unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), at, value.len(), flags) }).map(drop)
}

/// Reads an xattr into a buffer of this size.
pub fn xattr_sized(path: &Path, name: &str, room: u16) -> io::Result<Vec<u8>> {
    let (path, name) = (c(path)?, CString::new(name)?);
    let mut out = vec![0_u8; usize::from(room)];
    let ret = unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), out.as_mut_ptr().cast(), out.len()) };
    let length = usize::try_from(ret).map_err(|_| io::Error::last_os_error())?;
    if room > 0 {
        out.truncate(length);
        return Ok(out);
    }
    Ok(vec![0; length])
}

pub fn xattr(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    xattr_sized(path, name, u16::MAX)
}

pub fn list_xattrs(path: &Path) -> io::Result<Vec<String>> {
    let path = c(path)?;
    let mut out = vec![0_u8; 65_536];
    let ret = unsafe { libc::llistxattr(path.as_ptr(), out.as_mut_ptr().cast(), out.len()) };
    let length = usize::try_from(ret).map_err(|_| io::Error::last_os_error())?;
    let names = out[..length].split(|&b| b == 0).filter(|n| !n.is_empty());
    Ok(names.map(|n| String::from_utf8_lossy(n).into_owned()).collect())
}

pub fn remove_xattr(path: &Path, name: &str) -> io::Result<()> {
    let (path, name) = (c(path)?, CString::new(name)?);
    check(unsafe { libc::lremovexattr(path.as_ptr(), name.as_ptr()) }).map(drop)
}

/// Runs `body` in a forked process; its result is the exit status. Only for processes with one thread, as every case
/// is.
pub fn fork(body: impl FnOnce() -> bool) -> io::Result<i32> {
    match check(unsafe { libc::fork() })? {
        0 => {
            let ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
            unsafe { libc::_exit(i32::from(!ok)) }
        }
        pid => Ok(pid),
    }
}

/// Returns whether the process succeeded within the limit; kills it at the limit.
pub fn joined(pid: i32, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        let mut status = 0;
        let ret = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
        if ret == pid {
            return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
        }
        if ret < 0 || Instant::now() > end {
            unsafe { libc::kill(pid, libc::SIGKILL) };
            unsafe { libc::waitpid(pid, &raw mut status, 0) };
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `body` as another user, with these groups and no capabilities.
pub fn as_user(uid: u32, gid: u32, groups: &[u32], body: impl FnOnce() -> bool) -> io::Result<bool> {
    let groups = groups.to_vec();
    let pid = fork(move || {
        let dropped = unsafe {
            libc::setgroups(groups.len(), groups.as_ptr()) == 0
                && libc::setresgid(gid, gid, gid) == 0
                && libc::setresuid(uid, uid, uid) == 0
        };
        dropped && body()
    })?;
    Ok(joined(pid, Duration::from_secs(30)))
}

/// Restores root's effective user id, if it was dropped.
pub fn become_root() {
    unsafe { libc::seteuid(0) };
}

extern "C" fn nothing(_: libc::c_int) {}

/// Sets an alarm that interrupts calls (no `SA_RESTART`).
pub fn alarm_after(wait: Duration) -> io::Result<()> {
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as libc::sighandler_t;
    check(unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) })?;
    let value = libc::timeval { tv_sec: 0, tv_usec: i64::from(wait.subsec_micros()) };
    let timer = libc::itimerval { it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 }, it_value: value };
    check(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) }).map(drop)
}

/// Returns the path that the kernel reports for an open file; it ends in ` (deleted)` if it does not lead to the file.
pub fn path_of(fd: &impl AsRawFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// A process with its program and working directory in a directory under test.
pub struct User(std::process::Child);

impl User {
    /// Starts the process; `program` is created.
    pub fn start(program: &Path, working_directory: &Path) -> io::Result<User> {
        std::fs::copy("/bin/sleep", program)?;
        Ok(User(std::process::Command::new(program).arg("60").current_dir(working_directory).spawn()?))
    }

    pub fn program(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/{}/exe", self.0.id()))
    }

    pub fn working_directory(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/{}/cwd", self.0.id()))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A kernel file handle, which identifies an inode wherever it was moved (open_by_handle_at(2)).
#[repr(C, align(8))]
#[derive(Debug)]
pub struct FileHandle {
    bytes: u32,
    kind: i32,
    handle: [u8; 128],
}

impl FileHandle {
    pub fn of(path: &Path) -> io::Result<FileHandle> {
        let path = c(path)?;
        let mut found = FileHandle { bytes: 128, kind: 0, handle: [0; 128] };
        let mut mount: libc::c_int = 0;
        let result = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                libc::AT_FDCWD,
                path.as_ptr(),
                &raw mut found,
                &raw mut mount,
                0,
            )
        };
        if result == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
    }

    /// `mount`: any open file on the mount.
    pub fn open(&self, mount: &impl AsRawFd) -> io::Result<std::fs::File> {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        let fd = unsafe {
            libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), std::ptr::from_ref(self), flags)
        };
        match i32::try_from(fd) {
            Ok(fd @ 0..) => Ok(unsafe { std::fs::File::from_raw_fd(fd) }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
