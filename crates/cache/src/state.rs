//! Records: inodes, directories, open files.

use crate::grants::Held;
use crate::op::Caller;
use crate::rows::{Child, Rows};
use crate::singles::Singles;
use crate::stores::{Base, Old};
use crate::whole::Whole;
use nigh_types::{Access, Attr, CallId, Cookie, Handle, Name, NodeId, Span, Time, Timestamp, XattrSet};

/// An inode that the kernel knows, or that has facts under a grant of its own.
#[derive(Clone, Debug)]
pub(crate) struct Inode {
    pub id: NodeId,
    /// How often the kernel was told of it and has not forgotten.
    pub lookups: u64,
    /// Until then the kernel believes what it was told under `home`, and until then that the name leads there.
    pub told_until: Time,
    pub named_until: Time,
    /// The directory and name that last led to it: the hint of its [`nigh_types::Place`], and where
    /// its attributes are if the directory's grant covers them.
    pub home: Option<(u64, Name)>,
    /// Read through `Deref`; `None`: as it is of one of which nothing more is known.
    more: Option<Box<More>>,
    /// See [`crate::prune::Told`].
    pub told_as: u32,
    /// The kernel was told attributes for some time, and not to forget them since.
    pub attr_told: bool,
    /// The set-user-ID and set-group-ID bits among those attributes (`mode >> 9`).
    pub set_id_told: u8,
    /// An own change took some of these bits, and the kernel is to forget the attributes before that change is answered.
    pub set_id_gone: bool,
    /// Which [`Copies`] the kernel may have, as bits.
    copies: u8,
}

/// Copies that the kernel keeps without a timeout ([`crate::targets`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Copies {
    Target = 1,
    Acls = 2,
}

/// What is known of few inodes: of millions the kernel was just told.
#[derive(Clone, Debug)]
pub(crate) struct More {
    /// What who asked for attributes was answered last, and when: of a file that is open.
    pub last_told: Option<Box<(Time, Attr)>>,
    /// How many [`crate::Fh`]s stand for it.
    pub opens: u32,
    /// Of those, files without a handle at the remote: before its last name goes, or who may read it
    /// changes, the remote must be asked to keep it.
    pub opens_unpinned: u32,
    /// Of `opens`, those for writing.
    pub writers: u32,
    /// Somebody of this mount wanted an fcntl(2) lock on it.
    pub locked: bool,
    /// The thread that removed its capability last, if it is root's: it may be about to write ([`crate::rights`]).
    pub uncapped_by: Option<u32>,
    /// Of a directory that an own change removed: what a process that is still in it sees.
    pub gone: Option<Attr>,
    /// A name under which it was known when it was given another: a hint when it has lost the latest.
    pub linked_from: Option<Box<(u64, Name)>>,
    /// Attributes under the inode's own grant.
    pub own: Option<(Attr, Held)>,
    /// A symlink's target, until that deadline.
    pub target: Option<Box<(Box<[u8]>, Time)>>,
    /// All xattrs, until that deadline.
    pub xattrs: Option<Box<(XattrSet, Time)>>,
    pub data: Data,
    pub whole: Whole,
    /// Of which state of the file the kernel's pages are, for what is stored into maps of them.
    pub base: Option<Base>,
    /// The kernel may have older pages too.
    pub old: Option<Old>,
    /// A handle that keeps a file readable which was opened without one.
    pub pinned: Option<Handle>,
}

static NOTHING: More = More::nothing();

impl std::ops::Deref for Inode {
    type Target = More;

    fn deref(&self) -> &More {
        self.more.as_deref().unwrap_or(&NOTHING)
    }
}

/// What the kernel's page cache may hold of a file.
#[derive(Clone, Debug)]
pub(crate) struct Data {
    pub held: Option<Held>,
    /// The end of `held` that is watched, where the file is open: this one or an earlier.
    pub watched: Time,
    pub pages: Pages,
}

impl Data {
    pub const fn none() -> Data {
        Data { held: None, watched: Time(0), pages: Pages::None }
    }
}

/// Of which state of the file the kernel's pages are, as far as attributes tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pages {
    /// There are none.
    None,
    Of(Stamp),
    /// Own writes and others' may be mixed: true only while the grant lives.
    Mixed,
}

/// Tells one state of a file's data from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stamp {
    size: u64,
    mtime: Timestamp,
    ctime: Timestamp,
}

impl Stamp {
    pub fn of(attr: &Attr) -> Stamp {
        Stamp { size: attr.size, mtime: attr.mtime, ctime: attr.ctime }
    }
}

impl More {
    const fn nothing() -> More {
        More {
            last_told: None,
            opens: 0,
            opens_unpinned: 0,
            writers: 0,
            locked: false,
            uncapped_by: None,
            gone: None,
            linked_from: None,
            own: None,
            target: None,
            xattrs: None,
            data: Data::none(),
            whole: Whole::none(),
            base: None,
            old: None,
            pinned: None,
        }
    }

    /// Whether it need not be kept.
    fn is_nothing(&self) -> bool {
        // What it was answered last is of no use where it is not open.
        let More {
            last_told: _,
            opens,
            opens_unpinned,
            writers,
            locked,
            // It is of use where the file is open.
            uncapped_by: _,
            gone,
            linked_from,
            own,
            target,
            xattrs,
            data,
            whole,
            base,
            old,
            pinned,
        } = self;
        let counts = *opens == 0 && *opens_unpinned == 0 && *writers == 0 && !locked;
        let facts =
            gone.is_none() && linked_from.is_none() && own.is_none() && target.is_none() && xattrs.is_none();
        let pages = data.held.is_none() && data.pages == Pages::None && whole.is_none();
        counts && facts && pages && base.is_none() && old.is_none() && pinned.is_none()
    }
}

impl Inode {
    pub fn new(id: NodeId, lookups: u64) -> Inode {
        Inode {
            id,
            lookups,
            told_until: Time(0),
            named_until: Time(0),
            home: None,
            more: None,
            told_as: 0,
            attr_told: false,
            set_id_told: 0,
            set_id_gone: false,
            copies: 0,
        }
    }

    /// Whether the kernel may have a copy.
    pub fn has_copy(&self, of: Copies) -> bool {
        self.copies & of as u8 != 0
    }

    /// It may have one from now on, or none any more.
    pub fn note_copy(&mut self, of: Copies, has: bool) {
        self.copies = if has { self.copies | of as u8 } else { self.copies & !(of as u8) };
    }

    /// To change what few inodes have.
    pub fn more(&mut self) -> &mut More {
        self.more.get_or_insert_with(|| Box::new(More::nothing()))
    }

    /// The same if there is something, as where something is taken away.
    pub fn more_if_any(&mut self) -> Option<&mut More> {
        self.more.as_deref_mut()
    }

    /// What is known beside attributes and data is no longer true.
    pub fn forget_xattrs(&mut self) {
        self.more_if_any().into_iter().for_each(|more| (more.xattrs, more.target) = (None, None));
    }

    pub fn put_target(&mut self, target: Option<(Box<[u8]>, Time)>) {
        match target {
            Some(target) => self.more().target = Some(Box::new(target)),
            None => self.more_if_any().into_iter().for_each(|more| more.target = None),
        }
    }

    /// No pages of it are believed in.
    pub fn forget_pages(&mut self) {
        self.more_if_any()
            .into_iter()
            .for_each(|more| (more.data.held, more.data.pages) = (None, Pages::None));
    }

    pub fn forget_own(&mut self) -> Option<(Attr, Held)> {
        self.more_if_any()?.own.take()
    }

    /// Frees what is not needed.
    pub fn settle(&mut self) {
        self.more.take_if(|more| more.is_nothing());
    }

    /// Whether that name last led to it.
    pub fn is_at(&self, dir: u64, name: impl AsRef<[u8]>) -> bool {
        let name = name.as_ref();
        self.home.as_ref().is_some_and(|(d, n)| *d == dir && n.as_bytes() == name)
    }

    /// Another inode took the number: nothing that was known of the old one holds.
    pub fn renew(&mut self, id: NodeId) {
        let old = std::mem::replace(self, Inode::new(id, self.lookups));
        (self.told_as, self.attr_told) = (old.told_as, old.attr_told);
        (self.set_id_told, self.set_id_gone) = (old.set_id_told, old.set_id_gone);
        self.copies = old.copies;
        if old.opens > 0 {
            let (opens, opens_unpinned, writers) = (old.opens, old.opens_unpinned, old.writers);
            self.more = Some(Box::new(More { opens, opens_unpinned, writers, ..More::nothing() }));
        }
    }
}

/// Changes by others that follow each other within this come again and again (decision 6 of the design), until none has come
/// for so long.
const PUSHES_MEET: Span = Span::from_millis(1_000);
const QUIET: Span = Span::from_millis(10_000);

/// What is known of a directory's names.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    pub id: NodeId,
    /// It is: another inode may have taken the number, of which that is not known.
    pub is_one: bool,
    /// The grant over `rows` and `complete`. Invariant: without it `rows` is empty.
    pub held: Option<Held>,
    pub rows: Rows,
    /// What is known of single names, whether `held` lives or not.
    pub singles: Singles,
    /// A name without a row does not exist.
    pub complete: bool,
    /// The listing in flight, and up to where it has come: names below have a row or do not exist.
    pub listing: Option<CallId>,
    pub progress: Option<Cookie>,
    /// Counts breaks in what is known; the kernel's listing is of `kernel_version`.
    pub version: u64,
    pub kernel_version: Option<u64>,
    /// Of which version the kernel was given a part to keep last.
    pub given: Option<u64>,
    /// What the kernel keeps was given to who wants names only.
    pub bare: bool,
    /// Who read of it last.
    pub reader: u32,
    /// How often its grant has ended.
    pub gaps: u64,
    /// When others changed names in it the last time, and whether they do so again and again ([`Directory::is_ordered`]).
    pub pushed: Option<(Time, bool)>,
    /// The kernel was told of names that do not exist.
    pub missing_given: bool,
    /// It came in that walk ahead, nobody has used it, and so much did it cost.
    pub ahead: Option<(CallId, u64)>,
    /// It came so and was used, then for the first time; not since, but for what follows such a use at once.
    pub passed: Option<Time>,
    /// Of the directories in it, the one that was opened last; and it was itself opened by who knew what is beside it.
    pub last_child: Option<u64>,
    pub via: bool,
    /// How many names were looked up at the remote before it was listed.
    pub looked_up: u8,
    /// Used since eviction last came by, and when it was last.
    pub used: bool,
    pub used_at: Time,
    /// Bytes counted in the cache's total.
    pub counted: u64,
}

impl Directory {
    pub fn new(id: NodeId) -> Directory {
        Directory {
            id,
            is_one: true,
            held: None,
            rows: Rows::default(),
            singles: Singles::default(),
            complete: false,
            listing: None,
            progress: None,
            version: 0,
            kernel_version: None,
            given: None,
            bare: false,
            reader: 0,
            gaps: 0,
            pushed: None,
            missing_given: false,
            ahead: None,
            passed: None,
            last_child: None,
            via: false,
            looked_up: 0,
            used: true,
            used_at: Time(0),
            counted: 0,
        }
    }

    /// The grant has ended: nothing is known.
    pub fn forget(&mut self) {
        self.held = None;
        self.looked_up = 0;
        self.rows.clear();
        self.complete = false;
        self.progress = None;
        self.version += 1;
        self.gaps += 1;
    }

    /// Somebody asks for something in it.
    pub fn note_use(&mut self, now: Time) {
        (self.used, self.used_at) = (true, now);
    }

    /// Memory of its names, in bytes.
    pub fn bytes(&self) -> u64 {
        self.rows.bytes() + self.singles.bytes()
    }

    /// Another inode has taken its number.
    pub fn pass_number(&mut self, id: NodeId) {
        (self.id, self.is_one) = (id, false);
        self.listing = None;
    }

    /// Others have changed a name.
    pub fn note_push(&mut self, now: Time) {
        let again = self.pushed.is_some_and(|(last, ordered)| {
            now < last.after(PUSHES_MEET) || ordered && now < last.after(QUIET)
        });
        self.pushed = Some((now, again));
    }

    /// Whether others change it so often that the kernel is given no time for its names: telling it to drop one may wait
    /// for requests in that directory.
    pub fn is_ordered(&self, now: Time) -> bool {
        self.pushed.is_some_and(|(last, ordered)| ordered && now < last.after(QUIET))
    }

    /// What a name leads to by the rows (`Some(None)`: there is none), if they say that. They do while `held` lives.
    pub fn listed(&self, cookie: Cookie, name: &Name) -> Option<Option<&Child>> {
        match self.rows.find(cookie, name.as_bytes()) {
            Some(row) => Some(row.child),
            None => (self.complete || self.progress.is_some_and(|p| cookie <= p)).then_some(None),
        }
    }
}

/// A regular file that the kernel holds open.
#[derive(Clone, Debug)]
pub(crate) struct OpenFile {
    pub ino: u64,
    /// Of the inode that was opened: its number may be another's by now.
    pub generation: u64,
    /// `None`: opened under a grant, the remote was not asked.
    pub handle: Option<Handle>,
    /// How it was opened.
    pub access: Access,
    /// What is written through it goes past the kernel's pages.
    pub direct: bool,
    /// Where the latest such write was to go, if that is not known to be done.
    pub unanswered_at: Option<u64>,
    /// It could not be opened again after the remote had forgotten it: every use fails with `EIO`.
    pub lost: bool,
    /// Who opened it; writes are made on their behalf.
    pub caller: Caller,
}

impl OpenFile {
    /// Whether it is that inode, and the remote was not asked for a handle.
    pub fn is_unknown_of(&self, id: NodeId) -> bool {
        self.handle.is_none() && !self.lost && self.generation == id.generation
    }
}

/// A directory that the kernel holds open.
#[derive(Clone, Debug)]
pub(crate) struct OpenDir {
    pub ino: u64,
    /// A listing that may not be kept as a fact: it serves this open until rewound.
    pub snapshot: Option<CallId>,
    /// With `cookies=31`: the last offset that it gave which does not say where it leads, and the cookie that it stands for.
    pub told: Option<(Cookie, Cookie)>,
    /// Whoever opened it has not come to its end.
    pub reading: bool,
    /// The kernel keeps what it reads here (`FOPEN_CACHE_DIR`).
    pub kernel_keeps: bool,
    /// Who reads, how many files it was given with attributes, and whether one was held back ([`crate::readers`]).
    pub reader: u32,
    pub files_given: u64,
    pub is_tried: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_of_an_inode_that_the_kernel_was_just_told_of_is_small() {
        assert!(size_of::<Inode>() <= 88, "{}", size_of::<Inode>());
        let mut inode = Inode::new(NodeId { ino: 7, generation: 1 }, 1);
        inode.forget_xattrs();
        inode.forget_pages();
        inode.put_target(None);
        assert!(inode.more.is_none());
        inode.more().opens += 1;
        inode.settle();
        assert_eq!(inode.opens, 1);
        inode.more().opens -= 1;
        inode.settle();
        assert!(inode.more.is_none());
    }
}
