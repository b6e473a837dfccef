//! A call of a session that waits for a thread, or for other clients.

use super::lent::CallTarget;
use crate::lease::holder::{LeaseSession, ParkedCall};
use crate::lease::leases::Leases;
use crate::lease::pending_change::PendingChange;
use crate::limits::inflight_calls::InflightCall;
use crate::ops::prefetch::ReplyStream;
use crate::session::Session;
use nigh_lease::{ChangeId, Holder};
use nigh_types::{CallId, Errno, Request, Response};
use std::any::Any;
use std::sync::Arc;

/// A call waiting for a thread.
pub(crate) struct Job {
    pub(crate) session: Arc<Session>,
    pub(crate) call: CallId,
    pub(crate) request: Request,
    /// The pending change that an earlier attempt began.
    pub(crate) change: Option<PendingChange>,
    pub(crate) inflight: InflightCall,
    /// The client first sent the call in a session that the server has discarded.
    pub(crate) resent: bool,
    /// Progress of a streamed reply, from an earlier attempt.
    pub(crate) stream: Option<ReplyStream>,
}

impl Job {
    /// Aborts a cancelled call that has changed nothing.
    pub(crate) fn abort(self) {
        drop(self.change);
        if matches!(self.stream, Some(ReplyStream::Listing(_))) {
            self.session.outbox.done(&self.request.call);
        }
        self.session.prefetch_jobs.forget(self.call);
        if self.request.call.waits_for_lock()
            && let Some(attached) = self.session.attached()
        {
            attached.locks.forget(self.session.id, self.call);
        }
        self.session.reply(self.call, Response::plain(Err(Errno::INTR)));
        drop(self.inflight);
    }
}

impl ParkedCall for Job {
    fn holder(&self) -> Holder {
        self.session.holder()
    }

    fn call(&self) -> CallId {
        self.call
    }

    fn type_name(&self) -> &'static str {
        self.request.call.type_name()
    }

    fn change(&self) -> Option<ChangeId> {
        self.change.as_ref().map(|change| change.id)
    }

    fn is_wanted(&self) -> bool {
        !self.session.is_over() && !self.session.is_cancelled(self.call)
    }

    fn abort(self: Box<Self>) {
        Job::abort(*self);
    }
}

impl Job {
    /// Parks the call until its change is ready; returns it if it may go on at once.
    pub(crate) fn park(self, leases: &Leases) -> Option<Job> {
        leases.park(Box::new(self)).map(Job::of_parked)
    }

    /// A call that was parked.
    ///
    /// # Panics
    /// If it is no job: nothing else is parked.
    pub(crate) fn of_parked(call: Box<dyn ParkedCall>) -> Job {
        let call: Box<dyn Any> = call;
        *call.downcast().unwrap_or_else(|_| unreachable!("only jobs are parked"))
    }
}

impl Job {
    pub(super) fn execute(self) {
        let session = Arc::clone(&self.session);
        session.execute(self);
    }

    /// Fails a call that waited for a hung filesystem and has had no effect.
    pub(super) fn fail(self) {
        if self.stream.is_some() || self.request.call.waits_for_lock() {
            return self.abort();
        }
        drop(self.change);
        self.session.reply(self.call, Response::plain(Err(Errno::IO)));
        drop(self.inflight);
    }

    pub(super) fn place(&self) -> Option<CallTarget> {
        let export = self.session.attached().map_or(0, |attached| Arc::as_ptr(&attached.export).addr());
        CallTarget::of(export, &self.request.call)
    }
}
