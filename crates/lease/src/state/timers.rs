//! Timers of the lease table: at most one for each holder, key and write-back, ordered by time.

use crate::types::{ChangeId, Holder, LeaseKey, LeaseReason};
use nigh_types::Time;
use std::collections::BTreeMap;

/// The owner of a timer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Due {
    Holder(Holder),
    Key(LeaseKey),
    WriteBack(ChangeId),
}

#[derive(Clone, Default, Debug)]
pub(crate) struct Timers {
    moments: BTreeMap<(Time, Due), LeaseReason>,
}

/// The armed time of one timer; kept with its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Armed(Option<Time>);

impl Armed {
    /// Notes that [`Timers::pop`] removed this timer.
    pub(crate) fn fired(&mut self) {
        self.0 = None;
    }

    pub(crate) fn is_no_later_than(self, moment: Time) -> bool {
        self.0.is_some_and(|at| at <= moment)
    }
}

impl Timers {
    /// Arms the timer for `moment` in place of the armed time. `Time::FAR`: disarms it.
    pub(crate) fn arm(&mut self, armed: &mut Armed, due: Due, (moment, reason): (Time, LeaseReason)) {
        let new = (moment != Time::FAR).then_some(moment);
        if armed.0 != new {
            self.disarm(*armed, due);
            armed.0 = new;
        }
        if let Some(at) = new {
            self.moments.insert((at, due), reason);
        }
    }

    pub(crate) fn disarm(&mut self, armed: Armed, due: Due) {
        if let Some(at) = armed.0 {
            let was = self.moments.remove(&(at, due));
            assert!(was.is_some(), "a moment that is set stands in the order");
        }
    }

    /// Removes and returns the first timer that is due.
    pub(crate) fn pop(&mut self, now: Time) -> Option<Due> {
        let first = self.moments.first_entry().filter(|first| first.key().0 <= now)?;
        let (_, due) = *first.key();
        first.remove();
        Some(due)
    }

    pub(crate) fn next(&self) -> (Time, LeaseReason) {
        match self.moments.first_key_value() {
            Some(((moment, _), reason)) => (*moment, *reason),
            None => (Time::FAR, LeaseReason::Idle),
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.moments.is_empty()
    }
}
