//! What waits to be written to a client.

use crate::pool::{Job, Pool};
use nigh_link::Link;
use nigh_native::FrameType;
use nigh_types::{Call, CallId};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Where a frame says its type (docs/protocol.md).
const TYPE_AT: usize = 4;

/// Frames on their way to one client, in order; but pongs go first, since the client takes a server that is silent
/// for gone.
///
/// Whoever adds a frame sends it at once if the link takes it; what it does not take is left to
/// the session's writer thread. A client that reads nothing for [`Outbox::PATIENCE`], or lets
/// [`Outbox::LIMIT`] bytes pile up, loses its session; nobody ever waits for it longer. Calls whose answers
/// are long are held here, without a thread, while much is queued.
pub(crate) struct Outbox {
    link: Link,
    queue: Mutex<Queue>,
    /// The writer has something to do.
    wake: Condvar,
    /// Whereto calls return that were held.
    pool: Weak<Pool>,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Vec<u8>>,
    pongs: VecDeque<Vec<u8>>,
    /// Bytes of the first frame that are sent already.
    sent: usize,
    bytes: usize,
    /// Bytes that reads under way will add.
    promised: usize,
    pace: Pace,
    /// Listings that were begun come first.
    held: VecDeque<Job>,
    /// Listings that were begun and not ended: each has all the names of its directory.
    listings: u32,
    turn: Turn,
    /// No frames come any more; close when all are sent.
    ending: bool,
    /// The connection is closed; frames are dropped.
    closed: bool,
}

/// How fast the link takes bytes when it is full.
#[derive(Default)]
struct Pace {
    bytes: u64,
    spent: Duration,
}

impl Pace {
    fn note(&mut self, bytes: usize, spent: Duration) {
        if self.spent > Duration::from_secs(1) {
            (self.bytes, self.spent) = (self.bytes / 2, self.spent / 2);
        }
        self.bytes += bytes as u64;
        self.spent += spent;
    }

    /// What it takes in a second, if that is known and less than [`Outbox::CALM`].
    fn calm(&self) -> usize {
        if self.spent < Duration::from_millis(50) {
            return Outbox::CALM;
        }
        let second = u128::from(self.bytes) * 1_000 / self.spent.as_millis().max(1);
        usize::try_from(second).unwrap_or(Outbox::CALM).clamp(Outbox::CALM_LEAST, Outbox::CALM)
    }
}

impl Queue {
    /// A recall keeps its place behind what is queued, so that should be gone in about a second.
    fn has_room(&self) -> bool {
        self.bytes + self.promised <= self.pace.calm()
    }

    fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.pongs.is_empty()
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        // A frame that was begun is ended first.
        let pong = if self.sent == 0 { self.pongs.pop_front() } else { None };
        pong.or_else(|| self.frames.pop_front())
    }
}

/// Who is sending; only that one may take frames off.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Turn {
    #[default]
    Nobody,
    /// Whoever added something, without waiting.
    Caller,
    /// The writer thread, which may wait.
    Writer,
}

enum Sent {
    All,
    Blocked,
}

impl Outbox {
    const LIMIT: usize = 256 << 20;
    /// Listings and reads wait while more than this is queued, or than the link takes in a second.
    const CALM: usize = 4 << 20;
    const CALM_LEAST: usize = 64 << 10;
    /// So many listings of one session are begun at a time.
    const LISTINGS: u32 = 4;
    /// So many calls return to the pool at a time; the answers to those make room for more.
    const RETURNING: usize = 8;
    pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

    pub(crate) fn new(link: Link, pool: Weak<Pool>) -> Outbox {
        Outbox { link, queue: Mutex::default(), wake: Condvar::new(), pool }
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// Adds frames; [`Outbox::send`] is to follow when no lock is held. Answers false when the client
    /// let too much pile up: the connection is closed then.
    pub(crate) fn add(&self, frames: impl IntoIterator<Item = Vec<u8>>) -> bool {
        let mut queue = self.queue.lock();
        for frame in frames {
            queue.bytes += frame.len();
            if frame.get(TYPE_AT) == Some(&(FrameType::Pong as u8)) {
                queue.pongs.push_back(frame);
            } else {
                queue.frames.push_back(frame);
            }
        }
        if queue.bytes > Outbox::LIMIT {
            self.close_locked(&mut queue);
        }
        !queue.closed
    }

    /// Sends what the link takes without waiting.
    pub(crate) fn send(&self) {
        let mut queue = self.queue.lock();
        if queue.turn != Turn::Nobody || queue.closed || queue.is_empty() {
            return;
        }
        queue.turn = Turn::Caller;
        match self.send_frames(&mut queue, false) {
            Ok(Sent::All) => queue.turn = Turn::Nobody,
            Ok(Sent::Blocked) => queue.turn = Turn::Writer,
            Err(_) => self.close_locked(&mut queue),
        }
        let for_writer = queue.turn == Turn::Writer || queue.ending;
        drop(queue);
        if for_writer {
            self.wake.notify_one();
        }
    }

    /// Whether more may be put out that is not urgent.
    pub(crate) fn has_room(&self) -> bool {
        self.queue.lock().has_room()
    }

    /// Takes a call that is about to be executed; answers it if it may be. Otherwise it is held until there is
    /// room, and returns to the pool then.
    pub(crate) fn admit(&self, job: Job) -> Option<Job> {
        let begins = match job.request.call {
            Call::List { .. } => job.listing.is_none(),
            Call::Read { .. } => false,
            _ => return Some(job),
        };
        let mut queue = self.queue.lock();
        if queue.closed || queue.has_room() && !(begins && queue.listings >= Outbox::LISTINGS) {
            queue.listings += u32::from(begins);
            queue.promised += promised(&job.request.call);
            return Some(job);
        }
        if job.listing.is_some() {
            queue.held.push_front(job);
        } else {
            queue.held.push_back(job);
        }
        None
    }

    /// A call that was let on has been answered, or given up, or waits where it counts no more.
    pub(crate) fn done(&self, call: &Call) {
        if !matches!(call, Call::List { .. } | Call::Read { .. }) {
            return;
        }
        let mut queue = self.queue.lock();
        queue.listings -= u32::from(matches!(call, Call::List { .. }));
        queue.promised -= promised(call);
        self.let_go(&mut queue);
    }

    /// Takes back a call that is held.
    pub(crate) fn take_back(&self, call: CallId) -> Option<Job> {
        let mut queue = self.queue.lock();
        let at = queue.held.iter().position(|job| job.call == call)?;
        queue.held.remove(at)
    }

    /// Sends some of the calls that are held on their way.
    fn let_go(&self, queue: &mut MutexGuard<'_, Queue>) {
        if queue.held.is_empty() || !queue.has_room() {
            return;
        }
        let count = queue.held.len().min(Outbox::RETURNING);
        let jobs: Vec<Job> = queue.held.drain(..count).collect();
        MutexGuard::unlocked(queue, || match self.pool.upgrade() {
            Some(pool) => jobs.into_iter().for_each(|job| pool.submit(job)),
            None => drop(jobs),
        });
    }

    /// After what is queued the connection is closed.
    pub(crate) fn end(&self) {
        self.queue.lock().ending = true;
        self.wake.notify_one();
    }

    /// The writer thread: until the connection is closed.
    pub(crate) fn write(&self) {
        let mut queue = self.queue.lock();
        while !queue.closed {
            match queue.turn {
                Turn::Caller => self.wake.wait(&mut queue),
                Turn::Nobody if queue.is_empty() && queue.ending => self.close_locked(&mut queue),
                Turn::Nobody if queue.is_empty() => self.wake.wait(&mut queue),
                Turn::Nobody => queue.turn = Turn::Writer,
                // The link's own timeout is PATIENCE.
                Turn::Writer => match self.send_frames(&mut queue, true) {
                    Ok(Sent::All) => queue.turn = Turn::Nobody,
                    _ => self.close_locked(&mut queue),
                },
            }
        }
    }

    fn send_frames(&self, queue: &mut MutexGuard<'_, Queue>, wait: bool) -> io::Result<Sent> {
        while let Some(frame) = queue.next() {
            let mut sent = std::mem::take(&mut queue.sent);
            let (begun, before) = (Instant::now(), sent);
            let result: io::Result<()> = MutexGuard::unlocked(queue, || {
                while sent < frame.len() {
                    sent += self.link.write(&frame[sent..], wait)?;
                }
                Ok(())
            });
            if wait {
                queue.pace.note(sent - before, begun.elapsed());
            }
            match result {
                Ok(()) => {
                    queue.bytes = queue.bytes.saturating_sub(frame.len());
                    self.let_go(queue);
                }
                Err(error) => {
                    queue.sent = sent;
                    queue.frames.push_front(frame);
                    let blocked = error.kind() == io::ErrorKind::WouldBlock;
                    return if blocked { Ok(Sent::Blocked) } else { Err(error) };
                }
            }
        }
        Ok(Sent::All)
    }

    fn close_locked(&self, queue: &mut Queue) {
        queue.closed = true;
        queue.frames.clear();
        queue.pongs.clear();
        queue.bytes = 0;
        // None of them has changed anything.
        queue.held.clear();
        self.link.shutdown();
        self.wake.notify_all();
    }
}

/// How many bytes the answer to a call may have, if it is a read.
fn promised(call: &Call) -> usize {
    match call {
        Call::Read { length, .. } => usize::try_from(*length).unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    fn pair() -> (Arc<Outbox>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        (Arc::new(Outbox::new(ours.into(), Weak::new())), theirs)
    }

    #[test]
    fn frames_arrive_whole_and_in_order_though_the_socket_is_full() {
        let (outbox, mut theirs) = pair();
        let writer = Arc::clone(&outbox);
        let writer = std::thread::spawn(move || writer.write());
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).map(|_| all)
        });
        let mut expected = Vec::new();
        for n in 0..200_u8 {
            let frame = vec![n; 10_000];
            expected.extend_from_slice(&frame);
            assert!(outbox.add([frame]));
            outbox.send();
        }
        outbox.end();
        writer.join().unwrap();
        assert!(reader.join().unwrap().unwrap() == expected);
    }

    #[test]
    fn a_client_that_does_not_read_is_given_up() {
        let (outbox, _theirs) = pair();
        let writer = Arc::clone(&outbox);
        let writer = std::thread::spawn(move || writer.write());
        outbox.add([vec![0; 8 << 20]]);
        outbox.send();
        assert!(!outbox.has_room());
        writer.join().unwrap();
        assert!(!outbox.add([vec![1]]));
    }

    #[test]
    fn a_pong_goes_before_what_is_queued_and_behind_what_was_begun() {
        let (outbox, mut theirs) = pair();
        let frame = |number: u8| vec![number; 1 << 20];
        let mut pong = vec![0; 16];
        pong[TYPE_AT] = FrameType::Pong as u8;
        // The first does not fit the socket, so it is sent in part.
        assert!(outbox.add([frame(100), frame(101)]));
        outbox.send();
        assert!(outbox.add([pong.clone()]));
        outbox.end();
        let writer = Arc::clone(&outbox);
        let writer = std::thread::spawn(move || writer.write());
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).unwrap();
        writer.join().unwrap();
        assert!(all == [frame(100), pong, frame(101)].concat());
    }

    #[test]
    fn what_a_slow_link_takes_in_a_second_is_enough_to_be_queued() {
        let mut pace = Pace::default();
        assert_eq!(pace.calm(), Outbox::CALM, "nothing is known yet");
        for _ in 0..20 {
            pace.note(100_000, Duration::from_millis(100));
        }
        assert!((900_000..1_100_000).contains(&pace.calm()), "{}", pace.calm());
        (0..50).for_each(|_| pace.note(1_000, Duration::from_millis(500)));
        assert_eq!(pace.calm(), Outbox::CALM_LEAST);
        (0..50).for_each(|_| pace.note(50 << 20, Duration::from_millis(500)));
        assert_eq!(pace.calm(), Outbox::CALM);
    }
}
