//! Symlink targets, and the copies that the kernel keeps without a timeout.
//!
//! The kernel caches two facts of an inode beside its dentries and attributes, and checks no timeout before it uses
//! them: the target of a symlink (`FUSE_CACHE_SYMLINKS`, in the page cache: `fuse_symlink_read_folio`) and POSIX ACLs
//! (`inode->i_acl`: `fuse_get_inode_acl`). Under a grant that is recalled before any change, the invalidation of the
//! inode's attributes drops both. Under a grant with a deadline the cache has them dropped at that deadline. Without a
//! grant, and for a target whose inode number may be reused unseen, they are dropped right after the reply.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::op::{Caller, KernelInvalidation, OpReply};
use crate::store::UntimedCopy;
use nigh_types::{Attr, Call, Entry, Errno, Kind, NodeId, OpId, Reply, Response, Time};

impl Cache {
    pub(crate) fn read_link(&mut self, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
        let Some(id) = self.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        if let Some(target) = self.cached_target(now, id) {
            self.limit_target(now, id, true);
            return Some(OpReply::Target(target));
        }
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        self.send_for(now, op, caller, CallKind::ReadLink { ino }, Call::ReadLink { node })
    }

    fn cached_target(&self, now: Time, id: NodeId) -> Option<Vec<u8>> {
        self.cached_attr(now, id)?;
        let inode = self.store.inode(id.ino)?;
        if let Some((target, _)) = inode.target.as_deref().filter(|(_, deadline)| now < *deadline) {
            return Some(target.to_vec());
        }
        let (dir, name) = inode.parent_entry.as_ref()?;
        let row = self.store.row(*dir, name)?;
        let child = row.child.filter(|c| c.id == id)?;
        child.target.as_ref().map(|t| t.to_vec())
    }

    /// Keeps the target that came with an entry. If a lookup brings none, the known one stays until its deadline.
    pub(crate) fn keep_target_in_reply(&mut self, now: Time, entry: &Entry) {
        if entry.target.is_some() {
            self.keep_target(now, entry.id, entry.target.clone());
        }
    }

    /// Keeps a target for as long as the attributes beside it: a later symlink with that inode number may have equal
    /// attributes, if both were made within one tick of the filesystem's clock.
    pub(crate) fn keep_target(&mut self, now: Time, id: NodeId, target: Option<Box<[u8]>>) {
        let deadline = self.cached_attr(now, id).map(|(_, held)| held.deadline);
        let kept = target.filter(|_| self.config.keeps_targets).zip(deadline);
        if let Some(inode) = self.store.inode_of_mut(id) {
            inode.set_target(kept);
        }
    }

    /// Drops a symlink's target if its attributes changed: on filesystems without birth times it may be another symlink
    /// with that inode number.
    pub(crate) fn note_symlink(&mut self, id: NodeId, attr: &Attr) {
        if id.distinguishes_reuse() || attr.kind() != Kind::Symlink {
            return;
        }
        let Some(inode) = self.store.inode_of_mut(id) else { return };
        if inode.own.is_none_or(|(own, _)| own.ctime != attr.ctime) {
            inode.set_target(None);
        }
        if let Some(child) =
            self.store.child_at_parent_entry(id.ino).filter(|child| child.attr().ctime != attr.ctime)
        {
            child.target = None;
        }
    }

    pub(crate) fn on_readlink_reply(
        &mut self,
        now: Time,
        flight: &InflightCall,
        ino: u64,
        response: Response,
    ) {
        let target = match response.result {
            Ok(Reply::Target(target)) => target,
            Ok(_) => return self.reply_all(&flight.waiters, &OpReply::Failed(Errno::PROTO)),
            Err(errno) => return self.reply_all(&flight.waiters, &OpReply::Failed(errno)),
        };
        // A page that was to be dropped while it was locked for this reply is dropped after it.
        let (sure, id) = (flight.race_log.is_empty() && !flight.drop_data, self.store.id_of(ino));
        if let Some(id) = id.filter(|_| sure) {
            self.keep_target(now, id, Some(target.clone()));
        }
        self.reply_all(&flight.waiters, &OpReply::Target(target.into_vec()));
        if let Some(id) = id {
            self.limit_target(now, id, sure);
        }
    }

    /// Bounds the kernel's copy of a target in a reply. `sure`: nothing changed since the call was sent.
    fn limit_target(&mut self, now: Time, id: NodeId, sure: bool) {
        if !self.config.kernel_keeps_targets || !self.kernel.can_notify() {
            return;
        }
        let held = self.cached_attr(now, id).map(|(_, held)| held);
        match held.filter(|held| sure && id.distinguishes_reuse() && !held.stale) {
            Some(held) => {
                self.store
                    .inode_mut(id.ino)
                    .into_iter()
                    .for_each(|inode| inode.note_copy(UntimedCopy::Target, true));
                self.end_copies_at(held.deadline, id.ino);
            }
            None => {
                self.invalidate(vec![KernelInvalidation::Data { ino: id.ino, offset: 0, length: 0 }], None);
            }
        }
    }

    /// Bounds the kernel's copy of an ACL in a reply. `sure`: nothing changed since the call was sent.
    pub(crate) fn limit_acl(&mut self, now: Time, ino: u64, sure: bool) {
        let held = self.store.id_of(ino).and_then(|id| self.cached_attr(now, id)).map(|(_, held)| held);
        let Some(inode) = self.store.inode_mut(ino).filter(|_| self.kernel.can_notify()) else {
            return;
        };
        inode.note_copy(UntimedCopy::Acls, true);
        let own = inode.xattrs.as_deref().map_or(Time::FAR, |(_, deadline)| *deadline);
        match held.filter(|held| sure && !held.stale) {
            Some(held) => self.end_copies_at(held.deadline.min(own), ino),
            None => {
                self.invalidate(vec![KernelInvalidation::Attr { ino }], None);
            }
        }
    }

    fn end_copies_at(&mut self, deadline: Time, ino: u64) {
        if deadline != Time::FAR {
            self.kernel.add_timer(deadline, ino);
        }
    }

    /// Returns the invalidation of a kernel copy whose grant has ended by its deadline.
    pub(crate) fn ended_copies(&self, ino: u64) -> Option<KernelInvalidation> {
        let inode = self.store.inode(ino)?;
        if inode.has_copy(UntimedCopy::Target) {
            return Some(KernelInvalidation::Data { ino, offset: 0, length: 0 });
        }
        inode.has_copy(UntimedCopy::Acls).then_some(KernelInvalidation::Attr { ino })
    }

    /// Adds the target's page to an attribute invalidation of a symlink, if the kernel has the target.
    pub(crate) fn with_targets(&self, stale: &mut Vec<KernelInvalidation>) {
        let has_target =
            |ino: &u64| self.store.inode(*ino).is_some_and(|inode| inode.has_copy(UntimedCopy::Target));
        let pages = stale.iter().filter_map(|one| match one {
            KernelInvalidation::Attr { ino } if has_target(ino) => {
                Some(KernelInvalidation::Data { ino: *ino, offset: 0, length: 0 })
            }
            _ => None,
        });
        let pages: Vec<KernelInvalidation> = pages.collect();
        stale.extend(pages);
    }
}

#[cfg(test)]
mod tests;
