//! Mapping of operating system errors to the errno of a reply.

use nigh_types::Errno;

/// Error of one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fault(pub(crate) Errno);

pub(crate) type Result<T> = std::result::Result<T, Fault>;

impl Fault {
    pub(crate) const STALE: Fault = Fault(Errno::STALE);

    /// Maps errors of a path lookup: a name that leads nowhere means that the path is stale.
    pub(crate) fn or_stale(self) -> Fault {
        match self.0 {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Fault::STALE,
            _ => self,
        }
    }

    /// Whether the server lacks a resource, so that a retry may succeed.
    pub(crate) fn is_the_servers_own(self) -> bool {
        matches!(self.0, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOSPC | Errno::OVERFLOW)
    }

    /// Takes the errno of an error; `EIO` if it has none.
    pub(crate) fn from_io(error: &std::io::Error) -> Fault {
        Fault(Errno::from_raw(error.raw_os_error().unwrap_or(0)))
    }

    /// Maps errors of the server that a caller could mistake for its own.
    fn for_caller(self) -> Errno {
        match self.0 {
            // The descriptor table of the server is full, not the caller's.
            Errno::MFILE => Errno::NFILE,
            other => other,
        }
    }
}

impl From<Fault> for Errno {
    fn from(fault: Fault) -> Errno {
        fault.for_caller()
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
