//! What waits to be written to a client.

use nigh_link::Link;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// Frames on their way to one client, in order.
///
/// Whoever adds a frame sends it at once if the link takes it; what it does not take is left to
/// the session's writer thread. A client that reads nothing for [`Outbox::PATIENCE`], or lets
/// [`Outbox::LIMIT`] bytes pile up, loses its session; nobody ever waits for it longer.
pub(crate) struct Outbox {
    link: Link,
    queue: Mutex<Queue>,
    /// The writer has something to do.
    wake: Condvar,
    /// There is room again.
    room: Condvar,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Vec<u8>>,
    /// Bytes of the first frame that are sent already.
    sent: usize,
    bytes: usize,
    turn: Turn,
    /// No frames come any more; close when all are sent.
    ending: bool,
    /// The connection is closed; frames are dropped.
    closed: bool,
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
    /// Listings wait while more than this is queued.
    const CALM: usize = 4 << 20;
    pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

    pub(crate) fn new(link: Link) -> Outbox {
        Outbox { link, queue: Mutex::default(), wake: Condvar::new(), room: Condvar::new() }
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
            queue.frames.push_back(frame);
        }
        if queue.bytes > Outbox::LIMIT {
            self.close_locked(&mut queue);
        }
        !queue.closed
    }

    /// Sends what the link takes without waiting.
    pub(crate) fn send(&self) {
        let mut queue = self.queue.lock();
        if queue.turn != Turn::Nobody || queue.closed || queue.frames.is_empty() {
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

    /// Waits until little is queued; false when the connection is closed.
    pub(crate) fn wait_for_room(&self) -> bool {
        let mut queue = self.queue.lock();
        while queue.bytes > Outbox::CALM && !queue.closed {
            self.room.wait(&mut queue);
        }
        !queue.closed
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
                Turn::Nobody if queue.frames.is_empty() && queue.ending => self.close_locked(&mut queue),
                Turn::Nobody if queue.frames.is_empty() => self.wake.wait(&mut queue),
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
        while let Some(frame) = queue.frames.pop_front() {
            let mut sent = std::mem::take(&mut queue.sent);
            let result: io::Result<()> = MutexGuard::unlocked(queue, || {
                while sent < frame.len() {
                    sent += self.link.write(&frame[sent..], wait)?;
                }
                Ok(())
            });
            match result {
                Ok(()) => {
                    queue.bytes = queue.bytes.saturating_sub(frame.len());
                    if queue.bytes <= Outbox::CALM {
                        self.room.notify_all();
                    }
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
        queue.bytes = 0;
        self.link.shutdown();
        self.wake.notify_all();
        self.room.notify_all();
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
        (Arc::new(Outbox::new(ours.into())), theirs)
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
        assert!(!outbox.wait_for_room());
        writer.join().unwrap();
        assert!(!outbox.add([vec![1]]));
    }
}
