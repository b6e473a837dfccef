//! Extended attributes, ACLs among them: the cache knows all xattrs of an inode, or none.

use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::grants::LiveGrant;
use crate::op::{Caller, OpReply};
use crate::ops::targets;
use crate::out::{replies, sending};
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, LeaseScope, NodeId, OpId, Reply, Response, Time, XattrSet};

const ACL_NAMES: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// Namespaces that every filesystem with xattrs handles.
const NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

const SELINUX: &[u8] = b"security.selinux";

/// Returns whether listxattr(2) lists this name only to callers with `CAP_SYS_ADMIN` in the initial user namespace, as
/// on the kernel's local filesystems (`xattr_list_one`, `simple_xattr_list`).
#[must_use]
pub fn is_privileged(name: &[u8]) -> bool {
    name.starts_with(b"trusted.")
}

/// Returns the errno for an xattr that an inode lacks: `EOPNOTSUPP` in a namespace that no filesystem handles
/// (`xattr_resolve_name` in Linux's fs/xattr.c).
pub(crate) fn absent(name: &[u8]) -> Errno {
    let is_in = |namespace: &[u8]| name.starts_with(namespace) && name.len() > namespace.len();
    match NAMESPACES.into_iter().any(is_in) || ACL_NAMES.contains(&name) {
        true => Errno::NODATA,
        false => Errno::OPNOTSUPP,
    }
}

/// Returns the reply of getxattr(2) or listxattr(2) for a buffer of `size` bytes; 0 asks for the length.
#[must_use]
pub fn sized_xattr(value: Vec<u8>, size: u32) -> OpReply {
    let length = u32::try_from(value.len()).unwrap_or(u32::MAX);
    match size {
        0 => OpReply::Size(length),
        _ if length > size => OpReply::Failed(Errno::RANGE),
        _ => OpReply::Value(value),
    }
}

/// Returns whether an xattr is neither listed, read nor set over the mount. `ls -l` reads these of every file, and
/// after the errno `EOPNOTSUPP` only once for each filesystem. A name that was listed would have to be readable.
pub(crate) fn is_unsupported(state: &State, name: &[u8]) -> bool {
    name == SELINUX || (!state.session.has_acls() && ACL_NAMES.contains(&name))
}

pub(crate) fn xattr(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
    name: Vec<u8>,
    size: u32,
) -> Option<OpReply> {
    if is_unsupported(state, &name) {
        return Some(OpReply::Failed(Errno::OPNOTSUPP));
    }
    let Some(id) = state.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    match known_xattr(state, now, id, &name) {
        Some(known) => {
            limit_copy(state, now, ino, &name, true);
            Some(known.map_or_else(OpReply::Failed, |value| sized_xattr(value, size)))
        }
        None if xattrs_known(state, now, id) => {
            let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
            let call = sending::send(
                state,
                now,
                None,
                CallKind::Xattr { ino },
                Call::Xattr { node, name: name.clone() },
            );
            replies::wait(state, op, caller, call, ReplyKind::Xattr { name, size }, false)
        }
        None => fetch_xattrs(state, now, op, caller, ino, ReplyKind::Xattr { name, size }),
    }
}

pub(crate) fn list_xattr(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
    size: u32,
) -> Option<OpReply> {
    let Some(id) = state.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    if has_no_xattrs(state, now, id) {
        return Some(sized_xattr(Vec::new(), size));
    }
    if let Some(set) = xattr_set(state, now, id) {
        return Some(names_of(state, set, size));
    }
    fetch_xattrs(state, now, op, caller, ino, ReplyKind::XattrNames { size })
}

fn fetch_xattrs(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
    want: ReplyKind,
) -> Option<OpReply> {
    if let Some(call) = state.calls.xattr_call(ino)
        && state.calls.is_joinable(call)
    {
        return replies::wait(state, op, caller, call, want, true);
    }
    let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    let call = sending::send(state, now, None, CallKind::Xattrs { ino }, Call::Xattrs { node });
    state.calls.enter_joins(call, CallKind::Xattrs { ino });
    replies::wait(state, op, caller, call, want, false)
}

/// Returns whether the directory's listing, or the creation of the inode, said that there are none.
fn has_no_xattrs(state: &State, now: Time, id: NodeId) -> bool {
    if state.is_suspended(id.ino) {
        return false;
    }
    let Some(inode) = state.store.inode_of(id) else { return false };
    let Some((dir, name)) =
        inode.parent_entry().filter(|(dir, name)| !state.store.suspended.has_name(*dir, name))
    else {
        return false;
    };
    let Some(directory) = state.store.dir(*dir).filter(|d| d.held.is_some_and(|h| h.is_live(now))) else {
        return false;
    };
    let row = directory.rows.find(state.store.cookie(name), name.as_bytes());
    let child = row.and_then(|r| r.child).filter(|c| c.id == id);
    // A hard link's entries may say so under several names, and only the parent entry is kept up to date.
    child.is_some_and(|c| c.no_xattrs && c.is_covered())
}

/// Returns all xattrs, if known: until their own deadline, and while the attributes beside them are known.
fn xattr_set(state: &State, now: Time, id: NodeId) -> Option<&XattrSet> {
    let inode = state.store.inode_of(id)?;
    let (set, deadline) = inode.xattrs()?;
    (now < *deadline && view::cached_attr(state, now, id).is_some()).then_some(set)
}

fn xattrs_known(state: &State, now: Time, id: NodeId) -> bool {
    xattr_set(state, now, id).is_some()
}

/// Returns an xattr. `None`: unknown, also if the value was too large for the set.
fn known_xattr(state: &State, now: Time, id: NodeId, name: &[u8]) -> Option<Result<Vec<u8>, Errno>> {
    if has_no_xattrs(state, now, id) {
        return Some(Err(absent(name)));
    }
    let set = xattr_set(state, now, id)?;
    match set.items.iter().find(|(n, _)| n.as_ref() == name) {
        None => Some(Err(absent(name))),
        Some((_, Some(value))) => Some(Ok(value.to_vec())),
        Some((_, None)) => None,
    }
}

pub(crate) fn on_xattrs_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    ino: u64,
    response: Response,
) {
    let grants = response.grants;
    let set = match response.result {
        Ok(Reply::Xattrs(set)) => set,
        Ok(_) => return replies::reply_all(state, &flight.waiters, &OpReply::Failed(Errno::PROTO)),
        Err(errno) => return replies::reply_all(state, &flight.waiters, &OpReply::Failed(errno)),
    };
    let mut waiters = flight.waiters.clone();
    if !flight.race_log.is_empty()
        || state.store.id_of(ino).and_then(|id| view::cached_attr(state, now, id)).is_none()
    {
        let late = state.calls.late_joiners(&waiters);
        waiters.retain(|op| !late.contains(op));
        if let Some(node) = paths::node_ref(state, ino) {
            sending::resend_for_joiners(state, now, late, CallKind::Xattrs { ino }, Call::Xattrs { node });
        }
    }
    let mut told: Vec<Vec<u8>> = Vec::new();
    for op in waiters {
        let want = state.calls.waiter(op).map(|w| w.want.clone());
        if let Some(ReplyKind::Xattr { name, .. }) = &want {
            told.push(name.clone());
        }
        let answer = match want {
            Some(ReplyKind::XattrNames { size }) => names_of(state, &set, size),
            Some(ReplyKind::Xattr { name, size }) => {
                match set.items.iter().find(|(n, _)| n.as_ref() == name.as_slice()) {
                    None => OpReply::Failed(absent(&name)),
                    Some((_, Some(value))) => sized_xattr(value.to_vec(), size),
                    Some((_, None)) => {
                        fetch_value(state, now, op, ino, name, size);
                        continue;
                    }
                }
            }
            _ => OpReply::Failed(Errno::IO),
        };
        replies::reply_to(state, op, answer);
    }
    if flight.race_log.is_empty()
        && let Some(id) = state.store.id_of(ino)
        && let Some((_, held)) = view::cached_attr(state, now, id)
        && let Some(inode) = state.store.inode_mut(ino)
    {
        // The attributes may be of a later call, and be valid for longer.
        let own = flight
            .granted(&grants, id, LeaseScope::Attributes)
            .map(|grant| LiveGrant::begin(grant, flight.sent));
        let deadline = own.map_or(held.deadline, |own| own.deadline.min(held.deadline));
        inode.note_xattrs(set, deadline);
    }
    told.iter().for_each(|name| limit_copy(state, now, ino, name, flight.race_log.is_empty()));
}

/// Limits the lifetime of the kernel's copy of an ACL.
fn limit_copy(state: &mut State, now: Time, ino: u64, name: &[u8], sure: bool) {
    if ACL_NAMES.contains(&name) {
        targets::limit_acl(state, now, ino, sure);
    }
}

fn fetch_value(state: &mut State, now: Time, op: OpId, ino: u64, name: Vec<u8>, size: u32) {
    let (Some(node), Some(waiting)) = (paths::node_ref(state, ino), state.calls.waiter(op)) else {
        return replies::reply_to(state, op, OpReply::Failed(Errno::STALE));
    };
    let caller = waiting.caller;
    let call =
        sending::send(state, now, None, CallKind::Xattr { ino }, Call::Xattr { node, name: name.clone() });
    replies::wait(state, op, caller, call, ReplyKind::Xattr { name, size }, false);
}

pub(crate) fn on_xattr_value_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    ino: u64,
    response: &Response,
) {
    for &op in &flight.waiters {
        let want = state.calls.waiter(op).map(|waiting| waiting.want.clone());
        let Some(ReplyKind::Xattr { name, size }) = want else { continue };
        let answer = match &response.result {
            Ok(Reply::Value(value)) => sized_xattr(value.clone(), size),
            Ok(_) => OpReply::Failed(Errno::PROTO),
            Err(errno) => OpReply::Failed(*errno),
        };
        replies::reply_to(state, op, answer);
        limit_copy(state, now, ino, &name, flight.race_log.is_empty());
    }
}

/// Returns the names in the format of listxattr(2): each NUL-terminated.
fn names_of(state: &State, set: &XattrSet, size: u32) -> OpReply {
    let (mut names, mut privileged) = (Vec::new(), false);
    for (name, _) in set.items.iter().filter(|(name, _)| !is_unsupported(state, name)) {
        privileged |= is_privileged(name);
        names.extend_from_slice(name);
        names.push(0);
    }
    if privileged { OpReply::XattrNames { names, size } } else { sized_xattr(names, size) }
}
