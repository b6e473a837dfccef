//! All client-side I/O of a mount.
//!
//! | room | what lives there |
//! | --- | --- |
//! | `mount` | putting a mount together, its threads, its end |
//! | `link` | the mount's link: hello, reading and writing, making it again |
//! | `adapter` | a FUSE request to an operation: decode, one call |
//! | `answers` | an answer to a FUSE reply |
//! | `driver` | carries outputs between cache, remote, kernel and link |
//! | `clock`, `alarm` | time, which goes on while the machine sleeps |
//! | `notifier` | tells the kernel to forget, without anybody waiting for it |
//! | `worker` | threads that tell the kernel what may get stuck |
//! | `watchdog` | a child that aborts the connection when the daemon was killed |
//! | `stopper` | unmounting from within the daemon |
//! | `below` | what is mounted below the mount |
//! | `events` | inotify(7) for what others change |
//! | `pressure` | hears when memory is short |
//! | `interrupts` | which signals are fatal |
//! | `lengths` | tells the kernel how long an open file is |
//! | `credentials` | the groups and capabilities of a caller |
//! | `idmap` | ids of this machine and of the server's |
//! | `status`, `control` | what `nigh status` shows, and how it asks |

mod adapter;
mod alarm;
mod answers;
mod below;
mod clock;
pub mod control;
mod credentials;
mod driver;
pub mod events;
mod idmap;
mod interrupts;
mod lengths;
mod link;
mod mount;
mod notifier;
mod openers;
pub mod pressure;
mod readers;
mod revalidations;
mod root;
mod scheduled;
#[cfg(test)]
mod stage;
pub mod status;
mod stopper;
pub mod watchdog;
mod worker;

pub use clock::boot_time;
pub use events::EventsConfig;
pub use idmap::{IdMapChoice, IdMapError};
pub use link::{Begin, Reconnect};
pub use mount::{Mount, MountConfig, StartError, names_alone};
pub use nigh_cache::{Config as CacheConfig, OnDisconnect, Prefetch};
/// What a command needs of the kernel's side: mounting, and transports of its own.
pub use nigh_fuse as fuse;
pub use nigh_link::Link;
pub use pressure::Pressure;
pub use stopper::Stopper;
