//! What a remote answers.

use crate::{Attr, Errno, Grant, Handle, Kind, LockInfo, Name, NodeId};

/// One thing that a name leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub id: NodeId,
    pub attr: Attr,
    /// Of a symlink, where the remote sent it along.
    pub target: Option<Box<[u8]>>,
    /// The remote looked and there is no xattr (and so no ACL) on it.
    pub no_xattrs: bool,
}

/// A part of a directory's listing, in cookie order; equal cookies are never split.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Listed {
    pub entries: Vec<(Name, Entry)>,
}

/// Of a walk ahead: the names of a directory, or more of them; those of one are not parted by those of another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    pub dir: NodeId,
    /// `None`: it is not told, for whatever reason; who wants it asks.
    pub listed: Option<Listed>,
    /// Nothing more of this directory is to come.
    pub last: bool,
}

/// All xattrs of an inode as far as they fit a reply.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct XattrSet {
    /// Name and value; `None` where the value was too large to send along.
    pub items: Vec<(Box<[u8]>, XattrValue)>,
}

/// A value; `None` where it was too large to send along with others.
pub type XattrValue = Option<Box<[u8]>>;

/// What statfs(2) says of the filesystem below a node.
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

/// What getdents64(2) says of a name. The number is that of its inode as applications see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dirent {
    pub name: Name,
    pub ino: u64,
    pub kind: Option<Kind>,
}

/// The answer proper to one kind of call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// What a name leads to; `None`: the directory has no such name.
    Looked(Option<Entry>),
    /// Attributes of the call's node.
    Attr(NodeId, Attr),
    /// The inode that has the call's number; the directory and name that lead to it, but for the root.
    Found {
        node: NodeId,
        attr: Attr,
        home: Option<(NodeId, Name)>,
    },
    Listed(Listed),
    /// The same where attributes are not told: `None`, where the type is not either.
    Names(Vec<(Name, NodeId, Option<Kind>)>),
    Ahead(Vec<Step>),
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
    /// `existed`: a non-exclusive create found it there. `handle`: for create and tmpfile.
    Made {
        entry: Entry,
        handle: Option<Handle>,
        existed: bool,
    },
    /// The inode whose name went; a handle where it was to be kept.
    Removed {
        node: NodeId,
        kept: Option<Handle>,
    },
    /// `replaced`: what stood at the new name (the other one, of an exchange). `whiteout`: what was left at the old name, if that was
    /// asked for; its attributes stand in [`Response::after`].
    Renamed {
        moved: NodeId,
        replaced: Option<NodeId>,
        kept: Option<Handle>,
        whiteout: Option<NodeId>,
    },
    Written {
        offset: u64,
        count: u64,
    },
    Done,
    /// The first lock that is in the way.
    Locked(Option<LockInfo>),
}

/// One message that answers a call. All but `List`, `Dirents` and `Ahead` have exactly one, with `last` set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Response {
    pub result: Result<Reply, Errno>,
    /// Attributes, after the call, of other inodes that it touched or looked at: the directories of
    /// a mutation, a listing's own directory (with its last part), an unlinked file with links left.
    /// An inode that is gone stands here with `nlink` 0. A file that was written may be left out: then nothing is known of it.
    pub after: Vec<(NodeId, Attr)>,
    /// Permission to keep facts of this reply. A listing's come with its first part: registered
    /// before the directory was read.
    pub grants: Vec<Grant>,
    pub last: bool,
}

impl Response {
    /// A reply without grants or attributes of others.
    #[must_use]
    pub fn plain(result: Result<Reply, Errno>) -> Response {
        Response { result, after: Vec::new(), grants: Vec::new(), last: true }
    }
}
