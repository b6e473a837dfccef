//! The server behind the caches of a world.

use nigh_remote::Remote;
use nigh_remote::fake::{Control, Fake, FakeServer};
use nigh_remote::model_fs::ModelFs;
use nigh_types::Time;

/// A server with its clients' ends of sessions. Times are the world's, except for inputs and timeouts of
/// [`Backend::Remote`], which use the client's clock.
pub trait Backend {
    /// A client's end of its session.
    type Remote: Remote + Clone;
    /// Test controls of a client's session.
    type Control: Clone;

    /// Whether stores into maps are written back before the change that required the write-back.
    const FLUSHES_FIRST: bool;
    /// Whether each event's consequences complete before the next event, instead of after all events due at one time.
    const ONE_BY_ONE: bool;

    /// Accesses the tree.
    fn edit<R>(&self, edit: impl FnOnce(&mut ModelFs) -> R) -> R;

    /// Executes one event that is due by now, if any, so that the tree can be checked between any two events; returns
    /// whether there was one.
    fn step(&mut self, now: Time) -> bool;

    /// Returns when the next event is due that no client's end reports.
    fn due(&self) -> Time;

    /// As [`FakeServer::written`].
    fn written(&self) -> Vec<(u64, u64)>;

    /// Returns the time on a client's clock.
    fn clock(&self, at: usize, now: Time) -> Time;

    /// Returns the first time at which a client's clock shows `clock`.
    fn moment(&self, at: usize, clock: Time) -> Time;

    /// Returns whether a client's process runs.
    fn runs(&self, at: usize) -> bool;

    /// Returns whether the link delivers bytes to and from a client unchanged.
    fn is_faithful(&self, at: usize) -> bool;

    /// Returns whether a client owes an acknowledgement for a file's data (or for its attributes): until then other
    /// clients' stores into maps may have been written back.
    fn owes(&self, at: usize, ino: u64, attributes: bool) -> bool;
}

impl Backend for FakeServer {
    type Remote = Fake;
    type Control = Control;

    const FLUSHES_FIRST: bool = false;
    const ONE_BY_ONE: bool = false;

    fn edit<R>(&self, edit: impl FnOnce(&mut ModelFs) -> R) -> R {
        FakeServer::edit(self, edit)
    }

    fn step(&mut self, now: Time) -> bool {
        FakeServer::step(self, now)
    }

    /// Its clients' ends report all events.
    fn due(&self) -> Time {
        Time::FAR
    }

    fn written(&self) -> Vec<(u64, u64)> {
        FakeServer::written(self)
    }

    fn clock(&self, _at: usize, now: Time) -> Time {
        now
    }

    fn moment(&self, _at: usize, clock: Time) -> Time {
        clock
    }

    fn runs(&self, _at: usize) -> bool {
        true
    }

    fn is_faithful(&self, _at: usize) -> bool {
        true
    }

    fn owes(&self, _at: usize, _ino: u64, _attributes: bool) -> bool {
        false
    }
}
