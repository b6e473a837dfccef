//! All server-side I/O: confined access to an export, the driver of its connections, the daemon.
//!
//! [`Export`] executes calls on a directory; [`Server`] serves exports to sessions over streams;
//! [`daemon`] finds or starts the one server of a user.

mod acting;
pub mod daemon;
mod error;
mod export;
mod files;
mod filesystem;
mod handle;
mod ids;
mod mounts;
mod ops;
mod outbox;
mod places;
mod pool;
mod reach;
mod record;
mod server;
mod session;
mod stat;

pub use export::{Export, ExportError, ExportOptions};
pub use files::SessionFiles;
pub use places::Places;
pub use server::{Server, ServerOptions};
