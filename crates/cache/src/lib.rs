//! The metadata cache as a pure state machine.
//!
//! It caches facts under grants (docs/decisions/0004-facts-and-overlay.md), answers the kernel's requests from them,
//! and calls the remote for what it does not know. It uses no clock, no socket and no randomness; [`Cache`] documents
//! its calling contract.
//!
//! | module | contents |
//! | --- | --- |
//! | `cache` | the type, its inputs and outputs |
//! | `op`, `config`, `counters` | types of its interface |
//! | `records`, `dir_entries`, `dentry_leases`, `grants` | records |
//! | `attributes`, `directory_lease`, `directory_merge` | finding, applying, replacing and dropping facts |
//! | `node_ref`, `nodeid_map`, `dead_dentries`, `forgotten` | node references and FUSE node ids |
//! | `calls`, `pending_mutations` | calls in flight, mutations among them |
//! | `lookup`, `files`, `mutate`, `removed`, `targets`, `xattr`, `statfs`, `locks` | one module per kind of request |
//! | `readdir`, `listing`, `listing_snapshots`, `names_only_listing`, `oversized`, `readdirplus_heuristic`, `cookies32` | reading directories |
//! | `prefetch` | prefetch of directories |
//! | `session_state`, `reclaim`, `open_pins`, `request_deadlines` | session state, reclaim, pins of open files, request deadlines |
//! | `updates`, `inotify` | updates in place, remote changes for inotify watchers |
//! | `recall`, `invalidation_queue`, `kernel`, `remove_privs` | end of grants, invalidation queue, kernel timeouts |
//! | `mmap_writeback`, `ungranted`, `full_pages`, `read_after_write`, `kernel_locks` | the kernel's pages, write-back of mmap stores |
//! | `evict`, `memory_pressure`, `prune` | memory budget, memory pressure, the kernel's inodes |

mod byte_ranges;
mod cache;
mod calls;
mod config;
mod cookies32;
mod counters;
mod facts;
mod grants;
mod inotify;
mod inputs;
mod kernel;
mod memory;
mod op;
mod open;
mod ops;
mod out;
mod page_cache;
mod pages;
mod prefetch;
mod session;
mod state;
mod store;
#[cfg(test)]
mod test_fixtures;
mod watching;

pub use cache::Cache;
pub use config::{Config, OnDisconnect, Prefetch};
pub use counters::{Counters, Gauges};
pub use inotify::{RemoteChange, WatchStatus};
pub use kernel::NotifyLevel;
pub use op::{
    Caller, Fh, InvalidationId, KernelInvalidation, LockSpan, Node, Op, OpReply, Opened, Output, Page,
    PageEntry, Reason, Urgency,
};
pub use ops::xattr::{is_privileged, sized_xattr};
