//! Rename.

use super::make::parent;
use super::remove::{UnlinkPreparation, after_unlink, pin_if_kept, unpin};
use super::{Context, Outcome};
use crate::export::node::Node;
use crate::os::error::{Fault, Result};
use nigh_types::{Attr, Errno, Kind, Name, NodeId, NodeRef, Reply};
use rustix::fs::RenameFlags;

/// Source and target of a rename.
pub(crate) struct Names<'a> {
    pub(crate) from: &'a NodeRef,
    pub(crate) name: &'a Name,
    pub(crate) to: &'a NodeRef,
    pub(crate) new_name: &'a Name,
}

pub(crate) fn flags(no_replace: bool, exchange: bool, whiteout: bool) -> RenameFlags {
    let mut flags = RenameFlags::empty();
    flags.set(RenameFlags::NOREPLACE, no_replace);
    flags.set(RenameFlags::EXCHANGE, exchange);
    flags.set(RenameFlags::WHITEOUT, whiteout);
    flags
}

pub(crate) fn rename(
    cx: Context<'_>,
    names: &Names<'_>,
    flags: RenameFlags,
    keep: Option<NodeId>,
) -> Result<Outcome> {
    let from = parent(cx, names.from, names.name)?;
    let to = parent(cx, names.to, names.new_name)?;
    let moved = cx.resolver().child(&from, names.name)?;
    if cx.call_leases.again && flags.contains(RenameFlags::WHITEOUT) && is_whiteout(&moved) {
        // The rename was applied before: the whiteout would replace the moved file at the new name.
        return Err(Fault(Errno::NOENT));
    }
    let replaced = match cx.resolver().child(&to, names.new_name) {
        Ok(node) => Some(node),
        Err(Fault(Errno::NOENT)) => None,
        Err(fault) => return Err(fault),
    };
    let exchange = flags.contains(RenameFlags::EXCHANGE);
    let no_replace = flags.contains(RenameFlags::NOREPLACE);
    // Before the file is pinned: a pin for an open that may follow does not count as open.
    let aside = replaced.as_ref().filter(|node| !exchange && !no_replace && node.id != moved.id);
    let aside = aside.map(|node| UnlinkPreparation::begin(cx, &to, node));
    let kept = match &replaced {
        Some(node) => pin_if_kept(cx, node, keep)?,
        None => None,
    };
    let renamed = {
        let named: Vec<_> = [Some(&moved), replaced.as_ref()].into_iter().flatten().collect();
        let _acting = cx.act_in(&[&from, &to], &named)?;
        rustix::fs::renameat_with(&from.fd, names.name.as_bytes(), &to.fd, names.new_name.as_bytes(), flags)
    };
    if let Err(errno) = renamed {
        unpin(cx, kept);
        return Err(errno.into());
    }
    let made = aside.and_then(UnlinkPreparation::done);
    let homes = &cx.files.leases().homes;
    if moved.stat.attr.nlink > 1 || homes.is_moved_hardlink(moved.object) {
        homes.note_name_in(moved.object, to.object);
    }
    let mut after = vec![cx.attr_now(&from)?];
    if to.id != from.id {
        after.push(cx.attr_now(&to)?);
    }
    note_moved(cx, &moved, &to, names.new_name);
    if let Some(other) = replaced.as_ref().filter(|node| node.id != moved.id) {
        if exchange {
            if other.stat.attr.nlink > 1 || homes.is_moved_hardlink(other.object) {
                homes.note_name_in(other.object, from.object);
            }
            note_moved(cx, other, &from, names.name);
            after.push(cx.attr_now(other)?);
        } else {
            after.push(after_unlink(cx, other)?);
        }
    }
    after.push(cx.attr_now(&moved)?);
    after.extend(made);
    let replaced = replaced.map(|node| node.id);
    let leaves = flags.contains(RenameFlags::WHITEOUT) && replaced != Some(moved.id);
    let left = if leaves { whiteout(cx, &from, names.name) } else { None };
    let whiteout = left.map(|(id, _)| id);
    after.extend(left);
    Ok(Outcome {
        reply: Reply::Renamed { moved: moved.id, replaced, pinned: kept, whiteout },
        after,
        grants: Vec::new(),
    })
}

/// Whether a node is a whiteout: a character device with number 0, 0 (`WHITEOUT_DEV`).
fn is_whiteout(node: &Node) -> bool {
    let attr = &node.stat.attr;
    attr.kind() == Kind::CharDevice && attr.rdev == 0
}

/// Records the new name of an inode.
fn note_moved(cx: Context<'_>, node: &Node, dir: &Node, name: &Name) {
    if node.stat.attr.is_dir() {
        cx.resolver().remember_parent(node.id, dir.id, name);
    }
    cx.note_parent(node.id, &node.stat, dir);
}

/// Returns the whiteout left at the old name. It may be gone already; the client looks it up if it is missing here.
fn whiteout(cx: Context<'_>, dir: &Node, name: &Name) -> Option<(NodeId, Attr)> {
    let left = cx.resolver().child(dir, name).ok()?;
    cx.note_parent(left.id, &left.stat, dir);
    cx.attr_now(&left).ok()
}
