//! What a kernel believes of what it was told.

use crate::kept::Kept;
use nigh_cache::{Answer, Node, Op, Page, Stale};
use nigh_types::{Attr, Name, NodeId, OpId, Span, Time, WriteFlags};
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// A name, or its absence, as a kernel holds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dentry {
    /// `None`: it does not exist.
    pub ino: Option<u64>,
    pub until: Time,
}

/// Attributes as a kernel holds them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Believed {
    pub id: NodeId,
    pub attr: Attr,
    until: Time,
    part: Part,
}

/// Which of the attributes it believes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    All,
    /// Not the time of change, which an own change has set, nor the count of links, for which nobody asks without it.
    ButChange,
    /// Mode and owner: an own change of data has set the rest (`FUSE_STATX_MODSIZE`).
    Rights,
}

impl Believed {
    /// Whether what it believes is so.
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

/// How long a file is for who reads it, and when that was taken in, or something of the file was to be forgotten
/// (`i_size`, `attr_version`).
#[derive(Clone, Copy, Default, Debug)]
struct Size {
    bytes: u64,
    version: u64,
    /// An own request is out that may make it longer (`FUSE_I_SIZE_UNSTABLE`).
    unstable: bool,
}

/// The dcache and inode attributes of one mount.
#[derive(Clone, Default, Debug)]
pub struct Kernel {
    sizes: BTreeMap<u64, Size>,
    version: u64,
    names: BTreeMap<(u64, Name), Dentry>,
    attrs: BTreeMap<u64, Believed>,
    /// Something is mounted below, so names are dropped one by one.
    pub mounted_below: bool,
    pub kept: Kept,
}

impl Kernel {
    /// What makes its future, as text that is the same for the same state. `asked`: see [`Kernel::version`].
    pub(crate) fn write(&self, asked: &BTreeMap<OpId, u64>, out: &mut String) -> fmt::Result {
        let Kernel { sizes, version: _, names, attrs, mounted_below, kept } = self;
        write!(out, "{names:?}{attrs:?}{mounted_below}{kept:?}")?;
        sizes.iter().try_for_each(|(ino, size)| write!(out, "{ino}:{}{} ", size.bytes, size.unstable))?;
        // Only who has asked before something was taken in is left out.
        asked.iter().try_for_each(|(id, asked)| {
            let later: Vec<u64> =
                sizes.iter().filter(|(_, size)| size.version > *asked).map(|(ino, _)| *ino).collect();
            write!(out, "{id:?}{later:?}")
        })
    }

    /// Takes in what an answer to a lookup in `dir` says.
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

    /// `asked`: when it asked; of what it changes it takes in what comes.
    pub fn attributes(&mut self, now: Time, answer: &Answer, asked: Option<u64>) {
        if let Answer::Attr(id, attr, valid) = answer {
            self.believe(*id, *attr, now.after(*valid), asked.unwrap_or(u64::MAX));
        }
    }

    /// Unless it took in another answer, or forgot, since it asked (`fuse_change_attributes`).
    fn believe(&mut self, id: NodeId, attr: Attr, until: Time, asked: u64) {
        let size = self.sizes.entry(id.ino).or_default();
        if size.unstable || size.version > asked {
            return;
        }
        self.version += 1;
        (size.bytes, size.version) = (attr.size, self.version);
        self.attrs.insert(id.ino, Believed { id, attr, until, part: Part::All });
    }

    /// What it goes by when it asks now.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// It is told that a file is so long at least (`fuse_notify_store`).
    pub fn lengthened(&mut self, ino: u64, bytes: u64) {
        let size = self.sizes.entry(ino).or_default();
        if bytes > size.bytes {
            self.version += 1;
            (size.bytes, size.version) = (bytes, self.version);
            self.attrs.remove(&ino);
        }
    }

    /// It begins to write as far as that, or sets how long a file is (`fuse_perform_write`, `fuse_do_setattr`).
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

    /// It is answered.
    pub fn ends(&mut self, op: &Op) {
        if let Op::Write { ino, flags: WriteFlags { flush: false, .. }, .. } | Op::SetAttr { ino, .. } = op {
            self.sizes.entry(*ino).or_default().unstable = false;
        }
    }

    /// How long a file is for who reads it.
    #[must_use]
    pub fn size(&self, ino: u64) -> u64 {
        self.sizes.get(&ino).map_or(0, |size| size.bytes)
    }

    /// It wrote as far as that (`fuse_write_update_attr`).
    pub fn wrote(&mut self, ino: u64, end: u64) {
        let size = self.sizes.entry(ino).or_default();
        size.bytes = size.bytes.max(end);
    }

    /// An own change took an inode's name, or moved it: the rest of what it believes goes on, and for as long
    /// (`fuse_entry_unlinked`, `fuse_update_ctime`).
    fn changed_name(&mut self, ino: u64) {
        let all = self.attrs.get_mut(&ino).filter(|believed| believed.part == Part::All);
        all.into_iter().for_each(|believed| believed.part = Part::ButChange);
    }

    /// An own change of a file's data: mode and owner are believed on (`fuse_write_update_attr`).
    pub fn changed_data(&mut self, ino: u64) {
        self.version += 1;
        self.sizes.entry(ino).or_default().version = self.version;
        self.attrs.get_mut(&ino).into_iter().for_each(|believed| believed.part = Part::Rights);
    }

    /// Answers to who asked before are not taken in any more (`fuse_entry_unlinked`).
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

    /// The kernel's own doing after it removed or replaced a name.
    pub fn unlinked(&mut self, dir: u64, name: &Name) {
        if let Some(Dentry { ino: Some(ino), .. }) = self.names.remove(&(dir, name.clone())) {
            self.lost_name(ino);
        }
        self.changed_dir(dir);
    }

    /// The same after it renamed: what it believes of the old name goes along, and for as long (`d_move`; `d_exchange`).
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
        // What is moved is there. Where a look since has said that it is not, that was of after the change: the name was dropped.
        if let Some(dentry) = moved
            && let Some(ino) = dentry.ino
        {
            self.changed_name(ino);
            self.names.insert((to, new_name.clone()), dentry);
        }
        self.changed_dir(from);
        self.changed_dir(to);
    }

    /// The kernel's own doing after it made a name: the directory's attributes are asked again.
    pub fn changed_dir(&mut self, dir: u64) {
        self.kept.changed_dir(dir);
        self.attrs.remove(&dir);
    }

    /// A notification.
    pub fn forget(&mut self, stale: &Stale) {
        self.kept.forget(stale);
        match stale {
            Stale::Attr { ino } | Stale::Data { ino, .. } => {
                self.version += 1;
                self.sizes.entry(*ino).or_default().version = self.version;
                self.attrs.remove(ino);
            }
            Stale::Entry { dir, name } | Stale::Gone { dir, name } => {
                self.names.remove(&(*dir, name.clone()));
            }
            Stale::Epoch(names) if self.mounted_below => {
                for name in names {
                    self.names.remove(name);
                }
            }
            Stale::Epoch(_) => self.names.clear(),
        }
    }

    /// Names believed at `now`.
    pub fn names(&self, now: Time) -> impl Iterator<Item = (u64, &Name, Dentry)> {
        self.names.iter().filter(move |(_, d)| now < d.until).map(|((dir, name), d)| (*dir, name, *d))
    }

    /// What is believed of one name.
    #[must_use]
    pub fn name(&self, now: Time, dir: u64, name: &Name) -> Option<Dentry> {
        self.names.get(&(dir, name.clone())).copied().filter(|d| now < d.until)
    }

    /// What a name led to when the kernel last heard of it: it asks before it removes or renames, and
    /// holds on to what it was told meanwhile.
    #[must_use]
    pub fn last_heard(&self, dir: u64, name: &Name) -> Option<u64> {
        self.names.get(&(dir, name.clone())).and_then(|d| d.ino)
    }

    /// Attributes believed at `now`, in part or as a whole.
    pub fn believed(&self, now: Time) -> impl Iterator<Item = &Believed> {
        self.attrs.values().filter(move |believed| now < believed.until)
    }

    /// Those for which it does not ask at `now`.
    pub fn attrs(&self, now: Time) -> impl Iterator<Item = &Believed> {
        self.believed(now).filter(|believed| believed.part != Part::Rights)
    }
}
