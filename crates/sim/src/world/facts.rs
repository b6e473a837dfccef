//! What inodes hold besides their attributes, and what kernels keep of it.

use super::{Client, World, changed_inode, name_of};
use nigh_cache::{Op, Stale};
use nigh_remote::fake::FakeServer;
use nigh_remote::tree::Tree;
use nigh_types::{Call, NodeId, OpId, Place, Reply, Time};
use std::collections::BTreeMap;

/// The xattr that is watched.
pub const XATTR: &[u8] = b"user.watched";

/// What is watched of an inode.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fact {
    Data,
    Xattr,
}

/// What it was, from a tick on; `None`: there was none.
type Moment = (u64, Option<Vec<u8>>);

/// The past of data and xattrs of the inodes that some names lead to.
#[derive(Default)]
pub struct Facts {
    /// Paths of those names; none: nothing is recorded.
    pub paths: Vec<String>,
    past: BTreeMap<(u64, Fact), Vec<Moment>>,
    /// Inodes that have such a name now.
    present: Vec<u64>,
}

impl Facts {
    pub(super) fn observe(&mut self, server: &FakeServer, now: Time, tick: u64) {
        self.present.clear();
        for path in &self.paths {
            let Some(id) = server.edit(|tree| tree.find(path)) else { continue };
            self.present.push(id.ino);
            for fact in [Fact::Data, Fact::Xattr] {
                let value = server.edit(|tree| value(tree, now, id, fact));
                let past = self.past.entry((id.ino, fact)).or_default();
                if past.last().map(|(_, last)| last) != Some(&value) {
                    past.push((tick, value));
                }
            }
        }
    }

    /// Whether it was that at some moment since `begun`; of inodes without a name nothing is known.
    #[must_use]
    pub fn was(&self, ino: u64, fact: Fact, begun: u64, what: Option<&[u8]>) -> bool {
        let Some(past) = self.past.get(&(ino, fact)).filter(|_| self.present.contains(&ino)) else {
            return true;
        };
        let current = past.iter().rposition(|(tick, _)| *tick <= begun).unwrap_or(0);
        past[current..].iter().any(|(_, value)| value.as_deref() == what)
    }
}

fn value(tree: &mut Tree, now: Time, id: NodeId, fact: Fact) -> Option<Vec<u8>> {
    let node = Place::bare(id);
    let call = match fact {
        Fact::Data => Call::Read { node, handle: None, offset: 0, length: 4096 },
        Fact::Xattr => Call::Xattr { node, name: XATTR.to_vec() },
    };
    match tree.beside(now, call) {
        Ok(Reply::Data(value) | Reply::Value(value)) => Some(value),
        _ => None,
    }
}

impl World {
    /// Unanswered requests of a client that change an inode named by number.
    #[must_use]
    pub fn changing(&self, at: usize, ino: u64) -> Vec<OpId> {
        let ops = self.clients[at].ops.iter();
        ops.filter(|(_, op)| changed_inode(op) == Some(ino)).map(|(id, _)| *id).collect()
    }

    /// Whether a client's kernel has pages of a file locked for an unanswered request.
    #[must_use]
    pub fn moves_data(&self, at: usize, ino: u64) -> bool {
        let moves = |op: &Op| matches!(op, Op::Read { ino: i, .. } | Op::Write { ino: i, .. } if *i == ino);
        self.clients[at].ops.values().any(moves)
    }

    /// Invariant 2 for what kernels keep of open files and directories.
    pub fn check_kept(&self) -> Result<(), String> {
        for (at, client) in self.clients.iter().enumerate() {
            for (ino, pages) in client.kernel.kept.pages() {
                let told = is_told(client, ino)
                    || self.moves_data(at, ino)
                    || self.under_way(client).1.contains(&ino);
                if !told && !self.facts.was(ino, Fact::Data, self.tick, Some(pages)) {
                    return Err(format!("{} keeps {pages:?} of {ino}", name_of(at)));
                }
            }
            for (dir, listing) in client.kernel.kept.listings() {
                let (own, _) = self.under_way(client);
                for (_, name) in self.past.keys().filter(|key| key.0 == dir && !own.contains(key)) {
                    let (listed, truth) = (listing.get(name.as_bytes()).copied(), self.truth(dir, name));
                    if !is_told(client, dir) && listed != truth {
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

/// Whether its kernel is about to be told to forget an inode's data or listing.
fn is_told(client: &Client, ino: u64) -> bool {
    let about = |stale: &Stale| matches!(stale, Stale::Data { ino: i, .. } if *i == ino);
    client.held.iter().any(|(_, stale)| stale.iter().any(about))
}
