//! The cached facts: inodes, directories and their entries, and which of them an update has suspended.

mod dentry_leases;
mod dir_entries;
mod directory;
mod forgotten;
mod inode;
mod oversized;
mod packed_attr;
mod suspended;

pub(crate) use dentry_leases::DentryLeases;
pub(crate) use dir_entries::{CachedEntry, DirEntries, DirEntryRef};
pub(crate) use directory::Directory;
pub(crate) use forgotten::Forgotten;
pub(crate) use inode::{Inode, InodeExt};
#[cfg(test)]
pub(crate) use oversized::NOT_LISTED_FOR;
pub(crate) use oversized::Oversized;
pub(crate) use suspended::SuspendedFacts;

use nigh_types::{Cookie, CookieKey, GrantId, Name, NodeId, Time};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// Bytes of an inode record with its slot in the hash table, which is half full to full.
pub(crate) const INODE_BYTES: u64 = (size_of::<Inode>() + 8 + 17 * 3 / 2) as u64;
/// Bytes of a directory record, with its own attributes.
pub(crate) const DIRECTORY_BYTES: u64 = (size_of::<Directory>() + 24 + size_of::<InodeExt>()) as u64;
/// Most directories with a record of a returned grant.
const MOST_RETURNED: usize = 1 << 16;

/// Records of inodes by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inodes {
    /// Boxed: a hash table with churn is twice as large as need be, and three times while it grows.
    records: FxHashMap<u64, Box<Inode>>,
}

impl Inodes {
    fn record(&self, ino: u64) -> Option<&Inode> {
        self.records.get(&ino).map(|inode| &**inode)
    }

    fn record_mut(&mut self, ino: u64) -> Option<&mut Inode> {
        self.records.get_mut(&ino).map(|inode| &mut **inode)
    }

    /// Returns the record of that inode, not of another one with its number.
    pub fn of(&self, id: NodeId) -> Option<&Inode> {
        self.record(id.ino).filter(|inode| inode.id == id)
    }

    pub fn of_mut(&mut self, id: NodeId) -> Option<&mut Inode> {
        self.record_mut(id.ino).filter(|inode| inode.id == id)
    }
}

/// Facts of one mount.
#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    key: CookieKey,
    /// Inode number of the export's root; 0 before the first session.
    root: u64,
    inodes: Inodes,
    dirs: FxHashMap<u64, Directory>,
    /// Directories in the order in which eviction visits them.
    eviction_order: VecDeque<u64>,
    /// Memory of the names of all directories, in bytes.
    entry_bytes: u64,
    /// Directory leases that were returned with calls in flight: a reply with an earlier grant on them begins no lease.
    returned_leases: BTreeMap<NodeId, GrantId>,
    pub forgotten: Forgotten,
    pub suspended: SuspendedFacts,
    pub oversized: Oversized,
}

/// The export.
impl Store {
    pub fn key(&self) -> CookieKey {
        self.key
    }

    pub fn cookie(&self, name: &Name) -> Cookie {
        self.key.cookie(name.as_bytes())
    }

    pub fn root(&self) -> u64 {
        self.root
    }

    /// Sets the root, and the key of cookies, of a session.
    pub fn set_export(&mut self, root: u64, key: CookieKey) {
        (self.root, self.key) = (root, key);
    }

    /// Invalidates all ids: each inode number stands for another inode from now on.
    pub fn invalidate_all_ids(&mut self) {
        self.inodes_mut().for_each(|inode| inode.reset(NodeId { generation: 0, ..inode.id }));
        self.dirs.values_mut().for_each(|directory| directory.id.generation = 0);
        self.forgotten.clear();
    }
}

/// Inodes.
impl Store {
    pub fn inode(&self, ino: u64) -> Option<&Inode> {
        self.inodes.record(ino)
    }

    pub fn inode_mut(&mut self, ino: u64) -> Option<&mut Inode> {
        self.inodes.record_mut(ino)
    }

    /// Returns the record of that inode, not of another one with its number.
    pub fn inode_of(&self, id: NodeId) -> Option<&Inode> {
        self.inodes.of(id)
    }

    pub fn inode_of_mut(&mut self, id: NodeId) -> Option<&mut Inode> {
        self.inodes.of_mut(id)
    }

    pub fn has_inode(&self, ino: u64) -> bool {
        self.inodes.records.contains_key(&ino)
    }

    pub fn inodes(&self) -> impl Iterator<Item = &Inode> {
        self.inodes.records.values().map(|inode| &**inode)
    }

    pub fn inodes_mut(&mut self) -> impl Iterator<Item = &mut Inode> {
        self.inodes.records.values_mut().map(|inode| &mut **inode)
    }

    pub fn inode_count(&self) -> usize {
        self.inodes.records.len()
    }

    /// Returns the record of an inode number, made with a lookup count for this inode if there is none.
    pub fn inode_or_insert(&mut self, id: NodeId, lookups: impl FnOnce() -> u64) -> &mut Inode {
        self.inodes.records.entry(id.ino).or_insert_with(|| Box::new(Inode::new(id, lookups())))
    }

    pub fn remove_inode(&mut self, ino: u64) -> Option<Box<Inode>> {
        self.inodes.records.remove(&ino)
    }

    /// Returns the id of an inode number.
    pub fn id_of(&self, ino: u64) -> Option<NodeId> {
        let id =
            self.inode(ino).map(|inode| inode.id).or_else(|| self.dir(ino).map(|directory| directory.id));
        id.filter(|id| id.generation != 0)
    }

    /// Returns the directory and name that last led to an inode.
    pub fn last_parent_entry(&self, ino: u64) -> Option<&(u64, Name)> {
        match self.inode(ino) {
            Some(inode) => inode.parent_entry(),
            None => self.forgotten.parent_entry(ino),
        }
    }
}

/// Directories.
impl Store {
    pub fn dir(&self, ino: u64) -> Option<&Directory> {
        self.dirs.get(&ino)
    }

    pub fn dir_mut(&mut self, ino: u64) -> Option<&mut Directory> {
        self.dirs.get_mut(&ino)
    }

    /// Returns the record of that directory, not of another inode with its number.
    pub fn dir_of_mut(&mut self, id: NodeId) -> Option<&mut Directory> {
        self.dir_mut(id.ino).filter(|directory| directory.id == id)
    }

    /// Returns a directory together with all inodes.
    pub fn dir_and_inodes(&mut self, id: NodeId) -> Option<(&mut Directory, &mut Inodes)> {
        let directory = self.dirs.get_mut(&id.ino).filter(|directory| directory.id == id)?;
        Some((directory, &mut self.inodes))
    }

    pub fn has_dir(&self, ino: u64) -> bool {
        self.dirs.contains_key(&ino)
    }

    pub fn dirs(&self) -> impl Iterator<Item = (u64, &Directory)> {
        self.dirs.iter().map(|(ino, directory)| (*ino, directory))
    }

    pub fn dirs_mut(&mut self) -> impl Iterator<Item = &mut Directory> {
        self.dirs.values_mut()
    }

    pub fn dir_count(&self) -> usize {
        self.dirs.len()
    }

    /// Returns the record of a directory, made if there is none, and used now.
    pub fn dir_or_insert(&mut self, now: Time, id: NodeId) -> &mut Directory {
        let order = &mut self.eviction_order;
        let directory = self.dirs.entry(id.ino).or_insert_with(|| {
            order.push_back(id.ino);
            Directory::new(id)
        });
        if directory.id != id {
            directory.forget();
            directory.id = id;
        }
        directory.note_use(now);
        directory.is_directory = true;
        directory
    }

    pub fn remove_dir(&mut self, ino: u64) {
        self.dirs.remove(&ino);
    }

    /// Returns whether the inode is known to be a directory.
    pub fn is_directory(&self, ino: u64) -> bool {
        self.dir(ino).is_some_and(|directory| directory.is_directory)
    }

    /// Returns the memory of the names of all directories, in bytes.
    pub fn entry_bytes(&self) -> u64 {
        self.entry_bytes
    }

    /// Updates the byte count after a directory's entries changed.
    pub fn recount(&mut self, dir: u64) {
        if let Some(directory) = self.dirs.get_mut(&dir) {
            let bytes = directory.bytes();
            self.entry_bytes = self.entry_bytes - directory.counted + bytes;
            directory.counted = bytes;
        }
    }
}

/// Entries.
impl Store {
    /// Returns the entry of a name that exists, whether a lease covers it or not.
    pub fn child(&self, dir: u64, name: &Name) -> Option<&CachedEntry> {
        self.dir(dir)?.rows.find(self.cookie(name), name.as_bytes())?.child
    }

    /// Returns an inode's parent entry and its directory, whether a lease covers it or not.
    pub fn parent_entry(&self, inode: &Inode) -> Option<(&Directory, &CachedEntry)> {
        let (dir, name) = inode.parent_entry()?;
        let directory = self.dir(*dir)?;
        let child = directory.rows.find(self.cookie(name), name.as_bytes())?.child?;
        (child.id == inode.id).then_some((directory, child))
    }

    /// Returns the child in an inode's parent entry.
    pub fn child_at_parent_entry(&mut self, ino: u64) -> Option<&mut CachedEntry> {
        let inode = self.inodes.record(ino)?;
        let (dir, name) = inode.parent_entry()?;
        let cookie = self.key.cookie(name.as_bytes());
        let rows = &mut self.dirs.get_mut(dir)?.rows;
        rows.find_mut(cookie, name.as_bytes()).filter(|child| child.id == inode.id)
    }
}

/// Order of eviction.
impl Store {
    pub fn evictable(&self) -> usize {
        self.eviction_order.len()
    }

    /// Takes the directory that eviction visits next.
    pub fn next_to_evict(&mut self) -> Option<u64> {
        self.eviction_order.pop_front()
    }

    /// Puts a directory back that stays.
    pub fn evict_later(&mut self, ino: u64) {
        self.eviction_order.push_back(ino);
    }

    pub fn in_eviction_order(&self) -> impl Iterator<Item = u64> {
        self.eviction_order.iter().copied()
    }

    /// Drops directories that are gone from the order.
    pub fn tidy_eviction_order(&mut self) {
        let dirs = &self.dirs;
        self.eviction_order.retain(|ino| dirs.contains_key(ino));
    }
}

/// Returned leases.
impl Store {
    /// Records that a grant on a directory's names is returned, or about to be. Without a call in flight
    /// (`none_in_flight`) earlier records are of no use.
    pub fn note_grant_returned(&mut self, dir: NodeId, id: GrantId, none_in_flight: bool) {
        if none_in_flight {
            self.returned_leases.clear();
        }
        if self.returned_leases.len() >= MOST_RETURNED {
            self.returned_leases.pop_first();
        }
        let latest = self.returned_leases.entry(dir).or_insert(id);
        *latest = (*latest).max(id);
    }

    /// Returns whether a new grant on a directory's names may begin. A grant that was returned since must not.
    pub fn may_begin_lease(&self, dir: NodeId, fresh: GrantId) -> bool {
        self.returned_leases.get(&dir).is_none_or(|returned| fresh > *returned)
    }
}
