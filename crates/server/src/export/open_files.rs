//! The open files of a server: directories of moved hard links, and orphans without a name.
//!
//! A change of a file with one name recalls the lease of the directory that holds the name. Normally the kernel's
//! path of the descriptor shows that directory. The path is useless once the name by which the file was opened is
//! removed and another link remains. For such files this table records each directory in which a client was shown the
//! file.

use crate::export::orphans::{Orphan, Orphans};
use crate::limits::descriptors::OpenFileCharge;
use nigh_lease::Object;
use nigh_types::Attr;
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Open-file table of all sessions. No other lock is taken under its lock, which is held for a moment.
#[derive(Default)]
pub(crate) struct OpenFileTable {
    files: Mutex<FxHashMap<Object, OpenFileEntry>>,
    moved_hardlinks: AtomicU64,
    orphans: AtomicU64,
    /// Files about to lose a name. No other lock is taken under this one.
    unlinking: Mutex<FxHashSet<Object>>,
    /// Incremented when a removal of a name begins and when it ends.
    unlink_events: AtomicU64,
}

#[derive(Default)]
struct OpenFileEntry {
    open: u64,
    /// The file lost a name, or is about to, and keeps another one.
    moved_hardlink: bool,
    directories: Vec<Object>,
    orphan: Option<Orphan>,
}

/// Guard of a file that is about to lose a name. Dropping it ends the removal.
pub(crate) struct UnlinkGuard<'a> {
    homes: &'a OpenFileTable,
    object: Object,
    /// Whether a session has the file open. An open that starts later waits for the inode lock and checks its name
    /// again.
    pub(crate) is_open: bool,
}

/// Counted reference to an open file. Dropping it releases the reference.
pub(crate) struct OpenRef {
    homes: Arc<OpenFileTable>,
    object: Object,
    #[allow(dead_code, reason = "held, not looked at")]
    opened: Option<OpenFileCharge>,
}

impl OpenFileTable {
    /// Counts a file as open. Afterwards the caller must check that the name by which it reached the file still
    /// exists. `opened`: the file's share in the descriptor limit of its origin.
    pub(crate) fn count(
        self: &Arc<OpenFileTable>,
        object: Object,
        opened: Option<OpenFileCharge>,
    ) -> OpenRef {
        self.files.lock().entry(object).or_default().open += 1;
        OpenRef { homes: Arc::clone(self), object, opened }
    }

    /// Whether a session has the file open.
    pub(crate) fn is_open(&self, object: Object) -> bool {
        self.files.lock().contains_key(&object)
    }

    /// Marks a file that is about to lose a name. The caller holds its inode lock exclusively.
    pub(crate) fn begin_unlink(&self, object: Object) -> UnlinkGuard<'_> {
        self.unlinking.lock().insert(object);
        self.unlink_events.fetch_add(1, Ordering::SeqCst);
        UnlinkGuard { homes: self, object, is_open: self.is_open(object) }
    }

    /// Whether a removal of the file's name may be under way. Must be called after [`OpenFileTable::count`].
    pub(crate) fn is_unlinking(&self, object: Object) -> bool {
        self.unlinking.lock().contains(&object)
    }

    /// Returns the removal counter. Read it before the attributes of an open file that may lose a name meanwhile.
    pub(crate) fn unlink_events(&self) -> u64 {
        self.unlink_events.load(Ordering::SeqCst)
    }

    /// Whether the file may have lost a name since `since`. If so, the observed nlink may include its name in an
    /// orphan folder.
    pub(crate) fn may_have_unlinked(&self, object: Object, since: u64) -> bool {
        self.is_unlinking(object) || self.unlink_events() != since && self.is_open(object)
    }

    /// Stores the file's name in the orphan folder until its last close. If the file is not open, the name is removed
    /// here.
    pub(crate) fn set_orphan(&self, object: Object, orphan: Orphan) {
        let mut files = self.files.lock();
        let Some(file) = files.get_mut(&object).filter(|file| file.orphan.is_none()) else {
            drop(files);
            return drop(orphan);
        };
        file.orphan = Some(orphan);
        self.orphans.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the attributes without counting the name in an orphan folder. `orphans` knows names that an earlier
    /// server left, even before a session opens the file again. A name made through another export is known only by
    /// the open-file entry. `look` may be called more than once.
    pub(crate) fn visible_attr<E>(
        &self,
        orphans: &Orphans,
        object: Object,
        look: impl Fn() -> Result<Attr, E>,
    ) -> Result<Attr, E> {
        let is_open_orphan = || {
            self.orphans.load(Ordering::SeqCst) > 0
                && self.files.lock().get(&object).is_some_and(|file| file.orphan.is_some())
        };
        let ((elsewhere, attr), here) = orphans.observe(object, || (is_open_orphan(), look()));
        let attr = attr?;
        Ok(Attr { nlink: attr.nlink.saturating_sub(u32::from(here || elsewhere)), ..attr })
    }

    /// Blocks every open and close of files.
    #[cfg(test)]
    pub(crate) fn block(&self) -> impl Drop + '_ {
        self.files.lock()
    }

    /// Records a new name of the file in `dir`. The caller holds the inode lock exclusively.
    pub(crate) fn note_name_in(&self, object: Object, dir: Object) {
        if let Some(file) = self.files.lock().get_mut(&object) {
            file.note(dir);
        }
    }

    /// Marks a file that lost a name, or is about to, and keeps another one.
    pub(crate) fn mark_moved_hardlink(&self, object: Object) {
        if let Some(file) = self.files.lock().get_mut(&object)
            && !std::mem::replace(&mut file.moved_hardlink, true)
        {
            self.moved_hardlinks.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether a directory must be recorded when a client is shown the file in it.
    pub(crate) fn is_moved_hardlink(&self, object: Object) -> bool {
        self.moved_hardlinks.load(Ordering::SeqCst) > 0
            && self.files.lock().get(&object).is_some_and(|file| file.moved_hardlink)
    }

    /// Records that a client is shown the file in `dir`. The caller holds the inode lock exclusively and reads the
    /// attributes afterwards.
    pub(crate) fn note_shown_in(&self, object: Object, dir: Object) {
        self.note_name_in(object, dir);
    }

    /// Returns the directories in which an open file may lie.
    pub(crate) fn directories_of(&self, object: Object) -> Vec<Object> {
        self.files.lock().get(&object).map(|file| file.directories.clone()).unwrap_or_default()
    }
}

impl OpenFileEntry {
    fn note(&mut self, dir: Object) {
        if !self.directories.contains(&dir) {
            self.directories.push(dir);
        }
    }
}

impl Drop for OpenRef {
    fn drop(&mut self) {
        let mut files = self.homes.files.lock();
        let Some(file) = files.get_mut(&self.object) else { return };
        file.open -= 1;
        if file.open > 0 {
            return;
        }
        let gone = files.remove(&self.object);
        drop(files);
        if let Some(OpenFileEntry { moved_hardlink: stray, orphan, .. }) = gone {
            self.homes.moved_hardlinks.fetch_sub(u64::from(stray), Ordering::SeqCst);
            self.homes.orphans.fetch_sub(u64::from(orphan.is_some()), Ordering::SeqCst);
            drop(orphan); // frees its blocks, which may wait for the disk
        }
    }
}

impl UnlinkGuard<'_> {
    /// Cancels the removal: the file kept its name and needs none in the orphan folder.
    pub(crate) fn cancel(&self) {
        let orphan = self.homes.files.lock().get_mut(&self.object).and_then(|file| file.orphan.take());
        if orphan.is_some() {
            self.homes.orphans.fetch_sub(1, Ordering::SeqCst);
        }
        drop(orphan);
    }
}

impl Drop for UnlinkGuard<'_> {
    fn drop(&mut self) {
        self.homes.unlink_events.fetch_add(1, Ordering::SeqCst);
        self.homes.unlinking.lock().remove(&self.object);
    }
}

impl std::fmt::Debug for OpenRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.object.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_moved_hardlink_are_recorded_while_file_is_open() {
        let object = |ino| Object { filesystem: 1, ino, birth: 2 };
        let homes = Arc::new(OpenFileTable::default());
        homes.mark_moved_hardlink(object(1));
        assert!(!homes.is_moved_hardlink(object(1)), "no process has it open");
        let (first, second) = (homes.count(object(1), None), homes.count(object(1), None));
        homes.note_name_in(object(1), object(7));
        homes.mark_moved_hardlink(object(1));
        homes.mark_moved_hardlink(object(1));
        assert!(homes.is_moved_hardlink(object(1)) && !homes.is_moved_hardlink(object(2)));
        homes.note_shown_in(object(1), object(8));
        homes.note_shown_in(object(1), object(8));
        drop(first);
        assert_eq!(homes.directories_of(object(1)), [object(7), object(8)]);
        drop(second);
        assert!(homes.directories_of(object(1)).is_empty() && !homes.is_moved_hardlink(object(1)));
        assert_eq!(homes.moved_hardlinks.load(Ordering::SeqCst), 0);
        assert!(homes.files.lock().is_empty());
    }
}
