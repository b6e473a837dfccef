//! 9P2000.L, as Linux and diod speak it, without I/O (docs/decisions/0018-ninep.md).
//!
//! | room | what lives there |
//! | --- | --- |
//! | `wire`, `values`, `message`, `frame`, `listing` | the messages, both ways, and how a stream of bytes is cut into them |
//! | `session` | the client's end: a remote as any other |
//! | `session/calls` | calls as messages, a room for each kind of call |
//! | `session/{desk, fids, nodes, files, reach}` | what calls share: tags, fids, how nodes are reached |

mod error;
mod frame;
mod listing;
mod message;
mod session;
mod values;
mod wire;

pub use error::{LEAST_MSIZE, ProtocolError, Spoken};
pub use frame::{Frame, FrameReader, HEADER_BYTES};
pub use listing::{Dirent, dirents};
pub use message::{Rmessage, Tmessage};
pub use session::{Config, Session, Times, sessions};
pub use values::{Attributes, Lock, LockStatus, Qid, QidKind, Space, flags, mask};
pub use wire::{Data, Few};

/// The version that is spoken.
pub const VERSION: &[u8] = b"9P2000.L";
/// The tag of `Tversion`, which stands outside all others.
pub const NO_TAG: u16 = u16::MAX;
/// No fid: where none is needed to prove who one is.
pub const NO_FID: u32 = u32::MAX;
/// Names that one `Twalk` may have (`P9_MAXWELEM`).
pub const MOST_NAMES: usize = 16;
