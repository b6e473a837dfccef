//! Input of a server's session: messages of its client.

use super::{MAX_BODY_BEFORE_HELLO, OutstandingCall, ServerEvent, ServerSession, State};
use crate::ProtocolError;
use crate::flow_limit::MAX_LOCK_WAITS;
use crate::frame::{FrameReader, HEADER_BYTES};
use crate::handshake::{FEATURES, Hello, Limits};
use crate::message::Message;
use nigh_types::{Call, CallId, Request};

/// The most that is handled in one round, decompressed and with its memory; the last frame may exceed it.
const ROUND_BYTES: u64 = 1 << 20;
/// The least memory of a name, beyond the bytes in which it came.
const NAME_BYTES: u64 = 48;

impl ServerSession {
    pub(super) fn take_frames(&mut self, input: &mut &[u8]) -> Result<(), ProtocolError> {
        let mut frames = std::mem::replace(&mut self.frames, FrameReader::new(MAX_BODY_BEFORE_HELLO));
        let mut round = 0_u64;
        while self.state != State::Ended
            && round < ROUND_BYTES
            && let Some(frame) = frames.next(input)?
        {
            // Before its lists are decoded.
            if !frame.frame_type.is_of_client() {
                return Err(ProtocolError::Unexpected(frame.frame_type as u8));
            }
            let message = Message::decode(&frame)?;
            let bytes = frame.body.len() as u64 + u64::from(HEADER_BYTES);
            round += bytes + beyond(&message);
            if frame.frame_type.is_counted() {
                self.incoming.take(bytes);
            }
            self.take_message(frame.frame_type as u8, message, bytes)?;
        }
        frames.release_returned();
        self.frames = frames;
        if self.state == State::Attached && self.incoming.is_due() {
            let count = self.incoming.take_count();
            self.say(&Message::Received(count));
        }
        Ok(())
    }

    fn take_message(&mut self, number: u8, message: Message, bytes: u64) -> Result<(), ProtocolError> {
        match (self.state, message) {
            (State::Listening, Message::Hello(hello)) => self.take_hello(hello),
            (_, Message::Bye(why)) => {
                self.events.push_back(ServerEvent::Bye { why });
                self.close();
            }
            (State::Attached, Message::Request(call, request)) => {
                self.take_request(call, request, bytes, false)?;
            }
            (State::Attached, Message::Resent(call, request)) => {
                self.take_request(call, request, bytes, true)?;
            }
            (State::Attached, Message::Cancel(call)) => self.take_cancel(call),
            (State::Attached, Message::Acknowledge(recall)) => {
                if !self.recalls.remove(&recall) {
                    return Err(ProtocolError::UnknownRecall(recall));
                }
                self.events.push_back(ServerEvent::Acknowledge(recall));
            }
            (State::Attached, Message::Return(grants)) => {
                self.events.push_back(ServerEvent::Return(grants));
            }
            (State::Attached, Message::Reclaimed) => self.events.push_back(ServerEvent::Reclaimed),
            (State::Attached, Message::Received(count) | Message::Pong(_, count)) => {
                self.outgoing.confirm(count)?;
            }
            (State::Attached, Message::Ping(number, count)) => {
                self.outgoing.confirm(count)?;
                if self.muted {
                    self.kept_ping = Some(number);
                } else {
                    self.say_pong(number);
                }
            }
            _ => return Err(ProtocolError::Unexpected(number)),
        }
        Ok(())
    }

    pub(super) fn say_pong(&mut self, number: u64) {
        let count = self.incoming.take_count();
        self.say(&Message::Pong(number, count));
    }

    fn take_hello(&mut self, hello: Hello) {
        match hello.choose_version() {
            Ok(version) => {
                let features = hello.features & FEATURES;
                self.state = State::Greeted;
                (self.version, self.features) = (version, features);
                let Hello { client, incarnation, attach: export, term, moment, resume, .. } = hello;
                self.events.push_back(ServerEvent::Attach {
                    client,
                    incarnation,
                    export,
                    term,
                    version,
                    features,
                    moment,
                    resume,
                });
            }
            Err(refused) => {
                self.events.push_back(ServerEvent::Bye { why: refused.message.clone() });
                self.finish(&Message::Refused(refused));
            }
        }
    }

    fn take_request(
        &mut self,
        call: CallId,
        request: Request,
        bytes: u64,
        again: bool,
    ) -> Result<(), ProtocolError> {
        let Limits { max_data, .. } = self.config.limits;
        let data = match &request.call {
            Call::Read { length, .. } => u64::from(*length),
            Call::Write { data, .. } => data.len() as u64,
            _ => 0,
        };
        if data > u64::from(max_data) {
            return Err(ProtocolError::Malformed("a read or write is longer than the server said it takes"));
        }
        if request.call.has_reply() {
            let (sequence, beyond) =
                (request.mutation_id.map(|name| name.sequence), beyond_of(&request.call));
            let outstanding = OutstandingCall { bytes, beyond, sequence, cancelled: false };
            self.note_outstanding(call, request.call.waits_for_lock(), outstanding)?;
        } else if matches!(request.call, Call::PinOpen { .. }) {
            // A call that must precede an acknowledgement must not wait for it. It has no reply, so it renews nothing.
            self.events.push_back(ServerEvent::Request { call, request, resent: again });
            return Ok(());
        } else if self.muted {
            self.kept_load.check(bytes, u32::MAX)?;
            self.kept_load.add(bytes);
        }
        // A call that an acknowledgement may wait for must not wait for the acknowledgement.
        let at_once = !self.muted || request.call.is_write_back();
        let queue = if at_once { &mut self.events } else { &mut self.kept };
        if let (Some(ServerEvent::Request { request: last, .. }), false) = (queue.back_mut(), at_once)
            && let (Call::Release { handles }, Call::Release { handles: more }) =
                (&mut last.call, &request.call)
        {
            handles.extend(more);
            return Ok(());
        }
        if !at_once && request.call.has_reply() {
            self.kept_calls.insert(call);
        }
        queue.push_back(ServerEvent::Request { call, request, resent: again });
        Ok(())
    }

    /// Takes a cancellation. Only the first one counts, and it stays behind the call.
    fn take_cancel(&mut self, call: CallId) {
        let outstanding = self.outstanding.get_mut(&call).or_else(|| self.lock_waits.get_mut(&call));
        if outstanding.is_some_and(|call| !std::mem::replace(&mut call.cancelled, true)) {
            let queue = if self.kept_calls.contains(&call) { &mut self.kept } else { &mut self.events };
            queue.push_back(ServerEvent::Cancel(call));
        }
    }

    fn note_outstanding(
        &mut self,
        call: CallId,
        waits: bool,
        outstanding: OutstandingCall,
    ) -> Result<(), ProtocolError> {
        if self.is_outstanding(call) {
            return Err(ProtocolError::CallInUse(call));
        }
        let (load, calls, limit) = match waits {
            true => (&mut self.lock_load, &mut self.lock_waits, MAX_LOCK_WAITS),
            false => (&mut self.load, &mut self.outstanding, self.config.limits.max_calls),
        };
        load.check(outstanding.bytes, limit)?;
        load.add(outstanding.bytes);
        self.beyond += outstanding.beyond;
        calls.insert(call, outstanding);
        Ok(())
    }
}

/// A message's memory beyond the bytes in which it came.
fn beyond(message: &Message) -> u64 {
    match message {
        Message::Request(_, request) | Message::Resent(_, request) => beyond_of(&request.call),
        _ => 0,
    }
}

fn beyond_of(call: &Call) -> u64 {
    match call {
        Call::ResolvePath { names, .. } | Call::PinOpen { names, .. } => names.len() as u64 * NAME_BYTES,
        _ => 0,
    }
}
