//! Resolution of the file in a lock call; the locks themselves are kept in memory.

use super::open::only_files;
use crate::export::Export;
use crate::export::node::{Node, reopen};
use crate::lease::session_files::SessionFiles;
use crate::os::error::Result;
use crate::os::impersonate::{Impersonation, SetIdBits};
use nigh_lease::Object;
use nigh_types::{Call, Credentials, LockKind, NodeId, NodeRef};
use rustix::fs::OFlags;
use rustix::thread::CapabilitySet;

/// Resolves the regular file to be locked. Without a vouching kernel, the caller must have the file open with the
/// access that the lock requires, or be able to open it so.
pub(crate) fn find(
    export: &Export,
    files: &SessionFiles,
    who: &Credentials,
    (call, place): (&Call, &NodeRef),
) -> Result<(NodeId, Object)> {
    let node = export.resolver().node(place, files)?;
    only_files(&node)?;
    if export.impersonates() && !files.is_vouched() {
        let wants = Wants::of(call);
        if !files.has_open(node.id, |file| wants.are_met(file.readable, file.writable)) {
            try_open(&node, who, wants)?;
        }
    }
    Ok((node.id, node.object))
}

/// Access required by a lock: fcntl(2) requires the access that the lock guards, flock(2) and lock queries require
/// any.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wants {
    Reading,
    Writing,
    Either,
}

impl Wants {
    fn of(call: &Call) -> Wants {
        match call {
            Call::Lock { flock: false, kind: LockKind::Read, .. } => Wants::Reading,
            Call::Lock { flock: false, kind: LockKind::Write, .. } => Wants::Writing,
            _ => Wants::Either,
        }
    }

    fn are_met(self, readable: bool, writable: bool) -> bool {
        match self {
            Wants::Reading => readable,
            Wants::Writing => writable,
            Wants::Either => readable || writable,
        }
    }
}

fn try_open(node: &Node, who: &Credentials, wants: Wants) -> Result<()> {
    let _acting = Impersonation::begin(true, who, CapabilitySet::empty(), SetIdBits::AsForCaller)?;
    let opened = match wants {
        Wants::Reading => reopen(node, OFlags::RDONLY),
        Wants::Writing => reopen(node, OFlags::WRONLY),
        Wants::Either => reopen(node, OFlags::RDONLY).or_else(|_| reopen(node, OFlags::WRONLY)),
    };
    opened.map(drop)
}
