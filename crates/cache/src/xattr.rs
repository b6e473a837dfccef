//! Extended attributes, ACLs among them: the cache knows all xattrs of an inode, or none.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::grants::LiveGrant;
use crate::op::{Caller, OpReply};
use nigh_types::{Call, Entry, Errno, LeaseScope, NodeId, OpId, Reply, Response, Time, XattrSet};

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

impl Cache {
    /// Returns whether an xattr is neither listed, read nor set over the mount. `ls -l` reads these of every file, and
    /// after the errno `EOPNOTSUPP` only once for each filesystem. A name that was listed would have to be readable.
    pub(crate) fn is_unsupported(&self, name: &[u8]) -> bool {
        name == SELINUX || (!self.session.has_acls() && ACL_NAMES.contains(&name))
    }

    pub(crate) fn xattr(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        ino: u64,
        name: Vec<u8>,
        size: u32,
    ) -> Option<OpReply> {
        if self.is_unsupported(&name) {
            return Some(OpReply::Failed(Errno::OPNOTSUPP));
        }
        let Some(id) = self.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        match self.known_xattr(now, id, &name) {
            Some(known) => {
                self.limit_copy(now, ino, &name, true);
                Some(known.map_or_else(OpReply::Failed, |value| sized_xattr(value, size)))
            }
            None if self.xattrs_known(now, id) => {
                let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
                let call =
                    self.send(now, None, CallKind::Xattr { ino }, Call::Xattr { node, name: name.clone() });
                self.wait(op, caller, call, ReplyKind::Xattr { name, size }, false)
            }
            None => self.fetch_xattrs(now, op, caller, ino, ReplyKind::Xattr { name, size }),
        }
    }

    pub(crate) fn list_xattr(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        ino: u64,
        size: u32,
    ) -> Option<OpReply> {
        let Some(id) = self.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        if self.has_no_xattrs(now, id) {
            return Some(sized_xattr(Vec::new(), size));
        }
        if let Some(set) = self.xattr_set(now, id) {
            return Some(self.names_of(set, size));
        }
        self.fetch_xattrs(now, op, caller, ino, ReplyKind::XattrNames { size })
    }

    fn fetch_xattrs(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        ino: u64,
        want: ReplyKind,
    ) -> Option<OpReply> {
        if let Some(call) = self.calls.xattr_call(ino)
            && self.calls.is_joinable(call)
        {
            return self.wait(op, caller, call, want, true);
        }
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        let call = self.send(now, None, CallKind::Xattrs { ino }, Call::Xattrs { node });
        self.calls.enter_joins(call, CallKind::Xattrs { ino });
        self.wait(op, caller, call, want, false)
    }

    /// Returns whether the directory's listing, or the creation of the inode, said that there are none.
    fn has_no_xattrs(&self, now: Time, id: NodeId) -> bool {
        if self.is_suspended(id.ino) {
            return false;
        }
        let Some(inode) = self.store.inode_of(id) else { return false };
        let Some((dir, name)) =
            inode.parent_entry.as_ref().filter(|(dir, name)| !self.store.suspended.has_name(*dir, name))
        else {
            return false;
        };
        let Some(directory) = self.store.dir(*dir).filter(|d| d.held.is_some_and(|h| h.is_live(now))) else {
            return false;
        };
        let row = directory.rows.find(self.store.cookie(name), name.as_bytes());
        let child = row.and_then(|r| r.child).filter(|c| c.id == id);
        // A hard link's entries may say so under several names, and only the parent entry is kept up to date.
        child.is_some_and(|c| c.no_xattrs && c.is_covered())
    }

    /// Records that the remote found no xattrs. For a child that its directory's lease does not cover, this is valid as
    /// long as its own attributes.
    pub(crate) fn learn_no_xattrs(&mut self, now: Time, flight: &InflightCall, entry: &Entry) {
        let ino = entry.id.ino;
        let changed = flight.race_log.local_inodes.contains(&ino)
            || flight.race_log.remote_inodes.contains(&ino)
            || flight.recalled(entry.id, LeaseScope::Attributes);
        if changed || !entry.no_xattrs || self.store.suspended.has_inode(ino) {
            return;
        }
        let Some(inode) = self.store.inode_of_mut(entry.id) else { return };
        if let Some((_, held)) = inode.own.filter(|(_, held)| held.is_live(now)) {
            inode.ext_mut().xattrs = Some(Box::new((XattrSet::default(), held.deadline)));
        }
    }

    /// Returns all xattrs, if known: until their own deadline, and while the attributes beside them are known.
    fn xattr_set(&self, now: Time, id: NodeId) -> Option<&XattrSet> {
        let inode = self.store.inode_of(id)?;
        let (set, deadline) = inode.xattrs.as_deref()?;
        (now < *deadline && self.cached_attr(now, id).is_some()).then_some(set)
    }

    fn xattrs_known(&self, now: Time, id: NodeId) -> bool {
        self.xattr_set(now, id).is_some()
    }

    /// Returns an xattr. `None`: unknown, also if the value was too large for the set.
    fn known_xattr(&self, now: Time, id: NodeId, name: &[u8]) -> Option<Result<Vec<u8>, Errno>> {
        if self.has_no_xattrs(now, id) {
            return Some(Err(absent(name)));
        }
        let set = self.xattr_set(now, id)?;
        match set.items.iter().find(|(n, _)| n.as_ref() == name) {
            None => Some(Err(absent(name))),
            Some((_, Some(value))) => Some(Ok(value.to_vec())),
            Some((_, None)) => None,
        }
    }

    pub(crate) fn on_xattrs_reply(&mut self, now: Time, flight: &InflightCall, ino: u64, response: Response) {
        let grants = response.grants;
        let set = match response.result {
            Ok(Reply::Xattrs(set)) => set,
            Ok(_) => return self.reply_all(&flight.waiters, &OpReply::Failed(Errno::PROTO)),
            Err(errno) => return self.reply_all(&flight.waiters, &OpReply::Failed(errno)),
        };
        let mut waiters = flight.waiters.clone();
        if !flight.race_log.is_empty()
            || self.store.id_of(ino).and_then(|id| self.cached_attr(now, id)).is_none()
        {
            let late = self.calls.late_joiners(&waiters);
            waiters.retain(|op| !late.contains(op));
            if let Some(node) = self.node_ref(ino) {
                self.resend_for_joiners(now, late, CallKind::Xattrs { ino }, Call::Xattrs { node });
            }
        }
        let mut told: Vec<Vec<u8>> = Vec::new();
        for op in waiters {
            let want = self.calls.waiter(op).map(|w| w.want.clone());
            if let Some(ReplyKind::Xattr { name, .. }) = &want {
                told.push(name.clone());
            }
            let answer = match want {
                Some(ReplyKind::XattrNames { size }) => self.names_of(&set, size),
                Some(ReplyKind::Xattr { name, size }) => {
                    match set.items.iter().find(|(n, _)| n.as_ref() == name.as_slice()) {
                        None => OpReply::Failed(absent(&name)),
                        Some((_, Some(value))) => sized_xattr(value.to_vec(), size),
                        Some((_, None)) => {
                            self.fetch_value(now, op, ino, name, size);
                            continue;
                        }
                    }
                }
                _ => OpReply::Failed(Errno::IO),
            };
            self.reply_to(op, answer);
        }
        if flight.race_log.is_empty()
            && let Some(id) = self.store.id_of(ino)
            && let Some((_, held)) = self.cached_attr(now, id)
            && let Some(inode) = self.store.inode_mut(ino)
        {
            // The attributes may be of a later call, and be valid for longer.
            let own = flight
                .granted(&grants, id, LeaseScope::Attributes)
                .map(|grant| LiveGrant::begin(grant, flight.sent));
            let deadline = own.map_or(held.deadline, |own| own.deadline.min(held.deadline));
            inode.ext_mut().xattrs = Some(Box::new((set, deadline)));
        }
        told.iter().for_each(|name| self.limit_copy(now, ino, name, flight.race_log.is_empty()));
    }

    /// Limits the lifetime of the kernel's copy of an ACL.
    fn limit_copy(&mut self, now: Time, ino: u64, name: &[u8], sure: bool) {
        if ACL_NAMES.contains(&name) {
            self.limit_acl(now, ino, sure);
        }
    }

    fn fetch_value(&mut self, now: Time, op: OpId, ino: u64, name: Vec<u8>, size: u32) {
        let (Some(node), Some(waiting)) = (self.node_ref(ino), self.calls.waiter(op)) else {
            return self.reply_to(op, OpReply::Failed(Errno::STALE));
        };
        let caller = waiting.caller;
        let call = self.send(now, None, CallKind::Xattr { ino }, Call::Xattr { node, name: name.clone() });
        self.wait(op, caller, call, ReplyKind::Xattr { name, size }, false);
    }

    pub(crate) fn on_xattr_value_reply(
        &mut self,
        now: Time,
        flight: &InflightCall,
        ino: u64,
        response: &Response,
    ) {
        for &op in &flight.waiters {
            let want = self.calls.waiter(op).map(|waiting| waiting.want.clone());
            let Some(ReplyKind::Xattr { name, size }) = want else { continue };
            let answer = match &response.result {
                Ok(Reply::Value(value)) => sized_xattr(value.clone(), size),
                Ok(_) => OpReply::Failed(Errno::PROTO),
                Err(errno) => OpReply::Failed(*errno),
            };
            self.reply_to(op, answer);
            self.limit_copy(now, ino, &name, flight.race_log.is_empty());
        }
    }

    /// Returns the names in the format of listxattr(2): each NUL-terminated.
    fn names_of(&self, set: &XattrSet, size: u32) -> OpReply {
        let (mut names, mut privileged) = (Vec::new(), false);
        for (name, _) in set.items.iter().filter(|(name, _)| !self.is_unsupported(name)) {
            privileged |= is_privileged(name);
            names.extend_from_slice(name);
            names.push(0);
        }
        if privileged { OpReply::XattrNames { names, size } } else { sized_xattr(names, size) }
    }

    /// Drops an inode's xattrs.
    pub(crate) fn drop_xattrs(&mut self, ino: u64) {
        let Some(inode) = self.store.inode_mut(ino) else { return };
        inode.drop_xattrs();
        if let Some(child) = self.store.child_at_parent_entry(ino) {
            child.no_xattrs = false;
        }
    }
}

/// Returns the errno for an xattr that an inode lacks: `EOPNOTSUPP` in a namespace that no filesystem handles
/// (`xattr_resolve_name` in Linux's fs/xattr.c).
fn absent(name: &[u8]) -> Errno {
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
