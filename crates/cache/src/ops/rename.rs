//! RENAME.

use crate::calls::{CallKind, InflightCall};
use crate::facts::{changes, inodes, learn, leases, order, victims};
use crate::kernel::NotifyLevel;
use crate::op::{Caller, KernelInvalidation, Op, OpReply};
use crate::ops::{name_errors, remove};
use crate::out::{invalidate, pins, sending};
use crate::state::State;
use crate::store::CachedEntry;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, Grant, LeaseScope, Name, NodeId, OpId, Reply, Response, Time};

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
        remove::on_name_removed(state, replaced, new, kept, response);
    }
    apply_namespace_change(state, now, flight, old, other_child, &response.grants);
    if let Some(id) = state.store.id_of(*from).filter(|_| *whiteout && left.is_none()) {
        leases::discard_uncertain_dir(state, id);
    }
    apply_namespace_change(state, now, flight, new, moved_child, &response.grants);
    invalidate_moved(state, now, (old, moved), new);
    changes::moved(state, moved, old, new);
    if let Some(other) = other {
        invalidate_moved(state, now, (new, other), old);
        changes::moved(state, other, new, old);
    }
    learn::apply_attrs_after(state, now, flight, response);
    for ino in [*from, *to, moved.ino].into_iter().chain(replaced.or(left).map(|r| r.ino)) {
        changes::note_inode(state, ino);
    }
    OpReply::Done
}

fn on_rename_error(state: &mut State, old: (u64, &Name), new: (u64, &Name), errno: Errno) -> OpReply {
    if !name_errors::says_nothing_of_names(errno) {
        // ENOENT is about the old name, EEXIST and ENOTEMPTY about the new one.
        let missing = errno == Errno::NOENT;
        leases::discard_uncertain_name(state, old.0, old.1, Some(!missing));
        if !missing {
            leases::discard_uncertain_name(state, new.0, new.1, name_errors::says_exists(errno));
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
        inode.kernel.lose_entry_timeout();
    }
    let (carried, goes) = (view::kernel_dentry_leads_to(state, id, old), state.kernel.is_flushing_dentries());
    if is_there && carried && !goes && old.0 == dir && !state.store.suspended.has_name(dir, name) {
        return;
    }
    let mut stale = Vec::new();
    if state.kernel.level() == NotifyLevel::All || goes {
        stale.push(KernelInvalidation::Entry { dir, name: name.clone() });
    }
    if state.kernel.can_notify() && state.store.inode(id.ino).is_some_and(|i| i.kernel.is_known()) {
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
    changes::note_dentry(state, &flight.race_log, (dir, name), leads_to);
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
    if leases::live_directory(state, now, dir).is_some() {
        changes::bind(state, (dir, name), child);
    }
}

#[cfg(test)]
mod tests;
