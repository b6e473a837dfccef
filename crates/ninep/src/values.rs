//! Values in messages: qids, attributes, locks, space.

use crate::ProtocolError;
use crate::wire::{Reader, Text, Wire};

/// File type in a qid; all other types are distinguished by the mode.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum QidKind {
    Directory,
    Symlink,
    Other,
}

/// The server's identity of a file. Two files with one path are one file; `version` changes with the contents, or is 0
/// if the server does not know.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Qid {
    /// Bits: 0x80 a directory, 0x02 a symlink.
    pub bits: u8,
    pub version: u32,
    pub path: u64,
}

impl Qid {
    #[must_use]
    pub fn kind(self) -> QidKind {
        match self.bits {
            bits if bits & 0x80 != 0 => QidKind::Directory,
            bits if bits & 0x02 != 0 => QidKind::Symlink,
            _ => QidKind::Other,
        }
    }
}

/// Declares a struct whose fields stand on the wire in their order.
macro_rules! record {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Debug, Default)]
        pub struct $name {
            $($(#[$about])* pub $field: $kind,)*
        }

        impl Wire for $name {
            fn put(&self, to: &mut Vec<u8>) {
                $(self.$field.put(to);)*
            }

            fn parse(from: &mut Reader<'_>) -> Result<$name, ProtocolError> {
                Ok($name { $($field: Wire::parse(from)?,)* })
            }
        }
    };
}

impl Wire for Qid {
    fn put(&self, to: &mut Vec<u8>) {
        self.bits.put(to);
        self.version.put(to);
        self.path.put(to);
    }

    fn parse(from: &mut Reader<'_>) -> Result<Qid, ProtocolError> {
        Ok(Qid { bits: Wire::parse(from)?, version: Wire::parse(from)?, path: Wire::parse(from)? })
    }
}

record! {
    /// `Rgetattr`. Seconds and nanoseconds of times; sizes in bytes, `blocks` of 512.
    Attributes {
        /// Which of these are valid: [`mask`].
        valid: u64,
        qid: Qid,
        mode: u32,
        uid: u32,
        gid: u32,
        nlink: u64,
        rdev: u64,
        size: u64,
        block_bytes: u64,
        blocks: u64,
        atime: (u64, u64),
        mtime: (u64, u64),
        ctime: (u64, u64),
        birth: (u64, u64),
        generation: u64,
        data_version: u64,
    }
}

record! {
    /// `Rstatfs`, as statfs(2).
    Space {
        magic: u32,
        block_bytes: u32,
        blocks: u64,
        free: u64,
        available: u64,
        files: u64,
        files_free: u64,
        fsid: u64,
        longest_name: u32,
    }
}

record! {
    /// A byte-range lock, as fcntl(2): `kind` is 0 to read, 1 to write, 2 none; length 0 means to the end.
    Lock {
        kind: u8,
        start: u64,
        length: u64,
        pid: u32,
        client: Text,
    }
}

/// Result of a lock request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LockStatus {
    Granted,
    Blocked,
    Refused,
    /// The server waits for clients that held locks before it was started.
    Grace,
}

impl Wire for LockStatus {
    fn put(&self, to: &mut Vec<u8>) {
        to.push(match self {
            LockStatus::Granted => 0,
            LockStatus::Blocked => 1,
            LockStatus::Refused => 2,
            LockStatus::Grace => 3,
        });
    }

    fn parse(from: &mut Reader<'_>) -> Result<LockStatus, ProtocolError> {
        match u8::parse(from)? {
            0 => Ok(LockStatus::Granted),
            1 => Ok(LockStatus::Blocked),
            2 => Ok(LockStatus::Refused),
            3 => Ok(LockStatus::Grace),
            _ => Err(ProtocolError::Malformed("no such status of a lock")),
        }
    }
}

/// Seconds and nanoseconds.
impl Wire for (u64, u64) {
    fn put(&self, to: &mut Vec<u8>) {
        self.0.put(to);
        self.1.put(to);
    }

    fn parse(from: &mut Reader<'_>) -> Result<(u64, u64), ProtocolError> {
        Ok((Wire::parse(from)?, Wire::parse(from)?))
    }
}

/// Attribute masks (`P9_STATS_*`).
pub mod mask {
    /// All attributes of stat(2).
    pub const BASIC: u64 = 0x07ff;
    pub const BIRTH: u64 = 0x0800;

    /// Attributes to be set (`P9_ATTR_*`); a time is the server's own unless its `SET` is there too.
    pub const SET_MODE: u32 = 1;
    pub const SET_UID: u32 = 1 << 1;
    pub const SET_GID: u32 = 1 << 2;
    pub const SET_SIZE: u32 = 1 << 3;
    pub const SET_ATIME: u32 = 1 << 4;
    pub const SET_MTIME: u32 = 1 << 5;
    pub const ATIME_SET: u32 = 1 << 7;
    pub const MTIME_SET: u32 = 1 << 8;
}

/// Flags of `Tlopen` and `Tlcreate` (`P9_DOTL_*`, which are those of Linux on most machines) and of `Tunlinkat`.
pub mod flags {
    pub const RDONLY: u32 = 0;
    pub const WRONLY: u32 = 0o1;
    pub const RDWR: u32 = 0o2;
    pub const CREATE: u32 = 0o100;
    pub const EXCL: u32 = 0o200;
    pub const TRUNC: u32 = 0o1000;
    pub const APPEND: u32 = 0o2000;
    pub const DSYNC: u32 = 0o10_000;
    pub const DIRECT: u32 = 0o40_000;
    pub const DIRECTORY: u32 = 0o200_000;
    pub const NOFOLLOW: u32 = 0o400_000;

    pub const REMOVE_DIRECTORY: u32 = 0x200;
}
