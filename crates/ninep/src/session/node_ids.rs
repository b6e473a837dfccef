//! Node ids for qids. A qid has no generation, so the generation of a node id is the kind of its qid.

use super::fids::Fid;
use crate::values::{Qid, QidKind};
use nigh_types::NodeId;

const OTHER: u64 = 1;
pub(crate) const DIRECTORY: u64 = 2;
pub(crate) const SYMLINK: u64 = 3;

/// All nodes of a session that are reached by fids.
pub(crate) type Nodes = nigh_pathclient::Nodes<Fid>;

/// The node id for a qid.
pub(crate) fn node_id(nodes: &Nodes, qid: Qid) -> NodeId {
    let generation = match qid.kind() {
        QidKind::Other => OTHER,
        QidKind::Directory => DIRECTORY,
        QidKind::Symlink => SYMLINK,
    };
    nodes.node_id(qid.path, generation)
}

pub(crate) fn is_directory(node: NodeId) -> bool {
    node.generation == DIRECTORY
}
