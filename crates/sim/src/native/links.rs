//! Connections: bytes arrive in order within a connection, in any order between connections, and may be cut at any
//! byte.

use crate::random::Dice;
use nigh_types::{Span, Time};
use std::collections::VecDeque;

/// Bytes in transit in one direction.
#[derive(Clone, Debug)]
pub(super) struct Pipe {
    latency: Span,
    /// Packets with their arrival times; `None`: the end of the stream.
    packets: VecDeque<(Time, Option<Vec<u8>>)>,
    latest: Time,
    /// No more packets are accepted.
    shut: bool,
}

/// One connection.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) client: usize,
    pub(super) up: Pipe,
    pub(super) down: Pipe,
}

impl Pipe {
    pub(super) fn new(latency: Span) -> Pipe {
        Pipe { latency, packets: VecDeque::new(), latest: Time(0), shut: false }
    }

    fn push(&mut self, now: Time, packet: Option<Vec<u8>>, delay: Span) {
        self.latest = self.latest.max(now.after(self.latency).after(delay));
        self.packets.push_back((self.latest, packet));
    }

    pub(super) fn send(&mut self, now: Time, bytes: &[u8]) {
        if !self.shut {
            self.push(now, Some(bytes.to_vec()), Span::ZERO);
        }
    }

    /// Sends a packet with one byte changed.
    pub(super) fn garble(&mut self, now: Time, bytes: &[u8], dice: &mut Dice) {
        let mut bytes = bytes.to_vec();
        let at = usize::try_from(dice.below(bytes.len() as u64)).unwrap_or(0);
        let random = u8::try_from(dice.below(256)).unwrap_or(0);
        bytes[at] = [b'/', b'.', random][usize::try_from(dice.below(3)).unwrap_or(0)];
        self.send(now, &bytes);
    }

    /// Closes the stream at its sender.
    pub(super) fn close(&mut self, now: Time) {
        if !std::mem::replace(&mut self.shut, true) {
            self.push(now, None, Span::ZERO);
        }
    }

    /// Breaks the stream: a prefix of the bytes in transit arrives, on time or later; the end arrives `delay` after
    /// it.
    pub(super) fn cut(&mut self, now: Time, dice: &mut Dice, delay: Span) {
        let all: u64 = self.packets.iter().flat_map(|(_, bytes)| bytes).map(|bytes| bytes.len() as u64).sum();
        let mut left = dice.below(all + 1);
        if self.packets.back().is_some_and(|(_, last)| last.is_none()) {
            self.packets.pop_back();
        }
        for (_, packet) in &mut self.packets {
            let bytes = packet.get_or_insert_default();
            let whole = bytes.len() as u64;
            bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            left = left.saturating_sub(whole);
        }
        if dice.below(2) == 0 {
            self.packets.iter_mut().for_each(|(due, _)| *due = due.after(delay));
        }
        self.latest = self.packets.back().map_or(self.latest, |(due, _)| *due);
        self.shut = true;
        self.push(now, None, delay);
    }

    pub(super) fn due(&self) -> Time {
        self.packets.front().map_or(Time::FAR, |(due, _)| *due)
    }

    /// Takes the packet that has arrived by now.
    pub(super) fn take(&mut self, now: Time) -> Option<Option<Vec<u8>>> {
        if self.due() <= now { self.packets.pop_front().map(|(_, packet)| packet) } else { None }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Returns the number of packets in transit, with the end.
    pub(super) fn len(&self) -> usize {
        self.packets.len()
    }

    pub(super) fn is_shut(&self) -> bool {
        self.shut
    }

    /// Returns the packets in transit; `None`: the end.
    pub(super) fn packets(&self) -> impl Iterator<Item = Option<&[u8]>> {
        self.packets.iter().map(|(_, packet)| packet.as_deref())
    }

    /// Loses all packets, but not the end.
    pub(super) fn lose(&mut self) {
        self.packets.retain(|(_, packet)| packet.is_none());
    }

    /// The other end has closed.
    pub(super) fn break_off(&mut self) {
        self.packets.clear();
        self.shut = true;
    }

    /// Returns whether the end has arrived.
    pub(super) fn is_over(&self) -> bool {
        self.shut && self.packets.is_empty()
    }
}
