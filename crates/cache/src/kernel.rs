//! What the kernel may believe, and for how long: one place that looks at grant and level.
//! See docs/decisions/0006-notification-levels.md.

use crate::grants::Held;
use nigh_types::{Span, Time};

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
    /// How long the kernel may hold a name that exists, or attributes, under `held`.
    pub(crate) fn validity(self, held: &Held, now: Time) -> Span {
        match self {
            Level::None => Span::ZERO,
            Level::All | Level::NoEpoch => held.deadline.since(now).min(LONG),
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
