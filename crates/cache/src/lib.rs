//! The metadata cache as a pure state machine.
//!
//! It caches facts under grants (docs/decisions/0004-facts-and-overlay.md), answers the kernel's requests from them,
//! and calls the remote for what it does not know. It uses no clock, no socket and no randomness; [`Cache`] documents
//! its calling contract.
//!
//! Modules in layers, the lowest first; each imports its own layer and lower ones
//! (docs/decisions/0038-owners-of-the-cache.md):
//!
//! | module | contents |
//! | --- | --- |
//! | `op`, `config`, `counters`, `grants`, `byte_ranges`, `cookies32` | types of the interface, live grants, ranges, short offsets |
//! | `store` | owner of the facts: inodes, directories, entries, suspended facts |
//! | `calls` | owner of calls in flight, waiting and queued requests, race logs, mutations |
//! | `kernel` | owner of pending invalidations, timers, negative dentries, node ids |
//! | `session`, `open`, `pages`, `contents`, `prefetch`, `inotify` | owners of session state, open files and locks, page records, file contents, prefetch jobs, watches |
//! | `state` | all owners |
//! | `view` | read-only: what the facts say, paths, directories that the kernel has locked |
//! | `out` | replies, calls, pins, invalidations |
//! | `facts` | `changes`: what a local change makes of the facts; `learn`: what a reply says; how facts end |
//! | `page_cache` | the kernel's pages and mmap write-back |
//! | `ops`, `memory`, `watching` | one module per kind of request, and the replies to its calls; budget and pressure; inotify watchers |
//! | `inputs` | replies by the kind of call, session events, reclaim, recalls, updates, timeouts |
//! | `cache` | the façade |

mod byte_ranges;
mod cache;
mod calls;
mod config;
mod contents;
mod cookies32;
mod counters;
mod facts;
mod grants;
mod inotify;
mod inputs;
mod kernel;
mod memory;
mod notifier_queue;
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
mod view;
mod watching;

pub use cache::Cache;
pub use config::{Config, OnDisconnect, Prefetch};
pub use counters::{Counters, Gauges};
pub use inotify::{RemoteChange, WatchStatus};
pub use kernel::NotifyLevel;
pub use notifier_queue::{NotifierJob, NotifierQueue};
pub use op::{
    Caller, CredentialsId, Fh, InvalidationId, KernelInvalidation, LockSpan, Node, Op, OpReply, Opened,
    Output, Page, PageEntry, Reason, Urgency,
};
pub use ops::xattr::{is_privileged, sized_xattr};
