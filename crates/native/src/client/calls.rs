//! Calls that are queued, outstanding, or sent again.

use super::{ClientSession, State};
use crate::ProtocolError;
use crate::call::{check, payload_bytes};
use crate::flow_limit::MAX_LOCK_WAITS;
use crate::flow_limit::OutstandingLoad;
use crate::frame::{self, FrameBytes, MAX_BODY};
use crate::handshake::LONGEST_FRAME;
use crate::message::{Message, encode_request};
use crate::reply_validator::ReplyValidator;
use crate::retransmit::WINDOW_BYTES;
use nigh_remote::Event;
use nigh_types::{Call, CallId, Errno, GrantId, Request, Response, Time, WriteBackPrecondition, WriteFlags};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An outstanding call.
#[derive(Clone, Debug)]
pub(super) struct OutstandingCall {
    expected: ReplyValidator,
    /// Kept for a server that forgets the session.
    frame: FrameBytes,
    type_name: &'static str,
    is_reclaim: bool,
    /// Its caller has given it up.
    cancelled: bool,
    /// It was sent before the term ran out, so the client does not use the grants of its reply.
    grants_void: bool,
}

impl ClientSession {
    pub(super) fn send_waiting(&mut self, now: Time) {
        while self.has_room() {
            if self.reclaiming {
                let Some((call, request)) = self.reclaims.pop_front() else { return };
                self.send_call(now, call, &request);
            } else if let Some((call, outstanding)) = self.resend.pop_first() {
                self.resend_call(now, call, outstanding);
            } else {
                let Some((call, mut request)) = self.waiting.pop_front() else { return };
                self.convert_grant_ids(&mut request.call);
                self.send_call(now, call, &request);
            }
        }
    }

    /// Removes a grant of an earlier session from a call, and converts one of this session to the server's id.
    fn convert_grant_ids(&self, call: &mut Call) {
        if let Call::Write {
            flags: WriteFlags { since: Some(WriteBackPrecondition { under, .. }), .. },
            ..
        } = call
        {
            *under =
                under.and_then(|(grant, covers)| Some((GrantId(self.grants.server_id(grant.0)?), covers)));
        }
    }

    fn has_room(&self) -> bool {
        self.state == State::Connected
            && self.load.calls() < self.limits.max_calls
            && self.load.bytes() + LONGEST_FRAME <= self.limits.max_bytes
            && self.outgoing.bytes() < WINDOW_BYTES
    }

    pub(super) fn send_call(&mut self, now: Time, call: CallId, request: &Request) {
        let named = request.mutation_id.is_some();
        assert_eq!(named, request.call.is_mutation(), "mutations are named, and nothing else");
        let expects_answer = request.call.has_reply();
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
            outstanding.expected.add_credit(*credit, want.as_ref());
        }
        if expects_answer {
            self.counters.requests += 1;
            let expected = ReplyValidator::of(&request.call, now);
            let (frame, claim) = (FrameBytes::clone(&frame), request.call.is_reclaim());
            let outstanding = OutstandingCall {
                expected,
                frame,
                type_name,
                is_reclaim: claim,
                cancelled: false,
                grants_void: false,
            };
            self.note_outstanding(call, outstanding);
        }
        self.put(frame);
    }

    /// Sends a call again in a session that does not know it.
    fn resend_call(&mut self, now: Time, call: CallId, mut outstanding: OutstandingCall) {
        outstanding.expected.restart(now);
        *self.counters.by_type.entry(outstanding.type_name).or_default() += 1;
        self.counters.requests += 1;
        // Its reply comes in this session, in which no grant has ended yet.
        outstanding.grants_void = false;
        let frame = frame::mark_resent(&outstanding.frame);
        self.note_outstanding(call, outstanding);
        self.put(frame);
    }

    fn note_outstanding(&mut self, call: CallId, outstanding: OutstandingCall) {
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
        let is_it = |(call, request): &(CallId, Request)| *call == id && request.call.has_reply();
        let unsent = [&mut self.waiting, &mut self.reclaims].into_iter().any(|queue| {
            let found = queue.iter().position(is_it);
            found.is_some_and(|at| queue.remove(at).is_some())
        });
        if unsent {
            return self.answer(id, Errno::INTR);
        }
        // It is unknown whether the call took effect in the forgotten session.
        if self.resend.remove(&id).is_some() {
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
        outstanding.expected.drop_seen(&mut response, self.cookie_key);
        if outstanding.expected.renews {
            self.confirmed = self.confirmed.max(outstanding.expected.sent);
        }
        let outdated = outstanding.grants_void;
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
            grant.id = GrantId(self.grants.local_id(grant.id.0));
        }
        self.event(Event::Response { call, response });
        self.send_waiting(now);
        Ok(())
    }

    /// Fails lookups by number, which the server of the new session does not support.
    fn fail_number_lookups(&mut self) {
        let again = self.resend.iter().filter(|(_, outstanding)| outstanding.expected.looks_up_number());
        let waiting =
            self.waiting.iter().filter(|(_, request)| matches!(request.call, Call::LookupNumber { .. }));
        let all = again.map(|(call, _)| *call).chain(waiting.map(|(call, _)| *call));
        for call in all.collect::<Vec<_>>() {
            self.resend.remove(&call);
            self.waiting.retain(|(waiting, _)| *waiting != call);
            self.answer(call, Errno::STALE);
        }
    }

    /// Ends prefetches, whose position is lost, and names-only listings, whose reader has a full listing on its way.
    fn end_prefetches(&mut self) {
        let walks = self.resend.iter().filter(|(_, outstanding)| outstanding.expected.ends_with_session());
        for call in walks.map(|(call, _)| *call).collect::<Vec<_>>() {
            self.resend.remove(&call);
            self.answer(call, Errno::CANCELED);
        }
    }

    /// Marks the grants in replies to outstanding calls as unusable, because all grants have ended.
    pub(super) fn void_grants_of_calls(&mut self) {
        self.updates.forget();
        self.outstanding.values_mut().for_each(|outstanding| outstanding.grants_void = true);
    }

    /// Queues the calls again for a server that has forgotten the session. `same_ids`: it accepts the ids that it
    /// issued before.
    pub(super) fn requeue_calls(&mut self, same_ids: bool, finds_numbers: bool) {
        (self.load, self.lock_load) = (OutstandingLoad::default(), OutstandingLoad::default());
        // The handle of a release is forgotten, and its number may soon be another file's.
        let waiting = std::mem::take(&mut self.reclaims).into_iter().chain(std::mem::take(&mut self.waiting));
        self.waiting =
            waiting.filter(|(_, request)| request.call.has_reply() && !request.call.is_reclaim()).collect();
        self.resend.append(&mut self.outstanding);
        self.resend.retain(|_, outstanding| !outstanding.is_reclaim);
        self.end_prefetches();
        if !finds_numbers {
            self.fail_number_lookups();
        }
        if !same_ids {
            // The server would take the ids for forged.
            let all = std::mem::take(&mut self.resend).into_keys();
            let all: Vec<CallId> = all.chain(self.waiting.drain(..).map(|(call, _)| call)).collect();
            return all.into_iter().for_each(|call| self.answer(call, Errno::IO));
        }
        let again = std::mem::take(&mut self.resend).into_iter();
        let (cancelled, again): (BTreeMap<_, _>, _) =
            again.partition(|(_, outstanding)| outstanding.cancelled);
        self.resend = again;
        cancelled.into_keys().for_each(|call| self.answer(call, Errno::INTR));
    }
}
