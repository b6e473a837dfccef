//! nigh's own protocol, both ends, without I/O. Layouts: docs/protocol.md.
//!
//! [`ClientSession`] is the client's end and a [`nigh_remote::Remote`]; [`ServerConnection`] is the
//! server's end of one session. Both take bytes and time and put out bytes and events. A driver that
//! encodes answers on several threads uses [`encode_response`] and
//! [`ServerConnection::transmit_encoded`]. What its sessions hold, and who is asked for it, is in one
//! [`LeaseTable`].

mod attr;
mod call;
mod client;
mod error;
mod expect;
mod frame;
mod handshake;
pub mod lease;
mod locks;
mod message;
mod reply;
mod server;
mod values;
mod wire;

pub use client::{ClientConfig, ClientSession, Counters};
pub use error::ProtocolError;
pub use frame::{Frame, FrameReader, FrameType, HEADER_BYTES, MAX_BODY};
pub use handshake::{
    Hello, ID_NAMES, Limits, MAX_VERSION, MIN_VERSION, NAMES_ALONE, Refused, SESSION_TERM, Welcome,
};
pub use lease::LeaseTable;
pub use locks::{Claim, LockOwner, LockTable, MAX_LOCK_WAITS, Tried};
pub use message::{Message, encode_request, encode_response, listed_bytes};
pub use nigh_remote::Session;
pub use server::{ServerConfig, ServerConnection, ServerEvent};
