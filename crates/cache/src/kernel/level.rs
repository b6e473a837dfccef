//! Upper bounds of the kernel's timeouts from grant and notification level
//! (docs/decisions/0006-notification-levels.md). `entry_reply` and `negative_reply` in `facts/inodes.rs` shorten them.

use crate::grants::LiveGrant;
use nigh_types::{Bug, Span, Time, planted};

/// Notification level: what can be invalidated in the kernel before its timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotifyLevel {
    /// Everything.
    All,
    /// Everything but all dentries at once.
    NoEpoch,
    /// Nothing.
    None,
}

/// Longer than any mount; FUSE adds it to the present in jiffies, so it must not overflow.
const LONG: Span = Span::from_secs(365 * 24 * 3600);

impl NotifyLevel {
    /// Returns the attribute timeout under `held`.
    pub(crate) fn attr_timeout(self, held: &LiveGrant, now: Time) -> Span {
        match self {
            _ if held.stale => Span::ZERO,
            NotifyLevel::None => Span::ZERO,
            _ if planted(Bug::OutlivesGrant) => LONG,
            NotifyLevel::All | NotifyLevel::NoEpoch => held.deadline.since(now).min(LONG),
        }
    }

    /// Returns the entry timeout of a name that exists. At `NoEpoch`, invalidating one dentry may wait for a local
    /// request in that directory, and that request for another client that waits in the same way. So there the timeout
    /// is 0 under a grant that can be recalled, shared or not. (Exclusive grants are no way out: a rename holds two
    /// directories, and two clients may each hold one that the other changes.)
    pub(crate) fn entry_timeout(self, held: &LiveGrant, now: Time) -> Span {
        if self.gives_dentries(held) { self.attr_timeout(held, now) } else { Span::ZERO }
    }

    /// Returns whether the kernel gets dentries with a timeout under such a grant; they are invalidated when it ends.
    pub(crate) fn gives_dentries(self, held: &LiveGrant) -> bool {
        match self {
            NotifyLevel::All => true,
            NotifyLevel::NoEpoch => !(held.recallable || held.shared),
            NotifyLevel::None => false,
        }
    }

    /// Returns the timeout of a negative dentry. Without epochs it is given only under grants that end by themselves,
    /// as for positive dentries.
    pub(crate) fn negative_timeout(self, held: &LiveGrant, now: Time) -> Span {
        match self {
            NotifyLevel::NoEpoch if held.recallable => Span::ZERO,
            _ => self.attr_timeout(held, now),
        }
    }

    /// Returns whether the kernel takes notifications, so that pages may outlive an open file and listings be kept.
    pub(crate) fn can_notify(self) -> bool {
        self != NotifyLevel::None
    }
}
