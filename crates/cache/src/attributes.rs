//! Attributes: where they are cached, and how they are applied and dropped.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::config::OnDisconnect;
use crate::grants::LiveGrant;
use crate::op::{InvalidationId, KernelInvalidation, Node, OpReply, Output, Urgency};
use crate::store::CachedEntry;
use crate::store::{Directory, Inode, UntimedCopy};
use nigh_types::{Attr, Entry, Grant, LeaseScope, Name, NodeId, Reply, Response, Span, Time};

impl Cache {
    /// Returns an inode's attributes under a live grant.
    pub(crate) fn cached_attr(&self, now: Time, id: NodeId) -> Option<(Attr, LiveGrant)> {
        let inode = self.store.inode_of(id)?;
        if self.is_suspended(id.ino) {
            return None;
        }
        if let Some((attr, held)) = inode.own.filter(|(_, held)| held.is_live(now)) {
            return Some((attr, held));
        }
        let (dir, name) =
            inode.parent_entry.as_ref().filter(|(dir, name)| !self.store.suspended.has_name(*dir, name))?;
        let directory = self.store.dir(*dir)?;
        let held = directory.held.filter(|h| h.is_live(now))?;
        let row = directory.rows.find(self.store.cookie(name), name.as_bytes())?;
        let child = row.child.filter(|c| c.id == id)?;
        child.is_covered().then_some((child.attr(), held))
    }

    /// Returns a child's attributes under a live grant, from its directory entry if that has them.
    pub(crate) fn child_attr(
        &self,
        now: Time,
        child: &CachedEntry,
        held: LiveGrant,
    ) -> Option<(Attr, LiveGrant)> {
        if self.is_suspended(child.id.ino) || self.kernel_knows_old_inode(child.id) {
            return None;
        }
        if child.is_covered() {
            return Some((child.attr(), held));
        }
        let inode = self.store.inode_of(child.id)?;
        inode.own.filter(|(_, held)| held.is_live(now))
    }

    /// Returns whether an inode's facts are suspended: an update by another client is prepared, or a local change in
    /// flight takes its name.
    pub(crate) fn is_suspended(&self, ino: u64) -> bool {
        self.store.suspended.has_inode(ino) || self.calls.is_losing_name(ino)
    }

    /// Returns the record of an inode, created if absent. If another inode had its number, all facts about that one are
    /// dropped.
    pub(crate) fn inode(&mut self, id: NodeId) -> &mut Inode {
        if let Some(old) = self.store.dir(id.ino).map(|d| d.id).filter(|old| *old != id) {
            self.drop_reused_directory(old);
            self.drop_dir_names(id.ino);
            if let Some(directory) = self.store.dir_mut(id.ino) {
                directory.reassign(id);
            }
        }
        self.keep_old_nodeid(id);
        let numbers = &mut self.kernel.nodeids;
        let inode = self.store.inode_or_insert(id, || numbers.restore(id));
        if inode.id != id {
            inode.reset(id);
            inode.nlookup += self.kernel.nodeids.restore(id);
        }
        inode
    }

    pub(crate) fn directory(&mut self, id: NodeId) -> &mut Directory {
        if let Some(limit) = self.config.dir_timeout {
            self.idle_due.get_or_insert(self.clock.after(limit));
        }
        self.store.dir_or_insert(self.clock, id)
    }

    /// Applies attributes of a reply if a grant allows. Returns that grant.
    pub(crate) fn apply_attr(
        &mut self,
        now: Time,
        flight: &InflightCall,
        id: NodeId,
        attr: Attr,
        grants: &[Grant],
    ) -> Option<LiveGrant> {
        if flight.race_log.local_inodes.contains(&id.ino) {
            self.drop_attr(id.ino);
            return None;
        }
        if flight.race_log.remote_inodes.contains(&id.ino) {
            // The remote change is newer, unless this is a reply to a local change: then the order is not known.
            if flight.is_mutation() {
                self.drop_attr(id.ino);
            }
            return None;
        }
        if !flight.is_mutation() {
            self.calls.mark_attr_learned(id.ino);
            // These compare attributes themselves.
            if !matches!(flight.purpose, CallKind::Read { .. } | CallKind::Revalidate { .. }) {
                self.drop_other_version(now, id, &attr);
            }
        }
        let fresh =
            flight.granted(grants, id, LeaseScope::Attributes).map(|g| LiveGrant::begin(g, flight.sent));
        let fresh = fresh.filter(|h| h.is_live(now));
        self.note_symlink(id, &attr);
        let mut under = None;
        if let Some(held) = fresh {
            self.inode(id).ext_mut().own = Some((attr, held));
            under = Some(held);
        } else if let Some(inode) = self.store.inode_of_mut(id) {
            match inode.ext_if_any().and_then(|more| more.own.as_mut()) {
                Some((_, held)) if flight.recalled(id, LeaseScope::Attributes) && held.is_live(now) => {
                    if flight.is_mutation() {
                        self.discard_uncertain_attr(id);
                    }
                    return None;
                }
                // An ungranted reply beside a live grant may be older than the cache.
                Some((_, held)) if held.is_live(now) && !flight.is_mutation() => return None,
                Some((own, held)) if held.is_live(now) => {
                    *own = attr;
                    under = Some(*held);
                }
                _ => drop(inode.drop_own_attr()),
            }
        }
        let covered = self.apply_to_entry(now, flight, id, attr, grants);
        let under = under.or(covered).or_else(|| self.apply_via_parent(now, flight, id, attr, grants));
        // Return a zero timeout while an update is prepared: the commit does not invalidate the kernel.
        under.filter(|_| self.cached_attr(now, id).is_some())
    }

    /// Applies a child's attributes that came with a directory lease, if the directory has no entry for the child yet:
    /// the remote found it by its parent entry.
    fn apply_via_parent(
        &mut self,
        now: Time,
        flight: &InflightCall,
        id: NodeId,
        attr: Attr,
        grants: &[Grant],
    ) -> Option<LiveGrant> {
        if !attr.covered_by_parent() || flight.is_mutation() {
            return None;
        }
        let (dir, name) = self.store.inode_of(id)?.parent_entry.clone()?;
        let dir_id = self.store.id_of(dir)?;
        flight.granted(grants, dir_id, LeaseScope::Directory)?;
        if flight.race_log.name(dir, &name).is_some() {
            return None;
        }
        let entry = Entry { id, attr, target: None, no_xattrs: false };
        self.apply_dentry(now, flight, dir_id, &name, Some(&entry), grants)
    }

    /// Applies attributes to the inode's entry if its directory lease lives, and only if they are not older than the
    /// entry: they came with a grant, or a local change made them.
    fn apply_to_entry(
        &mut self,
        now: Time,
        flight: &InflightCall,
        id: NodeId,
        attr: Attr,
        grants: &[Grant],
    ) -> Option<LiveGrant> {
        let (dir, name) = self.store.inode_of(id)?.parent_entry.as_ref()?;
        if flight.race_log.is_remotely_changed(*dir, name) {
            return None;
        }
        let (directory, name, cookie) = self.store.parent_dir_mut(id.ino)?;
        if flight.recalled(directory.id, LeaseScope::Directory) {
            return None;
        }
        let held = directory.held.filter(|h| h.is_live(now))?;
        if !flight.is_mutation() && crate::grants::on(grants, directory.id, LeaseScope::Directory).is_none() {
            return None;
        }
        let child = directory.rows.find_mut(cookie, name.as_bytes()).filter(|c| c.id == id)?;
        // An entry that did not answer for the inode was not updated for new xattrs.
        child.no_xattrs &= child.is_covered();
        child.packed = attr.into();
        child.attr_known = true;
        attr.covered_by_parent().then_some(held)
    }

    /// Drops attributes because a recall of them raced with a local change.
    pub(crate) fn discard_uncertain_attr(&mut self, id: NodeId) {
        self.calls.mark_uncertain((id, LeaseScope::Attributes));
        self.drop_attr(id.ino);
        if self.kernel.can_notify() {
            self.invalidate(vec![KernelInvalidation::Attr { ino: id.ino }], None);
        }
    }

    /// Drops attributes because the order of two replies is not known.
    pub(crate) fn drop_attr(&mut self, ino: u64) {
        let Some(inode) = self.store.inode_mut(ino) else { return };
        inode.drop_own_attr();
        inode.drop_xattrs();
        if let Some(child) = self.store.child_at_parent_entry(ino) {
            child.attr_known = false;
        }
    }

    /// Applies attributes of further inodes in a reply.
    pub(crate) fn apply_attrs_after(&mut self, now: Time, flight: &InflightCall, response: &Response) {
        for &(id, attr) in &response.after {
            if attr.nlink == 0 && !attr.is_dir() {
                self.drop_attr(id.ino);
            }
            self.apply_attr(now, flight, id, attr, &response.grants);
        }
    }

    /// Drops an inode's expired facts, as [`Cache::drop_expired_names`] does for a directory.
    pub(crate) fn drop_expired(&mut self, ino: u64) {
        let clock = self.clock;
        let Some(inode) = self.store.inode_mut(ino) else { return };
        if let Some(more) = inode.ext_if_any() {
            more.own = more.own.filter(|(_, held)| held.is_live(clock));
            more.xattrs = more.xattrs.take().filter(|xattrs| clock < xattrs.1);
            more.target = more.target.take().filter(|target| clock < target.1);
        }
        if let Some(dir) = inode.parent_entry.as_ref().map(|(dir, _)| *dir) {
            self.drop_expired_names(dir);
        }
    }

    /// Returns the reply about an inode that a name led to, and counts the lookup.
    pub(crate) fn entry_reply(
        &mut self,
        now: Time,
        home: Option<(u64, &Name)>,
        id: NodeId,
        attr: Attr,
        name_held: Option<LiveGrant>,
        attr_held: Option<LiveGrant>,
    ) -> Node {
        let level = self.kernel.level();
        let changes =
            home.is_some_and(|(dir, _)| self.changes_frequently(now, dir) || self.watches.is_reporting(dir));
        let held_back = home.is_some_and(|(dir, name)| self.store.suspended.has_name(dir, name));
        let name_held = name_held.filter(|_| !changes && !held_back);
        let entry_valid = name_held.map_or(Span::ZERO, |h| level.entry_timeout(&h, now));
        self.keep_removed_nodeid(id);
        let number = self.nodeid_for_reply(id);
        let attr_valid = self.attr_timeout(now, id.ino, &attr, attr_held);
        let known = self.inode(id).nlookup > 0;
        let node = Node { id, number, known, attr, entry_valid, attr_valid };
        let inode = self.inode(id);
        inode.nlookup += 1;
        if inode.nlookup == 1 {
            self.note_new_to_kernel(id.ino);
        }
        if let Some((dir, name)) = home {
            self.kernel.recent_dirs.put((dir, name), attr.is_dir().then_some((id, attr)));
            let inode = self.inode(id);
            inode.attr_valid_until = now.after(node.entry_valid.min(node.attr_valid));
            // The kernel may apply two replies in the reverse order: the longer timeout lasts until the dentry is
            // dropped.
            inode.entry_valid_until = inode.entry_valid_until.max(now.after(node.entry_valid));
            if !inode.is_at(dir, name) {
                self.set_parent_entry(id, (dir, name));
            }
        }
        node
    }

    /// Returns the attribute timeout of a reply with these attributes under such a grant.
    pub(crate) fn attr_timeout(&mut self, now: Time, ino: u64, attr: &Attr, held: Option<LiveGrant>) -> Span {
        let valid = held.map_or(Span::ZERO, |held| self.kernel.level().attr_timeout(&held, now));
        if valid > Span::ZERO
            && let Some(inode) = self.store.inode_mut(ino)
        {
            inode.kernel_has_attr = true;
            inode.kernel_set_id |= crate::store::set_id(attr);
        }
        valid
    }

    pub(crate) fn changes_frequently(&self, now: Time, dir: u64) -> bool {
        self.store.dir(dir).is_some_and(|directory| directory.changes_frequently(now))
    }

    /// Moves an inode's parent entry. An old entry that said that the inode has no other name loses its attributes:
    /// later changes would not reach it.
    pub(crate) fn set_parent_entry(&mut self, id: NodeId, (dir, name): (u64, &Name)) {
        if let Some(child) =
            self.store.child_at_parent_entry(id.ino).filter(|child| child.attr().covered_by_parent())
        {
            child.attr_known = false;
        }
        self.inode(id).parent_entry = Some((dir, name.clone()));
    }

    /// Returns whether the kernel has a valid dentry of that name for the inode. Another reply would make it drop ACLs
    /// (`forget_all_cached_acls` in `fuse_direntplus_link`).
    pub(crate) fn kernel_knows(&self, now: Time, dir: u64, name: &[u8], id: NodeId) -> bool {
        let known =
            self.store.inode(id.ino).filter(|i| i.id == id && i.nlookup > 0 && now < i.attr_valid_until);
        known.is_some_and(|inode| inode.is_at(dir, name))
    }

    /// Returns the reply about a name that does not exist. A suspended name has a grant here only in the reply to the
    /// lookup that ends its suspension: while an update is in progress the server grants nothing on the key, and a reply
    /// that a later prepare overtook is not kept.
    pub(crate) fn negative_reply(
        &mut self,
        now: Time,
        dir: u64,
        name: &Name,
        held: Option<LiveGrant>,
    ) -> OpReply {
        self.kernel.recent_dirs.put((dir, name), None);
        let held = held.filter(|_| !self.changes_frequently(now, dir));
        let held = held.filter(|_| !self.watches.is_reporting(dir));
        let valid = held.map_or(Span::ZERO, |h| self.kernel.level().negative_timeout(&h, now));
        if valid == Span::ZERO || !self.kernel.add_negative_dentry(dir, name) {
            return OpReply::Missing(Span::ZERO);
        }
        if let Some(directory) = self.store.dir_mut(dir) {
            directory.has_negative_dentries = true;
        }
        OpReply::Missing(valid)
    }

    /// Invalidates the effects of a change whose caller was killed meanwhile: the kernel believes that it did not
    /// happen.
    pub(crate) fn invalidate_abandoned(&mut self, flight: &InflightCall, response: &Response) {
        if response.result.is_err() || !self.kernel.can_notify() {
            return;
        }
        let names = flight.purpose.names().into_iter();
        let entries = names.flat_map(|(dir, name)| {
            let listing = KernelInvalidation::Data { ino: dir, offset: 0, length: 0 };
            [KernelInvalidation::Entry { dir, name: name.clone() }, listing]
        });
        let touched = response.after.iter().map(|(id, _)| KernelInvalidation::Attr { ino: id.ino });
        let mut stale: Vec<KernelInvalidation> = entries.chain(touched).collect();
        match &response.result {
            Ok(Reply::Attr(id, _)) => stale.push(KernelInvalidation::Attr { ino: id.ino }),
            // A further name of an inode that the kernel knows.
            Ok(Reply::Created { entry, .. }) if self.store.has_inode(entry.id.ino) => {
                stale.push(KernelInvalidation::Attr { ino: entry.id.ino });
            }
            _ => {}
        }
        if let CallKind::Write { ino, .. } = flight.purpose {
            stale.push(KernelInvalidation::Data { ino, offset: 0, length: 0 });
        }
        self.invalidate(stale, None);
    }

    /// Drops the record of an inode that neither the kernel nor a fact needs.
    pub(crate) fn drop_if_idle(&mut self, ino: u64) {
        let (root, clock) = (self.store.root(), self.clock);
        let keeps_expired = self.config.on_disconnect == OnDisconnect::Stale;
        let Some(inode) = self.store.inode_mut(ino) else { return };
        inode.shrink();
        if inode.nlookup > 0 || inode.opens > 0 {
            return;
        }
        let is_known = inode.own.is_some_and(|(_, held)| held.is_live(clock) || keeps_expired);
        let pinned = inode.ext_if_any().and_then(|more| more.pin_handle.take());
        let needed = is_known || ino == root;
        if let Some(handle) = pinned {
            self.release_handle(handle);
        }
        if !needed && let Some(inode) = self.store.remove_inode(ino) {
            self.remember_forgotten(inode.id, inode.parent_entry);
        }
    }

    /// Clears timeouts of facts that the kernel is about to drop.
    fn clear_timeouts(&mut self, stale: &KernelInvalidation) {
        if let KernelInvalidation::Data { ino, length: 0, .. } | KernelInvalidation::Attr { ino } = stale
            && let Some(inode) = self.store.inode_mut(*ino)
        {
            inode.note_copy(UntimedCopy::Acls, false);
            if matches!(stale, KernelInvalidation::Data { .. }) {
                inode.note_copy(UntimedCopy::Target, false);
            }
        }
        let ino = match stale {
            KernelInvalidation::Attr { ino } => Some(*ino),
            KernelInvalidation::Entry { dir, name } | KernelInvalidation::RemovedDentry { dir, name } => {
                self.store.child(*dir, name).map(|child| child.id.ino)
            }
            KernelInvalidation::AllDentries(_) => {
                self.counters.epoch_planned += 1;
                None
            }
            KernelInvalidation::Data { .. } => None,
        };
        if let Some(inode) = ino.and_then(|ino| self.store.inode_mut(ino)) {
            inode.attr_valid_until = Time(0);
        }
    }

    /// Invalidates the kernel, then does `then`.
    pub(crate) fn invalidate(
        &mut self,
        mut stale: Vec<KernelInvalidation>,
        then: Option<crate::kernel::OnInvalidated>,
    ) -> InvalidationId {
        self.drop_untrusted(&mut stale);
        self.send_invalidation(stale, then)
    }

    pub(crate) fn send_invalidation(
        &mut self,
        stale: Vec<KernelInvalidation>,
        then: Option<crate::kernel::OnInvalidated>,
    ) -> InvalidationId {
        for one in &stale {
            self.clear_timeouts(one);
        }
        let (id, acknowledged) = (self.kernel.new_invalidation(), then.is_some());
        if let Some(then) = then {
            self.kernel.then(id, then);
        }
        let is_tracked = |i: &Inode| i.base.is_some() || i.old.is_some() || self.ungranted.has_any(i.id.ino);
        let tracked = |ino: &u64| self.store.inode(*ino).is_some_and(&is_tracked);
        let dropping = stale.iter().filter_map(|one| match one {
            KernelInvalidation::Data { ino, offset, length } if tracked(ino) => {
                Some((*ino, (*offset, *length) == (0, 0)))
            }
            _ => None,
        });
        let dropping: Vec<(u64, bool)> = dropping.collect();
        for (ino, _) in dropping.iter().filter(|(_, all)| *all) {
            let base = self.store.inode_mut(*ino).and_then(|inode| inode.ext_if_any()?.base.as_mut());
            base.into_iter().for_each(|base| base.full_drop = Some(id));
        }
        self.kernel.note_page_drops(id, dropping);
        self.enqueue_invalidation(id, stale, acknowledged);
        id
    }

    /// Invalidates before all queued invalidations. This leaves out pages that wait for the remote, so stale pages stay
    /// so until the invalidation after reconnection ([`Cache::drop_stale_pages`]).
    pub(crate) fn invalidate_first(
        &mut self,
        stale: Vec<KernelInvalidation>,
        urgency: Urgency,
    ) -> InvalidationId {
        for one in &stale {
            self.clear_timeouts(one);
        }
        let id = self.kernel.new_invalidation();
        self.out.push_back(Output::Invalidate { id, stale, urgency });
        id
    }
}
