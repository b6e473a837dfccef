//! nigh's own protocol, both ends, without I/O. Layouts: docs/protocol.md.
//!
//! [`ClientSession`] is the client's end and a [`nigh_remote::Remote`]; [`ServerConnection`] is the server's end of one
//! session. Both take bytes and time, and emit bytes and events. A driver that encodes replies on several threads uses
//! [`encode_response`] and [`ServerConnection::transmit_encoded`]. [`LeaseTable`] keeps the leases of all sessions and
//! says which ones to recall. [`lease::Desk`] orders recalls and replies in each session's stream.

mod ahead;
mod attr;
mod call;
mod client;
mod compress;
mod dirents;
mod error;
mod flow_limit;
mod frame;
mod handshake;
pub mod lease;
mod locks;
mod message;
mod order;
mod push;
mod reply;
mod reply_validator;
mod retransmit;
mod server;
mod values;
mod wire;

pub use client::{ClientConfig, ClientSession, sessions};
pub use compress::pack;
pub use dirents::dirent_bytes;
pub use error::ProtocolError;
pub use flow_limit::MAX_UNANSWERED_BYTES;
pub use frame::{Frame, FrameBytes, FrameReader, FrameType, HEADER_BYTES, MAX_BODY, is_urgent};
pub use handshake::{
    AHEAD, COMPRESSED, DIRENTS, EXCLUSIVE_DIR_LEASES, Hello, ID_NAMES, Limits, MAX_VERSION, MIN_VERSION,
    PUSHES, Refused, Resume, Resumed, SESSION_TERM, TRUSTS_WATCH, Welcome,
};
pub use lease::LeaseTable;
pub use locks::{Claim, LockOwner, LockTable, MAX_LOCK_WAITS, Tried};
pub use message::{Message, encode_request, encode_response, listed_bytes};
pub use nigh_remote::Session;
pub use order::MOST_LISTED;
pub use retransmit::WINDOW_BYTES;
pub use server::{ServerConfig, ServerConnection, ServerEvent};
