//! Mutations that create inodes and names.

use super::content::Content;
use super::node::{Body, Directory, Node};
use super::{ModelFs, Outcome};
use nigh_types::{
    Access, Attr, Credentials, Errno, Kind, LeaseScope, Name, NodeId, NodeRef, Reply, Timestamp,
};

const SETGID: u32 = 0o2000;

fn nanoseconds(at: Timestamp) -> u64 {
    let (secs, nanos) = at.pair();
    u64::try_from(secs).unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanos.into())
}

/// Properties of a new inode.
pub(super) struct Plan<'a> {
    pub(super) now: Timestamp,
    pub(super) credentials: &'a Credentials,
    pub(super) kind: Kind,
    /// Permission bits, after the umask.
    pub(super) mode: u32,
    pub(super) rdev: u32,
    pub(super) target: &'a [u8],
}

impl ModelFs {
    /// Creates a new inode under a new name.
    pub(super) fn make(&mut self, dir: &NodeRef, name: &Name, plan: &Plan<'_>) -> Result<Outcome, Errno> {
        let dir = self.reach_dir(dir)?;
        if self.child(dir, name).is_some() {
            return Err(Errno::EXIST);
        }
        let ino = self.new_inode(dir, plan);
        self.add_name(plan.now, dir, name, ino);
        Ok(self.made(dir, ino, false, false))
    }

    pub(super) fn create(
        &mut self,
        dir: &NodeRef,
        name: &Name,
        exclusive: bool,
        access: Access,
        plan: &Plan<'_>,
    ) -> Result<Outcome, Errno> {
        let parent = self.reach_dir(dir)?;
        match self.child(parent, name) {
            None => {
                let ino = self.new_inode(parent, plan);
                self.add_name(plan.now, parent, name, ino);
                Ok(self.made(parent, ino, true, false))
            }
            Some(_) if exclusive => Err(Errno::EXIST),
            Some(ino) => {
                match self.nodes[&ino].attr.kind() {
                    Kind::File => {}
                    Kind::Directory => return Err(Errno::ISDIR),
                    Kind::Symlink => return Err(Errno::LOOP),
                    _ => return Err(Errno::NXIO),
                }
                if access.truncate {
                    self.resize(plan.now, ino, 0)?;
                }
                Ok(self.made(parent, ino, true, true))
            }
        }
    }

    pub(super) fn tmpfile(&mut self, dir: &NodeRef, plan: &Plan<'_>) -> Result<Outcome, Errno> {
        let dir = self.reach_dir(dir)?;
        let ino = self.new_inode(dir, plan);
        self.node_mut(ino).nameless = true;
        Ok(self.made(dir, ino, true, false))
    }

    pub(super) fn link(
        &mut self,
        now: Timestamp,
        node: &NodeRef,
        dir: &NodeRef,
        name: &Name,
    ) -> Result<Outcome, Errno> {
        let ino = self.reach(node)?;
        let dir = self.reach_dir(dir)?;
        let linked = &self.nodes[&ino];
        if linked.attr.is_dir() {
            return Err(Errno::PERM);
        }
        if self.child(dir, name).is_some() {
            return Err(Errno::EXIST);
        }
        if linked.attr.nlink == 0 && !linked.nameless {
            return Err(Errno::NOENT);
        }
        self.add_name(now, dir, name, ino);
        self.node_mut(ino).attr.ctime = now;
        Ok(self.made(dir, ino, false, false))
    }

    fn made(&mut self, dir: u64, ino: u64, open: bool, existed: bool) -> Outcome {
        let handle = open.then(|| self.open(ino));
        let mut granted = vec![(self.nodes[&dir].id, LeaseScope::Directory), self.covering(ino, Some(dir))];
        let id = self.nodes[&ino].id;
        if open {
            granted.push((id, LeaseScope::Data));
        }
        if self.nodes[&ino].attr.is_dir() {
            granted.push((id, LeaseScope::Directory));
        }
        let touched = if existed { Vec::new() } else { vec![dir] };
        let entry = self.nodes[&ino].entry();
        Outcome { reply: Reply::Created { entry, handle, existed }, touched, granted }
    }

    pub(super) fn new_inode(&mut self, dir: u64, plan: &Plan<'_>) -> u64 {
        let ino = self.free_inos.pop().unwrap_or_else(|| {
            self.next_ino += 1;
            self.next_ino - 1
        });
        self.generation += 1;
        let generation = if self.config.distinct_generations { self.generation << 32 } else { 1 };
        let id = NodeId { ino, generation };
        let parent = &self.nodes[&dir].attr;
        let inherits = parent.mode & SETGID != 0;
        let sticky_gid = if inherits && plan.kind == Kind::Directory { SETGID } else { 0 };
        let body = match plan.kind {
            Kind::File => Body::File(Content::default()),
            Kind::Directory => Body::Directory(Directory::default()),
            Kind::Symlink => Body::Symlink(plan.target.into()),
            _ => Body::Special,
        };
        let (size, blocks) = match plan.kind {
            Kind::Directory => (4096, 8),
            Kind::Symlink => (plan.target.len() as u64, 0),
            _ => (0, 0),
        };
        let attr = Attr {
            size,
            blocks,
            mode: plan.kind.mode_bits() | plan.mode & 0o7777 | sticky_gid,
            nlink: u32::from(plan.kind == Kind::Directory),
            uid: plan.credentials.uid,
            gid: if inherits { parent.gid } else { plan.credentials.gid },
            rdev: plan.rdev,
            atime: plan.now,
            mtime: plan.now,
            ctime: plan.now,
            birth_ns: nanoseconds(plan.now),
        };
        self.nodes.insert(ino, Node::new(id, attr, body));
        ino
    }

    /// Adds a free name to an inode, and updates its link count and the directory's attributes.
    pub(super) fn add_name(&mut self, now: Timestamp, dir: u64, name: &Name, ino: u64) {
        let key = self.config.cookie_key;
        let is_dir = self.nodes[&ino].attr.is_dir();
        let parent = self.node_mut(dir);
        let Body::Directory(entries) = &mut parent.body else { unreachable!("reach_dir looked") };
        entries.insert(key, name.clone(), ino);
        parent.attr.nlink += u32::from(is_dir);
        (parent.attr.mtime, parent.attr.ctime) = (now, now);
        let node = self.node_mut(ino);
        node.links.push((dir, name.clone()));
        node.attr.nlink += 1;
    }

    /// Removes a name.
    pub(super) fn remove_name(&mut self, now: Timestamp, dir: u64, name: &Name, ino: u64) {
        let key = self.config.cookie_key;
        let is_dir = self.nodes[&ino].attr.is_dir();
        let parent = self.node_mut(dir);
        let Body::Directory(entries) = &mut parent.body else { unreachable!("reach_dir looked") };
        entries.remove(key, name);
        parent.attr.nlink -= u32::from(is_dir);
        (parent.attr.mtime, parent.attr.ctime) = (now, now);
        let node = self.node_mut(ino);
        node.links.retain(|link| *link != (dir, name.clone()));
        node.attr.nlink -= 1;
        node.attr.ctime = now;
        node.nameless = false;
    }
}
