//! The descriptors of a server, divided among origins (docs/decisions/0032).

use nigh_types::Origin;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// As many sessions and exports there may be however few descriptors the process may have.
const LEAST: u64 = 4;

/// How many descriptors there are for what, and how many of them are taken. The default has no bound.
#[derive(Debug)]
pub(crate) struct Descriptors {
    limit: u64,
    /// Users that do not trust each other are served.
    divides: bool,
    files: Mutex<Files>,
    /// Those that exports hold in case they are needed again.
    cached: AtomicU64,
}

/// Open files of sessions, dormant ones included.
#[derive(Default, Debug)]
struct Files {
    all: u64,
    of: FxHashMap<Origin, u64>,
    /// Origins that were refused one since that was last asked.
    refused: BTreeSet<Origin>,
}

impl Default for Descriptors {
    fn default() -> Descriptors {
        Descriptors::new(u64::MAX, false)
    }
}

impl Descriptors {
    /// `divides`: several users are served.
    pub(crate) fn new(limit: u64, divides: bool) -> Descriptors {
        Descriptors { limit, divides, files: Mutex::default(), cached: AtomicU64::new(0) }
    }

    /// Files that all sessions may have open.
    fn most_files(&self) -> u64 {
        if self.divides { self.limit / 2 } else { self.limit / 2 + self.most_files_of_root() }
    }

    /// Files above that, for root of the machine.
    fn most_files_of_root(&self) -> u64 {
        self.limit / 16
    }

    /// Of the server, and of one origin.
    pub(crate) fn most_sessions(&self, origin: Origin) -> (u64, u64) {
        self.bounds(origin, self.limit / 16)
    }

    /// Exports that sessions have attached to, of the server and of one origin.
    pub(crate) fn most_exports(&self, origin: Origin) -> (u64, u64) {
        self.bounds(origin, self.limit / 96)
    }

    fn bounds(&self, origin: Origin, all: u64) -> (u64, u64) {
        let is_bounded = self.divides && !origin.is_local_root();
        (all.max(LEAST), if is_bounded { (all / 4).max(LEAST) } else { all.max(LEAST) })
    }

    /// What exports may hold in case it is needed again, besides the fewest of each.
    fn most_cached(&self) -> u64 {
        self.limit / 8
    }

    /// Whether an origin may open `more` files. An origin has at most as many as are left for all others together: half of
    /// all if it is the only one, and there is always something left for one that comes later. An eighth is left to root of
    /// the machine alone.
    pub(crate) fn may_open(&self, origin: Origin, more: u64) -> bool {
        let mut files = self.files.lock();
        let most = self.most_files();
        let after = files.all.saturating_add(more);
        let theirs = files.of.get(&origin).copied().unwrap_or(0).saturating_add(more);
        let may = match origin.is_local_root() {
            true if self.divides => after <= most.saturating_add(self.most_files_of_root()),
            true => after <= most,
            false => after <= most && (!self.divides || theirs <= most.saturating_sub(files.all)),
        };
        if !may {
            files.refused.insert(origin);
        }
        may
    }

    /// Counts a file as open until that is dropped.
    pub(crate) fn open(self: &Arc<Descriptors>, origin: Origin) -> Opened {
        let mut files = self.files.lock();
        files.all += 1;
        *files.of.entry(origin).or_default() += 1;
        Opened { descriptors: Arc::clone(self), origin }
    }

    pub(crate) fn files(&self) -> u64 {
        self.files.lock().all
    }

    pub(crate) fn files_of(&self, origin: Origin) -> u64 {
        self.files.lock().of.get(&origin).copied().unwrap_or(0)
    }

    /// Origins that were refused a file since this was asked before.
    pub(crate) fn take_refused(&self) -> BTreeSet<Origin> {
        std::mem::take(&mut self.files.lock().refused)
    }

    /// Counts a descriptor that is held in case it is needed again.
    pub(crate) fn cache(self: &Arc<Descriptors>) -> Cached {
        self.cached.fetch_add(1, Ordering::Relaxed);
        Cached(Arc::clone(self))
    }

    pub(crate) fn cached(&self) -> u64 {
        self.cached.load(Ordering::Relaxed)
    }

    /// Whether exports hold so many that each is to hold as few as it can.
    pub(crate) fn is_crowded(&self) -> bool {
        self.cached() > self.most_cached()
    }
}

/// An open file of an origin.
#[derive(Debug)]
pub(crate) struct Opened {
    descriptors: Arc<Descriptors>,
    origin: Origin,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut files = self.descriptors.files.lock();
        files.all -= 1;
        if let Some(count) = files.of.get_mut(&self.origin) {
            *count -= 1;
            if *count == 0 {
                files.of.remove(&self.origin);
            }
        }
    }
}

/// A descriptor that is held in case it is needed again.
#[derive(Debug)]
pub(crate) struct Cached(Arc<Descriptors>);

impl Drop for Cached {
    fn drop(&mut self) {
        self.0.cached.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(descriptors: &Arc<Descriptors>, origin: Origin) -> Vec<Opened> {
        std::iter::from_fn(|| descriptors.may_open(origin, 1).then(|| descriptors.open(origin))).collect()
    }

    #[test]
    fn each_origin_leaves_as_many_descriptors_to_others_as_it_has() {
        let origin = |uid| Origin { uid: Some(uid), host: None };
        let descriptors = Arc::new(Descriptors::new(2_000, true));
        let taken = [1, 2, 3, 4].map(|uid| take_all(&descriptors, origin(uid)));
        assert_eq!(taken.each_ref().map(Vec::len), [500, 250, 125, 63]);
        assert!(descriptors.may_open(origin(5), 1));
        let root = take_all(&descriptors, Origin::default());
        assert_eq!(root.len(), 1_125 - 938, "what is left, and an eighth");
        assert_eq!(descriptors.take_refused().len(), 5);
        drop((taken, root));
        assert_eq!(descriptors.files(), 0);
        assert!(descriptors.files.lock().of.is_empty() && descriptors.take_refused().is_empty());
    }

    /// What a session has: its connection, twice where a listener may cut it off.
    const OF_SESSION: u64 = 2;
    /// What an export has: its root, thrice, its state and the folder of removed files; and the fewest directories and files
    /// that it holds in case they are needed again.
    const OF_EXPORT: u64 = 5 + 8 + 4;

    #[test]
    fn bounds_of_all_kinds_together_are_within_the_limit() {
        for limit in [1_024, 4_096, 20_000, 524_288, 1 << 20] {
            let limit = limit - crate::server::SPARE_DESCRIPTORS;
            for divides in [false, true] {
                let descriptors = Arc::new(Descriptors::new(limit, divides));
                let root = Origin::default();
                let files = take_all(&descriptors, root).len() as u64;
                let exports = descriptors.most_exports(root).0 * OF_EXPORT;
                let sessions = descriptors.most_sessions(root).0 * OF_SESSION;
                let all = files + descriptors.most_cached() + exports + sessions;
                assert!(
                    all <= limit,
                    "{files} of files, {exports} of exports, {sessions} of sessions: {limit}"
                );
                let user = Origin { uid: Some(1), host: None };
                let of_user = |(all, theirs): (u64, u64)| divides && all > 16 && theirs > all / 4;
                assert!(
                    !of_user(descriptors.most_exports(user)) && !of_user(descriptors.most_sessions(user))
                );
            }
        }
    }

    #[test]
    fn server_of_one_user_gives_one_origin_all_of_them() {
        let descriptors = Arc::new(Descriptors::new(2_000, false));
        assert_eq!(take_all(&descriptors, Origin { uid: Some(1), host: None }).len(), 1_125);
    }
}
