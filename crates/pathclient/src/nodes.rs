//! Registry of nodes: the file ids by which users reach them, and their names and attributes.

use crate::InodeNumbers;
use nigh_types::{Attr, Name, NodeId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{RangeBounds, RangeInclusive};
use std::sync::Arc;

/// How a user reaches a node. `F`: the protocol's file id, which is closed when its last reference is dropped.
#[derive(Debug)]
pub struct KnownNode<F> {
    pub fid: Arc<F>,
    /// The parent directory, and the name in it by which the node was reached; `None`: the root, or unknown.
    pub parent_entry: Option<(NodeId, Name)>,
    /// The file id is open for reading, so no path can be resolved from it.
    pub open: bool,
    used: u64,
}

impl<F> Clone for KnownNode<F> {
    fn clone(&self) -> KnownNode<F> {
        KnownNode { fid: Arc::clone(&self.fid), parent_entry: self.parent_entry.clone(), ..*self }
    }
}

/// A node and a user's uid; the keys of one node are adjacent.
type Key = (NodeId, u32);

fn all_users(node: NodeId) -> RangeInclusive<Key> {
    (node, 0)..=(node, u32::MAX)
}

/// All known nodes of a session. A fact may be missing at any time, since the number of nodes in each map is bounded: the least
/// recently used file ids go first, other maps are emptied.
///
/// Invariant: `order` has the key of each entry of `known`, under the entry's `used`.
#[derive(Debug)]
pub struct Nodes<F> {
    /// The most entries of `known`, of all users together.
    capacity: usize,
    root: Option<NodeId>,
    known: BTreeMap<Key, KnownNode<F>>,
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

impl<F> Nodes<F> {
    /// Creates an empty registry. `capacity`: the most file ids that it keeps; `numbers`: those of the mount.
    #[must_use]
    pub fn new(capacity: usize, numbers: InodeNumbers) -> Nodes<F> {
        Nodes {
            capacity,
            root: None,
            known: BTreeMap::new(),
            order: BTreeMap::new(),
            uses: 0,
            numbers,
            attrs: BTreeMap::new(),
            parent_entries: BTreeMap::new(),
            links: BTreeMap::new(),
        }
    }

    /// The node id for a server's number of a file, and a generation that the session chooses.
    #[must_use]
    pub fn node_id(&self, number: u64, generation: u64) -> NodeId {
        NodeId { ino: self.numbers.inode_number(number), generation }
    }

    /// Sets the root, which may differ from that of an earlier connection.
    pub fn set_root(&mut self, root: NodeId) {
        self.root = Some(root);
    }

    /// The root, once it is known.
    #[must_use]
    pub fn root(&self) -> Option<NodeId> {
        self.root
    }

    /// How a user reaches a node, if that is known. It becomes the most recently used entry.
    pub fn known(&mut self, uid: u32, node: NodeId) -> Option<KnownNode<F>> {
        self.uses += 1;
        let known = self.known.get_mut(&(node, uid))?;
        self.order.remove(&known.used);
        known.used = self.uses;
        self.order.insert(self.uses, (node, uid));
        Some(known.clone())
    }

    /// Notes how a user reaches a node, in place of an earlier way. Beyond the capacity, the least recently used entries
    /// are dropped, with the attributes of their nodes.
    pub fn note_known(
        &mut self,
        uid: u32,
        node: NodeId,
        fid: Arc<F>,
        parent_entry: Option<(NodeId, Name)>,
        open: bool,
    ) {
        self.forget(uid, node);
        if let Some((dir, name)) = &parent_entry {
            self.note_parent_entry(node, *dir, name);
        }
        self.uses += 1;
        self.known.insert((node, uid), KnownNode { fid, parent_entry, open, used: self.uses });
        self.order.insert(self.uses, (node, uid));
        while self.known.len() > self.capacity
            && let Some((_, key)) = self.order.pop_first()
        {
            self.known.remove(&key);
            self.attrs.remove(&key.0);
        }
    }

    /// Forgets how a user reaches a node.
    pub fn forget(&mut self, uid: u32, node: NodeId) -> Option<KnownNode<F>> {
        let known = self.known.remove(&(node, uid))?;
        self.order.remove(&known.used);
        Some(known)
    }

    /// Forgets how all users reach the nodes for which the condition is true.
    pub fn forget_nodes(&mut self, is_one: impl Fn(NodeId) -> bool) {
        self.forget_matching(.., |(node, _), _| is_one(*node));
    }

    fn forget_matching(&mut self, keys: impl RangeBounds<Key>, is_one: impl Fn(&Key, &KnownNode<F>) -> bool) {
        let keys: Vec<Key> =
            self.known.range(keys).filter(|(key, known)| is_one(key, known)).map(|(key, _)| *key).collect();
        for (node, uid) in keys {
            self.forget(uid, node);
        }
    }

    /// Forgets the file ids, attributes and links of a node that was just created: the inode that had its node id before
    /// is gone.
    pub fn reset_reused(&mut self, node: NodeId) {
        self.forget_matching(all_users(node), |_, _| true);
        self.attrs.remove(&node);
        self.links.remove(&node);
    }

    /// Takes a node's file id out of the registry if nothing else refers to it, because it becomes an open file.
    pub fn take_unused(&mut self, uid: u32, node: NodeId) -> Option<KnownNode<F>> {
        let is_unused =
            self.known.get(&(node, uid)).is_some_and(|k| !k.open && Arc::strong_count(&k.fid) == 1);
        if is_unused { self.forget(uid, node) } else { None }
    }

    /// Notes that a name does not lead to a node any more, and forgets the file ids that were reached by it.
    pub fn note_name_removed(&mut self, node: NodeId, (dir, name): (NodeId, &Name)) {
        let was_there =
            |known: &KnownNode<F>| known.parent_entry.as_ref().is_some_and(|(d, n)| *d == dir && n == name);
        self.forget_matching(all_users(node), |_, known| was_there(known));
        if self.parent_entries.get(&node).is_some_and(|(d, n)| *d == dir && n == name) {
            self.parent_entries.remove(&node);
        }
        if let Some(names) = self.links.get_mut(&node) {
            names.remove(&(dir, name.clone()));
        }
    }

    /// Notes a name that led to a node.
    pub fn note_parent_entry(&mut self, node: NodeId, dir: NodeId, name: &Name) {
        if self.parent_entries.len() > 4 * self.capacity {
            self.parent_entries.clear();
        }
        self.parent_entries.insert(node, (dir, name.clone()));
    }

    /// The path from the root to a node, if it is remembered: the names from the root downwards, none for the root.
    #[must_use]
    pub fn path(&self, node: NodeId) -> Option<Vec<Name>> {
        let (mut names, mut at) = (Vec::new(), node);
        while self.root != Some(at) {
            let (dir, name) = self.parent_entries.get(&at)?;
            names.push(name.clone());
            at = *dir;
            if names.len() > self.capacity {
                return None;
            }
        }
        names.reverse();
        Some(names)
    }

    /// Notes a name of a node that has several.
    pub fn note_link(&mut self, node: NodeId, dir: NodeId, name: &Name) {
        if self.links.len() > self.capacity {
            self.links.clear();
        }
        self.links.entry(node).or_default().insert((dir, name.clone()));
    }

    /// The known names of a node that has several, with their directories.
    #[must_use]
    pub fn links(&self, node: NodeId) -> Vec<(NodeId, Name)> {
        self.links.get(&node).into_iter().flatten().cloned().collect()
    }

    /// Notes the attributes of a node, in place of earlier ones.
    pub fn note_attr(&mut self, node: NodeId, attr: Attr) {
        if self.attrs.len() > 2 * self.capacity {
            self.attrs.clear();
        }
        self.attrs.insert(node, attr);
    }

    /// The latest noted attributes of a node, if they are remembered.
    #[must_use]
    pub fn attr(&self, node: NodeId) -> Option<Attr> {
        self.attrs.get(&node).copied()
    }

    /// Forgets all but the root, because the connection with its file ids is gone.
    pub fn clear(&mut self) {
        self.known.clear();
        self.order.clear();
        self.attrs.clear();
        self.links.clear();
        self.parent_entries.clear();
    }
}
