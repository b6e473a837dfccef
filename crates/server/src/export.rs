//! An exported directory.

pub(crate) mod case_folding;
pub(crate) mod entry;
pub(crate) mod exports;
pub(crate) mod fd_location;
pub(crate) mod handle;
pub(crate) mod ids;
pub(crate) mod inode_handles;
mod kept_fds;
pub(crate) mod node;
pub(crate) mod node_id_mac;
pub(crate) mod node_resolver;
pub(crate) mod open_files;
pub(crate) mod open_handles;
pub(crate) mod orphans;
pub(crate) mod parent_cache;
pub(crate) mod read_fds;
pub(crate) mod recently_unlinked;
pub(crate) mod removed_dirs;
pub(crate) mod state_log;
pub(crate) mod states;

use crate::export::handle::Opener;
use crate::export::ids::Ids;
use crate::export::node::{Node, current_path};
use crate::export::node_resolver::{CacheSizes, NodeResolver, is_reserved};
use crate::export::open_handles::OpenHandles;
use crate::export::orphans::Orphans;
use crate::export::read_fds::ReadFds;
use crate::export::state_log::{Log, Record};
use crate::limits::descriptors::Descriptors;
use crate::os::error::{Fault, Result};
use crate::os::filesystem::{Filesystem, identify};
use crate::os::impersonate::can_impersonate;
use crate::os::stat::{self, Stat};
use nigh_lease::Object;
use nigh_native::SessionParams;
use nigh_types::{Errno, Features, Guarantees, RemoteIds, Span, Term, UnsupportedGuarantee};
use rustix::fs::{Mode, OFlags};
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use kept_fds::KeptFd;
pub(crate) use kept_fds::SpaceReclaimer;

/// Cache sizes of an export. `directories + readers` bounds the descriptors, besides those of files that sessions
/// opened.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Directories whose parent and name are remembered; about 150 bytes each.
    pub places: NonZeroUsize,
    /// Directories held open.
    pub directories: NonZeroUsize,
    /// Files whose handle is remembered; about 100 bytes each.
    pub handles: NonZeroUsize,
    /// Files held open for reads without an open file.
    pub readers: NonZeroUsize,
}

impl Default for ExportOptions {
    fn default() -> ExportOptions {
        let number = |n: usize| NonZeroUsize::new(n).unwrap_or(NonZeroUsize::MIN);
        ExportOptions {
            places: number(1 << 17),
            directories: number(512),
            handles: number(1 << 15),
            readers: number(64),
        }
    }
}

/// Why a directory cannot be exported. One line, for users.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("cannot export {}: {error}", path.display())]
    Open { path: PathBuf, error: std::io::Error },
    #[error("cannot export {}: it is no directory", path.display())]
    NotADirectory { path: PathBuf },
    #[error(
        "cannot export {}: its state in {} cannot be used: {error}: {}",
        path.display(), state.display(), mend_state(error)
    )]
    State { path: PathBuf, state: PathBuf, error: std::io::Error },
    #[error("cannot export {}: .nigh-orphans is the server's own", path.display())]
    Own { path: PathBuf },
    #[error("cannot export {}: /proc is needed and not mounted", path.display())]
    NoProc { path: PathBuf },
}

/// Whether a disk or a quota is full.
pub(crate) fn is_disk_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

fn mend_state(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::WouldBlock => "another server uses it, end that one",
        _ if is_disk_full(error) => "make room there on the server",
        _ => "give rights there on the server",
    }
}

impl ExportError {
    /// Returns the errno for a refused attach.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            ExportError::Open { error, .. } | ExportError::State { error, .. } => {
                Fault::from_io(error).into()
            }
            ExportError::NotADirectory { .. } => Errno::NOTDIR,
            ExportError::NoProc { .. } => Errno::NODEV,
            ExportError::Own { .. } => Errno::ACCES,
        }
    }
}

/// Watches the objects of an export for changes by other processes.
pub(crate) trait ObjectWatch: Send + Sync + std::fmt::Debug {
    /// Starts watching an object before it is granted. `fd` refers to the object.
    fn watch(&self, object: Object, fd: &OwnedFd);

    /// Notes a directory that is about to be granted.
    fn note_directory(&self, object: Object, fd: &OwnedFd);

    /// Whether a descriptor is needed before an object is granted.
    fn wants(&self, object: Object) -> bool;

    /// Why grants on the root's filesystem have a time limit; `None` if they have none.
    fn why_not(&self) -> Option<&str>;
}

/// Begins to watch the filesystem of an export's root.
pub(crate) type WatchExport<'a> = dyn Fn(&OwnedFd, &Stat, Filesystem) -> Arc<dyn ObjectWatch> + 'a;

/// A Linux directory with its subtree, served to sessions.
///
/// Thread-safe. Its durable data is in a file below the state directory, which one export uses at a time.
#[derive(Debug)]
pub struct Export {
    reach: NodeResolver,
    impersonates: bool,
    id: String,
    path: PathBuf,
    pub(crate) read_fds: ReadFds,
    watched: Option<Arc<dyn ObjectWatch>>,
}

impl Export {
    /// Opens the directory at `path`; symlinks in `path` itself are followed. The export's state directory is made
    /// below `state_dir` (0700).
    pub fn open(
        path: &Path,
        state_dir: &Path,
        options: ExportOptions,
    ) -> std::result::Result<Export, ExportError> {
        let opened = OpenedRoot::new(open_root(path)?, path)?;
        let ids = opened.open_ids(path, state_dir)?;
        let export = Export::of(opened, path, ids, (options, None, &Arc::default()))?;
        export.find_orphans();
        Ok(export)
    }

    /// Finds orphans that earlier servers kept.
    pub(crate) fn find_orphans(&self) {
        self.reach.orphans.find_leftovers(&self.reach);
    }

    /// Returns whether orphans of an earlier server wait for their clients.
    pub(crate) fn has_leftovers(&self) -> bool {
        self.reach.orphans.has_leftovers()
    }

    /// Makes an export of an opened root, with its ids. `path` is its display name.
    pub(crate) fn of(
        opened: OpenedRoot,
        path: &Path,
        ids: Arc<Ids>,
        (options, watch, descriptors): (ExportOptions, Option<&WatchExport<'_>>, &Arc<Descriptors>),
    ) -> std::result::Result<Export, ExportError> {
        let OpenedRoot { root, readable, stat, filesystem, id } = opened;
        let watched = watch.map(|watch| watch(&root, &stat, filesystem));
        let opener = readable.and_then(Opener::new);
        let bounds = CacheSizes {
            known_parents: options.places,
            directories: options.directories,
            handles: options.handles,
        };
        let reach = NodeResolver::new(root, stat, ids, opener, (bounds, Arc::clone(descriptors))).map_err(
            |fault| {
                let error = std::io::Error::from_raw_os_error(Errno::from(fault).raw());
                ExportError::Open { path: path.into(), error }
            },
        )?;
        let readers = ReadFds::new(options.readers, Arc::clone(descriptors));
        Ok(Export {
            reach,
            impersonates: can_impersonate(),
            id,
            path: path.into(),
            read_fds: readers,
            watched,
        })
    }

    /// The id, which also names its state directory: filesystem UUID, subvolume and root inode.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The path by which it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the session parameters: the root, and the capabilities of its filesystem. The term is taken from
    /// `files`.
    pub fn session(&self, files: &OpenHandles) -> std::result::Result<SessionParams, Errno> {
        let root = self.reach.root();
        let place = nigh_types::NodeRef::without_hint(root);
        let node = self.reach.node(&place, files)?;
        self.reach.ids.settle()?;
        Ok(SessionParams {
            supports: Features {
                acls: has_acls(&node),
                lookup_number: files.is_vouched() && self.reach.resolves_inode_numbers(),
                ..Features::default()
            },
            guarantees: Guarantees {
                unsupported: unsupported_guarantees(&self.reach.ids.filesystem(), &self.reach),
                staleness_bound: self.staleness_bound(files),
            },
            ids: RemoteIds {
                acts_as: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
                names: Vec::new(),
            },
            ..SessionParams::plain(root, node.stat.attr, self.reach.ids.cookie_key(), files.term())
        })
    }

    /// Returns the bound of S9 as text; empty if grants without a time limit satisfy S9.
    fn staleness_bound(&self, files: &OpenHandles) -> String {
        let seen =
            |span: Span| format!("changes on the server's own disk are seen within {} ms", span.as_millis());
        let why_not = self.watched.as_ref().map_or(Some("nothing is watched"), |watched| watched.why_not());
        match (files.term(), why_not) {
            (Term::Session, _) => {
                "changes on the server's own disk may not be seen: --host-timeout is `forever`".into()
            }
            (Term::Limited(Span::ZERO), _) => String::new(),
            (Term::Limited(_), None) if files.trusts_watch() => String::new(),
            (Term::Limited(span), Some(why)) if files.trusts_watch() => format!("{}: {why}", seen(span)),
            (Term::Limited(span), _) => seen(span),
        }
    }

    /// Starts watching an object for other processes' changes, before a grant on it. `fd` refers to the object.
    pub(crate) fn watch(&self, files: &OpenHandles, object: Object, fd: &OwnedFd) {
        if let Some(watched) = self.watched.as_ref().filter(|_| files.trusts_watch()) {
            watched.watch(object, fd);
        }
    }

    /// Notes that a directory lease is about to be granted.
    pub(crate) fn note_directory(&self, files: &OpenHandles, object: Object, fd: &OwnedFd) {
        if let Some(watched) = self.watched.as_ref().filter(|_| files.trusts_watch()) {
            watched.note_directory(object, fd);
        }
    }

    /// Like [`Export::watch`], opening a descriptor only if the object is not watched yet.
    pub(crate) fn watch_with(
        &self,
        files: &OpenHandles,
        object: Object,
        open: impl FnOnce() -> Result<OwnedFd>,
    ) {
        if let Some(watched) =
            self.watched.as_ref().filter(|watched| files.trusts_watch() && watched.wants(object))
            && let Ok(fd) = open()
        {
            watched.watch(object, &fd);
        }
    }

    /// Sets how long orphans of an earlier server are kept for returning sessions.
    pub(crate) fn set_grace(&self, grace: Span, returning: Arc<AtomicBool>) {
        self.reach.orphans.set_grace(grace, returning);
    }

    /// Leaves open orphans in place when the server stops, for sessions that return to the next server.
    pub fn keep_orphans(&self) {
        self.reach.orphans.keep_all();
    }

    /// Closes descriptors unused for a while, and removes orphans whose sessions did not return. To be called every
    /// few seconds.
    pub fn close_idle(&self, now: Instant) {
        self.reach.orphans.sweep(now);
        self.read_fds.close_idle(now);
        self.reach.recently_unlinked.close_expired(now);
        self.reach.removed_dirs.close_unused(now);
        self.reach.ids.parents.save();
    }

    /// Removes and returns all kept files that no client has open.
    pub(crate) fn take_kept_fds(&self) -> Vec<KeptFd> {
        let mut kept = self.read_fds.take_all();
        kept.append(&mut self.reach.recently_unlinked.take_all());
        kept.append(&mut self.reach.removed_dirs.take_all());
        kept
    }

    pub(crate) fn resolver(&self) -> &NodeResolver {
        &self.reach
    }

    pub(crate) fn impersonates(&self) -> bool {
        self.impersonates
    }
}

/// An export's root before its state is opened.
pub(crate) struct OpenedRoot {
    pub(crate) root: OwnedFd,
    /// Opened for reading, if permitted.
    pub(crate) readable: Option<OwnedFd>,
    stat: Stat,
    filesystem: Filesystem,
    pub(crate) id: String,
}

/// Opens the directory at `path`, following symlinks.
pub(crate) fn open_root(path: &Path) -> std::result::Result<OwnedFd, ExportError> {
    let flags = OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::PATH;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOTDIR) => Err(ExportError::NotADirectory { path: path.into() }),
        other => other.map_err(|errno| ExportError::Open { path: path.into(), error: errno.into() }),
    }
}

impl OpenedRoot {
    /// Identifies the directory `root`; `path` is its display name.
    pub(crate) fn new(root: OwnedFd, path: &Path) -> std::result::Result<OpenedRoot, ExportError> {
        let at = |error: std::io::Error| ExportError::Open { path: path.into(), error };
        if !Path::new("/proc/self/fd").exists() {
            return Err(ExportError::NoProc { path: path.into() });
        }
        let own = |path: Vec<u8>| path.split(|&byte| byte == b'/').any(is_reserved);
        if current_path(&root).is_some_and(own) {
            return Err(ExportError::Own { path: path.into() });
        }
        let flags = OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::RDONLY;
        let readable = rustix::fs::openat(&root, c".", flags, Mode::empty()).ok();
        let stat = stat::of_fd(&root)
            .map_err(|fault| at(std::io::Error::from_raw_os_error(Errno::from(fault).raw())))?;
        let filesystem = identify(&root, &stat).map_err(at)?;
        let id = id_of(&filesystem, &stat, path);
        Ok(OpenedRoot { root, readable, stat, filesystem, id })
    }

    /// The export's id, and the mount by which it is reached: another mount may allow more.
    pub(crate) fn key(&self) -> (String, u64) {
        (self.id.clone(), self.stat.mount)
    }

    /// Loads the ids from the export's own directory (0700) below `state_dir`, which is made if missing.
    pub(crate) fn open_ids(
        &self,
        path: &Path,
        state_dir: &Path,
    ) -> std::result::Result<Arc<Ids>, ExportError> {
        let state = state_dir.join(&self.id);
        let state_error = |error| ExportError::State { path: path.into(), state: state.clone(), error };
        make_private(&state).map_err(state_error)?;
        let (mut key, mut secret) = ([0; 16], [0; 16]);
        for random in [&mut key, &mut secret] {
            getrandom::fill(random).map_err(|e| state_error(std::io::Error::other(e.to_string())))?;
        }
        let first = Record::Key { version: 1, key };
        let (log, records) = Log::open(&state.join("ids"), first).map_err(state_error)?;
        let ids = Ids::new(&self.stat, self.filesystem, log, &records, secret).map_err(state_error)?;
        Ok(Arc::new(ids.keeping_parents(state.join("parents"))))
    }
}

fn id_of(filesystem: &Filesystem, root: &Stat, path: &Path) -> String {
    use std::fmt::Write;
    let mut id = String::new();
    if let Some(identity) = filesystem.identity {
        for byte in identity.uuid {
            let _ = write!(id, "{byte:02x}");
        }
        let _ = write!(id, "-{:x}", identity.subvolume);
    } else {
        let path = path.as_os_str().as_encoded_bytes();
        let _ = write!(id, "path-{:016x}", nigh_types::CookieKey::default().cookie(path).0);
    }
    let _ = write!(id, "-{:x}-{:x}", root.ino, root.birth_ns);
    id
}

pub(crate) fn make_private(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Whether the root's filesystem supports POSIX ACLs: without support getxattr fails with `EOPNOTSUPP`, not with
/// `ENODATA`.
fn has_acls(root: &Node) -> bool {
    let path = crate::export::node::proc_path(&root.fd);
    let asked = rustix::fs::getxattr(path, "system.posix_acl_access", &mut [0_u8; 0]);
    !matches!(asked, Err(rustix::io::Errno::OPNOTSUPP))
}

fn unsupported_guarantees(filesystem: &Filesystem, reach: &NodeResolver) -> Vec<UnsupportedGuarantee> {
    let lacking = |why| UnsupportedGuarantee { name: "S4".into(), why, by_protocol: false };
    let why = if filesystem.overlay {
        "overlayfs may change a file's inode number when it is first written, and a reused number cannot be told from the old one"
    } else if filesystem.in_memory() {
        "tmpfs: inode numbers live as long as that mount"
    } else if filesystem.identity.is_none() {
        "has no UUID: inode numbers below other mounts may change when the server restarts"
    } else {
        let refusal = Orphans::refusal(reach);
        return refusal.map(|why| lacking(why.into())).into_iter().collect();
    };
    vec![lacking(format!("{}: {why}", filesystem.label()))]
}
