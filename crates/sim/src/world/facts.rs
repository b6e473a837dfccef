//! Data and xattrs of inodes over time, and checks of what kernels cache of them.

use super::local_changes::changed_inode;
use super::{Backend, World, name_of};
use crate::page_cache::PendingWrite;
use nigh_cache::{NotifyLevel, Op};
use nigh_remote::model_fs::ModelFs;
use nigh_types::{Attr, Call, NodeId, NodeRef, OpId, Reply, Time, WriteFlags};
use std::collections::BTreeMap;

/// The watched xattr.
pub const XATTR: &[u8] = b"user.watched";

/// The kind of a watched value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fact {
    Data,
    Xattr,
}

/// A value, and the tick from which it was so; `None`: no such value.
type Moment = (u64, Option<Vec<u8>>);

/// Data and xattrs over time, of the inodes of watched paths.
#[derive(Clone, Default)]
pub struct Facts {
    /// Watched paths; if empty, nothing is recorded.
    pub paths: Vec<String>,
    past: BTreeMap<(u64, Fact), Vec<Moment>>,
    /// Bytes of files that have changed: the inode, the offset, and the new byte.
    pub(super) changed: Vec<(u64, u64, u8)>,
    /// Inodes that have a watched name now.
    present: Vec<u64>,
    /// Directories and files whose attributes are recorded while they have a name.
    pub attributes_of: Vec<String>,
    attributes: BTreeMap<u64, Vec<(u64, Attr)>>,
}

impl Facts {
    pub(super) fn observe(&mut self, server: &impl Backend, now: Time, tick: u64) {
        self.present.clear();
        for path in &self.paths {
            let Some(id) = server.edit(|tree| tree.find(path)) else { continue };
            self.present.push(id.ino);
            for fact in [Fact::Data, Fact::Xattr] {
                let value = server.edit(|tree| value(tree, now, id, fact));
                let past = self.past.entry((id.ino, fact)).or_default();
                if past.last().map(|(_, last)| last) != Some(&value) {
                    if let (Fact::Data, Some((_, Some(before))), Some(value)) = (fact, past.last(), &value) {
                        let bytes = (0_u64..).zip(value).enumerate();
                        let differing = bytes.filter(|(nth, (_, byte))| before.get(*nth) != Some(*byte));
                        self.changed.extend(differing.map(|(_, (at, byte))| (id.ino, at, *byte)));
                    }
                    past.push((tick, value));
                }
            }
        }
    }

    pub(super) fn observe_attributes(&mut self, server: &impl Backend, tick: u64) {
        for path in &self.attributes_of {
            let found = server.edit(|tree| tree.find(path).and_then(|id| Some((id.ino, tree.attr(id)?))));
            let Some((ino, attr)) = found else { continue };
            let past = self.attributes.entry(ino).or_default();
            if past.last().map(|(_, last)| *last) != Some(attr) {
                past.push((tick, attr));
            }
        }
    }

    /// Returns whether an inode had these attributes at some moment since `begun`, as far as recorded.
    #[must_use]
    pub fn had(&self, ino: u64, begun: u64, attr: &Attr) -> bool {
        let Some(past) = self.attributes.get(&ino).filter(|_| attr.nlink > 0) else { return true };
        let current = past.iter().rposition(|(tick, _)| *tick <= begun).unwrap_or(0);
        past[current..].iter().any(|(_, had)| had == attr)
    }

    /// Returns whether a named file had this size at some moment since `begun`, as far as recorded.
    #[must_use]
    pub fn had_size(&self, ino: u64, begun: u64, bytes: u64) -> bool {
        let Some(past) = self.attributes.get(&ino) else { return true };
        let current = past.iter().rposition(|(tick, _)| *tick <= begun).unwrap_or(0);
        past[current..].iter().any(|(_, had)| had.size == bytes)
    }

    /// Returns whether an inode had this value at some moment since `begun`; true for inodes without a name, which are
    /// not recorded.
    #[must_use]
    pub fn was(&self, ino: u64, fact: Fact, begun: u64, what: Option<&[u8]>) -> bool {
        let Some(past) = self.past.get(&(ino, fact)).filter(|_| self.present.contains(&ino)) else {
            return true;
        };
        let current = past.iter().rposition(|(tick, _)| *tick <= begun).unwrap_or(0);
        past[current..].iter().any(|(_, value)| value.as_deref() == what)
    }
}

impl Facts {
    /// Returns whether a file had this byte at some moment since `begun`; true for inodes without a name, which are
    /// not recorded.
    pub(super) fn had_byte(&self, ino: u64, begun: u64, (at, byte): (u64, u8)) -> bool {
        let Some(past) = self.past.get(&(ino, Fact::Data)).filter(|_| self.present.contains(&ino)) else {
            return true;
        };
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let current = past.iter().rposition(|(tick, _)| *tick <= begun).unwrap_or(0);
        past[current..]
            .iter()
            .any(|(_, value)| value.as_ref().is_some_and(|value| value.get(at) == Some(&byte)))
    }

    /// Returns whether a file's data equals `page` outside the locally written range.
    fn equals_outside(&self, ino: u64, page: &[u8], written: PendingWrite) -> bool {
        let past = self.past.get(&(ino, Fact::Data)).filter(|_| self.present.contains(&ino));
        let Some((_, Some(truth))) = past.and_then(|past| past.last()) else { return true };
        let mut rest = (0..page.len().max(truth.len())).filter(|at| !(written.from..written.to).contains(at));
        rest.all(|at| page.get(at) == truth.get(at))
    }
}

fn value(tree: &mut ModelFs, now: Time, id: NodeId, fact: Fact) -> Option<Vec<u8>> {
    let node = NodeRef::without_hint(id);
    let call = match fact {
        Fact::Data => Call::Read { node, handle: None, offset: 0, length: 4096 },
        Fact::Xattr => Call::Xattr { node, name: XATTR.to_vec() },
    };
    match tree.execute_as_host(now, call) {
        Ok(Reply::Data(value) | Reply::Value(value)) => Some(value),
        _ => None,
    }
}

impl<B: Backend> World<B> {
    /// Returns a client's pending requests that change the inode.
    #[must_use]
    pub fn changing(&self, at: usize, ino: u64) -> Vec<OpId> {
        let ops = self.clients[at].ops.iter();
        ops.filter(|(_, op)| changed_inode(op) == Some(ino)).map(|(id, _)| *id).collect()
    }

    /// Returns whether a client's kernel has locked pages of a file for a pending request.
    #[must_use]
    pub fn has_locked_pages(&self, at: usize, ino: u64) -> bool {
        let moves = |op: &Op| matches!(op, Op::Read { ino: i, .. } | Op::Write { ino: i, .. } if *i == ino);
        self.clients[at].ops.values().any(moves)
    }

    /// Returns whether a client's kernel has stores into maps that the server has not received.
    #[must_use]
    pub fn has_stores(&self, at: usize) -> bool {
        let client = &self.clients[at];
        let flush = |op: &Op| matches!(op, Op::Write { flags: WriteFlags { write_back: true, .. }, .. });
        client.kernel.page_cache.first_dirty().is_some() || client.ops.values().any(flush)
    }

    /// Checks invariant 2 for what kernels cache of open files and directories.
    pub fn check_page_caches(&self) -> Result<(), String> {
        for (at, client) in
            self.clients.iter().enumerate().filter(|(at, client)| self.must_be_coherent(*at, client))
        {
            // Without notifications, a kernel checks the attributes before it reads pages (`FUSE_AUTO_INVAL_DATA`).
            let trusted = client.cache.level() != NotifyLevel::None;
            for (ino, pages) in client.kernel.page_cache.pages().filter(|_| trusted) {
                let written = client.kernel.page_cache.pending_write(ino);
                let told = client.notifier.has_queued_invalidation(ino)
                    || client.kernel.page_cache.is_dirty(ino)
                    || self.server.owes(at, ino, false)
                    || self.has_locked_pages(at, ino) && written.is_none()
                    || self.changes_otherwise(client, ino);
                let is_so = match written {
                    Some(written) => self.facts.equals_outside(ino, pages, written),
                    None => self.facts.was(ino, Fact::Data, self.tick, Some(pages)),
                };
                if !told && !is_so {
                    return Err(format!("{} keeps {pages:?} of {ino}", name_of(at)));
                }
            }
            for (dir, listing) in client.kernel.page_cache.listings() {
                let (own, _) = self.pending_changes(client);
                for (_, name) in self.past.keys().filter(|key| key.0 == dir && !own.contains(key)) {
                    let (listed, truth) = (listing.get(name.as_bytes()).copied(), self.server_ino(dir, name));
                    if !client.notifier.has_queued_invalidation(dir) && listed != truth {
                        return Err(format!(
                            "{} lists {dir}/{name} as {listed:?}, it is {truth:?}",
                            name_of(at)
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}
