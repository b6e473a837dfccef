//! Client clocks, which run at other rates than the server's clock.

use nigh_types::Time;

/// The world's count per second; a clock counts more or fewer.
const WHOLE: u64 = 1_000;

/// One machine's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Its value when the world began.
    offset: u64,
    /// Its rate, in parts of [`WHOLE`].
    rate: u64,
}

impl Clock {
    /// A clock whose rate is `WHOLE - 15 + fast` (`fast` from 0 to 30), so that two clocks differ by at most 3 %.
    pub(super) fn new(offset: u64, fast: u64) -> Clock {
        Clock { offset, rate: WHOLE - 15 + fast.min(30) }
    }

    /// A clock equal to the world's.
    pub(super) fn exact() -> Clock {
        Clock { offset: 0, rate: WHOLE }
    }

    pub(super) fn at(self, now: Time) -> Time {
        let whole = u128::from(now.0) * u128::from(self.rate) / u128::from(WHOLE);
        Time(u64::try_from(whole).unwrap_or(u64::MAX).saturating_add(self.offset))
    }

    /// Returns the first time at which the clock shows `clock` or later.
    pub(super) fn when(self, clock: Time) -> Time {
        if clock == Time::FAR {
            return Time::FAR;
        }
        let counted = u128::from(clock.0.saturating_sub(self.offset));
        Time(u64::try_from((counted * u128::from(WHOLE)).div_ceil(u128::from(self.rate))).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_deadline_is_reached_at_its_converted_time() {
        for fast in 0..=30 {
            let clock = Clock::new(77, fast);
            for moment in [77, 78, 1_000_000_007, 123_456_789_012_345] {
                let when = clock.when(Time(moment));
                assert!(clock.at(when).0 >= moment, "{fast} {moment}");
                assert!(when.0 == 0 || clock.at(Time(when.0 - 1)).0 < moment, "{fast} {moment}");
            }
        }
        assert_eq!(Clock::new(5, 0).when(Time::FAR), Time::FAR);
    }
}
