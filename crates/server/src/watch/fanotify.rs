//! System calls of fanotify(7).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Scope of a mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scope {
    /// The whole filesystem; needs `CAP_SYS_ADMIN`.
    Filesystem,
    /// One object, and the names in it.
    Object,
}

/// Opens a fanotify group whose events carry handles and names; reads never block.
pub(crate) fn open(unlimited_marks: bool) -> io::Result<OwnedFd> {
    let mut flags = libc::FAN_CLASS_NOTIF
        | libc::FAN_CLOEXEC
        | libc::FAN_NONBLOCK
        | libc::FAN_REPORT_FID
        | libc::FAN_REPORT_DFID_NAME;
    if unlimited_marks {
        flags |= libc::FAN_UNLIMITED_MARKS;
    }
    let events = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: the call takes numbers only; a non-negative result is a new descriptor.
    unsafe {
        match libc::fanotify_init(flags, events.cast_unsigned()) {
            fd @ 0.. => Ok(OwnedFd::from_raw_fd(fd)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Marks the object of a descriptor, which may be `O_PATH`. It goes by the descriptor, since a name may lead to
/// another object by now.
pub(crate) fn mark(group: &OwnedFd, scope: Scope, mask: u64, object: impl AsFd) -> io::Result<()> {
    let path = CString::new(crate::export::node::proc_path(object))?;
    let scope = match scope {
        Scope::Filesystem => libc::FAN_MARK_FILESYSTEM,
        Scope::Object => 0,
    };
    let flags = libc::FAN_MARK_ADD | scope;
    // SAFETY: the path ends with NUL and lives until the call returns.
    let result =
        unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, mask, libc::AT_FDCWD, path.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Removes all marks on objects.
pub(crate) fn flush(group: &OwnedFd) -> io::Result<()> {
    // SAFETY: FAN_MARK_FLUSH ignores the path.
    let result = unsafe {
        libc::fanotify_mark(group.as_raw_fd(), libc::FAN_MARK_FLUSH, 0, libc::AT_FDCWD, std::ptr::null())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
