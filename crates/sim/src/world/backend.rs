//! What stands behind the caches of a world.

use nigh_remote::Remote;
use nigh_remote::fake::{Control, Fake, FakeServer};
use nigh_remote::tree::Tree;
use nigh_types::Time;

/// A server with its clients' ends. Moments are the world's but for inputs and timeouts of [`Backend::Remote`], which
/// go by the clock of their client.
pub trait Backend {
    /// One client's end of its session.
    type Remote: Remote + Clone;
    /// Its knobs.
    type Control: Clone;

    /// Stores into maps that are written back go before the change that asked for them.
    const FLUSHES_FIRST: bool;
    /// What follows from an event is done before the next one comes, and not after all of that moment.
    const ONE_BY_ONE: bool;

    /// Looks at the tree.
    fn edit<R>(&self, edit: impl FnOnce(&mut Tree) -> R) -> R;

    /// Lets one thing happen that is due by now, so that the tree can be looked at between any two; whether there
    /// was one.
    fn step(&mut self, now: Time) -> bool;

    /// When the next thing is due of which no client's end says so.
    fn due(&self) -> Time;

    /// As [`FakeServer::written`].
    fn written(&self) -> Vec<(u64, u64)>;

    /// What a client's clock says.
    fn clock(&self, at: usize, now: Time) -> Time;

    /// The first moment at which a client's clock says that.
    fn moment(&self, at: usize, clock: Time) -> Time;

    /// Whether a client's process runs.
    fn runs(&self, at: usize) -> bool;

    /// Whether what reaches a client is what was said to it, and the other way round.
    fn is_faithful(&self, at: usize) -> bool;

    /// Whether a client has yet to acknowledge something of a file's data (or of its attributes): until then others' stores into maps may
    /// have been written back.
    fn owes(&self, at: usize, ino: u64, attributes: bool) -> bool;
}

impl Backend for FakeServer {
    type Remote = Fake;
    type Control = Control;

    const FLUSHES_FIRST: bool = false;
    const ONE_BY_ONE: bool = false;

    fn edit<R>(&self, edit: impl FnOnce(&mut Tree) -> R) -> R {
        FakeServer::edit(self, edit)
    }

    fn step(&mut self, now: Time) -> bool {
        FakeServer::step(self, now)
    }

    /// Its clients' ends say all.
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
