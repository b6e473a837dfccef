//! Connections on which nothing came for a while. One thread listens to all of them and takes in what asks for
//! nothing, so that many clients that acknowledge or renew at once do not wake a thread each.

use crate::connection::Ended;
use crate::server::Server;
use crate::session::Session;
use nigh_link::Link;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, epoll, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Why a connection's own thread goes on.
pub(crate) enum Back {
    /// What came, and is not taken in yet; none: it is to read itself.
    Said(Vec<u8>),
    /// Its session, or it, is at an end.
    Ended(Ended),
    /// It cannot be read.
    Failed(io::Error),
}

/// Those connections, whose threads sleep.
pub(crate) struct Quiet {
    epoll: OwnedFd,
    seats: Mutex<FxHashMap<u64, Arc<Seat>>>,
    last: AtomicU64,
    /// Readable when the server stops.
    stop: OwnedFd,
}

struct Seat {
    session: Arc<Session>,
    /// The session's number of the link.
    number: u64,
    link: Link,
    pace: Mutex<Pace>,
    back: Mutex<Option<Back>>,
    wake: Condvar,
}

/// How often a connection was read lately: whoever talks a lot is not to take this thread from the others.
struct Pace {
    since: Instant,
    reads: u32,
}

impl Pace {
    const SPAN: Duration = Duration::from_secs(1);
    const MOST: u32 = 256;

    fn is_too_fast(&mut self) -> bool {
        if self.since.elapsed() > Pace::SPAN {
            *self = Pace { since: Instant::now(), reads: 0 };
        }
        self.reads += 1;
        self.reads > Pace::MOST
    }
}

/// What the server's stop is called among the seats.
const STOP: u64 = 0;
/// Read from a connection at a time. Whoever says more at once is not quiet.
const BYTES: usize = 4 << 10;
const EVENTS: usize = 256;

impl Quiet {
    pub(crate) fn new() -> io::Result<Quiet> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        Ok(Quiet { epoll, seats: Mutex::default(), last: AtomicU64::new(STOP), stop })
    }

    /// Lets the calling thread, a connection's own, sleep until it has something to do. Nothing is left to read
    /// of the link ([`Link::read_now`]).
    pub(crate) fn wait(&self, session: &Arc<Session>, number: u64, link: &Link) -> Back {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let seat = Arc::new(Seat {
            session: Arc::clone(session),
            number,
            link: link.clone(),
            pace: Mutex::new(Pace { since: Instant::now(), reads: 0 }),
            back: Mutex::new(None),
            wake: Condvar::new(),
        });
        self.seats.lock().insert(id, Arc::clone(&seat));
        let (token, flags) = (epoll::EventData::new_u64(id), epoll::EventFlags::IN);
        if epoll::add(&self.epoll, link, token, flags).is_err() {
            // It waits by reading, as before.
            self.seats.lock().remove(&id);
            return Back::Said(Vec::new());
        }
        let mut back = seat.back.lock();
        loop {
            match back.take() {
                Some(back) => return back,
                None => seat.wake.wait(&mut back),
            }
        }
    }

    pub(crate) fn stop(&self) {
        // It counts up; there is room for more than one.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// The thread that listens, until [`Quiet::stop`].
    pub(crate) fn listen(&self, server: &Weak<Server>) {
        let mut ready = Vec::with_capacity(EVENTS);
        let mut buffer = vec![0; BYTES];
        loop {
            ready.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut ready), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "connections cannot be listened to together");
                    return self.wake_all();
                }
            }
            let Some(server) = server.upgrade() else { return };
            for event in &ready {
                let id = event.data.u64();
                if id == STOP {
                    return self.wake_all();
                }
                let seat = self.seats.lock().get(&id).cloned();
                if let Some(seat) = seat
                    && let Some(back) = seat.hear(&server, &mut buffer)
                {
                    self.give_back(id, &seat, back);
                }
            }
        }
    }

    fn wake_all(&self) {
        let seats: Vec<_> = self.seats.lock().iter().map(|(id, seat)| (*id, Arc::clone(seat))).collect();
        seats.into_iter().for_each(|(id, seat)| self.give_back(id, &seat, Back::Said(Vec::new())));
    }

    fn give_back(&self, id: u64, seat: &Seat, back: Back) {
        // It was added when the seat was taken.
        let _ = epoll::delete(&self.epoll, &seat.link);
        self.seats.lock().remove(&id);
        *seat.back.lock() = Some(back);
        seat.wake.notify_one();
    }
}

impl Seat {
    /// Takes in what came, if that asks for nothing; otherwise why its own thread is to go on.
    fn hear(&self, server: &Server, buffer: &mut [u8]) -> Option<Back> {
        // Until nothing is left: what TLS has unpacked makes no descriptor readable.
        loop {
            if self.pace.lock().is_too_fast() {
                return Some(Back::Said(Vec::new()));
            }
            let count = match self.link.read_now(buffer) {
                // Its own thread finds the same.
                Ok(0) => return Some(Back::Said(Vec::new())),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) => return Some(Back::Failed(error)),
            };
            let bytes = &buffer[..count];
            if count == buffer.len() || !self.session.asks_nothing(bytes) {
                return Some(Back::Said(bytes.to_vec()));
            }
            // A panic of ours is the end of that connection, and not of all.
            let heard = std::panic::AssertUnwindSafe(|| server.hear_now(&self.session, self.number, bytes));
            match std::panic::catch_unwind(heard) {
                Ok(Some(None)) => {}
                Ok(Some(Some(ended))) => return Some(Back::Ended(ended)),
                // Another link's thread is at it.
                Ok(None) => return Some(Back::Said(bytes.to_vec())),
                Err(_) => return Some(Back::Ended(Ended::Cut)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_read_more_often_than_allowed_within_a_second_is_too_fast() {
        let mut pace = Pace { since: Instant::now(), reads: 0 };
        let fast = (0..Pace::MOST + 2).map(|_| pace.is_too_fast()).filter(|is_so| *is_so).count();
        assert_eq!(fast, 2);
        pace.since = pace.since.checked_sub(Pace::SPAN).unwrap();
        assert!(!pace.is_too_fast(), "that was a second ago");
    }
}
