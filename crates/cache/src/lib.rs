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
//! | `state`, `rows`, `singles`, `grants` | records |
//! | `facts`, `names`, `replace` | finding, applying, replacing and dropping facts |
//! | `places`, `numbers`, `buried`, `forgotten` | node references and FUSE node ids |
//! | `flight`, `overlay` | calls in flight, mutations among them |
//! | `lookup`, `files`, `mutate`, `removed`, `targets`, `xattr`, `space`, `locks` | one module per kind of request |
//! | `readdir`, `listing`, `snapshots`, `dirents`, `oversized`, `readers`, `short` | reading directories |
//! | `ahead` | prefetch of directories |
//! | `away`, `claim`, `keep`, `limits` | session state, reclaim, pins of open files, request deadlines |
//! | `push`, `events` | updates in place, remote changes for inotify watchers |
//! | `recall`, `behind`, `kernel`, `rights` | end of grants, invalidation queue, kernel timeouts |
//! | `stores`, `ungranted`, `whole`, `overtaken`, `locked` | the kernel's pages, write-back of mmap stores |
//! | `evict`, `idle`, `prune` | memory budget, memory pressure, the kernel's inodes |

mod attributes;
mod cache;
mod calls;
mod config;
mod cookies32;
mod counters;
mod dead_dentries;
mod dentry_leases;
mod dir_entries;
mod directory_lease;
mod directory_merge;
mod evict;
mod files;
mod forgotten;
mod full_pages;
mod grants;
mod inotify;
mod invalidation_queue;
mod kernel;
mod kernel_locks;
mod listing;
mod listing_snapshots;
mod locks;
mod lookup;
mod memory_pressure;
mod mmap_writeback;
mod mutate;
mod names_only_listing;
mod node_ref;
mod nodeid_map;
mod op;
mod open_pins;
mod oversized;
mod packed_attr;
mod pending_mutations;
mod prefetch;
mod prune;
mod read_after_write;
mod readdir;
mod readdirplus_heuristic;
mod recall;
mod reclaim;
mod removed;
mod request_deadlines;
mod rights;
mod session_state;
mod state;
mod statfs;
mod targets;
mod ungranted;
mod updates;
mod xattr;

pub use cache::Cache;
pub use config::{Config, OnDisconnect};
pub use counters::{Counters, Gauges};
pub use inotify::{Change, Watching};
pub use kernel::NotifyLevel;
pub use op::{
    Answer, Caller, Fh, Invalidation, KernelInvalidation, LockSpan, Node, Op, Opened, Output, Page,
    PageEntry, Reason,
};
pub use prefetch::Prefetch;
pub use xattr::{is_privileged, sized_xattr};
