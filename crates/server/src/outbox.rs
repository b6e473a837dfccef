//! What waits to be written to a client.

use crate::ops::ahead::Begun;
use crate::pool::{Job, Pool};
use nigh_link::Link;
use nigh_native::{FrameBytes, WINDOW_BYTES, is_urgent, pack};
use nigh_types::{Call, CallId};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Frames on their way to one client, in order, over one connection after another; but what is urgent goes first,
/// since the client takes a server that is silent for gone. What was not written when a connection ended is
/// dropped: the session keeps what counts.
///
/// Whoever adds a frame sends it at once if the link takes it; what it does not take is left to
/// the connection's writer thread. A client that reads nothing for [`Outbox::PATIENCE`] loses its connection;
/// nobody ever waits for it longer. Calls whose answers are long are held here, without a thread, while much is
/// queued or the client is away; and all calls while the client has not confirmed more than the window. One that
/// goes on with a change that it has begun is never held, since others wait for its end.
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    /// The writer has something to do.
    wake: Condvar,
    /// Whereto calls return that were held.
    pool: Weak<Pool>,
}

#[derive(Default)]
struct Queue {
    link: Option<Link>,
    /// Counts the links: what was begun on one is never gone on with on another.
    number: u64,
    /// Bytes read from and written to links before.
    past: (u64, u64),
    frames: VecDeque<FrameBytes>,
    urgent: VecDeque<FrameBytes>,
    /// The first frame was offered to the link, and so many of its bytes are sent. A link may have taken in hand
    /// what it did not report (TLS does), so it is offered the same again before anything else.
    begun: Option<usize>,
    bytes: u64,
    /// Bytes that the session keeps back until the client is there, or has confirmed more.
    waiting: u64,
    /// Bytes that the client has not confirmed, those included.
    kept: u64,
    /// Bytes that reads under way will add.
    promised: u64,
    pace: Pace,
    /// Listings that were begun come first.
    held: VecDeque<Job>,
    /// Listings that were begun and not ended: each has all the names of its directory.
    listings: u32,
    /// The same of names alone.
    dirents: u32,
    turn: Turn,
    /// The client read nothing for too long, on the latest link.
    deaf: bool,
    /// Bodies of frames are packed.
    packs: bool,
    /// Nothing is to come any more; the connection is closed when all is sent.
    ending: bool,
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
    fn calm(&self) -> u64 {
        if self.spent < Duration::from_millis(50) {
            return Outbox::CALM;
        }
        let second = u128::from(self.bytes) * 1_000 / self.spent.as_millis().max(1);
        u64::try_from(second).unwrap_or(Outbox::CALM).clamp(Outbox::CALM_LEAST, Outbox::CALM)
    }
}

impl Queue {
    /// A recall keeps its place behind what is queued, so that should be gone in about a second.
    fn has_room(&self) -> bool {
        let kept = self.kept + self.promised;
        kept <= WINDOW_BYTES && self.bytes + self.waiting + self.promised <= self.pace.calm()
    }

    /// A client confirms what it reads long before so much is kept for it.
    fn is_confirmed(&self) -> bool {
        self.kept <= WINDOW_BYTES
    }

    fn may_go(&self, job: &Job) -> bool {
        match job.request.call {
            Call::List { .. } if job.begun.is_none() => self.has_room() && self.listings < Outbox::LISTINGS,
            Call::Dirents { .. } if job.begun.is_none() => self.has_room() && self.dirents < Outbox::LISTINGS,
            Call::Ahead { .. } => self.has_room() && !job.begun.as_ref().is_some_and(Begun::waits),
            Call::List { .. } | Call::Dirents { .. } | Call::Read { .. } => self.has_room(),
            _ => job.change.is_some() || self.is_confirmed(),
        }
    }

    /// How many of that kind were begun, where that is bounded.
    fn begun(&mut self, call: &Call) -> Option<&mut u32> {
        match call {
            Call::List { .. } => Some(&mut self.listings),
            Call::Dirents { .. } => Some(&mut self.dirents),
            _ => None,
        }
    }

    fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.urgent.is_empty()
    }

    fn next(&mut self) -> Option<FrameBytes> {
        let urgent = if self.begun.is_none() { self.urgent.pop_front() } else { None };
        urgent.or_else(|| self.frames.pop_front())
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
    /// The link is not this one any more.
    Replaced,
}

impl Outbox {
    /// Of what does not count and is not read, so much beside all that the session puts out at a time.
    const LIMIT: u64 = WINDOW_BYTES + nigh_native::MAX_BODY as u64 + (1 << 20);
    /// Listings and reads wait while more than this is to be written, or than the link takes in a second.
    const CALM: u64 = 4 << 20;
    const CALM_LEAST: u64 = 64 << 10;
    /// So many listings of one session are begun at a time.
    const LISTINGS: u32 = 4;
    /// So many calls return to the pool at a time; the answers to those make room for more.
    const RETURNING: usize = 8;
    /// How long a client may take for what is left when a session ends.
    const FAREWELL: Duration = Duration::from_secs(2);
    /// Whoever adds something sends so much, and leaves the rest to the writer: it has others to look after.
    const IN_PASSING: u64 = 256 << 10;
    pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

    pub(crate) fn new(pool: Weak<Pool>) -> Outbox {
        Outbox { queue: Mutex::default(), wake: Condvar::new(), pool }
    }

    /// Another link takes the place of the one before, which is closed. The number by which
    /// [`Outbox::write`] and [`Outbox::disconnect`] know it.
    pub(crate) fn connect(&self, link: Link) -> u64 {
        let mut queue = self.queue.lock();
        self.unlink(&mut queue);
        queue.number += 1;
        queue.link = Some(link);
        (queue.pace, queue.turn, queue.deaf) = (Pace::default(), Turn::Nobody, false);
        queue.number
    }

    /// From now on bodies of frames are packed where that makes them shorter.
    pub(crate) fn pack(&self) {
        self.queue.lock().packs = true;
    }

    /// Closes that link, unless another took its place.
    pub(crate) fn disconnect(&self, number: u64) {
        let mut queue = self.queue.lock();
        if queue.number == number {
            self.unlink(&mut queue);
        }
    }

    /// Whether the latest link was closed because the client read nothing.
    pub(crate) fn is_deaf(&self) -> bool {
        self.queue.lock().deaf
    }

    /// Bytes read from and written to all its links.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let queue = self.queue.lock();
        let (read, written) = queue.link.as_ref().map_or((0, 0), Link::bytes);
        (queue.past.0 + read, queue.past.1 + written)
    }

    /// Adds frames; [`Outbox::send`] is to follow when no lock is held. `waiting`: bytes that are kept back
    /// behind them; `kept`: those, and all others that are not confirmed.
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
            queue.deaf = true;
            self.unlink(&mut queue);
        }
    }

    /// Sends what the link takes without waiting, and lets calls go on for which there is room.
    pub(crate) fn send(&self) {
        let mut queue = self.queue.lock();
        if queue.turn == Turn::Nobody && !queue.is_empty() {
            queue.turn = Turn::Caller;
            match self.send_frames(&mut queue, false) {
                Ok(Sent::All) => queue.turn = Turn::Nobody,
                Ok(Sent::Blocked) => queue.turn = Turn::Writer,
                Ok(Sent::Replaced) => {}
                Err(_) => self.unlink(&mut queue),
            }
        }
        self.let_go(&mut queue);
        let for_writer = queue.turn == Turn::Writer || queue.ending;
        drop(queue);
        if for_writer {
            self.wake.notify_all();
        }
    }

    /// Whether more may be put out that is not urgent.
    pub(crate) fn has_room(&self) -> bool {
        self.queue.lock().has_room()
    }

    /// Takes a call that is about to be executed; answers it if it may be. Otherwise it is held until there is
    /// room, and returns to the pool then.
    pub(crate) fn admit(&self, job: Job) -> Option<Job> {
        let mut queue = self.queue.lock();
        if queue.ending || queue.may_go(&job) {
            if job.begun.is_none() {
                queue.begun(&job.request.call).into_iter().for_each(|count| *count += 1);
            }
            queue.promised += promised(&job.request.call);
            return Some(job);
        }
        if job.begun.as_ref().is_some_and(|begun| !begun.waits()) {
            queue.held.push_front(job);
        } else {
            queue.held.push_back(job);
        }
        None
    }

    /// A call that was let on has been answered, or given up, or waits where it counts no more.
    pub(crate) fn done(&self, call: &Call) {
        if !matches!(call, Call::List { .. } | Call::Dirents { .. } | Call::Read { .. }) {
            return;
        }
        let mut queue = self.queue.lock();
        queue.begun(call).into_iter().for_each(|count| *count -= 1);
        queue.promised -= promised(call);
        self.let_go(&mut queue);
    }

    /// Takes back a call that is held.
    pub(crate) fn take_back(&self, call: CallId) -> Option<Job> {
        let mut queue = self.queue.lock();
        let at = queue.held.iter().position(|job| job.call == call)?;
        queue.held.remove(at)
    }

    /// Drops walks that are held, and answers none of them.
    pub(crate) fn drop_walks(&self) {
        let mut queue = self.queue.lock();
        let held = std::mem::take(&mut queue.held);
        let (walks, held) = held.into_iter().partition(|job| matches!(job.request.call, Call::Ahead { .. }));
        queue.held = held;
        drop(queue);
        let walks: VecDeque<Job> = walks;
        drop(walks); // ends what they had begun, which takes other locks
    }

    /// Drops the calls that are held. None of them has changed anything.
    pub(crate) fn drop_held(&self) {
        let held = std::mem::take(&mut self.queue.lock().held);
        drop(held); // ends what they had begun, which takes other locks
    }

    /// Sends some of the calls that are held on their way.
    fn let_go(&self, queue: &mut MutexGuard<'_, Queue>) {
        if queue.held.is_empty() || !queue.is_confirmed() {
            return;
        }
        let going =
            queue.held.iter().filter(|job| queue.may_go(job)).take(Outbox::RETURNING).map(|job| job.call);
        let going: Vec<CallId> = going.collect();
        if going.is_empty() {
            return;
        }
        let all = std::mem::take(&mut queue.held).into_iter();
        let (jobs, held): (VecDeque<Job>, _) = all.partition(|job| going.contains(&job.call));
        queue.held = held;
        MutexGuard::unlocked(queue, || match self.pool.upgrade() {
            Some(pool) => jobs.into_iter().for_each(|job| pool.submit(job)),
            None => drop(jobs),
        });
    }

    /// After what is queued the connection is closed, and no call is held any more. No lock is held.
    pub(crate) fn end(&self) {
        self.queue.lock().ending = true;
        self.drop_held();
        self.wake.notify_all();
    }

    /// The session is over: the connection is closed, and no call is held any more. What the link takes without
    /// waiting was sent; the rest is dropped, or whoever reads nothing would have it kept and counted nowhere. No
    /// lock is held.
    pub(crate) fn finish(&self) {
        let mut queue = self.queue.lock();
        queue.ending = true;
        while queue.link.is_some() && queue.turn == Turn::Caller {
            self.wake.wait(&mut queue); // that one does not wait for the link
        }
        self.unlink(&mut queue);
        drop(queue);
        self.drop_held();
    }

    /// The writer thread of a link: until that is closed.
    pub(crate) fn write(&self, number: u64) {
        let mut queue = self.queue.lock();
        while queue.number == number && queue.link.is_some() {
            match queue.turn {
                Turn::Caller => self.wake.wait(&mut queue),
                Turn::Nobody if !queue.is_empty() => queue.turn = Turn::Writer,
                Turn::Nobody if !queue.ending => self.wake.wait(&mut queue),
                Turn::Nobody => {
                    let waits = queue.waiting > 0;
                    if !waits || self.wake.wait_for(&mut queue, Outbox::FAREWELL).timed_out() {
                        self.unlink(&mut queue);
                    }
                }
                // The link's own timeout is PATIENCE.
                Turn::Writer => match self.send_frames(&mut queue, true) {
                    Ok(Sent::All) => queue.turn = Turn::Nobody,
                    Ok(Sent::Replaced) => return,
                    Ok(Sent::Blocked) => {
                        queue.deaf = true;
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
            let offered = queue.begun.take();
            let (packs, whole) = (queue.packs && offered.is_none(), frame.len());
            let mut sent = offered.unwrap_or(0);
            let (begun, before) = (Instant::now(), sent);
            let result = MutexGuard::unlocked(queue, || {
                unless_it_panics(|| {
                    if packs && let Some(packed) = pack(&frame) {
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
                queue.pace.note(sent - before, begun.elapsed());
            }
            match result {
                Ok(()) => {
                    queue.bytes -= frame.len() as u64;
                    self.let_go(queue);
                    if queue.number != number || queue.link.is_none() {
                        return Ok(Sent::Replaced);
                    }
                    done += frame.len() as u64;
                    if !wait && done >= Outbox::IN_PASSING && !queue.is_empty() {
                        return Ok(Sent::Blocked);
                    }
                }
                Err(error) => {
                    queue.begun = Some(sent);
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
        (queue.begun, queue.bytes) = (None, 0);
        link.shutdown();
        self.wake.notify_all();
    }
}

/// A panic of ours is the end of the connection, and not of the thread that has the turn: without that nothing would be
/// sent on it any more, and its client would wait until its lease has run out.
fn unless_it_panics(write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(write))
        .unwrap_or_else(|_| Err(io::Error::other("the server has a bug; its log says where")))
}

/// How many bytes the answer to a call may have, if it is a read.
fn promised(call: &Call) -> u64 {
    match call {
        Call::Read { length, .. } => u64::from(*length),
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
