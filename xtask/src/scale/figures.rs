//! Summary of durations.

use std::fmt;
use std::time::Duration;

/// Durations of one kind.
#[derive(Default)]
pub struct Times(Vec<Duration>);

impl Times {
    pub fn note(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub fn count(&self) -> u64 {
        self.0.len() as u64
    }

    /// Returns the shortest time that at least `share` of a thousand do not exceed; zero if there are none.
    pub fn permille(&self, share: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * share).div_ceil(1000);
        sorted.get(at.saturating_sub(1)).copied().unwrap_or_default()
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |share| self.permille(share).as_secs_f64() * 1e3;
        write!(
            f,
            "{}: p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms",
            self.count(),
            ms(500),
            ms(990),
            ms(1000)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permille_is_time_that_share_does_not_exceed() {
        let mut times = Times::default();
        assert_eq!(times.permille(990), Duration::ZERO);
        (1..=200).rev().for_each(|ms| times.note(Duration::from_millis(ms)));
        let ms = |share| times.permille(share).as_millis();
        assert_eq!((ms(500), ms(990), ms(1000)), (100, 198, 200));
    }
}
