//! Symlink targets, and the copies that the kernel keeps without a timeout.
//!
//! The kernel caches two facts of an inode beside its dentries and attributes, and checks no timeout before it uses
//! them: the target of a symlink (`FUSE_CACHE_SYMLINKS`, in the page cache: `fuse_symlink_read_folio`) and POSIX ACLs
//! (`inode->i_acl`: `fuse_get_inode_acl`). Under a grant that is recalled before any change, the invalidation of the
//! inode's attributes drops both. Under a grant with a deadline the cache has them dropped at that deadline. Without a
//! grant, and for a target whose inode number may be reused unseen, they are dropped right after the reply.

use crate::calls::{CallKind, InflightCall};
use crate::facts::learn;
use crate::kernel::UntimedCopy;
use crate::op::{Caller, KernelInvalidation, OpReply};
use crate::out::{invalidate, replies, sending};
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, NodeId, OpId, Reply, Response, Time};

pub(crate) fn read_link(state: &mut State, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
    let Some(id) = state.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    if let Some(target) = cached_target(state, now, id) {
        limit_target(state, now, id, true);
        return Some(OpReply::Target(target));
    }
    let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    sending::send_for(state, now, op, caller, CallKind::ReadLink { ino }, Call::ReadLink { node })
}

fn cached_target(state: &State, now: Time, id: NodeId) -> Option<Vec<u8>> {
    view::cached_attr(state, now, id)?;
    let inode = state.store.inode(id.ino)?;
    if let Some(target) = inode.live_target(now) {
        return Some(target.to_vec());
    }
    let (_, child) = state.store.parent_entry(inode)?;
    child.target.as_ref().map(|t| t.to_vec())
}

pub(crate) fn on_readlink_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    ino: u64,
    response: Response,
) {
    let target = match response.result {
        Ok(Reply::Target(target)) => target,
        Ok(_) => return replies::reply_all(state, &flight.waiters, &OpReply::Failed(Errno::PROTO)),
        Err(errno) => return replies::reply_all(state, &flight.waiters, &OpReply::Failed(errno)),
    };
    // A page that was to be dropped while it was locked for this reply is dropped after it.
    let (sure, id) = (flight.race_log.is_empty() && !flight.drop_data, state.store.id_of(ino));
    if let Some(id) = id.filter(|_| sure) {
        learn::keep_target(state, now, id, Some(target.clone()));
    }
    replies::reply_all(state, &flight.waiters, &OpReply::Target(target.into_vec()));
    if let Some(id) = id {
        limit_target(state, now, id, sure);
    }
}

/// Bounds the kernel's copy of a target in a reply. `sure`: nothing changed since the call was sent.
fn limit_target(state: &mut State, now: Time, id: NodeId, sure: bool) {
    if !state.config.kernel_keeps_targets || !state.kernel.can_notify() {
        return;
    }
    let held = view::cached_attr(state, now, id).map(|(_, held)| held);
    match held.filter(|held| sure && id.distinguishes_reuse() && !held.stale) {
        Some(held) => {
            state
                .store
                .inode_mut(id.ino)
                .into_iter()
                .for_each(|inode| inode.kernel.note_copy(UntimedCopy::Target));
            invalidate::end_copies_at(state, held.deadline, id.ino);
        }
        None => {
            invalidate::invalidate(
                state,
                vec![KernelInvalidation::Data { ino: id.ino, offset: 0, length: 0 }],
                None,
            );
        }
    }
}

/// Bounds the kernel's copy of an ACL in a reply. `sure`: nothing changed since the call was sent.
pub(crate) fn limit_acl(state: &mut State, now: Time, ino: u64, sure: bool) {
    let held = state.store.id_of(ino).and_then(|id| view::cached_attr(state, now, id)).map(|(_, held)| held);
    let Some(inode) = state.store.inode_mut(ino).filter(|_| state.kernel.can_notify()) else {
        return;
    };
    inode.kernel.note_copy(UntimedCopy::Acls);
    let own = inode.xattrs().map_or(Time::FAR, |(_, deadline)| *deadline);
    match held.filter(|held| sure && !held.stale) {
        Some(held) => invalidate::end_copies_at(state, held.deadline.min(own), ino),
        None => {
            invalidate::invalidate(state, vec![KernelInvalidation::Attr { ino }], None);
        }
    }
}

#[cfg(test)]
mod tests;
