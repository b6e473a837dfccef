//! File handles: with CAP_DAC_READ_SEARCH the server opens an inode whose names it does not know.

use crate::export::inode_handles::HandleLayout;
use crate::os::error::{Fault, Result};
use crate::os::stat;
use nigh_types::Errno;
use rustix::thread::CapabilitySet;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// A file handle in its filesystem's encoding.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FileHandle {
    kind: i32,
    bytes: Box<[u8]>,
}

/// Opens file handles on one mount.
#[derive(Debug)]
pub(crate) struct Opener {
    /// Opened for reading: an `O_PATH` descriptor is not accepted as mount here.
    mount: OwnedFd,
    /// Layout for building handles from inode numbers; `None` if that is impossible.
    form: Option<HandleLayout>,
}

const MAX_HANDLE_SZ: usize = 128;
/// Retries while an inode is being created, which may wait for the journal.
const MAX_RETRIES: u32 = 200;
const RETRY_AFTER: Duration = Duration::from_millis(1);
/// Encodes the parent too, so that an opened handle has a path (Linux 6.13).
const AT_HANDLE_CONNECTABLE: libc::c_int = 0x002;

#[repr(C, align(8))]
struct Buffer {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; MAX_HANDLE_SZ],
}

impl FileHandle {
    /// Takes a handle from the kernel; `None` if it is longer than permitted.
    pub(crate) fn from_kernel(kind: i32, bytes: &[u8]) -> Option<FileHandle> {
        (bytes.len() <= MAX_HANDLE_SZ).then(|| FileHandle { kind, bytes: bytes.into() })
    }

    /// The handle type, and the filesystem's bytes.
    pub(crate) fn parts(&self) -> (i32, &[u8]) {
        (self.kind, &self.bytes)
    }

    /// Makes a handle of an `O_PATH` descriptor, in the form that events contain.
    pub(crate) fn plain(fd: impl AsFd) -> Result<FileHandle> {
        FileHandle::make(fd.as_fd().as_raw_fd(), libc::AT_EMPTY_PATH)
    }

    /// Makes a handle of an `O_PATH` descriptor, connectable if possible. Fails with `EOPNOTSUPP` if the filesystem
    /// has none.
    pub(crate) fn of(fd: impl AsFd) -> Result<FileHandle> {
        let made = FileHandle::make(fd.as_fd().as_raw_fd(), libc::AT_EMPTY_PATH | AT_HANDLE_CONNECTABLE);
        made.or_else(|_| FileHandle::plain(fd))
    }

    /// Encodes the handle for a text file.
    pub(crate) fn to_text(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("{} ", self.kind);
        for byte in &self.bytes {
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    pub(crate) fn of_text(text: &str) -> Option<FileHandle> {
        let (kind, hex) = text.split_once(' ')?;
        let byte = |at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
        let bytes: Option<Vec<u8>> = (0..hex.len()).step_by(2).map(byte).collect();
        FileHandle::from_kernel(kind.parse().ok()?, &bytes?)
    }

    fn make(fd: i32, flags: libc::c_int) -> Result<FileHandle> {
        let mut buffer = Buffer { handle_bytes: 128, handle_type: 0, f_handle: [0; MAX_HANDLE_SZ] };
        let mut mount_id: libc::c_int = 0;
        // SAFETY: the buffer contains its length; the name is empty and ends with NUL.
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
    /// An opener for the mount of `directory` (open for reading). Returns `None` if this process may not open by
    /// handle.
    pub(crate) fn new(directory: OwnedFd) -> Option<Opener> {
        let may = rustix::thread::capabilities(None)
            .is_ok_and(|c| c.effective.contains(CapabilitySet::DAC_READ_SEARCH));
        let usable = may && FileHandle::of(&directory).is_ok_and(|_| true);
        if !usable {
            return None;
        }
        let mut opener = Opener { mount: directory, form: None };
        if let Ok(own) = stat::of_fd(&opener.mount) {
            opener.form = HandleLayout::of(&opener.mount, own.ino);
            let opens =
                opener.open_number(own.ino, None).and_then(stat::of_fd).is_ok_and(|stat| stat.is_same(&own));
            opener.form.take_if(|_| !opens);
        }
        Some(opener)
    }

    /// Whether inodes can be opened by number.
    pub(crate) fn opens_numbers(&self) -> bool {
        self.form.is_some()
    }

    /// Opens the inode with this number as `O_PATH`, even outside of the mount. Fails with `ESTALE` if there is none.
    /// `subvolume`: `None` means that of the opener's directory.
    pub(crate) fn open_number(&self, ino: u64, subvolume: Option<u64>) -> Result<OwnedFd> {
        let form = self.form.as_ref().ok_or(Fault::STALE)?;
        let handle = form.handle(&self.mount, ino, subvolume)?.ok_or(Fault::STALE)?;
        self.open(&handle)
    }

    /// Opens a handle as `O_PATH`, anywhere on the mount. Fails with `ESTALE` if the inode is gone.
    ///
    /// ext4 and others also return `ENOMEM` while a new file is created with the number of a deleted one
    /// (`iget_locked` does not return inodes in state `I_CREATING`). That state is brief, so the open is retried.
    pub(crate) fn open(&self, handle: &FileHandle) -> Result<OwnedFd> {
        for _ in 0..MAX_RETRIES {
            match self.open_once(handle) {
                Err(Fault(Errno::NOMEM)) => std::thread::sleep(RETRY_AFTER),
                opened => return opened,
            }
        }
        self.open_once(handle)
    }

    fn open_once(&self, handle: &FileHandle) -> Result<OwnedFd> {
        let mut buffer = Buffer {
            handle_bytes: u32::try_from(handle.bytes.len()).unwrap_or(0),
            handle_type: handle.kind,
            f_handle: [0; MAX_HANDLE_SZ],
        };
        buffer.f_handle[..handle.bytes.len()].copy_from_slice(&handle.bytes);
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the buffer contains its length; a non-negative result is a new descriptor.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn handle_of_inode_number_in_reuse_fails_with_stale_not_nomem() {
        let temp = tempfile::tempdir().unwrap();
        let dir = rustix::fs::open(temp.path(), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let Some(opener) = Opener::new(dir) else {
            eprintln!("SKIPPED: handles are opened by root alone, and not on every filesystem");
            return;
        };
        let path = temp.path().join("f");
        std::fs::write(&path, "").unwrap();
        let gone = FileHandle::plain(std::fs::File::open(&path).unwrap()).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let _ = std::fs::remove_file(&path);
                    std::fs::write(&path, "").unwrap();
                }
            });
            let opened = (0..50_000).map(|_| opener.open(&gone));
            let wrong = opened.filter_map(|opened| opened.err()).find(|fault| *fault != Fault(Errno::STALE));
            done.store(true, Ordering::Relaxed);
            assert_eq!(wrong, None);
        });
    }
}
