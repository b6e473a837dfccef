//! Which files are open, where those lie whose descriptors may not tell, and which have lost their last name.
//!
//! A change of a file with one name recalls the names of the directory that holds it, which the kernel tells by
//! the descriptor. A descriptor opened under a name that was removed since, while another is left, tells
//! nothing: for such files the directories are noted in which anybody was shown them.

use crate::descriptors::Opened;
use crate::orphans::{Orphan, Orphans};
use nigh_native::lease::Object;
use nigh_types::Attr;
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The files that sessions of a server have open. Its lock is held alone and for a moment.
#[derive(Default)]
pub(crate) struct Homes {
    files: Mutex<FxHashMap<Object, File>>,
    strays: AtomicU64,
    orphans: AtomicU64,
    /// Files that are about to lose a name. Locked alone.
    leaving: Mutex<FxHashSet<Object>>,
    /// How often one began to, or was done.
    departures: AtomicU64,
}

#[derive(Default)]
struct File {
    open: u64,
    /// It lost a name and kept another one, or is about to.
    stray: bool,
    homes: Vec<Object>,
    orphan: Option<Orphan>,
}

/// A file is about to lose a name, until this is dropped.
pub(crate) struct Leaving<'a> {
    homes: &'a Homes,
    object: Object,
    /// Whether anybody has it open. Who opens it from here on waits for its place, and looks again.
    pub(crate) is_open: bool,
}

/// A file counts as open until this is dropped.
pub(crate) struct Counted {
    homes: Arc<Homes>,
    object: Object,
    #[allow(dead_code, reason = "held, not looked at")]
    opened: Option<Opened>,
}

impl Homes {
    /// Counts a file as open. To be followed by making sure that the name it was reached by is still there.
    /// `opened`: it counts among those of its origin.
    pub(crate) fn count(self: &Arc<Homes>, object: Object, opened: Option<Opened>) -> Counted {
        self.files.lock().entry(object).or_default().open += 1;
        Counted { homes: Arc::clone(self), object, opened }
    }

    /// Whether anybody has it open.
    pub(crate) fn is_open(&self, object: Object) -> bool {
        self.files.lock().contains_key(&object)
    }

    /// It is about to lose a name. The caller holds it exclusively.
    pub(crate) fn leaves(&self, object: Object) -> Leaving<'_> {
        self.leaving.lock().insert(object);
        self.departures.fetch_add(1, Ordering::SeqCst);
        Leaving { homes: self, object, is_open: self.is_open(object) }
    }

    /// Whether it may be losing its name right now. To be asked when it was counted.
    pub(crate) fn is_leaving(&self, object: Object) -> bool {
        self.leaving.lock().contains(&object)
    }

    /// To be asked before an open file is looked at that may be losing a name meanwhile.
    pub(crate) fn departures(&self) -> u64 {
        self.departures.load(Ordering::SeqCst)
    }

    /// Whether it may have been: the name that it gets in a server's own folder may have been counted then.
    pub(crate) fn may_have_left(&self, object: Object, since: u64) -> bool {
        self.is_leaving(object) || self.departures() != since && self.is_open(object)
    }

    /// It has a name in a server's own folder, until it is open no more. Where it is not, that ends here.
    pub(crate) fn set_aside(&self, object: Object, orphan: Orphan) {
        let mut files = self.files.lock();
        let Some(file) = files.get_mut(&object).filter(|file| file.orphan.is_none()) else {
            drop(files);
            return drop(orphan);
        };
        file.orphan = Some(orphan);
        self.orphans.fetch_add(1, Ordering::SeqCst);
    }

    /// Its attributes without the name in a server's own folder. Where an earlier server left it there `orphans` know before anybody has
    /// opened it again; where another export made it, only those who have it open do.
    /// `look` may be called more than once.
    pub(crate) fn seen<E>(
        &self,
        orphans: &Orphans,
        object: Object,
        look: impl Fn() -> Result<Attr, E>,
    ) -> Result<Attr, E> {
        let is_open_orphan = || {
            self.orphans.load(Ordering::SeqCst) > 0
                && self.files.lock().get(&object).is_some_and(|file| file.orphan.is_some())
        };
        let ((elsewhere, attr), here) = orphans.look(object, || (is_open_orphan(), look()));
        let attr = attr?;
        Ok(Attr { nlink: attr.nlink.saturating_sub(u32::from(here || elsewhere)), ..attr })
    }

    /// Keeps whoever opens or closes a file waiting.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Drop + '_ {
        self.files.lock()
    }

    /// It has a name in `dir` that it had not. The caller holds it exclusively.
    pub(crate) fn named(&self, object: Object, dir: Object) {
        if let Some(file) = self.files.lock().get_mut(&object) {
            file.note(dir);
        }
    }

    /// It is about to lose a name, or lost it, and one is left.
    pub(crate) fn lost_a_name(&self, object: Object) {
        if let Some(file) = self.files.lock().get_mut(&object)
            && !std::mem::replace(&mut file.stray, true)
        {
            self.strays.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether its directory must be noted when anybody is shown it there.
    pub(crate) fn is_stray(&self, object: Object) -> bool {
        self.strays.load(Ordering::SeqCst) > 0
            && self.files.lock().get(&object).is_some_and(|file| file.stray)
    }

    /// Somebody is shown it in `dir`. The caller holds its place exclusively, and reads it afterwards.
    pub(crate) fn shown(&self, object: Object, dir: Object) {
        self.named(object, dir);
    }

    /// Where an open file may lie.
    pub(crate) fn of(&self, object: Object) -> Vec<Object> {
        self.files.lock().get(&object).map(|file| file.homes.clone()).unwrap_or_default()
    }
}

impl File {
    fn note(&mut self, dir: Object) {
        if !self.homes.contains(&dir) {
            self.homes.push(dir);
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut files = self.homes.files.lock();
        let Some(file) = files.get_mut(&self.object) else { return };
        file.open -= 1;
        if file.open > 0 {
            return;
        }
        let gone = files.remove(&self.object);
        drop(files);
        if let Some(File { stray, orphan, .. }) = gone {
            self.homes.strays.fetch_sub(u64::from(stray), Ordering::SeqCst);
            self.homes.orphans.fetch_sub(u64::from(orphan.is_some()), Ordering::SeqCst);
            drop(orphan); // its blocks are freed: that may wait for the disk
        }
    }
}

impl Leaving<'_> {
    /// It did not lose its name, and needs no other.
    pub(crate) fn take_back(&self) {
        let orphan = self.homes.files.lock().get_mut(&self.object).and_then(|file| file.orphan.take());
        if orphan.is_some() {
            self.homes.orphans.fetch_sub(1, Ordering::SeqCst);
        }
        drop(orphan);
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.homes.departures.fetch_add(1, Ordering::SeqCst);
        self.homes.leaving.lock().remove(&self.object);
    }
}

impl std::fmt::Debug for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.object.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_are_known_as_long_as_the_file_is_open() {
        let object = |ino| Object { filesystem: 1, ino, birth: 2 };
        let homes = Arc::new(Homes::default());
        homes.lost_a_name(object(1));
        assert!(!homes.is_stray(object(1)), "nobody has it open");
        let (first, second) = (homes.count(object(1), None), homes.count(object(1), None));
        homes.named(object(1), object(7));
        homes.lost_a_name(object(1));
        homes.lost_a_name(object(1));
        assert!(homes.is_stray(object(1)) && !homes.is_stray(object(2)));
        homes.shown(object(1), object(8));
        homes.shown(object(1), object(8));
        drop(first);
        assert_eq!(homes.of(object(1)), [object(7), object(8)]);
        drop(second);
        assert!(homes.of(object(1)).is_empty() && !homes.is_stray(object(1)));
        assert_eq!(homes.strays.load(Ordering::SeqCst), 0);
        assert!(homes.files.lock().is_empty());
    }
}
