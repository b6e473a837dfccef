//! A live grant, and what it proves about the time since its holder has had the key.

use nigh_types::{GrantId, Mode, NodeId, Time};

/// A live grant that was not recalled.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) id: GrantId,
    /// The object's node id in its holder's export.
    pub(crate) node: NodeId,
    /// When the holder's uninterrupted possession of the key began.
    pub(crate) since: Time,
    /// The number of grants, of all holders, that were registered since that possession began; `u16::MAX`: too many.
    pub(crate) grants_since_acquired: u16,
    /// The number of grants registered since this holder has had the key without a change by others.
    /// [`Entry::CHANGED_BY_OTHER`]: another holder has changed the key or is about to, under an update prepare or
    /// without asking this holder first.
    pub(crate) grants_since_other_change: u32,
    pub(crate) marks: u8,
}

impl Entry {
    pub(crate) const CHANGED_BY_OTHER: u32 = u32::MAX;
    /// An id above that of every registered grant.
    pub(crate) const ABOVE_ALL: GrantId = GrantId(u64::MAX);

    /// Bits of `marks`. The directory lease is shared.
    pub(crate) const SHARED: u8 = 1;
    /// The grant replaced an earlier one, which its holder may have.
    pub(crate) const REPLACES: u8 = 2;
    /// The holder was not found to have the right to list the directory: its recall carries no names.
    pub(crate) const WITHOUT_NAMES: u8 = 4;
    /// A write grant.
    pub(crate) const WRITE: u8 = 8;

    pub(crate) fn mode(&self) -> Mode {
        if self.is(Entry::WRITE) { Mode::Write } else { Mode::Read }
    }

    pub(crate) fn is(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    /// Carries over the history of the earlier grant that this one replaces.
    pub(crate) fn inherit(&mut self, earlier: &Entry) {
        let between = u32::try_from(self.id.0 - earlier.id.0).unwrap_or(u32::MAX);
        self.since = earlier.since;
        // A read request does not end a write grant, under which its holder may have changed facts locally.
        self.marks |= Entry::REPLACES | (earlier.marks & Entry::WRITE);
        // A holder with the right to list keeps it until the directory's permissions change, which recalls the grant.
        if !earlier.is(Entry::WITHOUT_NAMES) {
            self.marks &= !Entry::WITHOUT_NAMES;
        }
        self.grants_since_acquired =
            earlier.grants_since_acquired.saturating_add(u16::try_from(between).unwrap_or(u16::MAX));
        self.grants_since_other_change = match earlier.grants_since_other_change {
            // If the distance does not fit, a later grant than the earlier one's successor.
            Entry::CHANGED_BY_OTHER => between.min(Entry::CHANGED_BY_OTHER - 1) - 1,
            unbroken => unbroken.saturating_add(between).min(Entry::CHANGED_BY_OTHER - 1),
        };
    }

    /// The id of the grant since which its holder has had the key without a gap or a change by others; a later id if
    /// that was too long ago.
    pub(crate) fn held_exclusively_since(&self) -> GrantId {
        match self.grants_since_other_change {
            Entry::CHANGED_BY_OTHER => Entry::ABOVE_ALL,
            unbroken => GrantId(self.id.0 - u64::from(unbroken)),
        }
    }

    /// Whether its holder may have had a grant on the key when grant `until` was registered.
    pub(crate) fn may_predate(&self, until: GrantId) -> bool {
        self.grants_since_acquired == u16::MAX || self.id.0 - u64::from(self.grants_since_acquired) <= until.0
    }
}
