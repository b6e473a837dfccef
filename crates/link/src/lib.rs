//! Ordered byte streams of every kind, and who is at their other end
//! (docs/decisions/0010-transports-and-identity.md). What is said on them is the business of others.
//!
//! | room | what lives there |
//! | --- | --- |
//! | `link` | a stream of any kind |
//! | `socket`, `tls`, `process` | what it is made of: a socket, TLS on it, a program behind it |
//! | `peer`, `user` | who is at the other end, and which ids it may claim |
//! | `token`, `preamble` | a shared secret, and how both ends of a TCP connection prove that they have it |
//! | `identity`, `known` | the server's key, and the keys that a client has seen |
//! | `tcp`, `lobby` | connections over TCP; how much those may cost who have proved nothing |
//! | `ssh` | connections by the user's own ssh |
//! | `unix` | connections on this machine |
//! | `address` | hosts and ports as people write them |

pub mod address;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod identity;
mod known;
mod link;
mod lobby;
mod peer;
mod preamble;
mod process;
mod socket;
pub mod ssh;
pub mod tcp;
mod tls;
mod token;
pub mod unix;
mod user;

pub use error::LinkError;
pub use link::{Kind, Link};
pub use lobby::{Lobby, Ticket};
pub use nigh_types::Origin;
pub use peer::{Claims, Peer, Squash};
pub use token::Token;
pub use user::{credentials_of, own_credentials};
