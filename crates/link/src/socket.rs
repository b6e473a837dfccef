//! A stream socket of any family, with a limit on total time and bytes.

use parking_lot::Mutex;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A socket for one reader and one writer at once; `shutdown` wakes both.
pub(crate) struct Socket {
    fd: OwnedFd,
    bounded: AtomicBool,
    bounds: Mutex<Option<Bounds>>,
}

/// The limit on time and bytes spent on an unauthenticated peer.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    pub until: Instant,
    /// Bytes that may still be read.
    pub bytes: usize,
}

impl Socket {
    pub fn new(fd: OwnedFd) -> Socket {
        Socket { fd, bounded: AtomicBool::new(false), bounds: Mutex::new(None) }
    }

    /// Limits reads and writes to `bounds`: they fail after `until`, and at most `bytes` are read. `None` lifts the
    /// limit. While the limit is set, each call sets the socket timeout anew; lifting the limit clears the timeouts.
    pub fn bound(&self, bounds: Option<Bounds>) -> io::Result<()> {
        *self.bounds.lock() = bounds;
        self.bounded.store(bounds.is_some(), Ordering::Release);
        if bounds.is_none() {
            self.set_timeout(Timeout::Recv, None)?;
            self.set_timeout(Timeout::Send, None)?;
        }
        Ok(())
    }

    /// Reads some bytes. 0: the peer closed the stream. `WouldBlock`: nothing was there, or (with `wait`) arrived
    /// within the read timeout.
    pub fn recv(&self, buffer: &mut [u8], wait: bool) -> io::Result<usize> {
        let room = match self.remaining(Timeout::Recv)? {
            Some(0) => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it said too much"));
            }
            Some(bytes) => buffer.len().min(bytes),
            None => buffer.len(),
        };
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        let count = loop {
            match rustix::net::recv(&self.fd, &mut buffer[..room], flags) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?.0,
            }
        };
        if self.bounded.load(Ordering::Acquire)
            && let Some(bounds) = self.bounds.lock().as_mut()
        {
            bounds.bytes = bounds.bytes.saturating_sub(count);
        }
        Ok(count)
    }

    /// Writes some bytes and returns the count. `WouldBlock`: no room at once or (with `wait`) within the write
    /// timeout.
    pub fn send(&self, bytes: &[u8], wait: bool) -> io::Result<usize> {
        self.remaining(Timeout::Send)?;
        let flags = if wait { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
        loop {
            match rustix::net::send(&self.fd, bytes, flags) {
                Err(rustix::io::Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn set_timeout(&self, which: Timeout, timeout: Option<Duration>) -> io::Result<()> {
        Ok(set_socket_timeout(&self.fd, which, timeout)?)
    }

    /// Wakes the reader and the writer and ends the stream in both directions.
    pub fn shutdown(&self) {
        // The peer may have closed the socket already.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Returns the bytes that may still be read, if they are limited, and sets the timeout to the time left.
    fn remaining(&self, which: Timeout) -> io::Result<Option<usize>> {
        if !self.bounded.load(Ordering::Acquire) {
            return Ok(None);
        }
        let Some(Bounds { until, bytes }) = *self.bounds.lock() else { return Ok(None) };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long"));
        }
        // The kernel treats a timeout of 0 µs as no timeout.
        self.set_timeout(which, Some(left.max(Duration::from_millis(1))))?;
        Ok(Some(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    fn pair() -> (Arc<Socket>, Socket) {
        let (one, two) = UnixStream::pair().unwrap();
        (Arc::new(Socket::new(one.into())), Socket::new(two.into()))
    }

    #[test]
    fn time_limit_holds_over_many_small_reads() {
        let (ours, theirs) = pair();
        let begun = Instant::now();
        ours.bound(Some(Bounds { until: begun + Duration::from_millis(200), bytes: 1 << 20 })).unwrap();
        let dripping = std::thread::spawn(move || {
            while theirs.send(b"x", true).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let error = loop {
            if let Err(error) = ours.recv(&mut [0; 16], true) {
                break error;
            }
        };
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(190) && took < Duration::from_secs(2), "{took:?}");
        ours.shutdown();
        dripping.join().unwrap();
    }

    #[test]
    fn no_more_bytes_are_taken_than_allowed() {
        let (ours, theirs) = pair();
        ours.bound(Some(Bounds { until: Instant::now() + Duration::from_secs(5), bytes: 10 })).unwrap();
        theirs.send(&[7; 64], true).unwrap();
        assert_eq!(ours.recv(&mut [0; 64], true).unwrap(), 10);
        assert_eq!(ours.recv(&mut [0; 64], true).unwrap_err().kind(), io::ErrorKind::InvalidData);
        ours.bound(None).unwrap();
        assert_eq!(ours.recv(&mut [0; 64], true).unwrap(), 54);
    }

    #[test]
    fn shutdown_wakes_reader_and_writer() {
        let (ours, _theirs) = pair();
        let reader = Arc::clone(&ours);
        let reader = std::thread::spawn(move || reader.recv(&mut [0; 16], true).unwrap());
        let writer = Arc::clone(&ours);
        let writer = std::thread::spawn(move || while writer.send(&[0; 65536], true).is_ok() {});
        std::thread::sleep(Duration::from_millis(50));
        ours.shutdown();
        assert_eq!(reader.join().unwrap(), 0);
        writer.join().unwrap();
    }
}
