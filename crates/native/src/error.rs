//! Protocol violations by a peer.

use nigh_types::{CallId, RecallId};

/// The rule that the peer broke. The session ends with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtocolError {
    #[error("the peer does not speak the nigh protocol")]
    NotNigh,
    #[error("a frame of {length} bytes is longer than the {limit} allowed here")]
    FrameTooLong { length: u32, limit: u32 },
    #[error("frame type {0} is unknown and may not be ignored")]
    UnknownType(u8),
    #[error("frame type {0} does not come from this side, or not now")]
    Unexpected(u8),
    #[error("malformed message: {0}")]
    Malformed(&'static str),
    #[error("the chosen version {0} was not offered")]
    Version(u16),
    #[error("call {} is already outstanding", .0.0)]
    CallInUse(CallId),
    #[error("more than {0} calls are outstanding")]
    TooManyCalls(u32),
    #[error("requests of more than {0} bytes are outstanding")]
    TooManyBytes(u64),
    #[error("a mutation carries an operation name, other calls carry none")]
    OpName,
    #[error("an answer to call {}, which is not outstanding", .0.0)]
    UnknownCall(CallId),
    #[error("a wrong answer to call {}: {what}", .call.0)]
    WrongReply { call: CallId, what: &'static str },
    #[error("a listing is out of cookie order (call {})", .0.0)]
    Order(CallId),
    #[error("recall or hold {} was acknowledged or committed but is not outstanding", .0.0)]
    UnknownRecall(RecallId),
    #[error("{claimed} frames are said to have arrived; between {least} and {most} can have")]
    Count { claimed: u64, least: u64, most: u64 },
    #[error("the session has ended")]
    Ended,
}
