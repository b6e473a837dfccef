//! The metadata cache as a pure state machine.
//!
//! It holds facts under grants (docs/decisions/0004-facts-and-overlay.md), answers the kernel's
//! requests from them, and asks the remote for what it does not know. It touches no clock, no socket
//! and no randomness; [`Cache`] says how it is driven.
//!
//! | room | what lives there |
//! | --- | --- |
//! | `cache` | the type, its inputs and outputs |
//! | `op`, `config`, `counters` | the words of its interface |
//! | `state`, `rows`, `singles`, `grants` | records |
//! | `facts`, `names`, `replace`, `places`, `numbers`, `buried` | finding, learning, replacing, forgetting; the kernel's numbers |
//! | `flight`, `overlay` | calls in flight, mutations among them |
//! | `lookup`, `listing`, `snapshots`, `dirents`, `readdir`, `readers`, `short`, `files`, `mutate`, `targets`, `xattr`, `locks` | one room per kind of request |
//! | `ahead` | directories that come before they are asked for |
//! | `away`, `claim`, `keep`, `limits` | the remote is away, and back; what is open |
//! | `events` | what others changed, for those who watch |
//! | `recall`, `stores`, `kernel`, `rights` | the end of grants, what the kernel may believe |
//! | `evict`, `idle`, `prune` | the budget, memory that others need, inodes of the kernel's |

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
