//! A stream of any kind.

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

/// What a stream runs over.
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
    /// Whether the kernel itself says reliably when the other end is gone.
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

/// An ordered stream of bytes, both ways. Clones are the same stream, which is closed when the last of
/// them is gone.
///
/// **Contract.** One thread may read while another writes. What waits in either is woken by
/// [`Link::shutdown`]. A write that did not take all is to be repeated with the bytes that are left,
/// and nothing else is written before. Whoever gives one up shuts the stream down; what is written
/// after that fails.
#[derive(Clone)]
pub struct Link(Arc<Inner>);

struct Inner {
    kind: Kind,
    tls: Option<Tls>,
    /// Ended before the socket is closed.
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

    /// `socket` is our end of what is `process`'s standard input and output.
    pub(crate) fn process(socket: Socket, process: Process) -> Link {
        Link(Arc::new(Inner::new(Kind::Ssh, None, Some(process), socket)))
    }

    /// Something that people should be told once.
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

    /// Something that people should be told once about this link: one line.
    #[must_use]
    pub fn note(&self) -> Option<&str> {
        self.0.note.as_deref()
    }

    /// 0: the other end closed. `WouldBlock`: nothing came within the read timeout.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.take(buffer, true)
    }

    /// The same without waiting; `WouldBlock`: there is nothing. Only then does the descriptor
    /// ([`AsFd`]) become readable when there is something again.
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

    /// How many of the bytes were written: some. Waits for room if `wait`; `WouldBlock`: there was none, at
    /// once or within the write timeout.
    pub fn write(&self, bytes: &[u8], wait: bool) -> io::Result<usize> {
        let count = match &self.0.tls {
            Some(tls) => tls.write(&self.0.socket, bytes, wait),
            None => self.0.socket.send(bytes, wait),
        }?;
        self.0.written.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    /// How many bytes were read and written so far, above any encryption.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.0.read.load(Ordering::Relaxed), self.0.written.load(Ordering::Relaxed))
    }

    /// Waits until all is written. After an error it is not known how much was.
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

    /// Ends the stream in both directions; what waits in it is woken. What was written may still arrive.
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

    /// What both ends and nobody else know; `None` without TLS.
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

/// To be told when there is something to read, and for nothing else.
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
