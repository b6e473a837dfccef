//! The clock of a mount. It includes suspend, so a lease that ended during suspend has ended.

use nigh_types::{Time, Timestamp};
use rustix::time::{ClockId, clock_gettime};

/// Returns the current time; never goes backwards.
pub(crate) type Clock = Box<dyn Fn() -> Time + Send + Sync>;

/// Current `CLOCK_BOOTTIME`.
#[must_use]
pub fn boot_time() -> Time {
    let now = clock_gettime(ClockId::Boottime);
    let secs = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
    Time(secs * 1_000_000_000 + nanos)
}

/// Wall-clock time.
#[must_use]
pub(crate) fn wall_time() -> Timestamp {
    let now = clock_gettime(ClockId::Realtime);
    Timestamp { secs: now.tv_sec, nanos: u32::try_from(now.tv_nsec).unwrap_or(0) }
}
