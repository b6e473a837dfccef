//! How a call addresses an inode, and the caller's credentials.

use crate::{Name, NodeId, Privileges};

/// Reference to an inode, with a path hint. The server finds the inode by the hint and verifies it, else by its own
/// memory; if both fail, the client resolves the path again.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NodeRef {
    pub node: NodeId,
    /// The parent directory and name known to the client; `None` for the root.
    pub path_hint: Option<(NodeId, Name)>,
}

impl NodeRef {
    #[must_use]
    pub fn without_hint(node: NodeId) -> NodeRef {
        NodeRef { node, path_hint: None }
    }
}

/// Credentials of the caller.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Set only where the remote accepts them ([`crate::Features::privileges`]) and the caller has some.
    pub privileges: Option<Box<Privileges>>,
}
