//! The null daemon's tree. Cookies are insertion numbers: a listing is in order of creation.

use std::collections::{BTreeMap, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

use nigh_fuse::{Attr, SetAttr, SetTime, Time};

/// The kernel's node id of the mount's root.
const ROOT: u64 = 1;

/// A node in an entry reply.
#[derive(Clone, Copy)]
pub struct Made {
    pub nodeid: u64,
    pub attr: Attr,
}

/// All nodes.
pub struct Tree {
    nodes: HashMap<u64, Node>,
    next: u64,
}

struct Node {
    attr: Attr,
    /// A file's data or a symlink's target.
    contents: Vec<u8>,
    names: HashMap<Vec<u8>, (u64, u64)>,
    order: BTreeMap<u64, (Vec<u8>, u64)>,
    last_cookie: u64,
}

impl Node {
    fn new(nodeid: u64, mode: u32, owner: (u32, u32), contents: &[u8]) -> Node {
        let now = now();
        let (size, links) = (length(contents), if is_dir(mode) { 2 } else { 1 });
        let attr = Attr {
            ino: nodeid,
            size,
            blocks: size.div_ceil(512),
            atime: now,
            mtime: now,
            ctime: now,
            mode,
            nlink: links,
            uid: owner.0,
            gid: owner.1,
            blksize: 4096,
            ..Attr::default()
        };
        let (names, order) = (HashMap::new(), BTreeMap::new());
        Node { attr, contents: contents.to_vec(), names, order, last_cookie: 2 }
    }

    fn insert(&mut self, name: &[u8], nodeid: u64) {
        self.remove(name);
        self.last_cookie += 1;
        self.names.insert(name.to_vec(), (nodeid, self.last_cookie));
        self.order.insert(self.last_cookie, (name.to_vec(), nodeid));
        self.attr.mtime = now();
    }

    fn remove(&mut self, name: &[u8]) -> Option<u64> {
        let (nodeid, cookie) = self.names.remove(name)?;
        self.order.remove(&cookie);
        self.attr.mtime = now();
        Some(nodeid)
    }

    fn resized(&mut self) {
        self.attr.size = length(&self.contents);
        self.attr.blocks = self.attr.size.div_ceil(512);
        self.attr.mtime = now();
    }
}

impl Tree {
    #[must_use]
    pub fn new() -> Tree {
        let owner = unsafe { (libc::getuid(), libc::getgid()) };
        let root = Node::new(ROOT, libc::S_IFDIR | 0o755, owner, &[]);
        Tree { nodes: HashMap::from([(ROOT, root)]), next: ROOT + 1 }
    }

    #[must_use]
    pub fn attr(&self, nodeid: u64) -> Option<Attr> {
        self.nodes.get(&nodeid).map(|node| node.attr)
    }

    #[must_use]
    pub fn child(&self, dir: u64, name: &[u8]) -> Option<Made> {
        let (nodeid, _) = *self.nodes.get(&dir)?.names.get(name)?;
        self.attr(nodeid).map(|attr| Made { nodeid, attr })
    }

    /// Returns the number of names in a directory.
    #[must_use]
    pub fn children(&self, dir: u64) -> u32 {
        self.nodes.get(&dir).map_or(0, |node| u32::try_from(node.names.len()).unwrap_or(u32::MAX))
    }

    #[must_use]
    pub fn is_full(&self, dir: u64, name: &[u8]) -> bool {
        self.child(dir, name).is_some_and(|child| self.children(child.nodeid) > 0)
    }

    /// Returns a file's data or a symlink's target.
    #[must_use]
    pub fn contents(&self, nodeid: u64) -> Option<&[u8]> {
        self.nodes.get(&nodeid).map(|node| node.contents.as_slice())
    }

    /// Returns the names behind a cookie, with their nodes.
    pub fn after(&self, dir: u64, cookie: u64) -> impl Iterator<Item = (u64, &[u8], Made)> {
        let entries = self.nodes.get(&dir).into_iter().flat_map(move |node| node.order.range(cookie + 1..));
        entries.filter_map(|(cookie, (name, nodeid))| {
            self.attr(*nodeid).map(|attr| (*cookie, name.as_slice(), Made { nodeid: *nodeid, attr }))
        })
    }

    /// Creates a node under a name. `mode` includes the file type.
    pub fn make(&mut self, dir: u64, name: &[u8], mode: u32, owner: (u32, u32), contents: &[u8]) -> Made {
        let nodeid = self.next;
        self.next += 1;
        let node = Node::new(nodeid, mode, owner, contents);
        let attr = node.attr;
        self.nodes.insert(nodeid, node);
        if let Some(parent) = self.nodes.get_mut(&dir) {
            parent.insert(name, nodeid);
            parent.attr.nlink += u32::from(is_dir(mode));
        }
        Made { nodeid, attr }
    }

    pub fn remove(&mut self, dir: u64, name: &[u8]) -> bool {
        let Some(nodeid) = self.nodes.get_mut(&dir).and_then(|node| node.remove(name)) else { return false };
        let was_dir = self.nodes.remove(&nodeid).is_some_and(|node| is_dir(node.attr.mode));
        if let Some(parent) = self.nodes.get_mut(&dir) {
            parent.attr.nlink -= u32::from(was_dir);
        }
        true
    }

    pub fn rename(&mut self, dir: u64, name: &[u8], new_dir: u64, new_name: &[u8]) -> bool {
        let Some(nodeid) = self.nodes.get_mut(&dir).and_then(|node| node.remove(name)) else { return false };
        self.remove(new_dir, new_name);
        if let Some(parent) = self.nodes.get_mut(&new_dir) {
            parent.insert(new_name, nodeid);
        }
        true
    }

    pub fn set(&mut self, nodeid: u64, set: &SetAttr) -> Option<Attr> {
        let node = self.nodes.get_mut(&nodeid)?;
        if let Some(size) = set.size {
            node.contents.resize(usize::try_from(size).ok()?, 0);
            node.resized();
        }
        let attr = &mut node.attr;
        attr.mode = set.mode.map_or(attr.mode, |mode| attr.mode & libc::S_IFMT | mode & 0o7777);
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime = set.atime.map_or(attr.atime, moment);
        attr.mtime = set.mtime.map_or(attr.mtime, moment);
        attr.ctime = now();
        Some(*attr)
    }

    #[must_use]
    pub fn read(&self, nodeid: u64, offset: u64, size: u32) -> &[u8] {
        let contents = self.contents(nodeid).unwrap_or_default();
        let end = (offset + u64::from(size)).min(length(contents));
        if offset >= end { &[] } else { part(contents, offset, end) }
    }

    /// Writes data; returns the number of bytes written.
    pub fn write(&mut self, nodeid: u64, offset: u64, data: &[u8]) -> u32 {
        let Some(node) = self.nodes.get_mut(&nodeid) else { return 0 };
        let at = position(offset);
        let Some(end) = at.checked_add(data.len()) else { return 0 };
        if node.contents.len() < end {
            node.contents.resize(end, 0);
        }
        node.contents[at..end].copy_from_slice(data);
        node.resized();
        u32::try_from(data.len()).unwrap_or(0)
    }
}

fn is_dir(mode: u32) -> bool {
    mode & libc::S_IFMT == libc::S_IFDIR
}

fn length(contents: &[u8]) -> u64 {
    u64::try_from(contents.len()).unwrap_or(u64::MAX)
}

fn part(contents: &[u8], from: u64, to: u64) -> &[u8] {
    &contents[position(from)..position(to)]
}

/// Converts an offset in data held in memory, which fits in a pointer.
fn position(at: u64) -> usize {
    usize::try_from(at).unwrap_or(usize::MAX)
}

fn moment(time: SetTime) -> Time {
    match time {
        SetTime::Now => now(),
        SetTime::At(time) => time,
    }
}

fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (i64::try_from(since.as_secs()).unwrap_or(0), since.subsec_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_and_go() {
        let mut tree = Tree::new();
        let dir = tree.make(ROOT, b"d", libc::S_IFDIR | 0o755, (0, 0), &[]).nodeid;
        tree.make(dir, b"a", libc::S_IFREG | 0o644, (0, 0), &[]);
        tree.make(dir, b"b", libc::S_IFREG | 0o644, (0, 0), &[]);
        assert!(tree.is_full(ROOT, b"d") && tree.child(dir, b"c").is_none());
        assert!(tree.rename(dir, b"a", dir, b"c"));
        let names: Vec<&[u8]> = tree.after(dir, 2).map(|(_, name, _)| name).collect();
        assert_eq!(names, [b"b", b"c"]);
        assert!(tree.remove(dir, b"b") && !tree.remove(dir, b"b"));
    }

    #[test]
    fn data_is_kept() {
        let mut tree = Tree::new();
        let file = tree.make(ROOT, b"f", libc::S_IFREG | 0o644, (0, 0), &[]).nodeid;
        assert_eq!(tree.write(file, 3, b"later"), 5);
        assert_eq!(tree.write(file, 0, b"one"), 3);
        assert_eq!(tree.read(file, 0, 100), b"onelater");
        assert_eq!(tree.read(file, 6, 100), b"er");
        assert_eq!(tree.attr(file).map(|a| a.size), Some(8));
    }
}
