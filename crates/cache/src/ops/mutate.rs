//! Namespace changes and attribute changes.

use crate::calls::{CallKind, InflightCall, OpenParams};
use crate::facts::{forgetting, inodes, learn, leases, order, paths, victims, view};
use crate::grants::LiveGrant;
use crate::kernel::NotifyLevel;
use crate::op::{Caller, Fh, KernelInvalidation, Op, OpReply};
use crate::open::{OpenFile, OpenKind};
use crate::ops::{files, lookup, privs};
use crate::out::{invalidate, pins, queue, sending};
use crate::page_cache::{full_pages, writeback};
use crate::state::State;
use crate::store::{CachedEntry, ChangeToken};
use nigh_types::{
    Attr, Call, DataVersion, Entry, Errno, Grant, Handle, LeaseScope, Name, NodeId, NodeRef, OpId, Reply,
    Response, SetAttr, Time,
};

/// Returns whether an error says nothing about a name: permissions, type of filesystem, space.
fn says_nothing_of_names(errno: Errno) -> bool {
    [
        Errno::PERM,
        Errno::ACCES,
        Errno::ROFS,
        Errno::XDEV,
        Errno::INVAL,
        Errno::NOSPC,
        Errno::DQUOT,
        Errno::MLINK,
        Errno::BUSY,
        Errno::INTR,
        Errno::IO,
        Errno::OPNOTSUPP,
        Errno::NFILE,
    ]
    .contains(&errno)
}

/// Returns whether an error says that the name exists.
fn says_exists(errno: Errno) -> Option<bool> {
    match errno {
        Errno::NOENT => Some(false),
        Errno::EXIST | Errno::NOTEMPTY => Some(true),
        _ => None,
    }
}

/// Sends a call that makes `name` in `dir`; `call` gets the directory's reference.
#[allow(clippy::too_many_arguments, reason = "a request, its name, how it is opened and its call")]
pub(crate) fn create(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    dir: u64,
    name: Name,
    file: Option<OpenParams>,
    call: impl FnOnce(NodeRef, Name) -> Call,
) -> Option<OpReply> {
    let Some(place) = paths::node_ref(state, dir) else { return Some(OpReply::Failed(Errno::STALE)) };
    let call = call(place, name.clone());
    sending::send_for(state, now, op, caller, CallKind::Create { dir, name, file }, call)
}

pub(crate) fn on_create_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (dir, name): (u64, &Name),
    file: Option<OpenParams>,
    response: &Response,
) -> OpReply {
    let (entry, handle) = match &response.result {
        Ok(Reply::Created { entry, handle, existed }) => {
            if !existed && (entry.attr.is_dir() || entry.attr.nlink == 1) {
                inodes::reset_reused_id(state, entry.id);
            }
            (entry.clone(), *handle)
        }
        Ok(_) => return OpReply::Failed(Errno::PROTO),
        Err(errno) => {
            if !says_nothing_of_names(*errno) {
                leases::discard_uncertain_name(state, dir, name, (*errno == Errno::EXIST).then_some(true));
            }
            return OpReply::Failed(*errno);
        }
    };
    let Some(dir_id) = state.store.id_of(dir) else { return OpReply::Failed(Errno::STALE) };
    learn::apply_attrs_after(state, now, flight, response);
    // A further link: the entry of its only name so far must not go on answering for the inode.
    leases::drop_attr(state, entry.id.ino);
    leases::drop_uncovered(state, entry.id.ino, (entry.attr.nlink == 1).then_some(dir));
    inodes::note_earlier_name(state, &entry, (dir, name));
    learn::note_local_dentry(state, flight, (dir, name), Some(entry.id));
    let held = learn::apply_dentry(state, now, flight, dir_id, name, Some(&entry), &response.grants);
    learn::note_local_inode(state, dir);
    let node = inodes::entry_reply(state, now, Some((dir, name)), entry.id, entry.attr, held, None);
    let under = learn::apply_attr(state, now, flight, entry.id, entry.attr, &response.grants);
    learn::keep_target(state, now, entry.id, entry.target.clone());
    learn::learn_no_xattrs(state, now, flight, &entry);
    learn::note_local_inode(state, entry.id.ino);
    begin_new_directory(state, now, flight, &entry, response);
    let attr_valid = queue::attr_timeout(state, now, entry.id.ino, &entry.attr, under);
    let node = crate::op::Node { attr_valid, ..node };
    if flight.waiters.is_empty() {
        forgetting::handle_forget(state, node.number, 1);
        if let Some(handle) = handle {
            sending::release_handle(state, handle);
        }
        return OpReply::Done;
    }
    match (file, handle) {
        (Some(file), Some(handle)) => {
            learn::begin_data_grant(
                state,
                now,
                flight,
                entry.id,
                Some(ChangeToken::of(&entry.attr)),
                response,
            );
            OpReply::Created(node, files::opened_file(state, entry.id, file, OpenKind::Remote(handle), false))
        }
        (Some(_), None) => OpReply::Failed(Errno::PROTO),
        (None, _) => OpReply::Node(node),
    }
}

/// Begins a new directory's lease if the reply grants it: the directory is known to be empty.
fn begin_new_directory(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    entry: &Entry,
    response: &Response,
) {
    let granted =
        flight.granted(&response.grants, entry.id, LeaseScope::Directory).filter(|_| entry.attr.is_dir());
    // Another client may have made a name in it by now, or a local caller before the reply to mkdir.
    let ino = entry.id.ino;
    let is_empty =
        !flight.race_log.has_remote_change_in(ino) && flight.race_log.local_dentries(ino).next().is_none();
    let granted = granted.filter(|_| is_empty && !state.calls.has_local_change_in(ino));
    let held = granted.map(|g| LiveGrant::begin(g, flight.sent)).filter(|h| h.is_live(now));
    if let Some(held) = held {
        let directory = leases::dir_record(state, entry.id);
        directory.forget();
        directory.held = Some(held);
        directory.complete = true;
    }
}

pub(crate) fn on_tmpfile_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    file: OpenParams,
    response: &Response,
) -> OpReply {
    let (entry, handle) = match &response.result {
        Ok(Reply::Created { entry, handle: Some(handle), .. }) => (entry, *handle),
        Ok(_) => return OpReply::Failed(Errno::PROTO),
        Err(errno) => return OpReply::Failed(*errno),
    };
    if flight.waiters.is_empty() {
        sending::release_handle(state, handle);
        return OpReply::Done;
    }
    let node = inodes::entry_reply(state, now, None, entry.id, entry.attr, None, None);
    learn::apply_attrs_after(state, now, flight, response);
    learn::apply_attr(state, now, flight, entry.id, entry.attr, &response.grants);
    learn::begin_data_grant(state, now, flight, entry.id, Some(ChangeToken::of(&entry.attr)), response);
    OpReply::Created(node, files::opened_file(state, entry.id, file, OpenKind::Remote(handle), false))
}

pub(crate) fn unlink(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    dir: u64,
    name: Name,
) -> Option<OpReply> {
    let Some(place) = paths::node_ref(state, dir) else { return Some(OpReply::Failed(Errno::STALE)) };
    pins::pin_open_at(state, dir, &name);
    let call = Call::Unlink { dir: place, name: name.clone(), keep: None };
    sending::send_for(state, now, op, caller, CallKind::Remove { dir, name }, call)
}

pub(crate) fn rmdir(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    dir: u64,
    name: Name,
) -> Option<OpReply> {
    let Some(place) = paths::node_ref(state, dir) else { return Some(OpReply::Failed(Errno::STALE)) };
    let call = Call::Rmdir { dir: place, name: name.clone() };
    sending::send_for(state, now, op, caller, CallKind::Remove { dir, name }, call)
}

pub(crate) fn on_remove_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (dir, name): (u64, &Name),
    response: &Response,
) -> OpReply {
    let (node, kept) = match &response.result {
        Ok(Reply::Removed { node, pinned: kept }) => (*node, *kept),
        Ok(_) => return OpReply::Failed(Errno::PROTO),
        Err(errno) => {
            if !says_nothing_of_names(*errno) {
                leases::discard_uncertain_name(state, dir, name, says_exists(*errno));
            }
            return OpReply::Failed(*errno);
        }
    };
    if !flight.waiters.is_empty() {
        victims::alias_live_directory(state, flight.victim_dir, Some(node));
    }
    on_name_removed(state, node, (dir, name), kept);
    unbind(state, now, flight, (dir, name), response);
    learn::apply_attrs_after(state, now, flight, response);
    learn::note_local_inode(state, dir);
    learn::note_local_inode(state, node.ino);
    OpReply::Done
}

fn unbind(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (dir, name): (u64, &Name),
    response: &Response,
) {
    learn::note_local_dentry(state, flight, (dir, name), None);
    if let Some(dir_id) = state.store.id_of(dir) {
        learn::apply_dentry(state, now, flight, dir_id, name, None, &response.grants);
    }
}

/// Handles an inode's loss of its name.
fn on_name_removed(state: &mut State, node: NodeId, (dir, name): (u64, &Name), kept: Option<Handle>) {
    let last = view::last_attr(state, node).or_else(|| state.kernel.recent_dirs.attr_of(node));
    invalidate_if_unforeseen(state, node, (dir, name));
    inodes::forget_earlier_name(state, node, (dir, name));
    leases::drop_dir_names(state, node.ino);
    if state.store.id_of(node.ino) == Some(node) {
        leases::drop_uncovered(state, node.ino, None);
    }
    let Some(inode) = state.store.inode_of_mut(node) else {
        if let Some(handle) = kept {
            sending::release_handle(state, handle);
        }
        return;
    };
    if inode.is_at(dir, name) {
        inode.parent_entry = None;
    }
    if let Some(attr) = last.filter(Attr::is_dir) {
        inode.ext_mut().unlinked_attr = Some(Attr { nlink: 0, ..attr });
    }
    let is_open = inode.opens > 0;
    match kept {
        // A caller that looked its name up may be about to open it.
        Some(_) if inode.pin_handle.is_none() && (inode.unpinned_opens > 0 || inode.nlookup > 0) => {
            inode.ext_mut().pin_handle = kept;
        }
        Some(handle) => sending::release_handle(state, handle),
        None => {}
    }
    if is_open && state.kernel.can_notify() {
        // The kernel keeps the attributes under the name's grant (`fuse_entry_unlinked` but sets the ctime).
        invalidate::invalidate(state, vec![KernelInvalidation::Attr { ino: node.ino }], None);
    }
}

/// Invalidates an inode's attributes if the kernel does not know that a local change took its name: it knows if it
/// had a dentry of that name for the inode.
fn invalidate_if_unforeseen(state: &mut State, node: NodeId, (dir, name): (u64, &Name)) {
    let foreseen = state.store.child(dir, name).is_some_and(|child| child.id == node);
    let known = view::knows(state, node);
    if known && !foreseen && state.kernel.can_notify() {
        invalidate::invalidate(state, vec![KernelInvalidation::Attr { ino: node.ino }], None);
    }
}

pub(crate) fn rename(state: &mut State, now: Time, op: OpId, caller: Caller, what: Op) -> Option<OpReply> {
    let Op::Rename { from, name, to, new_name, no_replace, exchange, whiteout } = what else {
        return None;
    };
    let (Some(from_place), Some(to_place)) = (paths::node_ref(state, from), paths::node_ref(state, to))
    else {
        return Some(OpReply::Failed(Errno::STALE));
    };
    // Both files will stand under other grants.
    pins::pin_open_at(state, from, &name);
    pins::pin_open_at(state, to, &new_name);
    let keep = if exchange { None } else { view::file_at(state, to, &new_name) };
    let call = Call::Rename {
        from: from_place,
        name: name.clone(),
        to: to_place,
        new_name: new_name.clone(),
        no_replace,
        exchange,
        whiteout,
        keep,
    };
    sending::send_for(
        state,
        now,
        op,
        caller,
        CallKind::Rename { from, name, to, new_name, exchange, whiteout },
        call,
    )
}

pub(crate) fn on_rename_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    response: &Response,
) -> OpReply {
    let CallKind::Rename { from, name, to, new_name, exchange, whiteout } = &flight.purpose else {
        return OpReply::Failed(Errno::IO);
    };
    let (old, new) = ((*from, name), (*to, new_name));
    let (moved, replaced, kept, left) = match &response.result {
        Ok(Reply::Renamed { moved, replaced, pinned: p, whiteout: w }) => (*moved, *replaced, *p, *w),
        Ok(_) => return OpReply::Failed(Errno::PROTO),
        Err(errno) => return on_rename_error(state, old, new, *errno),
    };
    if !*exchange && replaced == Some(moved) {
        // Two names of one inode: rename(2) leaves both.
        kept.into_iter().for_each(|handle| sending::release_handle(state, handle));
        return OpReply::Done;
    }
    if !flight.waiters.is_empty() {
        victims::alias_live_directory(state, flight.victim_dir, replaced);
    }
    let moved_child = child_for(state, flight, moved, old, response);
    let other = replaced.filter(|_| *exchange);
    left.into_iter().for_each(|left| inodes::reset_reused_id(state, left));
    // A whiteout is applied like an exchanged inode. The kernel has no dentry for the old name (`d_move`).
    let other_child = other.or(left).and_then(|id| child_for(state, flight, id, new, response));
    if let Some(replaced) = replaced.filter(|_| !*exchange) {
        on_name_removed(state, replaced, new, kept);
    }
    apply_namespace_change(state, now, flight, old, other_child, &response.grants);
    if let Some(id) = state.store.id_of(*from).filter(|_| *whiteout && left.is_none()) {
        leases::discard_uncertain_dir(state, id);
    }
    apply_namespace_change(state, now, flight, new, moved_child, &response.grants);
    inodes::forget_earlier_name(state, moved, old);
    invalidate_moved(state, now, (old, moved), new);
    inodes::move_parent_entry(state, moved, new);
    if let Some(other) = other {
        invalidate_moved(state, now, (new, other), old);
        inodes::move_parent_entry(state, other, old);
    }
    learn::apply_attrs_after(state, now, flight, response);
    for ino in [*from, *to, moved.ino].into_iter().chain(replaced.or(left).map(|r| r.ino)) {
        learn::note_local_inode(state, ino);
    }
    OpReply::Done
}

fn on_rename_error(state: &mut State, old: (u64, &Name), new: (u64, &Name), errno: Errno) -> OpReply {
    if !says_nothing_of_names(errno) {
        // ENOENT is about the old name, EEXIST and ENOTEMPTY about the new one.
        let missing = errno == Errno::NOENT;
        leases::discard_uncertain_name(state, old.0, old.1, Some(!missing));
        if !missing {
            leases::discard_uncertain_name(state, new.0, new.1, says_exists(errno));
        }
    }
    OpReply::Failed(errno)
}

/// Invalidates a moved inode's dentry and attributes, before the parent entry is moved. The kernel keeps the old
/// dentry's timeouts, which hold under the new name only if one directory lease covers both names, no update of the
/// new name is in progress, and the old dentry led to the moved inode. Otherwise no recall covers them.
fn invalidate_moved(
    state: &mut State,
    now: Time,
    (old, id): ((u64, &Name), NodeId),
    (dir, name): (u64, &Name),
) {
    let cookie = state.store.cookie(name);
    let row = leases::live_directory(state, now, dir).and_then(|(d, _)| d.rows.find(cookie, name.as_bytes()));
    let is_there = row.and_then(|row| row.child).is_some_and(|child| child.id == id);
    if let Some(inode) = state.store.inode_of_mut(id) {
        // The timeout is unknown if a further name was looked up since.
        inode.entry_valid_until = Time::FAR;
    }
    let (carried, goes) = (view::kernel_dentry_leads_to(state, id, old), state.kernel.is_flushing_dentries());
    if is_there && carried && !goes && old.0 == dir && !state.store.suspended.has_name(dir, name) {
        return;
    }
    let mut stale = Vec::new();
    if state.kernel.level() == NotifyLevel::All || goes {
        stale.push(KernelInvalidation::Entry { dir, name: name.clone() });
    }
    if state.kernel.can_notify() && state.store.inode(id.ino).is_some_and(|i| i.nlookup > 0) {
        stale.push(KernelInvalidation::Attr { ino: id.ino });
    }
    if !stale.is_empty() {
        invalidate::invalidate(state, stale, None);
    }
}

/// Returns what is known of a child that changes its name: its old entry, else the reply's attributes.
fn child_for(
    state: &State,
    flight: &InflightCall,
    id: NodeId,
    (dir, name): (u64, &Name),
    response: &Response,
) -> Option<CachedEntry> {
    let attr = response.after.iter().find(|(node, _)| *node == id).map(|(_, attr)| *attr);
    if let Some(child) = state.store.child(dir, name).filter(|child| child.id == id) {
        // An entry that was not the parent entry was not updated for new xattrs. For a name under update the commit
        // says what it leads to, and nothing of the old inode's xattrs.
        let is_home = state.store.inode(id.ino).is_none_or(|inode| inode.is_at(dir, name));
        let is_held =
            state.store.suspended.has_name(dir, name) || flight.race_log.is_remotely_changed(dir, name);
        let answered = child.is_covered() && is_home && !is_held;
        return Some(CachedEntry {
            packed: attr.map_or(child.packed, Into::into),
            attr_known: attr.is_some(),
            no_xattrs: child.no_xattrs && answered,
            ..child.clone()
        });
    }
    let bare = CachedEntry::bare(id, None);
    Some(match attr {
        Some(attr) => CachedEntry { packed: attr.into(), attr_known: true, ..bare },
        None => bare,
    })
}

/// Binds a name to `child`, or to nothing, in the cached facts and in calls in flight.
fn apply_namespace_change(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (dir, name): (u64, &Name),
    child: Option<CachedEntry>,
    grants: &[Grant],
) {
    let leads_to = child.as_ref().map(|child| child.id);
    learn::note_local_dentry(state, flight, (dir, name), leads_to);
    let pushed = flight.race_log.is_remotely_changed(dir, name);
    let crossed = pushed || order::is_change_ambiguous(state, flight, dir, name, leads_to);
    if let Some(id) =
        state.store.id_of(dir).filter(|id| crossed || flight.recalled(*id, LeaseScope::Directory))
    {
        return leases::discard_uncertain_dir(state, id);
    }
    if let Some(id) = state.store.id_of(dir) {
        learn::apply_leased_dentry(state, now, flight, id, (name, leads_to), grants);
        if flight.may_predate_lease(id, grants) {
            return leases::discard_if_contradicted(state, id, name, leads_to);
        }
    }
    let cookie = state.store.cookie(name);
    let Some((directory, _)) = leases::live_directory(state, now, dir) else { return };
    if child.is_none() && directory.complete {
        directory.rows.remove(cookie, name.as_bytes());
    } else {
        directory.rows.insert(cookie, name.as_bytes(), child);
    }
    state.store.recount(dir);
}

pub(crate) fn set_attr(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    (ino, fh): (u64, Option<Fh>),
    set: SetAttr,
) -> Option<OpReply> {
    if set.is_empty() {
        return privs::set_attr_empty(state, now, op, caller, ino);
    }
    if full_pages::is_failed_append_rollback(state, fh, &set) {
        return lookup::attributes(state, now, op, caller, ino);
    }
    let who_may = set.mode.is_some() || set.uid.is_some() || set.gid.is_some();
    if who_may {
        pins::pin_open(state, ino);
    }
    let Some((node, handle)) = paths::handle_for(state, ino, fh) else {
        return Some(OpReply::Failed(Errno::STALE));
    };
    // A handle is sent only where it makes a difference: truncation depends on the access mode of the open.
    let own = fh.and_then(|fh| state.open.files.get(fh)).and_then(OpenFile::handle);
    let handle = if set.size.is_some() { own } else { handle };
    let call = Call::SetAttr { node, handle, set };
    sending::send_for(state, now, op, caller, CallKind::Change { ino, xattrs: set.mode.is_some() }, call)
}

/// Handles the reply to a change of attributes or xattrs.
pub(crate) fn on_change_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (ino, xattrs): (u64, bool),
    response: &Response,
) -> OpReply {
    learn::apply_attrs_after(state, now, flight, response);
    if xattrs {
        leases::drop_xattrs(state, ino);
    }
    let answer = match response.result {
        Ok(Reply::Attr(id, attr)) => {
            files::note_local_write(state, now, ino, response);
            writeback::note_page_base(state, now, Some(flight), ino, DataVersion::of(&attr));
            let under = learn::apply_attr(state, now, flight, id, attr, &response.grants);
            OpReply::Attr(id, attr, queue::attr_timeout(state, now, id.ino, &attr, under))
        }
        Ok(_) => OpReply::Failed(Errno::PROTO),
        Err(errno) => {
            if !matches!(errno, Errno::PERM | Errno::ACCES | Errno::ROFS | Errno::NODATA | Errno::EXIST) {
                leases::drop_attr(state, ino);
            }
            OpReply::Failed(errno)
        }
    };
    learn::note_local_inode(state, ino);
    answer
}

#[cfg(test)]
mod tests;
