//! A byte stream over any transport.

use crate::process::Process;
use crate::socket::{Bounds, Socket};
use crate::tls::Tls;
use rustix::net::sockopt::Timeout;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The transport of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A unix socket, or a pair of them in one process.
    Unix,
    /// TCP without encryption.
    Tcp,
    /// TLS over TCP.
    Tls,
    /// The standard streams of the user's ssh.
    Ssh,
}

impl Kind {
    /// Whether the kernel itself reports reliably that the peer is gone.
    #[must_use]
    pub fn is_local(self) -> bool {
        self == Kind::Unix
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Unix => "unix",
            Kind::Tcp => "tcp",
            Kind::Tls => "tls",
            Kind::Ssh => "ssh",
        })
    }
}

/// An ordered byte stream in both directions. Clones share one stream, which is closed when the last clone is
/// dropped.
///
/// **Contract.** One thread may read while another writes. [`Link::shutdown`] wakes threads that wait in either.
/// After a partial write the caller writes the remaining bytes next, and nothing else before them. A caller that
/// abandons a partial write shuts the stream down; later writes fail.
#[derive(Clone)]
pub struct Link(Arc<Inner>);

struct Inner {
    kind: Kind,
    tls: Option<Tls>,
    /// Dropped before `socket`, so `Process::end` runs before the socket is closed.
    process: Option<Process>,
    socket: Socket,
    note: Option<String>,
    read: AtomicU64,
    written: AtomicU64,
}

impl Inner {
    fn new(kind: Kind, tls: Option<Tls>, process: Option<Process>, socket: Socket) -> Inner {
        let (read, written) = (AtomicU64::new(0), AtomicU64::new(0));
        Inner { kind, tls, process, socket, note: None, read, written }
    }
}

impl Link {
    pub(crate) fn new(kind: Kind, socket: Socket) -> Link {
        Link(Arc::new(Inner::new(kind, None, None, socket)))
    }

    pub(crate) fn tls(socket: Socket, tls: Tls) -> Link {
        Link(Arc::new(Inner::new(Kind::Tls, Some(tls), None, socket)))
    }

    /// Wraps `socket`, our end of the standard input and output of `process`.
    pub(crate) fn process(socket: Socket, process: Process) -> Link {
        Link(Arc::new(Inner::new(Kind::Ssh, None, Some(process), socket)))
    }

    /// Attaches a notice that is shown to the user once.
    pub(crate) fn with_note(mut self, note: String) -> Link {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.note = Some(note);
        }
        self
    }

    #[must_use]
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// Returns a one-line notice about this link that is shown to the user once.
    #[must_use]
    pub fn note(&self) -> Option<&str> {
        self.0.note.as_deref()
    }

    /// Reads some bytes. 0: the peer closed the stream. `WouldBlock`: nothing arrived within the read timeout.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.take(buffer, true)
    }

    /// Reads without waiting; `WouldBlock`: nothing is available. Only after `WouldBlock` does the descriptor
    /// ([`AsFd`]) become readable when more arrives.
    pub fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.take(buffer, false)
    }

    fn take(&self, buffer: &mut [u8], wait: bool) -> io::Result<usize> {
        let count = match &self.0.tls {
            Some(tls) => tls.read(&self.0.socket, buffer, wait),
            None => self.0.socket.recv(buffer, wait),
        }?;
        self.0.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    /// Writes at least one byte and returns the count. With `wait`, waits for room. `WouldBlock`: there was no room,
    /// at once or within the write timeout.
    pub fn write(&self, bytes: &[u8], wait: bool) -> io::Result<usize> {
        let count = match &self.0.tls {
            Some(tls) => tls.write(&self.0.socket, bytes, wait),
            None => self.0.socket.send(bytes, wait),
        }?;
        self.0.written.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    /// Bytes read and written so far, above any encryption.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.0.read.load(Ordering::Relaxed), self.0.written.load(Ordering::Relaxed))
    }

    /// Writes all bytes. After an error it is unknown how many were written.
    pub fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self.write(bytes, true)?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Ends the stream in both directions and wakes waiting threads. Bytes written before may still arrive.
    pub fn shutdown(&self) {
        self.0.socket.shutdown();
        if let Some(process) = &self.0.process {
            process.end();
        }
    }

    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.socket.set_timeout(Timeout::Recv, timeout)
    }

    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.socket.set_timeout(Timeout::Send, timeout)
    }

    pub(crate) fn bound(&self, bounds: Option<Bounds>) -> io::Result<()> {
        self.0.socket.bound(bounds)
    }

    /// Returns key material that only the two ends know (a TLS exporter); `None` without TLS.
    pub(crate) fn exporter(&self) -> Result<Option<[u8; 32]>, rustls::Error> {
        self.0.tls.as_ref().map(Tls::exporter).transpose()
    }

    pub(crate) fn read_exact(&self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            let count = self.read(buffer)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buffer = &mut buffer[count..];
        }
        Ok(())
    }
}

/// The descriptor serves for polling for input, and for nothing else.
impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }
}

impl From<UnixStream> for Link {
    fn from(stream: UnixStream) -> Link {
        Link::new(Kind::Unix, Socket::new(stream.into()))
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({})", self.0.kind)
    }
}
