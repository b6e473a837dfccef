//! Fault injection: deliberate bugs that show that the tests of the invariants notice violations. Decision 0016.
//!
//! Only with the feature `planted`, which no manifest may enable and no build without debug assertions can have.

#[cfg(all(feature = "planted", not(debug_assertions)))]
compile_error!(
    "the feature `planted` is for tests: build it with debug assertions, as the profile `sim` does"
);

/// An injectable bug. [`Bug::name`] begins with the number of the invariant (ARCHITECTURE.md) that it breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// The cache keeps a name from a reply without a grant, under a made-up grant.
    KeepsUngranted,
    /// Kernel timeouts are long, regardless of when the grant ends.
    OutlivesGrant,
    /// The client acknowledges a recall before the kernel is invalidated.
    AcknowledgesFirst,
    /// A recall does not taint the replies that it overtakes.
    ForgetsRecalls,
    /// A recall of a file's data leaves its contents in the cache.
    KeepsContents,
    /// A reply carries grants that have ended.
    CarriesWhatEnded,
    /// The client waits without bound for the kernel's invalidation of a name.
    WaitsForName,
    /// A write-back that an acknowledgement waits for waits for this acknowledgement.
    WaitsForItself,
    /// The server fences a silent holder after half its term.
    FencesEarly,
    /// `..` and strings with `/` are accepted as names.
    TakesAnyName,
}

impl Bug {
    pub const ALL: [Bug; 10] = [
        Bug::KeepsUngranted,
        Bug::OutlivesGrant,
        Bug::AcknowledgesFirst,
        Bug::ForgetsRecalls,
        Bug::KeepsContents,
        Bug::CarriesWhatEnded,
        Bug::WaitsForName,
        Bug::WaitsForItself,
        Bug::FencesEarly,
        Bug::TakesAnyName,
    ];

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Bug::KeepsUngranted => "1",
            Bug::OutlivesGrant => "2",
            Bug::AcknowledgesFirst => "3",
            Bug::ForgetsRecalls => "4",
            Bug::KeepsContents => "3c",
            Bug::CarriesWhatEnded => "4s",
            Bug::WaitsForName => "5",
            Bug::WaitsForItself => "6",
            Bug::FencesEarly => "7",
            Bug::TakesAnyName => "9",
        }
    }

    /// The bug with this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Bug> {
        Bug::ALL.into_iter().find(|bug| bug.name() == name)
    }
}

/// Sets the bugs of this process. Returns false in a build without the feature.
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

    /// Whether this process has the bug.
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

    /// Whether this process has the bug.
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
    fn injected_bugs_are_active_only_in_builds_with_fault_injection() {
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
