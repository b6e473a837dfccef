//! The one place where what the operating system says becomes the errno of an answer.

use nigh_types::Errno;

/// What went wrong with one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fault(pub(crate) Errno);

pub(crate) type Result<T> = std::result::Result<T, Fault>;

impl Fault {
    pub(crate) const STALE: Fault = Fault(Errno::STALE);

    /// For looking along a path: a name that does not lead on means that the place is stale.
    pub(crate) fn or_stale(self) -> Fault {
        match self.0 {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Fault::STALE,
            _ => self,
        }
    }

    /// Whether it is for want of something in the server, and may go differently the next time.
    pub(crate) fn is_the_servers_own(self) -> bool {
        matches!(self.0, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOSPC | Errno::OVERFLOW)
    }

    /// `EIO` where the operating system gave no number.
    pub(crate) fn from_io(error: &std::io::Error) -> Fault {
        Fault(Errno::from_raw(error.raw_os_error().unwrap_or(0)))
    }

    /// Errors of the server itself that a caller should not take for its own.
    fn told(self) -> Errno {
        match self.0 {
            // The server's own descriptor table is full, not the caller's.
            Errno::MFILE => Errno::NFILE,
            other => other,
        }
    }
}

impl From<Fault> for Errno {
    fn from(fault: Fault) -> Errno {
        fault.told()
    }
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Fault {
        Fault(errno)
    }
}

impl From<rustix::io::Errno> for Fault {
    fn from(errno: rustix::io::Errno) -> Fault {
        Fault(Errno::from_raw(errno.raw_os_error()))
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Fault {
        Fault::from_io(&error)
    }
}
