//! Clean file contents in memory, and how far ahead of their readers they are read.
//!
//! [`Store`] holds extents of files within a budget, least recently used first out. It knows nothing of grants: its owner
//! keeps a tag with each file, and drops the file when its contents may have changed.
//!
//! | module | contents |
//! | --- | --- |
//! | `store` | extents of files, their use, eviction |
//! | `link_rate` | bytes that are worth having in flight on the link |
//! | `sequential` | window of one reader that reads a file from front to back |
//!
//! See docs/decisions/0043-contents.md.

mod link_rate;
mod sequential;
mod store;

pub use link_rate::{LinkRate, SendMark};
pub use sequential::SequentialReader;
pub use store::{FileKey, Origin, Store, StoreUse};

/// Size of a read that fetches contents ahead: the largest that the kernel's own readahead makes by default.
pub const CHUNK: u64 = 128 << 10;
