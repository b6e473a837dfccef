//! What reaches a cache from its remote.

use crate::{Attr, CallId, CookieKey, NodeId, Recall, Response, Term};

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
}
