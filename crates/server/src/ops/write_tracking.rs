//! Tracking of a session's own changes of a file's data.

use super::Context;
use crate::os::error::Result;
use crate::os::stat;
use nigh_lease::WriteHistory;
use nigh_types::{DataVersion, NodeId};
use parking_lot::Mutex;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A data change by this session. It ends when dropped, also after a failure: a write without disk space may have set
/// the file's times. It must be dropped before other sessions may change the file.
pub(crate) struct TrackedWrite<'f> {
    fd: BorrowedFd<'f>,
    own: Option<Arc<Mutex<WriteHistory>>>,
}

impl<'f> TrackedWrite<'f> {
    /// Begins a change of the file `node`. The session's place in the write queue keeps other sessions' changes out.
    pub(crate) fn begin(cx: Context<'_>, node: NodeId, fd: &'f impl AsFd) -> Result<TrackedWrite<'f>> {
        let fd = fd.as_fd();
        let own = cx.files.write_history(node);
        if let Some(own) = &own {
            own.lock().handle_begin(|| stamp(fd))?;
        }
        Ok(TrackedWrite { fd, own })
    }

    /// Whether no other session has changed the data since version `then`.
    pub(crate) fn is_unchanged_by_others(&self, then: DataVersion) -> Result<bool> {
        match &self.own {
            Some(own) => Ok(own.lock().is_own_since(then)),
            None => Ok(stamp(self.fd)? == then),
        }
    }

    /// Records that the lease table vouches for the data since version `then`.
    pub(crate) fn note_vouched_since(&self, then: DataVersion) {
        if let Some(own) = &self.own {
            own.lock().handle_known_own_since(then);
        }
    }
}

impl Drop for TrackedWrite<'_> {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            own.lock().handle_end(|| stamp(self.fd).ok());
        }
    }
}

fn stamp(fd: BorrowedFd<'_>) -> Result<DataVersion> {
    Ok(DataVersion::of(&stat::of_fd(fd)?.attr))
}
