//! Recalls.

use crate::facts::leases;
use crate::kernel::{NotifyLevel, OnInvalidated};
use crate::op::{InvalidationId, KernelInvalidation};
use crate::out::{invalidate, pins};
use crate::state::State;
use nigh_types::{Bug, LeaseScope, Name, NodeId, Recall, planted};

/// Handles a recall: refuses new hits, invalidates the kernel, and acknowledges in `handle_invalidated`; at once if
/// the kernel holds nothing and no invalidation is pending.
pub(crate) fn handle_recall(state: &mut State, recall: Recall) {
    state.counters.recalled += 1;
    tracing::debug!(target: "nigh::recall", ino = recall.node.ino, covers = ?recall.covers);
    state.calls.mark_recalled((recall.node, recall.covers), false);
    let stale = match recall.covers {
        // No remote recalls single dentries: their leases end by their deadlines.
        LeaseScope::Directory | LeaseScope::Dentry | LeaseScope::NegativeDentry => {
            pins::pin_open_below(state, recall.node.ino);
            recall_names(state, recall.node)
        }
        LeaseScope::Attributes => {
            pins::pin_open(state, recall.node.ino);
            leases::recall_inode(state, recall.node)
        }
        LeaseScope::Data => leases::recall_data(state, recall.node),
    };
    if planted(Bug::AcknowledgesFirst) {
        invalidate::complete(state, OnInvalidated::Acknowledge(recall.id));
        invalidate::invalidate(state, stale, None);
        return;
    }
    invalidate::invalidate_then(state, stale, OnInvalidated::Acknowledge(recall.id));
}

fn recall_names(state: &mut State, node: NodeId) -> Vec<KernelInvalidation> {
    let stale = leases::invalidations_under_lease(state, node);
    leases::drop_dir_names(state, node.ino);
    stale
}

/// Handles a mount below. An epoch would detach that mount, so from now on the kernel gets no dentry under a grant
/// that can be recalled ([`NotifyLevel::NoEpoch`]). Returns the dentries that the kernel holds: the caller drops them
/// before all queued invalidations, then calls `handle_invalidated`. `None`: there was a mount below already.
pub(crate) fn handle_mounted_below(state: &mut State) -> Option<(InvalidationId, Vec<(u64, Name)>)> {
    if state.kernel.level() != NotifyLevel::All {
        return None;
    }
    state.kernel.give_up_epochs();
    let mut names = state.kernel.take_all_negative_dentries();
    let known = |ino: u64| state.store.inode(ino).is_some_and(|inode| inode.kernel.is_known());
    for (dir, directory) in state.store.dirs() {
        let rows = directory.rows.iter().filter(|row| row.child.is_some_and(|c| known(c.id.ino)));
        names.extend(rows.map(|row| (dir, row.to_name())));
    }
    state.store.dirs_mut().for_each(|directory| directory.has_negative_dentries = false);
    let id = state.kernel.begin_dentry_flush();
    Some((id, names.into_iter().collect()))
}
