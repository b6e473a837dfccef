//! Model of one mount's dentry cache and inode attributes.

use crate::page_cache::PageCache;
use nigh_cache::{KernelInvalidation, Node, Op, OpReply, Page};
use nigh_types::{Attr, Name, NodeId, OpId, Span, Time, WriteFlags};
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// A cached dentry, positive or negative.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dentry {
    /// `None`: a negative dentry.
    pub ino: Option<u64>,
    pub valid_until: Time,
}

/// Cached attributes of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CachedAttrs {
    pub id: NodeId,
    pub attr: Attr,
    valid_until: Time,
    valid_fields: ValidFields,
}

/// Which of the cached attributes are valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ValidFields {
    All,
    /// All but ctime, which a local change has set, and nlink, which no caller requests without ctime.
    AllButCtime,
    /// Mode and owner: a local data change has invalidated the rest (`FUSE_STATX_MODSIZE`).
    ModeAndOwner,
}

impl CachedAttrs {
    /// Returns whether the valid attributes equal the server's.
    #[must_use]
    pub fn matches(&self, truth: &Attr) -> bool {
        let rights = |attr: &Attr| (attr.mode, attr.uid, attr.gid);
        match self.valid_fields {
            ValidFields::All => self.attr == *truth,
            ValidFields::AllButCtime => {
                Attr { ctime: truth.ctime, nlink: truth.nlink, ..self.attr } == *truth
            }
            ValidFields::ModeAndOwner => rights(&self.attr) == rights(truth),
        }
    }
}

/// The kernel's size of a file, and the attribute version of its last update or invalidation (`i_size`,
/// `attr_version`).
#[derive(Clone, Copy, Default, Debug)]
struct FileSize {
    bytes: u64,
    version: u64,
    /// A local request in flight may extend the file (`FUSE_I_SIZE_UNSTABLE`).
    unstable: bool,
}

/// The dcache and inode attributes of one mount.
#[derive(Clone, Default, Debug)]
pub struct Kernel {
    sizes: BTreeMap<u64, FileSize>,
    version: u64,
    dentries: BTreeMap<(u64, Name), Dentry>,
    attrs: BTreeMap<u64, CachedAttrs>,
    /// Another filesystem is mounted below, so names are invalidated one by one.
    pub has_submounts: bool,
    pub page_cache: PageCache,
}

impl Kernel {
    /// Writes the kernel's state as text, equal for equal states. `asked`: see [`Kernel::version`].
    pub(crate) fn write(&self, asked: &BTreeMap<OpId, u64>, out: &mut String) -> fmt::Result {
        let Kernel {
            sizes,
            version: _,
            dentries: names,
            attrs,
            has_submounts: mounted_below,
            page_cache: kept,
        } = self;
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
    pub fn apply_lookup(&mut self, (now, asked): (Time, u64), dir: u64, name: &Name, answer: &OpReply) {
        match answer {
            OpReply::Node(node) | OpReply::Created(node, _) => self.node((now, asked), dir, name, node),
            OpReply::Missing(valid) if *valid > Span::ZERO => {
                self.dentries
                    .insert((dir, name.clone()), Dentry { ino: None, valid_until: now.after(*valid) });
            }
            _ => {
                self.dentries.remove(&(dir, name.clone()));
            }
        }
    }

    fn node(&mut self, (now, asked): (Time, u64), dir: u64, name: &Name, node: &Node) {
        let dentry = Dentry { ino: Some(node.id.ino), valid_until: now.after(node.entry_valid) };
        self.dentries.insert((dir, name.clone()), dentry);
        self.update_attr(node.id, node.attr, now.after(node.attr_valid), asked);
    }

    /// Applies a GETATTR reply. `asked`: the version at the time of the request; `None` for the kernel's own change,
    /// whose reply always applies.
    pub fn apply_attr(&mut self, now: Time, answer: &OpReply, asked: Option<u64>) {
        if let OpReply::Attr(id, attr, valid) = answer {
            self.update_attr(*id, *attr, now.after(*valid), asked.unwrap_or(u64::MAX));
        }
    }

    /// Applies attributes unless a newer reply or an invalidation came since the request (`fuse_change_attributes`).
    fn update_attr(&mut self, id: NodeId, attr: Attr, until: Time, asked: u64) {
        let size = self.sizes.entry(id.ino).or_default();
        if size.unstable || size.version > asked {
            return;
        }
        self.version += 1;
        (size.bytes, size.version) = (attr.size, self.version);
        self.attrs
            .insert(id.ino, CachedAttrs { id, attr, valid_until: until, valid_fields: ValidFields::All });
    }

    /// Returns the attribute version that a request sent now remembers.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Extends a file to at least `bytes` (`fuse_notify_store`).
    pub fn extend_size(&mut self, ino: u64, bytes: u64) {
        let size = self.sizes.entry(ino).or_default();
        if bytes > size.bytes {
            self.version += 1;
            (size.bytes, size.version) = (bytes, self.version);
            self.attrs.remove(&ino);
        }
    }

    /// Begins a request; extending writes and size changes make the size unstable (`fuse_perform_write`,
    /// `fuse_do_setattr`).
    pub fn begin_request(&mut self, op: &Op) {
        self.page_cache.begin_request(op);
        let (ino, grows) = match op {
            Op::Write { ino, offset, data, flags: WriteFlags { write_back: false, .. }, .. } => {
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
    pub fn end_request(&mut self, op: &Op) {
        if let Op::Write { ino, flags: WriteFlags { write_back: false, .. }, .. } | Op::SetAttr { ino, .. } =
            op
        {
            self.sizes.entry(*ino).or_default().unstable = false;
        }
    }

    /// Returns the kernel's size of a file.
    #[must_use]
    pub fn size(&self, ino: u64) -> u64 {
        self.sizes.get(&ino).map_or(0, |size| size.bytes)
    }

    /// Extends a file to the end of a completed write (`fuse_write_update_attr`).
    pub fn end_write(&mut self, ino: u64, end: u64) {
        let size = self.sizes.entry(ino).or_default();
        size.bytes = size.bytes.max(end);
    }

    /// A local change removed or moved a name of the inode: the other cached attributes and their expiry stay
    /// (`fuse_entry_unlinked`, `fuse_update_ctime`).
    fn changed_name(&mut self, ino: u64) {
        let all = self.attrs.get_mut(&ino).filter(|believed| believed.valid_fields == ValidFields::All);
        all.into_iter().for_each(|believed| believed.valid_fields = ValidFields::AllButCtime);
    }

    /// A local data change: mode and owner stay valid (`fuse_write_update_attr`).
    pub fn changed_data(&mut self, ino: u64) {
        self.version += 1;
        self.sizes.entry(ino).or_default().version = self.version;
        self.attrs
            .get_mut(&ino)
            .into_iter()
            .for_each(|believed| believed.valid_fields = ValidFields::ModeAndOwner);
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
        if let Some(Dentry { ino: Some(ino), .. }) = self.dentries.remove(&(dir, name.clone())) {
            self.lost_name(ino);
        }
        self.changed_dir(dir);
    }

    /// Moves dentries after a local rename; each keeps its expiry (`d_move`, `d_exchange`).
    pub fn renamed(&mut self, (from, name): (u64, &Name), (to, new_name): (u64, &Name), exchange: bool) {
        let moved = self.dentries.remove(&(from, name.clone()));
        match self.dentries.remove(&(to, new_name.clone())) {
            Some(other) if exchange => {
                other.ino.into_iter().for_each(|ino| self.changed_name(ino));
                self.dentries.insert((from, name.clone()), other);
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
            self.dentries.insert((to, new_name.clone()), dentry);
        }
        self.changed_dir(from);
        self.changed_dir(to);
    }

    /// Drops a directory's attributes and listing, as the kernel does after a local change of an entry.
    pub fn changed_dir(&mut self, dir: u64) {
        self.page_cache.drop_listing(dir);
        self.attrs.remove(&dir);
    }

    /// Applies a notification.
    pub fn invalidate(&mut self, stale: &KernelInvalidation) {
        self.page_cache.invalidate(stale);
        match stale {
            KernelInvalidation::Attr { ino } | KernelInvalidation::Data { ino, .. } => {
                self.version += 1;
                self.sizes.entry(*ino).or_default().version = self.version;
                self.attrs.remove(ino);
            }
            KernelInvalidation::Entry { dir, name } | KernelInvalidation::RemovedDentry { dir, name } => {
                self.dentries.remove(&(*dir, name.clone()));
            }
            KernelInvalidation::AllDentries(names) if self.has_submounts => {
                for name in names {
                    self.dentries.remove(name);
                }
            }
            KernelInvalidation::AllDentries(_) => self.dentries.clear(),
        }
    }

    /// Returns the dentries valid at `now`.
    pub fn valid_dentries(&self, now: Time) -> impl Iterator<Item = (u64, &Name, Dentry)> {
        self.dentries
            .iter()
            .filter(move |(_, d)| now < d.valid_until)
            .map(|((dir, name), d)| (*dir, name, *d))
    }

    /// Returns the dentry of one name, if it is valid at `now`.
    #[must_use]
    pub fn valid_dentry(&self, now: Time, dir: u64, name: &Name) -> Option<Dentry> {
        self.dentries.get(&(dir, name.clone())).copied().filter(|d| now < d.valid_until)
    }

    /// Returns the inode of a name's last known dentry, expired or not: the kernel revalidates before it removes or
    /// renames, and keeps the dentry for the time of the request.
    #[must_use]
    pub fn last_known_ino(&self, dir: u64, name: &Name) -> Option<u64> {
        self.dentries.get(&(dir, name.clone())).and_then(|d| d.ino)
    }

    /// Returns the attributes of which at least some are valid at `now`.
    pub fn partly_valid_attrs(&self, now: Time) -> impl Iterator<Item = &CachedAttrs> {
        self.attrs.values().filter(move |believed| now < believed.valid_until)
    }

    /// Returns the attributes that stat(2) uses at `now` without a request.
    pub fn valid_attrs(&self, now: Time) -> impl Iterator<Item = &CachedAttrs> {
        self.partly_valid_attrs(now).filter(|believed| believed.valid_fields != ValidFields::ModeAndOwner)
    }
}
