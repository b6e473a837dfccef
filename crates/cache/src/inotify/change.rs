//! Remote changes, as they are reported to watchers.

use nigh_types::{Attr, Kind, Name, NodeId};

/// Remote change in a watched directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RemoteChange {
    Made {
        dir: u64,
        name: Name,
        kind: Kind,
    },
    /// `replaced`: another inode was moved to the name.
    Removed {
        dir: u64,
        name: Name,
        node: NodeId,
        kind: Kind,
        replaced: bool,
    },
    Moved {
        from: u64,
        name: Name,
        to: u64,
        new_name: Name,
        node: NodeId,
        kind: Kind,
    },
    /// The data changed.
    Written {
        dir: u64,
        name: Name,
        node: NodeId,
    },
    Attributes {
        dir: u64,
        name: Name,
        node: NodeId,
    },
    /// Unknown changes.
    Gap {
        dir: u64,
    },
}

impl RemoteChange {
    /// Returns the directories of the change.
    #[must_use]
    pub fn dirs(&self) -> (u64, Option<u64>) {
        match self {
            RemoteChange::Moved { from, to, .. } => (*from, Some(*to).filter(|to| to != from)),
            RemoteChange::Made { dir, .. }
            | RemoteChange::Removed { dir, .. }
            | RemoteChange::Written { dir, .. }
            | RemoteChange::Attributes { dir, .. }
            | RemoteChange::Gap { dir } => (*dir, None),
        }
    }

    /// Returns the names of the change.
    pub(crate) fn names(&self) -> Vec<(u64, &Name)> {
        match self {
            RemoteChange::Moved { from, name, to, new_name, .. } => vec![(*from, name), (*to, new_name)],
            RemoteChange::Made { dir, name, .. }
            | RemoteChange::Removed { dir, name, .. }
            | RemoteChange::Written { dir, name, .. }
            | RemoteChange::Attributes { dir, name, .. } => vec![(*dir, name)],
            RemoteChange::Gap { .. } => Vec::new(),
        }
    }

    pub(crate) fn source(&self) -> Option<(u64, Name)> {
        let RemoteChange::Moved { from, name, .. } = self else { return None };
        Some((*from, name.clone()))
    }

    pub(crate) fn target(&self) -> Option<(u64, Name)> {
        let RemoteChange::Moved { to, new_name, .. } = self else { return None };
        Some((*to, new_name.clone()))
    }
}

/// Names and attributes of one update.
#[derive(Clone, Debug, Default)]
pub(crate) struct RemoteUpdate {
    pub names: Vec<(u64, Name)>,
    pub attributes: Vec<(NodeId, Attr)>,
}

impl RemoteUpdate {
    pub fn name(&mut self, dir: u64, name: &Name) {
        self.names.push((dir, name.clone()));
    }

    pub fn attr(&mut self, node: NodeId, attr: Attr) {
        self.attributes.push((node, attr));
    }
}
