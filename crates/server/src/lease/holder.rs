//! What the shared lease table needs of a session that holds leases, and of a call that waits for acknowledgements.

use crate::export::Export;
use nigh_lease::{ChangeId, Holder};
use nigh_link::Peer;
use nigh_types::{CallId, Recall, UpdateCommit, UpdatePrepare};
use std::any::Any;
use std::sync::Arc;

/// A message of the lease table to a client.
pub(crate) enum LeaseMessage {
    Recall(Recall),
    Prepare(UpdatePrepare),
    Commit(UpdateCommit),
}

/// A session that holds leases.
pub(crate) trait LeaseSession: Send + Sync {
    /// The session's identity in the lease table.
    fn holder(&self) -> Holder;

    fn peer(&self) -> &Peer;

    /// The export that it is attached to.
    fn export(&self) -> Option<&Arc<Export>>;

    /// Counts a new lease in the table. Called under the table's lock.
    fn begin_lease(&self);

    /// The number of its lease.
    fn lease(&self) -> u64;

    /// Queues a message to the client. Called under the table's lock; [`LeaseSession::send`] follows without it.
    fn queue(&self, message: LeaseMessage);

    /// Sends what is queued.
    fn send(&self);

    /// Handles the expiry of the lease with this number.
    fn fence(&self, lease: u64);

    /// Logs that the session owes acknowledgements for too long (`suspect`), or has given all of them.
    fn log_suspect(&self, suspect: bool);
}

/// A call that waits, without a thread, until its change is ready.
pub(crate) trait ParkedCall: Any + Send {
    fn holder(&self) -> Holder;

    fn call(&self) -> CallId;

    fn type_name(&self) -> &'static str;

    fn change(&self) -> Option<ChangeId>;

    /// Whether its client still waits for the reply.
    fn is_wanted(&self) -> bool;

    /// Replies that the call was cancelled. The call has had no effect.
    fn abort(self: Box<Self>);
}

/// What executes calls whose changes are ready.
pub(crate) trait CallExecutor: Send + Sync {
    fn resume(&self, call: Box<dyn ParkedCall>);
}
