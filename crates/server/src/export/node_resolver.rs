//! Resolution of node ids to inodes, confined to the export. See docs/decisions/0001-node-ids.md.

use crate::export::case_folding::{self, CaseFolding};
use crate::export::fd_location;
use crate::export::handle::{FileHandle, Opener};
use crate::export::ids::Ids;
use crate::export::node::{
    Found, LookupOutcome, Node, ResolvedName, current_path, is_deleted, open_beneath, proc_path,
};
use crate::export::open_handles::OpenHandles;
use crate::export::orphans::{FOLDER, Orphans};
use crate::export::recently_unlinked::RecentlyUnlinked;
use crate::export::removed_dirs::RemovedDirs;
use crate::limits::descriptors::{CachedFdCharge, Descriptors};
use crate::os::error::{Fault, Result};
use crate::os::stat::{self, Stat};
use lru::LruCache;
use nigh_lease::Object;
use nigh_types::{Errno, Name, NodeId, NodeRef};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

mod inode_numbers;

/// Node resolver: remembered parents and names of directories, open descriptors of the most recently used ones, and
/// file handles.
///
/// All three are bounded caches that may drop any entry; the client then resolves the path again. None of their locks
/// is held during a system call.
#[derive(Debug)]
pub(crate) struct NodeResolver {
    root: Node,
    /// Root of the export's mount, if the server may open it.
    mount_root: Option<OwnedFd>,
    /// Shared by exports of one directory that are reached through different mounts.
    pub(crate) ids: Arc<Ids>,
    pub(crate) orphans: Orphans,
    pub(crate) case_folding: CaseFolding,
    opener: Option<Opener>,
    known_parents: Mutex<LruCache<NodeId, (NodeId, Name)>>,
    /// Directories on the root's own mount only: a descriptor would keep another mount from being unmounted.
    directories: Mutex<LruCache<NodeId, CachedDirectory>>,
    handles: Mutex<LruCache<NodeId, FileHandle>>,
    pub(crate) recently_unlinked: RecentlyUnlinked,
    pub(crate) removed_dirs: RemovedDirs,
    descriptors: Arc<Descriptors>,
}

#[derive(Clone, Debug)]
struct CachedDirectory {
    fd: Arc<OwnedFd>,
    /// When the directory was last found to lie in the export.
    confined_at: Instant,
    #[allow(dead_code, reason = "held, not looked at")]
    cached: Arc<CachedFdCharge>,
}

/// Time within which a directory that was moved out of the export becomes unreachable. (Asking the kernel for a path
/// costs 4 µs.)
const RECHECK_AFTER: Duration = Duration::from_millis(100);

/// Cache sizes of [`NodeResolver`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheSizes {
    pub(crate) known_parents: NonZeroUsize,
    pub(crate) directories: NonZeroUsize,
    pub(crate) handles: NonZeroUsize,
}

/// Number of directories kept open even when descriptors are short.
const LEAST: usize = 8;

/// Maximum length in bytes of the paths that are joined from names for one openat2 (`PATH_MAX` is 4096).
const PATH_CHUNK: usize = 3500;
/// A path of more levels is taken for a cycle of outdated entries.
const MAX_DEPTH: u32 = 1 << 20;

impl NodeResolver {
    pub(crate) fn new(
        root: OwnedFd,
        root_stat: Stat,
        ids: Arc<Ids>,
        opener: Option<Opener>,
        (bounds, descriptors): (CacheSizes, Arc<Descriptors>),
    ) -> Result<NodeResolver> {
        let id = ids.node(&root_stat, || Err(Fault(Errno::IO)))?;
        let (object, confined_at) = (ids.object(&root_stat), Instant::now());
        Ok(NodeResolver {
            mount_root: fd_location::mount_root(&root).ok(),
            root: Node { id, fd: Arc::new(root), stat: root_stat, object, resolved_by: None, confined_at },
            ids,
            orphans: Orphans::default(),
            case_folding: CaseFolding::default(),
            opener,
            known_parents: Mutex::new(LruCache::new(bounds.known_parents)),
            directories: Mutex::new(LruCache::new(bounds.directories)),
            handles: Mutex::new(LruCache::new(bounds.handles)),
            recently_unlinked: RecentlyUnlinked::new(Arc::clone(&descriptors)),
            removed_dirs: RemovedDirs::new(Arc::clone(&descriptors)),
            descriptors,
        })
    }

    pub(crate) fn root(&self) -> NodeId {
        self.root.id
    }

    /// The root as it was when the export was opened.
    pub(crate) fn root_node(&self) -> &Node {
        &self.root
    }

    /// The root of the mount on which an inode lies, if that is the mount of the export's root.
    pub(crate) fn mount_root(&self, stat: &Stat) -> Option<&OwnedFd> {
        self.mount_root.as_ref().filter(|_| stat.mount == self.root.stat.mount)
    }

    /// Resolves the inode of a call. Fails with `ESTALE` if neither its path hint nor a cache leads there.
    pub(crate) fn node(&self, place: &NodeRef, files: &OpenHandles) -> Result<Node> {
        if let Some(found) = self.cached_directory(place.node)? {
            return Ok(found);
        }
        if let Some((parent, name)) = &place.path_hint
            && let Some(found) = absent_if_stale(self.by_name(place.node, *parent, name))?
        {
            return Ok(found);
        }
        if let Some(found) = absent_if_stale(self.by_known_parents(place.node))? {
            return Ok(found);
        }
        // An expired entry of `recently_unlinked` is closed first; its file can still be reached by its handle.
        self.recently_unlinked.close_expired(Instant::now());
        if let Some(found) = absent_if_stale(self.by_handle(place.node))? {
            return Ok(found);
        }
        if let Some(found) = absent_if_stale(self.by_recently_unlinked(place.node))? {
            return Ok(found);
        }
        let confined_at = Instant::now();
        if let Some(fd) = self.removed_dirs.find(place.node, confined_at) {
            let (id, stat) = (place.node, stat::of_fd(&fd)?);
            return Ok(Node { id, object: self.ids.object(&stat), stat, fd, resolved_by: None, confined_at });
        }
        if let Some(open) = files.of_node(place.node) {
            let (id, stat, confined_at) = (place.node, stat::of_fd(&open.fd)?, Instant::now());
            let fd = Arc::new(rustix::io::fcntl_dupfd_cloexec(&open.fd, 0)?);
            return Ok(Node { id, fd, stat, object: open.object, resolved_by: None, confined_at });
        }
        let orphan = self.orphan(place);
        if orphan.is_ok() || !files.is_vouched() {
            return orphan;
        }
        // Last resort, because it may read a directory.
        match self.by_inode_number_of(place.node) {
            Err(Fault::STALE) => orphan,
            // The caller may know the inode by another name. A grant on this directory would confirm the wrong name
            // to it.
            found => found.map(|node| Node { resolved_by: None, ..node }),
        }
    }

    fn orphan(&self, place: &NodeRef) -> Result<Node> {
        let dir = place.path_hint.as_ref().and_then(|(parent, _)| self.resolve_hint(*parent).ok());
        self.orphans.find(self, place.node, dir.as_ref())
    }

    /// Resolves a node that must be a directory.
    pub(crate) fn directory(&self, place: &NodeRef, files: &OpenHandles) -> Result<Node> {
        let found = self.node(place, files)?;
        if found.stat.attr.is_dir() { Ok(found) } else { Err(Fault(Errno::NOTDIR)) }
    }

    /// Opens an entry of a directory as `O_PATH`, without following a symlink.
    pub(crate) fn child(&self, dir: &Node, name: &Name) -> Result<Node> {
        self.adopt(dir, name, self.open_child(dir, name)?)
    }

    /// First half of [`NodeResolver::child`], which may run with a caller's credentials.
    pub(crate) fn open_child(&self, dir: &Node, name: &Name) -> Result<OwnedFd> {
        if is_reserved(name.as_bytes()) {
            return Err(Fault(Errno::NOENT));
        }
        open_beneath(&dir.fd, name.as_bytes())
    }

    /// Second half of [`NodeResolver::child`], which must run with the server's own credentials.
    pub(crate) fn adopt(&self, dir: &Node, name: &Name, fd: OwnedFd) -> Result<Node> {
        let mut found = self.identify(fd)?;
        (found.resolved_by, found.confined_at) = (Some(ResolvedName::new(dir, name)), dir.confined_at);
        self.remember(dir.id, name, &found);
        Ok(found)
    }

    /// Looks up the inode behind a name; `None` if the name does not exist.
    pub(crate) fn lookup(&self, dir: &Node, name: &Name) -> Result<Option<Found>> {
        if is_reserved(name.as_bytes()) {
            return Ok(None);
        }
        match self.stat_of_name(dir, name) {
            Ok(stat) => Ok(Some(Found { object: self.ids.object(&stat), stat })),
            Err(Fault(Errno::NOENT)) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Looks up a name that is to be changed, without entering a mounted filesystem, because other calls wait for the
    /// directory.
    pub(crate) fn lookup_for_change(&self, dir: &Node, name: &Name) -> Result<LookupOutcome> {
        if is_reserved(name.as_bytes()) {
            return Ok(LookupOutcome::Nothing);
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
        match rustix::fs::openat2(&dir.fd, name.as_bytes(), flags, Mode::empty(), resolve) {
            Ok(fd) => {
                let stat = stat::of_fd(&fd)?;
                // Registers the filesystem.
                self.ids.node(&stat, || Ok(fd))?;
                Ok(LookupOutcome::Found(Found { object: self.ids.object(&stat), stat }))
            }
            Err(rustix::io::Errno::NOENT) => Ok(LookupOutcome::Nothing),
            Err(rustix::io::Errno::XDEV) => Ok(LookupOutcome::MountPoint),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Resolves the directory of a path hint.
    pub(crate) fn resolve_hint(&self, parent: NodeId) -> Result<Node> {
        match self.cached_directory(parent)? {
            Some(dir) => Ok(dir),
            None => match absent_if_stale(self.by_known_parents(parent))? {
                Some(dir) => Ok(dir),
                None => self.by_handle(parent),
            },
        }
    }

    /// Walks `names` from the root. Fails with `ESTALE` unless they lead to `node`.
    pub(crate) fn walk(&self, node: NodeId, names: &[Name]) -> Result<()> {
        let mut at = Node { confined_at: Instant::now(), ..self.root.clone() };
        let mut last = None;
        for name in names {
            let parent = at.id;
            at = self.child(&at, name).map_err(Fault::or_stale)?;
            last = Some((parent, name.clone()));
        }
        if at.id != node {
            return Err(Fault::STALE);
        }
        if let Some(place) = last {
            self.known_parents.lock().put(node, place);
        }
        Ok(())
    }

    /// Returns the node id of `name` in `dir`, which `stat` describes.
    pub(crate) fn id_of(&self, dir: impl AsFd, name: &[u8], stat: &Stat) -> Result<NodeId> {
        self.ids.node(stat, || open_beneath(dir, name))
    }

    /// Remembers the parent and name of a directory.
    pub(crate) fn remember_parent(&self, id: NodeId, parent: NodeId, name: &Name) {
        if id != self.root.id {
            self.known_parents.lock().put(id, (parent, name.clone()));
        }
    }

    /// Stores a file handle, so that an opened file is found again after it loses its names.
    pub(crate) fn note_handle(&self, node: &Node) {
        let wanted = self.opener.is_some() && self.may_cache_fd(node);
        if !wanted || self.handles.lock().contains(&node.id) {
            return;
        }
        if let Ok(handle) = FileHandle::of(&node.fd) {
            self.handles.lock().put(node.id, handle);
        }
    }

    /// Whether a descriptor may stay open after a call: only on the export's own mount, since others may have to be
    /// unmounted.
    pub(crate) fn may_cache_fd(&self, node: &Node) -> bool {
        node.stat.mount == self.root.stat.mount
    }

    /// Returns the path of a recently used directory, for display.
    pub(crate) fn path_of(&self, object: Object) -> Option<PathBuf> {
        let held: Vec<Arc<OwnedFd>> =
            self.directories.lock().iter().map(|(_, held)| Arc::clone(&held.fd)).collect();
        let root = Arc::clone(&self.root.fd);
        let is_it = |fd: &Arc<OwnedFd>| stat::of_fd(fd).is_ok_and(|stat| self.ids.object(&stat) == object);
        let found = std::iter::once(root).chain(held).find(is_it)?;
        std::fs::read_link(proc_path(&*found)).ok()
    }

    /// Drops all cache entries of a removed inode.
    pub(crate) fn forget(&self, id: NodeId) {
        self.known_parents.lock().pop(&id);
        let held = self.directories.lock().pop(&id);
        self.handles.lock().pop(&id);
        drop(held);
    }

    /// Identifies the inode of an `O_PATH` descriptor.
    pub(crate) fn identify(&self, fd: OwnedFd) -> Result<Node> {
        let stat = stat::of_fd(&fd)?;
        let id = self.ids.node(&stat, || Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 0)?))?;
        let object = self.ids.object(&stat);
        Ok(Node { id, fd: Arc::new(fd), stat, object, resolved_by: None, confined_at: Instant::now() })
    }

    fn stat_of_name(&self, dir: &Node, name: &Name) -> Result<Stat> {
        let stat = stat::of_name(&dir.fd, name.as_bytes())?;
        // Registers the filesystem.
        self.id_of(&dir.fd, name.as_bytes(), &stat)?;
        Ok(stat)
    }

    fn remember(&self, parent: NodeId, name: &Name, node: &Node) {
        if !node.stat.attr.is_dir() || node.id == self.root.id {
            return;
        }
        self.remember_parent(node.id, parent, name);
        if self.may_cache_fd(node) {
            self.cache_directory(node);
        }
    }

    fn cache_directory(&self, node: &Node) {
        let cached = Arc::new(self.descriptors.cache());
        let held = CachedDirectory { fd: Arc::clone(&node.fd), confined_at: node.confined_at, cached };
        let mut directories = self.directories.lock();
        let evicted = directories.push(node.id, held);
        let crowded = self.descriptors.is_short() && directories.len() > LEAST;
        let oldest = (0..2).map_while(|_| if crowded { directories.pop_lru() } else { None });
        let oldest: Vec<_> = oldest.collect();
        drop(directories);
        drop((evicted, oldest)); // closed after the lock is released
    }

    /// Returns the root, or a directory whose open descriptor still lies in the export.
    fn cached_directory(&self, id: NodeId) -> Result<Option<Node>> {
        if id == self.root.id {
            let (stat, confined_at) = (stat::of_fd(&self.root.fd)?, Instant::now());
            return Ok(Some(Node { stat, confined_at, ..self.root.clone() }));
        }
        let held = self.directories.lock().get(&id).cloned();
        let Some(CachedDirectory { fd, confined_at, .. }) = held else { return Ok(None) };
        let stat = stat::of_fd(&fd)?;
        let mut found = Node { id, object: self.ids.object(&stat), stat, fd, resolved_by: None, confined_at };
        if confined_at.elapsed() > RECHECK_AFTER {
            if !self.is_confined(&found.fd) {
                self.directories.lock().pop(&id);
                return Ok(None);
            }
            found.confined_at = Instant::now();
            self.cache_directory(&found);
        }
        Ok(Some(found))
    }

    fn by_name(&self, id: NodeId, parent: NodeId, name: &Name) -> Result<Node> {
        let dir = self.resolve_hint(parent)?;
        let fd = self.open_child(&dir, name).map_err(Fault::or_stale)?;
        let mut found = self.verified(fd, id)?;
        (found.resolved_by, found.confined_at) = (Some(ResolvedName::new(&dir, name)), dir.confined_at);
        self.remember(parent, name, &found);
        Ok(found)
    }

    /// Resolves along remembered parents and names, starting from the nearest ancestor with an open descriptor.
    fn by_known_parents(&self, id: NodeId) -> Result<Node> {
        let mut names: Vec<Name> = Vec::new();
        let mut at = id;
        let mut base = None;
        for _ in 0..MAX_DEPTH {
            let Some((parent, name)) = self.known_parents.lock().get(&at).cloned() else { break };
            names.push(name);
            at = parent;
            base = self.cached_directory(at)?;
            if base.is_some() {
                break;
            }
        }
        let Node { mut fd, confined_at, .. } = base.ok_or(Fault::STALE)?;
        let mut path = Vec::new();
        while let Some(name) = names.pop() {
            path.extend_from_slice(name.as_bytes());
            if names.is_empty() || path.len() > PATH_CHUNK - usize::from(Name::MAX) {
                fd = Arc::new(open_beneath(&fd, &path).map_err(Fault::or_stale)?);
                path.clear();
            } else {
                path.push(b'/');
            }
        }
        let mut found = self.verified(Arc::into_inner(fd).ok_or(Fault::STALE)?, id)?;
        found.confined_at = confined_at;
        if found.stat.attr.is_dir() && self.may_cache_fd(&found) {
            self.cache_directory(&found);
        }
        Ok(found)
    }

    fn by_handle(&self, id: NodeId) -> Result<Node> {
        let opener = self.opener.as_ref().ok_or(Fault::STALE)?;
        let handle = self.handles.lock().get(&id).cloned().ok_or(Fault::STALE)?;
        self.require_current_path(self.verified(opener.open(&handle)?, id)?)
    }

    fn by_recently_unlinked(&self, id: NodeId) -> Result<Node> {
        let found = self.recently_unlinked.find(id).ok_or(Fault::STALE)?;
        self.require_current_path(Node { stat: stat::of_fd(&found.fd)?, ..found })
    }

    /// Rejects a file whose opening name was removed while another link remains: the kernel's path would not show
    /// where it lies.
    fn require_current_path(&self, found: Node) -> Result<Node> {
        let told = found.stat.attr.nlink == 0 || !is_deleted(&found.fd);
        if told && self.is_confined(&found.fd) { Ok(found) } else { Err(Fault::STALE) }
    }

    fn verified(&self, fd: OwnedFd, id: NodeId) -> Result<Node> {
        let found = self.identify(fd)?;
        if found.id == id { Ok(found) } else { Err(Fault::STALE) }
    }

    /// Whether the path of an open inode lies below the root's path. The kernel composes each path at one moment. A
    /// path too long for readlink(2) counts as outside; the client then resolves it again.
    pub(crate) fn is_confined(&self, fd: impl AsFd) -> bool {
        let (Some(root), Some(path)) = (current_path(&self.root.fd), current_path(fd)) else { return false };
        root == b"/"
            || path == root
            || path.strip_prefix(&root[..]).is_some_and(|rest| rest.starts_with(b"/"))
    }
}

/// Whether a name is reserved for the server and hidden from every export. This holds in every directory, since one
/// below may be the root of another export or filesystem.
pub(crate) fn is_reserved(name: &[u8]) -> bool {
    case_folding::may_fold_to(name, FOLDER)
}

fn absent_if_stale(found: Result<Node>) -> Result<Option<Node>> {
    match found {
        Ok(node) => Ok(Some(node)),
        Err(Fault::STALE) => Ok(None),
        Err(fault) => Err(fault),
    }
}

#[cfg(test)]
mod tests;
