//! Forgotten inodes, for file handles that name them by number.

use nigh_types::{Name, NodeId};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

#[derive(Clone, Debug)]
struct ForgottenInode {
    generation: u64,
    /// `None`: the remote said only that it is the directory of an inode.
    parent_entry: Option<(u64, Name)>,
    turn: u64,
}

/// Remembered inodes by number; the earliest is dropped first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Forgotten {
    nodes: FxHashMap<u64, ForgottenInode>,
    order: VecDeque<(u64, u64)>,
    turn: u64,
}

impl Forgotten {
    pub fn put(&mut self, id: NodeId, parent_entry: Option<(u64, Name)>, most: u64) {
        self.turn += 1;
        self.nodes
            .insert(id.ino, ForgottenInode { generation: id.generation, parent_entry, turn: self.turn });
        self.order.push_back((id.ino, self.turn));
        while self.order.len() as u64 > most
            && let Some((ino, turn)) = self.order.pop_front()
        {
            if self.nodes.get(&ino).is_some_and(|node| node.turn == turn) {
                self.nodes.remove(&ino);
            }
        }
    }

    pub fn id(&self, ino: u64) -> Option<NodeId> {
        self.nodes.get(&ino).map(|node| NodeId { ino, generation: node.generation })
    }

    pub fn parent_entry(&self, ino: u64) -> Option<&(u64, Name)> {
        self.nodes.get(&ino)?.parent_entry.as_ref()
    }

    /// Forgets all: they are of another server.
    pub fn clear(&mut self) {
        *self = Forgotten::default();
    }
}
