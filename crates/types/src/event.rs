//! Events from a remote to its cache.

use crate::{CallId, Recall, Response, SessionParams, UpdateCommit, UpdatePrepare};

/// An event from the remote.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The session is established. It is the first event and comes once.
    Attached(SessionParams),
    Response {
        call: CallId,
        response: Response,
    },
    Recall(Recall),
    /// First step of an update in place: its facts are about to change. It replaces a recall, and the grants live on.
    UpdatePrepare(UpdatePrepare),
    UpdateCommit(UpdateCommit),
    /// The lease term has expired without a reply: all grants have ended. Outstanding calls stay outstanding; their
    /// replies come after [`Event::Restored`].
    Expired {
        why: String,
    },
    /// A session is established again, after `Expired` or instead of it: all earlier grants have ended.
    /// Without `kept` the remote has lost open handles and locks. The cache reclaims them
    /// ([`crate::Call::Reopen`], [`crate::Call::Lock`] with `reclaim`), then reports the end of the reclaim
    /// (`handle_reclaimed` of the remote). Calls that were outstanding are sent again after that.
    Restored {
        session: SessionParams,
        kept: bool,
    },
    /// The session is lost: all its grants have ended, and outstanding calls get no reply.
    Lost {
        why: String,
    },
}
