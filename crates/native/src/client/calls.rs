//! Calls that are queued, outstanding, or sent again.

use super::{ClientSession, State};
use crate::ProtocolError;
use crate::call::{check, payload_bytes};
use crate::flow_limit::Load;
use crate::frame::{self, FrameBytes, MAX_BODY};
use crate::handshake::LONGEST_FRAME;
use crate::locks::MAX_LOCK_WAITS;
use crate::message::{Message, encode_request};
use crate::reply_validator::Expected;
use crate::retransmit::WINDOW_BYTES;
use nigh_remote::Event;
use nigh_types::{Call, CallId, Errno, GrantId, Request, Response, Time, WriteBackPrecondition, WriteFlags};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An outstanding call.
#[derive(Clone, Debug)]
pub(super) struct Outstanding {
    expected: Expected,
    /// Kept for a server that forgets the session.
    frame: FrameBytes,
    type_name: &'static str,
    claim: bool,
    /// Its caller has given it up.
    cancelled: bool,
    /// It was sent before the term ran out, so the client does not use the grants of its reply.
    outdated: bool,
}

impl ClientSession {
    pub(super) fn send_waiting(&mut self, now: Time) {
        while self.has_room() {
            if self.reclaiming {
                let Some((call, request)) = self.claims.pop_front() else { return };
                self.send_call(now, call, &request);
            } else if let Some((call, outstanding)) = self.again.pop_first() {
                self.send_again(now, call, outstanding);
            } else {
                let Some((call, mut request)) = self.waiting.pop_front() else { return };
                self.number_as_theirs(&mut request.call);
                self.send_call(now, call, &request);
            }
        }
    }

    /// Removes a grant of an earlier session from a call, and converts one of this session to the server's id.
    fn number_as_theirs(&self, call: &mut Call) {
        if let Call::Write {
            flags: WriteFlags { since: Some(WriteBackPrecondition { under, .. }), .. },
            ..
        } = call
        {
            *under = under.and_then(|(grant, covers)| Some((GrantId(self.grants.theirs(grant.0)?), covers)));
        }
    }

    fn has_room(&self) -> bool {
        self.state == State::Linked
            && self.load.calls() < self.limits.max_calls
            && self.load.bytes() + LONGEST_FRAME <= self.limits.max_bytes
            && self.outgoing.bytes() < WINDOW_BYTES
    }

    pub(super) fn send_call(&mut self, now: Time, call: CallId, request: &Request) {
        let named = request.name.is_some();
        assert_eq!(named, request.call.is_mutation(), "mutations are named, and nothing else");
        let expects_answer = request.call.is_answered();
        if !self.fits(&request.call) {
            if expects_answer {
                self.answer(call, Errno::INVAL);
            }
            return;
        }
        let type_name = request.call.type_name();
        let frame = Arc::new(encode_request(call, request));
        if request.call.waits_for_lock() && self.lock_load.check(frame.len() as u64, MAX_LOCK_WAITS).is_err()
        {
            return self.answer(call, Errno::NOLCK);
        }
        *self.counters.by_type.entry(type_name).or_default() += 1;
        if let Call::PrefetchCredit { walk, credit, want } = &request.call {
            let Some(outstanding) = self.outstanding.get_mut(walk) else { return };
            outstanding.expected.steer(*credit, want.as_ref());
        }
        if expects_answer {
            self.counters.requests += 1;
            let expected = Expected::of(&request.call, now);
            let (frame, claim) = (FrameBytes::clone(&frame), request.call.is_claim());
            let outstanding =
                Outstanding { expected, frame, type_name, claim, cancelled: false, outdated: false };
            self.note_outstanding(call, outstanding);
        }
        self.put(frame);
    }

    /// Sends a call again in a session that does not know it.
    fn send_again(&mut self, now: Time, call: CallId, mut outstanding: Outstanding) {
        outstanding.expected.begin_again(now);
        *self.counters.by_type.entry(outstanding.type_name).or_default() += 1;
        self.counters.requests += 1;
        // Its reply comes in this session, in which no grant has ended yet.
        outstanding.outdated = false;
        let frame = frame::again(&outstanding.frame);
        self.note_outstanding(call, outstanding);
        self.put(frame);
    }

    fn note_outstanding(&mut self, call: CallId, outstanding: Outstanding) {
        let load = if outstanding.expected.lock_wait { &mut self.lock_load } else { &mut self.load };
        load.add(outstanding.frame.len() as u64);
        let earlier = self.outstanding.insert(call, outstanding);
        assert!(earlier.is_none(), "call ids are never reused within a session");
    }

    fn fits(&self, call: &Call) -> bool {
        // Fixed fields, names, and the groups of a caller in as many groups as Linux allows.
        const OTHER_BYTES: usize = (256 << 10) + 4096;
        let data = match call {
            Call::Read { length, .. } => u64::from(*length),
            Call::Write { data, .. } => data.len() as u64,
            _ => 0,
        };
        let bytes = payload_bytes(call) + OTHER_BYTES;
        data <= u64::from(self.limits.max_data) && bytes <= MAX_BODY as usize && check(call).is_ok()
    }

    pub(super) fn cancel(&mut self, id: CallId) {
        // A call without a reply cannot be cancelled: a cancelled release would leave its handle open.
        let is_it = |(call, request): &(CallId, Request)| *call == id && request.call.is_answered();
        let unsent = [&mut self.waiting, &mut self.claims].into_iter().any(|queue| {
            let found = queue.iter().position(is_it);
            found.is_some_and(|at| queue.remove(at).is_some())
        });
        if unsent {
            return self.answer(id, Errno::INTR);
        }
        // It is unknown whether the call took effect in the forgotten session.
        if self.again.remove(&id).is_some() {
            self.answer(id, Errno::INTR);
        } else if let Some(outstanding) = self.outstanding.get_mut(&id) {
            outstanding.cancelled = true;
            self.put(Arc::new(Message::Cancel(id).encode()));
        }
    }

    pub(super) fn take_response(
        &mut self,
        now: Time,
        call: CallId,
        mut response: Response,
    ) -> Result<(), ProtocolError> {
        let outstanding = self.outstanding.get_mut(&call).ok_or(ProtocolError::UnknownCall(call))?;
        outstanding.expected.check(call, &response, self.cookie_key)?;
        outstanding.expected.leave_out_seen(&mut response, self.cookie_key);
        if outstanding.expected.renews {
            self.confirmed = self.confirmed.max(outstanding.expected.sent);
        }
        let outdated = outstanding.outdated;
        if response.last {
            let bytes = outstanding.frame.len() as u64;
            let load = if outstanding.expected.lock_wait { &mut self.lock_load } else { &mut self.load };
            load.remove(bytes);
            self.outstanding.remove(&call);
        }
        if outdated {
            // Not returned: at the server they may have replaced later grants, which would end with them.
            response.grants.clear();
        }
        for grant in &mut response.grants {
            grant.id = GrantId(self.grants.take(grant.id.0));
        }
        self.event(Event::Response { call, response });
        self.send_waiting(now);
        Ok(())
    }

    /// Fails lookups by number, which the server of the new session does not support.
    fn end_numbers(&mut self) {
        let again = self.again.iter().filter(|(_, outstanding)| outstanding.expected.finds_number());
        let waiting =
            self.waiting.iter().filter(|(_, request)| matches!(request.call, Call::LookupNumber { .. }));
        let all = again.map(|(call, _)| *call).chain(waiting.map(|(call, _)| *call));
        for call in all.collect::<Vec<_>>() {
            self.again.remove(&call);
            self.waiting.retain(|(waiting, _)| *waiting != call);
            self.answer(call, Errno::STALE);
        }
    }

    /// Ends prefetches, whose position is lost, and names-only listings, whose reader has a full listing on its way.
    fn end_walks(&mut self) {
        let walks = self.again.iter().filter(|(_, outstanding)| outstanding.expected.ends_with_session());
        for call in walks.map(|(call, _)| *call).collect::<Vec<_>>() {
            self.again.remove(&call);
            self.answer(call, Errno::CANCELED);
        }
    }

    /// Marks the grants in replies to outstanding calls as unusable, because all grants have ended.
    pub(super) fn outdate_calls(&mut self) {
        self.pushes.forget();
        self.outstanding.values_mut().for_each(|outstanding| outstanding.outdated = true);
    }

    /// Queues the calls again for a server that has forgotten the session. `same_ids`: it accepts the ids that it
    /// issued before.
    pub(super) fn take_up_calls(&mut self, same_ids: bool, finds_numbers: bool) {
        (self.load, self.lock_load) = (Load::default(), Load::default());
        // The handle of a release is forgotten, and its number may soon be another file's.
        let waiting = std::mem::take(&mut self.claims).into_iter().chain(std::mem::take(&mut self.waiting));
        self.waiting =
            waiting.filter(|(_, request)| request.call.is_answered() && !request.call.is_claim()).collect();
        self.again.append(&mut self.outstanding);
        self.again.retain(|_, outstanding| !outstanding.claim);
        self.end_walks();
        if !finds_numbers {
            self.end_numbers();
        }
        if !same_ids {
            // The server would take the ids for forged.
            let all = std::mem::take(&mut self.again).into_keys();
            let all: Vec<CallId> = all.chain(self.waiting.drain(..).map(|(call, _)| call)).collect();
            return all.into_iter().for_each(|call| self.answer(call, Errno::IO));
        }
        let again = std::mem::take(&mut self.again).into_iter();
        let (cancelled, again): (BTreeMap<_, _>, _) =
            again.partition(|(_, outstanding)| outstanding.cancelled);
        self.again = again;
        cancelled.into_keys().for_each(|call| self.answer(call, Errno::INTR));
    }
}
