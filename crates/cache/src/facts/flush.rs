//! End of all grants: everything that the kernel holds is dropped.

use crate::facts::{forgetting, leases};
use crate::grants::LiveGrant;
use crate::kernel::NotifyLevel;
use crate::op::{InvalidationId, KernelInvalidation, Urgency};
use crate::out::{invalidate, queue};
use crate::state::State;
use crate::store::Inode;
use nigh_types::NodeId;

/// Drops all facts, here and in the kernel. Dentries go first, if they can go all at once. Then go facts that need
/// no lookup, attributes and data of open inodes, then those of the rest. Dentries that can go only one by one come
/// last: they wait for requests in their directory, which get no reply now. `unbroken`: the grants end before their
/// time, with a session that is forgotten.
fn drop_everything(state: &mut State, unbroken: bool) -> Option<InvalidationId> {
    let mut names = Vec::new();
    let mut directories: Vec<NodeId> = state.store.dirs().map(|(_, d)| d.id).collect();
    directories.sort_unstable();
    for node in directories {
        for one in leases::invalidations_under_lease_without_pages(state, node) {
            match one {
                KernelInvalidation::AllDentries(more) => names.extend(more),
                KernelInvalidation::Entry { dir, name } => names.push((dir, name)),
                // Attributes and data are dropped for every inode below.
                KernelInvalidation::Attr { .. }
                | KernelInvalidation::Data { .. }
                | KernelInvalidation::RemovedDentry { .. } => {}
            }
        }
        if let Some(directory) = state.store.dir(node.ino) {
            names.extend(directory.dentry_leases.names().map(|name| (node.ino, name.clone())));
        }
        leases::drop_dir_names(state, node.ino);
        if let Some(directory) = state.store.dir_mut(node.ino) {
            directory.has_negative_dentries = false;
        }
    }
    state.calls.drop_pages_of_all();
    state.ungranted.end_grants();
    let in_use = |inode: &Inode| inode.opens().is_open() || inode.opens().is_pinned();
    let mut inodes: Vec<(bool, u64)> = state.store.inodes().map(|i| (!in_use(i), i.id.ino)).collect();
    inodes.sort_unstable();
    let mut told: Vec<(bool, bool, u64)> = Vec::new();
    for (idle, ino) in inodes {
        let lived = |held: &LiveGrant| held.is_live(state.clock) && !held.stale;
        let lived = state.store.inode(ino).is_some_and(|inode| inode.pages().grant().is_some_and(lived));
        leases::mark_pages_stale(state, ino, unbroken && lived);
        let Some(inode) = state.store.inode_mut(ino) else { continue };
        inode.note_all_grants_ended();
        if inode.kernel.is_known() {
            told.extend([(idle, false, ino), (idle, true, ino)]);
        }
        forgetting::drop_if_idle(state, ino);
    }
    // Open inodes before the rest; attributes before data.
    told.sort_unstable();
    let mut stale = Vec::new();
    if state.kernel.level() == NotifyLevel::All {
        names.extend(state.kernel.take_all_negative_dentries());
        stale.push(KernelInvalidation::AllDentries(std::mem::take(&mut names)));
    }
    stale.extend(told.into_iter().map(|(_, data, ino)| match data {
        true => KernelInvalidation::Data { ino, offset: 0, length: 0 },
        false => KernelInvalidation::Attr { ino },
    }));
    stale.extend(names.into_iter().map(|(dir, name)| KernelInvalidation::Entry { dir, name }));
    (state.kernel.can_notify() && !stale.is_empty())
        .then(|| invalidate::invalidate_first(state, stale, Urgency::AllGrantsEnded))
}

/// Ends all grants: replies to calls in flight are not cached.
pub(crate) fn on_grants_ended(state: &mut State) {
    state.counters.lapses += 1;
    state.watches.note_gap(state.clock);
    state.statfs_cache = None;
    state.drop_all_contents();
    state.calls.mark_all_grants_ended();
    state.calls.queue_all(state.store.suspended.clear());
}

/// Drops all facts, here and in the kernel. `unbroken`: the grants end before their time, with a session that is
/// forgotten.
pub(crate) fn flush_all(state: &mut State, unbroken: bool) {
    queue::flush_invalidations(state);
    let flush = drop_everything(state, unbroken);
    state.session.begin_flush(flush);
}
