//! Caches, remotes and kernels under virtual time, for tests.
//!
//! | room | what lives there |
//! | --- | --- |
//! | `kernel`, `kept` | what a kernel believes of what it was told, and what it keeps of open files and directories: models |
//! | `world` | clients of one fake server, stepped by hand, with the truth checked after each step |
//! | `script` | races as readable texts, in `testdata` |
//! | `native` | the protocol's own machines in the fake server's place, with bytes between them |
//! | `random` | seeded histories |
//! | `orders` | all orders in which a few calls can meet there, with nothing left to chance |
//! | `scan` | scans of a directory that another client changes |
//! | `mirror` | one client beside a second tree that executes the same requests directly |
//! | `history` | the judge of what processes on several mounts were told, where the order of effects is not known |

pub mod history;
pub mod kept;
pub mod kernel;
pub mod mirror;
pub mod native;
pub mod orders;
pub mod random;
pub mod scan;
pub mod script;
pub mod world;
