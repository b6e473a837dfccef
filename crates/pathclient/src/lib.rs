//! Parts of a client session for protocols that have no node ids: a server finds an inode by a path, and then by the
//! file id that the path was resolved to (9P: a fid). See docs/decisions/0042-pathclient.md.
//!
//! | module | contents |
//! | --- | --- |
//! | `executor` | the tasks of a session: a coroutine for each call |
//! | `schedule` | which tasks can go on; how a task waits |
//! | `drop_queue` | what coroutines have dropped, until the session releases it at the server |
//! | `nodes` | the file ids, names and attributes of nodes |
//! | `inode_numbers` | numbers of the server that cannot be inode numbers |
//!
//! Nothing here knows messages: a session sends them, and wakes a task when its reply has arrived.

mod drop_queue;
mod executor;
mod inode_numbers;
mod nodes;
mod schedule;

pub use drop_queue::DropQueue;
pub use executor::{Coroutine, Executor, Limits, TaskKind};
pub use inode_numbers::InodeNumbers;
pub use nodes::{KnownNode, Nodes};
pub use schedule::{Schedule, TaskContext, TaskId};
