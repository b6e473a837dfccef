//! A watched filesystem: its fanotify group, and the resolution of its events.

use super::CurrentGroups;
use super::event::EventLocation;
use super::fanotify::{self, Scope};
use super::keys::{Hint, MASK, OWN_DELETE_SELF, is_of_attributes};
use super::local::{has_fine_times, is_local, kernel_release};
use crate::export::fd_location::{Location, locate_on_mount, mount_root};
use crate::export::handle::{FileHandle, Opener};
use crate::lease::leases::Leases;
use crate::os::error::{Fault, Result};
use crate::os::filesystem::Filesystem;
use crate::os::stat::{self, Stat};
use lru::LruCache;
use nigh_lease::Object;
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
pub(crate) enum MarkStrategy {
    /// One mark on the whole filesystem. Events are resolved by file handle.
    Whole(Whole),
    /// One mark on each granted object.
    Objects(Mutex<Marks>),
}

/// Descriptors for the resolution of file handles in events.
pub(crate) struct Whole {
    opener: Opener,
    /// Root of the opener's mount.
    root: OwnedFd,
}

/// Marked objects.
#[derive(Default)]
pub(crate) struct Marks {
    by_handle: FxHashMap<FileHandle, Object>,
    by_object: FxHashMap<Object, FileHandle>,
    /// When the limit on marks was hit, if it was.
    full: Option<Instant>,
}

/// **Lock order.** `marks` comes after the inode locks and before the lease table.
pub(crate) struct Group {
    pub(crate) fd: OwnedFd,
    /// [`Object::filesystem`] of all objects on it.
    pub(crate) filesystem: u64,
    /// Magic number of the filesystem: its device number may be reused.
    kind: u64,
    pub(crate) label: &'static str,
    pub(crate) strategy: MarkStrategy,
    pub(crate) counts: Counts,
    /// Too many events are lost, so every grant has a time limit.
    pub(crate) paused: AtomicBool,
    begun: AtomicBool,
    fine_times: bool,
    /// Directories by handle, from grants and events. `noted` holds the granted ones by object.
    known: Mutex<LruCache<FileHandle, Object>>,
    noted: Mutex<LruCache<Object, ()>>,
    stamps: Mutex<LruCache<Object, InodeStamp>>,
    leases: Arc<Leases>,
    current: Arc<Mutex<CurrentGroups>>,
    token: u64,
}

/// Counters for status; they only grow.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) events: AtomicU64,
    pub(crate) own: AtomicU64,
    pub(crate) recalls: AtomicU64,
    pub(crate) overflows: AtomicU64,
    /// Objects that could not be marked.
    pub(crate) refused: AtomicU64,
}

/// State of an object when it was recalled last.
#[derive(Clone, Copy, PartialEq, Eq)]
struct InodeStamp {
    ctime: Timestamp,
    mtime: Timestamp,
    size: u64,
    links: u32,
    /// A later change will have another ctime.
    settled: bool,
}

/// Before Linux 6.13 two changes within a clock tick have equal ctimes.
const TICK: Duration = Duration::from_millis(20);
/// Interval between attempts to mark objects once the limit on marks is hit.
const FULL: Duration = Duration::from_secs(1);
/// Maximum number of remembered directory handles and file stamps; about 100 bytes each.
const KNOWN: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("it is not 0");

impl Group {
    /// Watches the filesystem on which `root` lies. The error says why it cannot be watched.
    pub(crate) fn new(
        root: &OwnedFd,
        (stat, filesystem): (&Stat, Filesystem),
        whole: bool,
        (leases, alive, token): (&Arc<Leases>, &Arc<Mutex<CurrentGroups>>, u64),
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
            Some((fd, MarkStrategy::Whole(Whole { opener, root: mount_root(root).ok()? })))
        });
        let (fd, way) = match marked {
            Some(marked) => marked,
            None => {
                // Without unlimited marks, even for root: each mark pins an inode, and marks without grants are
                // removed only once the limit is hit.
                let fd = fanotify::open(false).map_err(refused)?;
                // Tests whether marks work at all, which for btrfs depends on the kernel. Lack of read permission on
                // the root is another matter.
                match fanotify::mark(&fd, Scope::Object, MASK, root) {
                    Err(error) if error.kind() != io::ErrorKind::PermissionDenied => {
                        return Err(refused(error));
                    }
                    _ => {}
                }
                (fd, MarkStrategy::Objects(Mutex::default()))
            }
        };
        Ok(Group {
            fd,
            filesystem: object.filesystem,
            kind: filesystem.kind,
            label,
            strategy: way,
            counts: Counts::default(),
            paused: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            fine_times: has_fine_times(filesystem.kind, kernel_release()),
            known: Mutex::new(LruCache::new(KNOWN)),
            noted: Mutex::new(LruCache::new(KNOWN)),
            stamps: Mutex::new(LruCache::new(KNOWN)),
            leases: Arc::clone(leases),
            current: Arc::clone(alive),
            token,
        })
    }

    /// Starts reading events. Recalls all earlier grants, since the last events of a former group may be unhandled.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::SeqCst);
        self.pause();
        self.resume();
    }

    /// Marks an object of this filesystem before it is granted. `fd`, `O_PATH` or not, refers to it.
    pub(crate) fn watch(&self, object: Object, fd: impl AsFd) {
        let MarkStrategy::Objects(marks) = &self.strategy else { return };
        if object.filesystem != self.filesystem {
            return;
        }
        let mut marks = marks.lock();
        if self.paused.load(Ordering::Relaxed) {
            return;
        }
        let full = marks.full.is_some_and(|since| since.elapsed() < FULL);
        // Without a birth time it may be a new inode with a reused number, whose predecessor's mark is gone.
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
                self.leases.with_table(|table, now| table.handle_watched_object(now, object));
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

    /// Notes that an object has no mark, though an earlier inode with its number may have had one.
    fn unmarked(&self, marks: &mut Marks, object: Object) {
        if marks.by_object.remove(&object).is_some() {
            self.leases.with_table(|table, now| table.handle_unwatched_object(now, object));
        }
    }

    /// Notes the handle of a directory that is granted. The handle resolves no more once the directory is removed,
    /// but processes in the directory may still see its attributes.
    pub(crate) fn note_directory(&self, object: Object, fd: impl AsFd) {
        let MarkStrategy::Whole(_) = &self.strategy else { return };
        if object.filesystem != self.filesystem || self.noted.lock().put(object, ()).is_some() {
            return;
        }
        if let Ok(handle) = FileHandle::plain(fd) {
            self.known.lock().put(handle, object);
        }
    }

    fn mark(&self, object: Object, fd: impl AsFd) -> io::Result<FileHandle> {
        // A name may lead to another inode by now.
        let stat = stat::of_fd(&fd).map_err(plain)?;
        let kind = rustix::fs::fstatfs(&fd)?.f_type;
        if stat.object(false) != object || u64::try_from(kind) != Ok(self.kind) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let handle = FileHandle::plain(&fd).map_err(plain)?;
        fanotify::mark(&self.fd, Scope::Object, MASK, fd)?;
        Ok(handle)
    }

    /// Grants watched objects without a time limit from now on.
    pub(crate) fn resume(&self) {
        self.paused.store(false, Ordering::Relaxed);
        match &self.strategy {
            MarkStrategy::Whole(_) => {
                self.leases.with_table(|table, now| table.handle_watched(now, self.filesystem))
            }
            MarkStrategy::Objects(marks) => {
                let marks = marks.lock();
                let objects: Vec<Object> = marks.by_object.keys().copied().collect();
                for some in objects.chunks(AT_ONCE) {
                    self.leases.with_table(|table, now| {
                        some.iter().for_each(|object| table.handle_watched_object(now, *object));
                    });
                }
            }
        }
    }

    /// Grants with a time limit from now on, and recalls grants without one.
    pub(crate) fn pause(&self) {
        self.paused.store(true, Ordering::Relaxed);
        // A thread that marks an object concurrently either finishes before this or sees `paused`.
        let marks = if let MarkStrategy::Objects(marks) = &self.strategy { Some(marks.lock()) } else { None };
        let until = self.leases.with_table(|table, now| {
            table.handle_unwatched(now, self.filesystem);
            table.latest_grant()
        });
        drop(marks);
        self.recall_until(until);
    }

    /// Removes all marks; objects are marked anew with their next grants.
    pub(crate) fn remark_all(&self) {
        let MarkStrategy::Objects(marks) = &self.strategy else { return };
        let mut marks = marks.lock();
        if let Err(error) = fanotify::flush(&self.fd) {
            tracing::warn!(%error, "marks cannot be taken away");
        }
        *marks = Marks::default();
        let until = self.leases.with_table(|table, now| {
            table.handle_unwatched(now, self.filesystem);
            table.latest_grant()
        });
        drop(marks);
        self.recall_until(until);
    }

    /// Starts over with marks if the limit was hit and most marked objects are no longer granted.
    pub(crate) fn make_room(&self) {
        let MarkStrategy::Objects(marks) = &self.strategy else { return };
        let marks = marks.lock();
        if marks.full.is_none() {
            return;
        }
        let objects: Vec<Object> = marks.by_object.keys().copied().collect();
        drop(marks);
        let held = objects.chunks(AT_ONCE).map(|some| {
            self.leases.with_table(|table, _| some.iter().filter(|object| table.has_holder(**object)).count())
        });
        if held.sum::<usize>() < objects.len() / 2 {
            self.remark_all();
        }
    }

    /// Recalls all grants on this filesystem up to `until`.
    pub(crate) fn recall_until(&self, until: nigh_types::GrantId) {
        let mut after = None;
        loop {
            let most = AT_ONCE as u64;
            after = self
                .leases
                .with_table(|table, now| table.handle_missed(now, self.filesystem, until, (after, most)));
            if after.is_none() {
                return;
            }
        }
    }

    /// Number of marks, for status.
    pub(crate) fn marks(&self) -> u64 {
        match &self.strategy {
            MarkStrategy::Whole(_) => 1,
            MarkStrategy::Objects(marks) => marks.lock().by_object.len() as u64,
        }
    }

    /// Resolves an event. An error means that the event cannot be resolved now and counts as lost.
    pub(crate) fn resolve(&self, mask: u64, spot: &EventLocation) -> Result<Hint> {
        let dir = match &spot.dir {
            Some((handle, name)) => self.directory(handle)?.map(|dir| (dir, Name::new(name).ok())),
            None => None,
        };
        let mut hint = Hint { mask, dir, ..Hint::default() };
        let Some(own) = &spot.own else { return Ok(hint) };
        match &self.strategy {
            MarkStrategy::Objects(marks) => {
                let mut marks = marks.lock();
                hint.own = marks.by_handle.get(own).copied();
                if mask & (libc::FAN_DELETE_SELF | OWN_DELETE_SELF) != 0
                    && let Some(object) = marks.by_handle.remove(own)
                {
                    // The mark is gone with the inode.
                    self.unmarked(&mut marks, object);
                }
            }
            MarkStrategy::Whole(Whole { opener, root }) => {
                let Some(fd) = unless_gone(opener.open(own))? else {
                    hint.own = self.known.lock().get(own).copied();
                    return Ok(hint);
                };
                let stat = stat::of_fd(&fd)?;
                let object = stat.object(false);
                hint.own = Some(object);
                hint.unchanged = self.is_same(object, &stat);
                // The name by which it was opened may be gone, while another one is its only name.
                let may_lie_elsewhere = hint.dir.is_none() || stat.attr.nlink == 1;
                if may_lie_elsewhere && !stat.attr.is_dir() && is_of_attributes(mask) {
                    hint.located_in = locate_dir(root, &fd, &stat)?;
                }
            }
        }
        Ok(hint)
    }

    fn directory(&self, handle: &FileHandle) -> Result<Option<Object>> {
        match &self.strategy {
            MarkStrategy::Objects(marks) => Ok(marks.lock().by_handle.get(handle).copied()),
            MarkStrategy::Whole(Whole { opener, .. }) => {
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

    /// Whether the object is unchanged since the last call.
    fn is_same(&self, object: Object, stat: &Stat) -> bool {
        let attr = &stat.attr;
        let since = u64::try_from(attr.ctime.secs).ok().map(|secs| Duration::new(secs, attr.ctime.nanos));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        let old = now.zip(since).is_some_and(|(now, since)| now.saturating_sub(since) > TICK);
        let stamp = InodeStamp {
            ctime: attr.ctime,
            mtime: attr.mtime,
            size: attr.size,
            links: attr.nlink,
            settled: self.fine_times || old,
        };
        self.stamps.lock().put(object, stamp).is_some_and(|before| before == stamp && before.settled)
    }
}

/// Grants and objects passed to the lease table under one lock.
const AT_ONCE: usize = 4096;

impl Drop for Group {
    fn drop(&mut self) {
        if !self.begun.load(Ordering::SeqCst) {
            return;
        }
        let mut alive = self.current.lock();
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

/// Maps "gone" to `None`. Other errors, such as too few descriptors, do not mean that the object is gone.
fn unless_gone<T>(looked: Result<T>) -> Result<Option<T>> {
    match looked {
        Ok(there) => Ok(Some(there)),
        Err(Fault(Errno::STALE | Errno::NOENT)) => Ok(None),
        Err(fault) => Err(fault),
    }
}

/// Returns the directory and name of a file according to the kernel. (If the kernel knows only a removed name, which
/// builds cause often, nothing is recalled, since that would have to be everything: docs/semantics.md, S9.)
fn locate_dir(root: &OwnedFd, fd: &OwnedFd, stat: &Stat) -> Result<Option<(Object, Name)>> {
    match locate_on_mount(root, fd, stat)? {
        Location::There(dir, name) => Ok(Some((stat::of_fd(&dir)?.object(false), name))),
        Location::Elsewhere => Ok(None),
    }
}
