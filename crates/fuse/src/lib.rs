//! The kernel FUSE protocol: codec, transports, mounting, notifications.
//!
//! Protocol 7.45 down to 7.31 (`include/uapi/linux/fuse.h`). A caller mounts ([`mount::mount`]), makes a [`DevFuse`]
//! of the device, and negotiates features ([`handshake`]). Then any number of its threads receive requests,
//! [`decode`] them, and send a [`Reply`]. A [`Notification`] invalidates the kernel's caches. A thread with an
//! unanswered request must not send one, because it may wait for that very reply.
//!
//! This crate decides no replies, and no bytes from the kernel make it panic.

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
pub use init::{InitError, Negotiated, RequestedFeatures, handshake, negotiate};
pub use memory::MemoryTransport;
pub use notify::Notification;
pub use opcode::opcode_name;
pub use reply::{Attr, Entry, FileLock, Reply, StatFs, Statx};
pub use request::{
    CopyRange, DecodeError, Fault, Forgets, Header, LockRequest, Operation, SetAttr, SetTime, Time, decode,
};
pub use transport::{DevFuse, Level, NotifyOutcome, Transport};
