//! What reaches a cache from its remote.

use crate::{Attr, CallId, Commit, CookieKey, Hold, NodeId, Recall, Response, Term};

/// What a remote tells the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The session stands. Comes once, before all else.
    Attached(Session),
    Response {
        call: CallId,
        response: Response,
    },
    Recall(Recall),
    /// In the place of a recall: what it names is about to change, and the grants go on.
    Hold(Hold),
    Commit(Commit),
    /// The term has run out without an answer: all grants have ended. Calls that are out stay out; they are
    /// answered after [`Event::Restored`].
    Lapsed {
        why: String,
    },
    /// A session stands again, after `Lapsed` or in its place: all grants that were held before have ended.
    /// Without `kept` the remote has forgotten open handles and locks: the cache claims them anew
    /// ([`crate::Call::Reopen`], [`crate::Call::Lock`] with `reclaim`), then says that it has (`handle_reclaimed`
    /// of the remote); calls that were out are put out again after that.
    Restored {
        session: Session,
        kept: bool,
    },
    /// The session is lost: all its grants have ended and no outstanding call will be answered.
    Lost {
        why: String,
    },
}

/// What is agreed when a session begins.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Session {
    pub root: NodeId,
    pub root_attr: Attr,
    pub cookie_key: CookieKey,
    /// How long grants live at the most.
    pub term: Term,
    /// Whether inodes of the export can have POSIX ACLs.
    pub has_acls: bool,
    /// Why changes on the server's own disk are seen only within `term` (S9); empty if they are
    /// seen at once. For people.
    pub host_bound: String,
    /// Names of guarantees (`S4`) that this export cannot give, and why. For people.
    pub not_given: Vec<(String, String)>,
    /// (uid, gid) as which the server does what this client asks for its own user.
    pub acts_as: (u32, u32),
    /// Whether the remote walks ahead ([`crate::Call::Ahead`]).
    pub walks_ahead: bool,
    /// Whether the remote tells names alone ([`crate::Call::Dirents`]).
    pub tells_dirents: bool,
    /// Whether the remote takes [`crate::Privileges`] of callers: it believes what this machine's kernel has checked.
    pub takes_privileges: bool,
    /// Whether the remote finds inodes by their numbers alone ([`crate::Call::LookupNumber`]).
    pub finds_numbers: bool,
    /// What the server's machine calls its users and groups, at most [`IdName::MOST`]; empty unless the
    /// client asked for it.
    pub names: Vec<IdName>,
}

/// What an id is of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum IdKind {
    User,
    Group,
}

/// A user or group, and what one machine calls it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdName {
    pub kind: IdKind,
    pub id: u32,
    pub name: String,
}

impl IdName {
    /// How many a session tells.
    pub const MOST: usize = 4_096;
    /// Bytes of a name.
    pub const LONGEST: usize = 256;
}
