//! The kernel FUSE protocol: codec, transports, mounting, notifications.
//!
//! Protocol 7.45 down to 7.31 (`include/uapi/linux/fuse.h`). A caller mounts ([`mount::mount`]), makes a
//! [`DevFuse`] of the device, agrees on features ([`handshake`]), and then, on as many threads as
//! it likes: receives, [`decode`]s, answers with a [`Reply`]. What the kernel holds is dropped with
//! a [`Notification`], never from a thread whose request is unanswered (such a notification can wait
//! for that very answer).
//!
//! Nothing here decides what to answer, and nothing that the kernel sends makes it panic.

pub mod abi;
mod dir;
mod eager;
mod encode;
mod extension;
mod init;
mod memory;
pub mod mount;
mod notify;
pub mod opcode;
mod reply;
mod request;
mod transport;

pub use dir::{DirBuffer, Dirent, dirent_len};
pub use eager::Eager;
pub use encode::encode;
pub use extension::{Extensions, SecurityContext};
pub use init::{InitError, Negotiated, Wanted, handshake, negotiate};
pub use memory::MemoryTransport;
pub use notify::Notification;
pub use opcode::opcode_name;
pub use reply::{Attr, Entry, FileLock, Reply, StatFs, Statx};
pub use request::{
    CopyRange, DecodeError, Fault, Forgets, Header, LockRequest, Operation, SetAttr, SetTime, Time, decode,
};
pub use transport::{DevFuse, Level, NotifyOutcome, Transport};
