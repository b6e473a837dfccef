//! Linearizability checker: whether one order of effects explains every call recorded on several mounts of one tree
//! (docs/decisions/0016-checkers.md, section 4).
//!
//! A [`History`] is plain data: each call with its invocation and response times, and its result. The order in which
//! calls took effect is not known; the checker searches for it. Each change must take effect exactly once, and each
//! read must have been true, at a moment between the two times. The names of all directories are one object, since a
//! rename moves an entry between directories. Each other property of an inode (mode, time, contents, xattr) is an
//! object of its own.
//!
//! | module | contents |
//! | --- | --- |
//! | `search` | the search, for any kind of object |
//! | `names`, `registers` | the objects: their state after a change, and which states satisfy a read |
//! | `cells` | bytes stored into shared maps, checked without a search |
//! | `partition`, `linearizability` | partition of a history into changes and reads of objects, and the verdict |
//! | `text`, `read` | the text form of a history |

mod cells;
mod linearizability;
mod names;
mod partition;
mod read;
mod registers;
mod search;
mod text;

pub use linearizability::{Report, Violation, judge, judge_mounted};
pub use read::{BadLine, parse};

use nigh_types::Errno;

/// Names per directory.
pub const NAMES: u8 = 4;
/// Directories that a history uses.
pub const DIRS: u8 = 2;
/// Latest modification time that a call sets; a later one was set by the server's clock.
pub const LAST_SET_TIME: i64 = 1_500_000_000;
/// Bytes of a window's shared file that are written through maps.
pub const CELLS: u8 = 4;

/// All calls of one window. Times are ns of one clock.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct History {
    pub records: Vec<Record>,
    /// Server kills: the time before the signal, and the time when no call of the killed server can take effect any
    /// more. A change in flight at a kill may be applied a second time (0009, "In doubt").
    pub kills: Vec<(u64, u64)>,
    /// Stopped mounts, and the time range in which reads that return on such a mount are ignored.
    pub stops: Vec<(u8, u64, u64)>,
    /// Mounts that may have lost their open files: a call by descriptor that failed there with EIO may have taken
    /// effect.
    pub lossy_mounts: Vec<u8>,
}

/// One call. A read of the export, beside all mounts, has the mount [`Record::EXPORT`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    pub mount: u8,
    pub worker: u8,
    pub begin: u64,
    /// The response time and the result. `None`: unknown; the call may have taken effect at any later time, or never.
    pub response: Option<(u64, CallResult)>,
    pub call: Call,
}

impl Record {
    /// The mount number of the export itself.
    pub const EXPORT: u8 = u8::MAX;
}

/// A directory entry's position: each directory has [`NAMES`]. Written as `a0` to `b3`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(pub u8);

impl Slot {
    pub const COUNT: u8 = NAMES * DIRS;

    /// # Panics
    /// If the directory or name is out of range.
    #[must_use]
    pub fn new(dir: u8, name: u8) -> Slot {
        assert!(dir < DIRS && name < NAMES, "name {name} of directory {dir}");
        Slot(dir * NAMES + name)
    }

    #[must_use]
    pub fn dir(self) -> u8 {
        self.0 / NAMES
    }

    #[must_use]
    pub fn name(self) -> u8 {
        self.0 % NAMES
    }

    pub fn all() -> impl Iterator<Item = Slot> {
        (0..Slot::COUNT).map(Slot)
    }
}

/// The creator of an inode: unique per call in a window, and readable on the inode by every mount (on mounts it is the
/// group). A call that was applied twice may have created two inodes.
pub type Label = u32;

/// An inode as one call observed it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct File {
    pub label: Label,
    pub ino: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    File,
    Dir,
    Symlink,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameMode {
    Plain,
    NoReplace,
    Exchange,
}

/// A call with a [`Slot`] goes by path, a call with a [`File`] by descriptor. Created directories are never filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// `O_CREAT | O_EXCL`
    Create {
        slot: Slot,
        label: Label,
        mode: u32,
    },
    Mkdir {
        slot: Slot,
        label: Label,
    },
    Symlink {
        slot: Slot,
        label: Label,
    },
    Link {
        old: Slot,
        new: Slot,
    },
    Unlink {
        slot: Slot,
    },
    Rmdir {
        slot: Slot,
    },
    Rename {
        old: Slot,
        new: Slot,
        how: RenameMode,
    },
    /// Opens for reading and writing, with `O_NOFOLLOW`.
    Open {
        slot: Slot,
    },
    Stat {
        slot: Slot,
    },
    ReadLink {
        slot: Slot,
    },
    List {
        dir: u8,
    },
    Fstat {
        file: File,
    },
    Chmod {
        file: File,
        mode: u32,
    },
    Truncate {
        file: File,
        size: u64,
    },
    /// Sets the modification time, in seconds; at most [`LAST_SET_TIME`].
    Times {
        file: File,
        secs: i64,
    },
    SetXattr {
        file: File,
        value: u64,
    },
    RemoveXattr {
        file: File,
    },
    GetXattr {
        file: File,
    },
    /// Eight bytes at offset 0; 0 is never written.
    Write {
        file: File,
        word: u64,
    },
    Read {
        file: File,
    },
    Fsync {
        file: File,
    },
    /// Stores a byte into a shared map and writes it back (msync). 0 is never stored.
    Store {
        cell: u8,
        byte: u8,
    },
    /// Loads the byte from the map.
    Load {
        cell: u8,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CallResult {
    Done,
    Failed(Errno),
    /// Result of `Create` and `Open`.
    Opened(File),
    /// Result of `Stat` and `Fstat`.
    Attributes(ObservedAttrs),
    /// Result of `ReadLink`: the creator's label, which is the link's target.
    Target(Label),
    /// Result of `List`: the number of a name ([`NAMES`] for a name that no call creates) and the inode, in listing
    /// order.
    Entries(Vec<(u8, u64)>),
    /// Result of `Read` (`None`: empty file), `GetXattr` (`None`: no such xattr) and `Load` (`None`: 0).
    Value(Option<u64>),
}

/// Attributes that stat returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObservedAttrs {
    pub file: File,
    pub kind: Kind,
    pub nlink: u64,
    /// Permission bits.
    pub mode: u32,
    pub size: u64,
    /// Modification time in seconds; `None` if the server's clock set it.
    pub mtime: Option<i64>,
}

impl Call {
    /// Returns whether the call can change something.
    #[must_use]
    pub fn is_change(&self) -> bool {
        !matches!(
            self,
            Call::Open { .. }
                | Call::Stat { .. }
                | Call::ReadLink { .. }
                | Call::List { .. }
                | Call::Fstat { .. }
                | Call::GetXattr { .. }
                | Call::Read { .. }
                | Call::Fsync { .. }
                | Call::Load { .. }
        )
    }

    /// Returns the names that the call may change; several calls change none.
    #[must_use]
    pub fn changes_names(&self) -> [Option<Slot>; 2] {
        match *self {
            Call::Create { slot, .. }
            | Call::Mkdir { slot, .. }
            | Call::Symlink { slot, .. }
            | Call::Unlink { slot }
            | Call::Rmdir { slot } => [Some(slot), None],
            Call::Link { new, .. } => [Some(new), None],
            Call::Rename { old, new, .. } => [Some(old), Some(new)],
            _ => [None, None],
        }
    }

    /// Returns both names that the call goes by, or its one name twice; `None` for a call by descriptor.
    #[must_use]
    pub fn names(&self) -> Option<[Slot; 2]> {
        match *self {
            Call::Link { old, new } | Call::Rename { old, new, .. } => Some([old, new]),
            Call::Create { slot, .. }
            | Call::Mkdir { slot, .. }
            | Call::Symlink { slot, .. }
            | Call::Unlink { slot }
            | Call::Rmdir { slot }
            | Call::Open { slot }
            | Call::Stat { slot }
            | Call::ReadLink { slot } => Some([slot, slot]),
            _ => None,
        }
    }

    /// Returns the descriptor's file.
    #[must_use]
    pub fn file(&self) -> Option<File> {
        match *self {
            Call::Fstat { file }
            | Call::Chmod { file, .. }
            | Call::Truncate { file, .. }
            | Call::Times { file, .. }
            | Call::SetXattr { file, .. }
            | Call::RemoveXattr { file }
            | Call::GetXattr { file }
            | Call::Write { file, .. }
            | Call::Read { file }
            | Call::Fsync { file } => Some(file),
            _ => None,
        }
    }
}
