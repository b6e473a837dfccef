//! A world with the native protocol's state machines at both ends, and byte streams between them that are late, cut or
//! lost.
//!
//! | module | contents |
//! | --- | --- |
//! | `clock`, `links` | clocks that run at different rates; connections |
//! | `server`, `session`, `calls`, `write_back` | a server without threads |
//! | `history`, `counts` | seeded histories, and their statistics |
//!
//! The fake server has tests of its own: it does what a correct server never does, and so tests the cache alone.

mod calls;
mod clock;
mod counts;
mod explicit_schedule;
mod history;
#[cfg(test)]
mod lease_quota;
mod links;
#[cfg(test)]
mod pages;
mod server;
mod session;
mod write_back;

pub use counts::Counts;
pub(crate) use explicit_schedule::Move;
pub use history::{Plan, run};

use crate::random::Dice;
use crate::world::Backend;
use clock::Clock;
use links::{Link, Pipe};
use nigh_lease::LeaseConfig;
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::model_fs::{ModelFs, ModelFsConfig};
use nigh_remote::{Output, Reason, Remote};
use nigh_types::{CallId, Event, GrantId, RecallId, Request, Span, Time};
use server::{Server, ServerOutput};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// Of so many frames of a garbled client, one is corrupted.
const CORRUPTED_FRAMES: u64 = 12;

/// A server, its clients' ends, and the connections between them.
#[derive(Clone)]
pub(crate) struct Native {
    net: Rc<RefCell<Net>>,
}

#[derive(Clone)]
struct Net {
    now: Time,
    server: Server,
    ends: Vec<ClientEnd>,
    links: BTreeMap<u64, Link>,
    last_link: u64,
    dice: Dice,
    /// Time of the last fault that clients may have noticed.
    last_fault: Time,
    /// Frames from and to this client are corrupted now and then.
    corrupted_client: Option<usize>,
    /// The sender of each frame gets its acknowledgement at once, and a client that wants a new connection has it at
    /// once.
    acknowledges_at_once: bool,
    /// Frames received per session at the time: by the server from its client, and by the client from the server.
    frames_received: BTreeMap<u64, (u64, u64)>,
}

/// A client's session, and the state of its machine.
#[derive(Clone)]
struct ClientEnd {
    config: ClientConfig,
    session: ClientSession,
    clock: Clock,
    /// Latency to the server, and back.
    latency: (Span, Span),
    link: Option<u64>,
    events: VecDeque<Event>,
    due: (Time, Reason),
    /// When it next tries to connect.
    reconnect_at: Option<Time>,
    /// Connecting fails before this time.
    down_until: Time,
    paused: bool,
}

/// One client's [`Remote`].
#[derive(Clone)]
pub(crate) struct End {
    at: usize,
    net: Rc<RefCell<Net>>,
}

/// A client's clock, link and session parameters.
#[derive(Clone, Copy)]
pub(crate) struct ClientSetup {
    clock: Clock,
    latency: (Span, Span),
    term: nigh_types::Term,
    features: u64,
}

impl ClientSetup {
    /// A client with an exact clock and no latency.
    pub(crate) fn near(features: u64) -> ClientSetup {
        let (clock, latency) = (Clock::exact(), (Span::ZERO, Span::ZERO));
        ClientSetup { clock, latency, term: nigh_types::Term::Session, features }
    }

    /// A client with an exact clock and the given latency to the server and back.
    pub(crate) fn far(features: u64, latency: (Span, Span)) -> ClientSetup {
        ClientSetup { latency, ..ClientSetup::near(features) }
    }
}

impl Native {
    pub(crate) fn new(tree: ModelFsConfig, leases: LeaseConfig, seed: u64) -> Native {
        let server = Server::new(ModelFs::new(tree), leases, Some(Dice::new(seed ^ 0x5e5e)));
        let dice = Dice::new(seed ^ 0x11e7);
        let (ends, links) = (Vec::new(), BTreeMap::new());
        let (now, last_link, troubled, garbled) = (Time(0), 0, Time(0), None);
        let (prompt, heard) = (false, BTreeMap::new());
        let net = Net {
            now,
            server,
            ends,
            links,
            last_link,
            dice,
            last_fault: troubled,
            corrupted_client: garbled,
            acknowledges_at_once: prompt,
            frames_received: heard,
        };
        Native { net: Rc::new(RefCell::new(net)) }
    }

    /// Connects another client, whose session sends hello.
    pub(crate) fn connect(&self, now: Time, place: ClientSetup) -> End {
        let mut net = self.net.borrow_mut();
        net.now = net.now.max(now);
        let at = net.ends.len();
        let ClientSetup { clock, latency, term, features } = place;
        let client = at as u64;
        let incarnation = net.dice.below(u64::MAX);
        let config = ClientConfig { client, incarnation, attach: b"tree".to_vec(), term, features };
        let session = ClientSession::new(clock.at(now), config.clone());
        net.ends.push(ClientEnd {
            config,
            session,
            clock,
            latency,
            link: None,
            events: VecDeque::new(),
            due: (Time::FAR, Reason::Idle),
            reconnect_at: None,
            down_until: Time(0),
            paused: false,
        });
        net.link(at);
        net.pump(at);
        End { at, net: Rc::clone(&self.net) }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Net) -> T) -> T {
        act(&mut self.net.borrow_mut())
    }
}

impl Net {
    /// Makes a connection for a client; its session sends hello on it.
    fn link(&mut self, at: usize) {
        self.last_link += 1;
        let (up, down) = self.ends[at].latency;
        self.links.insert(self.last_link, Link { client: at, up: Pipe::new(up), down: Pipe::new(down) });
        self.ends[at].link = Some(self.last_link);
        self.server.connected(self.now, self.last_link);
    }

    /// Executes the outputs of a client's session.
    fn pump(&mut self, at: usize) {
        let now = self.now;
        loop {
            let end = &mut self.ends[at];
            match end.session.poll_output() {
                Output::Transmit(bytes) => {
                    let garbles = self.corrupted_client == Some(at) && self.dice.below(CORRUPTED_FRAMES) == 0;
                    let Some(link) = end.link.and_then(|link| self.links.get_mut(&link)) else { continue };
                    match garbles {
                        true => link.up.garble(now, &bytes, &mut self.dice),
                        false => link.up.send(now, &bytes),
                    }
                }
                Output::Event(event) => end.events.push_back(event),
                Output::Timeout(due, reason) => {
                    end.due = (due, reason);
                    break;
                }
            }
        }
        let end = &mut self.ends[at];
        if end.reconnect_at.is_none() && (end.session.is_lost() || end.session.wants_connection().is_some()) {
            let link = end.link.take().and_then(|link| self.links.get_mut(&link));
            link.into_iter().for_each(|link| link.up.close(now));
            end.reconnect_at = Some(now.after(Span::from_millis(1)));
        }
    }

    /// Delivers the server's frames to connections.
    fn carry(&mut self) {
        for said in std::mem::take(&mut self.server.outputs) {
            match said {
                ServerOutput::Frame(link, bytes) => {
                    let Some(link) = self.links.get_mut(&link) else { continue };
                    let garbles =
                        self.corrupted_client == Some(link.client) && self.dice.below(CORRUPTED_FRAMES) == 0;
                    match garbles {
                        true => link.down.garble(self.now, &bytes, &mut self.dice),
                        false => link.down.send(self.now, &bytes),
                    }
                }
                ServerOutput::Close(link) => {
                    self.links.get_mut(&link).into_iter().for_each(|link| link.down.close(self.now));
                }
            }
        }
        self.links.retain(|_, link| !(link.up.is_over() && link.down.is_over()));
    }

    fn due(&self) -> Time {
        let of_links = self.links.values().map(|link| {
            let down = if self.ends[link.client].paused { Time::FAR } else { link.down.due() };
            link.up.due().min(down)
        });
        let awake = self.ends.iter().filter(|end| !end.paused);
        let again = awake.filter_map(|end| end.reconnect_at).min().unwrap_or(Time::FAR);
        of_links.min().unwrap_or(Time::FAR).min(self.server.due()).min(again)
    }

    /// Executes one event that is due by now; returns whether there was one.
    fn step(&mut self, now: Time) -> bool {
        self.now = self.now.max(now);
        if self.due() > self.now {
            return false;
        }
        let now = self.now;
        if self.server.due() <= now {
            self.server.step(now);
        } else if let Some(at) = (0..self.ends.len()).find(|at| self.is_to_connect(*at)) {
            self.connect_again(at);
        } else if let Some(id) = self.links.iter().find(|(_, link)| link.up.due() <= now).map(|(id, _)| *id) {
            let packet = self.links.get_mut(&id).and_then(|link| link.up.take(now));
            match packet.flatten() {
                Some(bytes) => self.server.heard(now, id, &bytes),
                None => self.server.hung_up(now, id),
            }
        } else {
            self.arrive();
        }
        self.carry();
        true
    }

    fn is_to_connect(&self, at: usize) -> bool {
        let end = &self.ends[at];
        !end.paused && end.reconnect_at.is_some_and(|again| again <= self.now)
    }

    fn connect_again(&mut self, at: usize) {
        let now = self.now;
        let end = &mut self.ends[at];
        if now < end.down_until {
            end.reconnect_at = Some(end.down_until);
            return;
        }
        end.reconnect_at = None;
        let clock = end.clock.at(now);
        if end.session.is_lost() {
            end.session = ClientSession::after_lost(clock, end.config.clone());
            self.link(at);
        } else {
            self.link(at);
            self.ends[at].session.handle_connect(clock);
        }
        self.pump(at);
    }

    /// Delivers a frame or the end of a connection to a client.
    fn arrive(&mut self) {
        let now = self.now;
        let is_here = |link: &Link| !self.ends[link.client].paused && link.down.due() <= now;
        let Some(id) = self.links.iter().find(|(_, link)| is_here(link)).map(|(id, _)| *id) else { return };
        let Some(link) = self.links.get_mut(&id) else { return };
        let (at, packet) = (link.client, link.down.take(now));
        self.hand(at, id, packet.flatten());
    }

    /// Hands a frame to the client of a connection; `None`: the connection's end.
    fn hand(&mut self, at: usize, id: u64, packet: Option<Vec<u8>>) {
        let now = self.now;
        let end = &mut self.ends[at];
        if end.link != Some(id) {
            return;
        }
        let clock = end.clock.at(now);
        match packet {
            Some(bytes) => end.session.handle_input(clock, &bytes),
            None => end.session.handle_disconnect(clock, "the connection was lost"),
        }
        self.pump(at);
    }

    /// Cuts a client's connection at any byte.
    fn cut(&mut self, at: usize, longest: Span) {
        let now = self.now;
        let Some(link) = self.ends[at].link.and_then(|link| self.links.get_mut(&link)) else { return };
        for pipe in [&mut link.up, &mut link.down] {
            let delay = Span(self.dice.below(longest.0.max(1)));
            pipe.cut(now, &mut self.dice, delay);
        }
        self.server.counts.cuts += 1;
        self.last_fault = self.last_fault.max(now.after(longest));
    }

    /// Notes whether a fault is present now.
    fn note_trouble(&mut self, others: bool) {
        let is_wrong = |end: &ClientEnd| {
            end.paused || end.reconnect_at.is_some() || end.down_until > self.now || !end.session.is_linked()
        };
        if others || self.ends.iter().any(is_wrong) || self.server.in_grace() {
            self.last_fault = self.last_fault.max(self.now);
        }
    }

    fn restart(&mut self) {
        self.server.restart(self.now);
        self.carry();
    }
}

impl Backend for Native {
    type Remote = End;
    type Control = ();

    const FLUSHES_FIRST: bool = true;
    const ONE_BY_ONE: bool = true;

    fn edit<R>(&self, edit: impl FnOnce(&mut ModelFs) -> R) -> R {
        edit(&mut self.net.borrow_mut().server.tree)
    }

    fn step(&mut self, now: Time) -> bool {
        self.with(|net| net.step(now))
    }

    fn due(&self) -> Time {
        self.with(|net| net.due())
    }

    fn written(&self) -> Vec<(u64, u64)> {
        self.with(|net| net.server.written.clone())
    }

    fn clock(&self, at: usize, now: Time) -> Time {
        self.with(|net| net.ends.get(at).map_or(now, |end| end.clock.at(now)))
    }

    fn moment(&self, at: usize, clock: Time) -> Time {
        self.with(|net| net.ends[at].clock.when(clock))
    }

    fn runs(&self, at: usize) -> bool {
        self.with(|net| !net.ends[at].paused)
    }

    fn is_faithful(&self, at: usize) -> bool {
        self.with(|net| net.corrupted_client != Some(at))
    }

    fn owes(&self, at: usize, ino: u64, attributes: bool) -> bool {
        self.with(|net| net.server.owes(at as u64, ino, attributes))
    }
}

impl End {
    fn with(&self, act: impl FnOnce(&mut ClientSession)) {
        let mut net = self.net.borrow_mut();
        act(&mut net.ends[self.at].session);
        net.pump(self.at);
        net.carry();
    }
}

impl Remote for End {
    fn handle_call(&mut self, now: Time, id: CallId, request: Request) {
        self.with(|session| session.handle_call(now, id, request));
    }

    fn handle_cancel(&mut self, now: Time, id: CallId) {
        self.with(|session| session.handle_cancel(now, id));
    }

    fn handle_acknowledge(&mut self, now: Time, id: RecallId) {
        self.with(|session| session.handle_acknowledge(now, id));
    }

    fn handle_return(&mut self, now: Time, grants: Vec<GrantId>) {
        self.with(|session| session.handle_return(now, grants));
    }

    fn handle_reclaimed(&mut self, now: Time) {
        self.with(|session| session.handle_reclaimed(now));
    }

    /// Bytes arrive over a [`Link`].
    fn handle_input(&mut self, _now: Time, _bytes: &[u8]) {}

    fn handle_disconnect(&mut self, now: Time, why: &str) {
        self.with(|session| session.handle_disconnect(now, why));
    }

    fn handle_timeout(&mut self, now: Time) {
        self.with(|session| session.handle_timeout(now));
    }

    fn poll_output(&mut self) -> Output {
        let end = &mut self.net.borrow_mut().ends[self.at];
        let (due, reason) = end.due;
        end.events.pop_front().map_or(Output::Timeout(due, reason), Output::Event)
    }
}
