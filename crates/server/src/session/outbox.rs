//! Send queue of a client.

use crate::ops::prefetch::ReplyStream;
use crate::pool::Pool;
use crate::pool::job::Job;
use nigh_link::Link;
use nigh_native::{FrameBytes, WINDOW_BYTES, compress, is_urgent};
use nigh_types::{Call, CallId};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Frames to one client in order, across successive connections. Urgent frames go first, because the client takes a
/// silent server for lost. Frames unsent at the end of a connection are dropped: the session keeps those that have to
/// be retransmitted.
///
/// A thread that adds a frame sends it if the link accepts it at once, and otherwise leaves it to the connection's
/// writer thread. A client that reads nothing for [`Outbox::PATIENCE`] loses its connection, so no thread waits
/// longer. Calls with long replies are held here without a thread while much is queued or the client is disconnected.
/// All calls are held while more than the window is unconfirmed. A call with a pending change is never held, since
/// other clients wait for its end.
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    /// Signals the writer thread.
    wake: Condvar,
    /// Pool that resumes held calls.
    pool: Weak<Pool>,
}

#[derive(Default)]
struct Queue {
    link: Option<Link>,
    /// Counts the links: a partly sent frame is never continued on another link.
    number: u64,
    /// Bytes read from and written to earlier links.
    past: (u64, u64),
    frames: VecDeque<FrameBytes>,
    urgent: VecDeque<FrameBytes>,
    /// Sent bytes of the first frame, once it was offered to the link. A link may have buffered bytes that it did not
    /// report (TLS does), so this frame is offered again before any other.
    partly_sent: Option<usize>,
    bytes: u64,
    /// Bytes that the session holds back until the client is connected or has confirmed more.
    waiting: u64,
    /// Bytes that the client has not confirmed, including `waiting`.
    kept: u64,
    /// Bytes that running reads will add.
    reserved: u64,
    throughput: Throughput,
    /// Held calls; listings already begun come first.
    held_calls: VecDeque<Job>,
    /// Listings begun and not finished: each keeps all names of its directory in memory.
    listings: u32,
    /// Names-only listings begun and not finished.
    dirents: u32,
    sender: Sender,
    /// The client read nothing for too long on the latest link.
    not_reading: bool,
    /// Frame bodies are compressed.
    compresses: bool,
    /// The session is ending: the connection is closed when all frames are sent.
    ending: bool,
}

/// Throughput of the link when its buffer is full.
#[derive(Default)]
struct Throughput {
    bytes: u64,
    spent: Duration,
}

impl Throughput {
    fn note(&mut self, bytes: usize, spent: Duration) {
        if self.spent > Duration::from_secs(1) {
            (self.bytes, self.spent) = (self.bytes / 2, self.spent / 2);
        }
        self.bytes += bytes as u64;
        self.spent += spent;
    }

    /// The bytes that the link accepts per second, if known and less than [`Outbox::QUEUE_LIMIT`].
    fn queue_limit(&self) -> u64 {
        if self.spent < Duration::from_millis(50) {
            return Outbox::QUEUE_LIMIT;
        }
        let second = u128::from(self.bytes) * 1_000 / self.spent.as_millis().max(1);
        u64::try_from(second)
            .unwrap_or(Outbox::QUEUE_LIMIT)
            .clamp(Outbox::QUEUE_LIMIT_LEAST, Outbox::QUEUE_LIMIT)
    }
}

impl Queue {
    /// Whether the queue would be sent within about a second: a recall waits behind the queued frames.
    fn has_room(&self) -> bool {
        let kept = self.kept + self.reserved;
        kept <= WINDOW_BYTES && self.bytes + self.waiting + self.reserved <= self.throughput.queue_limit()
    }

    /// Whether the client confirms what it reads; a working client does so long before the window is full.
    fn is_confirmed(&self) -> bool {
        self.kept <= WINDOW_BYTES
    }

    fn may_go(&self, job: &Job) -> bool {
        match job.request.call {
            Call::List { .. } if job.stream.is_none() => self.has_room() && self.listings < Outbox::LISTINGS,
            Call::ListNames { .. } if job.stream.is_none() => {
                self.has_room() && self.dirents < Outbox::LISTINGS
            }
            Call::Prefetch { .. } => self.has_room() && !job.stream.as_ref().is_some_and(ReplyStream::waits),
            Call::List { .. } | Call::ListNames { .. } | Call::Read { .. } => self.has_room(),
            _ => job.change.is_some() || self.is_confirmed(),
        }
    }

    /// The counter of running calls of this kind, if their number is limited.
    fn running_of_kind(&mut self, call: &Call) -> Option<&mut u32> {
        match call {
            Call::List { .. } => Some(&mut self.listings),
            Call::ListNames { .. } => Some(&mut self.dirents),
            _ => None,
        }
    }

    fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.urgent.is_empty()
    }

    fn next(&mut self) -> Option<FrameBytes> {
        let urgent = if self.partly_sent.is_none() { self.urgent.pop_front() } else { None };
        urgent.or_else(|| self.frames.pop_front())
    }
}

/// Which thread is sending; only that thread may take frames off the queue.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Sender {
    #[default]
    Idle,
    /// A thread that added a frame and sends without waiting.
    Adder,
    /// The writer thread, which may wait.
    Writer,
}

enum Sent {
    All,
    Blocked,
    /// Another link has replaced this one.
    Replaced,
}

impl Outbox {
    /// Limit on queued frames for a client that does not read: the most a session sends at a time, with slack for
    /// other frames.
    const LIMIT: u64 = WINDOW_BYTES + nigh_native::MAX_BODY as u64 + (1 << 20);
    /// Listings and reads wait while more bytes than this, or than one second of throughput, are queued.
    const QUEUE_LIMIT: u64 = 4 << 20;
    const QUEUE_LIMIT_LEAST: u64 = 64 << 10;
    /// Maximum number of concurrent listings of a session.
    const LISTINGS: u32 = 4;
    /// Number of held calls that return to the pool at a time; their replies make room for more.
    const RETURNING: usize = 8;
    /// How long a client may take to read the rest when its session ends.
    const DRAIN_TIME: Duration = Duration::from_secs(2);
    /// Bytes that an adding thread sends before it leaves the rest to the writer, because it serves other clients
    /// too.
    const ADDER_BATCH: u64 = 256 << 10;
    pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

    pub(crate) fn new(pool: Weak<Pool>) -> Outbox {
        Outbox { queue: Mutex::default(), wake: Condvar::new(), pool }
    }

    /// Replaces and closes the current link. Returns the link's number for [`Outbox::write`] and
    /// [`Outbox::disconnect`].
    pub(crate) fn connect(&self, link: Link) -> u64 {
        let mut queue = self.queue.lock();
        self.unlink(&mut queue);
        queue.number += 1;
        queue.link = Some(link);
        (queue.throughput, queue.sender, queue.not_reading) = (Throughput::default(), Sender::Idle, false);
        queue.number
    }

    /// Enables compression of frame bodies where that makes them shorter.
    pub(crate) fn enable_compression(&self) {
        self.queue.lock().compresses = true;
    }

    /// Closes this link, unless another has replaced it.
    pub(crate) fn disconnect(&self, number: u64) {
        let mut queue = self.queue.lock();
        if queue.number == number {
            self.unlink(&mut queue);
        }
    }

    /// Whether the latest link was closed because the client did not read.
    pub(crate) fn is_not_reading(&self) -> bool {
        self.queue.lock().not_reading
    }

    /// Bytes read from and written to all its links.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let queue = self.queue.lock();
        let (read, written) = queue.link.as_ref().map_or((0, 0), Link::bytes);
        (queue.past.0 + read, queue.past.1 + written)
    }

    /// Adds frames. The caller calls [`Outbox::send`] once it holds no lock. `waiting`: bytes held back behind the
    /// frames; `kept`: all unconfirmed bytes, including `waiting`.
    pub(crate) fn add(&self, frames: impl IntoIterator<Item = FrameBytes>, waiting: u64, kept: u64) {
        let mut queue = self.queue.lock();
        (queue.waiting, queue.kept) = (waiting, kept);
        for frame in frames {
            if queue.link.is_none() {
                continue;
            }
            queue.bytes += frame.len() as u64;
            if is_urgent(&frame) {
                queue.urgent.push_back(frame);
            } else {
                queue.frames.push_back(frame);
            }
        }
        if queue.bytes > Outbox::LIMIT {
            queue.not_reading = true;
            self.unlink(&mut queue);
        }
    }

    /// Sends what the link accepts at once, and resumes held calls that fit.
    pub(crate) fn send(&self) {
        let mut queue = self.queue.lock();
        if queue.sender == Sender::Idle && !queue.is_empty() {
            queue.sender = Sender::Adder;
            match self.send_frames(&mut queue, false) {
                Ok(Sent::All) => queue.sender = Sender::Idle,
                Ok(Sent::Blocked) => queue.sender = Sender::Writer,
                Ok(Sent::Replaced) => {}
                Err(_) => self.unlink(&mut queue),
            }
        }
        self.resume_held(&mut queue);
        let for_writer = queue.sender == Sender::Writer || queue.ending;
        drop(queue);
        if for_writer {
            self.wake.notify_all();
        }
    }

    /// Whether more frames may be added that are not urgent.
    pub(crate) fn has_room(&self) -> bool {
        self.queue.lock().has_room()
    }

    /// Admits a call that is about to be executed. A call that is not admitted is held, and returns to the pool once
    /// there is room.
    pub(crate) fn admit(&self, job: Job) -> Option<Job> {
        let mut queue = self.queue.lock();
        if queue.ending || queue.may_go(&job) {
            if job.stream.is_none() {
                queue.running_of_kind(&job.request.call).into_iter().for_each(|count| *count += 1);
            }
            queue.reserved += reserved_bytes(&job.request.call);
            return Some(job);
        }
        if job.stream.as_ref().is_some_and(|begun| !begun.waits()) {
            queue.held_calls.push_front(job);
        } else {
            queue.held_calls.push_back(job);
        }
        None
    }

    /// Ends the admission of a call that was answered, aborted, or parked elsewhere.
    pub(crate) fn done(&self, call: &Call) {
        if !matches!(call, Call::List { .. } | Call::ListNames { .. } | Call::Read { .. }) {
            return;
        }
        let mut queue = self.queue.lock();
        queue.running_of_kind(call).into_iter().for_each(|count| *count -= 1);
        queue.reserved -= reserved_bytes(call);
        self.resume_held(&mut queue);
    }

    /// Removes and returns a held call.
    pub(crate) fn take_back(&self, call: CallId) -> Option<Job> {
        let mut queue = self.queue.lock();
        let at = queue.held_calls.iter().position(|job| job.call == call)?;
        queue.held_calls.remove(at)
    }

    /// Drops held prefetch jobs without answering them.
    pub(crate) fn drop_prefetch_jobs(&self) {
        let mut queue = self.queue.lock();
        let held = std::mem::take(&mut queue.held_calls);
        let (walks, held) =
            held.into_iter().partition(|job| matches!(job.request.call, Call::Prefetch { .. }));
        queue.held_calls = held;
        drop(queue);
        let walks: VecDeque<Job> = walks;
        drop(walks); // ends their changes, which takes other locks
    }

    /// Drops all held calls. None of them has changed anything.
    pub(crate) fn drop_held(&self) {
        let held = std::mem::take(&mut self.queue.lock().held_calls);
        drop(held); // ends their changes, which takes other locks
    }

    /// Resubmits some of the held calls.
    fn resume_held(&self, queue: &mut MutexGuard<'_, Queue>) {
        if queue.held_calls.is_empty() || !queue.is_confirmed() {
            return;
        }
        let going = queue
            .held_calls
            .iter()
            .filter(|job| queue.may_go(job))
            .take(Outbox::RETURNING)
            .map(|job| job.call);
        let going: Vec<CallId> = going.collect();
        if going.is_empty() {
            return;
        }
        let all = std::mem::take(&mut queue.held_calls).into_iter();
        let (jobs, held): (VecDeque<Job>, _) = all.partition(|job| going.contains(&job.call));
        queue.held_calls = held;
        MutexGuard::unlocked(queue, || match self.pool.upgrade() {
            Some(pool) => jobs.into_iter().for_each(|job| pool.submit(job)),
            None => drop(jobs),
        });
    }

    /// Closes the connection after the queued frames, and holds no more calls. The caller holds no lock.
    pub(crate) fn end(&self) {
        self.queue.lock().ending = true;
        self.drop_held();
        self.wake.notify_all();
    }

    /// Closes the connection at once, and holds no more calls. Frames that the link did not accept are dropped: a
    /// client that does not read would otherwise occupy uncounted memory. The caller holds no lock.
    pub(crate) fn finish(&self) {
        let mut queue = self.queue.lock();
        queue.ending = true;
        while queue.link.is_some() && queue.sender == Sender::Adder {
            self.wake.wait(&mut queue); // an adding thread does not wait for the link
        }
        self.unlink(&mut queue);
        drop(queue);
        self.drop_held();
    }

    /// Runs the writer thread of a link until the link is closed.
    pub(crate) fn write(&self, number: u64) {
        let mut queue = self.queue.lock();
        while queue.number == number && queue.link.is_some() {
            match queue.sender {
                Sender::Adder => self.wake.wait(&mut queue),
                Sender::Idle if !queue.is_empty() => queue.sender = Sender::Writer,
                Sender::Idle if !queue.ending => self.wake.wait(&mut queue),
                Sender::Idle => {
                    let waits = queue.waiting > 0;
                    if !waits || self.wake.wait_for(&mut queue, Outbox::DRAIN_TIME).timed_out() {
                        self.unlink(&mut queue);
                    }
                }
                // The link's own timeout is PATIENCE.
                Sender::Writer => match self.send_frames(&mut queue, true) {
                    Ok(Sent::All) => queue.sender = Sender::Idle,
                    Ok(Sent::Replaced) => return,
                    Ok(Sent::Blocked) => {
                        queue.not_reading = true;
                        self.unlink(&mut queue);
                    }
                    Err(_) => self.unlink(&mut queue),
                },
            }
        }
    }

    fn send_frames(&self, queue: &mut MutexGuard<'_, Queue>, wait: bool) -> io::Result<Sent> {
        let (Some(link), number) = (queue.link.clone(), queue.number) else { return Ok(Sent::Replaced) };
        let mut done = 0;
        while let Some(mut frame) = queue.next() {
            let offered = queue.partly_sent.take();
            let (packs, whole) = (queue.compresses && offered.is_none(), frame.len());
            let mut sent = offered.unwrap_or(0);
            let (begun, before) = (Instant::now(), sent);
            let result = MutexGuard::unlocked(queue, || {
                unless_it_panics(|| {
                    if packs && let Some(packed) = compress(&frame) {
                        frame = FrameBytes::new(packed);
                    }
                    while sent < frame.len() {
                        sent += link.write(&frame[sent..], wait)?;
                    }
                    Ok(())
                })
            });
            if queue.number != number || queue.link.is_none() {
                return Ok(Sent::Replaced);
            }
            queue.bytes -= (whole - frame.len()) as u64;
            if wait {
                queue.throughput.note(sent - before, begun.elapsed());
            }
            match result {
                Ok(()) => {
                    queue.bytes -= frame.len() as u64;
                    self.resume_held(queue);
                    if queue.number != number || queue.link.is_none() {
                        return Ok(Sent::Replaced);
                    }
                    done += frame.len() as u64;
                    if !wait && done >= Outbox::ADDER_BATCH && !queue.is_empty() {
                        return Ok(Sent::Blocked);
                    }
                }
                Err(error) => {
                    queue.partly_sent = Some(sent);
                    queue.frames.push_front(frame);
                    let blocked = error.kind() == io::ErrorKind::WouldBlock;
                    return if blocked { Ok(Sent::Blocked) } else { Err(error) };
                }
            }
        }
        Ok(Sent::All)
    }

    fn unlink(&self, queue: &mut Queue) {
        let Some(link) = queue.link.take() else { return };
        let (read, written) = link.bytes();
        (queue.past.0, queue.past.1) = (queue.past.0 + read, queue.past.1 + written);
        queue.frames.clear();
        queue.urgent.clear();
        (queue.partly_sent, queue.bytes) = (None, 0);
        link.shutdown();
        self.wake.notify_all();
    }
}

/// Turns a panic into the end of the connection. Otherwise the sending thread would die with its turn, nothing more
/// would be sent, and the client would wait until its lease expires.
fn unless_it_panics(write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(write))
        .unwrap_or_else(|_| Err(io::Error::other("the server has a bug; its log says where")))
}

/// Maximum length of a read's reply; 0 for other calls.
fn reserved_bytes(call: &Call) -> u64 {
    match call {
        Call::Read { length, .. } => u64::from(*length),
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
