//! Time in the pure crates: a number that the owner of the clock passes in.

/// A moment, in nanoseconds of `CLOCK_BOOTTIME` (it goes on while the machine sleeps).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

/// A length of time in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Span(pub u64);

impl Time {
    /// Later than every other moment.
    pub const FAR: Time = Time(u64::MAX);

    /// The moment `span` after this one, saturating at `FAR`.
    #[must_use]
    pub fn after(self, span: Span) -> Time {
        Time(self.0.saturating_add(span.0))
    }

    /// The time from `earlier` until this moment; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Time) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Span {
    pub const ZERO: Span = Span(0);
    pub const FOREVER: Span = Span(u64::MAX);

    #[must_use]
    pub const fn from_millis(ms: u64) -> Span {
        Span(ms.saturating_mul(1_000_000))
    }

    #[must_use]
    pub const fn from_secs(secs: u64) -> Span {
        Span(secs.saturating_mul(1_000_000_000))
    }

    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }
}
