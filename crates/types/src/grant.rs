//! The one idea: a cached fact may be served only while its grant lives.

use crate::{Name, NodeId, Span};

/// A grant, as its remote numbers it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GrantId(pub u64);

/// A recall, as its remote numbers it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RecallId(pub u64);

/// Which facts about a node a grant covers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Covers {
    /// Of a directory: its names, its completeness, and the attributes, targets and xattrs of
    /// children that are not directories and have one link.
    Names,
    /// An inode's own attributes, symlink target and xattrs.
    Inode,
    /// A file's data.
    Data,
    /// Of a directory, from a remote that cannot speak for all its names: what that one leads to which the answer is about;
    Entry,
    /// or that it leads nowhere.
    Absence,
}

/// Whether facts may only be read, or also be made locally.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    Read,
    Write,
}

/// What ends a grant besides its recall and the loss of its session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Term {
    /// Nothing: it lives as long as its session.
    Session,
    /// So long from when the request that brought it was sent.
    Limited(Span),
}

/// Permission to serve facts from memory. It lives until the first of: its deadline, its recall,
/// the loss of its session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    pub id: GrantId,
    pub node: NodeId,
    pub covers: Covers,
    pub mode: Mode,
    pub term: Term,
    /// Whether the remote will recall it before a fact under it becomes false.
    pub recallable: bool,
    /// With `Covers::Names`: others may hold it too. A client that cannot drop all its kernel's names at
    /// once gives the kernel no time for names under it (docs/decisions/0008-leases.md, rule 9).
    pub shared: bool,
}

/// The remote asks for a grant back. Answered with an acknowledgement, after the facts are gone
/// from cache and kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recall {
    pub id: RecallId,
    pub node: NodeId,
    pub covers: Covers,
    /// With `Covers::Names`: only these names change. Empty: all of them.
    pub names: Vec<Name>,
}
