//! A session over connections that are cut anywhere: what each end sent, and its effect at the other.

use super::pair::{T0, client};
use super::samples;
use nigh_native::*;
use nigh_remote::{Event, Output, Remote};
use nigh_types::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A generator that repeats itself (SplitMix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// An effect at the server, or an intended one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    Call(CallId),
    Cancel(CallId),
    Acknowledge(RecallId),
    Return(Vec<GrantId>),
}

/// Both ends, the bytes between them, and what each end sent and received.
pub struct World {
    pub client: ClientSession,
    pub server: ServerSession,
    pub stranger: Option<ServerSession>,
    pub to_server: VecDeque<u8>,
    pub to_client: VecDeque<u8>,
    pub meant: Vec<Effect>,
    pub done: Vec<Effect>,
    pub said: Vec<Event>,
    pub heard: Vec<Event>,
    pub outstanding: Vec<CallId>,
    /// The listings among these, and how many of their chunks were sent.
    pub parts: BTreeMap<CallId, u64>,
    /// Calls without a reply at the client.
    pub open: BTreeSet<CallId>,
    /// Cancelled by the client after they were sent.
    pub cancelled: BTreeSet<CallId>,
    /// Those of them to which the server had replied by then.
    pub late: BTreeSet<CallId>,
    pub recalled: Vec<RecallId>,
    pub last: u64,
    pub now: Time,
}

/// Chunks of a listing: one name each, in the order of cookies.
fn part(number: u64) -> Response {
    const PARTS: u64 = 3;
    let key = samples::session().cookie_key;
    let mut names = ["a", "b", "c"];
    names.sort_by_key(|leaf| key.cookie(leaf.as_bytes()));
    let name = samples::name(names[usize::try_from(number).unwrap() - 1]);
    let entries = vec![(name, samples::entry(0o100_644))];
    Response { last: number == PARTS, ..Response::plain(Ok(Reply::Listed(Entries { entries }))) }
}

fn session(welcomed: &mut ServerSession) {
    welcomed.accept(samples::session());
}

impl World {
    pub fn new() -> World {
        let mut world = World {
            client: client(T0),
            server: ServerSession::new(T0, ServerConfig { session_id: 9, ..ServerConfig::default() }),
            stranger: None,
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            meant: vec![],
            done: vec![],
            said: vec![],
            heard: vec![],
            outstanding: vec![],
            parts: BTreeMap::new(),
            open: BTreeSet::new(),
            cancelled: BTreeSet::new(),
            late: BTreeSet::new(),
            recalled: vec![],
            last: 0,
            now: T0,
        };
        world.settle();
        assert!(matches!(world.heard[..], [Event::Attached(_)]));
        world.heard.clear();
        world
    }

    /// Moves the output of both ends onto the wires.
    pub fn put_out(&mut self) {
        loop {
            match self.client.poll_output() {
                Output::Event(Event::Response { call, response }) => {
                    assert!(self.open.contains(&call));
                    if response.last {
                        self.open.remove(&call);
                    }
                    self.heard.push(Event::Response { call, response });
                }
                Output::Event(Event::Recall(recall)) => {
                    self.recalled.push(recall.id);
                    self.heard.push(Event::Recall(recall));
                }
                Output::Event(event) => self.heard.push(event),
                Output::Transmit(bytes) => self.to_server.extend(bytes.iter()),
                Output::Timeout(..) => break,
            }
        }
        let speaking = self.stranger.as_mut().unwrap_or(&mut self.server);
        while let Some(bytes) = speaking.poll_transmit() {
            self.to_client.extend(bytes.iter());
        }
    }

    /// Delivers up to so many bytes to the server.
    pub fn deliver_up(&mut self, count: u64) {
        let count = self.to_server.len().min(usize::try_from(count).unwrap());
        let bytes: Vec<u8> = self.to_server.drain(..count).collect();
        if let Some(stranger) = &mut self.stranger {
            stranger.handle_input(self.now, &bytes).unwrap();
            if let Some(event) = stranger.poll_event() {
                let ServerEvent::Attach { resume: Some(resume), .. } = event else { panic!("{event:?}") };
                assert_eq!(resume.session_id, 9);
                self.stranger = None;
                self.server.resume(self.now, resume.received, false, samples::session()).unwrap();
            }
            return;
        }
        self.server.handle_input(self.now, &bytes).unwrap();
        while let Some(event) = self.server.poll_event() {
            match event {
                ServerEvent::Attach { .. } => session(&mut self.server),
                ServerEvent::Request { call, resent: again, request } => {
                    assert!(!again);
                    if matches!(request.call, Call::List { .. }) {
                        self.parts.insert(call, 0);
                    }
                    self.outstanding.push(call);
                    self.done.push(Effect::Call(call));
                }
                ServerEvent::Cancel(call) => {
                    assert!(self.outstanding.contains(&call));
                    self.done.push(Effect::Cancel(call));
                }
                ServerEvent::Acknowledge(recall) => self.done.push(Effect::Acknowledge(recall)),
                ServerEvent::Return(grants) => self.done.push(Effect::Return(grants)),
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn deliver_down(&mut self, count: u64) {
        let count = self.to_client.len().min(usize::try_from(count).unwrap());
        let bytes: Vec<u8> = self.to_client.drain(..count).collect();
        self.client.handle_input(self.now, &bytes);
    }

    pub fn settle(&mut self) {
        loop {
            self.put_out();
            if self.to_server.is_empty() && self.to_client.is_empty() {
                return;
            }
            self.deliver_up(u64::MAX);
            self.put_out();
            self.deliver_down(u64::MAX);
        }
    }

    pub fn cut(&mut self) {
        self.to_server.clear();
        self.to_client.clear();
        if self.stranger.is_none() {
            self.server.handle_disconnect();
        }
        self.client.handle_disconnect(self.now, "cut");
        self.put_out();
        assert_eq!(self.client.wants_connection(), Some("cut"));
    }

    pub fn connect(&mut self) {
        let config = ServerConfig { session_id: 10, ..ServerConfig::default() };
        self.stranger = Some(ServerSession::new(self.now, config));
        self.client.handle_connect(self.now);
    }

    pub fn call(&mut self, bytes: u64) {
        self.last += 1;
        let id = CallId(self.last);
        let data = vec![7; usize::try_from(bytes).unwrap()];
        let write = Call::Write {
            node: samples::place(),
            handle: None,
            offset: 0,
            data,
            flags: WriteFlags::default(),
        };
        self.put_call(id, write);
    }

    pub fn list(&mut self) {
        self.last += 1;
        self.put_call(CallId(self.last), Call::List { dir: samples::dir() });
    }

    pub fn put_call(&mut self, id: CallId, call: Call) {
        self.client.handle_call(self.now, id, samples::request(call));
        self.open.insert(id);
        self.meant.push(Effect::Call(id));
    }

    /// Cancels a call. An unsent call gets its reply at once, and never reaches the server.
    pub fn cancel(&mut self, id: CallId) {
        self.put_out();
        let heard = self.heard.len();
        self.client.handle_cancel(self.now, id);
        self.put_out();
        if self.heard.len() > heard {
            let response = Response::plain(Err(Errno::INTR));
            assert_eq!(self.heard.pop(), Some(Event::Response { call: id, response }));
            self.meant.retain(|effect| *effect != Effect::Call(id));
        } else {
            let last =
                |e: &Event| matches!(e, Event::Response { call, response } if *call == id && response.last);
            if self.said.iter().any(last) {
                self.late.insert(id);
            }
            self.cancelled.insert(id);
            self.meant.push(Effect::Cancel(id));
        }
    }

    /// Half of the cancelled calls get a reply only when the server knows of the cancellation, so that it must arrive.
    /// The others get theirs at any time, so that the cancellation may come too late to be passed on.
    pub fn waits_for_cancel(&self, call: CallId) -> bool {
        call.0.is_multiple_of(2)
            && self.cancelled.contains(&call)
            && !self.done.contains(&Effect::Cancel(call))
    }

    /// Sends the next chunk of a listing, or the only reply to another call.
    pub fn answer(&mut self, at: u64) {
        let at = usize::try_from(at).unwrap();
        let call = self.outstanding[at];
        if self.waits_for_cancel(call) {
            return;
        }
        let response = match self.parts.get_mut(&call) {
            None => Response::plain(Err(Errno::NOSPC)),
            Some(said) => {
                *said += 1;
                part(*said)
            }
        };
        if response.last {
            self.outstanding.remove(at);
        }
        self.server.respond(call, &response);
        self.said.push(Event::Response { call, response });
    }

    pub fn recall(&mut self) {
        self.last += 1;
        let (id, names) = (RecallId(self.last), vec![]);
        let recall = Recall { id, node: samples::id(1), covers: LeaseScope::Attributes, names };
        self.server.recall(recall.clone());
        self.said.push(Event::Recall(recall));
    }

    /// Lets either end do something.
    pub fn act(&mut self, dice: &mut Dice, most_bytes: u64) {
        match dice.below(8) {
            0 => self.call(dice.below(most_bytes)),
            1 => self.list(),
            2 if !self.outstanding.is_empty() => self.answer(dice.below(self.outstanding.len() as u64)),
            3 => self.recall(),
            4 if !self.recalled.is_empty() => {
                let id = self.recalled.remove(0);
                self.client.handle_acknowledge(self.now, id);
                self.meant.push(Effect::Acknowledge(id));
            }
            5 => {
                self.last += 1;
                self.client.handle_return(self.now, vec![GrantId(self.last)]);
                self.meant.push(Effect::Return(vec![GrantId(self.last)]));
            }
            6 => {
                let open: Vec<CallId> = self.open.difference(&self.cancelled).copied().collect();
                if !open.is_empty() {
                    self.cancel(open[usize::try_from(dice.below(open.len() as u64)).unwrap()]);
                }
            }
            7 => self.call(dice.below(most_bytes)),
            _ => {}
        }
    }

    /// Checks that each sent frame took effect once and in order.
    pub fn check(&mut self) {
        self.settle();
        while !self.outstanding.is_empty() {
            assert!(!self.waits_for_cancel(self.outstanding[0]), "a cancellation did not arrive");
            self.answer(0);
            self.settle();
        }
        // Cancellations that came too late were not passed on.
        let (done, late) = (&self.done, &self.late);
        self.meant.retain(|effect| match effect {
            Effect::Cancel(call) => {
                done.contains(effect) || (call.0.is_multiple_of(2) && !late.contains(call))
            }
            _ => true,
        });
        // Calls wait for window or connection, and all other frames go at once: two orders.
        for order in [
            |effect: &&Effect| matches!(effect, Effect::Call(_)),
            |effect: &&Effect| !matches!(effect, Effect::Call(_)),
        ] {
            let of = |all: &[Effect]| all.iter().filter(order).cloned().collect::<Vec<_>>();
            assert_eq!(of(&self.done), of(&self.meant));
        }
        assert_eq!(self.heard, self.said);
        assert!(self.open.is_empty());
        assert_eq!(self.server.outstanding(), 0);
    }
}
