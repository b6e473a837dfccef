//! A raw connection to a server, for hand-made messages.

use super::me;
use super::world::World;
use nigh_link::Peer;
use nigh_native::{
    Frame, FrameReader, Hello, MAX_BODY, MAX_VERSION, Message, Resume, Welcome, encode_request,
};
use nigh_types::*;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Result of receiving.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one at a time, and looked into by patterns")]
pub enum Heard {
    Message(Message),
    /// The connection has ended.
    End,
    /// The read timeout expired.
    Silence,
}

pub struct Raw {
    pub stream: UnixStream,
    frames: FrameReader,
    rest: Vec<u8>,
}

impl Raw {
    pub fn hello(world: &World, peer: Option<Peer>, hello: Hello) -> Raw {
        let stream = match peer {
            None => world.server.serve_in_process().unwrap(),
            Some(peer) => {
                let (theirs, ours) = UnixStream::pair().unwrap();
                let server = world.server.clone();
                std::thread::spawn(move || server.serve_link(ours.into(), peer));
                theirs
            }
        };
        let mut raw = Raw { stream, frames: FrameReader::new(MAX_BODY), rest: vec![] };
        raw.waits(Duration::from_secs(10));
        raw.say(&Message::Hello(hello));
        raw
    }

    /// Sets how long [`Raw::handle_bytes`] waits.
    pub fn waits(&mut self, patience: Duration) {
        self.stream.set_read_timeout(Some(patience)).unwrap();
    }

    pub fn say(&mut self, message: &Message) {
        let _ = self.stream.write_all(&message.encode());
    }

    pub fn ask(&mut self, id: u64, call: Call) {
        let request = Request { credentials: me(), mutation_id: None, call };
        let _ = self.stream.write_all(&encode_request(CallId(id), &request));
    }

    pub fn hear(&mut self) -> Heard {
        loop {
            let mut input = &self.rest[..];
            let frame: Option<Frame<'_>> = self.frames.next(&mut input).unwrap();
            let message = frame.map(|frame| Message::decode(&frame).unwrap());
            self.rest = input.to_vec();
            if let Some(message) = message {
                return Heard::Message(message);
            }
            let mut buffer = vec![0; 1 << 20];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Heard::End,
                Ok(count) => self.rest.extend_from_slice(&buffer[..count]),
                Err(error) => match error.kind() {
                    ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => return Heard::End,
                    ErrorKind::WouldBlock => return Heard::Silence,
                    ErrorKind::Interrupted => {}
                    _ => panic!("{error}"),
                },
            }
        }
    }

    /// Returns the next message, which must arrive.
    pub fn message(&mut self) -> Message {
        match self.hear() {
            Heard::Message(message) => message,
            other => panic!("{other:?}"),
        }
    }

    /// Reads until the connection ends, which it must.
    pub fn ends(&mut self) {
        loop {
            match self.hear() {
                Heard::Message(_) => {}
                Heard::End => return,
                Heard::Silence => panic!("the connection stands"),
            }
        }
    }

    /// Returns the next response, or `None` after the timeout; the connection must stay open.
    pub fn answer(&mut self) -> Option<Response> {
        loop {
            match self.hear() {
                Heard::Message(Message::Received(_) | Message::Recall(_) | Message::Pong(..)) => {}
                Heard::Message(Message::Response(_, response)) => return Some(response),
                Heard::Silence => return None,
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn welcome(&mut self) -> Welcome {
        match self.message() {
            Message::Welcome(welcome) => welcome,
            other => panic!("{other:?}"),
        }
    }
}

/// A hello of client 1.
pub fn hello(world: &World, incarnation: u64, resume: Option<Resume>) -> Hello {
    Hello {
        min_version: MAX_VERSION,
        max_version: MAX_VERSION,
        features: 0,
        client: 1,
        incarnation,
        attach: world.dir.path().as_os_str().as_bytes().to_vec(),
        term: Term::Session,
        moment: u64::MAX / 2,
        resume,
    }
}
