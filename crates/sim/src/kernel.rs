//! Model of one mount's dentry cache and inode attributes.

use crate::page_cache::Kept;
use nigh_cache::{Answer, KernelInvalidation, Node, Op, Page};
use nigh_types::{Attr, Name, NodeId, OpId, Span, Time, WriteFlags};
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// A cached dentry, positive or negative.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dentry {
    /// `None`: a negative dentry.
    pub ino: Option<u64>,
    pub until: Time,
}

/// Cached attributes of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Believed {
    pub id: NodeId,
    pub attr: Attr,
    until: Time,
    part: Part,
}

/// Which of the cached attributes are valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    All,
    /// All but ctime, which a local change has set, and nlink, which no caller requests without ctime.
    ButChange,
    /// Mode and owner: a local data change has invalidated the rest (`FUSE_STATX_MODSIZE`).
    Rights,
}

impl Believed {
    /// Returns whether the valid attributes equal the server's.
    #[must_use]
    pub fn is_so(&self, truth: &Attr) -> bool {
        let rights = |attr: &Attr| (attr.mode, attr.uid, attr.gid);
        match self.part {
            Part::All => self.attr == *truth,
            Part::ButChange => Attr { ctime: truth.ctime, nlink: truth.nlink, ..self.attr } == *truth,
            Part::Rights => rights(&self.attr) == rights(truth),
        }
    }
}

/// The kernel's size of a file, and the attribute version of its last update or invalidation (`i_size`,
/// `attr_version`).
#[derive(Clone, Copy, Default, Debug)]
struct Size {
    bytes: u64,
    version: u64,
    /// A local request in flight may extend the file (`FUSE_I_SIZE_UNSTABLE`).
    unstable: bool,
}

/// The dcache and inode attributes of one mount.
#[derive(Clone, Default, Debug)]
pub struct Kernel {
    sizes: BTreeMap<u64, Size>,
    version: u64,
    names: BTreeMap<(u64, Name), Dentry>,
    attrs: BTreeMap<u64, Believed>,
    /// Another filesystem is mounted below, so names are invalidated one by one.
    pub mounted_below: bool,
    pub kept: Kept,
}

impl Kernel {
    /// Writes the kernel's state as text, equal for equal states. `asked`: see [`Kernel::version`].
    pub(crate) fn write(&self, asked: &BTreeMap<OpId, u64>, out: &mut String) -> fmt::Result {
        let Kernel { sizes, version: _, names, attrs, mounted_below, kept } = self;
        write!(out, "{names:?}{attrs:?}{mounted_below}{kept:?}")?;
        sizes.iter().try_for_each(|(ino, size)| write!(out, "{ino}:{}{} ", size.bytes, size.unstable))?;
        // Of the versions, only which files have changed since a request was sent affects the future.
        asked.iter().try_for_each(|(id, asked)| {
            let later: Vec<u64> =
                sizes.iter().filter(|(_, size)| size.version > *asked).map(|(ino, _)| *ino).collect();
            write!(out, "{id:?}{later:?}")
        })
    }

    /// Applies a reply to a lookup in `dir`.
    pub fn looked(&mut self, (now, asked): (Time, u64), dir: u64, name: &Name, answer: &Answer) {
        match answer {
            Answer::Node(node) | Answer::Created(node, _) => self.node((now, asked), dir, name, node),
            Answer::Missing(valid) if *valid > Span::ZERO => {
                self.names.insert((dir, name.clone()), Dentry { ino: None, until: now.after(*valid) });
            }
            _ => {
                self.names.remove(&(dir, name.clone()));
            }
        }
    }

    fn node(&mut self, (now, asked): (Time, u64), dir: u64, name: &Name, node: &Node) {
        let dentry = Dentry { ino: Some(node.id.ino), until: now.after(node.entry_valid) };
        self.names.insert((dir, name.clone()), dentry);
        self.believe(node.id, node.attr, now.after(node.attr_valid), asked);
    }

    /// Applies a GETATTR reply. `asked`: the version at the time of the request; `None` for the kernel's own change,
    /// whose reply always applies.
    pub fn attributes(&mut self, now: Time, answer: &Answer, asked: Option<u64>) {
        if let Answer::Attr(id, attr, valid) = answer {
            self.believe(*id, *attr, now.after(*valid), asked.unwrap_or(u64::MAX));
        }
    }

    /// Applies attributes unless a newer reply or an invalidation came since the request (`fuse_change_attributes`).
    fn believe(&mut self, id: NodeId, attr: Attr, until: Time, asked: u64) {
        let size = self.sizes.entry(id.ino).or_default();
        if size.unstable || size.version > asked {
            return;
        }
        self.version += 1;
        (size.bytes, size.version) = (attr.size, self.version);
        self.attrs.insert(id.ino, Believed { id, attr, until, part: Part::All });
    }

    /// Returns the attribute version that a request sent now remembers.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Extends a file to at least `bytes` (`fuse_notify_store`).
    pub fn lengthened(&mut self, ino: u64, bytes: u64) {
        let size = self.sizes.entry(ino).or_default();
        if bytes > size.bytes {
            self.version += 1;
            (size.bytes, size.version) = (bytes, self.version);
            self.attrs.remove(&ino);
        }
    }

    /// Begins a request; extending writes and size changes make the size unstable (`fuse_perform_write`,
    /// `fuse_do_setattr`).
    pub fn begins(&mut self, op: &Op) {
        self.kept.begins(op);
        let (ino, grows) = match op {
            Op::Write { ino, offset, data, flags: WriteFlags { flush: false, .. }, .. } => {
                (ino, offset + data.len() as u64 > self.size(*ino))
            }
            Op::SetAttr { ino, set, .. } => (ino, set.size.is_some()),
            _ => return,
        };
        if grows {
            self.sizes.entry(*ino).or_default().unstable = true;
        }
    }

    /// Ends a request: the size is stable again.
    pub fn ends(&mut self, op: &Op) {
        if let Op::Write { ino, flags: WriteFlags { flush: false, .. }, .. } | Op::SetAttr { ino, .. } = op {
            self.sizes.entry(*ino).or_default().unstable = false;
        }
    }

    /// Returns the kernel's size of a file.
    #[must_use]
    pub fn size(&self, ino: u64) -> u64 {
        self.sizes.get(&ino).map_or(0, |size| size.bytes)
    }

    /// Extends a file to the end of a completed write (`fuse_write_update_attr`).
    pub fn wrote(&mut self, ino: u64, end: u64) {
        let size = self.sizes.entry(ino).or_default();
        size.bytes = size.bytes.max(end);
    }

    /// A local change removed or moved a name of the inode: the other cached attributes and their expiry stay
    /// (`fuse_entry_unlinked`, `fuse_update_ctime`).
    fn changed_name(&mut self, ino: u64) {
        let all = self.attrs.get_mut(&ino).filter(|believed| believed.part == Part::All);
        all.into_iter().for_each(|believed| believed.part = Part::ButChange);
    }

    /// A local data change: mode and owner stay valid (`fuse_write_update_attr`).
    pub fn changed_data(&mut self, ino: u64) {
        self.version += 1;
        self.sizes.entry(ino).or_default().version = self.version;
        self.attrs.get_mut(&ino).into_iter().for_each(|believed| believed.part = Part::Rights);
    }

    /// After the loss of a name, attribute replies to earlier requests are ignored (`fuse_entry_unlinked`).
    fn lost_name(&mut self, ino: u64) {
        self.changed_name(ino);
        self.version += 1;
        self.sizes.entry(ino).or_default().version = self.version;
    }

    pub fn page(&mut self, (now, asked): (Time, u64), dir: u64, page: &Page) {
        let mut names = page.names.as_slice();
        for entry in &page.entries {
            let (bytes, rest) = names.split_at(usize::from(entry.name_len));
            names = rest;
            if let (Some(node), Ok(name)) = (&entry.node, Name::new(bytes)) {
                self.node((now, asked), dir, &name, node);
            }
        }
    }

    /// Drops the dentry, as the kernel does after a local removal or replacement.
    pub fn unlinked(&mut self, dir: u64, name: &Name) {
        if let Some(Dentry { ino: Some(ino), .. }) = self.names.remove(&(dir, name.clone())) {
            self.lost_name(ino);
        }
        self.changed_dir(dir);
    }

    /// Moves dentries after a local rename; each keeps its expiry (`d_move`, `d_exchange`).
    pub fn renamed(&mut self, (from, name): (u64, &Name), (to, new_name): (u64, &Name), exchange: bool) {
        let moved = self.names.remove(&(from, name.clone()));
        match self.names.remove(&(to, new_name.clone())) {
            Some(other) if exchange => {
                other.ino.into_iter().for_each(|ino| self.changed_name(ino));
                self.names.insert((from, name.clone()), other);
            }
            Some(Dentry { ino: Some(replaced), .. }) => self.lost_name(replaced),
            _ => {}
        }
        // The moved dentry wins. A negative lookup reply since then was from after the change, and its dentry was
        // invalidated.
        if let Some(dentry) = moved
            && let Some(ino) = dentry.ino
        {
            self.changed_name(ino);
            self.names.insert((to, new_name.clone()), dentry);
        }
        self.changed_dir(from);
        self.changed_dir(to);
    }

    /// Drops a directory's attributes and listing, as the kernel does after a local change of an entry.
    pub fn changed_dir(&mut self, dir: u64) {
        self.kept.changed_dir(dir);
        self.attrs.remove(&dir);
    }

    /// Applies a notification.
    pub fn forget(&mut self, stale: &KernelInvalidation) {
        self.kept.forget(stale);
        match stale {
            KernelInvalidation::Attr { ino } | KernelInvalidation::Data { ino, .. } => {
                self.version += 1;
                self.sizes.entry(*ino).or_default().version = self.version;
                self.attrs.remove(ino);
            }
            KernelInvalidation::Entry { dir, name } | KernelInvalidation::Gone { dir, name } => {
                self.names.remove(&(*dir, name.clone()));
            }
            KernelInvalidation::AllDentries(names) if self.mounted_below => {
                for name in names {
                    self.names.remove(name);
                }
            }
            KernelInvalidation::AllDentries(_) => self.names.clear(),
        }
    }

    /// Returns the dentries valid at `now`.
    pub fn names(&self, now: Time) -> impl Iterator<Item = (u64, &Name, Dentry)> {
        self.names.iter().filter(move |(_, d)| now < d.until).map(|((dir, name), d)| (*dir, name, *d))
    }

    /// Returns the dentry of one name, if it is valid at `now`.
    #[must_use]
    pub fn name(&self, now: Time, dir: u64, name: &Name) -> Option<Dentry> {
        self.names.get(&(dir, name.clone())).copied().filter(|d| now < d.until)
    }

    /// Returns the inode of a name's last known dentry, expired or not: the kernel revalidates before it removes or
    /// renames, and keeps the dentry for the time of the request.
    #[must_use]
    pub fn last_heard(&self, dir: u64, name: &Name) -> Option<u64> {
        self.names.get(&(dir, name.clone())).and_then(|d| d.ino)
    }

    /// Returns the attributes of which at least some are valid at `now`.
    pub fn believed(&self, now: Time) -> impl Iterator<Item = &Believed> {
        self.attrs.values().filter(move |believed| now < believed.until)
    }

    /// Returns the attributes that stat(2) uses at `now` without a request.
    pub fn attrs(&self, now: Time) -> impl Iterator<Item = &Believed> {
        self.believed(now).filter(|believed| believed.part != Part::Rights)
    }
}
