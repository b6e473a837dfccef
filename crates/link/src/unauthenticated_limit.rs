//! The limit on connections whose peer has not authenticated yet.

use parking_lot::Mutex;
use rustix::net::Shutdown;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Counter of unauthenticated connections. When the limit is reached the oldest connection is shut down, so a flood
/// of peers that never authenticate cannot keep out a peer that does.
#[derive(Clone)]
pub struct UnauthenticatedLimit(Arc<Inner>);

struct Inner {
    most: usize,
    waiting: Mutex<Unauthenticated>,
}

#[derive(Default)]
struct Unauthenticated {
    last: u64,
    /// Connections that were not shut down, oldest first.
    streams: BTreeMap<u64, OwnedFd>,
    /// Live tickets, including those of connections that were shut down.
    slots: usize,
}

/// One connection's share of the limit, held until the peer authenticates or the connection ends.
#[must_use]
pub struct UnauthenticatedSlot {
    lobby: UnauthenticatedLimit,
    number: u64,
}

impl UnauthenticatedSlot {
    /// Moves the connection to another limit, once its peer has passed this stage. `None`: the connection was shut
    /// down, or `to` has no room; the caller drops the stream.
    pub fn move_to(self, to: &UnauthenticatedLimit) -> Option<UnauthenticatedSlot> {
        let stream = self.lobby.0.waiting.lock().streams.remove(&self.number)?;
        to.enter(stream)
    }
}

impl UnauthenticatedLimit {
    /// Allows `most` connections, and up to twice as many while connections that were shut down still end.
    #[must_use]
    pub fn new(most: usize) -> UnauthenticatedLimit {
        UnauthenticatedLimit(Arc::new(Inner { most: most.max(1), waiting: Mutex::default() }))
    }

    /// Counts `stream`, a connected socket. `None`: there is no room, or the socket is broken; the caller drops the
    /// stream.
    pub fn enter(&self, stream: impl AsFd) -> Option<UnauthenticatedSlot> {
        let stream = stream.as_fd().try_clone_to_owned().ok()?;
        let mut waiting = self.0.waiting.lock();
        if waiting.slots >= self.0.most * 2 {
            return None;
        }
        if waiting.streams.len() >= self.0.most
            && let Some((_, oldest)) = waiting.streams.pop_first()
        {
            let _ = rustix::net::shutdown(&oldest, Shutdown::Both);
        }
        waiting.last += 1;
        waiting.slots += 1;
        let number = waiting.last;
        waiting.streams.insert(number, stream);
        Some(UnauthenticatedSlot { lobby: self.clone(), number })
    }

    /// Number of connections that have not authenticated yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.waiting.lock().slots
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for UnauthenticatedSlot {
    fn drop(&mut self) {
        let mut waiting = self.lobby.0.waiting.lock();
        waiting.slots -= 1;
        waiting.streams.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn authenticated_connection_frees_its_slot_and_counts_in_the_next_limit() {
        let (first, second) = (UnauthenticatedLimit::new(1), UnauthenticatedLimit::new(1));
        let (one, _one) = UnixStream::pair().unwrap();
        let (two, _two) = UnixStream::pair().unwrap();
        let passed = first.enter(&one).unwrap().move_to(&second).unwrap();
        assert_eq!((first.len(), second.len()), (0, 1));
        let early = first.enter(&one).unwrap();
        let late = first.enter(&two).unwrap();
        assert!(early.move_to(&second).is_none(), "it was asked to end");
        let late = late.move_to(&second).unwrap();
        drop((passed, late));
        assert!(first.is_empty() && second.is_empty());
    }
}
