//! Local changes of a client: what its kernel makes of their replies, and what is pending. The kernel may hold the state
//! from before a pending one.

use super::{Backend, Client, World};
use nigh_cache::{KernelInvalidation, Op, OpReply};
use nigh_types::{Name, OpId, WriteFlags};

/// The observed effect of a namespace change in flight. Other clients may have moved other files to its names since
/// its kernel's lookup. The kernel cannot know that when the change takes effect; the reply tells it.
#[derive(Clone, Debug)]
pub(super) struct Effect {
    /// The inodes of its names at the last observation.
    previous: Vec<Option<u64>>,
    hit: Vec<u64>,
}

impl Effect {
    pub fn awaited(stood: impl Iterator<Item = Option<u64>>) -> Effect {
        Effect { previous: stood.collect(), hit: Vec::new() }
    }

    /// Returns the inodes that the change has moved, removed or replaced.
    pub fn hit(&self) -> impl Iterator<Item = u64> + '_ {
        self.hit.iter().copied()
    }

    /// Notes the current inodes of its names. Only a transition that the request itself would make counts.
    fn note(&mut self, op: &Op, now: Vec<Option<u64>>) {
        let done = match (op, &self.previous[..], &now[..]) {
            (Op::Rename { .. }, [Some(moved), there], [from, to]) => {
                to == &Some(*moved) && from != to && there != to
            }
            (Op::Unlink { .. } | Op::Rmdir { .. }, [Some(_)], [None]) => true,
            _ => false,
        };
        if done {
            self.hit.extend(self.previous.iter().flatten());
        }
        self.previous = now;
    }
}

impl<B: Backend> World<B> {
    /// Applies a reply. `locked`: inodes whose names the kernel had locked for the request.
    pub(super) fn apply_reply(&mut self, at: usize, id: OpId, (op, answer): (&Op, &OpReply), locked: &[u64]) {
        let now = self.time(at);
        let asked = self.clients[at].request_versions.remove(&id).unwrap_or_default();
        let kernel = &mut self.clients[at].kernel;
        kernel.page_cache.apply_reply(op, answer);
        if *answer == OpReply::Done {
            let heard = names_of(op).into_iter().filter_map(|(dir, name)| kernel.last_known_ino(dir, &name));
            let heard: Vec<u64> = heard.collect();
            for ino in locked.iter().filter(|ino| !heard.contains(ino)) {
                kernel.invalidate(&KernelInvalidation::Attr { ino: *ino });
            }
        }
        kernel.end_request(op);
        match (op, answer) {
            (Op::Lookup { dir, name }, _) => kernel.apply_lookup((now, asked), *dir, name, answer),
            (
                Op::Create { dir, name, .. }
                | Op::Mkdir { dir, name, .. }
                | Op::Mknod { dir, name, .. }
                | Op::Symlink { dir, name, .. }
                | Op::Link { dir, name, .. },
                OpReply::Node(_) | OpReply::Created(..),
            ) => {
                // `create_new_entry` applies its reply regardless of later events.
                kernel.apply_lookup((now, u64::MAX), *dir, name, answer);
                kernel.changed_dir(*dir);
            }
            (Op::Unlink { dir, name } | Op::Rmdir { dir, name }, OpReply::Done) => {
                kernel.unlinked(*dir, name)
            }
            (Op::Rename { from, name, to, new_name, exchange, .. }, OpReply::Done) => {
                kernel.renamed((*from, name), (*to, new_name), *exchange);
                self.clients[at].moved_dentries.extend(names_of(op));
            }
            (Op::GetAttr { ino }, _) => {
                if let (true, OpReply::Attr(_, attr, _)) = (kernel.page_cache.is_open(*ino), answer) {
                    kernel.extend_size(*ino, attr.size);
                }
                kernel.apply_attr(now, answer, Some(asked));
                if kernel.page_cache.is_open(*ino) {
                    self.sizes.insert(id, kernel.size(*ino));
                }
            }
            (Op::SetAttr { .. }, _) => kernel.apply_attr(now, answer, None),
            (Op::ReadDir { ino, .. }, OpReply::Page(page)) => kernel.page((now, asked), *ino, page),
            (Op::Write { ino, offset, .. }, OpReply::Written(written)) => {
                kernel.end_write(*ino, offset + written);
                kernel.changed_data(*ino);
            }
            (
                Op::Write { ino, .. }
                | Op::Open { ino, .. }
                | Op::Fallocate { ino, .. }
                | Op::CopyRange { to_ino: ino, .. },
                _,
            ) if changed_inode(op).is_some() => kernel.changed_data(*ino),
            (op, _) => {
                changed_inode(op)
                    .into_iter()
                    .for_each(|ino| kernel.invalidate(&KernelInvalidation::Attr { ino }));
            }
        }
    }

    /// Drops attributes after a local change has cleared set-ID bits, as the driver does before the change's reply.
    pub(super) fn forget_set_id(&mut self, at: usize, op: &Op) {
        let client = &mut self.clients[at];
        if let Some(ino) = changed_inode(op).filter(|ino| client.cache.is_set_id_gone(*ino)) {
            client.kernel.invalidate(&KernelInvalidation::Attr { ino });
            client.cache.handle_set_id_forgotten(ino);
            self.trace.push(format!("{} forgets attributes", super::name_of(at)));
        }
    }

    /// Updates the effects after a possible change of the tree.
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

    /// Returns the names and inodes that a client's pending local requests change: its kernel holds them locked, and
    /// gets the outcome with the reply.
    pub(super) fn pending_changes(&self, client: &Client<B>) -> (Vec<(u64, Name)>, Vec<u64>) {
        let mut names = Vec::new();
        let mut inos = Vec::new();
        let told_late = client.cache.has_queued() || !client.notifier.is_idle();
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
        inos.extend(names.iter().filter_map(|(dir, name)| client.kernel.last_known_ino(*dir, name)));
        (names, inos)
    }

    /// Returns whether a client's pending requests change an inode, except for writes whose bytes are in a page of its
    /// kernel.
    pub(super) fn changes_otherwise(&self, client: &Client<B>, ino: u64) -> bool {
        let is_page = |op: &Op| matches!(op, Op::Write { ino: of, flags: WriteFlags { write_back: false, .. }, .. } if *of == ino);
        match client.ops.values().any(is_page) {
            true => {
                client.ops.values().any(|op| !is_page(op) && touched(op) == Some(ino))
                    || client.abandoned.iter().any(|(op, _)| touched(op) == Some(ino))
            }
            false => self.pending_changes(client).1.contains(&ino),
        }
    }
}

/// Returns the names that a request changes.
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

/// Returns the inode whose attributes a request changes, if the request names it by number.
fn touched(op: &Op) -> Option<u64> {
    match op {
        Op::SetAttr { ino, .. } | Op::Link { ino, .. } => Some(*ino),
        op => changed_inode(op),
    }
}

/// Returns the inode whose attributes the kernel fetches again after such a request (`fuse_write_update_attr`,
/// `fuse_update_ctime`, `fuse_truncate_update_attr`), and the directory for an O_TMPFILE create.
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
