//! Idle connections. One thread polls all of them and handles messages that need no reply, so that many
//! acknowledgements and renewals do not each wake a thread.

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

/// Why a connection's own thread resumes.
pub(crate) enum WakeReason {
    /// Unhandled input; if empty, the thread reads the link itself.
    Input(Vec<u8>),
    /// The session or the link has ended.
    Ended(Ended),
    /// Reading failed.
    Failed(io::Error),
}

/// The idle connections, whose threads sleep.
pub(crate) struct IdleConnections {
    epoll: OwnedFd,
    seats: Mutex<FxHashMap<u64, Arc<IdleConnection>>>,
    last: AtomicU64,
    /// Eventfd, readable when the server stops.
    stop: OwnedFd,
}

struct IdleConnection {
    session: Arc<Session>,
    /// The session's number of the link.
    number: u64,
    link: Link,
    read_rate: Mutex<ReadRate>,
    wake_reason: Mutex<Option<WakeReason>>,
    wake: Condvar,
}

/// Read rate of a connection: a busy connection must not occupy this thread.
struct ReadRate {
    since: Instant,
    reads: u32,
}

impl ReadRate {
    const SPAN: Duration = Duration::from_secs(1);
    const MOST: u32 = 256;

    fn is_too_fast(&mut self) -> bool {
        if self.since.elapsed() > ReadRate::SPAN {
            *self = ReadRate { since: Instant::now(), reads: 0 };
        }
        self.reads += 1;
        self.reads > ReadRate::MOST
    }
}

/// Token of the stop event.
const STOP: u64 = 0;
/// Bytes read from a connection at a time. A connection with more input is not idle.
const BYTES: usize = 4 << 10;
const EVENTS: usize = 256;

impl IdleConnections {
    pub(crate) fn new() -> io::Result<IdleConnections> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        Ok(IdleConnections { epoll, seats: Mutex::default(), last: AtomicU64::new(STOP), stop })
    }

    /// Blocks the calling thread, a connection's own, until it has something to do. The link has no unread input
    /// ([`Link::read_now`]).
    pub(crate) fn wait(&self, session: &Arc<Session>, number: u64, link: &Link) -> WakeReason {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let seat = Arc::new(IdleConnection {
            session: Arc::clone(session),
            number,
            link: link.clone(),
            read_rate: Mutex::new(ReadRate { since: Instant::now(), reads: 0 }),
            wake_reason: Mutex::new(None),
            wake: Condvar::new(),
        });
        self.seats.lock().insert(id, Arc::clone(&seat));
        let (token, flags) = (epoll::EventData::new_u64(id), epoll::EventFlags::IN);
        if epoll::add(&self.epoll, link, token, flags).is_err() {
            // The thread falls back to blocking reads.
            self.seats.lock().remove(&id);
            return WakeReason::Input(Vec::new());
        }
        let mut back = seat.wake_reason.lock();
        loop {
            match back.take() {
                Some(back) => return back,
                None => seat.wake.wait(&mut back),
            }
        }
    }

    pub(crate) fn stop(&self) {
        // An eventfd is a counter and does not block on a second write.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// Runs the polling thread, until [`IdleConnections::stop`].
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
                    && let Some(back) = seat.handle_input(&server, &mut buffer)
                {
                    self.wake_one(id, &seat, back);
                }
            }
        }
    }

    fn wake_all(&self) {
        let seats: Vec<_> = self.seats.lock().iter().map(|(id, seat)| (*id, Arc::clone(seat))).collect();
        seats.into_iter().for_each(|(id, seat)| self.wake_one(id, &seat, WakeReason::Input(Vec::new())));
    }

    fn wake_one(&self, id: u64, seat: &IdleConnection, back: WakeReason) {
        // The link was added to the epoll set by [`IdleConnections::wait`].
        let _ = epoll::delete(&self.epoll, &seat.link);
        self.seats.lock().remove(&id);
        *seat.wake_reason.lock() = Some(back);
        seat.wake.notify_one();
    }
}

impl IdleConnection {
    /// Handles input that needs no reply. Otherwise returns why the connection's own thread resumes.
    fn handle_input(&self, server: &Server, buffer: &mut [u8]) -> Option<WakeReason> {
        // Reads until nothing is left: bytes buffered by TLS make no descriptor readable.
        loop {
            if self.read_rate.lock().is_too_fast() {
                return Some(WakeReason::Input(Vec::new()));
            }
            let count = match self.link.read_now(buffer) {
                // End of file, which the connection's own thread will read again.
                Ok(0) => return Some(WakeReason::Input(Vec::new())),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Err(error) => return Some(WakeReason::Failed(error)),
            };
            let bytes = &buffer[..count];
            if count == buffer.len() || !self.session.asks_nothing(bytes) {
                return Some(WakeReason::Input(bytes.to_vec()));
            }
            // A panic ends this connection only.
            let heard =
                std::panic::AssertUnwindSafe(|| server.try_handle_bytes(&self.session, self.number, bytes));
            match std::panic::catch_unwind(heard) {
                Ok(Some(None)) => {}
                Ok(Some(Some(ended))) => return Some(WakeReason::Ended(ended)),
                // The thread of another link is handling input.
                Ok(None) => return Some(WakeReason::Input(bytes.to_vec())),
                Err(_) => return Some(WakeReason::Ended(Ended::Lost)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_read_too_often_within_a_second_is_too_fast() {
        let mut pace = ReadRate { since: Instant::now(), reads: 0 };
        let fast = (0..ReadRate::MOST + 2).map(|_| pace.is_too_fast()).filter(|is_so| *is_so).count();
        assert_eq!(fast, 2);
        pace.since = pace.since.checked_sub(ReadRate::SPAN).unwrap();
        assert!(!pace.is_too_fast(), "that was a second ago");
    }
}
