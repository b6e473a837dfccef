//! One simulated client: a session, its socket, and the bytes in transit in either direction.

use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::{Event, Output, Remote};
use nigh_types::{
    Call, CallId, Credentials, MutationId, RecallId, Request, Response, SessionParams, Term, Time,
};

use super::caching_client::CachingClient;

/// Bytes, and when they arrive at the other end of the emulated link.
type InTransit = VecDeque<(Instant, Vec<u8>)>;

/// A complete reply, and its time.
pub struct CompletedReply {
    pub at: Instant,
    /// The parts of a listing; otherwise one.
    pub parts: Vec<Response>,
}

/// The clock and the emulated link of all members.
#[derive(Clone, Copy)]
pub struct EmulatedLink {
    pub began: Instant,
    /// One-way delay.
    pub delay: Duration,
}

impl EmulatedLink {
    pub fn time(self, at: Instant) -> Time {
        let ns = at.saturating_duration_since(self.began).as_nanos();
        Time(u64::try_from(ns).unwrap_or(u64::MAX - 1) + 1)
    }

    pub fn instant(self, time: Time) -> Option<Instant> {
        (time != Time::FAR).then(|| self.began + Duration::from_nanos(time.0))
    }
}

/// A client of the server under test. Its actions take effect in [`SimClient::advance`].
pub struct SimClient {
    pub stream: UnixStream,
    session: ClientSession,
    incoming: InTransit,
    outgoing: InTransit,
    number: u64,
    calls: u64,
    pub attached: Option<SessionParams>,
    pub lost: Option<String>,
    /// The server closed the connection.
    pub closed: bool,
    /// Whether it acknowledges recalls.
    pub acknowledges: bool,
    /// Recalls received, and when the session sent the latest acknowledgement.
    pub recalled: u64,
    pub acknowledged_at: Option<Instant>,
    /// Calls without a complete reply, and the parts received.
    waiting: BTreeMap<CallId, Vec<Response>>,
    pub answers: BTreeMap<CallId, CompletedReply>,
    /// A client with a cache: it makes its own calls and acknowledgements.
    pub cache: Option<Box<CachingClient>>,
    /// Bytes received on the link.
    pub bytes_received: u64,
}

impl SimClient {
    /// Creates a client that sends hello and requests these features; `number` is its identity.
    pub fn new(
        stream: UnixStream,
        link: EmulatedLink,
        number: u64,
        export: &str,
        features: u64,
    ) -> Result<SimClient> {
        stream.set_nonblocking(true)?;
        let attach = export.as_bytes().to_vec();
        let term = Term::Session;
        let config = ClientConfig { client: number, incarnation: number, attach, term, features };
        Ok(SimClient {
            stream,
            session: ClientSession::new(link.time(Instant::now()), config),
            incoming: VecDeque::new(),
            outgoing: VecDeque::new(),
            number,
            calls: 0,
            attached: None,
            lost: None,
            closed: false,
            acknowledges: true,
            recalled: 0,
            acknowledged_at: None,
            waiting: BTreeMap::new(),
            answers: BTreeMap::new(),
            cache: None,
            bytes_received: 0,
        })
    }

    pub fn renewals(&self) -> u64 {
        self.session.counters().renewals
    }

    /// Returns how many calls of a type were sent.
    pub fn calls_of(&self, kind: &str) -> u64 {
        self.session.counters().by_type.get(kind).copied().unwrap_or_default()
    }

    /// Returns the number of calls without a complete reply.
    pub fn outstanding(&self) -> u64 {
        self.waiting.len() as u64
    }

    pub fn call(&mut self, link: EmulatedLink, who: &Credentials, call: Call) -> CallId {
        self.calls += 1;
        let id = CallId(self.calls);
        let named = call.is_mutation();
        let name =
            named.then_some(MutationId { client: self.number, incarnation: self.number, sequence: id.0 });
        if call.has_reply() {
            self.waiting.insert(id, Vec::new());
        }
        let request = Request { credentials: who.clone(), mutation_id: name, call };
        self.session.handle_call(link.time(Instant::now()), id, request);
        id
    }

    /// Moves received bytes from the socket to the emulated link.
    pub fn receive(&mut self, link: EmulatedLink, buffer: &mut [u8]) -> Result<()> {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => {
                    self.closed = true;
                    self.session.handle_disconnect(link.time(Instant::now()), "end of stream");
                    return Ok(());
                }
                Ok(count) => {
                    let arrives = Instant::now() + link.delay;
                    self.bytes_received += count as u64;
                    self.incoming.push_back((arrives, buffer[..count].to_vec()));
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("a simulated client's socket"),
            }
        }
    }

    /// Executes everything due; returns the next deadline, if any.
    pub fn advance(&mut self, link: EmulatedLink) -> Result<Option<Instant>> {
        let mut now = Instant::now();
        while let Some(bytes) = arrived(&mut self.incoming, now) {
            self.session.handle_input(link.time(now), &bytes);
            self.drain(link, now);
        }
        let mut timer = self.drain(link, now);
        while let Some(at) = timer.filter(|at| *at <= now) {
            self.session.handle_timeout(link.time(at.max(now)));
            if let Some(reader) = &mut self.cache {
                reader.cache.handle_timeout(link.time(at.max(now)));
            }
            timer = self.drain(link, now);
            now = Instant::now();
        }
        while let Some(bytes) = arrived(&mut self.outgoing, now) {
            if let Some(rest) = self.write(bytes)? {
                self.outgoing.push_front((now + Duration::from_millis(1), rest));
                break;
            }
        }
        let fronts = [self.incoming.front(), self.outgoing.front()];
        Ok(fronts.into_iter().flatten().map(|(at, _)| *at).chain(timer).min())
    }

    /// Writes to the socket; returns the bytes that it did not accept.
    fn write(&mut self, bytes: Vec<u8>) -> Result<Option<Vec<u8>>> {
        match self.stream.write(&bytes) {
            Ok(count) if count == bytes.len() => Ok(None),
            Ok(count) => Ok(Some(bytes[count..].to_vec())),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(Some(bytes)),
            // The end of the connection is also read.
            Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => Ok(None),
            Err(e) => bail!("a simulated client's socket: {e}"),
        }
    }

    /// Executes the session's output; returns when it next needs a timeout.
    fn drain(&mut self, link: EmulatedLink, now: Instant) -> Option<Instant> {
        loop {
            match self.session.poll_output() {
                Output::Transmit(bytes) => self.outgoing.push_back((now + link.delay, bytes.to_vec())),
                Output::Event(event) => self.take(link, now, event),
                Output::Timeout(time, _) => {
                    let due = link.instant(time);
                    let Some(reader) = &mut self.cache else { return due };
                    let (moved, its_due) = reader.drive(&mut self.session, link, now);
                    if !moved {
                        return due.into_iter().chain(its_due).min();
                    }
                }
            }
        }
    }

    fn take(&mut self, link: EmulatedLink, now: Instant, event: Event) {
        match &event {
            Event::Attached(session) => self.attached = Some(session.clone()),
            Event::Lost { why } | Event::Expired { why } => self.lost = Some(why.clone()),
            _ => {}
        }
        if let Some(reader) = &mut self.cache {
            return reader.handle_event(link.time(now), event);
        }
        match event {
            Event::Attached(_) | Event::Lost { .. } | Event::Expired { .. } => {}
            // A lapsed session counts as lost.
            Event::Restored { .. } => {}
            Event::Recall(recall) => self.take_recall(link, now, recall.id),
            Event::UpdatePrepare(hold) => self.take_recall(link, now, hold.id),
            Event::UpdateCommit(_) => {}
            Event::Response { call, response } => {
                let last = response.last;
                let parts = self.waiting.entry(call).or_default();
                parts.push(response);
                if last {
                    let parts = self.waiting.remove(&call).unwrap_or_default();
                    self.answers.insert(call, CompletedReply { at: now, parts });
                }
            }
        }
    }

    fn take_recall(&mut self, link: EmulatedLink, now: Instant, recall: RecallId) {
        self.recalled += 1;
        if self.acknowledges {
            self.acknowledged_at = Some(now);
            self.session.handle_acknowledge(link.time(now), recall);
        }
    }
}

/// Returns the next bytes of the emulated link that have arrived.
fn arrived(link: &mut InTransit, now: Instant) -> Option<Vec<u8>> {
    link.front().filter(|(at, _)| *at <= now)?;
    link.pop_front().map(|(_, bytes)| bytes)
}
