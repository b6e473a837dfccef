//! What processes on several mounts of one tree did and were told, and whether some one order explains it
//! (docs/decisions/0016-checkers.md, section 4).
//!
//! A [`History`] is plain data: each call with the moments before and after it, and what came of it. The order in which
//! calls took effect is not known and is searched for: each must have had its one effect, and each look must have
//! been so, at a moment between the two. Names of all directories are judged together, since a rename moves
//! between them; what an inode is otherwise (mode, time, contents, xattr) each by itself.
//!
//! | room | what lives there |
//! | --- | --- |
//! | `search` | the search, of any object |
//! | `names`, `registers` | the objects: what a change makes of one, and when a look fits |
//! | `cells` | bytes that are stored into maps, which are judged without a search |
//! | `pieces`, `judge` | a history divided into changes and looks of objects, and the verdict |
//! | `text`, `read` | the form in which a history is kept |

mod cells;
mod judge;
mod names;
mod pieces;
mod read;
mod registers;
mod search;
mod text;

pub use judge::{Report, Violation, judge, judge_mounted};
pub use read::{BadLine, parse};

use nigh_types::Errno;

/// Names in one directory.
pub const NAMES: u8 = 4;
/// Directories in which a history happens.
pub const DIRS: u8 = 2;
/// A later modification time is the server's own.
pub const LAST_SET_TIME: i64 = 1_500_000_000;
/// Bytes of a window's shared file that are stored into through maps.
pub const CELLS: u8 = 4;

/// Everything of one window. Moments are ns of one clock.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct History {
    pub records: Vec<Record>,
    /// When servers were killed: before the signal, and when none of what it did can take effect any more. A change that
    /// was out then may be made a second time (0009, "In doubt").
    pub kills: Vec<(u64, u64)>,
    /// Which mount was stopped, and in which time looks that return on it are left out.
    pub stops: Vec<(u8, u64, u64)>,
    /// Mounts that may have lost what they had open: EIO by a descriptor may have taken effect there, or not.
    pub losses: Vec<u8>,
}

/// One call. What is read beside all mounts counts as a call of [`Record::EXPORT`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    pub mount: u8,
    pub worker: u8,
    pub begin: u64,
    /// When it returned, and what. `None`: nobody knows; it may have taken effect at any time since, or not.
    pub answer: Option<(u64, Answer)>,
    pub call: Call,
}

impl Record {
    /// As a mount: the export itself.
    pub const EXPORT: u8 = u8::MAX;
}

/// A name of a directory: directories have [`NAMES`] each. Written as `a0` to `b3`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(pub u8);

impl Slot {
    pub const COUNT: u8 = NAMES * DIRS;

    /// # Panics
    /// Where there is no such directory or name.
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

/// Who made an inode: no two calls of a window have the same, and everybody sees it on the inode (on mounts it is the
/// group). A call that was made twice may have made two inodes.
pub type Label = u32;

/// An inode as somebody saw it.
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
pub enum How {
    Plain,
    NoReplace,
    Exchange,
}

/// Those with a [`Slot`] go by a name, those with a [`File`] by a descriptor. Directories that are made are never
/// filled.
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
        how: How,
    },
    /// For reading and writing, `O_NOFOLLOW`.
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
    /// Sets the modification time, in seconds, to [`LAST_SET_TIME`] at the most.
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
    /// Stores a byte into a shared map and has it written back (msync). 0 is never stored.
    Store {
        cell: u8,
        byte: u8,
    },
    /// Loads it.
    Load {
        cell: u8,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    Done,
    Failed(Errno),
    /// Of `Create` and `Open`.
    Opened(File),
    /// Of `Stat` and `Fstat`.
    Seen(Seen),
    /// Of `ReadLink`: who made it, which stands in the target.
    Target(Label),
    /// Of `List`: number of a name ([`NAMES`] for one that nobody makes) and inode, in the order of the listing.
    Listed(Vec<(u8, u64)>),
    /// Of `Read` (`None`: the file is empty), `GetXattr` (`None`: there is none) and `Load` (`None`: 0).
    Value(Option<u64>),
}

/// What stat said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    pub file: File,
    pub kind: Kind,
    pub nlink: u64,
    /// Permission bits.
    pub mode: u32,
    pub size: u64,
    /// Of the modification time, seconds; `None` if it is the server's own.
    pub mtime: Option<i64>,
}

impl Call {
    /// Whether it can change something.
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

    /// The names that it may change; several calls change none.
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

    /// Both names that it goes by, or twice the one. `None`: it goes by none.
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

    /// The descriptor's file.
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
