//! What the kernel may believe, and for how long: one place that looks at grant and level.
//! See docs/decisions/0006-notification-levels.md.

use crate::grants::Held;
use nigh_types::{Bug, Span, Time, planted};

/// What can be taken back from the kernel before its timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// Everything.
    All,
    /// Everything but all names at once.
    NoEpoch,
    /// Nothing.
    None,
}

/// Longer than any mount; FUSE adds it to the present in jiffies, so it must not overflow.
const LONG: Span = Span::from_secs(365 * 24 * 3600);

impl Level {
    /// How long the kernel may hold attributes under `held`.
    pub(crate) fn validity(self, held: &Held, now: Time) -> Span {
        match self {
            _ if held.stale => Span::ZERO,
            Level::None => Span::ZERO,
            _ if planted(Bug::OutlivesGrant) => LONG,
            Level::All | Level::NoEpoch => held.deadline.since(now).min(LONG),
        }
    }

    /// How long it may hold a name that exists. Where names cannot be dropped all at once, dropping one may wait
    /// for an own request in that directory, which may wait for another client that waits in the same way: so
    /// under a grant that can be recalled there is nothing to drop. (Exclusive grants are no way out: a rename
    /// holds two directories, and two clients may each hold one that the other changes.)
    pub(crate) fn name_validity(self, held: &Held, now: Time) -> Span {
        if self.drops_names(held) { self.validity(held, now) } else { Span::ZERO }
    }

    /// Whether the kernel holds names under such a grant, and must be told when it ends.
    pub(crate) fn drops_names(self, held: &Held) -> bool {
        match self {
            Level::All => true,
            Level::NoEpoch => !(held.recallable || held.shared),
            Level::None => false,
        }
    }

    /// How long it may believe that a name does not exist. Such names are not remembered one by one,
    /// so without epochs they are given only under grants that end by themselves.
    pub(crate) fn missing_validity(self, held: &Held, now: Time) -> Span {
        match self {
            Level::NoEpoch if held.recallable => Span::ZERO,
            _ => self.validity(held, now),
        }
    }

    /// Whether pages may outlive an open file, and listings be kept.
    pub(crate) fn may_keep_pages(self) -> bool {
        self != Level::None
    }
}
