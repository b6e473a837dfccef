//! Dispatch of client messages: decodes the bytes of a link and routes each event to its handler.

use crate::connection::Ended;
use crate::connection::validate_ids;
use crate::export::open_handles::Closing;
use crate::lease::holder::LeaseSession;
use crate::ops::prefetch::{PrefetchJob, ReplyStream};
use crate::os::clock::now;
use crate::pool::job::Job;
use crate::server::Server;
use crate::session::Session;
use nigh_native::{ProtocolError, ServerEvent};
use nigh_types::{Call, CallId, Errno, Request, Response, WriteFlags};
use std::sync::Arc;

/// Grants returned under one hold of the lease table's lock; other threads wait for the table meanwhile.
const RETURN_BATCH: usize = 4_096;

impl Server {
    /// Handles bytes from a link. Links of one session take turns.
    pub(crate) fn handle_bytes(&self, session: &Arc<Session>, link: u64, bytes: &[u8]) -> Option<Ended> {
        session.with_input(link, || self.decode(session, bytes)).unwrap_or(Some(Ended::Replaced))
    }

    /// Handles bytes from a link without waiting. Returns `None` while another thread handles bytes of this session.
    pub(crate) fn try_handle_bytes(
        &self,
        session: &Arc<Session>,
        link: u64,
        bytes: &[u8],
    ) -> Option<Option<Ended>> {
        let heard = session.try_with_input(link, || self.decode(session, bytes))?;
        Some(heard.unwrap_or(Some(Ended::Replaced)))
    }

    /// Decodes and handles messages of a client. They are answered only while they renew its lease: a client that
    /// owes acknowledgements for too long gets no other replies until it has sent them.
    fn decode(&self, session: &Arc<Session>, mut bytes: &[u8]) -> Option<Ended> {
        let is_heard = || self.leases.renew(session.holder());
        let heard = is_heard();
        loop {
            let (taken, events) = session.with_connection(|connection| {
                connection.mute(!heard);
                let taken = connection.handle_some(now(), &mut bytes);
                (taken, std::iter::from_fn(|| connection.poll_event()).collect::<Vec<_>>())
            });
            let ended = self.handle_events(session, events);
            if let Err(error) = taken {
                if error != ProtocolError::Ended {
                    session.log.set_end_reason(|| format!("the client broke the protocol: {error}"));
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
        self.handle_events(session, events)
    }

    fn handle_events(&self, session: &Arc<Session>, events: Vec<ServerEvent>) -> Option<Ended> {
        events.into_iter().find_map(|event| self.handle_event(session, event))
    }

    /// Handles one event. Returns how the session ended, if the event ended it.
    pub(crate) fn handle_event(&self, session: &Arc<Session>, event: ServerEvent) -> Option<Ended> {
        match event {
            // ATTACH is handled before a session exists.
            ServerEvent::Attach { .. } => return Some(Ended::Broken),
            ServerEvent::Request { call, request, resent: again } => {
                return self.handle_request(session, call, request, again);
            }
            ServerEvent::Cancel(call) => self.cancel(session, call),
            ServerEvent::Acknowledge(recall) => self.leases.acknowledge(session.holder(), recall),
            ServerEvent::Return(grants) => {
                let some = grants.chunks(RETURN_BATCH);
                some.for_each(|some| self.leases.return_grants(session.holder(), some));
            }
            ServerEvent::Reclaimed => self.reclaimed(session),
            ServerEvent::Bye { why } => {
                session.log.set_end_reason(|| format!("goodbye: {why}"));
                return Some(Ended::Goodbye);
            }
        }
        None
    }

    /// Starts a request. `again`: the client first sent it in a session that the server has discarded.
    pub(crate) fn handle_request(
        &self,
        session: &Arc<Session>,
        call: CallId,
        mut request: Request,
        again: bool,
    ) -> Option<Ended> {
        if again {
            clear_grant(&mut request.call);
        }
        let attached = session.attached()?;
        if let Err(broken) = validate_ids::check(&attached.export, &request) {
            session.end(&broken.to_string());
            return Some(Ended::Broken);
        }
        match &request.call {
            Call::Release { handles } => {
                // Closing the last descriptor of a large file may take long, and this thread has to read the link.
                let closing = attached.files.take(handles).into_iter().flat_map(Closing::by_filesystem);
                for files in closing {
                    let released = attached.files.leases().space_reclaimer.release(files);
                    self.pool.later(session.queue_key(), move || drop(released));
                }
                return None;
            }
            Call::PinOpen { node, names, handle } => {
                let who = session.admit(request.credentials);
                attached.export.pin_open(&attached.files, &who, (node, names), *handle);
                return None;
            }
            Call::Unlock { .. } => {
                let result = self.locks.unlock(session.id, &request.call);
                session.reply(call, Response::plain(result));
                return None;
            }
            Call::PrefetchCredit { .. } => {
                if !session.prefetch_jobs.handle_control(&request.call) {
                    session.end("more is wanted of a walk ahead than may be");
                    return Some(Ended::Broken);
                }
                session.outbox.send(); // resumes a prefetch job that waited for credit
                return None;
            }
            _ => {}
        }
        if let Some(name) = request.mutation_id.filter(|_| again)
            && session.replay_reply(&self.memory, call, name)
        {
            return None;
        }
        // While the server stops the call stays unanswered; the client sees the connection close instead.
        let taken = self.inflight.take()?;
        if request.call.waits_for_lock() {
            self.locks.note_pending(session.id, call);
        }
        let begun = match &request.call {
            Call::Prefetch { .. } => session
                .prefetch_jobs
                .begin(call)
                .map(|steering| ReplyStream::Prefetch(Box::new(PrefetchJob::new(steering, &request.call)))),
            _ => None,
        };
        let session = Arc::clone(session);
        let job = self.grace.admit(Job {
            session,
            call,
            request,
            change: None,
            inflight: taken,
            resent: again,
            stream: begun,
        });
        job.into_iter().for_each(|job| self.pool.submit(job));
        None
    }

    /// Cancels a call. The cancellation is recorded before the queues are searched, so that a call moving between two
    /// queues is not missed.
    fn cancel(&self, session: &Arc<Session>, call: CallId) {
        let Some(locks) = session.note_cancelled(call) else { return };
        session.prefetch_jobs.end(call);
        let job = self.grace.take_back(session, call);
        let job = job.or_else(|| self.pool.take_back(session, call));
        let job = job.or_else(|| self.leases.take_back(session.holder(), call).map(Job::of_parked));
        if let Some(job) = job.or_else(|| session.outbox.take_back(call)) {
            job.abort();
        } else if locks && self.locks.cancel(session.id, call) {
            session.reply(call, Response::plain(Err(Errno::INTR)));
        }
    }

    /// Handles the end of the client's reclaim.
    fn reclaimed(&self, session: &Arc<Session>) {
        let attached = session.attached();
        self.locks.reclaim_done(session.id);
        self.registry.reclaim_done(session.id);
        attached.into_iter().for_each(|attached| self.returned(attached.who));
    }
}

/// Clears the grant that a resent call names: its id belongs to the session in which the call was first sent.
fn clear_grant(call: &mut Call) {
    if let Call::Write { flags: WriteFlags { since: Some(since), .. }, .. } = call {
        since.under = None;
    }
}
