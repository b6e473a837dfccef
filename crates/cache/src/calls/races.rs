//! What is recorded in calls in flight while they are, and which changes are among them.

use super::{CallKind, Calls, ConcurrentDentry, InflightCall};
use crate::byte_ranges::pages_overlap;
use nigh_types::{Handle, LeaseScope, Name, NodeId};
use std::collections::BTreeSet;

/// Records.
impl Calls {
    fn mark(&mut self, which: impl Fn(&InflightCall) -> bool, mark: impl FnMut(&mut InflightCall)) {
        self.inflight.values_mut().filter(|call| which(call)).for_each(mark);
    }

    /// Records the end of all grants: nothing of the replies is kept.
    pub fn mark_all_grants_ended(&mut self) {
        self.mark(|_| true, |call| call.race_log.all_grants_ended = true);
    }

    /// Records a recall, or the preparation of an update (`prepared`).
    pub fn mark_recalled(&mut self, of: (NodeId, LeaseScope), prepared: bool) {
        let learns = |call: &InflightCall| match prepared {
            true => call.purpose.updates_cache(),
            false => call.purpose.tracks_races(),
        };
        self.mark(learns, |call| call.race_log.recalled.push(of));
    }

    /// Records that facts were dropped because the order of changes is not known.
    pub fn mark_uncertain(&mut self, of: (NodeId, LeaseScope)) {
        self.mark(|_| true, |call| call.race_log.recalled.push(of));
    }

    /// Records a name that was learned for local changes of it: their replies may be older.
    pub fn mark_name_learned(&mut self, dir: u64, name: &Name, learned: ConcurrentDentry) {
        self.mark(|call| call.purpose.binds(dir, name), |call| call.race_log.put_dentry(dir, name, learned));
    }

    /// Records learned attributes for local changes: their replies may be older.
    pub fn mark_attr_learned(&mut self, ino: u64) {
        self.mark(InflightCall::is_mutation, |call| call.race_log.local_inodes.push(ino));
    }

    /// Records that a local change changed an inode.
    pub fn mark_local_inode(&mut self, ino: u64) {
        self.mark(|call| call.purpose.tracks_races(), |call| call.race_log.local_inodes.push(ino));
    }

    /// Records that a local change bound or unbound a name.
    pub fn mark_local_dentry(&mut self, dir: u64, name: &Name, learned: ConcurrentDentry) {
        self.mark(
            |call| call.purpose.tracks_races(),
            |call| {
                if !call.is_mutation() {
                    call.race_log.forget_remote_change(dir, name);
                }
                call.race_log.put_dentry(dir, name, learned);
            },
        );
    }

    /// Records a new directory lease for local changes of its names: they may have been made before it.
    pub fn mark_lease_begin(&mut self, dir: u64) {
        let binds = |call: &InflightCall| call.is_mutation() && call.purpose.binds_in(dir);
        self.mark(binds, |call| {
            call.race_log.granted_dirs.insert(dir);
        });
    }

    /// Records a remote change of a name. `known`: the directory's lease generation while the new state is known.
    pub fn mark_remote_name(&mut self, dir: u64, name: &Name, known: Option<u64>) {
        self.mark(
            |call| call.purpose.updates_cache(),
            |call| {
                if known.is_some() && !call.is_mutation() {
                    // A local change of the name is the earlier one.
                    call.race_log.forget_dentry(dir, name);
                }
                call.race_log.remote_names.entry(dir).or_default().insert(name.clone(), known);
            },
        );
    }

    /// Records a remote change of the attributes of an inode.
    pub fn mark_remote_inode(&mut self, ino: u64) {
        self.mark(
            |call| call.purpose.updates_cache(),
            |call| {
                call.race_log.remote_inodes.insert(ino);
            },
        );
    }

    /// Records a write for reads of its pages: their replies may lack it.
    pub fn mark_reads_before_write(&mut self, ino: u64, range: (u64, u64)) {
        let is_met = |call: &InflightCall| match call.purpose {
            CallKind::Read { ino: file, offset, size, .. } => {
                file == ino && pages_overlap((offset, u64::from(size)), range)
            }
            _ => false,
        };
        self.mark(is_met, |call| call.read_before_write = true);
    }

    /// Has the pages of all calls dropped right after their replies.
    pub fn drop_pages_of_all(&mut self) {
        self.mark(|_| true, |call| call.drop_data = true);
    }

    /// Has the pages of calls that lock pages of the file dropped right after their replies.
    pub fn drop_pages_of(&mut self, ino: u64, but_writebacks: bool) {
        let locks = |call: &InflightCall| call.purpose.locks_pages(ino, but_writebacks).is_some();
        self.mark(locks, |call| call.drop_data = true);
    }
}

/// Local changes in flight.
impl Calls {
    /// Returns the names of a directory that local changes bind or unbind.
    pub fn names_in_flight(&self, dir: u64) -> Vec<Name> {
        let touched = self.values().flat_map(|call| call.purpose.names());
        touched.filter(|(d, _)| *d == dir).map(|(_, name)| name.clone()).collect()
    }

    /// Returns whether a local change of the name is in flight.
    pub fn is_name_in_flight(&self, dir: u64, name: &Name) -> bool {
        self.values().any(|call| call.purpose.binds(dir, name))
    }

    /// Returns whether a local change of names in the directory is in flight.
    pub fn has_local_change_in(&self, dir: u64) -> bool {
        self.values().any(|call| call.purpose.binds_in(dir))
    }

    /// Returns inodes whose attributes a local change may change, directly or by a read.
    pub fn inodes_in_flight(&self) -> BTreeSet<u64> {
        let changes = self.values().filter(|call| call.is_mutation());
        changes
            .filter_map(|call| match call.purpose {
                CallKind::Change { ino, .. } | CallKind::Write { ino, .. } | CallKind::Open { ino, .. } => {
                    Some(ino)
                }
                _ => None,
            })
            .collect()
    }

    /// Returns where a name leads after the renames in flight, if they move what is there.
    pub fn name_after_renames(&self, at: (u64, &Name)) -> Option<(u64, Name)> {
        self.values().find_map(|call| match &call.purpose {
            CallKind::Rename { from, name, to, new_name, .. } if (*from, name) == at => {
                Some((*to, new_name.clone()))
            }
            CallKind::Rename { from, name, to, new_name, exchange: true, .. } if (*to, new_name) == at => {
                Some((*from, name.clone()))
            }
            _ => None,
        })
    }

    /// Returns whether a write of these pages is in flight that is no write-back.
    pub fn is_being_written(&self, ino: u64, pages: (u64, u64)) -> bool {
        self.values().any(|call| match call.purpose {
            CallKind::Write { ino: file, offset, size, writeback: false, .. } => {
                file == ino && pages_overlap((offset, size), pages)
            }
            _ => false,
        })
    }

    /// Returns whether a local change of a file's data is in flight, or one that may be.
    pub fn is_data_changing(&self, ino: u64) -> bool {
        self.has_mutation(|purpose| match *purpose {
            CallKind::Change { ino: of, .. }
            | CallKind::Write { ino: of, .. }
            | CallKind::Open { ino: of, .. } => of == ino,
            _ => false,
        })
    }

    /// Returns whether a local creation is in flight that truncates a file if the name exists.
    pub fn has_truncating_create(&self) -> bool {
        self.has_mutation(|purpose| match purpose {
            CallKind::Create { file, .. } => file.is_some_and(|file| file.access.truncate),
            _ => false,
        })
    }

    /// Returns whether such a mutation is in flight. Most reads find none at all.
    fn has_mutation(&self, is_it: impl Fn(&CallKind) -> bool) -> bool {
        self.pending_mutations() > 0 && self.values().any(|call| call.is_mutation() && is_it(&call.purpose))
    }

    /// Returns whether a call uses the handle.
    pub fn uses_handle(&self, handle: Handle) -> bool {
        self.values().any(|call| call.handles.contains(&Some(handle)))
    }
}
