//! Records of directories.

use super::{CachedEntry, DentryLeases, DirEntries};
use crate::grants::LiveGrant;
use nigh_types::{CallId, Cookie, Name, NodeId, Span, Time};

/// A directory is frequently changed from its second remote change of a name within `FREQUENT_WITHIN`, until
/// `FREQUENT_FOR` has passed without one.
const FREQUENT_WITHIN: Span = Span::from_millis(1_000);
const FREQUENT_FOR: Span = Span::from_millis(10_000);

/// Names of a directory and their grants.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    pub id: NodeId,
    /// Whether this inode is known to be a directory: another inode of unknown kind may have taken the number.
    pub is_directory: bool,
    /// Directory lease over `rows` and `complete`. Invariant: without it `rows` is empty.
    pub held: Option<LiveGrant>,
    pub rows: DirEntries,
    /// Dentries under grants of their own, whether `held` lives or not.
    pub dentry_leases: DentryLeases,
    /// A name without an entry does not exist.
    pub complete: bool,
    /// Listing in flight, and the cookie up to which it has come: a name up to it has an entry or does
    /// not exist (names with equal cookies come in one chunk).
    pub listing: Option<CallId>,
    pub progress: Option<Cookie>,
    /// Count of breaks in the known names. `kernel_version` is the version of the listing that the kernel caches.
    pub version: u64,
    pub kernel_version: Option<u64>,
    /// Version at the latest chunk of a listing for the kernel's cache.
    pub chunk_version: Option<u64>,
    /// The kernel's cached listing has no attributes, because its reader wants names only.
    pub cached_without_attrs: bool,
    /// Thread that last read the directory; `was_read`: there was one.
    pub last_reader: u32,
    pub was_read: bool,
    /// How often the directory lease has ended.
    pub lease_generation: u64,
    /// Time of the latest remote change of a name, and whether such changes are frequent
    /// ([`Directory::changes_frequently`]).
    pub remote_name_changes: Option<(Time, bool)>,
    /// The kernel may have negative dentries here.
    pub has_negative_dentries: bool,
    /// Prefetch job that brought the directory, and its cost in entries, until the first use.
    pub prefetched_by: Option<(CallId, u64)>,
    /// First use of a prefetched directory; cleared if it is used again after a while.
    pub first_used_at: Option<Time>,
    /// Subdirectory that was opened last. `opened_in_walk`: the directory was opened by a caller that had its parent listed.
    pub last_child: Option<u64>,
    pub opened_in_walk: bool,
    /// Number of names looked up at the remote before a listing.
    pub remote_lookups: u8,
    /// Whether the directory was used since eviction last visited it, and the time of the last use.
    pub used: bool,
    pub used_at: Time,
    /// Bytes counted in the cache's total.
    pub counted: u64,
}

impl Directory {
    pub fn new(id: NodeId) -> Directory {
        Directory {
            id,
            is_directory: true,
            held: None,
            rows: DirEntries::default(),
            dentry_leases: DentryLeases::default(),
            complete: false,
            listing: None,
            progress: None,
            version: 0,
            kernel_version: None,
            chunk_version: None,
            cached_without_attrs: false,
            last_reader: 0,
            was_read: false,
            lease_generation: 0,
            remote_name_changes: None,
            has_negative_dentries: false,
            prefetched_by: None,
            first_used_at: None,
            last_child: None,
            opened_in_walk: false,
            remote_lookups: 0,
            used: true,
            used_at: Time(0),
            counted: 0,
        }
    }

    /// Drops the names: the directory lease has ended.
    pub fn forget(&mut self) {
        self.held = None;
        self.remote_lookups = 0;
        self.rows.clear();
        self.complete = false;
        self.progress = None;
        self.version += 1;
        self.lease_generation += 1;
    }

    /// Records a use.
    pub fn note_use(&mut self, now: Time) {
        (self.used, self.used_at) = (true, now);
    }

    /// Returns the memory of the names, in bytes.
    pub fn bytes(&self) -> u64 {
        self.rows.bytes() + self.dentry_leases.bytes()
    }

    /// Gives the record to another inode that has taken the number.
    pub fn reassign(&mut self, id: NodeId) {
        (self.id, self.is_directory) = (id, false);
        self.listing = None;
    }

    /// Records a remote change of a name.
    pub fn note_remote_change(&mut self, now: Time) {
        let again = self.remote_name_changes.is_some_and(|(last, frequent)| {
            now < last.after(FREQUENT_WITHIN) || frequent && now < last.after(FREQUENT_FOR)
        });
        self.remote_name_changes = Some((now, again));
    }

    /// Returns whether remote changes come so often that the kernel gets no entry timeout here: invalidating a dentry
    /// may wait for requests in that directory.
    pub fn changes_frequently(&self, now: Time) -> bool {
        self.remote_name_changes.is_some_and(|(last, frequent)| frequent && now < last.after(FREQUENT_FOR))
    }

    /// Returns what a name leads to (`Some(None)`: it does not exist), if the entries say so. They do while `held`
    /// lives.
    pub fn find(&self, cookie: Cookie, name: &Name) -> Option<Option<&CachedEntry>> {
        match self.rows.find(cookie, name.as_bytes()) {
            Some(row) => Some(row.child),
            None => (self.complete || self.progress.is_some_and(|p| cookie <= p)).then_some(None),
        }
    }
}
