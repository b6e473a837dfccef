//! Directories that the kernel looked up last.

use nigh_types::{Attr, Name, NodeId};
use std::collections::VecDeque;

/// Names of the directories in the latest replies. The directory entries have these only under a lease.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentDirLookups(VecDeque<(u64, Name, NodeId, Attr)>);

impl RecentDirLookups {
    /// The kernel looks a name up right before it removes what is there.
    const MOST: usize = 16;

    /// Records a reply. `directory`: `None` if the name leads to something else.
    pub fn put(&mut self, (dir, name): (u64, &Name), directory: Option<(NodeId, Attr)>) {
        if directory.is_none() && self.0.is_empty() {
            return;
        }
        self.0.retain(|(d, n, ..)| (*d, n) != (dir, name));
        let Some((id, attr)) = directory else { return };
        self.0.push_back((dir, name.clone(), id, attr));
        if self.0.len() > RecentDirLookups::MOST {
            self.0.pop_front();
        }
    }

    pub fn at(&self, (dir, name): (u64, &Name)) -> Option<NodeId> {
        self.0.iter().find(|(d, n, ..)| (*d, n) == (dir, name)).map(|(_, _, id, _)| *id)
    }

    /// Returns the attributes of the directory in its last LOOKUP reply.
    pub fn attr_of(&self, directory: NodeId) -> Option<Attr> {
        self.0.iter().rev().find(|(_, _, id, _)| *id == directory).map(|(_, _, _, attr)| *attr)
    }
}
