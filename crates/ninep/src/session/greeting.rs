//! The handshake's result.

use crate::ProtocolError;
use nigh_types::{Attr, Errno, NodeId};

/// Result of the handshake.
pub(crate) type Greeting = Result<(NodeId, Attr), Refusal>;

/// Why the handshake failed.
#[derive(Debug)]
pub(crate) enum Refusal {
    Rule(ProtocolError),
    /// The error reply to the message of that name.
    Error(&'static str, Errno),
}
