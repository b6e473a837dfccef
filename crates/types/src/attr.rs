//! Attributes of an inode.

use crate::Errno;

/// Seconds and nanoseconds since 1970 UTC; `nanos` < 1,000,000,000.
///
/// Packed to 12 bytes, because cached entries hold three of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(C, packed(4))]
pub struct Timestamp {
    pub secs: i64,
    pub nanos: u32,
}

impl std::fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (secs, nanos) = (self.secs, self.nanos);
        write!(f, "{secs}.{nanos:09}")
    }
}

impl Timestamp {
    /// As (seconds, nanoseconds), for ordering.
    #[must_use]
    pub fn pair(self) -> (i64, u32) {
        (self.secs, self.nanos)
    }
}

/// Attributes of an inode as `stat` reports them, without the inode's id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Attr {
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes.
    pub blocks: u64,
    /// File type and permission bits, as in `st_mode`.
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    /// Of a device node: Linux's 32-bit encoding (`new_encode_dev`).
    pub rdev: u32,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    /// Nanoseconds since 1970; 0 where the filesystem has no birth times.
    pub birth_ns: u64,
}

/// Version of a file's data: size and mtime. It leaves out ctime, which a rename or chmod changes
/// without a change of the data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct DataVersion {
    /// Bytes.
    pub size: u64,
    pub mtime: Timestamp,
}

impl DataVersion {
    #[must_use]
    pub fn of(attr: &Attr) -> DataVersion {
        DataVersion { size: attr.size, mtime: attr.mtime }
    }
}

/// Type of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

impl Kind {
    /// The type in the top bits of `st_mode`; `EPROTO` for a type that Linux does not have.
    pub fn of_mode(mode: u32) -> Result<Kind, Errno> {
        Ok(match mode & 0o170_000 {
            0o100_000 => Kind::File,
            0o040_000 => Kind::Directory,
            0o120_000 => Kind::Symlink,
            0o010_000 => Kind::Fifo,
            0o140_000 => Kind::Socket,
            0o020_000 => Kind::CharDevice,
            0o060_000 => Kind::BlockDevice,
            _ => return Err(Errno::PROTO),
        })
    }

    /// The bits for `st_mode`.
    #[must_use]
    pub fn mode_bits(self) -> u32 {
        match self {
            Kind::File => 0o100_000,
            Kind::Directory => 0o040_000,
            Kind::Symlink => 0o120_000,
            Kind::Fifo => 0o010_000,
            Kind::Socket => 0o140_000,
            Kind::CharDevice => 0o020_000,
            Kind::BlockDevice => 0o060_000,
        }
    }
}

impl Attr {
    /// The file type. An invalid mode counts as a regular file; the checks on input have refused it before.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind::of_mode(self.mode).unwrap_or(Kind::File)
    }

    #[must_use]
    pub fn is_dir(&self) -> bool {
        self.mode & 0o170_000 == 0o040_000
    }

    /// Whether these attributes are covered by the grant of the directory that names the inode
    /// (not a directory, one link); otherwise they have a grant of their own.
    #[must_use]
    pub fn covered_by_parent(&self) -> bool {
        !self.is_dir() && self.nlink == 1
    }

    /// When the inode was made; `None` where the filesystem does not say.
    #[must_use]
    pub fn birth_time(&self) -> Option<Timestamp> {
        (self.birth_ns != 0).then(|| Timestamp {
            secs: (self.birth_ns / 1_000_000_000).cast_signed(),
            nanos: u32::try_from(self.birth_ns % 1_000_000_000).unwrap_or(0),
        })
    }
}

/// A timestamp to set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetTime {
    /// The server's present time (`UTIME_NOW`).
    Now,
    At(Timestamp),
}

/// Attributes to change; what is `None` stays.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    /// With `size`: the caller lacks `CAP_FSETID`, so the server drops setuid and setgid bits as Linux does
    /// (`FUSE_HANDLE_KILLPRIV_V2`). With `uid` or `gid` it means nothing: chown drops these bits by its own rules.
    /// Alone: chown(2) that keeps owner and group, which drops these bits and a file capability.
    pub kill_suidgid: bool,
}

impl SetAttr {
    /// chown(2) that keeps owner and group.
    #[must_use]
    pub fn chown_to_same() -> SetAttr {
        SetAttr { kill_suidgid: true, ..SetAttr::default() }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == SetAttr { kill_suidgid: self.kill_suidgid, ..SetAttr::default() }
    }
}
