//! All server-side I/O: confined access to an export, the driver of its connections, the daemon.
//!
//! [`Export`] executes calls on a directory; [`Server`] serves exports to sessions over streams;
//! [`daemon`] finds or starts the one server of a user, [`Serving`] says where it listens besides.

mod acting;
mod affected;
mod claims;
mod control;
pub mod daemon;
mod departed;
mod error;
mod events;
mod export;
mod exports;
mod files;
mod filesystem;
mod handle;
mod homes;
mod ids;
mod intake;
mod leases;
mod listen;
mod listeners;
mod locks;
mod ops;
mod orphans;
mod outbox;
mod page;
mod passed;
mod place_locks;
mod places;
mod pool;
mod reach;
mod record;
mod seal;
mod server;
mod session;
mod stake;
mod stat;
mod unsent;
mod users;
mod work;

pub use claims::{Admission, unix_peer};
pub use control::ask;
pub use export::{Export, ExportError, ExportOptions};
pub use exports::Exports;
pub use files::SessionFiles;
pub use listen::{Listen, Serving};
pub use nigh_native::lease::{LeaseConfig, LeaseReport};
pub use page::{page, summary};
pub use passed::Passed;
pub use places::Places;
pub use server::{Server, ServerOptions};
pub use users::credentials_of;
