//! Conformance suite for all kinds of remotes: what each call replies, and how it fails.
//!
//! A kind supplies a [`Harness`]. The suite holds for a real Linux filesystem as well as for the in-memory
//! [`crate::model_fs`]. A remote need not hand out grants; those that it hands out must concern the nodes of the call.

mod caller;
mod files;
mod links;
mod listing;
mod locks;
mod names;
mod node_refs;
mod prefetch;
mod renames;
mod xattrs;

use crate::{Event, Remote};
use caller::Caller;
use nigh_types::{Credentials, Time};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The suite's interface to a kind of remote.
pub trait Harness {
    /// A remote that is attached, or about to be, to an empty export of its own.
    fn attach(&mut self) -> Box<dyn Remote>;

    /// The current time, as the remote is to see it.
    fn now(&self) -> Time;

    /// Drains the remote's output, carrying its bytes and time, until there is an event or nothing more can come.
    /// Returns all events found on the way, in order; none if nothing more can come.
    fn pump(&mut self, remote: &mut dyn Remote) -> Vec<Event>;

    /// Credentials of the calls.
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
        prefetch::CASES,
        xattrs::CASES,
        node_refs::CASES,
        locks::CASES,
    ];
    rooms.concat().into_iter().map(|(name, run)| Case { name, run }).collect()
}

type Named = (&'static str, fn(&mut Caller<'_>));

/// Result of a run.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    pub passed: Vec<&'static str>,
    /// With the failure message.
    pub failed: Vec<(&'static str, String)>,
    /// Cases whose feature the harness's filesystem lacks.
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

/// Runs every case and panics with the list of failed ones.
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
