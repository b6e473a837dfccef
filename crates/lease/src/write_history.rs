//! History of one client's own changes of a file's data.

use nigh_types::{DataVersion, Timestamp};
use std::collections::VecDeque;

/// The number of stretches of time that are remembered: each time a file's mtime is set back, a new stretch begins.
const MAX_STRETCHES: usize = 8;

/// Versions of a file's data that followed one another through changes of one client alone, up to the latest one
/// (docs/decisions/0008-leases.md, rule 12).
///
/// **Contract.** Call `handle_begin` before and `handle_end` after each change of that client, with the file's data
/// version then. All overlapping changes are the client's own: the caller keeps out changes by others.
#[derive(Clone, Debug, Default)]
pub struct WriteHistory {
    /// The data versions at the beginning and the end of each stretch.
    stretches: VecDeque<(DataVersion, DataVersion)>,
    in_progress: u32,
}

impl WriteHistory {
    /// Begins a change. `before` is evaluated only if no other change is in progress.
    pub fn handle_begin<E>(&mut self, before: impl FnOnce() -> Result<DataVersion, E>) -> Result<(), E> {
        if self.in_progress == 0 {
            let before = before()?;
            if self.stretches.back().is_none_or(|(_, end)| *end != before) {
                // Another client has changed the file.
                self.stretches.clear();
                self.stretches.push_back((before, before));
            }
        }
        self.in_progress += 1;
        Ok(())
    }

    /// Ends a change, whether it succeeded or failed. `after` is evaluated only for the last change in progress;
    /// `None`: the version is unknown, and the history is dropped.
    pub fn handle_end(&mut self, after: impl FnOnce() -> Option<DataVersion>) {
        self.in_progress = self.in_progress.saturating_sub(1);
        if self.in_progress > 0 {
            return;
        }
        match (after(), self.stretches.back_mut()) {
            (Some(after), Some((_, end))) if time(after) >= time(*end) => *end = after,
            (Some(after), Some(_)) => {
                self.stretches.push_back((after, after));
                if self.stretches.len() > MAX_STRETCHES {
                    self.stretches.pop_front();
                }
            }
            _ => self.stretches.clear(),
        }
    }

    /// Whether only this client has changed the data since version `then`; asked between begin and end. Versions are
    /// compared by mtime, which grows within a stretch; at the moment in which a stretch began only its first version
    /// counts.
    #[must_use]
    pub fn is_own_since(&self, then: DataVersion) -> bool {
        // The stretch that a change in progress continues has no end yet.
        let open = self.stretches.len().checked_sub(1).filter(|_| self.in_progress > 1);
        let within = |(nth, (first, end)): (usize, &(DataVersion, DataVersion))| {
            let ends_later = time(then) <= time(*end) || open == Some(nth);
            *first == then || time(*first) < time(then) && ends_later
        };
        self.stretches.iter().enumerate().any(within)
    }

    /// Extends the history back to `then`: it is known from elsewhere that only this client has changed the data since.
    /// Called between begin and end.
    pub fn handle_known_own_since(&mut self, then: DataVersion) {
        if let Some((first, _)) = self.stretches.front_mut()
            && time(then) < time(*first)
        {
            *first = then;
        }
    }
}

fn time(of: DataVersion) -> (i64, u32) {
    let Timestamp { secs, nanos } = of.mtime;
    (secs, nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: i64, size: u64) -> DataVersion {
        DataVersion { size, mtime: Timestamp { secs, nanos: 0 } }
    }

    fn change(own: &mut WriteHistory, before: DataVersion, after: DataVersion) {
        own.handle_begin(|| Ok::<_, ()>(before)).unwrap();
        own.handle_end(|| Some(after));
    }

    /// Whether a write based on version `then` may replace the file, which is at version `now`.
    fn may(own: &mut WriteHistory, then: DataVersion, now: DataVersion) -> bool {
        own.handle_begin(|| Ok::<_, ()>(now)).unwrap();
        let may = own.is_own_since(then);
        own.handle_end(|| Some(now));
        may
    }

    #[test]
    fn every_version_made_by_own_writes_is_recognised() {
        let mut own = WriteHistory::default();
        assert!(may(&mut own, at(1, 4), at(1, 4)), "nothing has happened");
        for second in 1..1000 {
            change(&mut own, at(second, 4), at(second + 1, 4));
        }
        for then in [1, 2, 500, 999, 1000] {
            assert!(may(&mut own, at(then, 4), at(1000, 4)), "{then}");
        }
        assert!(!may(&mut own, at(0, 4), at(1000, 4)), "earlier writes are unknown");
        assert!(!may(&mut own, at(1001, 4), at(1000, 4)), "nor what never was");
    }

    #[test]
    fn change_by_another_client_clears_write_history() {
        let mut own = WriteHistory::default();
        change(&mut own, at(1, 4), at(2, 4));
        assert!(!may(&mut own, at(2, 4), at(3, 4)));
        change(&mut own, at(3, 4), at(4, 4));
        assert!(!may(&mut own, at(2, 4), at(4, 4)));
        assert!(may(&mut own, at(3, 4), at(4, 4)));
        // At an equal mtime, the size distinguishes versions.
        assert!(!may(&mut own, at(4, 4), at(4, 5)));
        assert!(!may(&mut own, at(4, 4), at(4, 5)));
    }

    #[test]
    fn externally_known_version_extends_write_history() {
        let mut own = WriteHistory::default();
        change(&mut own, at(3, 4), at(4, 4));
        own.handle_begin(|| Ok::<_, ()>(at(4, 4))).unwrap();
        own.handle_known_own_since(at(1, 4));
        own.handle_end(|| Some(at(5, 4)));
        assert!(may(&mut own, at(1, 4), at(5, 4)));
        assert!(!may(&mut own, at(0, 4), at(5, 4)));
    }

    #[test]
    fn overlapping_own_changes_count_as_one_change() {
        let mut own = WriteHistory::default();
        own.handle_begin(|| Ok::<_, ()>(at(1, 4))).unwrap();
        own.handle_begin(|| Err("it is not looked at")).unwrap();
        assert!(own.is_own_since(at(1, 4)));
        assert!(own.is_own_since(at(2, 8)), "the first may have come so far");
        assert!(!own.is_own_since(at(0, 4)));
        own.handle_end(|| panic!("one is under way"));
        own.handle_end(|| Some(at(3, 8)));
        assert!(may(&mut own, at(2, 8), at(3, 8)));
    }

    #[test]
    fn mtime_set_back_begins_new_stretch_of_write_history() {
        let mut own = WriteHistory::default();
        change(&mut own, at(10, 4), at(12, 4));
        change(&mut own, at(12, 4), at(5, 4));
        change(&mut own, at(5, 4), at(20, 4));
        for then in [5, 6, 10, 11, 20] {
            assert!(may(&mut own, at(then, 4), at(20, 4)), "{then}");
        }
        assert!(!may(&mut own, at(4, 4), at(20, 4)));
        for second in (0..20).rev() {
            change(&mut own, at(second + 1, 4), at(second, 4));
        }
        assert!(own.stretches.len() <= MAX_STRETCHES);
    }

    #[test]
    fn unknown_version_after_change_clears_write_history() {
        let mut own = WriteHistory::default();
        own.handle_begin(|| Ok::<_, ()>(at(1, 4))).unwrap();
        own.handle_end(|| None);
        assert!(!may(&mut own, at(1, 4), at(2, 4)));
    }
}
