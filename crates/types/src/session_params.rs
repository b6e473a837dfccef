//! What a session tells its cache and client when it begins.

use crate::{Attr, CookieKey, NodeId, Term};

/// Session parameters, negotiated when a session begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionParams {
    pub root: NodeId,
    pub root_attr: Attr,
    pub cookie_key: CookieKey,
    /// Longest life of a grant.
    pub term: Term,
    /// Whether inodes of the export can have POSIX ACLs.
    pub has_acls: bool,
    /// Why changes on the server's own disk may stay unseen for up to `term` (S9); empty if clients see them at once.
    /// For people.
    pub staleness_bound: String,
    /// Guarantees (`S4`) that this export cannot give, each with the reason. For people.
    pub unsupported_guarantees: Vec<(String, String)>,
    /// (uid, gid) under which the server performs calls for this client's own user.
    pub acts_as: (u32, u32),
    /// Whether the remote supports prefetch ([`crate::Call::Prefetch`]).
    pub supports_prefetch: bool,
    /// Whether the remote supports names-only listings ([`crate::Call::ListNames`]).
    pub supports_list_names: bool,
    /// Whether the remote accepts [`crate::Privileges`] of callers: it trusts the checks of this machine's kernel.
    pub accepts_privileges: bool,
    /// Whether the remote finds inodes by number alone ([`crate::Call::LookupNumber`]).
    pub supports_lookup_number: bool,
    /// Names of the server's users and groups, at most [`IdName::MOST`]; empty unless the client asked for them.
    pub names: Vec<IdName>,
}

impl SessionParams {
    /// A session without any ability that a remote may lack, and without restrictions.
    #[must_use]
    pub fn plain(root: NodeId, root_attr: Attr, cookie_key: CookieKey, term: Term) -> SessionParams {
        SessionParams {
            root,
            root_attr,
            cookie_key,
            term,
            has_acls: false,
            staleness_bound: String::new(),
            unsupported_guarantees: Vec::new(),
            acts_as: (0, 0),
            supports_prefetch: false,
            supports_list_names: false,
            accepts_privileges: false,
            supports_lookup_number: false,
            names: Vec::new(),
        }
    }
}

/// Kind of an id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum IdKind {
    User,
    Group,
}

/// A user or group id, and its name on one machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdName {
    pub kind: IdKind,
    pub id: u32,
    pub name: String,
}

impl IdName {
    /// Most names that a session carries.
    pub const MOST: usize = 4_096;
    /// Most bytes of a name.
    pub const LONGEST: usize = 256;
}
