//! Bugs that are planted by hand, so that the tests of the invariants are seen to notice them. Decision 0016.
//!
//! Only with the feature `planted`, which no manifest may ask for and no build without debug assertions can have.

#[cfg(all(feature = "planted", not(debug_assertions)))]
compile_error!(
    "the feature `planted` is for tests: build it with debug assertions, as the profile `sim` does"
);

/// What is done wrongly. [`Bug::name`] begins with the number of the invariant (ARCHITECTURE.md) that it breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// A name whose answer brings no grant is kept under one that is made up.
    KeepsUngranted,
    /// The kernel may believe what it is told for long, whenever the grant ends.
    OutlivesGrant,
    /// A recall is acknowledged before the kernel was told.
    AcknowledgesFirst,
    /// A recall does not taint the answers that it overtakes.
    ForgetsRecalls,
    /// An answer carries grants that do not stand any more.
    CarriesWhatEnded,
    /// The kernel is asked to drop a name, and waited for without bound.
    WaitsForName,
    /// A store that an acknowledgement waits for waits for that acknowledgement.
    WaitsForItself,
    /// A silent holder is fenced after half its term.
    FencesEarly,
    /// `..` and what has a `/` in it are names.
    TakesAnyName,
}

impl Bug {
    pub const ALL: [Bug; 9] = [
        Bug::KeepsUngranted,
        Bug::OutlivesGrant,
        Bug::AcknowledgesFirst,
        Bug::ForgetsRecalls,
        Bug::CarriesWhatEnded,
        Bug::WaitsForName,
        Bug::WaitsForItself,
        Bug::FencesEarly,
        Bug::TakesAnyName,
    ];

    /// What people call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Bug::KeepsUngranted => "1",
            Bug::OutlivesGrant => "2",
            Bug::AcknowledgesFirst => "3",
            Bug::ForgetsRecalls => "4",
            Bug::CarriesWhatEnded => "4s",
            Bug::WaitsForName => "5",
            Bug::WaitsForItself => "6",
            Bug::FencesEarly => "7",
            Bug::TakesAnyName => "9",
        }
    }

    /// The bug that people call so.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Bug> {
        Bug::ALL.into_iter().find(|bug| bug.name() == name)
    }
}

/// From now on this process has these bugs and no others. False: this build can have none.
#[must_use]
pub fn plant(bugs: &[Bug]) -> bool {
    set::plant(bugs)
}

#[cfg(not(feature = "planted"))]
mod set {
    use super::Bug;

    pub(super) fn plant(_: &[Bug]) -> bool {
        false
    }

    /// Whether this process has that bug.
    #[inline]
    #[must_use]
    pub const fn planted(_: Bug) -> bool {
        false
    }
}

#[cfg(feature = "planted")]
mod set {
    use super::Bug;
    use std::sync::atomic::{AtomicU32, Ordering};

    static PLANTED: AtomicU32 = AtomicU32::new(0);

    pub(super) fn plant(bugs: &[Bug]) -> bool {
        PLANTED.store(bugs.iter().fold(0, |bits, bug| bits | bit(*bug)), Ordering::SeqCst);
        true
    }

    /// Whether this process has that bug.
    #[must_use]
    pub fn planted(bug: Bug) -> bool {
        PLANTED.load(Ordering::SeqCst) & bit(bug) != 0
    }

    fn bit(bug: Bug) -> u32 {
        1 << bug as u32
    }
}

pub use set::planted;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_has_the_bugs_that_are_planted_in_it_and_only_if_it_is_made_for_that() {
        let planted_now = || Bug::ALL.into_iter().filter(|bug| planted(*bug)).collect::<Vec<Bug>>();
        let possible = cfg!(feature = "planted");
        assert_eq!(planted_now(), []);
        assert_eq!(plant(&[Bug::ForgetsRecalls, Bug::TakesAnyName]), possible);
        assert_eq!(planted_now().len(), if possible { 2 } else { 0 });
        assert_eq!(plant(&[]), possible);
        assert_eq!(planted_now(), []);
        assert!(Bug::ALL.into_iter().all(|bug| Bug::of_name(bug.name()) == Some(bug)));
    }
}
