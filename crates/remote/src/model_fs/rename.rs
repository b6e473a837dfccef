//! Renames.

use super::make::Plan;
use super::{ModelFs, Outcome};
use nigh_types::{Errno, Handle, Kind, LeaseScope, Name, NodeId, NodeRef, Reply};

/// Both ends of a rename.
pub(super) struct Ends<'a> {
    pub(super) from: &'a NodeRef,
    pub(super) name: &'a Name,
    pub(super) to: &'a NodeRef,
    pub(super) new_name: &'a Name,
}

/// The flags of renameat2(2).
#[derive(Clone, Copy)]
pub(super) struct How {
    pub(super) no_replace: bool,
    pub(super) exchange: bool,
    pub(super) whiteout: bool,
}

impl ModelFs {
    /// `left`: the inode to create as a whiteout.
    pub(super) fn rename(
        &mut self,
        ends: &Ends<'_>,
        how: How,
        keep: Option<NodeId>,
        left: &Plan<'_>,
    ) -> Result<Outcome, Errno> {
        let How { no_replace, exchange, whiteout } = how;
        let now = left.now;
        if exchange && (no_replace || whiteout) {
            return Err(Errno::INVAL);
        }
        let (from, to) = (self.reach_dir(ends.from)?, self.reach_dir(ends.to)?);
        let moved = self.child(from, ends.name).ok_or(Errno::NOENT)?;
        let there = self.child(to, ends.new_name);
        if self.is_below(to, moved) {
            return Err(Errno::INVAL);
        }
        match there {
            None if exchange => return Err(Errno::NOENT),
            Some(_) if no_replace => return Err(Errno::EXIST),
            Some(there) if self.is_below(from, there) => {
                return Err(if exchange { Errno::INVAL } else { Errno::NOTEMPTY });
            }
            Some(there) if there == moved => {
                let kept = (self.is_to_pin(there, keep) && !exchange).then(|| self.open(there));
                return Ok(self.renamed((from, to), moved, (Some(there), kept), None));
            }
            Some(there) if !exchange => self.check_replaced(moved, there)?,
            _ => {}
        }
        self.remove_name(now, from, ends.name, moved);
        if let Some(there) = there {
            self.remove_name(now, to, ends.new_name, there);
            self.clear_replaced_dir(there, exchange);
        }
        self.add_name(now, to, ends.new_name, moved);
        if let (Some(there), true) = (there, exchange) {
            self.add_name(now, from, ends.name, there);
        }
        let left = whiteout.then(|| self.new_inode(from, left));
        left.into_iter().for_each(|left| self.add_name(now, from, ends.name, left));
        let kept = there.filter(|&there| self.is_to_pin(there, keep) && !exchange);
        let kept = kept.map(|there| self.open(there));
        Ok(self.renamed((from, to), moved, (there, kept), left))
    }

    /// Whether an inode is the file that the caller asked to pin.
    pub(super) fn is_to_pin(&self, ino: u64, keep: Option<NodeId>) -> bool {
        let node = &self.nodes[&ino];
        keep == Some(node.id) && node.attr.kind() == Kind::File
    }

    /// A replaced empty directory loses its own `.` with its name.
    fn clear_replaced_dir(&mut self, ino: u64, exchange: bool) {
        let node = self.node_mut(ino);
        if node.attr.is_dir() && !exchange {
            node.attr.nlink = 0;
        }
    }

    fn renamed(
        &self,
        (from, to): (u64, u64),
        moved: u64,
        (there, kept): (Option<u64>, Option<Handle>),
        left: Option<u64>,
    ) -> Outcome {
        let id = |ino: u64| self.nodes[&ino].id;
        let mut touched = vec![from, to, moved];
        touched.extend(there);
        touched.extend(left);
        touched.sort_unstable();
        let granted = vec![
            (id(from), LeaseScope::Directory),
            (id(to), LeaseScope::Directory),
            self.covering(moved, Some(to)),
        ];
        let (replaced, whiteout) = (there.map(id), left.map(id));
        let reply = Reply::Renamed { moved: id(moved), replaced, pinned: kept, whiteout };
        Outcome { reply, touched, granted }
    }

    fn check_replaced(&self, moved: u64, there: u64) -> Result<(), Errno> {
        let (moved, there) = (&self.nodes[&moved], &self.nodes[&there]);
        match (moved.attr.is_dir(), there.attr.is_dir()) {
            (true, false) => Err(Errno::NOTDIR),
            (false, true) => Err(Errno::ISDIR),
            (true, true) if !there.is_empty_dir() => Err(Errno::NOTEMPTY),
            _ => Ok(()),
        }
    }

    /// Whether `dir` is `above` or a descendant of it.
    fn is_below(&self, dir: u64, above: u64) -> bool {
        let mut at = dir;
        loop {
            if at == above {
                return true;
            }
            match self.nodes[&at].links.first() {
                Some((parent, _)) => at = *parent,
                None => return false,
            }
        }
    }
}
