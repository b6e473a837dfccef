//! Limits on the server's descriptors, divided among origins (docs/decisions/0032).

use nigh_types::Origin;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Minimum number of permitted sessions and exports, however few descriptors the process has.
const LEAST: u64 = 4;

/// Descriptor limits and use. The default is unlimited.
#[derive(Debug)]
pub(crate) struct Descriptors {
    limit: u64,
    /// Mutually distrusting users are served.
    multi_user: bool,
    files: Mutex<Files>,
    /// Descriptors that exports hold as caches.
    cached: AtomicU64,
}

/// Open files of sessions, courtesy sessions included.
#[derive(Default, Debug)]
struct Files {
    all: u64,
    of: FxHashMap<Origin, u64>,
    /// Origins that were refused a file since the last query.
    refused: BTreeSet<Origin>,
}

impl Default for Descriptors {
    fn default() -> Descriptors {
        Descriptors::new(u64::MAX, false)
    }
}

impl Descriptors {
    /// `divides`: several users are served.
    pub(crate) fn new(limit: u64, multi_user: bool) -> Descriptors {
        Descriptors { limit, multi_user, files: Mutex::default(), cached: AtomicU64::new(0) }
    }

    /// Limit on open files of all sessions.
    fn most_files(&self) -> u64 {
        if self.multi_user { self.limit / 2 } else { self.limit / 2 + self.most_files_of_root() }
    }

    /// Additional files for root of this machine.
    fn most_files_of_root(&self) -> u64 {
        self.limit / 16
    }

    /// Limits on sessions: of the server, and of one origin.
    pub(crate) fn most_sessions(&self, origin: Origin) -> (u64, u64) {
        self.bounds(origin, self.limit / 16)
    }

    /// Limits on attached exports: of the server, and of one origin.
    pub(crate) fn most_exports(&self, origin: Origin) -> (u64, u64) {
        self.bounds(origin, self.limit / 96)
    }

    fn bounds(&self, origin: Origin, all: u64) -> (u64, u64) {
        let is_bounded = self.multi_user && !origin.is_local_root();
        (all.max(LEAST), if is_bounded { (all / 4).max(LEAST) } else { all.max(LEAST) })
    }

    /// Limit on cached descriptors, besides each export's minimum.
    fn most_cached(&self) -> u64 {
        self.limit / 8
    }

    /// Whether an origin may open `more` files. An origin may hold at most as many as remain for all others: half of
    /// all if it is the only one, so a later origin always finds some. Root of this machine has an extra eighth.
    pub(crate) fn may_open(&self, origin: Origin, more: u64) -> bool {
        let mut files = self.files.lock();
        let most = self.most_files();
        let after = files.all.saturating_add(more);
        let theirs = files.of.get(&origin).copied().unwrap_or(0).saturating_add(more);
        let may = match origin.is_local_root() {
            true if self.multi_user => after <= most.saturating_add(self.most_files_of_root()),
            true => after <= most,
            false => after <= most && (!self.multi_user || theirs <= most.saturating_sub(files.all)),
        };
        if !may {
            files.refused.insert(origin);
        }
        may
    }

    /// Counts a file as open until the returned value is dropped.
    pub(crate) fn open(self: &Arc<Descriptors>, origin: Origin) -> OpenFileCharge {
        let mut files = self.files.lock();
        files.all += 1;
        *files.of.entry(origin).or_default() += 1;
        OpenFileCharge { descriptors: Arc::clone(self), origin }
    }

    pub(crate) fn files(&self) -> u64 {
        self.files.lock().all
    }

    pub(crate) fn files_of(&self, origin: Origin) -> u64 {
        self.files.lock().of.get(&origin).copied().unwrap_or(0)
    }

    /// Returns the origins that were refused a file since the last call.
    pub(crate) fn take_refused(&self) -> BTreeSet<Origin> {
        std::mem::take(&mut self.files.lock().refused)
    }

    /// Counts a cached descriptor until the returned value is dropped.
    pub(crate) fn cache(self: &Arc<Descriptors>) -> CachedFdCharge {
        self.cached.fetch_add(1, Ordering::Relaxed);
        CachedFdCharge(Arc::clone(self))
    }

    pub(crate) fn cached(&self) -> u64 {
        self.cached.load(Ordering::Relaxed)
    }

    /// Whether caches hold so many descriptors that each should shrink to its minimum.
    pub(crate) fn is_short(&self) -> bool {
        self.cached() > self.most_cached()
    }
}

/// An open file charged to an origin.
#[derive(Debug)]
pub(crate) struct OpenFileCharge {
    descriptors: Arc<Descriptors>,
    origin: Origin,
}

impl Drop for OpenFileCharge {
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

/// A cached descriptor.
#[derive(Debug)]
pub(crate) struct CachedFdCharge(Arc<Descriptors>);

impl Drop for CachedFdCharge {
    fn drop(&mut self) {
        self.0.cached.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(descriptors: &Arc<Descriptors>, origin: Origin) -> Vec<OpenFileCharge> {
        std::iter::from_fn(|| descriptors.may_open(origin, 1).then(|| descriptors.open(origin))).collect()
    }

    #[test]
    fn origin_holds_at_most_half_of_the_remaining_descriptors() {
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

    /// Descriptors of a session: its connection, duplicated if a listener may cut it off.
    const OF_SESSION: u64 = 2;
    /// Descriptors of an export: its root, three times, its state and the orphan folder; and its minimum of cached
    /// directories and files.
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
    fn single_user_server_gives_all_descriptors_to_one_origin() {
        let descriptors = Arc::new(Descriptors::new(2_000, false));
        assert_eq!(take_all(&descriptors, Origin { uid: Some(1), host: None }).len(), 1_125);
    }
}
