//! Control requests on the server's unix sockets, sent before a session or instead of one.
//!
//! A connection whose first write is [`REQUEST`] gets one JSON object as reply and is closed. The kernel proves the
//! peer's uid: only root and the server's own user get the status. Read as a frame header, these bytes exceed the
//! length limit for unauthenticated peers, so no session begins with them.
//!
//! A connection that begins with [`THERE`] gets [`HERE`] and continues as usual. connect(2) succeeds once the
//! connection is queued; only this reply proves that a living server has accepted it.

use crate::server::Server;
use rustix::net::{RecvFlags, recv};
use rustix::process::geteuid;
use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const REQUEST: &[u8; 14] = b"nigh status 1\n";
/// Followed by one line with exports and addresses (`guests.rs`).
pub(crate) const SERVE: &[u8; 14] = b"nigh serve  1\n";
const THERE: &[u8; 14] = b"nigh there? 1\n";
const HERE: &[u8; 12] = b"nigh here 1\n";
/// Time limit for either end.
const PATIENCE: Duration = Duration::from_secs(5);
/// More than the status of thousands of sessions.
const MOST_BYTES: u64 = 64 << 20;

/// Purpose of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    Session,
    Status,
    /// Another process of this user adds exports and listeners. The request is consumed up to the line.
    Serve,
    /// The connection ended, or was silent for the time that a session has to begin.
    Nothing,
}

/// Waits for the first bytes and peeks at them. Only [`THERE`] is consumed, and answered once.
pub(crate) fn purpose(mut stream: &UnixStream, patience: Duration) -> Purpose {
    let mut greeted = false;
    if stream.set_read_timeout(Some(patience)).is_err() {
        return Purpose::Nothing;
    }
    loop {
        let mut head = [0; REQUEST.len()];
        match recv(stream, &mut head[..], RecvFlags::PEEK) {
            Err(rustix::io::Errno::INTR) => {}
            Err(_) | Ok((0, _)) => return Purpose::Nothing,
            Ok(_) if &head == REQUEST => return Purpose::Status,
            Ok(_) if &head == SERVE => {
                return if stream.read_exact(&mut head).is_ok() { Purpose::Serve } else { Purpose::Nothing };
            }
            Ok(_) if &head == THERE && !greeted => {
                greeted = true;
                if stream.read_exact(&mut head).is_err() || stream.write_all(HERE).is_err() {
                    return Purpose::Nothing;
                }
            }
            Ok(_) => return Purpose::Session,
        }
    }
}

/// Checks that a server has accepted this new connection; a session can then begin on it. False: the server that
/// queued it has ended, or does not know this request; the connection is useless.
///
/// # Errors
/// `TimedOut` if no reply arrives in time.
pub(crate) fn is_served(mut stream: &UnixStream, patience: Duration) -> io::Result<bool> {
    stream.set_read_timeout(Some(patience))?;
    let mut answer = [0; HERE.len()];
    let answered = stream.write_all(THERE).and_then(|()| stream.read_exact(&mut answer));
    stream.set_read_timeout(None)?;
    match answered {
        Ok(()) => Ok(&answer == HERE),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => Err(
            io::Error::new(io::ErrorKind::TimedOut, "the server does not answer; if it is stopped, end it"),
        ),
        Err(_) => Ok(false),
    }
}

/// Answers a status request of `uid`, within [`PATIENCE`] in all.
pub(crate) fn answer(mut stream: UnixStream, uid: u32, server: &Server) {
    // The kernel would discard the reply if unread input remained at close.
    if stream.read_exact(&mut [0; REQUEST.len()]).is_err() {
        return;
    }
    let may = uid == 0 || uid == geteuid().as_raw();
    let status = if may {
        server.status()
    } else {
        tracing::debug!(uid, "another user asks for the status");
        json!({ "refused": "only root and the user whose server it is may ask for its status" })
    };
    write_within(&mut stream, status.to_string().as_bytes(), PATIENCE);
}

/// Writes as much as the peer reads within the time limit, however slowly.
fn write_within(stream: &mut UnixStream, mut left: &[u8], patience: Duration) {
    let give_up = Instant::now() + patience;
    while !left.is_empty() {
        let patience = give_up.saturating_duration_since(Instant::now());
        if patience.is_zero() || stream.set_write_timeout(Some(patience)).is_err() {
            return;
        }
        match stream.write(left) {
            Ok(count) if count > 0 => left = &left[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

/// Requests the status of the server that listens at `socket`.
///
/// # Errors
/// `ConnectionRefused` and `NotFound` if no server listens; otherwise one line.
pub fn ask(socket: &Path) -> io::Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(REQUEST)?;
    let mut text = Vec::new();
    (&mut stream).take(MOST_BYTES).read_to_end(&mut text)?;
    let invalid = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem.to_owned());
    let status: Value = serde_json::from_slice(&text).map_err(|_| {
        invalid("no nigh server of this version answers there: restart it, or name its socket")
    })?;
    match status.get("refused").and_then(Value::as_str) {
        Some(why) => Err(io::Error::new(io::ErrorKind::PermissionDenied, why)),
        None => Ok(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_distinguish_control_request_from_session() {
        let after = |said: &[u8]| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(said).unwrap();
            let found = purpose(&ours, Duration::from_millis(50));
            // The bytes are not consumed.
            ours.set_nonblocking(true).unwrap();
            let mut left = vec![0; said.len()];
            assert!(said.is_empty() || { &ours }.read(&mut left).unwrap() == said.len() && left == said);
            found
        };
        assert_eq!(after(REQUEST), Purpose::Status);
        assert_eq!(after(b"nigh status 1\nmore"), Purpose::Status);
        for other in [&b"nigh status 2\n"[..], b"nigh statu", b"nigh there? 2\n", b"n", &[0; 100]] {
            assert_eq!(after(other), Purpose::Session, "{other:?}");
        }
        let begin = Instant::now();
        assert_eq!(after(b""), Purpose::Nothing);
        assert!(begin.elapsed() >= Duration::from_millis(50));
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(purpose(&ours, Duration::from_secs(60)), Purpose::Nothing);
    }

    #[test]
    fn session_continues_after_liveness_request() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || (purpose(&ours, Duration::from_secs(10)), ours));
        assert!(is_served(&theirs, Duration::from_secs(10)).unwrap());
        theirs.write_all(b"hello").unwrap();
        let (purpose, mut ours) = server.join().unwrap();
        assert_eq!(purpose, Purpose::Session);
        let mut said = [0; 5];
        ours.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"hello");

        // Repeated, THERE is no greeting but the start of a session.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[&THERE[..], THERE].concat()).unwrap();
        assert_eq!(super::purpose(&ours, Duration::from_secs(10)), Purpose::Session);

        let (ours, theirs) = UnixStream::pair().unwrap();
        let silent = is_served(&theirs, Duration::from_millis(50)).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        drop(ours);
        assert!(!is_served(&theirs, Duration::from_secs(10)).unwrap());
    }

    #[test]
    fn status_reply_to_slow_reader_is_abandoned_at_timeout() {
        let text = vec![b'x'; 8 << 20];
        for slowly in [false, true] {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            let reader = std::thread::spawn(move || {
                while slowly && theirs.read(&mut [0; 1]).is_ok_and(|count| count > 0) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                theirs
            });
            let begin = Instant::now();
            write_within(&mut ours, &text, Duration::from_millis(300));
            let took = begin.elapsed();
            assert!(took >= Duration::from_millis(250) && took < Duration::from_secs(3), "{took:?}");
            // The slow reader would take long to drain the rest of the buffer.
            ours.shutdown(std::net::Shutdown::Both).unwrap();
            drop((ours, slowly));
            std::mem::drop(reader);
        }
    }
}
