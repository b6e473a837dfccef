//! Facts from replies, kept as far as their grants allow.

use crate::calls::{CallKind, InflightCall};
use crate::facts::{changes, inodes, leases, order};
use crate::grants::LiveGrant;
use crate::out::invalidate;
use crate::pages::ChangeToken;
use crate::state::State;
use crate::store::CachedEntry;
use crate::view;
use nigh_types::{
    Attr, Bug, Entry, Grant, Kind, LeaseScope, Name, NodeId, Response, Time, XattrSet, planted,
};

/// Applies attributes of a reply if a grant allows. Returns that grant.
pub(crate) fn apply_attr(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    id: NodeId,
    attr: Attr,
    grants: &[Grant],
) -> Option<LiveGrant> {
    if flight.race_log.local_inodes.contains(&id.ino) {
        leases::drop_attr(state, id.ino);
        return None;
    }
    if flight.race_log.remote_inodes.contains(&id.ino) {
        // The remote change is newer, unless this is a reply to a local change: then the order is not known.
        if flight.is_mutation() {
            leases::drop_attr(state, id.ino);
        }
        return None;
    }
    if !flight.is_mutation() {
        state.calls.mark_attr_learned(id.ino);
        // These compare attributes themselves.
        if !matches!(flight.purpose, CallKind::Read { .. } | CallKind::Revalidate { .. }) {
            leases::drop_other_version(state, now, id, &attr);
        }
    }
    let fresh = flight.granted(grants, id, LeaseScope::Attributes).map(|g| LiveGrant::begin(g, flight.sent));
    let fresh = fresh.filter(|h| h.is_live(now));
    note_symlink(state, id, &attr);
    let mut under = None;
    if let Some(held) = fresh {
        inodes::record(state, id).note_own_attr(attr, held);
        under = Some(held);
    } else if let Some(inode) = state.store.inode_of_mut(id) {
        match inode.live_own_attr(now) {
            Some(_) if flight.recalled(id, LeaseScope::Attributes) => {
                if flight.is_mutation() {
                    leases::discard_uncertain_attr(state, id);
                }
                return None;
            }
            // An ungranted reply beside a live grant may be older than the cache.
            Some(_) if !flight.is_mutation() => return None,
            Some(_) => under = inode.replace_own_attr(now, attr),
            None => {
                inode.drop_own_attr();
            }
        }
    }
    let covered = apply_to_entry(state, now, flight, id, attr, grants);
    let under = under.or(covered).or_else(|| apply_via_parent(state, now, flight, id, attr, grants));
    // Return a zero timeout while an update is prepared: the commit does not invalidate the kernel.
    under.filter(|_| view::cached_attr(state, now, id).is_some())
}

/// Applies a child's attributes that came with a directory lease, if the directory has no entry for the child yet:
/// the remote found it by its parent entry.
fn apply_via_parent(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    id: NodeId,
    attr: Attr,
    grants: &[Grant],
) -> Option<LiveGrant> {
    if !attr.covered_by_parent() || flight.is_mutation() {
        return None;
    }
    let (dir, name) = state.store.inode_of(id)?.parent_entry()?.clone();
    let dir_id = state.store.id_of(dir)?;
    flight.granted(grants, dir_id, LeaseScope::Directory)?;
    if flight.race_log.name(dir, &name).is_some() {
        return None;
    }
    let entry = Entry { id, attr, target: None, no_xattrs: false };
    apply_dentry(state, now, flight, dir_id, &name, Some(&entry), grants)
}

/// Applies attributes to the inode's entry if its directory lease lives, and only if they are not older than the
/// entry: they came with a grant, or a local change made them.
fn apply_to_entry(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    id: NodeId,
    attr: Attr,
    grants: &[Grant],
) -> Option<LiveGrant> {
    let (dir, name) = state.store.inode_of(id)?.parent_entry()?;
    if flight.race_log.is_remotely_changed(*dir, name) {
        return None;
    }
    let directory = state.store.dir(*dir)?;
    if flight.recalled(directory.id, LeaseScope::Directory) {
        return None;
    }
    let held = directory.held.filter(|h| h.is_live(now))?;
    if !flight.is_mutation() && crate::grants::on(grants, directory.id, LeaseScope::Directory).is_none() {
        return None;
    }
    changes::set_entry_attr(state, id, attr).then_some(held)
}

/// Applies attributes of further inodes in a reply.
pub(crate) fn apply_attrs_after(state: &mut State, now: Time, flight: &InflightCall, response: &Response) {
    for &(id, attr) in &response.after {
        if attr.nlink == 0 && !attr.is_dir() {
            leases::drop_attr(state, id.ino);
        }
        apply_attr(state, now, flight, id, attr, &response.grants);
    }
}

/// Applies a name from a reply to the directory's facts, if a grant covers it. `None`: it does not exist.
pub(crate) fn apply_dentry(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    dir: NodeId,
    name: &Name,
    entry: Option<&Entry>,
    grants: &[Grant],
) -> Option<LiveGrant> {
    if flight.race_log.is_remotely_changed(dir.ino, name) {
        // The order of the remote change and the local change is not known.
        if flight.is_mutation() {
            leases::discard_uncertain_dir(state, dir);
        }
        return None;
    }
    let id = entry.map(|entry| entry.id);
    let crossed = match flight.sequence {
        Some(_) => order::is_change_ambiguous(state, flight, dir.ino, name, id),
        None => flight.is_contradicted(dir.ino, name, id),
    };
    if crossed || flight.recalled(dir, LeaseScope::Directory) {
        if crossed || flight.is_mutation() {
            leases::discard_uncertain_dir(state, dir);
        }
        return None;
    }
    if !flight.is_mutation() {
        order::mark_name_in_flight(state, dir.ino, name, id);
    }
    let single = apply_leased_dentry(state, now, flight, dir, (name, id), grants);
    if !flight.is_mutation() && single.is_some() {
        return single;
    }
    let row = apply_dir_entry(state, now, flight, dir, name, entry, grants);
    row.or(single)
}

/// Applies a name under a grant for that name alone. If the directory's entries disagree, they are older and are
/// dropped.
pub(crate) fn apply_leased_dentry(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    dir: NodeId,
    (name, id): (&Name, Option<NodeId>),
    grants: &[Grant],
) -> Option<LiveGrant> {
    let covers = if id.is_some() { LeaseScope::Dentry } else { LeaseScope::NegativeDentry };
    let fresh = flight.granted(grants, dir, covers).map(|grant| LiveGrant::begin(grant, flight.sent));
    let Some(held) = fresh.filter(|held| held.is_live(now)) else {
        if let Some(directory) = state.store.dir_mut(dir.ino) {
            directory.dentry_leases.remove(name);
        }
        return None;
    };
    let cookie = state.store.cookie(name);
    if !flight.is_mutation()
        && let Some((directory, _)) = leases::live_directory(state, now, dir.ino)
    {
        let listed = directory.find(cookie, name);
        if listed.is_some_and(|child| child.map(|child| child.id) != id) {
            leases::end_directory_lease(state, dir.ino);
        }
    }
    if let Some(id) = id.filter(|_| !flight.is_mutation()) {
        leases::discard_moved_dir(state, id, (dir.ino, name));
    }
    leases::dir_record(state, dir).dentry_leases.put(now, name, (id, held));
    state.store.recount(dir.ino);
    Some(held)
}

/// Applies a name under the directory lease.
fn apply_dir_entry(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    dir: NodeId,
    name: &Name,
    entry: Option<&Entry>,
    grants: &[Grant],
) -> Option<LiveGrant> {
    let made_up = planted(Bug::KeepsUngranted).then(|| crate::grants::fabricated(dir));
    let fresh = flight.granted(grants, dir, LeaseScope::Directory).or(made_up.as_ref());
    let fresh = fresh.map(|grant| LiveGrant::begin(grant, flight.sent));
    if leases::live_directory(state, now, dir.ino).is_none() {
        let held = fresh.filter(|h| h.is_live(now))?;
        if !state.store.may_begin_lease(dir, held.id) {
            return None;
        }
        if leases::dir_record(state, dir).held.is_some() {
            leases::end_directory_lease(state, dir.ino);
        }
        leases::note_lease_begin(state, dir.ino);
        leases::dir_record(state, dir).held = Some(held);
    } else if fresh.is_none() && !flight.is_mutation() {
        // An ungranted reply beside a live grant is kept only if it is about a local change, and newer than the
        // grant.
        return None;
    } else if flight.may_predate_lease(dir, grants) {
        leases::discard_if_contradicted(state, dir, name, entry.map(|entry| entry.id));
        return None;
    }
    let held = state.store.dir(dir.ino)?.held?;
    let old = changes::bind(state, (dir.ino, name), entry.map(CachedEntry::new));
    // The kernel knows of its own changes.
    if let Some(old) = old.filter(|_| !flight.is_mutation()) {
        let stale =
            leases::invalidations_for_replaced(state, (dir.ino, name), old.as_ref(), entry.map(|e| e.id));
        if state.kernel.can_notify() && !stale.is_empty() {
            invalidate::invalidate(state, stale, None);
        }
    }
    Some(held)
}

/// Begins or prolongs a data grant ([`crate::pages::InodePages::begin_grant`]).
pub(crate) fn begin_data_grant(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    id: NodeId,
    token: Option<ChangeToken>,
    response: &Response,
) {
    let granted = flight.granted(&response.grants, id, LeaseScope::Data);
    let fresh = granted.map(|g| LiveGrant::begin(g, flight.sent)).filter(|h| h.is_live(now));
    let inode = inodes::record(state, id);
    if inode.pages_mut().begin_grant(now, fresh, token) && inode.opens().is_open() {
        invalidate::set_data_timers(state, id.ino);
    }
}

/// Keeps the target that came with an entry. If a lookup brings none, the known one stays until its deadline.
pub(crate) fn keep_target_in_reply(state: &mut State, now: Time, entry: &Entry) {
    if entry.target.is_some() {
        keep_target(state, now, entry.id, entry.target.clone());
    }
}

/// Keeps a target for as long as the attributes beside it: a later symlink with that inode number may have equal
/// attributes, if both were made within one tick of the filesystem's clock.
pub(crate) fn keep_target(state: &mut State, now: Time, id: NodeId, target: Option<Box<[u8]>>) {
    let deadline = view::cached_attr(state, now, id).map(|(_, held)| held.deadline);
    let kept = target.filter(|_| state.config.keeps_targets).zip(deadline);
    if let Some(inode) = state.store.inode_of_mut(id) {
        inode.note_target(kept);
    }
}

/// Drops a symlink's target if its attributes changed: on filesystems without birth times it may be another symlink
/// with that inode number.
fn note_symlink(state: &mut State, id: NodeId, attr: &Attr) {
    if id.distinguishes_reuse() || attr.kind() != Kind::Symlink {
        return;
    }
    let Some(inode) = state.store.inode_of_mut(id) else { return };
    if inode.own_attr().is_none_or(|(own, _)| own.ctime != attr.ctime) {
        inode.note_target(None);
    }
    if let Some(child) =
        state.store.child_at_parent_entry(id.ino).filter(|child| child.attr().ctime != attr.ctime)
    {
        child.target = None;
    }
}

/// Records that the remote found no xattrs. For a child that its directory's lease does not cover, this is valid as
/// long as its own attributes.
pub(crate) fn learn_no_xattrs(state: &mut State, now: Time, flight: &InflightCall, entry: &Entry) {
    let ino = entry.id.ino;
    let changed = flight.race_log.local_inodes.contains(&ino)
        || flight.race_log.remote_inodes.contains(&ino)
        || flight.recalled(entry.id, LeaseScope::Attributes);
    if changed || !entry.no_xattrs || state.store.suspended.has_inode(ino) {
        return;
    }
    let Some(inode) = state.store.inode_of_mut(entry.id) else { return };
    if let Some(deadline) = inode.live_own_attr(now).map(|(_, held)| held.deadline) {
        inode.note_xattrs(XattrSet::default(), deadline);
    }
}
