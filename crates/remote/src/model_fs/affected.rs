//! Facts that a call would invalidate.

use super::ModelFs;
use nigh_types::{Access, Call, LeaseScope, Name, NodeId, NodeRef};

/// Facts under `(node, covers)` that a call changes; with names, only the facts of these names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    pub node: NodeId,
    pub covers: LeaseScope,
    pub names: Vec<Name>,
}

/// The facts that `call` would change if executed now. The tree's server recalls the grants that cover them before
/// it executes the call.
pub(super) fn of(tree: &ModelFs, call: &Call) -> Vec<Change> {
    let mut changes = Changes { tree, list: Vec::new() };
    match call {
        Call::Create { dir, name, access, .. } => match tree.child(dir.node.ino, name) {
            Some(there) if access.truncate => changes.file(there),
            Some(_) => {}
            None => changes.name(dir, name),
        },
        Call::Mknod { dir, name, .. } | Call::Mkdir { dir, name, .. } | Call::Symlink { dir, name, .. } => {
            changes.name(dir, name);
        }
        Call::Link { node, dir, name } => {
            changes.name(dir, name);
            changes.attributes(node.node.ino);
        }
        Call::Unlink { dir, name, .. } | Call::Rmdir { dir, name } => changes.removed(dir, name),
        Call::Rename { from, name, to, new_name, .. } => {
            changes.removed(from, name);
            changes.removed(to, new_name);
        }
        Call::SetAttr { node, set, .. } if set.size.is_none() => changes.attributes(node.node.ino),
        Call::SetXattr { node, .. } | Call::RemoveXattr { node, .. } => {
            changes.attributes(node.node.ino);
        }
        Call::Open { node, access: Access { truncate: true, .. } }
        | Call::SetAttr { node, .. }
        | Call::Write { node, .. }
        | Call::Fallocate { node, .. }
        | Call::CopyRange { to: node, .. } => changes.file(node.node.ino),
        _ => {}
    }
    changes.list
}

struct Changes<'a> {
    tree: &'a ModelFs,
    list: Vec<Change>,
}

impl Changes<'_> {
    fn push(&mut self, node: NodeId, covers: LeaseScope, name: Option<&Name>) {
        match self.list.iter_mut().find(|change| change.node == node && change.covers == covers) {
            Some(change) => change.names.extend(name.filter(|name| !change.names.contains(name)).cloned()),
            None => self.list.push(Change { node, covers, names: name.into_iter().cloned().collect() }),
        }
    }

    /// A name appears or disappears, so the directory's times change too.
    fn name(&mut self, dir: &NodeRef, name: &Name) {
        if self.tree.attr(dir.node).is_some() {
            self.push(dir.node, LeaseScope::Directory, Some(name));
            self.push(dir.node, LeaseScope::Attributes, None);
        }
    }

    fn removed(&mut self, dir: &NodeRef, name: &Name) {
        self.name(dir, name);
        if let Some(ino) = self.tree.child(dir.node.ino, name) {
            self.attributes(ino);
        }
    }

    fn attributes(&mut self, ino: u64) {
        let Some(node) = self.tree.nodes.get(&ino) else { return };
        self.push(node.id, LeaseScope::Attributes, None);
        if !node.attr.is_dir() {
            for (parent, name) in &node.links {
                self.push(self.tree.nodes[parent].id, LeaseScope::Directory, Some(name));
            }
        }
    }

    fn file(&mut self, ino: u64) {
        self.attributes(ino);
        if let Some(node) = self.tree.nodes.get(&ino) {
            self.push(node.id, LeaseScope::Data, None);
        }
    }
}
