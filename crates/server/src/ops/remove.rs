//! Calls that take names away.

use super::make::parent;
use super::open::pin;
use super::{Context, Outcome, attr_now};
use crate::error::{Fault, Result};
use crate::reach::Node;
use nigh_types::{Attr, Errno, Handle, Name, NodeId, Place, Reply};
use rustix::fs::AtFlags;

pub(crate) fn unlink(cx: Context<'_>, dir: &Place, name: &Name, keep: Option<NodeId>) -> Result<Outcome> {
    let dir = parent(cx, dir, name)?;
    let victim = cx.reach().child(&dir, name)?;
    let kept = pin_if_kept(cx, &victim, keep)?;
    let removed = {
        let _acting = cx.act()?;
        rustix::fs::unlinkat(&dir.fd, name.as_bytes(), AtFlags::empty())
    };
    if let Err(errno) = removed {
        unpin(cx, kept);
        return Err(errno.into());
    }
    let after = vec![attr_now(&dir)?, gone(cx, &victim)?];
    Ok(Outcome { reply: Reply::Removed { node: victim.id, kept }, after, grants: Vec::new() })
}

pub(crate) fn rmdir(cx: Context<'_>, dir: &Place, name: &Name) -> Result<Outcome> {
    let dir = parent(cx, dir, name)?;
    let victim = cx.reach().child(&dir, name)?;
    {
        let _acting = cx.act()?;
        rustix::fs::unlinkat(&dir.fd, name.as_bytes(), AtFlags::REMOVEDIR)?;
    }
    let after = vec![attr_now(&dir)?, gone(cx, &victim)?];
    Ok(Outcome { reply: Reply::Removed { node: victim.id, kept: None }, after, grants: Vec::new() })
}

/// Pins `victim` for a client that has it open. Where the name leads to something else, what that client
/// has open does not lose a name here.
pub(super) fn pin_if_kept(cx: Context<'_>, victim: &Node, keep: Option<NodeId>) -> Result<Option<Handle>> {
    match keep {
        Some(kept) if kept == victim.id => match pin(cx, victim) {
            // Who may not open it does not have it open.
            Err(Fault(Errno::ACCES)) if !cx.is_vouched() => Ok(None),
            pinned => pinned.map(Some),
        },
        _ => Ok(None),
    }
}

/// The operation did not happen: no handle was answered.
pub(super) fn unpin(cx: Context<'_>, kept: Option<Handle>) {
    if let Some(handle) = kept {
        cx.files.release(&[handle]);
    }
}

/// Attributes of an inode that lost a name, held exclusively; `nlink` 0 where it was the last.
pub(super) fn gone(cx: Context<'_>, victim: &Node) -> Result<(NodeId, Attr)> {
    let (id, mut attr) = attr_now(victim)?;
    if attr.is_dir() {
        attr.nlink = 0; // some filesystems leave it at 1 or 2
    }
    if attr.nlink == 1 && !attr.is_dir() {
        cx.files.holding().leases.homes.lost_a_name(victim.object);
    }
    if attr.nlink == 0 {
        cx.reach().forget(id);
        cx.export.forget_passing_reader(id);
    }
    Ok((id, attr))
}
