//! Connections whose other end has proved nothing yet: how many there may be at a time.

use parking_lot::Mutex;
use rustix::net::Shutdown;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Counts them. When it is full the oldest has to go, so that many who never prove anything cannot keep
/// out one who does.
#[derive(Clone)]
pub struct Lobby(Arc<Inner>);

struct Inner {
    most: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    last: u64,
    /// Those that were not told to go, by age.
    streams: BTreeMap<u64, OwnedFd>,
    /// Tickets that are out, also of those that were told to go.
    tickets: usize,
}

/// Kept as long as nothing is proved.
#[must_use]
pub struct Ticket {
    lobby: Lobby,
    number: u64,
}

impl Ticket {
    /// It has proved what was waited for here, and waits in another lobby. `None`: it was told to go, or there is
    /// no room; its stream should be dropped.
    pub fn pass(self, to: &Lobby) -> Option<Ticket> {
        let stream = self.lobby.0.waiting.lock().streams.remove(&self.number)?;
        to.enter(stream)
    }
}

impl Lobby {
    /// Room for so many; twice as many while those that were told to go are going.
    #[must_use]
    pub fn new(most: usize) -> Lobby {
        Lobby(Arc::new(Inner { most: most.max(1), waiting: Mutex::default() }))
    }

    /// `stream`: a connected socket. `None`: there is no room, or the stream is broken; it should be dropped.
    pub fn enter(&self, stream: impl AsFd) -> Option<Ticket> {
        let stream = stream.as_fd().try_clone_to_owned().ok()?;
        let mut waiting = self.0.waiting.lock();
        if waiting.tickets >= self.0.most * 2 {
            return None;
        }
        if waiting.streams.len() >= self.0.most
            && let Some((_, oldest)) = waiting.streams.pop_first()
        {
            let _ = rustix::net::shutdown(&oldest, Shutdown::Both);
        }
        waiting.last += 1;
        waiting.tickets += 1;
        let number = waiting.last;
        waiting.streams.insert(number, stream);
        Some(Ticket { lobby: self.clone(), number })
    }

    /// How many have not proved anything yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.waiting.lock().tickets
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut waiting = self.lobby.0.waiting.lock();
        waiting.tickets -= 1;
        waiting.streams.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn who_proves_something_makes_room_and_counts_where_it_waits_then() {
        let (first, second) = (Lobby::new(1), Lobby::new(1));
        let (one, _one) = UnixStream::pair().unwrap();
        let (two, _two) = UnixStream::pair().unwrap();
        let passed = first.enter(&one).unwrap().pass(&second).unwrap();
        assert_eq!((first.len(), second.len()), (0, 1));
        let early = first.enter(&one).unwrap();
        let late = first.enter(&two).unwrap();
        assert!(early.pass(&second).is_none(), "it was told to go");
        let late = late.pass(&second).unwrap();
        drop((passed, late));
        assert!(first.is_empty() && second.is_empty());
    }
}
