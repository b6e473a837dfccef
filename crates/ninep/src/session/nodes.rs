//! Nodes and how they are reached: the mapping from qids to node ids, and the fid of each node.

use super::fids::Fid;
use super::node_ids::DIRECTORY;
use crate::values::{Qid, QidKind};
use nigh_types::{Attr, Name, NodeId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{RangeBounds, RangeInclusive};
use std::sync::{Arc, Mutex, PoisonError};

/// The most fids that are kept for nodes, of all users together.
const MOST_KNOWN: usize = 4_096;
/// Numbers from here on have another meaning to a kernel or to nigh, and are no inode numbers
/// (docs/decisions/0001-node-ids.md).
const FIRST_FOREIGN: u64 = 1 << 62;
const FIRST_MAPPED: u64 = 1 << 63;

/// How a node is reached.
#[derive(Clone, Debug)]
pub(crate) struct KnownNode {
    pub fid: Arc<Fid>,
    /// The name by which it was walked to; `None`: the root.
    pub parent_entry: Option<(NodeId, Name)>,
    /// It is open for reading, so no walk can start from it.
    pub open: bool,
    used: u64,
}

/// A node and a user's uid; the keys of one node are adjacent.
type Key = (NodeId, u32);

fn all_views(node: NodeId) -> RangeInclusive<Key> {
    (node, 0)..=(node, u32::MAX)
}

/// Qid paths that cannot be inode numbers, and the numbers that replace them for the life of a mount.
#[derive(Clone, Debug, Default)]
pub(crate) struct InodeNumbers(Arc<Mutex<BTreeMap<u64, u64>>>);

impl InodeNumbers {
    fn of(&self, path: u64) -> u64 {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = FIRST_MAPPED + numbers.len() as u64;
        *numbers.entry(path).or_insert(next)
    }
}

/// State of all known nodes.
#[derive(Debug, Default)]
pub(crate) struct Nodes {
    root: Option<NodeId>,
    known: BTreeMap<Key, KnownNode>,
    order: BTreeMap<u64, Key>,
    uses: u64,
    numbers: InodeNumbers,
    /// The latest attributes of known nodes: data read after them is of their version or later.
    attrs: BTreeMap<NodeId, Attr>,
    /// The latest known name of each node, for any user.
    parent_entries: BTreeMap<NodeId, (NodeId, Name)>,
    /// Names of nodes that have several.
    links: BTreeMap<NodeId, BTreeSet<(NodeId, Name)>>,
}

impl Nodes {
    pub fn new(numbers: InodeNumbers) -> Nodes {
        Nodes { numbers, ..Nodes::default() }
    }

    /// Sets the root's qid, which may differ from that of an earlier connection.
    pub fn set_root(&mut self, qid: Qid) -> NodeId {
        let node = self.node(qid);
        self.root = Some(node);
        node
    }

    /// The root, once it was attached.
    pub fn root(&self) -> Option<NodeId> {
        self.root
    }

    /// The node id for a qid.
    pub fn node(&mut self, qid: Qid) -> NodeId {
        let is_free = (2..FIRST_FOREIGN).contains(&qid.path);
        let ino = if is_free { qid.path } else { self.numbers.of(qid.path) };
        let kind = match qid.kind() {
            QidKind::Other => 1,
            QidKind::Directory => 2,
            QidKind::Symlink => 3,
        };
        NodeId { ino, generation: kind }
    }

    /// How a user reaches a node, if that is known.
    pub fn known(&mut self, uid: u32, node: NodeId) -> Option<KnownNode> {
        self.uses += 1;
        let known = self.known.get_mut(&(node, uid))?;
        self.order.remove(&known.used);
        known.used = self.uses;
        self.order.insert(self.uses, (node, uid));
        Some(known.clone())
    }

    /// Notes how a node is reached, in place of an earlier way. The least recently used ones are dropped.
    pub fn note_known(
        &mut self,
        uid: u32,
        node: NodeId,
        fid: Arc<Fid>,
        home: Option<(NodeId, Name)>,
        open: bool,
    ) {
        self.forget(uid, node);
        if let Some((dir, name)) = &home {
            self.note_parent_entry(node, *dir, name);
        }
        self.uses += 1;
        self.known.insert((node, uid), KnownNode { fid, parent_entry: home, open, used: self.uses });
        self.order.insert(self.uses, (node, uid));
        while self.known.len() > MOST_KNOWN
            && let Some((_, key)) = self.order.pop_first()
        {
            self.known.remove(&key);
            self.attrs.remove(&key.0);
        }
    }

    /// Forgets how a user reaches a node.
    pub fn forget(&mut self, uid: u32, node: NodeId) -> Option<KnownNode> {
        let known = self.known.remove(&(node, uid))?;
        self.order.remove(&known.used);
        Some(known)
    }

    fn forget_those(&mut self, keys: impl RangeBounds<Key>, is_one: impl Fn(&Key, &KnownNode) -> bool) {
        let those: Vec<Key> =
            self.known.range(keys).filter(|(key, known)| is_one(key, known)).map(|(key, _)| *key).collect();
        for (node, uid) in those {
            self.forget(uid, node);
        }
    }

    /// Resets a node that was just created: the inode that had its number before is gone.
    pub fn reset_reused(&mut self, node: NodeId) {
        self.forget_those(all_views(node), |_, _| true);
        self.attrs.remove(&node);
        self.links.remove(&node);
    }

    /// Takes a node's fid if it is not in use elsewhere, because the fid becomes an open file.
    pub fn take_unused(&mut self, uid: u32, node: NodeId) -> Option<KnownNode> {
        let is_unused =
            self.known.get(&(node, uid)).is_some_and(|k| !k.open && Arc::strong_count(&k.fid) == 1);
        if is_unused { self.forget(uid, node) } else { None }
    }

    /// Notes that a name does not lead to a node any more, and forgets the fids that were reached by it. If a directory
    /// was moved, those of all directories are forgotten, since they may be below it. (Some servers use paths as fids;
    /// a file's qid reveals that.)
    pub fn note_name_removed(&mut self, node: NodeId, (dir, name): (NodeId, &Name), is_moved: bool) {
        let was_there =
            |known: &KnownNode| known.parent_entry.as_ref().is_some_and(|(d, n)| *d == dir && n == name);
        self.forget_those(all_views(node), |_, known| was_there(known));
        let is_dir = |node: NodeId| node.generation == DIRECTORY;
        if is_moved && is_dir(node) {
            self.forget_those(.., |(node, _), _| is_dir(*node));
        }
        if self.parent_entries.get(&node).is_some_and(|(d, n)| *d == dir && n == name) {
            self.parent_entries.remove(&node);
        }
        if let Some(names) = self.links.get_mut(&node) {
            names.remove(&(dir, name.clone()));
        }
    }

    /// Notes a name that led to a node.
    pub fn note_parent_entry(&mut self, node: NodeId, dir: NodeId, name: &Name) {
        if self.parent_entries.len() > 4 * MOST_KNOWN {
            self.parent_entries.clear();
        }
        self.parent_entries.insert(node, (dir, name.clone()));
    }

    /// The path from the root to a node, if it is remembered.
    pub fn path(&self, node: NodeId) -> Option<Vec<Name>> {
        let (mut names, mut at) = (Vec::new(), node);
        while self.root != Some(at) {
            let (dir, name) = self.parent_entries.get(&at)?;
            names.push(name.clone());
            at = *dir;
            if names.len() > MOST_KNOWN {
                return None;
            }
        }
        names.reverse();
        Some(names)
    }

    /// Notes a name of a node that has several.
    pub fn note_link(&mut self, node: NodeId, dir: NodeId, name: &Name) {
        if self.links.len() > MOST_KNOWN {
            self.links.clear();
        }
        self.links.entry(node).or_default().insert((dir, name.clone()));
    }

    /// The known names of a node that has several.
    pub fn links(&self, node: NodeId) -> Vec<(NodeId, Name)> {
        self.links.get(&node).into_iter().flatten().cloned().collect()
    }

    pub fn note_attr(&mut self, node: NodeId, attr: Attr) {
        if self.attrs.len() > 2 * MOST_KNOWN {
            self.attrs.clear();
        }
        self.attrs.insert(node, attr);
    }

    pub fn attr(&self, node: NodeId) -> Option<Attr> {
        self.attrs.get(&node).copied()
    }

    /// Forgets the fids of a connection that is gone.
    pub fn forget_fids(&mut self) {
        self.known.clear();
        self.order.clear();
        self.attrs.clear();
        self.links.clear();
        self.parent_entries.clear();
    }
}
