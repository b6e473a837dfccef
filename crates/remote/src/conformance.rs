//! One suite for every kind of remote: what each call answers, and how it fails.
//!
//! A kind supplies a [`Harness`]; the suite holds for a real Linux filesystem as well as for the
//! in-memory [`crate::tree`]. A remote need not hand out grants, but none for another node than those
//! that the call is about.

mod ahead;
mod caller;
mod files;
mod links;
mod listing;
mod locks;
mod names;
mod places;
mod renames;
mod xattrs;

use crate::{Event, Remote};
use caller::Caller;
use nigh_types::{Credentials, Time};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What the suite needs of a kind of remote.
pub trait Harness {
    /// A remote that is attached, or about to be, to an export of its own that is empty.
    fn attach(&mut self) -> Box<dyn Remote>;

    /// The present, as the remote is to see it.
    fn now(&self) -> Time;

    /// Drains the remote's output, carrying its bytes and time, until there is an event or nothing
    /// more can come. All events found on the way are returned, in order; none: nothing more can come.
    fn pump(&mut self, remote: &mut dyn Remote) -> Vec<Event>;

    /// On whose behalf calls are made.
    fn credentials(&self) -> Credentials {
        Credentials::default()
    }

    /// Names of cases for which this export's filesystem lacks the feature.
    fn lacks(&self) -> &[&str] {
        &[]
    }
}

/// A named case of the suite.
pub struct Case {
    pub name: &'static str,
    run: fn(&mut Caller<'_>),
}

/// The cases, in the order in which they run.
#[must_use]
pub fn cases() -> Vec<Case> {
    let rooms = [
        names::CASES,
        files::CASES,
        links::CASES,
        renames::CASES,
        listing::CASES,
        ahead::CASES,
        xattrs::CASES,
        places::CASES,
        locks::CASES,
    ];
    rooms.concat().into_iter().map(|(name, run)| Case { name, run }).collect()
}

type Named = (&'static str, fn(&mut Caller<'_>));

/// How a run went.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    pub passed: Vec<&'static str>,
    /// With the message of what failed.
    pub failed: Vec<(&'static str, String)>,
    /// Because the harness said that its filesystem lacks the feature.
    pub skipped: Vec<&'static str>,
}

/// Runs every case, each on an export of its own.
pub fn run(harness: &mut dyn Harness) -> Report {
    let mut report = Report::default();
    for Case { name, run } in cases() {
        if harness.lacks().contains(&name) {
            report.skipped.push(name);
            continue;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&mut Caller::attach(harness))));
        match outcome {
            Ok(()) => report.passed.push(name),
            Err(panic) => report.failed.push((name, message(&*panic))),
        }
    }
    report
}

/// Runs every case and panics with the list of those that failed.
///
/// # Panics
/// If a case fails.
pub fn assert_conforms(harness: &mut dyn Harness) {
    let Report { passed, failed, .. } = run(harness);
    let lines: Vec<String> = failed.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    assert!(
        lines.is_empty(),
        "{} of {} cases failed:\n{}",
        lines.len(),
        passed.len() + lines.len(),
        lines.join("\n")
    );
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_owned()
}
