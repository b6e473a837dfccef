//! The directory that the kernel takes for removed after a change (see `facts/victims.rs`).

use crate::calls::CallKind;
use crate::state::State;
use nigh_types::{Kind, NodeId};

/// Returns the directory that the kernel will take for removed after this change.
pub(crate) fn expected_victim(state: &State, purpose: &CallKind) -> Option<NodeId> {
    let (dir, name) = match purpose {
        CallKind::Remove { dir, name } => (*dir, name),
        CallKind::Rename { to, new_name, exchange: false, .. } => (*to, new_name),
        _ => return None,
    };
    let listed = || {
        let child = state.store.child(dir, name).filter(|child| child.attr().kind() == Kind::Directory);
        child.map(|child| child.id)
    };
    let id = state.kernel.recent_dirs.at((dir, name)).or_else(listed)?;
    let known = state.store.inode_of(id).filter(|inode| inode.kernel.is_known());
    known.filter(|inode| inode.is_at(dir, name)).map(|inode| inode.id)
}
