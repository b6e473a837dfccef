//! How a remote is told which inode is meant, and on whose behalf.

use crate::{Name, NodeId, Privileges};

/// An inode, with a hint where it was last seen (decision 2 of the design: ids are reached by
/// hint, verified, else by what the remote remembers, else the client walks again).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    pub node: NodeId,
    /// The directory and name under which the client knows it; `None` for the root.
    pub hint: Option<(NodeId, Name)>,
}

impl Place {
    #[must_use]
    pub fn bare(node: NodeId) -> Place {
        Place { node, hint: None }
    }
}

/// On whose behalf a call is made.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Only where the remote takes them ([`crate::Session::takes_privileges`]), and the caller has some.
    pub privileges: Option<Box<Privileges>>,
}
