//! Traffic counters of one direction.

use std::time::{Duration, Instant};

/// Bytes, and flights: a flight is a burst after silence.
#[derive(Default)]
pub struct Direction {
    pub bytes: u64,
    pub flights: u64,
    last: Option<Instant>,
}

impl Direction {
    /// Counts received bytes. After `silence` without any, they begin a new flight.
    pub fn arrived(&mut self, now: Instant, bytes: u64, silence: Duration) {
        self.bytes += bytes;
        if self.last.is_none_or(|last| now.duration_since(last) >= silence) {
            self.flights += 1;
        }
        self.last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_after_silence_counts_as_flight() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut direction = Direction::default();
        for at in [0, 1, 2, 20, 21, 60] {
            direction.arrived(start + ms(at), 100, ms(5));
        }
        assert_eq!((direction.bytes, direction.flights), (600, 3));
    }
}
