//! Caches, remotes and kernels under virtual time, for tests.
//!
//! | module | contents |
//! | --- | --- |
//! | `kernel`, `page_cache` | models of the kernel's dentry and inode caches, its page cache and its cached listings |
//! | `world` | clients of one fake server, stepped by hand; every step compares kernels with the server's tree |
//! | `script` | races as readable text files, in `testdata` |
//! | `native` | the native protocol's state machines instead of the fake server, with byte streams between them |
//! | `random` | seeded histories |
//! | `orders` | exhaustive exploration of all orders in which a few calls can interleave |
//! | `scan` | scans of a directory that another client changes |
//! | `differential` | differential test: one client beside a reference tree that executes each request directly |
//! | `history` | linearizability checker for calls recorded on several mounts |

pub mod differential;
pub mod history;
pub mod kernel;
pub mod native;
pub mod orders;
pub mod page_cache;
pub mod random;
pub mod scan;
pub mod script;
pub mod world;
