//! Hints: where the remote finds an inode.

use crate::cache::Cache;
use nigh_types::{Call, Name, NodeId, Place};

/// Longer paths than this are not walked (Linux's PATH_MAX allows 2,048 components).
const DEEPEST: u32 = 4_096;

impl Cache {
    /// The id of a number that the kernel uses.
    pub(crate) fn id_of(&self, ino: u64) -> Option<NodeId> {
        self.inodes.get(&ino).map(|i| i.id).or_else(|| self.dirs.get(&ino).map(|d| d.id))
    }

    /// The inode with its hint; `None` if the kernel uses a number that it was never given.
    pub(crate) fn place(&self, ino: u64) -> Option<Place> {
        let node = self.id_of(ino)?;
        let home = self.inodes.get(&ino).and_then(|i| i.home.as_ref());
        let hint = home.and_then(|(dir, name)| Some((self.id_of(*dir)?, name.clone())));
        Some(Place { node, hint })
    }

    /// The directory and name under which the kernel last looked an inode up, if it still knows it.
    #[must_use]
    pub fn home_of(&self, ino: u64) -> Option<(u64, Name)> {
        self.inodes.get(&ino).filter(|i| i.lookups > 0).and_then(|i| i.home.clone())
    }

    /// Every name under which the kernel knows an inode, in a fixed order.
    #[must_use]
    pub fn kernel_names(&self) -> Vec<(u64, Name)> {
        let known = self.inodes.values().filter(|i| i.lookups > 0);
        let mut names: Vec<(u64, Name)> = known.filter_map(|i| i.home.clone()).collect();
        names.sort_unstable();
        names
    }

    /// Names from the root to `name` in a directory, as far as they are known.
    #[must_use]
    pub fn path_of(&self, dir: u64, name: &Name) -> Option<Vec<Name>> {
        let mut names = self.path_to(self.id_of(dir)?)?;
        names.push(name.clone());
        Some(names)
    }

    /// Names from the root to an inode, as far as the cache knows them.
    pub(crate) fn path_to(&self, node: NodeId) -> Option<Vec<Name>> {
        let mut names = Vec::new();
        let mut at = node.ino;
        for _ in 0..DEEPEST {
            if at == self.root {
                names.reverse();
                return Some(names);
            }
            let (dir, name) = self.inodes.get(&at)?.home.as_ref()?;
            names.push(name.clone());
            at = *dir;
        }
        None
    }
}

/// The inodes that a call must reach, in the order in which the remote is led to them; none for
/// calls that are not repeated after a walk.
pub(crate) fn anchors(call: &Call) -> [Option<NodeId>; 2] {
    let one = match call {
        Call::Lookup { dir, .. }
        | Call::List { dir }
        | Call::Create { dir, .. }
        | Call::Tmpfile { dir, .. }
        | Call::Mknod { dir, .. }
        | Call::Mkdir { dir, .. }
        | Call::Symlink { dir, .. }
        | Call::Unlink { dir, .. }
        | Call::Rmdir { dir, .. } => dir.node,
        Call::GetAttr { node }
        | Call::ReadLink { node }
        | Call::Xattrs { node }
        | Call::Xattr { node, .. }
        | Call::StatFs { node }
        | Call::Open { node, .. }
        | Call::Read { node, .. }
        | Call::Seek { node, .. }
        | Call::GetFlags { node }
        | Call::SetAttr { node, .. }
        | Call::Fallocate { node, .. }
        | Call::SetXattr { node, .. }
        | Call::RemoveXattr { node, .. }
        | Call::Fsync { node, .. } => node.node,
        Call::Link { node, dir, .. } => return [Some(dir.node), Some(node.node)],
        Call::Rename { from, to, .. } => return [Some(to.node), Some(from.node)],
        Call::Walk { .. } | Call::Release { .. } | Call::Write { .. } | Call::CopyRange { .. } => {
            return [None, None];
        }
    };
    [Some(one), None]
}
