//! The counted stream of a session. It is resumed when a new connection replaces another one, so that each frame takes
//! effect once and in order (docs/decisions/0009-sessions-over-connections.md).

use crate::ProtocolError;
use crate::frame::FrameBytes;
use std::collections::VecDeque;

/// The window: the most bytes sent on a connection and not confirmed.
pub const WINDOW_BYTES: u64 = 8 << 20;
/// Frames and bytes that arrive before they are confirmed to the peer.
const FRAMES_PER_CONFIRMATION: u64 = 64;
const BYTES_PER_CONFIRMATION: u64 = 1 << 20;

/// Frames for the peer, kept until it has confirmed them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outgoing {
    /// The number that the peer has confirmed.
    confirmed: u64,
    /// The frames after those, in order.
    frames: VecDeque<KeptFrame>,
    /// How many of `frames` were sent on this connection, and their bytes.
    put: u64,
    put_bytes: u64,
    /// How many of `frames` were sent on any connection.
    sent: u64,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct KeptFrame {
    frame: FrameBytes,
    /// The sequence of the named operation that it replies to.
    replies_to: Option<u64>,
}

impl Outgoing {
    pub(crate) fn push(&mut self, frame: FrameBytes) {
        self.push_reply(frame, None);
    }

    /// Adds the reply to the named operation of that sequence.
    pub(crate) fn push_reply(&mut self, frame: FrameBytes, answers: Option<u64>) {
        self.bytes += frame.len() as u64;
        self.frames.push_back(KeptFrame { frame, replies_to: answers });
    }

    /// Returns the next frame for this connection, if there is one and the window has room.
    pub(crate) fn poll(&mut self) -> Option<FrameBytes> {
        if self.put_bytes >= WINDOW_BYTES {
            return None;
        }
        let KeptFrame { frame, .. } = self.frames.get(usize::try_from(self.put).ok()?)?;
        self.put += 1;
        self.put_bytes += frame.len() as u64;
        self.sent = self.sent.max(self.put);
        Some(FrameBytes::clone(frame))
    }

    /// Takes the peer's count of received frames.
    ///
    /// # Errors
    /// The count is too high, or lower than an earlier one.
    pub(crate) fn confirm(&mut self, count: u64) -> Result<(), ProtocolError> {
        let arrived = self.arrived(count, self.put)?;
        self.put -= arrived;
        self.put_bytes -= self.drop_first(arrived);
        Ok(())
    }

    /// Begins a new connection, whose peer has received `count` frames: all others are sent again.
    ///
    /// # Errors
    /// As for [`Outgoing::confirm`].
    pub(crate) fn resume(&mut self, count: u64) -> Result<(), ProtocolError> {
        let arrived = self.arrived(count, self.sent)?;
        self.drop_first(arrived);
        (self.put, self.put_bytes) = (0, 0);
        Ok(())
    }

    /// Bytes of kept frames.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that wait for room in the window.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.bytes - self.put_bytes
    }

    /// Replies to named operations that the peer is not known to have received, by their sequence.
    pub(crate) fn unconfirmed_replies(&self) -> impl Iterator<Item = (u64, &FrameBytes)> {
        self.frames.iter().filter_map(|kept| Some((kept.replies_to?, &kept.frame)))
    }

    fn arrived(&self, count: u64, most: u64) -> Result<u64, ProtocolError> {
        let (least, most) = (self.confirmed, self.confirmed + most);
        if (least..=most).contains(&count) {
            Ok(count - least)
        } else {
            Err(ProtocolError::Count { claimed: count, least, most })
        }
    }

    /// Removes the first `count` frames, and returns their bytes.
    fn drop_first(&mut self, count: u64) -> u64 {
        let count_here = usize::try_from(count).expect("no more than are kept");
        let bytes = self.frames.drain(..count_here).map(|kept| kept.frame.len() as u64).sum();
        self.confirmed += count;
        self.sent -= count;
        self.bytes -= bytes;
        bytes
    }
}

/// Count of frames that arrived, and how many of them were not yet confirmed to the peer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Incoming {
    count: u64,
    unconfirmed_frames: u64,
    unconfirmed_bytes: u64,
}

impl Incoming {
    /// Counts one frame.
    pub(crate) fn take(&mut self, bytes: u64) {
        self.count += 1;
        self.unconfirmed_frames += 1;
        self.unconfirmed_bytes += bytes;
    }

    /// Whether the count is to be sent now.
    pub(crate) fn is_due(&self) -> bool {
        self.unconfirmed_frames >= FRAMES_PER_CONFIRMATION || self.unconfirmed_bytes >= BYTES_PER_CONFIRMATION
    }

    /// Returns the count, to be sent to the peer.
    pub(crate) fn take_count(&mut self) -> u64 {
        (self.unconfirmed_frames, self.unconfirmed_bytes) = (0, 0);
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn frame(length: u64) -> FrameBytes {
        Arc::new(vec![0; usize::try_from(length).unwrap()])
    }

    fn put(outgoing: &mut Outgoing) -> u64 {
        std::iter::from_fn(|| outgoing.poll()).count() as u64
    }

    #[test]
    fn unconfirmed_frames_are_sent_again_on_next_connection() {
        let mut outgoing = Outgoing::default();
        (0..5).for_each(|n| outgoing.push(frame(n)));
        assert_eq!(put(&mut outgoing), 5);
        outgoing.confirm(2).unwrap();
        outgoing.confirm(2).unwrap();
        assert_eq!((put(&mut outgoing), outgoing.bytes()), (0, 9));
        outgoing.resume(3).unwrap();
        outgoing.push(frame(7));
        assert_eq!((put(&mut outgoing), outgoing.frames.len()), (3, 3));
        outgoing.resume(3).unwrap();
        outgoing.poll().unwrap();
        // It confirmed that on the earlier connection; on this one it cannot have more than one more.
        assert!(outgoing.confirm(6).is_err());
        outgoing.resume(6).unwrap();
        assert_eq!((put(&mut outgoing), outgoing.bytes()), (0, 0));
    }

    #[test]
    fn impossible_confirmation_counts_are_refused() {
        let mut outgoing = Outgoing::default();
        (0..3).for_each(|_| outgoing.push(frame(1)));
        outgoing.poll().unwrap();
        outgoing.poll().unwrap();
        outgoing.confirm(1).unwrap();
        let impossible = |claimed| Err(ProtocolError::Count { claimed, least: 1, most: 2 });
        for claimed in [0, 3, u64::MAX] {
            assert_eq!(outgoing.confirm(claimed), impossible(claimed));
            assert_eq!(outgoing.resume(claimed), impossible(claimed));
        }
        assert_eq!(outgoing.frames.len(), 2);
    }

    #[test]
    fn frames_beyond_window_wait_for_confirmation() {
        let mut outgoing = Outgoing::default();
        (0..5).for_each(|_| outgoing.push(frame(3 << 20)));
        assert_eq!(put(&mut outgoing), 3);
        assert_eq!(outgoing.waiting_bytes(), 6 << 20);
        outgoing.confirm(1).unwrap();
        assert_eq!(put(&mut outgoing), 1);
        outgoing.resume(1).unwrap();
        assert_eq!(put(&mut outgoing), 3, "the window is the connection's");
    }

    #[test]
    fn confirmation_is_due_after_64_frames_or_one_mebibyte() {
        let mut incoming = Incoming::default();
        (0..63).for_each(|_| incoming.take(10));
        assert!(!incoming.is_due());
        incoming.take(10);
        assert!(incoming.is_due());
        assert_eq!(incoming.take_count(), 64);
        assert!(!incoming.is_due());
        incoming.take(1 << 20);
        assert!(incoming.is_due());
        assert_eq!(incoming.take_count(), 65);
    }
}
