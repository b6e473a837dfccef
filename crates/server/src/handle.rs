//! File handles: how a server with CAP_DAC_READ_SEARCH finds an inode whose names it lost.

use crate::error::{Fault, Result};
use crate::numbered::Form;
use crate::stat;
use nigh_types::Errno;
use rustix::thread::CapabilitySet;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

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
    /// How handles are made of numbers; `None` where they are not.
    form: Option<Form>,
}

const MAX_HANDLE_SZ: usize = 128;
/// Making an inode may wait for the journal meanwhile.
const MAX_RETRIES: u32 = 200;
const RETRY_AFTER: Duration = Duration::from_millis(1);
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

    /// The kind, and what the filesystem says.
    pub(crate) fn parts(&self) -> (i32, &[u8]) {
        (self.kind, &self.bytes)
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

    /// For a file of text.
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
        FileHandle::told(kind.parse().ok()?, &bytes?)
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
        if !usable {
            return None;
        }
        let mut opener = Opener { mount: directory, form: None };
        if let Ok(own) = stat::of_fd(&opener.mount) {
            opener.form = Form::of(&opener.mount, own.ino);
            let opens =
                opener.open_number(own.ino, None).and_then(stat::of_fd).is_ok_and(|stat| stat.is_same(&own));
            opener.form.take_if(|_| !opens);
        }
        Some(opener)
    }

    /// Whether inodes are opened by their numbers.
    pub(crate) fn opens_numbers(&self) -> bool {
        self.form.is_some()
    }

    /// An `O_PATH` descriptor of whatever has that number on the filesystem now, be it outside of the mount; `ESTALE` where nothing has.
    /// `subvolume`: `None` is the one in which the directory lies.
    pub(crate) fn open_number(&self, ino: u64, subvolume: Option<u64>) -> Result<OwnedFd> {
        let form = self.form.as_ref().ok_or(Fault::STALE)?;
        let handle = form.handle(&self.mount, ino, subvolume)?.ok_or(Fault::STALE)?;
        self.open(&handle)
    }

    /// An `O_PATH` descriptor of whatever has the handle, wherever on the mount it is; `ESTALE` where it is gone.
    ///
    /// `ENOMEM` is also what ext4 and others say while another file is being made under the number of one that is gone
    /// (`iget_locked` takes nothing that is `I_CREATING`): that is over in a moment.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_number_that_is_given_out_again_just_now_is_no_shortage_of_memory() {
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
