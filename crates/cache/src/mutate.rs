//! Namespace changes and attribute changes.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, OpenParams};
use crate::grants::LiveGrant;
use crate::kernel::NotifyLevel;
use crate::op::{Caller, Fh, KernelInvalidation, Op, OpReply};
use crate::store::CachedEntry;
use crate::store::ChangeToken;
use nigh_types::{
    Attr, Call, DataVersion, Entry, Errno, Grant, Handle, Kind, LeaseScope, Name, NodeId, NodeRef, OpId,
    Reply, Response, SetAttr, Time,
};

impl Cache {
    /// Sends a call that makes `name` in `dir`; `call` gets the directory's reference.
    #[allow(clippy::too_many_arguments, reason = "a request, its name, how it is opened and its call")]
    pub(crate) fn create(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        dir: u64,
        name: Name,
        file: Option<OpenParams>,
        call: impl FnOnce(NodeRef, Name) -> Call,
    ) -> Option<OpReply> {
        let Some(place) = self.node_ref(dir) else { return Some(OpReply::Failed(Errno::STALE)) };
        let call = call(place, name.clone());
        self.send_for(now, op, caller, CallKind::Create { dir, name, file }, call)
    }

    pub(crate) fn on_create_reply(
        &mut self,
        now: Time,
        flight: &InflightCall,
        (dir, name): (u64, &Name),
        file: Option<OpenParams>,
        response: &Response,
    ) -> OpReply {
        let (entry, handle) = match &response.result {
            Ok(Reply::Created { entry, handle, existed }) => {
                if !existed && (entry.attr.is_dir() || entry.attr.nlink == 1) {
                    self.reset_reused_id(entry.id);
                }
                (entry.clone(), *handle)
            }
            Ok(_) => return OpReply::Failed(Errno::PROTO),
            Err(errno) => {
                if !says_nothing_of_names(*errno) {
                    self.discard_uncertain_name(dir, name, (*errno == Errno::EXIST).then_some(true));
                }
                return OpReply::Failed(*errno);
            }
        };
        let Some(dir_id) = self.store.id_of(dir) else { return OpReply::Failed(Errno::STALE) };
        self.apply_attrs_after(now, flight, response);
        // A further link: the entry of its only name so far must not go on answering for the inode.
        self.drop_attr(entry.id.ino);
        self.drop_uncovered(entry.id.ino, (entry.attr.nlink == 1).then_some(dir));
        self.note_earlier_name(&entry, (dir, name));
        self.note_local_dentry(flight, (dir, name), Some(entry.id));
        let held = self.apply_dentry(now, flight, dir_id, name, Some(&entry), &response.grants);
        self.note_local_inode(dir);
        let node = self.entry_reply(now, Some((dir, name)), entry.id, entry.attr, held, None);
        let under = self.apply_attr(now, flight, entry.id, entry.attr, &response.grants);
        self.keep_target(now, entry.id, entry.target.clone());
        self.learn_no_xattrs(now, flight, &entry);
        self.note_local_inode(entry.id.ino);
        self.begin_new_directory(now, flight, &entry, response);
        let attr_valid = self.attr_timeout(now, entry.id.ino, &entry.attr, under);
        let node = crate::op::Node { attr_valid, ..node };
        if flight.waiters.is_empty() {
            self.handle_forget(node.number, 1);
            if let Some(handle) = handle {
                self.release_handle(handle);
            }
            return OpReply::Done;
        }
        match (file, handle) {
            (Some(file), Some(handle)) => {
                self.begin_data_grant(now, flight, entry.id, Some(ChangeToken::of(&entry.attr)), response);
                OpReply::Created(node, self.opened_file(entry.id, file, Some(handle), false))
            }
            (Some(_), None) => OpReply::Failed(Errno::PROTO),
            (None, _) => OpReply::Node(node),
        }
    }

    /// Keeps an inode's earlier name when it gets another. Holders of a dentry that look no name up (`O_PATH`,
    /// overlayfs) reach the inode by it once the later name is gone; the remote pins regular files.
    fn note_earlier_name(&mut self, entry: &Entry, at: (u64, &Name)) {
        let inode = self.store.inode_of_mut(entry.id);
        let Some(inode) = inode.filter(|_| entry.attr.nlink > 1 && entry.attr.kind() != Kind::File) else {
            return;
        };
        if let Some(home) = inode.parent_entry.clone().filter(|(dir, name)| (*dir, name) != at) {
            // The first name stays longest where names come and go, like the whiteout that overlayfs links.
            inode.ext_mut().earlier_name.get_or_insert_with(|| Box::new(home));
        }
    }

    /// Forgets an earlier name that leads to the inode no more.
    fn forget_earlier_name(&mut self, node: NodeId, at: (u64, &Name)) {
        let inode = self.store.inode_of_mut(node);
        let Some(more) = inode.and_then(|inode| inode.ext_if_any()) else { return };
        more.earlier_name.take_if(|from| (from.0, &from.1) == at);
    }

    /// Resets a new inode's record. Without birth times an inode that is gone may have had the same id.
    fn reset_reused_id(&mut self, id: NodeId) {
        if self.store.has_dir(id.ino) {
            self.drop_dir_names(id.ino);
        }
        self.keep_old_nodeid(id);
        self.keep_removed_nodeid(id);
        if let Some(inode) = self.store.inode_mut(id.ino) {
            if inode.opens > 0 {
                // Files opened under this number are not of the new inode, whatever its id says.
                self.open.files.detach(id.ino);
            }
            inode.reset(id);
            inode.nlookup += self.kernel.nodeids.restore(id);
        }
    }

    /// Begins a new directory's lease if the reply grants it: the directory is known to be empty.
    fn begin_new_directory(&mut self, now: Time, flight: &InflightCall, entry: &Entry, response: &Response) {
        let granted =
            flight.granted(&response.grants, entry.id, LeaseScope::Directory).filter(|_| entry.attr.is_dir());
        // Another client may have made a name in it by now, or a local caller before the reply to mkdir.
        let ino = entry.id.ino;
        let is_empty = !flight.race_log.has_remote_change_in(ino)
            && flight.race_log.local_dentries(ino).next().is_none();
        let granted = granted.filter(|_| is_empty && !self.calls.has_local_change_in(ino));
        let held = granted.map(|g| LiveGrant::begin(g, flight.sent)).filter(|h| h.is_live(now));
        if let Some(held) = held {
            let directory = self.directory(entry.id);
            directory.forget();
            directory.held = Some(held);
            directory.complete = true;
        }
    }

    pub(crate) fn on_tmpfile_reply(
        &mut self,
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
            self.release_handle(handle);
            return OpReply::Done;
        }
        let node = self.entry_reply(now, None, entry.id, entry.attr, None, None);
        self.apply_attrs_after(now, flight, response);
        self.apply_attr(now, flight, entry.id, entry.attr, &response.grants);
        self.begin_data_grant(now, flight, entry.id, Some(ChangeToken::of(&entry.attr)), response);
        OpReply::Created(node, self.opened_file(entry.id, file, Some(handle), false))
    }

    pub(crate) fn unlink(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        dir: u64,
        name: Name,
    ) -> Option<OpReply> {
        let Some(place) = self.node_ref(dir) else { return Some(OpReply::Failed(Errno::STALE)) };
        self.pin_open_at(dir, &name);
        let call = Call::Unlink { dir: place, name: name.clone(), keep: None };
        self.send_for(now, op, caller, CallKind::Remove { dir, name }, call)
    }

    pub(crate) fn rmdir(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        dir: u64,
        name: Name,
    ) -> Option<OpReply> {
        let Some(place) = self.node_ref(dir) else { return Some(OpReply::Failed(Errno::STALE)) };
        let call = Call::Rmdir { dir: place, name: name.clone() };
        self.send_for(now, op, caller, CallKind::Remove { dir, name }, call)
    }

    pub(crate) fn on_remove_reply(
        &mut self,
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
                    self.discard_uncertain_name(dir, name, says_exists(*errno));
                }
                return OpReply::Failed(*errno);
            }
        };
        if !flight.waiters.is_empty() {
            self.alias_live_directory(flight.victim_dir, Some(node));
        }
        self.on_name_removed(node, (dir, name), kept);
        self.unbind(now, flight, (dir, name), response);
        self.apply_attrs_after(now, flight, response);
        self.note_local_inode(dir);
        self.note_local_inode(node.ino);
        OpReply::Done
    }

    fn unbind(&mut self, now: Time, flight: &InflightCall, (dir, name): (u64, &Name), response: &Response) {
        self.note_local_dentry(flight, (dir, name), None);
        if let Some(dir_id) = self.store.id_of(dir) {
            self.apply_dentry(now, flight, dir_id, name, None, &response.grants);
        }
    }

    /// Handles an inode's loss of its name.
    fn on_name_removed(&mut self, node: NodeId, (dir, name): (u64, &Name), kept: Option<Handle>) {
        let last = self.last_attr(node).or_else(|| self.kernel.recent_dirs.attr_of(node));
        self.invalidate_if_unforeseen(node, (dir, name));
        self.forget_earlier_name(node, (dir, name));
        self.drop_dir_names(node.ino);
        if self.store.id_of(node.ino) == Some(node) {
            self.drop_uncovered(node.ino, None);
        }
        let Some(inode) = self.store.inode_of_mut(node) else {
            if let Some(handle) = kept {
                self.release_handle(handle);
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
            Some(handle) => self.release_handle(handle),
            None => {}
        }
        if is_open && self.kernel.can_notify() {
            // The kernel keeps the attributes under the name's grant (`fuse_entry_unlinked` but sets the ctime).
            self.invalidate(vec![KernelInvalidation::Attr { ino: node.ino }], None);
        }
    }

    /// Invalidates an inode's attributes if the kernel does not know that a local change took its name: it knows if it
    /// had a dentry of that name for the inode.
    fn invalidate_if_unforeseen(&mut self, node: NodeId, (dir, name): (u64, &Name)) {
        let row = self.store.row(dir, name);
        let foreseen = row.and_then(|r| r.child).is_some_and(|c| c.id == node);
        let known = self.store.inode(node.ino).is_some_and(|i| i.id == node && i.nlookup > 0);
        if known && !foreseen && self.kernel.can_notify() {
            self.invalidate(vec![KernelInvalidation::Attr { ino: node.ino }], None);
        }
    }

    /// Returns the last known attributes of an inode, granted or not.
    fn last_attr(&self, node: NodeId) -> Option<Attr> {
        let inode = self.store.inode_of(node)?;
        if let Some((attr, _)) = inode.own {
            return Some(attr);
        }
        let (dir, name) = inode.parent_entry.as_ref()?;
        let row = self.store.row(*dir, name)?;
        row.child.filter(|c| c.id == node).map(CachedEntry::attr)
    }

    pub(crate) fn rename(&mut self, now: Time, op: OpId, caller: Caller, what: Op) -> Option<OpReply> {
        let Op::Rename { from, name, to, new_name, no_replace, exchange, whiteout } = what else {
            return None;
        };
        let (Some(from_place), Some(to_place)) = (self.node_ref(from), self.node_ref(to)) else {
            return Some(OpReply::Failed(Errno::STALE));
        };
        // Both files will stand under other grants.
        self.pin_open_at(from, &name);
        self.pin_open_at(to, &new_name);
        let keep = if exchange { None } else { self.file_at(to, &new_name) };
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
        self.send_for(
            now,
            op,
            caller,
            CallKind::Rename { from, name, to, new_name, exchange, whiteout },
            call,
        )
    }

    /// Returns the file that a rename replaces, for the remote to pin: an open by its name meanwhile must not fail.
    fn file_at(&self, dir: u64, name: &Name) -> Option<NodeId> {
        let row = self.store.row(dir, name);
        let child = row.and_then(|r| r.child).filter(|c| c.attr().kind() == Kind::File);
        let open = || self.open_without_handle_at(dir, name).and_then(|ino| self.store.id_of(ino));
        child.map(|c| c.id).or_else(open)
    }

    pub(crate) fn on_rename_reply(
        &mut self,
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
            Err(errno) => return self.on_rename_error(old, new, *errno),
        };
        if !*exchange && replaced == Some(moved) {
            // Two names of one inode: rename(2) leaves both.
            kept.into_iter().for_each(|handle| self.release_handle(handle));
            return OpReply::Done;
        }
        if !flight.waiters.is_empty() {
            self.alias_live_directory(flight.victim_dir, replaced);
        }
        let moved_child = self.child_for(flight, moved, old, response);
        let other = replaced.filter(|_| *exchange);
        left.into_iter().for_each(|left| self.reset_reused_id(left));
        // A whiteout is applied like an exchanged inode. The kernel has no dentry for the old name (`d_move`).
        let other_child = other.or(left).and_then(|id| self.child_for(flight, id, new, response));
        if let Some(replaced) = replaced.filter(|_| !*exchange) {
            self.on_name_removed(replaced, new, kept);
        }
        self.apply_namespace_change(now, flight, old, other_child, &response.grants);
        if let Some(id) = self.store.id_of(*from).filter(|_| *whiteout && left.is_none()) {
            self.discard_uncertain_dir(id);
        }
        self.apply_namespace_change(now, flight, new, moved_child, &response.grants);
        self.forget_earlier_name(moved, old);
        self.invalidate_moved(now, (old, moved), new);
        self.move_parent_entry(moved, new);
        if let Some(other) = other {
            self.invalidate_moved(now, (new, other), old);
            self.move_parent_entry(other, old);
        }
        self.apply_attrs_after(now, flight, response);
        for ino in [*from, *to, moved.ino].into_iter().chain(replaced.or(left).map(|r| r.ino)) {
            self.note_local_inode(ino);
        }
        OpReply::Done
    }

    fn on_rename_error(&mut self, old: (u64, &Name), new: (u64, &Name), errno: Errno) -> OpReply {
        if !says_nothing_of_names(errno) {
            // ENOENT is about the old name, EEXIST and ENOTEMPTY about the new one.
            let missing = errno == Errno::NOENT;
            self.discard_uncertain_name(old.0, old.1, Some(!missing));
            if !missing {
                self.discard_uncertain_name(new.0, new.1, says_exists(errno));
            }
        }
        OpReply::Failed(errno)
    }

    /// Returns whether the kernel's dentry of a name, if there is one, leads to this inode.
    fn kernel_dentry_leads_to(&self, id: NodeId, (dir, name): (u64, &Name)) -> bool {
        let inode = self.store.inode(id.ino).filter(|inode| inode.id == id && inode.nlookup > 0);
        inode.is_some_and(|inode| inode.is_at(dir, name))
    }

    /// Invalidates a moved inode's dentry and attributes, before the parent entry is moved. The kernel keeps the old
    /// dentry's timeouts, which hold under the new name only if one directory lease covers both names, no update of the
    /// new name is in progress, and the old dentry led to the moved inode. Otherwise no recall covers them.
    fn invalidate_moved(&mut self, now: Time, (old, id): ((u64, &Name), NodeId), (dir, name): (u64, &Name)) {
        let cookie = self.store.cookie(name);
        let row = self.live_directory(now, dir).and_then(|(d, _)| d.rows.find(cookie, name.as_bytes()));
        let is_there = row.and_then(|row| row.child).is_some_and(|child| child.id == id);
        if let Some(inode) = self.store.inode_of_mut(id) {
            // The timeout is unknown if a further name was looked up since.
            inode.entry_valid_until = Time::FAR;
        }
        let (carried, goes) = (self.kernel_dentry_leads_to(id, old), self.kernel.is_flushing_dentries());
        if is_there && carried && !goes && old.0 == dir && !self.store.suspended.has_name(dir, name) {
            return;
        }
        let mut stale = Vec::new();
        if self.kernel.level() == NotifyLevel::All || goes {
            stale.push(KernelInvalidation::Entry { dir, name: name.clone() });
        }
        if self.kernel.can_notify() && self.store.inode(id.ino).is_some_and(|i| i.nlookup > 0) {
            stale.push(KernelInvalidation::Attr { ino: id.ino });
        }
        if !stale.is_empty() {
            self.invalidate(stale, None);
        }
    }

    /// Returns what is known of a child that changes its name: its old entry, else the reply's attributes.
    fn child_for(
        &self,
        flight: &InflightCall,
        id: NodeId,
        (dir, name): (u64, &Name),
        response: &Response,
    ) -> Option<CachedEntry> {
        let row = self.store.row(dir, name);
        let attr = response.after.iter().find(|(node, _)| *node == id).map(|(_, attr)| *attr);
        if let Some(child) = row.and_then(|r| r.child).filter(|c| c.id == id) {
            // An entry that was not the parent entry was not updated for new xattrs. For a name under update the commit
            // says what it leads to, and nothing of the old inode's xattrs.
            let is_home = self.store.inode(id.ino).is_none_or(|inode| inode.is_at(dir, name));
            let is_held =
                self.store.suspended.has_name(dir, name) || flight.race_log.is_remotely_changed(dir, name);
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
        &mut self,
        now: Time,
        flight: &InflightCall,
        (dir, name): (u64, &Name),
        child: Option<CachedEntry>,
        grants: &[Grant],
    ) {
        let leads_to = child.as_ref().map(|child| child.id);
        self.note_local_dentry(flight, (dir, name), leads_to);
        let pushed = flight.race_log.is_remotely_changed(dir, name);
        let crossed = pushed || self.is_change_ambiguous(flight, dir, name, leads_to);
        if let Some(id) =
            self.store.id_of(dir).filter(|id| crossed || flight.recalled(*id, LeaseScope::Directory))
        {
            return self.discard_uncertain_dir(id);
        }
        if let Some(id) = self.store.id_of(dir) {
            self.apply_leased_dentry(now, flight, id, (name, leads_to), grants);
            if flight.may_predate_lease(id, grants) {
                return self.discard_if_contradicted(id, name, leads_to);
            }
        }
        let cookie = self.store.cookie(name);
        let Some((directory, _)) = self.live_directory(now, dir) else { return };
        if child.is_none() && directory.complete {
            directory.rows.remove(cookie, name.as_bytes());
        } else {
            directory.rows.insert(cookie, name.as_bytes(), child);
        }
        self.store.recount(dir);
    }

    /// Makes a listed name the parent entry of an inode with one name.
    pub(crate) fn note_listed_at(&mut self, id: NodeId, (dir, name): (u64, &Name)) {
        let inode = self.store.inode_of_mut(id);
        if let Some(inode) = inode.filter(|i| !i.is_at(dir, name)) {
            inode.attr_valid_until = Time(0);
            if inode.nlookup > 0 {
                // The kernel may have an old dentry under this name, whose entry timeout is not known any more.
                inode.entry_valid_until = Time::FAR;
            }
            self.move_parent_entry(id, (dir, name));
        }
    }

    fn move_parent_entry(&mut self, id: NodeId, (dir, name): (u64, &Name)) {
        let Some(inode) = self.store.inode_of(id) else { return };
        if !inode.is_at(dir, name) {
            self.set_parent_entry(id, (dir, name));
        }
        self.drop_uncovered(id.ino, Some(dir));
    }

    pub(crate) fn set_attr(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        (ino, fh): (u64, Option<Fh>),
        set: SetAttr,
    ) -> Option<OpReply> {
        if set.is_empty() {
            return self.set_attr_empty(now, op, caller, ino);
        }
        if self.is_failed_append_rollback(fh, &set) {
            return self.attributes(now, op, caller, ino);
        }
        let who_may = set.mode.is_some() || set.uid.is_some() || set.gid.is_some();
        if who_may {
            self.pin_open(ino);
        }
        let Some((node, handle)) = self.handle_for(ino, fh) else {
            return Some(OpReply::Failed(Errno::STALE));
        };
        // A handle is sent only where it makes a difference: truncation depends on the access mode of the open.
        let own = fh.and_then(|fh| self.open.files.get(fh)).and_then(|f| f.handle);
        let handle = if set.size.is_some() { own } else { handle };
        let call = Call::SetAttr { node, handle, set };
        self.send_for(now, op, caller, CallKind::Change { ino, xattrs: set.mode.is_some() }, call)
    }

    /// Handles the reply to a change of attributes or xattrs.
    pub(crate) fn on_change_reply(
        &mut self,
        now: Time,
        flight: &InflightCall,
        (ino, xattrs): (u64, bool),
        response: &Response,
    ) -> OpReply {
        self.apply_attrs_after(now, flight, response);
        if xattrs {
            self.drop_xattrs(ino);
        }
        let answer = match response.result {
            Ok(Reply::Attr(id, attr)) => {
                self.note_local_write(now, ino, response);
                self.note_page_base(now, Some(flight), ino, DataVersion::of(&attr));
                let under = self.apply_attr(now, flight, id, attr, &response.grants);
                OpReply::Attr(id, attr, self.attr_timeout(now, id.ino, &attr, under))
            }
            Ok(_) => OpReply::Failed(Errno::PROTO),
            Err(errno) => {
                if !matches!(errno, Errno::PERM | Errno::ACCES | Errno::ROFS | Errno::NODATA | Errno::EXIST) {
                    self.drop_attr(ino);
                }
                OpReply::Failed(errno)
            }
        };
        self.note_local_inode(ino);
        answer
    }
}

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

#[cfg(test)]
mod tests;
