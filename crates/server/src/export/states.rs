//! State directories of exports attached by path, removed with the directories that they belong to.
//!
//! The durable state of an export is in a directory of its own. A peer may attach to any directory that it reaches
//! below an export, and then remove the directory. So each such state records its directory, and is removed with it.
//! The number of states is limited, in total and per origin; the least recently used one without a session is removed
//! first. Exports of guests, which remain only while they are served, are treated alike.

use crate::export::handle::{FileHandle, Opener};
use crate::export::{OpenedRoot, open_root};
use crate::os::error::Fault;
use nigh_types::{Errno, Origin};
use parking_lot::Mutex;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

const MOST: usize = 4_096;
const MOST_OF_ORIGIN: usize = 1_024;
/// Interval of complete checks.
const EVERY: Duration = Duration::from_secs(10);
const NAME: &str = "root";

#[derive(Debug)]
pub(crate) struct States {
    dir: PathBuf,
    /// Exports that were closed and are to be checked.
    closed: Mutex<Vec<String>>,
    looked: Mutex<Option<Instant>>,
}

/// The directory that a state belongs to.
struct StateOwner {
    origin: Vec<u8>,
    handle: Option<FileHandle>,
    path: PathBuf,
}

impl States {
    pub(crate) fn new(dir: PathBuf) -> States {
        States { dir, closed: Mutex::default(), looked: Mutex::default() }
    }

    /// Marks the state of an export attached by path as used now. A state without this file is kept for ever.
    pub(crate) fn note(&self, id: &str, root: impl AsFd, path: &Path, origin: Origin) {
        let handle = FileHandle::plain(root).map_or_else(|_| "-".to_owned(), |handle| handle.to_text());
        let text = [format!("{origin}\n{handle}\n").as_bytes(), path.as_os_str().as_bytes()].concat();
        let state = self.dir.join(id);
        let made = state.join("root.new");
        let written = std::fs::write(&made, text).and_then(|()| std::fs::rename(&made, state.join(NAME)));
        if let Err(error) = written {
            tracing::warn!(state = %state.display(), %error, "it cannot be noted of what this state is: it will stay");
        }
    }

    /// Notes that an export has lost its last session.
    pub(crate) fn note_closed(&self, id: String) {
        self.closed.lock().push(id);
    }

    /// Removes useless states. `exports`: directories that are served. `unless_used` calls the function if no session
    /// uses the export, and lets none begin before it returns.
    pub(crate) fn tidy(&self, exports: &[PathBuf], unless_used: &dyn Fn(&str, &dyn Fn())) {
        let mut ids = std::mem::take(&mut *self.closed.lock());
        let due = self.looked.lock().is_none_or(|last| last.elapsed() >= EVERY);
        if due {
            *self.looked.lock() = Some(Instant::now());
            ids = self.all();
        }
        let remove = |id: &str| {
            unless_used(id, &|| {
                let _ = std::fs::remove_dir_all(self.dir.join(id));
            });
        };
        let mut kept = Vec::new();
        for id in ids {
            let Some(of) = self.of(&id) else { continue };
            if is_gone(&id, &of, exports) {
                remove(&id);
            } else if !exports.contains(&of.path) {
                kept.push((id, of.origin));
            }
        }
        if due {
            self.too_many(kept).iter().for_each(|id| remove(id));
        }
    }

    fn all(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    fn of(&self, id: &str) -> Option<StateOwner> {
        let text = std::fs::read(self.dir.join(id).join(NAME)).ok()?;
        let mut parts = text.splitn(3, |byte| *byte == b'\n');
        let origin = parts.next()?.to_vec();
        let handle = std::str::from_utf8(parts.next()?).ok().and_then(FileHandle::of_text);
        Some(StateOwner { origin, handle, path: PathBuf::from(OsStr::from_bytes(parts.next()?)) })
    }

    /// Returns the least recently used states above the limits, in total and per origin.
    fn too_many(&self, kept: Vec<(String, Vec<u8>)>) -> Vec<String> {
        let used = |id: &str| {
            let noted = std::fs::metadata(self.dir.join(id).join(NAME)).and_then(|meta| meta.modified());
            noted.unwrap_or(SystemTime::UNIX_EPOCH)
        };
        let mut kept: Vec<_> = kept.into_iter().map(|(id, origin)| (used(&id), id, origin)).collect();
        kept.sort_unstable_by(|one, other| other.cmp(one));
        let mut of = BTreeMap::<Vec<u8>, usize>::new();
        let mut all = 0;
        let is_over = |(_, _, origin): &(SystemTime, String, Vec<u8>)| {
            let count = of.entry(origin.clone()).or_default();
            *count += 1;
            all += 1;
            *count > MOST_OF_ORIGIN || all > MOST
        };
        let mut is_over = is_over;
        kept.into_iter().filter(|one| is_over(one)).map(|(_, id, _)| id).collect()
    }
}

/// Whether the state's directory is certainly gone, according to its filesystem.
fn is_gone(id: &str, of: &StateOwner, exports: &[PathBuf]) -> bool {
    let Some(handle) = &of.handle else { return false };
    let above = exports.iter().filter(|export| of.path.starts_with(export) && of.path != **export);
    let opened = match above.max_by_key(|export| export.as_os_str().len()) {
        Some(export) => open_root(export).and_then(|root| OpenedRoot::new(root, export)).ok(),
        None => of.path.ancestors().skip(1).find_map(opened_itself),
    };
    // A handle is meaningful only on its own filesystem.
    let Some((opener, filesystem)) = opened.and_then(|opened| {
        let filesystem = filesystem_of(&opened.id)?.to_owned();
        Some((Opener::new(opened.readable?)?, filesystem))
    }) else {
        return false;
    };
    filesystem_of(id) == Some(&filesystem) && matches!(opener.open(handle), Err(Fault(Errno::STALE)))
}

/// Opens an ancestor of a served directory. Other users may have replaced it, so no symlink is followed.
fn opened_itself(path: &Path) -> Option<OpenedRoot> {
    let flags = OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::PATH;
    let root = rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).ok()?;
    OpenedRoot::new(root, path).ok()
}

/// Returns the id without inode number and birth time of the root.
fn filesystem_of(id: &str) -> Option<&str> {
    let (rest, _birth) = id.rsplit_once('-')?;
    rest.rsplit_once('-').map(|(filesystem, _ino)| filesystem).filter(|id| !id.starts_with("path-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_states_above_origin_limit_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let states = States::new(dir.path().to_owned());
        let rogue = Origin { uid: Some(7001), host: None };
        for n in 0..MOST_OF_ORIGIN + 3 {
            let id = format!("u-0-{n:x}-1");
            std::fs::create_dir(dir.path().join(&id)).unwrap();
            states.note(&id, std::fs::File::open("/").unwrap(), Path::new("/nowhere"), rogue);
            if n < 3 {
                let noted =
                    std::fs::File::options().write(true).open(dir.path().join(&id).join(NAME)).unwrap();
                noted.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(n as u64)).unwrap();
            }
        }
        std::fs::create_dir(dir.path().join("u-0-fffff-1")).unwrap();
        states.note(
            "u-0-fffff-1",
            std::fs::File::open("/").unwrap(),
            Path::new("/nowhere"),
            Origin::default(),
        );
        std::fs::create_dir(dir.path().join("named")).unwrap();
        states.tidy(&[], &|id, remove| {
            if id != "u-0-1-1" {
                remove()
            }
        });
        let left = states.all();
        assert_eq!(left.len(), MOST_OF_ORIGIN + 1 + 2, "one is in use");
        assert!(!left.iter().any(|id| id == "u-0-0-1" || id == "u-0-2-1"));
        assert!(left.iter().any(|id| id == "named") && left.iter().any(|id| id == "u-0-fffff-1"));
    }

    #[test]
    fn state_of_served_export_is_kept_above_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let states = States::new(dir.path().to_owned());
        let rogue = Origin { uid: Some(7001), host: None };
        for n in 0..MOST_OF_ORIGIN + 2 {
            let id = format!("u-0-{n:x}-1");
            std::fs::create_dir(dir.path().join(&id)).unwrap();
            let path = PathBuf::from(format!("/nowhere/{n}"));
            states.note(&id, std::fs::File::open("/").unwrap(), &path, rogue);
            let noted = std::fs::File::options().write(true).open(dir.path().join(&id).join(NAME)).unwrap();
            noted.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(n as u64)).unwrap();
        }
        states.tidy(&["/nowhere/0".into()], &|_, remove| remove());
        let left = states.all();
        assert!(left.iter().any(|id| id == "u-0-0-1"), "a guest serves it");
        assert_eq!(left.len(), MOST_OF_ORIGIN + 1);
    }

    #[test]
    fn state_of_deleted_directory_is_removed() {
        let of_root = |dir: &Path| {
            let opened = OpenedRoot::new(open_root(dir).unwrap(), dir).unwrap();
            (opened.id.clone(), opened)
        };
        let (dir, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let served = dir.path().canonicalize().unwrap().join("served");
        let below = served.join("below");
        std::fs::create_dir_all(&below).unwrap();
        let states = States::new(state.path().to_owned());
        for path in [&served, &below] {
            let (id, opened) = of_root(path);
            std::fs::create_dir(state.path().join(&id)).unwrap();
            states.note(&id, &opened.root, path, Origin::default());
        }
        let usable = |(id, opened): (String, OpenedRoot)| {
            filesystem_of(&id).is_some() && opened.readable.and_then(Opener::new).is_some()
        };
        if !usable(of_root(&served)) {
            return println!("SKIPPED: needs file handles, and a filesystem with a UUID");
        }
        let tidied = |exports: &[PathBuf]| {
            *states.looked.lock() = None;
            states.tidy(exports, &|_, remove| remove());
            states.all().len()
        };
        assert_eq!(tidied(std::slice::from_ref(&served)), 2);
        std::fs::remove_dir(&below).unwrap();
        assert_eq!(tidied(std::slice::from_ref(&served)), 1, "what was attached below it");
        std::fs::remove_dir(&served).unwrap();
        assert_eq!(tidied(std::slice::from_ref(&served)), 0, "and itself");
    }
}
