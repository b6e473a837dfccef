//! TLS on a socket, for one reader and one writer at once.

use crate::socket::Socket;
use parking_lot::Mutex;
use rustls::Connection;
use std::io::{self, Read, Write};

/// Bytes read from the socket at a time.
const RAW_BYTES: usize = 64 << 10;
/// Most bytes of the caller that one write encrypts.
const MAX_PLAINTEXT_PER_WRITE: usize = 64 << 10;
/// Exporter label (RFC 5705, RFC 8446 section 7.5).
const EXPORTER_LABEL: &[u8] = b"EXPORTER-nigh-link-token";

/// Lock order: `reading` or `writing`, then `connection`. No thread waits for the socket with `connection` held, so
/// neither direction can block the other.
pub(crate) struct Tls {
    connection: Mutex<Connection>,
    reading: Mutex<ReceiveBuffer>,
    writing: Mutex<PendingRecords>,
}

/// Received bytes that the connection has not processed yet.
struct ReceiveBuffer {
    bytes: Box<[u8]>,
    from: usize,
    to: usize,
}

/// Encrypted records not yet sent.
#[derive(Default)]
struct PendingRecords {
    records: Vec<u8>,
    /// Bytes of `records` that the socket took.
    sent: usize,
    /// Plaintext bytes in `records`. They count as written once all of `records` is sent.
    plaintext_bytes: usize,
}

impl Tls {
    /// Performs the handshake; the socket's bounds limit its time.
    ///
    /// # Errors
    /// `Ok(Err(_))` is an error of TLS itself; the peer gets an alert, if it still reads.
    pub fn handshake(
        mut connection: Connection,
        socket: &Socket,
    ) -> io::Result<std::result::Result<Tls, rustls::Error>> {
        connection.set_buffer_limit(None);
        let mut raw = ReceiveBuffer { bytes: vec![0; RAW_BYTES].into(), from: 0, to: 0 };
        loop {
            flush(&mut connection, socket)?;
            if !connection.is_handshaking() {
                break;
            }
            // The connection takes less at a time than the socket gives (4 KiB of an incomplete message).
            if raw.from == raw.to {
                raw.fill(socket, true)?;
            }
            if let Err(error) = raw.feed(&mut connection)? {
                // The caller gets the TLS error; an error of sending the alert is ignored.
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

    /// Returns key material that only the two ends know (a TLS exporter).
    pub fn exporter(&self) -> std::result::Result<[u8; 32], rustls::Error> {
        self.connection.lock().export_keying_material([0; 32], EXPORTER_LABEL, None)
    }

    /// As [`crate::Link::read`], and without `wait` as [`crate::Link::read_now`].
    pub fn read(&self, socket: &Socket, buffer: &mut [u8], wait: bool) -> io::Result<usize> {
        let mut raw = self.reading.lock();
        loop {
            {
                let mut connection = self.connection.lock();
                match connection.reader().read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // A cut stream counts as closed: the protocol above has a message of its own for an orderly end.
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
        if sealed.plaintext_bytes == 0 {
            let part = &bytes[..bytes.len().min(MAX_PLAINTEXT_PER_WRITE)];
            let mut connection = self.connection.lock();
            connection.writer().write_all(part)?;
            while connection.wants_write() {
                connection.write_tls(&mut sealed.records)?;
            }
            sealed.plaintext_bytes = part.len();
        }
        if sealed.plaintext_bytes > bytes.len() {
            // Not the rest of the refused bytes: the caller abandoned that write, for instance after a shutdown.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        while sealed.sent < sealed.records.len() {
            let sent = socket.send(&sealed.records[sealed.sent..], wait)?;
            sealed.sent += sent;
        }
        sealed.records.clear();
        sealed.sent = 0;
        Ok(std::mem::take(&mut sealed.plaintext_bytes))
    }
}

impl ReceiveBuffer {
    /// Reads bytes from the socket.
    fn fill(&mut self, socket: &Socket, wait: bool) -> io::Result<()> {
        (self.from, self.to) = (0, 0);
        self.to = socket.recv(&mut self.bytes, wait)?;
        if self.to == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    /// Passes the connection as many bytes as it takes now.
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
