//! Directory leases and dentry leases: the names of a directory under its lease, and single names under grants of their
//! own.

use crate::cache::Cache;
use crate::calls::InflightCall;
use crate::config::OnDisconnect;
use crate::grants::LiveGrant;
use crate::op::KernelInvalidation;
use crate::store::CachedEntry;
use crate::store::Directory;
use nigh_types::{Bug, Entry, Grant, LeaseScope, Name, NodeId, Time, planted};

impl Cache {
    /// Returns a directory with its live lease; ends the lease if its deadline has passed.
    pub(crate) fn live_directory(&mut self, now: Time, dir: u64) -> Option<(&mut Directory, LiveGrant)> {
        if self.store.dir(dir)?.held.is_some_and(|h| !h.is_live(now)) {
            if self.config.on_disconnect == OnDisconnect::Stale {
                // Stale mode may serve the names later (see `drop_expired_names`); until then no request gets them.
                self.detach_listings(dir);
            } else {
                self.end_directory_lease(dir);
            }
            return None;
        }
        let directory = self.store.dir_mut(dir)?;
        directory.note_use(now);
        let held = directory.held?;
        Some((directory, held))
    }

    /// Applies a name from a reply to the directory's facts, if a grant covers it. `None`: it does not exist.
    pub(crate) fn apply_dentry(
        &mut self,
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
                self.discard_uncertain_dir(dir);
            }
            return None;
        }
        let id = entry.map(|entry| entry.id);
        let crossed = match flight.sequence {
            Some(_) => self.is_change_ambiguous(flight, dir.ino, name, id),
            None => flight.is_contradicted(dir.ino, name, id),
        };
        if crossed || flight.recalled(dir, LeaseScope::Directory) {
            if crossed || flight.is_mutation() {
                self.discard_uncertain_dir(dir);
            }
            return None;
        }
        if !flight.is_mutation() {
            self.mark_name_in_flight(dir.ino, name, id);
        }
        let single = self.apply_leased_dentry(now, flight, dir, (name, id), grants);
        if !flight.is_mutation() && single.is_some() {
            return single;
        }
        let row = self.apply_dir_entry(now, flight, dir, name, entry, grants);
        row.or(single)
    }

    /// Applies a name under a grant for that name alone. If the directory's entries disagree, they are older and are
    /// dropped.
    pub(crate) fn apply_leased_dentry(
        &mut self,
        now: Time,
        flight: &InflightCall,
        dir: NodeId,
        (name, id): (&Name, Option<NodeId>),
        grants: &[Grant],
    ) -> Option<LiveGrant> {
        let covers = if id.is_some() { LeaseScope::Dentry } else { LeaseScope::NegativeDentry };
        let fresh = flight.granted(grants, dir, covers).map(|grant| LiveGrant::begin(grant, flight.sent));
        let Some(held) = fresh.filter(|held| held.is_live(now)) else {
            if let Some(directory) = self.store.dir_mut(dir.ino) {
                directory.dentry_leases.remove(name);
            }
            return None;
        };
        let cookie = self.store.cookie(name);
        if !flight.is_mutation()
            && let Some((directory, _)) = self.live_directory(now, dir.ino)
        {
            let listed = directory.find(cookie, name);
            if listed.is_some_and(|child| child.map(|child| child.id) != id) {
                self.end_directory_lease(dir.ino);
            }
        }
        if let Some(id) = id.filter(|_| !flight.is_mutation()) {
            self.discard_moved_dir(id, (dir.ino, name));
        }
        self.directory(dir).dentry_leases.put(now, name, (id, held));
        self.store.recount(dir.ino);
        Some(held)
    }

    /// Drops the dentries of a directory that is found by another name than before. Other clients moved it, or it is a
    /// new directory with the number of one that is gone, which such a remote does not tell apart.
    fn discard_moved_dir(&mut self, id: NodeId, at: (u64, &Name)) {
        let home = self.store.inode(id.ino).and_then(|inode| inode.parent_entry.as_ref());
        if home.is_some_and(|(dir, name)| (*dir, name) == at) {
            return;
        }
        let Some(directory) = self.store.dir(id.ino) else { return };
        let dentry_leases = directory
            .dentry_leases
            .names()
            .map(|name| KernelInvalidation::Entry { dir: id.ino, name: name.clone() });
        let dentry_leases = dentry_leases.collect();
        self.discard_dir(id, dentry_leases);
    }

    /// Applies a name under the directory lease.
    fn apply_dir_entry(
        &mut self,
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
        let cookie = self.store.cookie(name);
        if self.live_directory(now, dir.ino).is_none() {
            let held = fresh.filter(|h| h.is_live(now))?;
            if !self.store.may_begin_lease(dir, held.id) {
                return None;
            }
            if self.directory(dir).held.is_some() {
                self.end_directory_lease(dir.ino);
            }
            self.note_lease_begin(dir.ino);
            self.directory(dir).held = Some(held);
        } else if fresh.is_none() && !flight.is_mutation() {
            // An ungranted reply beside a live grant is kept only if it is about a local change, and newer than the
            // grant.
            return None;
        } else if flight.may_predate_lease(dir, grants) {
            self.discard_if_contradicted(dir, name, entry.map(|entry| entry.id));
            return None;
        }
        let directory = self.store.dir_mut(dir.ino)?;
        let held = directory.held?;
        let old = if entry.is_none() && directory.complete {
            directory.rows.remove(cookie, name.as_bytes())
        } else {
            let child = entry.map(CachedEntry::new);
            directory.rows.insert(cookie, name.as_bytes(), child)
        };
        self.store.recount(dir.ino);
        // The kernel knows of its own changes.
        if let Some(old) = old.filter(|_| !flight.is_mutation()) {
            let stale = self.invalidations_for_replaced((dir.ino, name), old.as_ref(), entry.map(|e| e.id));
            if self.kernel.can_notify() && !stale.is_empty() {
                self.invalidate(stale, None);
            }
        }
        Some(held)
    }

    /// Drops all facts about a directory, here and in the kernel, if a failed change contradicts them: its errno says
    /// whether a name exists (`None`: that something else is wrong with it).
    pub(crate) fn discard_uncertain_name(&mut self, dir: u64, name: &Name, exists: Option<bool>) {
        let cookie = self.store.cookie(name);
        if let Some(directory) = self.store.dir_mut(dir) {
            directory.dentry_leases.remove(name);
        }
        let Some(directory) = self.store.dir(dir).filter(|d| d.held.is_some()) else { return };
        let listed = directory.find(cookie, name).map(|child| child.is_some());
        if listed.is_none() || listed == exists {
            return;
        }
        let id = directory.id;
        self.discard_dir(id, Vec::new());
    }

    /// Drops a directory's facts if its entries contradict a reply to a local change that may be older than the lease:
    /// either may be right.
    pub(crate) fn discard_if_contradicted(&mut self, dir: NodeId, name: &Name, id: Option<NodeId>) {
        let Some(directory) = self.store.dir(dir.ino) else { return };
        let listed = directory.find(self.store.cookie(name), name);
        if listed.is_some_and(|child| child.map(|child| child.id) != id) {
            self.discard_uncertain_dir(dir);
        }
    }

    /// Drops a directory's facts because a recall raced with a local change: what was learned since may be older or
    /// newer than the change.
    pub(crate) fn discard_uncertain_dir(&mut self, dir: NodeId) {
        self.calls.mark_uncertain((dir, LeaseScope::Directory));
        self.discard_dir(dir, Vec::new());
    }

    /// Drops a directory's names here, and invalidates them and `more` in the kernel.
    fn discard_dir(&mut self, dir: NodeId, more: Vec<KernelInvalidation>) {
        let mut stale = more;
        stale.extend(self.invalidations_under_lease(dir));
        self.drop_dir_names(dir.ino);
        if self.kernel.can_notify() && !stale.is_empty() {
            self.invalidate(stale, None);
        }
    }

    /// Drops a directory's names, dentry leases included.
    pub(crate) fn drop_dir_names(&mut self, dir: u64) {
        if let Some(directory) = self.store.dir_mut(dir) {
            directory.dentry_leases.clear();
        }
        self.end_directory_lease(dir);
    }

    /// Ends a directory's lease here and drops the names under it. The kernel is not invalidated: its timeouts have ended,
    /// or the caller does it.
    pub(crate) fn end_directory_lease(&mut self, dir: u64) {
        self.detach_listings(dir);
        if let Some(directory) = self.store.dir_mut(dir) {
            directory.forget();
        }
        self.store.recount(dir);
    }

    /// Detaches the directory's listings at the end of its lease: the kernel's cached listing is invalidated. Entries
    /// of a listing in flight go on serving its waiters only.
    fn detach_listings(&mut self, dir: u64) {
        self.watches.mark_unsettled(self.clock, dir);
        let Some(directory) = self.store.dir_mut(dir) else { return };
        let flight = directory.listing.and_then(|call| self.calls.get_mut(call));
        if let Some(flight) = flight.filter(|f| f.has_chunk && f.detached_entries.is_none()) {
            let listed = directory.progress.unwrap_or_default();
            flight.detached_entries = Some(Box::new(directory.rows.up_to(listed)));
        }
        directory.progress = None;
        let listed = directory.kernel_version.take().is_some();
        if listed && self.store.inode(dir).is_some_and(|i| i.opens > 0) {
            self.invalidate(vec![KernelInvalidation::Data { ino: dir, offset: 0, length: 0 }], None);
        }
    }

    /// Drops names whose lease has ended. In stale mode they are kept until memory is short, because they may yet be
    /// served ([`OnDisconnect::Stale`]), but not once a local change has made them outdated.
    pub(crate) fn drop_expired_names(&mut self, dir: u64) {
        if self.store.dir(dir).is_some_and(|d| d.held.is_some_and(|held| !held.is_live(self.clock))) {
            self.end_directory_lease(dir);
        }
    }
}

#[cfg(test)]
mod tests;
