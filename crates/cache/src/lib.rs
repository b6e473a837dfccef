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

mod ahead;
mod away;
mod behind;
mod buried;
mod cache;
mod claim;
mod compact;
mod config;
mod counters;
mod dirents;
mod events;
mod evict;
mod facts;
mod files;
mod flight;
mod forgotten;
mod grants;
mod idle;
mod keep;
mod kernel;
mod limits;
mod listing;
mod locked;
mod locks;
mod lookup;
mod mutate;
mod names;
mod numbers;
mod op;
mod overlay;
mod oversized;
mod overtaken;
mod places;
mod prune;
mod push;
mod readdir;
mod readers;
mod recall;
mod removed;
mod replace;
mod rights;
mod rows;
mod short;
mod singles;
mod snapshots;
mod space;
mod state;
mod stores;
mod targets;
mod ungranted;
mod whole;
mod xattr;

pub use ahead::Prefetch;
pub use cache::Cache;
pub use config::{Config, OnDisconnect};
pub use counters::{Counters, Gauges};
pub use events::{Change, Watching};
pub use kernel::Level;
pub use op::{
    Answer, Caller, Fh, Invalidation, LockSpan, Node, Op, Opened, Output, Page, PageEntry, Reason, Stale,
};
pub use xattr::{is_privileged, sized_xattr};
