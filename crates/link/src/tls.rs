//! TLS on a socket, for one reader and one writer at once.

use crate::socket::Socket;
use parking_lot::Mutex;
use rustls::Connection;
use std::io::{self, Read, Write};

/// Bytes read from the socket at a time.
const RAW_BYTES: usize = 64 << 10;
/// Bytes of the caller that are sealed at a time.
const SEALED_AT_ONCE: usize = 64 << 10;
/// As exporters are labelled (RFC 5705, RFC 8446 section 7.5).
const EXPORTER_LABEL: &[u8] = b"EXPORTER-nigh-link-token";

/// Locks, in this order: `reading` or `writing`, then `connection`. Nobody waits for the socket with
/// `connection` held, so neither direction can stop the other.
pub(crate) struct Tls {
    connection: Mutex<Connection>,
    reading: Mutex<Raw>,
    writing: Mutex<Sealed>,
}

/// What came from the socket and the connection has not looked at yet.
struct Raw {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

/// Records on their way to the socket.
#[derive(Default)]
struct Sealed {
    records: Vec<u8>,
    /// Bytes of them that the socket took.
    sent: usize,
    /// Bytes of the caller that they hold. They count as written when all of `records` is.
    claimed: usize,
}

impl Tls {
    /// Agrees with the other end; the socket's bounds say how long that may take.
    ///
    /// # Errors
    /// `Ok(Err(_))` is TLS's own error: the other end has been told, if it listens.
    pub fn agree(
        mut connection: Connection,
        socket: &Socket,
    ) -> io::Result<std::result::Result<Tls, rustls::Error>> {
        connection.set_buffer_limit(None);
        let mut raw = Raw { bytes: vec![0; RAW_BYTES].into(), from: 0, to: 0 };
        loop {
            flush(&mut connection, socket)?;
            if !connection.is_handshaking() {
                break;
            }
            // The connection takes less at a time than the socket gives (4 KiB of a message not yet whole).
            if raw.from == raw.to {
                raw.fill(socket, true)?;
            }
            if let Err(error) = raw.feed(&mut connection)? {
                // Our own error is the one to tell.
                let _ = flush(&mut connection, socket);
                return Ok(Err(error));
            }
        }
        Ok(Ok(Tls {
            connection: Mutex::new(connection),
            reading: Mutex::new(raw),
            writing: Mutex::default(),
        }))
    }

    /// What both ends of this connection know and nobody else.
    pub fn exporter(&self) -> std::result::Result<[u8; 32], rustls::Error> {
        self.connection.lock().export_keying_material([0; 32], EXPORTER_LABEL, None)
    }

    /// As [`crate::Link::read`], and with no `wait` as [`crate::Link::read_now`].
    pub fn read(&self, socket: &Socket, buffer: &mut [u8], wait: bool) -> io::Result<usize> {
        let mut raw = self.reading.lock();
        loop {
            {
                let mut connection = self.connection.lock();
                match connection.reader().read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // A stream that is cut off is a closed one: what is said on it has its own farewell.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                    other => return other,
                }
                if raw.from < raw.to {
                    if let Err(error) = raw.feed(&mut connection)? {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                    }
                    continue;
                }
            }
            match raw.fill(socket, wait) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                other => other?,
            }
        }
    }

    /// As [`crate::Link::write`].
    pub fn write(&self, socket: &Socket, bytes: &[u8], wait: bool) -> io::Result<usize> {
        let mut sealed = if wait {
            self.writing.lock()
        } else {
            self.writing.try_lock().ok_or(io::ErrorKind::WouldBlock)?
        };
        if bytes.is_empty() {
            return Ok(0);
        }
        if sealed.claimed == 0 {
            let part = &bytes[..bytes.len().min(SEALED_AT_ONCE)];
            let mut connection = self.connection.lock();
            connection.writer().write_all(part)?;
            while connection.wants_write() {
                connection.write_tls(&mut sealed.records)?;
            }
            sealed.claimed = part.len();
        }
        if sealed.claimed > bytes.len() {
            // This is not the rest of what was refused: that one was given up, as after the stream's end.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        while sealed.sent < sealed.records.len() {
            let sent = socket.send(&sealed.records[sealed.sent..], wait)?;
            sealed.sent += sent;
        }
        sealed.records.clear();
        sealed.sent = 0;
        Ok(std::mem::take(&mut sealed.claimed))
    }
}

impl Raw {
    /// Takes bytes off the socket.
    fn fill(&mut self, socket: &Socket, wait: bool) -> io::Result<()> {
        (self.from, self.to) = (0, 0);
        self.to = socket.recv(&mut self.bytes, wait)?;
        if self.to == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    /// Gives the connection what it takes now.
    fn feed(&mut self, connection: &mut Connection) -> io::Result<std::result::Result<(), rustls::Error>> {
        let taken = connection.read_tls(&mut &self.bytes[self.from..self.to])?;
        self.from += taken;
        Ok(connection.process_new_packets().map(drop))
    }
}

fn flush(connection: &mut Connection, socket: &Socket) -> io::Result<()> {
    let mut records = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut records)?;
    }
    let mut sent = 0;
    while sent < records.len() {
        sent += socket.send(&records[sent..], true)?;
    }
    Ok(())
}
