//! What a session tells its cache and client when it begins.

use crate::{Attr, CookieKey, NodeId, Term};

/// Parameters of a session, known when it begins. A remote fills the first four. Whatever a protocol lacks stays at the
/// default of its group, so a remote names only what it has ([`SessionParams::plain`]).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionParams {
    pub root: NodeId,
    pub root_attr: Attr,
    pub cookie_key: CookieKey,
    /// Longest life of a grant.
    pub term: Term,
    pub supports: Features,
    pub guarantees: Guarantees,
    pub ids: RemoteIds,
}

impl SessionParams {
    /// A session without optional features, with all guarantees, whose server acts as root.
    #[must_use]
    pub fn plain(root: NodeId, root_attr: Attr, cookie_key: CookieKey, term: Term) -> SessionParams {
        SessionParams {
            root,
            root_attr,
            cookie_key,
            term,
            supports: Features::default(),
            guarantees: Guarantees::default(),
            ids: RemoteIds::default(),
        }
    }
}

/// Optional features of a remote. The cache and the client ask for a feature before they use it. Default: none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each feature is there or not, independently of the others"
)]
pub struct Features {
    /// Inodes of the export can have POSIX ACLs.
    pub acls: bool,
    /// Prefetch ([`crate::Call::Prefetch`]).
    pub prefetch: bool,
    /// The session itself prefetches, by its own calls: it reads several directories at a time, so that directories
    /// found below others may come after those beside them. It begins to read them when it has emitted the reply before.
    pub prefetch_in_session: bool,
    /// Prefetch in reversed orders ([`crate::PrefetchOrder::REVERSED`]).
    pub reversed_prefetch: bool,
    /// Names-only listings ([`crate::Call::ListNames`]).
    pub list_names: bool,
    /// Finding inodes by number alone ([`crate::Call::LookupNumber`]).
    pub lookup_number: bool,
    /// [`crate::Privileges`] of callers: the remote trusts the checks of this machine's kernel.
    pub privileges: bool,
    /// The remote reads every file with the same rights for all callers, or trusts the checks of this machine's
    /// kernel: contents read for one caller may be served to another that this kernel admits.
    pub uniform_rights: bool,
    /// A caller's rights depend on its uid alone: contents read for one caller may be served to another of that uid.
    pub rights_by_uid: bool,
}

/// Limits of the guarantees in docs/semantics.md, for people. Default: all are given.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Guarantees {
    pub unsupported: Vec<UnsupportedGuarantee>,
    /// Why changes on the server's own disk may stay unseen for up to the term (S9); empty if clients see them at once.
    pub staleness_bound: String,
}

/// A guarantee that a session cannot give.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnsupportedGuarantee {
    /// Name in docs/semantics.md, such as `S4`.
    pub name: String,
    pub why: String,
    /// No server of the remote's protocol can give it. A mount says so when it begins; what one export lacks stands in
    /// the mount's status alone.
    pub by_protocol: bool,
}

/// User and group ids of the server, for the id map.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RemoteIds {
    /// (uid, gid) under which the server performs calls for this client's own user.
    pub acts_as: (u32, u32),
    /// Names of the server's users and groups; empty unless the client asked for them and the remote has them.
    pub names: Vec<IdName>,
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
