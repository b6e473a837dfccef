//! What a client's own requests change that are not answered: its kernel may believe it as it was.

use super::{Backend, Client, World};
use nigh_cache::Op;
use nigh_types::{Name, WriteFlags};

/// What a request that changes names has done, seen from outside. Others may have moved something else to these names since its
/// kernel looked: that it cannot know by the time at which its own change moves or removes it, but is told with the answer.
#[derive(Clone, Debug)]
pub(super) struct Effect {
    /// What its names led to when it was last looked.
    stood: Vec<Option<u64>>,
    hit: Vec<u64>,
}

impl Effect {
    pub fn awaited(stood: impl Iterator<Item = Option<u64>>) -> Effect {
        Effect { stood: stood.collect(), hit: Vec::new() }
    }

    /// Inodes that it has moved, removed or replaced.
    pub fn hit(&self) -> impl Iterator<Item = u64> + '_ {
        self.hit.iter().copied()
    }

    /// What its names lead to now. Only what it would do itself counts.
    fn note(&mut self, op: &Op, now: Vec<Option<u64>>) {
        let done = match (op, &self.stood[..], &now[..]) {
            (Op::Rename { .. }, [Some(moved), there], [from, to]) => {
                to == &Some(*moved) && from != to && there != to
            }
            (Op::Unlink { .. } | Op::Rmdir { .. }, [Some(_)], [None]) => true,
            _ => false,
        };
        if done {
            self.hit.extend(self.stood.iter().flatten());
        }
        self.stood = now;
    }
}

impl<B: Backend> World<B> {
    /// Something may have happened in the tree.
    pub(super) fn note_effects(&mut self) {
        let World { clients, server, .. } = self;
        for Client { ops, effects, .. } in clients {
            for (id, effect) in effects {
                let Some(op) = ops.get(id) else { continue };
                let now =
                    names_of(op).into_iter().map(|(dir, name)| server.edit(|tree| tree.child_of(dir, &name)));
                effect.note(op, now.collect());
            }
        }
    }

    /// Names and inodes that a client's own unanswered requests change: its kernel holds them locked, and
    /// learns with the answer what became of them.
    pub(super) fn under_way(&self, client: &Client<B>) -> (Vec<(u64, Name)>, Vec<u64>) {
        let mut names = Vec::new();
        let mut inos = Vec::new();
        let told_late = client.cache.tells_late() || !client.telling.is_idle();
        if client.cache.gauges().pending_operations > 0 || told_late {
            for (op, locked) in &client.abandoned {
                names.extend(names_of(op));
                inos.extend(locked);
                inos.extend(touched(op));
            }
        }
        for (id, op) in &client.ops {
            names.extend(names_of(op));
            inos.extend(touched(op));
            inos.extend(client.locked.get(id).into_iter().flatten());
            inos.extend(client.effects.get(id).into_iter().flat_map(Effect::hit));
        }
        inos.extend(names.iter().map(|(dir, _)| *dir));
        inos.extend(names.iter().filter_map(|(dir, name)| client.kernel.last_heard(*dir, name)));
        (names, inos)
    }

    /// Whether a client's unanswered requests change an inode, but for writes whose bytes its kernel has in a page.
    pub(super) fn changes_otherwise(&self, client: &Client<B>, ino: u64) -> bool {
        let is_page = |op: &Op| matches!(op, Op::Write { ino: of, flags: WriteFlags { flush: false, .. }, .. } if *of == ino);
        match client.ops.values().any(is_page) {
            true => {
                client.ops.values().any(|op| !is_page(op) && touched(op) == Some(ino))
                    || client.abandoned.iter().any(|(op, _)| touched(op) == Some(ino))
            }
            false => self.under_way(client).1.contains(&ino),
        }
    }
}

/// Names that a request changes.
pub(super) fn names_of(op: &Op) -> Vec<(u64, Name)> {
    match op {
        Op::Create { dir, name, .. }
        | Op::Mkdir { dir, name, .. }
        | Op::Mknod { dir, name, .. }
        | Op::Symlink { dir, name, .. }
        | Op::Link { dir, name, .. }
        | Op::Unlink { dir, name }
        | Op::Rmdir { dir, name } => vec![(*dir, name.clone())],
        Op::Rename { from, name, to, new_name, .. } => {
            vec![(*from, name.clone()), (*to, new_name.clone())]
        }
        _ => Vec::new(),
    }
}

/// The inode whose attributes a request changes, if it is named by number.
fn touched(op: &Op) -> Option<u64> {
    match op {
        Op::SetAttr { ino, .. } | Op::Link { ino, .. } => Some(*ino),
        op => changed_inode(op),
    }
}

/// The inode whose attributes the kernel asks for again after such a request (`fuse_write_update_attr`,
/// `fuse_update_ctime`, `fuse_truncate_update_attr`), and the directory where a nameless file was made.
pub(super) fn changed_inode(op: &Op) -> Option<u64> {
    match op {
        Op::Write { ino, .. }
        | Op::Fallocate { ino, .. }
        | Op::SetXattr { ino, .. }
        | Op::RemoveXattr { ino, .. }
        | Op::CopyRange { to_ino: ino, .. } => Some(*ino),
        Op::Open { ino, access, .. } if access.truncate => Some(*ino),
        Op::Tmpfile { dir, .. } => Some(*dir),
        _ => None,
    }
}
