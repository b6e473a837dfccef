//! Ordered byte streams over every transport, and the identity of the peer
//! (docs/decisions/0010-transports-and-identity.md). Other crates define the protocols that run on the streams.
//!
//! | module | contents |
//! | --- | --- |
//! | `link` | the stream type for all transports |
//! | `socket`, `tls`, `process` | its parts: a socket, TLS on it, a child process behind it |
//! | `peer`, `user` | the identity of the peer, and which caller ids it may claim |
//! | `token`, `preamble` | a shared secret, and how both ends of a TCP connection prove that they have it |
//! | `identity`, `known_servers` | the server's key, and the keys that a client has accepted |
//! | `tcp`, `unauthenticated_limit` | connections over TCP; the limit on unauthenticated connections |
//! | `ssh` | connections by the user's own ssh |
//! | `unix` | connections on this machine |
//! | `address` | host and port syntax |

pub mod address;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod identity;
mod known_servers;
mod link;
mod peer;
mod preamble;
mod process;
mod socket;
pub mod ssh;
pub mod tcp;
mod tls;
mod token;
mod unauthenticated_limit;
pub mod unix;
mod user;

pub use error::LinkError;
pub use link::{Kind, Link};
pub use nigh_types::Origin;
pub use peer::{Claims, Peer, Squash};
pub use token::Token;
pub use unauthenticated_limit::{UnauthenticatedLimit, UnauthenticatedSlot};
pub use user::{credentials_of, own_credentials};
