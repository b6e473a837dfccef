//! Replies of a remote.

use crate::{Attr, Errno, Grant, Handle, Kind, LockInfo, Name, NodeId};

/// The inode of a directory entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub id: NodeId,
    pub attr: Attr,
    /// Target of a symlink, if the remote sent it with the entry.
    pub target: Option<Box<[u8]>>,
    /// The remote checked that the inode has no xattr (and so no ACL).
    pub no_xattrs: bool,
}

/// A chunk of a directory's listing, in cookie order; equal cookies are never split.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Entries {
    pub entries: Vec<(Name, Entry)>,
}

/// A prefetched directory, or a chunk of one; chunks of different directories do not interleave.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefetchedDir {
    pub dir: NodeId,
    /// `None`: the remote does not send this directory; the client lists it when needed.
    pub listed: Option<Entries>,
    /// Whether this is the directory's last chunk.
    pub last: bool,
}

/// All xattrs of an inode as far as they fit a reply.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct XattrSet {
    /// Names and values; `None` for a value too large to send along.
    pub items: Vec<(Box<[u8]>, XattrValue)>,
}

/// An xattr value; `None` if it was too large to send along with others.
pub type XattrValue = Option<Box<[u8]>>;

/// Result of statfs(2) on the filesystem that contains a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    pub blocks: u64,
    pub blocks_free: u64,
    pub blocks_available: u64,
    pub files: u64,
    pub files_free: u64,
    /// Bytes.
    pub block_size: u32,
    /// Bytes.
    pub fragment_size: u32,
    pub name_max: u32,
}

/// A directory entry as getdents64(2) returns it. `ino` is the inode number that applications see.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dirent {
    pub name: Name,
    pub ino: u64,
    pub kind: Option<Kind>,
}

/// The result of a call, by kind of call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Result of a lookup; `None`: the directory has no such name.
    Entry(Option<Entry>),
    /// Attributes of the call's node.
    Attr(NodeId, Attr),
    /// The inode with the call's number, and the parent directory and name that lead to it, except for the root.
    Found {
        node: NodeId,
        attr: Attr,
        parent_entry: Option<(NodeId, Name)>,
    },
    Listed(Entries),
    /// A chunk of a listing without attributes; the type is `None` if it is unknown.
    Names(Vec<(Name, NodeId, Option<Kind>)>),
    Prefetched(Vec<PrefetchedDir>),
    Dirents(Vec<Dirent>),
    Target(Box<[u8]>),
    Xattrs(XattrSet),
    Value(Vec<u8>),
    Space(Space),
    Opened {
        handle: Handle,
        attr: Attr,
    },
    Data(Vec<u8>),
    Offset(u64),
    Flags(u32),
    /// `existed`: a non-exclusive create found an existing file. `handle`: for create and tmpfile.
    Created {
        entry: Entry,
        handle: Option<Handle>,
        existed: bool,
    },
    /// The inode that lost its name, and the handle of its pin, if the call asked for one.
    Removed {
        node: NodeId,
        pinned: Option<Handle>,
    },
    /// `replaced`: the inode that had the new name (for an exchange, the other inode). `whiteout`: the inode left at
    /// the old name, if requested; its attributes are in [`Response::after`].
    Renamed {
        moved: NodeId,
        replaced: Option<NodeId>,
        pinned: Option<Handle>,
        whiteout: Option<NodeId>,
    },
    Written {
        offset: u64,
        count: u64,
    },
    Done,
    /// The first conflicting lock.
    LockConflict(Option<LockInfo>),
}

/// One reply message. All calls but `List`, `Dirents` and `Ahead` have exactly one, with `last` set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Response {
    pub result: Result<Reply, Errno>,
    /// Attributes after the call of other inodes that it touched or read: the directories of a mutation, a listing's
    /// own directory (with its last chunk), an unlinked file with remaining links. A deleted inode has `nlink` 0. A
    /// written file may be absent; then its attributes are unknown.
    pub after: Vec<(NodeId, Attr)>,
    /// Grants for the facts of this reply. A listing's come with its first chunk: the remote registers them
    /// before it reads the directory.
    pub grants: Vec<Grant>,
    pub last: bool,
}

impl Response {
    /// A reply without grants and without attributes of other inodes.
    #[must_use]
    pub fn plain(result: Result<Reply, Errno>) -> Response {
        Response { result, after: Vec::new(), grants: Vec::new(), last: true }
    }

    /// The handle of the file that this reply opens.
    pub fn opened_handle(&mut self) -> Option<&mut Handle> {
        match self.result.as_mut().ok()? {
            Reply::Opened { handle, .. } => Some(handle),
            Reply::Created { handle, .. } => handle.as_mut(),
            Reply::Removed { pinned, .. } | Reply::Renamed { pinned, .. } => pinned.as_mut(),
            _ => None,
        }
    }
}
