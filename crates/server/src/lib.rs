//! All server-side I/O: confined access to an export, its connections, and the daemon.
//!
//! [`Export`] executes calls on a directory. [`Server`] serves exports to sessions over streams. [`daemon`] finds or
//! starts a user's single server. [`Serving`] holds its further listen addresses.

mod connection;
pub mod daemon;
mod export;
mod lease;
mod limits;
mod ops;
mod os;
mod pool;
mod server;
mod session;
mod watch;

pub use connection::quotas::ServerLimits;
pub use daemon::control::ask;
pub use daemon::listen::{Listen, Serving};
pub use daemon::server_dirs::ServerDirs;
pub use daemon::socket_activation::PassedSocket;
pub use daemon::status_text::{status_page, summary};
pub use export::exports::Exports;
pub use export::open_handles::OpenHandles;
pub use export::{Export, ExportError, ExportOptions};
pub use lease::session_files::SessionFiles;
pub use nigh_lease::{LeaseConfig, LeaseReport};
pub use os::squash::{CredentialPolicy, unix_peer};
pub use os::users::credentials_of;
pub use server::{Server, ServerOptions};
pub use watch::WatchMethod;
