//! nigh's own protocol, both ends, without I/O. Layouts: docs/protocol.md.
//!
//! [`ClientSession`] is the client's end and a [`nigh_remote::Remote`]; [`ServerConnection`] is the
//! server's end of one session. Both take bytes and time and put out bytes and events. A driver that
//! encodes answers on several threads uses [`encode_response`] and
//! [`ServerConnection::transmit_encoded`].

mod attr;
mod call;
mod client;
mod error;
mod expect;
mod frame;
mod handshake;
mod message;
mod reply;
mod server;
mod values;
mod wire;

pub use client::{ClientConfig, ClientSession, Counters};
pub use error::ProtocolError;
pub use frame::{Frame, FrameReader, FrameType, HEADER_BYTES, MAX_BODY};
pub use handshake::{Hello, Limits, MAX_VERSION, MIN_VERSION, Refused, SESSION_TERM, Welcome};
pub use message::{Message, encode_request, encode_response, listed_bytes};
pub use nigh_remote::Session;
pub use server::{ServerConfig, ServerConnection, ServerEvent};
