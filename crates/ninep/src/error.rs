//! Rules of the protocol that a peer can break.

/// The rule that the peer broke. The session ends with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtocolError {
    #[error("a message of {length} bytes is longer than the {limit} that were agreed")]
    TooLong { length: u32, limit: u32 },
    #[error("a message of {0} bytes is shorter than its header")]
    TooShort(u32),
    #[error("message type {0} is not known, or does not come from this side")]
    UnknownType(u8),
    #[error("malformed message: {0}")]
    Malformed(&'static str),
}
