//! 9P2000.L, as Linux and diod speak it, without I/O (docs/decisions/0018-ninep.md). `nigh-pathclient` has the parts of
//! the session that know no messages.
//!
//! | module | contents |
//! | --- | --- |
//! | `wire`, `values`, `message`, `frame`, `listing` | the messages of both directions, and how a stream of bytes is
//! split into them |
//! | `session` | the client's end: a remote like any other |
//! | `session/calls` | calls as messages, a module for each kind of call |
//! | `session/{context, state, messages, fids, files, resolve}` | shared by all calls: tags, fids, how nodes are resolved |

mod error;
mod frame;
mod listing;
mod message;
mod session;
mod values;
mod wire;

pub use error::{LEAST_MSIZE, ProtocolError, VersionText};
pub use frame::{Frame, FrameReader, HEADER_BYTES};
pub use listing::{Dirent, dirents};
pub use message::{Rmessage, Tmessage};
pub use session::{Config, Session, Times, sessions};
pub use values::{Attributes, Lock, LockStatus, Qid, QidKind, Space, flags, mask};
pub use wire::{Data, ShortSequence};

/// The protocol version of this client.
pub const VERSION: &[u8] = b"9P2000.L";
/// The tag of `Tversion`, which is outside the range of all others.
pub const NO_TAG: u16 = u16::MAX;
/// No fid: as the auth fid if no authentication is needed.
pub const NO_FID: u32 = u32::MAX;
/// The most names of one `Twalk` (`P9_MAXWELEM`).
pub const MOST_NAMES: usize = 16;
