//! Pages of one file: the data grant that covers them, and which data version they are.

use crate::grants::LiveGrant;
use crate::op::InvalidationId;
use crate::pages::{FullPageTracker, PageBase, StalePages};
use nigh_types::{
    Attr, DataVersion, Errno, GrantId, LeaseScope, NodeId, OpId, Time, Timestamp, WriteBackPrecondition,
};
use std::collections::BTreeSet;

/// Attributes that tell one version of a file's data from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChangeToken {
    size: u64,
    mtime: Timestamp,
    ctime: Timestamp,
}

impl ChangeToken {
    pub fn of(attr: &Attr) -> ChangeToken {
        ChangeToken { size: attr.size, mtime: attr.mtime, ctime: attr.ctime }
    }
}

/// Version of the kernel's pages, as far as attributes tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CachedVersion {
    /// The kernel has no pages.
    None,
    Of(ChangeToken),
    /// Pages may mix local and remote writes: true only while the grant lives.
    Mixed,
}

/// The pages' part of an inode's record.
#[derive(Clone, Debug)]
pub(crate) struct InodePages {
    /// Grant under which the kernel may have pages: on data, or on the attributes beside them.
    grant: Option<LiveGrant>,
    /// The end of `grant` for which a timer is set while the file is open, or an earlier end.
    timer_at: Time,
    version: CachedVersion,
    full: FullPageTracker,
    /// Data version of the kernel's pages, for the write-back of mmap stores.
    base: Option<PageBase>,
    /// Set if the kernel may also have pages of an ended grant.
    stale: Option<StalePages>,
}

impl InodePages {
    pub const fn none() -> InodePages {
        InodePages {
            grant: None,
            timer_at: Time(0),
            version: CachedVersion::None,
            full: FullPageTracker::none(),
            base: None,
            stale: None,
        }
    }

    /// Returns whether the kernel has no pages.
    pub fn is_none(&self) -> bool {
        let InodePages { grant, timer_at: _, version, full, base, stale } = self;
        let no_pages = grant.is_none() && *version == CachedVersion::None && full.is_none();
        no_pages && base.is_none() && stale.is_none()
    }

    /// Returns the tracker of full pages.
    pub fn full(&self) -> &FullPageTracker {
        &self.full
    }

    pub fn full_mut(&mut self) -> &mut FullPageTracker {
        &mut self.full
    }
}

/// Grant.
impl InodePages {
    pub fn grant(&self) -> Option<&LiveGrant> {
        self.grant.as_ref()
    }

    pub fn live_grant(&self, now: Time) -> Option<LiveGrant> {
        self.grant.filter(|grant| grant.is_live(now))
    }

    /// Returns whether the pages depend on the grant on this node and scope.
    pub fn is_under(&self, on: (NodeId, LeaseScope)) -> bool {
        self.grant.is_some_and(|grant| grant.on == on)
    }

    /// Applies the data grant of a reply (`None`: it has none). A living grant with older pages is prolonged instead, if
    /// the file is in the version of its pages (`token`): recalled changes would have been heard, and others show in the
    /// attributes. Returns whether the grant is the reply's.
    pub fn begin_grant(&mut self, now: Time, fresh: Option<LiveGrant>, token: Option<ChangeToken>) -> bool {
        let Some(held) = self.live_grant(now).filter(|_| self.version != CachedVersion::None) else {
            self.grant = fresh;
            return true;
        };
        // Under a grant without recall the pages have to be compared again.
        let same = token.is_some_and(|token| self.is_of(token));
        let later = fresh.filter(|h| same && h.recallable && held.recallable && h.deadline > held.deadline);
        if let Some(later) = later {
            self.grant = Some(later);
            self.base.iter_mut().for_each(|base| base.prolong((later.id, later.on.1)));
        }
        false
    }

    /// Replaces the grant by a later one, for pages of the version that the reply shows.
    pub fn renew_grant(&mut self, later: LiveGrant) {
        self.grant = Some(later);
    }

    /// Puts pages without a living grant under a grant of the file's attributes, if they are of that version.
    pub fn adopt(&mut self, now: Time, token: ChangeToken, under: Option<LiveGrant>) {
        if self.live_grant(now).is_none() && self.is_of(token) {
            self.grant = under;
        }
    }

    /// Records a timer for the end of the grant, and returns that end.
    pub fn begin_timer(&mut self) -> Option<Time> {
        let grant = self.grant?;
        self.timer_at = grant.deadline;
        Some(grant.deadline)
    }

    /// Returns whether the timer that was set is due. Replies may have moved the end of the grant since.
    pub fn is_timer_due(&self, now: Time) -> bool {
        self.timer_at <= now
    }

    /// Drops grant and version: the caller invalidates the pages.
    pub fn drop_all(&mut self) {
        (self.grant, self.version) = (None, CachedVersion::None);
    }

    /// Drops grant, version and timer at the end of all grants.
    pub fn note_all_grants_ended(&mut self) {
        self.drop_all();
        self.timer_at = Time(0);
    }

    /// Keeps the pages after the end of their grant, until the remote is back.
    pub fn keep_as_stale(&mut self) {
        self.grant = self.grant.map(LiveGrant::into_stale);
    }
}

/// Version.
impl InodePages {
    /// Returns whether all pages are of this version.
    pub fn is_of(&self, token: ChangeToken) -> bool {
        self.version == CachedVersion::Of(token)
    }

    /// Returns whether all pages are of one version.
    pub fn is_of_one_version(&self) -> bool {
        matches!(self.version, CachedVersion::Of(_))
    }

    /// Returns whether all pages are of another version than this one.
    pub fn is_of_another_version(&self, token: ChangeToken) -> bool {
        self.is_of_one_version() && !self.is_of(token)
    }

    /// Returns whether pages may mix local and remote writes.
    pub fn is_mixed(&self) -> bool {
        self.version == CachedVersion::Mixed
    }

    /// Records an open at which the kernel drops all pages. `is_first`: the file was not open before.
    pub fn note_open_without_pages(&mut self, is_first: bool) {
        self.base.take_if(|_| is_first);
        self.version = CachedVersion::None;
    }

    /// Records an open that truncates the file.
    pub fn note_truncated(&mut self) {
        self.version = CachedVersion::None;
    }

    /// Records the pages of a read. `crossed`: a local change was made since the read was sent. Returns whether the
    /// kernel had pages of another version.
    pub fn note_read(&mut self, token: Option<ChangeToken>, crossed: bool) -> bool {
        let is_foreign = !crossed && token.is_some_and(|token| self.is_of_another_version(token));
        self.version = match (self.version, token) {
            (CachedVersion::None | CachedVersion::Of(_), Some(token)) if !crossed => CachedVersion::Of(token),
            (CachedVersion::Of(old), None) if !crossed => CachedVersion::Of(old),
            _ => CachedVersion::Mixed,
        };
        is_foreign
    }

    /// Records the pages of a local write: they are the present version unless another client may have written without
    /// a recall.
    pub fn note_write(&mut self, now: Time, after: Option<ChangeToken>) {
        let is_recalled = self.live_grant(now).is_some_and(|grant| grant.recalled_before_any_change());
        self.version = match (self.version, after) {
            (CachedVersion::None, Some(token)) => CachedVersion::Of(token),
            (CachedVersion::Of(_), Some(token)) if is_recalled => CachedVersion::Of(token),
            _ => CachedVersion::Mixed,
        };
    }

    /// Handles a close, after which the file is open or not, and open for writing or not.
    pub fn note_close(&mut self, now: Time, is_open: bool, is_written: bool) {
        if !is_written {
            self.stale = None;
        }
        if is_open {
            return;
        }
        // The kernel keeps pages for the next open while a data grant lives.
        let keeps_pages = self.live_grant(now).is_some_and(|grant| grant.on.1 == LeaseScope::Data);
        self.base.take_if(|_| !keeps_pages);
        // No timer checks the pages before that grant ends: the next open compares attributes.
        self.grant.take_if(|grant| grant.on.1 != LeaseScope::Data);
    }
}

/// Data versions for the write-back of mmap stores (`page_cache/writeback.rs`).
impl InodePages {
    /// Returns whether the kernel may have pages with a data version.
    pub fn has_data_version(&self) -> bool {
        self.base.is_some() || self.has_stale()
    }

    /// Returns whether the kernel may have pages of an ended grant.
    pub fn has_stale(&self) -> bool {
        self.stale.is_some()
    }

    pub fn stale_mut(&mut self) -> Option<&mut StalePages> {
        self.stale.as_mut()
    }

    /// Records the file's data version under a live grant. `crossed`: local changes may be newer than the version.
    /// `is_own`: it is from the reply to a local change.
    pub fn note_base(
        &mut self,
        stamp: DataVersion,
        under: (GrantId, LeaseScope),
        crossed: bool,
        is_own: bool,
    ) {
        match &mut self.base {
            Some(base) if crossed && !(is_own && base.is_before(stamp)) => base.prolong(under),
            base => *base = Some(PageBase::new(stamp, under)),
        }
    }

    /// Records that an invalidation of all pages was sent.
    pub fn note_full_drop_sent(&mut self, id: InvalidationId) {
        self.base.iter_mut().for_each(|base| base.note_full_drop(id));
    }

    /// Marks the pages as stale: the grant ends, and an invalidation of the pages later than `after` follows. `unbroken`:
    /// the grant ends before its time, with its session. A file that is not open for writing has no stores.
    pub fn note_stale(&mut self, after: InvalidationId, unbroken: bool, is_written: bool) {
        let base = self.base.take();
        if !is_written {
            return;
        }
        match (&mut self.stale, base) {
            (Some(stale), base) => stale.add(base.is_some().then_some(after)),
            (stale, Some(base)) => *stale = Some(StalePages::new(base.stamp(), after, unbroken)),
            (None, None) => {}
        }
    }

    /// Handles a done invalidation, of `all` pages or of some, which left out those of these requests.
    pub fn note_dropped(
        &mut self,
        id: InvalidationId,
        all: bool,
        left_out: BTreeSet<OpId>,
        is_pending: impl Fn(InvalidationId) -> bool,
    ) {
        if let Some(stale) = &mut self.stale {
            if !stale.note_drop(id, all, left_out, is_pending) {
                return;
            }
            self.stale = None;
        }
        // Pages that a recall left out are not of that version either, or no more. An invalidation that was sent before
        // the recall has left out the pages of the reply that brought the grant.
        if all && self.grant.is_none() {
            self.base.take_if(|base| base.is_gone_after(id));
        }
    }

    /// Keeps stale pages under a data grant of a new session, if the file in this version has them.
    pub fn keep_in_new_session(&mut self, stamp: DataVersion, grant: GrantId) {
        if self.stale.take_if(|stale| stale.is_own(stamp)).is_some() {
            self.base = Some(PageBase::new(stamp, (grant, LeaseScope::Data)));
        }
    }

    /// Returns the precondition of a write-back of pages, if a data version is recorded. `EIO`: another client has
    /// written the file since.
    pub fn precondition(&self) -> Result<Option<WriteBackPrecondition>, Errno> {
        match &self.stale {
            Some(stale) => stale.precondition().ok_or(Errno::IO).map(Some),
            None => Ok(self.base.as_ref().map(PageBase::precondition)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(size: u64) -> ChangeToken {
        ChangeToken::of(&Attr { size, ..Attr::default() })
    }

    #[test]
    fn read_of_another_version_replaces_the_version_and_says_so() {
        let mut pages = InodePages::none();
        assert!(!pages.note_read(Some(token(1)), false), "the kernel had no pages");
        assert!(!pages.note_read(None, false));
        assert!(pages.is_of(token(1)));
        assert!(pages.note_read(Some(token(2)), false));
        assert!(pages.is_of(token(2)));
        assert!(!pages.note_read(Some(token(3)), true));
        assert!(pages.is_mixed(), "a local change crossed the read");
    }

    #[test]
    fn write_without_a_grant_beside_pages_mixes_versions() {
        let mut pages = InodePages::none();
        pages.note_write(Time(0), Some(token(1)));
        assert!(pages.is_of(token(1)), "the kernel had no other pages");
        pages.note_write(Time(0), Some(token(2)));
        assert!(pages.is_mixed());
        pages.drop_all();
        assert!(pages.is_none());
    }
}
