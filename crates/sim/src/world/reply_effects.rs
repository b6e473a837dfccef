//! Application of replies by a kernel.

use super::local_changes::{changed_inode, names_of};
use super::{Backend, World};
use nigh_cache::{KernelInvalidation, Op, OpReply};
use nigh_types::OpId;

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
}
