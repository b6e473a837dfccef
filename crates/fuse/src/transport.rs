//! Transports for requests and replies.

use crate::Notification;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Level of notifications that a transport supports. Each level includes the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// None at all (virtio-fs).
    None,
    /// All but `IncEpoch` (kernels before 6.16).
    NoEpoch,
    All,
}

/// Result of a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotifyOutcome {
    Done,
    /// The kernel does not have the inode or name (ENOENT).
    Unknown,
}

/// A channel to a kernel. Any number of threads may use it at once.
pub trait Transport: Send + Sync {
    /// Waits for one request and reads it; returns its length in `buffer`, which must have
    /// [`crate::Negotiated::buffer_len`] bytes. `None`: unmounted or aborted, there are no more requests.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>>;

    /// Whether [`Transport::receive`] would return at once, if the transport can check that without waiting.
    fn is_ready(&self) -> bool {
        false
    }

    /// Sends one reply. That the kernel has dropped the request meanwhile is not an error.
    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()>;

    /// Sends a notification. It may wait for requests in flight (see [`Notification`]). So never call it while this
    /// thread has unanswered requests for which it may wait, or while it holds a lock that their replies need.
    fn notify(&self, notification: &Notification<'_>) -> io::Result<NotifyOutcome>;

    fn level(&self) -> Level;
}

impl<T: Transport + ?Sized> Transport for Arc<T> {
    fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        (**self).receive(buffer)
    }

    fn is_ready(&self) -> bool {
        (**self).is_ready()
    }

    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        (**self).send(parts)
    }

    fn notify(&self, notification: &Notification<'_>) -> io::Result<NotifyOutcome> {
        (**self).notify(notification)
    }

    fn level(&self) -> Level {
        (**self).level()
    }
}

/// `/dev/fuse`, attached to one mount.
#[derive(Debug)]
pub struct DevFuse {
    fd: OwnedFd,
    level: AtomicU8,
}

impl DevFuse {
    /// Takes a device with which a mount was made, or that another process passed with its mount. `level` is the
    /// known level: [`Level::NoEpoch`] until [`DevFuse::probe_level`].
    #[must_use]
    pub fn new(fd: OwnedFd, level: Level) -> DevFuse {
        DevFuse { fd, level: AtomicU8::new(level as u8) }
    }

    /// Tests the level by sending one `IncEpoch`, after INIT; at most `most`, with which tests mask features.
    pub fn probe_level(&self, most: Level) -> Level {
        let epoch = most == Level::All && self.write(&Notification::IncEpoch).is_ok();
        let level = if most == Level::All && !epoch { Level::NoEpoch } else { most };
        self.level.store(level as u8, Ordering::Relaxed);
        level
    }

    fn write(&self, notification: &Notification<'_>) -> io::Result<NotifyOutcome> {
        let bytes = notification.encode();
        if let Notification::Lengthen { .. } = notification {
            return self.write_unreadable(&bytes);
        }
        loop {
            match rustix::io::write(&self.fd, &bytes) {
                Ok(_) => return Ok(NotifyOutcome::Done),
                Err(Errno::NOENT) => return Ok(NotifyOutcome::Unknown),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl DevFuse {
    /// Writes with an unreadable byte appended.
    fn write_unreadable(&self, bytes: &[u8]) -> io::Result<NotifyOutcome> {
        // No page is ever mapped at the lowest address (vm.mmap_min_addr), and no object of this process is at 1.
        let nowhere = std::ptr::without_provenance_mut::<libc::c_void>(1);
        let parts = [
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() },
            libc::iovec { iov_base: nowhere, iov_len: 1 },
        ];
        // SAFETY: the kernel only reads the parts: the first is `bytes`, and for the unreadable second it returns an
        // error.
        let written = unsafe { libc::writev(self.fd.as_raw_fd(), parts.as_ptr(), 2) };
        match Errno::from_io_error(&io::Error::last_os_error()) {
            _ if written >= 0 => Ok(NotifyOutcome::Done),
            Some(Errno::FAULT) => Ok(NotifyOutcome::Done),
            Some(Errno::NOENT) => Ok(NotifyOutcome::Unknown),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsFd for DevFuse {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Transport for DevFuse {
    fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::read(&self.fd, &mut *buffer) {
                Ok(len) => return Ok(Some(len)),
                // ENOENT: the request was aborted while it was being read.
                Err(Errno::NOENT | Errno::INTR) => {}
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn is_ready(&self) -> bool {
        let mut poll = [PollFd::new(&self.fd, PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0)
    }

    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        loop {
            match rustix::io::writev(&self.fd, parts) {
                Ok(_) | Err(Errno::NOENT) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn notify(&self, notification: &Notification<'_>) -> io::Result<NotifyOutcome> {
        let level = self.level();
        if level == Level::None || level == Level::NoEpoch && *notification == Notification::IncEpoch {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.write(notification)
    }

    fn level(&self) -> Level {
        match self.level.load(Ordering::Relaxed) {
            0 => Level::None,
            1 => Level::NoEpoch,
            _ => Level::All,
        }
    }
}

/// Opens a device that is not attached to a mount yet.
pub(crate) fn open_device() -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    Ok(rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}
