//! File handles: how a server with CAP_DAC_READ_SEARCH finds an inode whose names it lost.

use crate::error::{Fault, Result};
use nigh_types::Errno;
use rustix::thread::CapabilitySet;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// A handle as its filesystem made it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FileHandle {
    kind: i32,
    bytes: Box<[u8]>,
}

/// Opens handles of one mount.
#[derive(Debug)]
pub(crate) struct Opener {
    /// Open for reading: `O_PATH` does not name a mount here.
    mount: OwnedFd,
}

const MAX_HANDLE_SZ: usize = 128;
/// Encodes the parent too, so that an opened handle has a path again (Linux 6.13).
const AT_HANDLE_CONNECTABLE: libc::c_int = 0x002;

#[repr(C, align(8))]
struct Buffer {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; MAX_HANDLE_SZ],
}

impl FileHandle {
    /// As the kernel tells it; `None` where it is longer than any.
    pub(crate) fn told(kind: i32, bytes: &[u8]) -> Option<FileHandle> {
        (bytes.len() <= MAX_HANDLE_SZ).then(|| FileHandle { kind, bytes: bytes.into() })
    }

    /// Of an `O_PATH` descriptor, as events bring it.
    pub(crate) fn plain(fd: impl AsFd) -> Result<FileHandle> {
        FileHandle::make(fd.as_fd().as_raw_fd(), libc::AT_EMPTY_PATH)
    }

    /// Of an `O_PATH` descriptor; `EOPNOTSUPP` where its filesystem has none.
    pub(crate) fn of(fd: impl AsFd) -> Result<FileHandle> {
        let made = FileHandle::make(fd.as_fd().as_raw_fd(), libc::AT_EMPTY_PATH | AT_HANDLE_CONNECTABLE);
        made.or_else(|_| FileHandle::plain(fd))
    }

    fn make(fd: i32, flags: libc::c_int) -> Result<FileHandle> {
        let mut buffer = Buffer { handle_bytes: 128, handle_type: 0, f_handle: [0; MAX_HANDLE_SZ] };
        let mut mount_id: libc::c_int = 0;
        // SAFETY: the buffer says how long it is; the name is empty and ends with NUL.
        let result = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                fd,
                c"".as_ptr(),
                &raw mut buffer,
                &raw mut mount_id,
                flags,
            )
        };
        if result != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        let length = usize::try_from(buffer.handle_bytes).unwrap_or(0);
        let bytes = buffer.f_handle.get(..length).ok_or(Fault(Errno::OVERFLOW))?;
        Ok(FileHandle { kind: buffer.handle_type, bytes: bytes.into() })
    }
}

impl Opener {
    /// For handles of the mount on which `directory` (open for reading) lies; `None` where this
    /// process may not open by handle.
    pub(crate) fn new(directory: OwnedFd) -> Option<Opener> {
        let may = rustix::thread::capabilities(None)
            .is_ok_and(|c| c.effective.contains(CapabilitySet::DAC_READ_SEARCH));
        let usable = may && FileHandle::of(&directory).is_ok_and(|_| true);
        usable.then_some(Opener { mount: directory })
    }

    /// An `O_PATH` descriptor of whatever has the handle, wherever on the mount it is.
    pub(crate) fn open(&self, handle: &FileHandle) -> Result<OwnedFd> {
        let mut buffer = Buffer {
            handle_bytes: u32::try_from(handle.bytes.len()).unwrap_or(0),
            handle_type: handle.kind,
            f_handle: [0; MAX_HANDLE_SZ],
        };
        buffer.f_handle[..handle.bytes.len()].copy_from_slice(&handle.bytes);
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the buffer says how long it is; a result that is not negative is a new descriptor.
        unsafe {
            let fd =
                libc::syscall(libc::SYS_open_by_handle_at, self.mount.as_raw_fd(), &raw mut buffer, flags);
            match i32::try_from(fd) {
                Ok(fd @ 0..) => Ok(OwnedFd::from_raw_fd(fd)),
                _ => Err(std::io::Error::last_os_error().into()),
            }
        }
    }
}
