//! Estimate of the bytes that fill a link: its rate times its round-trip time, from the replies to reads.
//!
//! As in BBR (draft-ietf-ccwg-bbr, sections 4.5.1 and 4.5.2) a sample of the rate is the number of bytes that came while
//! one read was in flight, by the time that it was. The estimate is the largest recent sample, since a reader that is
//! slower than the link only makes samples smaller. More bytes in flight than rate times round-trip time wait in a queue
//! in front of everything else that the session sends.

use nigh_types::{Span, Time};

/// A sample of the rate counts for this time.
const RATE_LIFE: Span = Span::from_millis(4_000);
/// A round-trip time counts for this time: a route may change.
const SHORTEST_LIFE: Span = Span::from_secs(60);
/// Least window, in bytes: four chunks keep a link without latency busy. On a slow link it is what takes half a second.
const LEAST: u64 = 4 * crate::CHUNK;
/// A reply that took this many quarters of the shortest round-trip time has waited in a queue; the window alone accounts for
/// six.
const LONG_IN_QUARTERS: u64 = 7;
const NANOS: u128 = 1_000_000_000;

/// What is recorded of a read when it is sent.
#[derive(Clone, Copy, Debug)]
pub struct SendMark {
    at: Time,
    /// Bytes that had come by then.
    delivered: u64,
}

/// Rate and round-trip time of one session's link.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkRate {
    delivered: u64,
    /// Bytes per second, and the time of the sample.
    rate: Option<(u64, Time)>,
    /// Shortest time until a reply, and the time of the sample.
    shortest: Option<(Span, Time)>,
}

impl LinkRate {
    /// Returns the mark of a read that is sent now.
    #[must_use]
    pub fn mark(&self, now: Time) -> SendMark {
        SendMark { at: now, delivered: self.delivered }
    }

    /// Records the reply to a read, which brought `bytes`.
    pub fn note_reply(&mut self, now: Time, mark: SendMark, bytes: u64) {
        self.delivered += bytes;
        let took = now.since(mark.at);
        if took == Span::ZERO {
            return;
        }
        if self.shortest.is_none_or(|(span, at)| took <= span || now >= at.after(SHORTEST_LIFE)) {
            self.shortest = Some((took, now));
        }
        let rate = u128::from(self.delivered - mark.delivered) * NANOS / u128::from(took.0);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        if self.rate.is_none_or(|(best, at)| rate >= best || now >= at.after(RATE_LIFE)) {
            self.rate = Some((rate, now));
        } else if self.shortest.is_some_and(|(shortest, _)| took.0 > shortest.0 / 4 * LONG_IN_QUARTERS) {
            self.lower_rate(rate, bytes);
        }
    }

    /// Lowers the estimate towards a sample by half for each window of replies: a reply that took so long has waited behind
    /// more than the link holds. A sample is too large where replies that had come before were handled late, all at once.
    fn lower_rate(&mut self, sample: u64, bytes: u64) {
        let window = self.window();
        let Some((best, _)) = &mut self.rate else { return };
        let share = u128::from(*best / 2) * u128::from(bytes.min(window)) / u128::from(window);
        *best = best.saturating_sub(u64::try_from(share).unwrap_or(u64::MAX)).max(sample);
    }

    /// Returns how many bytes to have in flight: one and a half times what the link holds, so that the estimate of its rate
    /// can grow to what the link carries; at most what takes a second. Of these, a third waits in front of the link, for
    /// half a round-trip time.
    #[must_use]
    pub fn window(&self) -> u64 {
        let (Some((rate, _)), Some((shortest, _))) = (self.rate, self.shortest) else { return LEAST };
        let held = u128::from(rate) * u128::from(shortest.0) / NANOS;
        // On a slow link the time of a reply is that of its bytes.
        let window = u64::try_from(held.saturating_mul(3) / 2).unwrap_or(u64::MAX).min(rate);
        window.max((rate / 2).clamp(crate::CHUNK, LEAST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const CHUNK: u64 = crate::CHUNK;

    /// Runs a link of this rate (bytes per second) and round-trip time for a while, with the window full at all times.
    /// Returns the last window and the longest time that a chunk waited beside the round-trip time.
    fn run(rate: u64, round_trip: Span, chunks: u32) -> (u64, Span) {
        let (mut link, mut now, mut free) = (LinkRate::default(), Time(1), Time(0));
        let mut in_flight: VecDeque<(Time, SendMark, Span)> = VecDeque::new();
        let (mut left, mut longest) = (chunks, Span::ZERO);
        while left > 0 || !in_flight.is_empty() {
            while left > 0 && (in_flight.len() as u64 + 1) * CHUNK <= link.window() {
                let begun = now.after(round_trip).max(free);
                let waited = begun.since(now.after(round_trip));
                free = begun.after(Span(CHUNK * 1_000_000_000 / rate));
                in_flight.push_back((free, link.mark(now), waited));
                left -= 1;
            }
            let (at, mark, waited) = in_flight.pop_front().unwrap();
            now = at;
            link.note_reply(now, mark, CHUNK);
            longest = if left < chunks / 2 { longest.max(waited) } else { longest };
        }
        (link.window(), longest)
    }

    #[test]
    fn window_grows_to_more_than_the_link_holds_and_not_further() {
        for millis in [10, 50] {
            let (rate, round_trip) = (125_000_000, Span::from_millis(millis));
            let (window, waited) = run(rate, round_trip, 4_000);
            let holds = rate * millis / 1_000;
            assert!((holds * 3 / 2..holds * 5 / 2).contains(&window), "{millis} ms: {window} of {holds}");
            assert!(waited.as_millis() <= millis + 4, "{millis} ms: {} ms", waited.as_millis());
        }
    }

    /// A client that handles replies every 9 ms only, all at once, as a busy machine makes it do, and was idle before.
    #[test]
    fn replies_that_are_handled_late_leave_the_window_near_what_the_link_holds() {
        let (rate, round_trip, pause) = (125_000_000, Span::from_millis(10), Span::from_millis(9));
        let (mut link, mut now, mut free) = (LinkRate::default(), Time(1), Time(0));
        let mut in_flight: VecDeque<(Time, SendMark)> = VecDeque::new();
        let mut windows = Vec::new();
        for turn in 0..2_000 {
            while in_flight.front().is_some_and(|(at, _)| *at <= now) {
                let (_, mark) = in_flight.pop_front().unwrap();
                link.note_reply(now, mark, CHUNK);
            }
            while (in_flight.len() as u64 + 1) * CHUNK <= link.window() {
                free = now.after(round_trip).max(free).after(Span(CHUNK * 1_000_000_000 / rate));
                in_flight.push_back((free, link.mark(now)));
            }
            windows.push(link.window());
            let is_idle = turn < 100 || turn % 50 == 0;
            now = now.after(if is_idle { Span::from_millis(1) } else { pause });
        }
        let mean = windows[500..].iter().sum::<u64>() / (windows.len() as u64 - 500);
        let holds = rate / 100;
        assert!((holds..holds * 3 / 2).contains(&mean), "{mean} of {holds}");
    }

    #[test]
    fn window_of_a_slow_link_is_one_chunk() {
        let (window, _) = run(125_000, Span::from_millis(10), 40);
        assert_eq!(window, CHUNK);
    }

    #[test]
    fn link_without_latency_has_the_least_window() {
        let mut link = LinkRate::default();
        assert_eq!(link.window(), LEAST);
        let mark = link.mark(Time(5));
        link.note_reply(Time(5), mark, CHUNK);
        assert_eq!(link.window(), LEAST, "no time passed");
    }
}
