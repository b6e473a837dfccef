//! Dispatch of client messages: decodes the bytes of a link and routes each event to its handler.

use crate::connection::Ended;
use crate::ops::ahead::{Ahead, Begun};
use crate::pool::Job;
use crate::server::Server;
use crate::session::{Session, now};
use crate::validate_ids;
use nigh_native::{ProtocolError, ServerEvent};
use nigh_types::{Call, CallId, Errno, Request, Response, WriteFlags};
use std::sync::Arc;

/// Grants returned under one hold of the lease table's lock; other threads wait for the table meanwhile.
const RETURNED_AT_A_TIME: usize = 4_096;

impl Server {
    /// Handles bytes from a link. Links of one session take turns.
    pub(crate) fn handle_bytes(&self, session: &Arc<Session>, link: u64, bytes: &[u8]) -> Option<Ended> {
        session.intake(link, || self.decode(session, bytes)).unwrap_or(Some(Ended::Replaced))
    }

    /// Handles bytes from a link without waiting. Returns `None` while another thread handles bytes of this session.
    pub(crate) fn hear_now(&self, session: &Arc<Session>, link: u64, bytes: &[u8]) -> Option<Option<Ended>> {
        let heard = session.intake_now(link, || self.decode(session, bytes))?;
        Some(heard.unwrap_or(Some(Ended::Replaced)))
    }

    /// Decodes and handles messages of a client. They are answered only while they renew its lease: a client that
    /// owes acknowledgements for too long gets no other replies until it has sent them.
    fn decode(&self, session: &Arc<Session>, mut bytes: &[u8]) -> Option<Ended> {
        let is_heard = || self.leases.is_heard(session.holder());
        let heard = is_heard();
        loop {
            let (taken, events) = session.with_connection(|connection| {
                connection.mute(!heard);
                let taken = connection.handle_some(now(), &mut bytes);
                (taken, std::iter::from_fn(|| connection.poll_event()).collect::<Vec<_>>())
            });
            let ended = self.take_all(session, events);
            if let Err(error) = taken {
                if error != ProtocolError::Ended {
                    session.story.ends(|| format!("the client broke the protocol: {error}"));
                }
                return Some(ended.unwrap_or(Ended::Broken));
            }
            if ended.is_some() {
                return ended;
            }
            if bytes.is_empty() {
                break;
            }
        }
        if heard || !is_heard() {
            return None;
        }
        let events = session.with_connection(|connection| {
            connection.mute(false);
            // These replies renew the client's lease as well.
            let _ = connection.handle_input(now(), &[]);
            std::iter::from_fn(|| connection.poll_event()).collect::<Vec<_>>()
        });
        self.take_all(session, events)
    }

    fn take_all(&self, session: &Arc<Session>, events: Vec<ServerEvent>) -> Option<Ended> {
        events.into_iter().find_map(|event| self.handle_event(session, event))
    }

    /// Handles one event. Returns how the session ended, if the event ended it.
    pub(crate) fn handle_event(&self, session: &Arc<Session>, event: ServerEvent) -> Option<Ended> {
        match event {
            // ATTACH is handled before a session exists.
            ServerEvent::Attach { .. } => return Some(Ended::Broken),
            ServerEvent::Request { call, request, again } => {
                return self.request(session, call, request, again);
            }
            ServerEvent::Cancel(call) => self.cancel(session, call),
            ServerEvent::Acknowledge(recall) => self.leases.acknowledge(session.holder(), recall),
            ServerEvent::Return(grants) => {
                let some = grants.chunks(RETURNED_AT_A_TIME);
                some.for_each(|some| self.leases.give_back(session.holder(), some));
            }
            ServerEvent::Reclaimed => self.reclaimed(session),
            ServerEvent::Bye { why } => {
                session.story.ends(|| format!("goodbye: {why}"));
                return Some(Ended::Goodbye);
            }
        }
        None
    }

    /// Starts a request. `again`: the client first sent it in a session that the server has discarded.
    pub(crate) fn request(
        &self,
        session: &Arc<Session>,
        call: CallId,
        mut request: Request,
        again: bool,
    ) -> Option<Ended> {
        if again {
            forget_grant(&mut request.call);
        }
        let attached = session.attached()?;
        if let Err(broken) = validate_ids::check(&attached.export, &request) {
            session.end(&broken.to_string());
            return Some(Ended::Broken);
        }
        match &request.call {
            Call::Release { handles } => {
                // Closing the last descriptor of a large file may take long, and this thread has to read the link.
                if let Some(closing) = attached.files.take(handles) {
                    self.pool.later(session.share(), move || drop(closing));
                }
                return None;
            }
            Call::PinOpen { node, names, handle } => {
                let who = session.admit(request.credentials);
                attached.export.keep(&attached.files, &who, (node, names), *handle);
                return None;
            }
            Call::Unlock { .. } => {
                let result = self.locks.unlock(session.id, &request.call);
                session.answer(call, Response::plain(result));
                return None;
            }
            Call::PrefetchCredit { .. } => {
                if !session.walks.steer(&request.call) {
                    session.end("more is wanted of a walk ahead than may be");
                    return Some(Ended::Broken);
                }
                session.outbox.send(); // resumes a prefetch job that waited for credit
                return None;
            }
            _ => {}
        }
        if let Some(name) = request.name.filter(|_| again)
            && session.answer_again(&self.memory, call, name)
        {
            return None;
        }
        // While the server stops the call stays unanswered; the client sees the connection close instead.
        let taken = self.work.take()?;
        if request.call.waits_for_lock() {
            self.locks.expect(session.id, call);
        }
        let begun = match &request.call {
            Call::Prefetch { .. } => session
                .walks
                .begin(call)
                .map(|steering| Begun::Walk(Box::new(Ahead::new(steering, &request.call)))),
            _ => None,
        };
        let session = Arc::clone(session);
        let job = self.grace.admit(Job { session, call, request, change: None, taken, again, begun });
        job.into_iter().for_each(|job| self.pool.submit(job));
        None
    }

    /// Cancels a call. The cancellation is recorded before the queues are searched, so that a call moving between two
    /// queues is not missed.
    fn cancel(&self, session: &Arc<Session>, call: CallId) {
        let Some(locks) = session.note_cancelled(call) else { return };
        session.walks.end(call);
        let job = self.grace.take_back(session, call);
        let job = job.or_else(|| self.pool.take_back(session, call));
        let job = job.or_else(|| self.leases.take_back(session, call));
        if let Some(job) = job.or_else(|| session.outbox.take_back(call)) {
            job.give_up();
        } else if locks && self.locks.cancel(session.id, call) {
            session.answer(call, Response::plain(Err(Errno::INTR)));
        }
    }

    /// Handles the end of the client's reclaim.
    fn reclaimed(&self, session: &Arc<Session>) {
        let attached = session.attached();
        self.locks.claimed(session.id);
        self.register.claimed(session.id);
        attached.into_iter().for_each(|attached| self.returned(attached.who));
    }
}

/// Clears the grant that a resent call names: its id belongs to the session in which the call was first sent.
fn forget_grant(call: &mut Call) {
    if let Call::Write { flags: WriteFlags { since: Some(since), .. }, .. } = call {
        since.under = None;
    }
}
