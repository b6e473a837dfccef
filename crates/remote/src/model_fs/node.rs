//! The tree's inodes.

use super::content::Content;
use nigh_types::{Attr, Cookie, CookieKey, Entry, Name, NodeId};
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) attr: Attr,
    pub(super) body: Body,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Directory and name of each link; as many as `attr.nlink`, except for directories.
    pub(super) links: Vec<(u64, Name)>,
    pub(super) opens: u32,
    /// Created without a name, and linkable.
    pub(super) nameless: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Body {
    File(Content),
    Directory(Directory),
    Symlink(Box<[u8]>),
    Special,
}

/// A directory's names, in cookie order.
#[derive(Clone, Default, Debug)]
pub(super) struct Directory {
    pub(super) entries: BTreeMap<(Cookie, Name), u64>,
}

impl Node {
    pub(super) fn new(id: NodeId, attr: Attr, body: Body) -> Node {
        Node { id, attr, body, xattrs: BTreeMap::new(), links: Vec::new(), opens: 0, nameless: false }
    }

    pub(super) fn entry(&self) -> Entry {
        let target = match &self.body {
            Body::Symlink(target) => Some(target.clone()),
            _ => None,
        };
        Entry { id: self.id, attr: self.attr, target, no_xattrs: self.xattrs.is_empty() }
    }

    pub(super) fn is_empty_dir(&self) -> bool {
        matches!(&self.body, Body::Directory(directory) if directory.entries.is_empty())
    }
}

impl Directory {
    pub(super) fn find(&self, key: CookieKey, name: &Name) -> Option<u64> {
        self.entries.get(&(key.cookie(name.as_bytes()), name.clone())).copied()
    }

    pub(super) fn insert(&mut self, key: CookieKey, name: Name, ino: u64) {
        self.entries.insert((key.cookie(name.as_bytes()), name), ino);
    }

    pub(super) fn remove(&mut self, key: CookieKey, name: &Name) {
        self.entries.remove(&(key.cookie(name.as_bytes()), name.clone()));
    }
}
