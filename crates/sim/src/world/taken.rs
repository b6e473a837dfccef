//! Application of replies by a kernel.

use super::own::{changed_inode, names_of};
use super::{Backend, World};
use nigh_cache::{Answer, KernelInvalidation, Op};
use nigh_types::OpId;

impl<B: Backend> World<B> {
    /// Applies a reply. `locked`: inodes whose names the kernel had locked for the request.
    pub(super) fn take_in(&mut self, at: usize, id: OpId, (op, answer): (&Op, &Answer), locked: &[u64]) {
        let now = self.time(at);
        let asked = self.clients[at].asked.remove(&id).unwrap_or_default();
        let kernel = &mut self.clients[at].kernel;
        kernel.kept.answered(op, answer);
        if *answer == Answer::Done {
            let heard = names_of(op).into_iter().filter_map(|(dir, name)| kernel.last_heard(dir, &name));
            let heard: Vec<u64> = heard.collect();
            for ino in locked.iter().filter(|ino| !heard.contains(ino)) {
                kernel.forget(&KernelInvalidation::Attr { ino: *ino });
            }
        }
        kernel.ends(op);
        match (op, answer) {
            (Op::Lookup { dir, name }, _) => kernel.looked((now, asked), *dir, name, answer),
            (
                Op::Create { dir, name, .. }
                | Op::Mkdir { dir, name, .. }
                | Op::Mknod { dir, name, .. }
                | Op::Symlink { dir, name, .. }
                | Op::Link { dir, name, .. },
                Answer::Node(_) | Answer::Created(..),
            ) => {
                // `create_new_entry` applies its reply regardless of later events.
                kernel.looked((now, u64::MAX), *dir, name, answer);
                kernel.changed_dir(*dir);
            }
            (Op::Unlink { dir, name } | Op::Rmdir { dir, name }, Answer::Done) => kernel.unlinked(*dir, name),
            (Op::Rename { from, name, to, new_name, exchange, .. }, Answer::Done) => {
                kernel.renamed((*from, name), (*to, new_name), *exchange);
                self.clients[at].carried.extend(names_of(op));
            }
            (Op::GetAttr { ino }, _) => {
                if let (true, Answer::Attr(_, attr, _)) = (kernel.kept.is_open(*ino), answer) {
                    kernel.lengthened(*ino, attr.size);
                }
                kernel.attributes(now, answer, Some(asked));
                if kernel.kept.is_open(*ino) {
                    self.sizes.insert(id, kernel.size(*ino));
                }
            }
            (Op::SetAttr { .. }, _) => kernel.attributes(now, answer, None),
            (Op::ReadDir { ino, .. }, Answer::Page(page)) => kernel.page((now, asked), *ino, page),
            (Op::Write { ino, offset, .. }, Answer::Written(written)) => {
                kernel.wrote(*ino, offset + written);
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
                    .for_each(|ino| kernel.forget(&KernelInvalidation::Attr { ino }));
            }
        }
    }

    /// Drops attributes after a local change has cleared set-ID bits, as the driver does before the change's reply.
    pub(super) fn forget_set_id(&mut self, at: usize, op: &Op) {
        let client = &mut self.clients[at];
        if let Some(ino) = changed_inode(op).filter(|ino| client.cache.is_set_id_gone(*ino)) {
            client.kernel.forget(&KernelInvalidation::Attr { ino });
            client.cache.handle_set_id_forgotten(ino);
            self.trace.push(format!("{} forgets attributes", super::name_of(at)));
        }
    }
}
