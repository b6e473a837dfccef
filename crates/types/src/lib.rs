//! Data types that all layers of nigh share. They contain little logic: what several layers must do alike.
//!
//! Nothing here reads a clock, a socket or randomness. A value that came from a peer is only
//! constructed through a checking constructor ([`Name::new`], [`Kind::of_mode`]).

mod attr;
mod call;
mod cookie;
mod errno;
mod event;
mod fault_injection;
mod grant;
mod id;
mod lock;
mod lock_ranges;
mod name;
mod node_ref;
mod origin;
mod privileges;
mod reply;
mod session_params;
mod text;
mod time;
mod update;

pub use attr::{Attr, DataVersion, Kind, SetAttr, SetTime, Timestamp};
pub use call::{Access, Call, MutationId, PrefetchOrder, Request, WriteBackPrecondition, WriteFlags};
pub use cookie::{Cookie, CookieKey, FIRST_NAME_COOKIE};
pub use errno::Errno;
pub use event::Event;
pub use fault_injection::{Bug, plant, planted};
pub use grant::{Grant, GrantId, LeaseScope, Mode, Recall, RecallId, Term};
pub use id::{CallId, Handle, NodeId, OpId};
pub use lock::{LockInfo, LockKind};
pub use lock_ranges::{LockEdit, LockRanges};
pub use name::{BadName, Name};
pub use node_ref::{Credentials, NodeRef};
pub use origin::Origin;
pub use privileges::{IdRange, Privileges};
pub use reply::{Dirent, Entries, Entry, PrefetchedDir, Reply, Response, Space, XattrSet, XattrValue};
pub use session_params::{
    Features, Guarantees, IdKind, IdName, RemoteIds, SessionParams, UnsupportedGuarantee,
};
pub use text::{MAX_SHOWN_CHARS, byte_text, printable};
pub use time::{Span, Time};
pub use update::{UpdateCommit, UpdatePrepare, UpdateScope, UpdatedFact};
