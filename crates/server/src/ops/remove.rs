//! Removal of names.

use super::make::parent;
use super::open::pin;
use super::{Context, Outcome};
use crate::export::node::Node;
use crate::export::open_files::UnlinkGuard;
use crate::os::error::{Fault, Result};
use nigh_types::{Attr, Errno, Handle, Kind, Name, NodeId, NodeRef, Reply};
use rustix::fs::AtFlags;
use std::time::Instant;

pub(crate) fn unlink(cx: Context<'_>, dir: &NodeRef, name: &Name, keep: Option<NodeId>) -> Result<Outcome> {
    let dir = parent(cx, dir, name)?;
    let victim = cx.resolver().child(&dir, name)?;
    // Before the file is pinned: a pin for an open that may follow does not count as open.
    let aside = UnlinkPreparation::begin(cx, &dir, &victim);
    let kept = pin_if_kept(cx, &victim, keep)?;
    let removed = {
        let _acting = cx.act_in(&[&dir], &[&victim])?;
        rustix::fs::unlinkat(&dir.fd, name.as_bytes(), AtFlags::empty())
    };
    if let Err(errno) = removed {
        unpin(cx, kept);
        return Err(errno.into());
    }
    let made = aside.done();
    let mut after = vec![cx.attr_now(&dir)?, after_unlink(cx, &victim)?];
    after.extend(made);
    Ok(Outcome { reply: Reply::Removed { node: victim.id, pinned: kept }, after, grants: Vec::new() })
}

pub(crate) fn rmdir(cx: Context<'_>, dir: &NodeRef, name: &Name) -> Result<Outcome> {
    let dir = parent(cx, dir, name)?;
    let victim = cx.resolver().child(&dir, name)?;
    {
        let _acting = cx.act_in(&[&dir], &[&victim])?;
        rustix::fs::unlinkat(&dir.fd, name.as_bytes(), AtFlags::REMOVEDIR)?;
    }
    let after = vec![cx.attr_now(&dir)?, after_unlink(cx, &victim)?];
    Ok(Outcome { reply: Reply::Removed { node: victim.id, pinned: None }, after, grants: Vec::new() })
}

/// Pins `victim` for a client that has it open. If the name leads to another inode, the client's open file keeps its
/// name. Only regular files are opened.
pub(super) fn pin_if_kept(cx: Context<'_>, victim: &Node, keep: Option<NodeId>) -> Result<Option<Handle>> {
    match keep {
        Some(kept) if kept == victim.id && victim.stat.attr.kind() == Kind::File => match pin(cx, victim) {
            // A caller that may not open the file does not have it open, and a file that the server cannot open
            // cannot be pinned.
            Err(Fault(Errno::ACCES | Errno::PERM)) => Ok(None),
            pinned => pinned.map(Some),
        },
        _ => Ok(None),
    }
}

/// Releases the pin of a failed call, whose reply carries no handle.
pub(super) fn unpin(cx: Context<'_>, kept: Option<Handle>) {
    if let Some(handle) = kept {
        cx.files.release(&[handle]);
    }
}

/// Removal of a name, prepared for the case that it is the last one of an open file: the file is first linked into
/// the orphan folder. If that fails, the file lives as long as the open descriptors. Dropping this before
/// [`UnlinkPreparation::done`] means that the name was not removed.
pub(super) struct UnlinkPreparation<'a> {
    leaving: UnlinkGuard<'a>,
    has_orphan_link: bool,
    /// The directory in which the orphan folder was made.
    made_folder_in: Option<(NodeId, Attr)>,
}

impl<'a> UnlinkPreparation<'a> {
    /// The caller holds the inode lock of `victim` exclusively.
    pub(super) fn begin(cx: Context<'a>, dir: &Node, victim: &Node) -> UnlinkPreparation<'a> {
        let homes = &cx.files.leases().homes;
        let mut aside = UnlinkPreparation {
            leaving: homes.begin_unlink(victim.object),
            has_orphan_link: false,
            made_folder_in: None,
        };
        let attr = victim.stat.attr;
        if attr.nlink == 2 && !attr.is_dir() {
            // Before nlink falls to 1: calls that return the file under its directory's lease then record the
            // directory.
            homes.mark_moved_hardlink(victim.object);
        }
        if !aside.leaving.is_open || attr.kind() != Kind::File || attr.nlink != 1 {
            return aside;
        }
        // Making the folder changes its parent directory, so it is allowed only if the call's change covers that.
        let (orphans, make) = (&cx.resolver().orphans, cx.call_leases.may_make_orphan_folder());
        match orphans.link(cx.resolver(), dir, victim, make) {
            Ok(orphan) => {
                homes.set_orphan(victim.object, orphan);
                aside.has_orphan_link = true;
            }
            Err(Fault(errno)) => {
                tracing::debug!(%errno, ino = victim.id.ino, "an open file is kept by its descriptor only");
            }
        }
        aside.made_folder_in = if make { orphans.orphan_root_attr(cx.resolver(), dir) } else { None };
        aside
    }

    /// Completes the removal. Returns the directory in which the orphan folder was made, with its new attributes.
    pub(super) fn done(mut self) -> Option<(NodeId, Attr)> {
        self.has_orphan_link = false;
        self.made_folder_in.take()
    }
}

impl Drop for UnlinkPreparation<'_> {
    fn drop(&mut self) {
        if self.has_orphan_link {
            self.leaving.cancel();
        }
    }
}

/// Returns the attributes of an inode that lost a name and is locked exclusively; `nlink` is 0 if it was the last
/// name.
pub(super) fn after_unlink(cx: Context<'_>, victim: &Node) -> Result<(NodeId, Attr)> {
    let (id, mut attr) = match cx.attr_now(victim) {
        // A FUSE filesystem need not know a removed inode any more, even by a descriptor. The removal has succeeded.
        Err(Fault(Errno::NOENT | Errno::STALE)) => (victim.id, Attr { nlink: 0, ..victim.stat.attr }),
        seen => seen?,
    };
    if attr.is_dir() {
        attr.nlink = 0; // some filesystems leave it at 1 or 2
        if cx.files.leases().has_several_sessions() && cx.resolver().may_cache_fd(victim) {
            cx.resolver().removed_dirs.keep(victim, Instant::now());
        }
    }
    if attr.nlink == 1 && !attr.is_dir() {
        cx.files.leases().homes.mark_moved_hardlink(victim.object);
    }
    if attr.nlink == 0 {
        cx.resolver().forget(id);
        cx.export.read_fds.forget(id);
    }
    Ok((id, attr))
}
