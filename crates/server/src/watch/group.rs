//! One filesystem that is watched: what of it, and what its events lead to.

use super::Alive;
use super::event::Spot;
use super::fanotify::{self, Scope};
use super::keys::{Hint, MASK, OWN_DELETE_SELF, is_of_attributes};
use super::local::{has_fine_times, is_local, kernel_release};
use crate::error::{Fault, Result};
use crate::filesystem::Filesystem;
use crate::handle::{FileHandle, Opener};
use crate::leases::Leases;
use crate::stat::{self, Stat};
use crate::whereabouts::{Told, mount_root, told_place};
use lru::LruCache;
use nigh_native::lease::Object;
use nigh_types::{Errno, Name, Timestamp};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How a filesystem is watched.
pub(crate) enum Way {
    /// All of it, by one mark. What events bring is found by its handle.
    Whole(Whole),
    /// A mark for each object that is granted.
    Objects(Mutex<Marks>),
}

/// What is needed to look up what events bring.
pub(crate) struct Whole {
    opener: Opener,
    /// Of the opener's mount.
    root: OwnedFd,
}

/// Objects that are marked.
#[derive(Default)]
pub(crate) struct Marks {
    by_handle: FxHashMap<FileHandle, Object>,
    by_object: FxHashMap<Object, FileHandle>,
    /// No more could be had: when that was.
    full: Option<Instant>,
}

/// **Lock order.** `marks` comes after the place locks and before the table of leases.
pub(crate) struct Group {
    pub(crate) fd: OwnedFd,
    /// [`Object::filesystem`] of all that lies on it.
    pub(crate) filesystem: u64,
    /// Its magic number: a device number may be another one's by now.
    kind: u64,
    pub(crate) label: &'static str,
    pub(crate) way: Way,
    pub(crate) counts: Counts,
    /// Too much is lost: nothing is granted without a limit.
    pub(crate) paused: AtomicBool,
    begun: AtomicBool,
    fine_times: bool,
    /// Directories by handle, those that were granted and those that events told; and the former by what they are.
    known: Mutex<LruCache<FileHandle, Object>>,
    noted: Mutex<LruCache<Object, ()>>,
    stamps: Mutex<LruCache<Object, Stamp>>,
    leases: Arc<Leases>,
    alive: Arc<Mutex<Alive>>,
    token: u64,
}

/// For status; they only grow.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) events: AtomicU64,
    pub(crate) own: AtomicU64,
    pub(crate) recalls: AtomicU64,
    pub(crate) overflows: AtomicU64,
    /// Objects that could not be marked.
    pub(crate) refused: AtomicU64,
}

/// What of an object was seen when it was recalled last.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    ctime: Timestamp,
    mtime: Timestamp,
    size: u64,
    links: u32,
    /// A change after it was read has another ctime.
    settled: bool,
}

/// Before Linux 6.13 two changes within a tick of the clock have one ctime.
const TICK: Duration = Duration::from_millis(20);
/// Where marks have run out it is not tried for each grant.
const FULL: Duration = Duration::from_secs(1);
/// Directories whose handles, and files whose stamps are remembered; about 100 bytes each.
const KNOWN: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("it is not 0");

impl Group {
    /// Watches the filesystem on which `root` lies; otherwise says why it cannot be.
    pub(crate) fn new(
        root: &OwnedFd,
        (stat, filesystem): (&Stat, Filesystem),
        whole: bool,
        (leases, alive, token): (&Arc<Leases>, &Arc<Mutex<Alive>>, u64),
    ) -> std::result::Result<Group, String> {
        let label = filesystem.label();
        if !is_local(filesystem.kind) {
            return Err(format!("the kernel does not tell all changes on {label}"));
        }
        let refused = |error: io::Error| format!("the kernel refuses to watch {label}: {error}");
        FileHandle::plain(root).map_err(|fault| refused(plain(fault)))?;
        let object = stat.object(filesystem.overlay);
        let opener = whole.then(|| open_directory(root)).flatten().and_then(Opener::new);
        let marked = opener.and_then(|opener| {
            let fd = fanotify::open(true).ok()?;
            fanotify::mark(&fd, Scope::Filesystem, MASK, root).ok()?;
            Some((fd, Way::Whole(Whole { opener, root: mount_root(root).ok()? })))
        });
        let (fd, way) = match marked {
            Some(marked) => marked,
            None => {
                // As many as the kernel allows a user, root too: each pins an inode, and what nobody has any more is only given back
                // where they run out.
                let fd = fanotify::open(false).map_err(refused)?;
                // Whether it works at all: of btrfs not on every kernel. What may not be read is another matter.
                match fanotify::mark(&fd, Scope::Object, MASK, root) {
                    Err(error) if error.kind() != io::ErrorKind::PermissionDenied => {
                        return Err(refused(error));
                    }
                    _ => {}
                }
                (fd, Way::Objects(Mutex::default()))
            }
        };
        Ok(Group {
            fd,
            filesystem: object.filesystem,
            kind: filesystem.kind,
            label,
            way,
            counts: Counts::default(),
            paused: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            fine_times: has_fine_times(filesystem.kind, kernel_release()),
            known: Mutex::new(LruCache::new(KNOWN)),
            noted: Mutex::new(LruCache::new(KNOWN)),
            stamps: Mutex::new(LruCache::new(KNOWN)),
            leases: Arc::clone(leases),
            alive: Arc::clone(alive),
            token,
        })
    }

    /// Its events are read from now on. What one before it heard last, nobody may have taken in.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::SeqCst);
        self.pause();
        self.resume();
    }

    /// Watches an object, if it is one of this filesystem's, before it is granted. `fd` stands for it, `O_PATH` or not.
    pub(crate) fn watch(&self, object: Object, fd: impl AsFd) {
        let Way::Objects(marks) = &self.way else { return };
        if object.filesystem != self.filesystem {
            return;
        }
        let mut marks = marks.lock();
        if self.paused.load(Ordering::Relaxed) {
            return;
        }
        let full = marks.full.is_some_and(|since| since.elapsed() < FULL);
        // Without a birth time it may be a new one with the number of one that is gone, and its mark with it.
        if object.birth != 0 && marks.by_object.contains_key(&object) {
            return;
        }
        if full {
            return self.unmarked(&mut marks, object);
        }
        match self.mark(object, fd) {
            Ok(handle) => {
                marks.by_handle.insert(handle.clone(), object);
                marks.by_object.insert(object, handle);
                marks.full = None;
                self.leases.tell(|table, now| table.handle_watched_object(now, object));
            }
            Err(error) => {
                self.counts.refused.fetch_add(1, Ordering::Relaxed);
                let wanting = [libc::ENOSPC, libc::ENOMEM].map(Some).contains(&error.raw_os_error());
                marks.full = wanting.then(Instant::now);
                tracing::debug!(ino = object.ino, %error, "an object cannot be watched: grants on it have a limit");
                self.unmarked(&mut marks, object);
            }
        }
    }

    /// It has no mark, though an earlier one of its number may have had one.
    fn unmarked(&self, marks: &mut Marks, object: Object) {
        if marks.by_object.remove(&object).is_some() {
            self.leases.tell(|table, now| table.handle_unwatched_object(now, object));
        }
    }

    /// The names of a directory are granted: its handle leads nowhere when it is removed, while whoever is in it may
    /// see what it was.
    pub(crate) fn note_directory(&self, object: Object, fd: impl AsFd) {
        let Way::Whole(_) = &self.way else { return };
        if object.filesystem != self.filesystem || self.noted.lock().put(object, ()).is_some() {
            return;
        }
        if let Ok(handle) = FileHandle::plain(fd) {
            self.known.lock().put(handle, object);
        }
    }

    fn mark(&self, object: Object, fd: impl AsFd) -> io::Result<FileHandle> {
        // What a name led to may be another one by now.
        let stat = stat::of_fd(&fd).map_err(plain)?;
        let kind = rustix::fs::fstatfs(&fd)?.f_type;
        if stat.object(false) != object || u64::try_from(kind) != Ok(self.kind) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let handle = FileHandle::plain(&fd).map_err(plain)?;
        fanotify::mark(&self.fd, Scope::Object, MASK, fd)?;
        Ok(handle)
    }

    /// From now on what is watched is granted without a limit.
    pub(crate) fn resume(&self) {
        self.paused.store(false, Ordering::Relaxed);
        match &self.way {
            Way::Whole(_) => self.leases.tell(|table, now| table.handle_watched(now, self.filesystem)),
            Way::Objects(marks) => {
                let marks = marks.lock();
                let objects: Vec<Object> = marks.by_object.keys().copied().collect();
                for some in objects.chunks(AT_ONCE) {
                    self.leases.tell(|table, now| {
                        some.iter().for_each(|object| table.handle_watched_object(now, *object));
                    });
                }
            }
        }
    }

    /// From now on nothing is, and what was is recalled.
    pub(crate) fn pause(&self) {
        self.paused.store(true, Ordering::Relaxed);
        // Whoever marks an object at this moment does it before or sees that.
        let marks = if let Way::Objects(marks) = &self.way { Some(marks.lock()) } else { None };
        let until = self.leases.tell(|table, now| {
            table.handle_unwatched(now, self.filesystem);
            table.latest_grant()
        });
        drop(marks);
        self.recall_until(until);
    }

    /// Forgets all marks: objects are marked anew as they are granted anew.
    pub(crate) fn begin_again(&self) {
        let Way::Objects(marks) = &self.way else { return };
        let mut marks = marks.lock();
        if let Err(error) = fanotify::flush(&self.fd) {
            tracing::warn!(%error, "marks cannot be taken away");
        }
        *marks = Marks::default();
        let until = self.leases.tell(|table, now| {
            table.handle_unwatched(now, self.filesystem);
            table.latest_grant()
        });
        drop(marks);
        self.recall_until(until);
    }

    /// Where marks have run out and most are of what nobody is granted any more, begins again.
    pub(crate) fn make_room(&self) {
        let Way::Objects(marks) = &self.way else { return };
        let marks = marks.lock();
        if marks.full.is_none() {
            return;
        }
        let objects: Vec<Object> = marks.by_object.keys().copied().collect();
        drop(marks);
        let held = objects.chunks(AT_ONCE).map(|some| {
            self.leases.tell(|table, _| some.iter().filter(|object| table.is_held(**object)).count())
        });
        if held.sum::<usize>() < objects.len() / 2 {
            self.begin_again();
        }
    }

    /// Asks for all that was granted on it until then.
    pub(crate) fn recall_until(&self, until: nigh_types::GrantId) {
        let mut after = None;
        loop {
            let most = AT_ONCE as u64;
            after = self
                .leases
                .tell(|table, now| table.handle_missed(now, self.filesystem, until, (after, most)));
            if after.is_none() {
                return;
            }
        }
    }

    /// Objects that are marked; for status.
    pub(crate) fn marks(&self) -> u64 {
        match &self.way {
            Way::Whole(_) => 1,
            Way::Objects(marks) => marks.lock().by_object.len() as u64,
        }
    }

    /// What an event leads to. An error: that cannot be told now, so what it changed is as good as lost.
    pub(crate) fn resolve(&self, mask: u64, spot: &Spot) -> Result<Hint> {
        let dir = match &spot.dir {
            Some((handle, name)) => self.directory(handle)?.map(|dir| (dir, Name::new(name).ok())),
            None => None,
        };
        let mut hint = Hint { mask, dir, ..Hint::default() };
        let Some(own) = &spot.own else { return Ok(hint) };
        match &self.way {
            Way::Objects(marks) => {
                let mut marks = marks.lock();
                hint.own = marks.by_handle.get(own).copied();
                if mask & (libc::FAN_DELETE_SELF | OWN_DELETE_SELF) != 0
                    && let Some(object) = marks.by_handle.remove(own)
                {
                    // Its mark went with it.
                    self.unmarked(&mut marks, object);
                }
            }
            Way::Whole(Whole { opener, root }) => {
                let Some(fd) = unless_gone(opener.open(own))? else {
                    hint.own = self.known.lock().get(own).copied();
                    return Ok(hint);
                };
                let stat = stat::of_fd(&fd)?;
                let object = stat.object(false);
                hint.own = Some(object);
                hint.same = self.is_same(object, &stat);
                // The name that it was opened by may be gone, and another one be its only one.
                let may_lie_elsewhere = hint.dir.is_none() || stat.attr.nlink == 1;
                if may_lie_elsewhere && !stat.attr.is_dir() && is_of_attributes(mask) {
                    hint.home = home(root, &fd, &stat)?;
                }
            }
        }
        Ok(hint)
    }

    fn directory(&self, handle: &FileHandle) -> Result<Option<Object>> {
        match &self.way {
            Way::Objects(marks) => Ok(marks.lock().by_handle.get(handle).copied()),
            Way::Whole(Whole { opener, .. }) => {
                if let Some(object) = self.known.lock().get(handle) {
                    return Ok(Some(*object));
                }
                let Some(fd) = unless_gone(opener.open(handle))? else { return Ok(None) };
                let object = stat::of_fd(fd)?.object(false);
                self.known.lock().put(handle.clone(), object);
                Ok(Some(object))
            }
        }
    }

    /// Whether it is as it was when this was asked last.
    fn is_same(&self, object: Object, stat: &Stat) -> bool {
        let attr = &stat.attr;
        let since = u64::try_from(attr.ctime.secs).ok().map(|secs| Duration::new(secs, attr.ctime.nanos));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        let old = now.zip(since).is_some_and(|(now, since)| now.saturating_sub(since) > TICK);
        let stamp = Stamp {
            ctime: attr.ctime,
            mtime: attr.mtime,
            size: attr.size,
            links: attr.nlink,
            settled: self.fine_times || old,
        };
        self.stamps.lock().put(object, stamp).is_some_and(|before| before == stamp && before.settled)
    }
}

/// Grants and objects that are told to the table under one lock.
const AT_ONCE: usize = 4096;

impl Drop for Group {
    fn drop(&mut self) {
        if !self.begun.load(Ordering::SeqCst) {
            return;
        }
        let mut alive = self.alive.lock();
        if alive.tokens.get(&self.filesystem) == Some(&self.token) {
            alive.tokens.remove(&self.filesystem);
            self.pause();
        }
    }
}

fn plain(fault: Fault) -> io::Error {
    io::Error::from_raw_os_error(Errno::from(fault).raw())
}

fn open_directory(fd: &OwnedFd) -> Option<OwnedFd> {
    let flags = OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::RDONLY;
    rustix::fs::openat(fd, c".", flags, Mode::empty()).ok()
}

/// `None`: it is gone. Whatever else keeps it from being looked at does not say so, such as too few descriptors.
fn unless_gone<T>(looked: Result<T>) -> Result<Option<T>> {
    match looked {
        Ok(there) => Ok(Some(there)),
        Err(Fault(Errno::STALE | Errno::NOENT)) => Ok(None),
        Err(fault) => Err(fault),
    }
}

/// The directory in which a file lies, as the kernel says, and its name there. (Where it knows only a name that is gone, as whoever
/// builds makes many, all would have to be recalled: docs/semantics.md, S9.)
fn home(root: &OwnedFd, fd: &OwnedFd, stat: &Stat) -> Result<Option<(Object, Name)>> {
    match told_place(root, fd, stat)? {
        Told::There(dir, name) => Ok(Some((stat::of_fd(&dir)?.object(false), name))),
        Told::Elsewhere => Ok(None),
    }
}
