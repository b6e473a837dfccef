//! All client-side I/O of a mount.
//!
//! | module | contents |
//! | --- | --- |
//! | `mount` | start of a mount, its threads, its end |
//! | `link` | the mount's link: handshake, reads and writes, reconnection |
//! | `adapter` | translation of a FUSE request into an operation |
//! | `reply` | encoding of a reply for FUSE |
//! | `driver` | carries outputs between cache, remote, kernel and link |
//! | `clock`, `timer` | time (`CLOCK_BOOTTIME`, which includes suspend) and the timer |
//! | `notifier` | sends invalidations to the kernel, without delay to other threads |
//! | `worker` | threads for notifications that may block in the kernel |
//! | `watchdog` | a child process that aborts the FUSE connection if the daemon is killed |
//! | `stopper` | unmount by the daemon itself |
//! | `host` | what only a local kernel knows of callers and mounts |
//! | `events` | inotify(7) events for changes by other clients |
//! | `pressure` | memory pressure events |
//! | `interrupts` | detection of fatal signals |
//! | `size_notify` | notification of an open file's size |
//! | `page_fills` | small files stored in the kernel's page cache when they are opened |
//! | `credentials` | groups and capabilities of a caller |
//! | `idmap` | mapping between ids of this machine and of the server |
//! | `status`, `control` | the contents of `nigh status`, and its socket |

mod adapter;
mod clock;
pub mod control;
mod credentials;
mod driver;
pub mod events;
mod host;
mod idmap;
mod interrupts;
mod link;
mod mount;
mod notifier;
mod open_credentials;
mod page_fills;
pub mod pressure;
mod reply;
mod reply_barrier;
mod revalidations;
mod root_probe;
mod size_notify;
pub mod status;
mod stopper;
#[cfg(test)]
mod test_server;
mod thread_state;
mod timer;
pub mod watchdog;
mod worker;

pub use clock::boot_time;
pub use events::EventsConfig;
pub use host::{Host, LocalHost, NoHost};
pub use idmap::{IdMapChoice, IdMapError};
pub use link::{Begin, Reconnect};
pub use mount::{AttachedSession, Mount, MountConfig, StartError, needs_exclusive_dir_lease};
pub use nigh_cache::{Config as CacheConfig, OnDisconnect, Prefetch};
/// Interface to the kernel for a command: mounting, and transports of its own.
pub use nigh_fuse as fuse;
pub use nigh_link::Link;
pub use pressure::Pressure;
pub use stopper::Stopper;
