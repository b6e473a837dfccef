//! Orphans: files that lost their last name while a session has them open. See docs/decisions/0013-orphans.md.
//!
//! Before the last name of such a file is removed, the server links the file into a folder of its own, until the last
//! close. The folder is at the root of the export, or of a filesystem or subvolume inside the export. So the file
//! survives a restart of the server, and its id still resolves. The link's name encodes inode number and birth time;
//! other files in the folder are left alone.

use crate::export::node::{Node, open_beneath, proc_path};
use crate::export::node_resolver::NodeResolver;
use crate::os::error::{Fault, Result};
use crate::os::file_lock;
use crate::os::stat::{self, Stat};
use nigh_lease::Object;
use nigh_types::{Attr, Errno, Kind, NodeId, Span};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, RawDir, Timespec, Timestamps};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// The orphan folder. A directory of this name, and everything in it, is hidden from clients anywhere in an export.
pub(crate) const FOLDER: &[u8] = b".nigh-orphans";

/// The orphans of one export.
#[derive(Debug, Default)]
pub(crate) struct Orphans(Arc<Shared>);

/// Lock order: `folders` before `known`. No system call under `known`.
#[derive(Debug, Default)]
struct Shared {
    folders: Mutex<Folders>,
    known: Mutex<FxHashMap<NodeId, KnownOrphan>>,
    objects: LinkStates,
    /// The server stops: the files stay for clients that return to the next server.
    keeps_all: AtomicBool,
    /// How long orphans of an earlier server are kept for returning sessions, in nanoseconds.
    grace_ns: AtomicU64,
    /// Set while sessions are still expected back.
    returning: OnceLock<Arc<AtomicBool>>,
}

/// The inodes of `known`, consulted for every attribute reply. No other lock is taken under its lock, which is held
/// for a moment.
#[derive(Debug, Default)]
struct LinkStates {
    count: AtomicU64,
    all: Mutex<FxHashMap<Object, LinkState>>,
    /// Incremented at each beginning and each end of a change.
    changes: AtomicU64,
    settled: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LinkState {
    Linked,
    /// Its link in the folder is being made or removed.
    Changing,
}

/// State of an inode while its link is made or removed. Dropping it ends the change.
struct LinkChange<'a> {
    objects: &'a LinkStates,
    object: Object,
    /// Whether the inode has the link after the change.
    has: bool,
}

/// Open orphan folders. The root's folder stays open. A descriptor of another one would keep its filesystem from
/// being unmounted.
#[derive(Debug, Default)]
struct Folders {
    root: Option<Arc<Folder>>,
    inner: FxHashMap<Object, Weak<Folder>>,
}

/// An open orphan folder. Its flock keeps another server from taking files in use for leftovers.
#[derive(Debug)]
struct Folder {
    fd: OwnedFd,
    /// The parent directory, if the folder is to be removed after use.
    parent: Option<Arc<OwnedFd>>,
}

#[derive(Debug)]
struct KnownOrphan {
    object: Object,
    folder: Arc<Folder>,
    name: String,
    /// When it was found as a leftover of an earlier server, while no session has it open.
    leftover_since: Option<Instant>,
    /// A session has opened it since.
    was_open: bool,
}

/// A file's link in the orphan folder. Dropping it removes the link.
#[derive(Debug)]
pub(crate) struct Orphan {
    shared: Arc<Shared>,
    folder: Arc<Folder>,
    id: NodeId,
    object: Object,
    name: String,
    /// When the link was found as a leftover of an earlier server: other sessions may return for the file too.
    left: Option<Instant>,
}

/// The root of an export, or of a filesystem or subvolume inside it.
pub(crate) struct OrphanRoot {
    fd: Arc<OwnedFd>,
    pub(crate) object: Object,
    is_root: bool,
}

/// Attempts to read a file's state while orphan links change.
const OBSERVE_ATTEMPTS: u32 = 8;

/// A deeper directory is treated as stale.
const MAX_DEPTH: u32 = 1 << 16;

impl Orphans {
    /// Finds the leftovers of an earlier server at the root; they are kept for the grace time.
    pub(crate) fn find_leftovers(&self, reach: &NodeResolver) {
        let root = reach.root_node();
        let top = OrphanRoot { fd: Arc::clone(&root.fd), object: root.object, is_root: true };
        // There is no folder, or it belongs to another user. Later calls do not wait for its lock.
        let _ = self.folder_within(reach, &top, false, file_lock::FOLDER_PATIENCE);
    }

    /// Sets how long leftovers of an earlier server are kept for returning sessions.
    pub(crate) fn set_grace(&self, grace: Span, returning: Arc<AtomicBool>) {
        self.0.grace_ns.store(grace.0, Ordering::Relaxed);
        let _ = self.0.returning.set(returning);
    }

    /// Disables the removal of links from now on.
    pub(crate) fn keep_all(&self) {
        self.0.keeps_all.store(true, Ordering::SeqCst);
    }

    /// Returns why files removed while open will not outlive the server, if that is known in advance.
    pub(crate) fn refusal(reach: &NodeResolver) -> Option<&'static str> {
        let root = &reach.root_node().fd;
        let asked = rustix::fs::accessat(root, c".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS);
        if matches!(asked, Err(rustix::io::Errno::ACCESS | rustix::io::Errno::PERM)) {
            return Some(
                "files removed while open are lost when the server stops: it may not write in the export's root",
            );
        }
        let own = rustix::process::geteuid().as_raw();
        let other =
            stat::of_name(root, FOLDER).is_ok_and(|there| there.attr.uid != own || !there.attr.is_dir());
        other.then_some(
            "files removed while open are lost when the server stops: .nigh-orphans in the export's root is another user's",
        )
    }

    /// Returns the directory in which the orphan folder for files of `dir` has to be made, if the folder is missing.
    /// Making it changes the attributes of the returned directory.
    pub(crate) fn needs_folder(&self, reach: &NodeResolver, dir: &Node) -> Option<OrphanRoot> {
        let top = orphan_root(reach, dir).ok()?;
        let there = self.folder(reach, &top, false);
        matches!(there, Err(Fault(Errno::NOENT))).then_some(top)
    }

    /// Links a file of `dir` into the orphan folder. `make`: the folder may be made.
    pub(crate) fn link(&self, reach: &NodeResolver, dir: &Node, file: &Node, make: bool) -> Result<Orphan> {
        let folder = self.folder(reach, &orphan_root(reach, dir)?, make)?;
        let (name, object) = (name_of(&file.stat), file.object);
        let mut change = self.0.objects.change(object);
        rustix::fs::linkat(CWD, proc_path(&file.fd), &folder.fd, name.as_str(), AtFlags::SYMLINK_FOLLOW)?;
        change.has = true;
        let known = KnownOrphan {
            object,
            folder: Arc::clone(&folder),
            name: name.clone(),
            leftover_since: None,
            was_open: true,
        };
        self.0.known.lock().insert(file.id, known);
        Ok(Orphan { shared: Arc::clone(&self.0), folder, id: file.id, object, name, left: None })
    }

    /// Returns the directory in which the orphan folder for `dir` is made, with its attributes.
    pub(crate) fn orphan_root_attr(&self, reach: &NodeResolver, dir: &Node) -> Option<(NodeId, Attr)> {
        let top = orphan_root(reach, dir).ok()?;
        let node = reach.identify(rustix::io::fcntl_dupfd_cloexec(&top.fd, 0).ok()?).ok()?;
        Some((node.id, node.stat.attr))
    }

    /// Resolves an orphan by its id. `dir`: a directory on the orphan's filesystem.
    pub(crate) fn find(&self, reach: &NodeResolver, id: NodeId, dir: Option<&Node>) -> Result<Node> {
        if !self.0.known.lock().contains_key(&id)
            && let Some(dir) = dir
        {
            let top = orphan_root(reach, dir)?;
            if !top.is_root {
                self.folder(reach, &top, false).map_err(Fault::or_stale)?;
            }
        }
        let found = self.0.known.lock().get(&id).map(|known| (Arc::clone(&known.folder), known.name.clone()));
        let (folder, name) = found.ok_or(Fault::STALE)?;
        let node = reach.identify(open_beneath(&folder.fd, name.as_bytes()).map_err(Fault::or_stale)?)?;
        if node.id == id { Ok(node) } else { Err(Fault::STALE) }
    }

    /// Takes over a leftover of an earlier server that a session has opened; it is kept until the last close.
    pub(crate) fn adopt(&self, id: NodeId) -> Option<Orphan> {
        let mut known = self.0.known.lock();
        let found = known.get_mut(&id)?;
        let left = Some(found.leftover_since.take()?);
        let (object, folder, name) = (found.object, Arc::clone(&found.folder), found.name.clone());
        Some(Orphan { shared: Arc::clone(&self.0), folder, id, object, name, left })
    }

    /// Observes a file together with whether it had an orphan link at that moment, including links of an earlier
    /// server. `look` may be called more than once.
    pub(crate) fn observe<T>(&self, object: Object, look: impl FnMut() -> T) -> (T, bool) {
        self.0.objects.observe(object, look)
    }

    /// Returns whether there are leftovers of an earlier server that no session has opened.
    pub(crate) fn has_leftovers(&self) -> bool {
        self.0.known.lock().values().any(|known| known.leftover_since.is_some())
    }

    /// Removes leftovers whose sessions did not return in time.
    pub(crate) fn sweep(&self, now: Instant) {
        let grace = Duration::from_nanos(self.0.grace_ns.load(Ordering::Relaxed));
        let is_over = |known: &mut KnownOrphan| {
            let over = |since| now.saturating_duration_since(since) > grace;
            known
                .leftover_since
                .is_some_and(|since| over(since) || known.was_open && !self.0.awaits_sessions())
        };
        let over: Vec<KnownOrphan> =
            self.0.known.lock().extract_if(|_, known| is_over(known)).map(|(_, known)| known).collect();
        for KnownOrphan { object, folder, name, .. } in over {
            tracing::info!(name, "no client has reopened a file that was removed while open: it is deleted");
            let mut change = self.0.objects.change(object);
            folder.remove(&name);
            change.has = false;
        }
    }

    fn folder(&self, reach: &NodeResolver, top: &OrphanRoot, make: bool) -> Result<Arc<Folder>> {
        self.folder_within(reach, top, make, Duration::ZERO)
    }

    /// Returns the folder of this root. An open one is returned at once; otherwise waits at most `patience` for its
    /// lock.
    fn folder_within(
        &self,
        reach: &NodeResolver,
        top: &OrphanRoot,
        make: bool,
        patience: Duration,
    ) -> Result<Arc<Folder>> {
        let mut folders = self.0.folders.lock();
        let open = match top.is_root {
            true => folders.root.clone(),
            false => folders.inner.get(&top.object).and_then(Weak::upgrade),
        };
        if let Some(open) = open {
            return Ok(open);
        }
        let folder = Arc::new(Folder::open(top, make, patience)?);
        self.note_leftovers(reach, &folder)?;
        if top.is_root {
            folders.root = Some(Arc::clone(&folder));
        } else {
            folders.inner.retain(|_, folder| folder.strong_count() > 0);
            folders.inner.insert(top.object, Arc::downgrade(&folder));
        }
        Ok(folder)
    }

    fn note_leftovers(&self, reach: &NodeResolver, folder: &Arc<Folder>) -> Result<()> {
        let now = Instant::now();
        for name in folder.names()? {
            let Ok(node) = open_beneath(&folder.fd, name.as_bytes()).and_then(|fd| reach.identify(fd)) else {
                continue;
            };
            if node.stat.attr.kind() == Kind::File && name == name_of(&node.stat) {
                let (object, folder, left) = (node.object, Arc::clone(folder), Some(now));
                let known = KnownOrphan { object, folder, name, leftover_since: left, was_open: false };
                self.0.objects.change(object).has = true;
                self.0.known.lock().entry(node.id).or_insert(known);
            }
        }
        Ok(())
    }
}

impl Shared {
    /// Whether sessions of an earlier server may still return for their open files.
    fn awaits_sessions(&self) -> bool {
        self.returning.get().is_some_and(|grace| grace.load(Ordering::SeqCst))
    }
}

impl LinkStates {
    /// Begins making or removing an inode's link. Unless `has` is set, the state stays as it was.
    fn change(&self, object: Object) -> LinkChange<'_> {
        let mut all = self.all.lock();
        let has = self.settled(&mut all, object);
        if all.insert(object, LinkState::Changing).is_none() {
            self.count.fetch_add(1, Ordering::SeqCst);
        }
        self.changes.fetch_add(1, Ordering::SeqCst);
        LinkChange { objects: self, object, has }
    }

    fn settled(&self, all: &mut MutexGuard<'_, FxHashMap<Object, LinkState>>, object: Object) -> bool {
        self.settled.wait_while(all, |all| all.get(&object) == Some(&LinkState::Changing));
        all.contains_key(&object)
    }

    fn has(&self, object: Object) -> bool {
        self.count.load(Ordering::SeqCst) > 0 && self.settled(&mut self.all.lock(), object)
    }

    /// Repeats an observation that overlapped with a change: it would be unclear whether nlink included the orphan
    /// link.
    fn observe<T>(&self, object: Object, mut look: impl FnMut() -> T) -> (T, bool) {
        for _ in 0..OBSERVE_ATTEMPTS {
            let before = self.changes.load(Ordering::SeqCst);
            let has = self.has(object);
            let seen = look();
            if self.changes.load(Ordering::SeqCst) == before {
                return (seen, has);
            }
        }
        // Changes arrive faster than observations complete, so this one blocks them.
        let mut all = self.all.lock();
        let has = self.settled(&mut all, object);
        (look(), has)
    }
}

impl Drop for LinkChange<'_> {
    fn drop(&mut self) {
        let LinkStates { count, all, changes, settled } = self.objects;
        let mut all = all.lock();
        if self.has {
            all.insert(self.object, LinkState::Linked);
        } else {
            all.remove(&self.object);
            count.fetch_sub(1, Ordering::SeqCst);
        }
        changes.fetch_add(1, Ordering::SeqCst);
        settled.notify_all();
    }
}

impl Folder {
    /// Opens the folder. Fails with `ENOENT` if it is missing and `make` is false, with `EACCES` if it is not this
    /// server's.
    fn open(top: &OrphanRoot, make: bool, patience: Duration) -> Result<Folder> {
        if make {
            make_in(&top.fd)?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&top.fd, FOLDER, flags, Mode::empty())?;
        let (around, stat) = (stat::of_fd(&top.fd)?, stat::of_fd(&fd)?);
        let here = |stat: &Stat| (stat.dev, stat.mount, stat.subvolume);
        if stat.attr.uid != rustix::process::geteuid().as_raw() || here(&stat) != here(&around) {
            return Err(Fault(Errno::ACCES));
        }
        if stat.attr.mode & 0o7777 != 0o700 {
            rustix::fs::fchmod(&fd, Mode::RWXU)?;
        }
        file_lock::lock_exclusively(&fd, patience)?;
        Ok(Folder { fd, parent: top.is_root.then(|| Arc::clone(&top.fd)) })
    }

    fn names(&self) -> Result<Vec<String>> {
        let open = rustix::fs::openat(&self.fd, c".", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut buffer = Vec::<u8>::with_capacity(32 << 10);
        let mut entries = RawDir::new(&open, buffer.spare_capacity_mut());
        let mut names = Vec::new();
        while let Some(entry) = entries.next() {
            names.extend(entry?.file_name().to_str().map(str::to_owned));
        }
        Ok(names)
    }

    fn remove(&self, name: &str) {
        if let Err(errno) = rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            tracing::warn!(name, %errno, "a file without a name cannot be removed from .nigh-orphans");
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Some(top) = &self.parent {
            // rmdir fails while the folder holds files for returning sessions.
            let before = times_of(top);
            if rustix::fs::unlinkat(top, FOLDER, AtFlags::REMOVEDIR).is_ok() {
                set_times(top, before);
            }
        }
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        if self.shared.keeps_all.load(Ordering::SeqCst) {
            return;
        }
        if self.left.is_some() && self.shared.awaits_sessions() {
            // The session that reopened the file has closed it, or another session has replaced that session. Other
            // sessions may still return for the file.
            if let Some(known) = self.shared.known.lock().get_mut(&self.id) {
                (known.leftover_since, known.was_open) = (self.left, true);
            }
            return;
        }
        self.shared.known.lock().remove(&self.id);
        let mut change = self.shared.objects.change(self.object);
        self.folder.remove(&self.name);
        change.has = false;
    }
}

/// Returns the directory that contains the orphan folder for files of `dir`.
fn orphan_root(reach: &NodeResolver, dir: &Node) -> Result<OrphanRoot> {
    let root = reach.root_node();
    let place = |stat: &Stat| (stat.dev, stat.mount, stat.subvolume);
    if place(&dir.stat) == place(&root.stat) {
        return Ok(OrphanRoot { fd: Arc::clone(&root.fd), object: root.object, is_root: true });
    }
    let (mut fd, mut at) = (Arc::clone(&dir.fd), stat::of_fd(&dir.fd)?);
    for _ in 0..MAX_DEPTH {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let above = Arc::new(rustix::fs::openat(&fd, c"..", flags, Mode::empty())?);
        let there = stat::of_fd(&above)?;
        if place(&there) != place(&at) {
            return Ok(OrphanRoot { fd, object: reach.ids.object(&at), is_root: false });
        }
        // The root of all mounts is its own parent: the export was not the way to this directory.
        if there.is_same(&at) {
            break;
        }
        (fd, at) = (above, there);
    }
    Err(Fault::STALE)
}

fn make_in(top: &OwnedFd) -> Result<()> {
    let before = times_of(top);
    match rustix::fs::mkdirat(top, FOLDER, Mode::RWXU) {
        Ok(()) => set_times(top, before),
        Err(rustix::io::Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    Ok(())
}

fn times_of(dir: &OwnedFd) -> Option<Timestamps> {
    let stat = stat::of_fd(dir).ok()?;
    let time = |(secs, nanos): (i64, u32)| Timespec { tv_sec: secs, tv_nsec: nanos.into() };
    let (access, change) = (time(stat.attr.atime.pair()), time(stat.attr.mtime.pair()));
    Some(Timestamps { last_access: access, last_modification: change })
}

/// Restores the times of a directory, so that the folder's creation is not visible. Fails silently on another user's
/// directory.
fn set_times(dir: &OwnedFd, times: Option<Timestamps>) {
    if let Some(times) = times {
        let _ = rustix::fs::utimensat(dir, c"", &times, AtFlags::EMPTY_PATH);
    }
}

fn name_of(stat: &Stat) -> String {
    format!("{:x}-{:x}", stat.ino, stat.birth_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const FILE: Object = Object { filesystem: 1, ino: 2, birth: 3 };

    /// nlink and the presence of the orphan link must come from one moment, even if another call makes or removes the
    /// link meanwhile.
    #[test]
    fn attributes_read_during_orphan_link_change_are_read_again() {
        let (objects, names) = (LinkStates::default(), Cell::new(1));
        for has in [true, false] {
            let looks = Cell::new(0);
            let look = || {
                let seen = names.get();
                looks.set(looks.get() + 1);
                if looks.get() == 1 {
                    let mut change = objects.change(FILE);
                    names.set(1 + u32::from(has));
                    change.has = has;
                }
                seen
            };
            let (seen, counts) = objects.observe(FILE, look);
            assert_eq!((seen - u32::from(counts), looks.get()), (1, 2));
        }
    }

    #[test]
    fn observation_ends_however_fast_other_orphan_links_change() {
        let (objects, looks) = (LinkStates::default(), Cell::new(0));
        let other = Object { ino: 4, ..FILE };
        let look = || {
            looks.set(looks.get() + 1);
            if looks.get() <= OBSERVE_ATTEMPTS {
                drop(objects.change(other));
            }
        };
        assert_eq!(objects.observe(FILE, look), ((), false));
        assert_eq!(looks.get(), OBSERVE_ATTEMPTS + 1);
    }

    #[test]
    fn observation_waits_only_for_orphan_link_change_of_its_file() {
        let objects = LinkStates::default();
        let change = objects.change(FILE);
        let other = Object { ino: 4, ..FILE };
        assert_eq!(objects.observe(other, || ()), ((), false));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| objects.observe(FILE, || ()));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished());
            drop(change);
            assert_eq!(waits.join().unwrap(), ((), false), "it was not made");
        });
    }
}
