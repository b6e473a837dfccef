//! Grants: a cached fact may be served only while its grant lives.

use crate::{Name, NodeId, Span};

/// Number of a grant, assigned by its remote.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GrantId(pub u64);

/// Number of a recall, assigned by its remote.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RecallId(pub u64);

/// Scope of a grant: which facts about a node it covers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LeaseScope {
    /// A directory's names, its completeness, and the attributes, targets and xattrs of its children that are not
    /// directories and have one link.
    Directory,
    /// An inode's own attributes, symlink target and xattrs.
    Attributes,
    /// A file's data.
    Data,
    /// One dentry: the inode that a name leads to. From remotes that cannot give a grant on a whole directory.
    Dentry,
    /// One negative dentry: the absence of a name.
    NegativeDentry,
}

/// Whether the holder may only read the facts, or also change them locally. A write grant excludes the grants of all
/// other holders on its node and scope.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    Read,
    Write,
}

/// What ends a grant besides its recall and the loss of its session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Term {
    /// Nothing: the grant lives as long as its session.
    Session,
    /// A lifetime from the time at which the request for the grant was sent.
    Limited(Span),
}

/// A grant: permission to serve facts from memory. It lives until the first of: its deadline, its recall,
/// the loss of its session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    pub id: GrantId,
    pub node: NodeId,
    pub covers: LeaseScope,
    pub mode: Mode,
    pub term: Term,
    /// Whether the remote recalls the grant before a fact under it becomes false.
    pub recallable: bool,
    /// With `LeaseScope::Directory`: other clients may hold a grant on this directory. A client that cannot drop all names in
    /// its kernel at once uses entry timeout 0 under this, as under every recallable grant (docs/decisions/0008-leases.md, rule 9).
    pub shared: bool,
}

/// A recall of a grant. The client acknowledges it once cache and kernel have dropped the facts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recall {
    pub id: RecallId,
    pub node: NodeId,
    pub covers: LeaseScope,
    /// With `LeaseScope::Directory`: the names that change; empty if all may. The cache drops the whole directory even so.
    pub names: Vec<Name>,
}
