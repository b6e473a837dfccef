//! The clock of sessions and leases.

use nigh_types::Time;

/// `CLOCK_BOOTTIME`, which advances during suspend.
pub(crate) fn now() -> Time {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let part = |n: i64| u64::try_from(n).unwrap_or(0);
    Time(part(t.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(t.tv_nsec)))
}
