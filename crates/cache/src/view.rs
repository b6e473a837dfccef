//! What the facts say about an inode or a name, under a live grant where one is wanted.

pub(crate) mod locked;
pub(crate) mod paths;
pub(crate) mod victims;

use crate::calls::{CallKind, InflightCall};
use crate::grants::LiveGrant;
use crate::op::{Fh, Op};
use crate::open::{OpenFile, OpenKind};
use crate::state::State;
use crate::store::{CachedEntry, Directory, Inode};
use nigh_types::{Attr, Call, Handle, Kind, LeaseScope, Name, NodeId, Time, WriteFlags};
use std::collections::BTreeSet;

/// Returns an inode's attributes under a live grant.
pub(crate) fn cached_attr(state: &State, now: Time, id: NodeId) -> Option<(Attr, LiveGrant)> {
    let inode = state.store.inode_of(id)?;
    if state.is_suspended(id.ino) {
        return None;
    }
    if let Some(own) = inode.live_own_attr(now) {
        return Some(*own);
    }
    let (dir, name) =
        inode.parent_entry().filter(|(dir, name)| !state.store.suspended.has_name(*dir, name))?;
    let directory = state.store.dir(*dir)?;
    let held = directory.held.filter(|h| h.is_live(now))?;
    let row = directory.rows.find(state.store.cookie(name), name.as_bytes())?;
    let child = row.child.filter(|c| c.id == id)?;
    child.is_covered().then_some((child.attr(), held))
}

/// Returns a child's attributes under a live grant, from its directory entry if that has them.
pub(crate) fn child_attr(
    state: &State,
    now: Time,
    child: &CachedEntry,
    held: LiveGrant,
) -> Option<(Attr, LiveGrant)> {
    if state.is_suspended(child.id.ino) || kernel_knows_old_inode(state, child.id) {
        return None;
    }
    if child.is_covered() {
        return Some((child.attr(), held));
    }
    let inode = state.store.inode_of(child.id)?;
    inode.live_own_attr(now).copied()
}

/// Returns whether the kernel has a valid dentry of that name for the inode. Another reply would make it drop ACLs
/// (`forget_all_cached_acls` in `fuse_direntplus_link`).
pub(crate) fn kernel_knows(state: &State, now: Time, dir: u64, name: &[u8], id: NodeId) -> bool {
    let known = state.store.inode(id.ino).filter(|i| i.id == id && i.kernel.needs_no_lookup(now));
    known.is_some_and(|inode| inode.is_at(dir, name))
}

/// Returns whether a local change in flight removes an inode's name without a pin at the remote. If the inode is
/// gone when the remote opens it, the kernel looks the name up again.
pub(crate) fn is_name_removal_in_flight(state: &State, ino: u64) -> bool {
    let Some(inode) = state.store.inode(ino) else { return false };
    let Some((dir, name)) = inode.parent_entry() else { return false };
    state.calls.values().any(|flight| match &flight.purpose {
        CallKind::Remove { dir: d, name: n } => d == dir && n == name,
        // The remote pins the file that a rename replaces, as far as it was known.
        CallKind::Rename { to, new_name, exchange: false, .. } if to == dir && new_name == name => {
            !matches!(flight.resend, Some(Call::Rename { keep, .. }) if keep == Some(inode.id))
        }
        _ => false,
    })
}

/// Returns whether a data grant lives.
pub(crate) fn has_data_grant(state: &State, now: Time, ino: u64) -> bool {
    state.store.inode(ino).is_some_and(|i| i.pages().live_grant(now).is_some())
}

/// Returns whether a request bypasses the kernel's page cache. (Reads may still be those of an mmap.)
pub(crate) fn is_direct(state: &State, op: &Op) -> bool {
    match op {
        Op::Write { fh, flags: WriteFlags { write_back: false, .. }, .. } => {
            state.open.files.get(*fh).is_some_and(|file| file.direct)
        }
        _ => false,
    }
}

pub(crate) fn kind_of(state: &State, ino: u64) -> Option<Kind> {
    let inode = state.store.inode(ino)?;
    if let Some((attr, _)) = inode.own_attr() {
        return Some(attr.kind());
    }
    state.store.parent_entry(inode).map(|(_, child)| child.attr().kind())
}

/// Returns whether the kernel knows the inode.
pub(crate) fn knows(state: &State, node: NodeId) -> bool {
    state.store.inode(node.ino).is_some_and(|inode| inode.id == node && inode.kernel.is_known())
}

/// Returns whether a caller may read up to the size in a GETATTR reply for this inode.
pub(crate) fn reads_by_size(state: &State, ino: u64) -> bool {
    is_open(state, ino) && !state.store.is_directory(ino)
}

/// Returns whether an inode has lost its last name and is not open here. No file handle leads to it, though the
/// remote keeps such a file for calls in flight.
pub(crate) fn is_removed_unused(state: &State, ino: u64, attr: &Attr) -> bool {
    attr.nlink == 0 && !is_open(state, ino)
}

/// Returns the directories that are being read or watched.
pub(crate) fn being_read(state: &State) -> BTreeSet<u64> {
    state.open.dirs.being_read().chain(state.watches.dirs()).collect()
}

/// Returns the last known attributes of an inode, granted or not.
pub(crate) fn last_attr(state: &State, node: NodeId) -> Option<Attr> {
    let inode = state.store.inode_of(node)?;
    if let Some((attr, _)) = inode.own_attr() {
        return Some(*attr);
    }
    state.store.parent_entry(inode).map(|(_, child)| child.attr())
}

/// Returns the file that a rename replaces, for the remote to pin: an open by its name meanwhile must not fail.
pub(crate) fn file_at(state: &State, dir: u64, name: &Name) -> Option<NodeId> {
    let child = state.store.child(dir, name).filter(|child| child.attr().kind() == Kind::File);
    let open = || open_without_handle_at(state, dir, name).last().and_then(|ino| state.store.id_of(*ino));
    child.map(|c| c.id).or_else(open)
}

/// Returns whether the kernel's dentry of a name, if there is one, leads to this inode.
pub(crate) fn kernel_dentry_leads_to(state: &State, id: NodeId, (dir, name): (u64, &Name)) -> bool {
    let inode = state.store.inode(id.ino).filter(|inode| inode.id == id && inode.kernel.is_known());
    inode.is_some_and(|inode| inode.is_at(dir, name))
}

/// Returns whether the kernel knows another inode by this number: one of the two is gone.
fn kernel_knows_old_inode(state: &State, id: NodeId) -> bool {
    let known = |inode: &Inode| inode.id != id && inode.is_held_by_kernel();
    state.store.inode(id.ino).is_some_and(known)
}

/// Returns the files at a name that are open without a handle, the one opened last behind the others. Several, since a
/// removed file keeps its name as a hint.
pub(crate) fn open_without_handle_at(state: &State, dir: u64, name: &Name) -> Vec<u64> {
    if !state.open.files.has_any_without_handle() {
        return Vec::new();
    }
    let stands_there = |file: &&OpenFile| {
        state.store.inode(file.ino).is_some_and(|i| file.lacks_handle_for(i.id) && i.is_at(dir, name))
    };
    state.open.files.values().filter(stands_there).map(|file| file.ino).collect()
}

/// Returns the file at a name, as far as is known, granted or not.
pub(crate) fn child_at(state: &State, dir: u64, name: &Name) -> Option<u64> {
    state.store.child(dir, name).filter(|child| !child.attr().is_dir()).map(|child| child.id.ino)
}

/// Returns the file at a name, if it is open. If the name is not cached, all open files of which it is the hint.
pub(crate) fn open_at(state: &State, dir: u64, name: &Name) -> Vec<u64> {
    if let Some(child) = child_at(state, dir, name).filter(|child| is_open(state, *child)) {
        return vec![child];
    }
    let is_home = |ino: &u64| state.store.inode(*ino).is_some_and(|inode| inode.is_at(dir, name));
    let found: BTreeSet<u64> = state.open.files.values().map(|file| file.ino).filter(is_home).collect();
    found.into_iter().collect()
}

pub(crate) fn is_listed(state: &State, now: Time, dir: u64) -> bool {
    let directory = state.store.dir(dir);
    directory
        .is_some_and(|d| d.listing.is_some() || d.complete && d.held.is_some_and(|held| held.is_live(now)))
}

/// Returns whether a local change removed a directory that a process is still in.
pub(crate) fn is_removed_dir(state: &State, ino: u64) -> bool {
    state.store.inode(ino).is_some_and(|i| i.unlinked_attr().is_some())
}

/// Returns open files whose pages depend on this grant.
pub(crate) fn open_files_under(state: &State, on: (NodeId, LeaseScope)) -> Vec<NodeId> {
    let under = |file: &OpenFile| {
        let inode = state.store.inode(file.ino)?;
        inode.pages().is_under(on).then_some(inode.id)
    };
    let found: BTreeSet<NodeId> = state.open.files.values().filter_map(under).collect();
    found.into_iter().collect()
}

/// Returns whether the kernel may be reading or writing the file.
pub(crate) fn is_open(state: &State, ino: u64) -> bool {
    state.store.inode(ino).is_some_and(|inode| inode.opens().is_open())
}

/// Returns whether a handle is being reclaimed.
pub(crate) fn is_reclaiming(state: &State, handle: Handle) -> bool {
    let claims =
        |flight: &InflightCall| matches!(flight.purpose, CallKind::Reopen { handle: h, .. } if h == handle);
    state.session.has_pending_reclaims() && state.calls.values().any(claims)
}

/// Returns whether a request uses an open file that could not be reclaimed, or whose locks could not.
pub(crate) fn is_lost(state: &State, op: &Op) -> bool {
    let lost = |fh: &Fh| {
        state.open.locks.are_lost(*fh)
            || state.open.files.get(*fh).is_some_and(|file| file.kind == OpenKind::Lost)
    };
    op.open_files().iter().flatten().any(lost)
}

pub(crate) fn is_written(state: &State, ino: u64) -> bool {
    state.store.inode(ino).is_some_and(|inode| inode.opens().is_written())
}

/// Returns whether a file is known under another name of the directory, and not under this one. A file that is
/// being moved may already be here.
pub(crate) fn is_under_other_name(state: &State, now: Time, file: NodeId, dir: NodeId, name: &Name) -> bool {
    let lives = |d: &&Directory| d.id == dir && d.held.is_some_and(|held| held.is_live(now));
    let Some(directory) = state.store.dir(dir.ino).filter(lives) else { return false };
    let leads_there = |name: &Name| {
        let row = directory.rows.find(state.store.cookie(name), name.as_bytes());
        row.and_then(|row| row.child).is_some_and(|child| child.id == file)
    };
    let parent_entry = state.store.inode(file.ino).and_then(|inode| inode.parent_entry());
    let parent_entry = parent_entry.filter(|(at, parent_entry)| *at == dir.ino && parent_entry != name);
    let stays = |parent_entry: &Name| {
        leads_there(parent_entry) && !state.calls.is_name_in_flight(dir.ino, parent_entry)
    };
    parent_entry.is_some_and(|(_, parent_entry)| stays(parent_entry)) && !leads_there(name)
}
