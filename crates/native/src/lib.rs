//! nigh's own protocol, both ends, without I/O. Layouts: docs/protocol.md.
//!
//! [`ClientSession`] is the client's end and a [`nigh_remote::Remote`]; [`ServerSession`] is the server's end of one
//! session. Both take bytes and time, and emit bytes and events. A driver that encodes replies on several threads uses
//! [`encode_response`] and [`ServerSession::transmit_encoded`].

mod attr;
mod call;
mod client;
mod compress;
mod error;
mod flow_limit;
mod frame;
mod handshake;
mod listing_order;
mod message;
mod names_only_listing;
mod prefetch;
mod reply;
mod reply_validator;
mod retransmit;
mod server;
mod update;
mod values;
mod wire;

pub use client::{ClientConfig, ClientSession, sessions};
pub use compress::compress;
pub use error::ProtocolError;
pub use flow_limit::{MAX_LOCK_WAITS, MAX_UNANSWERED_BYTES};
pub use frame::{Frame, FrameBytes, FrameReader, FrameType, HEADER_BYTES, MAX_BODY, is_urgent};
pub use handshake::{
    COMPRESSED, EXCLUSIVE_DIR_LEASES, Hello, ID_NAMES, LIST_NAMES, Limits, MAX_ID_NAME_BYTES, MAX_ID_NAMES,
    MAX_VERSION, MIN_VERSION, PREFETCH, REVERSED_PREFETCH, Refused, Resume, Resumed, SESSION_TERM,
    TRUSTS_WATCH, UPDATES, Welcome,
};
pub use listing_order::MAX_LISTED;
pub use message::{Message, encode_request, encode_response, listed_bytes};
pub use names_only_listing::dirent_bytes;
pub use nigh_remote::SessionParams;
pub use retransmit::WINDOW_BYTES;
pub use server::{ServerConfig, ServerEvent, ServerSession};
