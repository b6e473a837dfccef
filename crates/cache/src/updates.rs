//! Updates in place: other clients' changes while the grants go on, first prepared, then committed. See
//! docs/decisions/0014-pushes.md.
//!
//! In between the cache serves no suspended fact. A name or attributes are asked of the remote like any unknown fact; a
//! listing waits, for [`LISTINGS_WAIT`] at the most.

use crate::cache::Cache;
use crate::calls::{CallKind, RaceLog};
use crate::inotify::RemoteUpdate;
use crate::kernel::NotifyLevel;
use crate::kernel::OnInvalidated;
use crate::op::{Caller, KernelInvalidation, Op, OpReply};
use crate::store::CachedEntry;
use crate::store::Directory;
use nigh_types::{
    Attr, Call, Entry, LeaseScope, Name, NodeId, OpId, Time, UpdateCommit, UpdatePrepare, UpdateScope,
    UpdatedFact,
};
use std::collections::BTreeSet;

impl Cache {
    /// Handles the preparation of a remote change: suspends the facts, and acknowledges once the kernel has none of
    /// them.
    pub(crate) fn handle_update_prepare(&mut self, now: Time, hold: UpdatePrepare) {
        tracing::debug!(target: "nigh::hold", facts = hold.facts.len());
        let id = hold.id;
        let mut stale = Vec::new();
        for held in &hold.facts {
            match held.covers {
                LeaseScope::Directory => {
                    for name in &held.names {
                        self.pin_open_at(held.node.ino, name);
                        stale.extend(self.invalidations_for_name(now, held.node, name));
                    }
                }
                LeaseScope::Attributes => {
                    self.pin_open(held.node.ino);
                    stale.extend(self.invalidations_for_inode(held.node));
                }
                LeaseScope::Data | LeaseScope::Dentry | LeaseScope::NegativeDentry => {}
            }
        }
        self.store.suspended.begin(hold);
        self.invalidate_then(stale, OnInvalidated::Acknowledge(id));
    }

    /// Returns what the kernel holds of one name under its directory lease. Calls in flight may return the name's old
    /// state.
    fn invalidations_for_name(&mut self, now: Time, node: NodeId, name: &Name) -> Vec<KernelInvalidation> {
        let mut stale = self.invalidations_for_entry(now, node, name);
        // A data grant may outlive the entry (page 0004, rule 1), so open files are found by their grants.
        let files = self.open_files_under((node, LeaseScope::Directory)).into_iter();
        let files: Vec<NodeId> =
            files.filter(|file| !self.is_under_other_name(now, *file, node, name)).collect();
        stale.extend(files.into_iter().flat_map(|file| self.recall_data(file)));
        stale
    }

    /// Returns whether a file is known under another name of the directory, and not under this one. A file that is
    /// being moved may already be here.
    fn is_under_other_name(&self, now: Time, file: NodeId, dir: NodeId, name: &Name) -> bool {
        let lives = |d: &&Directory| d.id == dir && d.held.is_some_and(|held| held.is_live(now));
        let Some(directory) = self.store.dir(dir.ino).filter(lives) else { return false };
        let leads_there = |name: &Name| {
            let row = directory.rows.find(self.store.cookie(name), name.as_bytes());
            row.and_then(|row| row.child).is_some_and(|child| child.id == file)
        };
        let home = self.store.inode(file.ino).and_then(|inode| inode.parent_entry.as_ref());
        let home = home.filter(|(at, home)| *at == dir.ino && home != name);
        let stays = |home: &Name| leads_there(home) && !self.calls.is_name_in_flight(dir.ino, home);
        home.is_some_and(|(_, home)| stays(home)) && !leads_there(name)
    }

    /// Returns the dentry, attributes and listing of one name, without pages of files.
    fn invalidations_for_entry(&mut self, now: Time, node: NodeId, name: &Name) -> Vec<KernelInvalidation> {
        let dir = node.ino;
        self.calls.mark_remote_name(dir, name, None);
        let cookie = self.store.cookie(name);
        let Some(directory) = self.store.dir_of_mut(node) else { return Vec::new() };
        directory.note_remote_change(now);
        let Some(held) = directory.held else { return Vec::new() };
        let mut stale = Vec::new();
        if directory.kernel_version.take().is_some() {
            stale.push(KernelInvalidation::Data { ino: dir, offset: 0, length: 0 });
        }
        let row = directory.rows.find(cookie, name.as_bytes());
        let child = row.and_then(|row| row.child).map(|child| (child.id, child.attr()));
        let mut known = self.kernel.take_negative_dentry(dir, name);
        if let Some((id, attr)) = child {
            self.calls.mark_remote_inode(id.ino);
            if let Some(inode) = self.store.inode_of_mut(id) {
                // The kernel may have an old dentry under another name.
                known |= inode.nlookup > 0 && (now < inode.entry_valid_until || !inode.is_at(dir, name));
                if attr.covered_by_parent() {
                    inode.drop_xattrs();
                    stale.extend((inode.nlookup > 0).then_some(KernelInvalidation::Attr { ino: id.ino }));
                }
            }
        }
        tracing::trace!(target: "nigh::hold", dir, name = %name.as_bytes().escape_ascii(), known, there = child.is_some());
        if known && self.kernel.level().gives_dentries(&held) {
            stale.push(KernelInvalidation::Entry { dir, name: name.clone() });
            self.store.suspended.note_expired(dir, name);
            self.name_dropped(dir, name, child.map(|(id, _)| id));
        }
        stale
    }

    /// Records that the kernel no longer trusts a dentry, until the next reply about it.
    fn name_dropped(&mut self, dir: u64, name: &Name, led_to: Option<NodeId>) {
        let inode = led_to.and_then(|id| self.store.inode_of_mut(id));
        if let Some(inode) = inode.filter(|inode| inode.is_at(dir, name)) {
            inode.entry_valid_until = Time(0);
        }
    }

    /// Returns what the kernel holds of an inode under its own grant.
    fn invalidations_for_inode(&mut self, node: NodeId) -> Vec<KernelInvalidation> {
        self.calls.mark_recalled((node, LeaseScope::Attributes), true);
        let mut stale = self.invalidations_of_pages((node, LeaseScope::Attributes));
        if let Some(inode) = self.store.inode_of_mut(node) {
            inode.drop_xattrs();
            stale.extend((inode.nlookup > 0).then_some(KernelInvalidation::Attr { ino: node.ino }));
        }
        stale
    }

    /// Handles a commit: the suspended facts change to these.
    pub(crate) fn handle_update_commit(&mut self, now: Time, commit: UpdateCommit) {
        let Some(held) = self.store.suspended.end(commit.id) else { return };
        self.counters.updated_in_place += 1;
        let mut left: Vec<(NodeId, Option<Name>)> = facts_of(&held).collect();
        let mut pushed = RemoteUpdate::default();
        let (mut replaced, mut found) = (Vec::new(), BTreeSet::new());
        for fact in commit.facts {
            let of = match &fact {
                UpdatedFact::Name { dir, name, .. } => (*dir, Some(name.clone())),
                UpdatedFact::Attr { node, .. } => (*node, None),
            };
            // Facts that were not suspended are ignored.
            let Some(at) = left.iter().position(|held| *held == of) else { continue };
            left.swap_remove(at);
            match fact {
                UpdatedFact::Name { dir, name, entry } => {
                    let old = self.commit_name(now, dir, &name, entry.as_ref());
                    pushed.name(dir.ino, &name);
                    found.extend(entry.map(|entry| entry.id));
                    replaced.extend(old.map(|old| (dir.ino, name, old)));
                }
                UpdatedFact::Attr { node, attr } => {
                    self.commit_attr(now, node, attr);
                    pushed.attr(node, attr);
                }
            }
        }
        self.note_remote_update(&pushed);
        let names = facts_of(&held).filter_map(|(node, name)| Some((node.ino, name?)));
        let expired: BTreeSet<(u64, Name)> =
            names.filter(|name| self.store.suspended.take_expired(name)).collect();
        replaced.retain(|(dir, name, _)| expired.contains(&(*dir, name.clone())));
        // A moved inode keeps its dentry: the kernel finds it under its old path until the next lookup.
        replaced.retain(|(_, _, old)| !found.contains(old));
        self.drop_replaced(replaced);
        for (node, name) in left {
            match name {
                Some(name) if !self.store.suspended.has_name(node.ino, &name) => {
                    self.look_up_uncommitted(now, node, name)
                }
                None if !self.store.suspended.has_inode(node.ino) => self.discard_uncertain_attr(node),
                _ => {}
            }
        }
        for directory in held.iter().filter(|held| held.covers == LeaseScope::Directory) {
            if !self.store.suspended.has_names(directory.node.ino) {
                self.resume_listings(now, directory.node.ino);
            }
        }
        self.trim(now);
    }

    /// Looks up a name that a commit left open: its state could not be told, or it did not change in the end.
    fn look_up_uncommitted(&mut self, now: Time, dir: NodeId, name: Name) {
        if self.live_directory(now, dir.ino).is_none_or(|(directory, _)| directory.id != dir) {
            return;
        }
        let Some(place) = self.node_ref(dir.ino) else { return self.discard_uncertain_dir(dir) };
        self.store.suspended.begin_lookup(dir.ino, &name);
        let purpose = CallKind::Lookup { dir: dir.ino, name: name.clone() };
        let call = self.send(now, None, purpose.clone(), Call::Lookup { dir: place, name });
        self.calls.enter_joins(call, purpose);
    }

    /// Handles the reply to a lookup of a suspended name. `kept`: a fact was made of it.
    pub(crate) fn on_suspended_lookup(&mut self, now: Time, dir: u64, name: &Name, kept: bool) {
        if !self.store.suspended.end_lookup(dir, name) {
            return;
        }
        if kept {
            let mut pushed = RemoteUpdate::default();
            pushed.name(dir, name);
            self.note_remote_update(&pushed);
        }
        // If another update of the name is in progress, its commit gives the new state.
        if !kept
            && !self.store.suspended.has_name(dir, name)
            && let Some(id) = self.store.id_of(dir)
        {
            self.discard_uncertain_dir(id);
        }
        if !self.store.suspended.has_names(dir) {
            self.resume_listings(now, dir);
        }
    }

    /// Invalidates dentries that lead to nothing or to another inode by now: open files of the old inode must not be
    /// found by that path.
    fn drop_replaced(&mut self, replaced: Vec<(u64, Name, NodeId)>) {
        let is_known = |id: &NodeId| self.store.inode(id.ino).is_some_and(|inode| inode.nlookup > 0);
        let dropped = replaced.into_iter().filter(|(_, _, old)| is_known(old));
        let stale: Vec<KernelInvalidation> =
            dropped.map(|(dir, name, _)| KernelInvalidation::RemovedDentry { dir, name }).collect();
        if self.kernel.level() == NotifyLevel::All && !stale.is_empty() {
            self.invalidate(stale, None);
        }
    }

    /// Returns whether a dentry that other clients removed or replaced may be dropped: no later reply bound the name,
    /// and no local change of the directory that may bind it is in flight.
    #[must_use]
    pub fn is_dentry_removed(&self, dir: u64, name: &Name) -> bool {
        let row = self.store.row(dir, name);
        let child = row.and_then(|row| row.child).and_then(|child| self.store.inode(child.id.ino));
        let is_told = child.is_some_and(|inode| inode.nlookup > 0 && inode.is_at(dir, name));
        !is_told && !self.is_locked(dir)
    }

    /// Applies a committed name. Returns the inode that it led to before, if that is another one.
    fn commit_name(&mut self, now: Time, dir: NodeId, name: &Name, entry: Option<&Entry>) -> Option<NodeId> {
        let child = entry.map(CachedEntry::new);
        tracing::trace!(target: "nigh::commit", dir = dir.ino, name = %name.as_bytes().escape_ascii(), there = child.is_some());
        self.mark_name_in_flight(dir.ino, name, entry.map(|entry| entry.id));
        if let Some(entry) = entry {
            self.calls.mark_remote_inode(entry.id.ino);
            self.calls.mark_attr_learned(entry.id.ino);
        }
        let cookie = self.store.cookie(name);
        let gaps = self
            .live_directory(now, dir.ino)
            .filter(|(d, _)| d.id == dir)
            .map(|(directory, _)| directory.lease_generation);
        self.calls.mark_remote_name(dir.ino, name, gaps);
        let directory = self.store.dir_mut(dir.ino).filter(|_| gaps.is_some())?;
        directory.version += 1;
        let old = if child.is_none() && directory.complete {
            directory.rows.remove(cookie, name.as_bytes())
        } else {
            directory.rows.insert(cookie, name.as_bytes(), child)
        };
        self.store.recount(dir.ino);
        if let Some(entry) = entry {
            self.commit_child(now, (dir.ino, name), entry);
        }
        old.flatten().map(|old| old.id).filter(|old| entry.is_none_or(|entry| entry.id != *old))
    }

    /// Applies a committed child, as far as the cache keeps more than its entry. (Attributes under a grant of its own
    /// have a fact of their own.)
    fn commit_child(&mut self, now: Time, home: (u64, &Name), entry: &Entry) {
        self.drop_other_version(now, entry.id, &entry.attr);
        let Some(inode) = self.store.inode_of_mut(entry.id) else {
            return;
        };
        inode.drop_xattrs();
        self.keep_target(now, entry.id, entry.target.clone());
        // A hard link's other names may be equally right.
        if entry.attr.covered_by_parent() || entry.attr.is_dir() {
            self.note_listed_at(entry.id, home);
        }
    }

    fn commit_attr(&mut self, now: Time, node: NodeId, attr: Attr) {
        self.calls.mark_remote_inode(node.ino);
        self.calls.mark_attr_learned(node.ino);
        self.drop_other_version(now, node, &attr);
        let Some(inode) = self.store.inode_of_mut(node) else { return };
        inode.drop_xattrs();
        if let Some((own, held)) = inode.ext_if_any().and_then(|more| more.own.as_mut())
            && held.is_live(now)
        {
            *own = attr;
        }
    }

    /// Returns whether the known state of a name is newer than a listing that was sent before.
    pub(crate) fn is_newer_than_listing(&self, seen: &RaceLog, dir: u64, name: &Name) -> bool {
        let known = seen.remote_names.get(&dir).and_then(|names| names.get(name));
        known.is_some_and(|known| self.is_known(dir, *known))
    }

    /// Returns whether the directory has had no gap since.
    fn is_known(&self, dir: u64, since: Option<u64>) -> bool {
        since.is_some() && since == self.store.dir(dir).map(|directory| directory.lease_generation)
    }

    /// Returns whether other clients changed names whose state has been unknown since, so that a listing sent before
    /// may show their old or their new state.
    pub(crate) fn is_outdated(&self, seen: &RaceLog, dir: u64) -> bool {
        let mut names = seen.remote_names.get(&dir).into_iter().flatten();
        names.any(|(name, known)| !self.store.suspended.has_name(dir, name) && !self.is_known(dir, *known))
    }

    /// Makes a listing wait for the commit of a suspended name.
    pub(crate) fn wait_for_commit(
        &mut self,
        now: Time,
        id: OpId,
        caller: Caller,
        dir: u64,
        op: Op,
    ) -> Option<OpReply> {
        self.counters.misses += 1;
        self.store.suspended.wait(now, id, caller, dir, op);
        None
    }

    fn resume_listings(&mut self, now: Time, dir: u64) {
        for (id, caller, op) in self.store.suspended.take_waiting(dir) {
            if let Some(answer) = self.start(now, id, caller, op) {
                self.counters.waits += 1;
                self.reply(id, answer);
            }
        }
        // A listing that waits again keeps its start time.
        self.store.suspended.forget_if_idle(dir);
    }

    /// Gives back directories whose listings have waited for long enough, and lists them anew.
    pub(crate) fn give_back_unfinished(&mut self, now: Time) {
        while let Some(dir) = self.store.suspended.overdue(now) {
            if let Some((id, held)) = self.store.dir(dir).and_then(|d| Some((d.id, d.held?))) {
                self.pin_open_below(dir);
                self.note_grant_returned(id, held.id);
                let stale = self.invalidations_under_lease(id);
                self.drop_dir_names(dir);
                self.invalidate_then(stale, OnInvalidated::Return(vec![held.id]));
            }
            self.store.suspended.give_up(dir);
            self.resume_listings(now, dir);
        }
    }
}

/// Splits suspended facts into single ones.
fn facts_of(held: &[UpdateScope]) -> impl Iterator<Item = (NodeId, Option<Name>)> + '_ {
    held.iter().flat_map(|held| {
        let names = held.names.iter().map(|name| (held.node, Some(name.clone())));
        let whole = (held.covers == LeaseScope::Attributes).then_some((held.node, None));
        names.chain(whole)
    })
}

#[cfg(test)]
mod tests;
