//! Access of coroutines to the session: its state, messages to the server, and waiting.

use super::fids::{Dropped, Fid};
use super::state::SessionState;
use crate::{ProtocolError, Rmessage, Tmessage};
use nigh_pathclient::{DropQueue, TaskContext};
use nigh_remote::{Event, Output};
use nigh_types::{Errno, Span};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

/// Reference to a session's state. No coroutine holds the lock while it waits.
#[derive(Clone)]
pub(crate) struct SessionContext {
    shared: Arc<Mutex<SessionState>>,
    pub dropped: DropQueue<Dropped>,
}

impl SessionContext {
    pub fn new(state: SessionState) -> SessionContext {
        SessionContext { shared: Arc::new(Mutex::new(state)), dropped: DropQueue::default() }
    }

    pub fn shared(&self) -> MutexGuard<'_, SessionState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The context of a task.
    pub fn of(&self, task: TaskContext) -> CallContext {
        CallContext { session: self.clone(), task }
    }
}

/// A coroutine's access to the session.
#[derive(Clone)]
pub(crate) struct CallContext {
    session: SessionContext,
    task: TaskContext,
}

impl CallContext {
    pub fn shared(&self) -> MutexGuard<'_, SessionState> {
        self.session.shared()
    }

    /// Emits an event to the session's owner.
    pub fn emit(&self, event: Event) {
        self.shared().messages.out.push_back(Output::Event(event));
    }

    /// Allocates an unused fid.
    pub fn new_fid(&self) -> Arc<Fid> {
        let mut shared = self.shared();
        let (number, epoch) = (shared.messages.fids.take(), shared.messages.epoch);
        Arc::new(Fid::new(number, epoch, self.session.dropped.clone()))
    }

    /// Sends a message; the reply goes to the future that is returned, also if it is awaited later.
    pub fn request(&self, message: Tmessage) -> PendingReply {
        let slot = self.shared().messages.send(Some(self.task.id()), message, None);
        PendingReply { cx: self.clone(), slot, taken: false }
    }

    /// Sends a message that makes a fid, which exists once the reply is no error.
    pub fn request_fid(&self, message: Tmessage, makes: &Fid) -> PendingReply {
        let slot = self.shared().messages.send(Some(self.task.id()), message, Some(makes.number()));
        PendingReply { cx: self.clone(), slot, taken: false }
    }

    /// Waits for a time span, or until other coroutines have made a condition true.
    pub async fn pause_unless(&self, span: Span, is_so: impl Fn(&SessionState) -> bool + Send) {
        self.task.until_or_after(span, move || is_so(&self.shared())).await;
    }

    /// Waits until other coroutines have made a condition true.
    pub async fn until_others(&self, is_so: impl Fn(&SessionState) -> bool + Send) {
        self.task.until(move || is_so(&self.shared())).await;
    }

    /// Notes a protocol error of the server, which ends the session.
    pub fn abort(&self, error: ProtocolError) -> Errno {
        self.shared().violation.get_or_insert(error);
        Errno::PROTO
    }
}

/// A reply that is awaited. If it is dropped before, the message is flushed.
pub(crate) struct PendingReply {
    cx: CallContext,
    slot: u64,
    taken: bool,
}

impl Future for PendingReply {
    type Output = Result<Rmessage, Errno>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = self.cx.shared().messages.take_answer(self.slot);
        match answer {
            Some(answer) => {
                self.taken = true;
                Poll::Ready(answer)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        if !self.taken {
            self.cx.session.dropped.push(Dropped::Reply(self.slot));
        }
    }
}
