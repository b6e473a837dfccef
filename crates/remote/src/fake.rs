//! A remote over an in-memory [`ModelFs`], with controls to inject every kind of failure.
//!
//! Several [`Fake`]s of one [`FakeServer`] are several clients of one tree. Time is virtual: the inputs carry it.
//! Another client's calls, or the test, may cause a recall or a reply of a fake that had no input. Poll all fakes
//! after each step.

mod core;
mod disconnect;
mod pending;
mod prefetch;

use crate::model_fs::{ModelFs, ModelFsConfig};
use crate::{Event, Output, Reason, Remote, SessionParams};
use core::Core;
use nigh_types::{CallId, Errno, GrantId, LeaseScope, Name, NodeId, RecallId, Request, Span, Time};
use std::cell::RefCell;
use std::rc::Rc;

/// Delivery plan for a call and its reply. By default, execution and reply are immediate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CallPlan {
    /// Delay from sending to execution.
    pub arrives_after: Span,
    /// Delay from execution to the reply; later messages may overtake the reply.
    pub answered_after: Span,
    /// Executed only on release.
    pub hold_call: bool,
    /// Executed, but the reply is delivered only on release.
    pub hold_reply: bool,
    /// Executed without a reply.
    pub drop_reply: bool,
    /// The reply carries no grants.
    pub ungranted: bool,
    /// Delay between the chunks of a listing.
    pub chunk_pause: Span,
    /// Not executed; the reply is this error.
    pub refuse: Option<Errno>,
}

/// Selects the calls of a plan; the most specific plan counts, and among equals the latest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallFilter {
    Every,
    /// By `Call::type_name`.
    Type(&'static str),
    Call(CallId),
}

/// The tree and its connected clients.
#[derive(Clone)]
pub struct FakeServer {
    core: Rc<RefCell<Core>>,
}

impl FakeServer {
    #[must_use]
    pub fn new(config: ModelFsConfig) -> FakeServer {
        FakeServer { core: Rc::new(RefCell::new(Core::new(config))) }
    }

    /// Connects a new client with a session of its own. Changes by others recall its grants and wait for its
    /// acknowledgement.
    #[must_use]
    pub fn connect(&self, now: Time) -> Fake {
        let client = self.core.borrow_mut().connect(now);
        Fake { control: Control { core: Rc::clone(&self.core), client } }
    }

    /// Reads or changes the tree as its host does, without recalls.
    pub fn edit<R>(&self, edit: impl FnOnce(&mut ModelFs) -> R) -> R {
        edit(&mut self.core.borrow_mut().tree)
    }

    /// Delivers one call that is due by now, so that a test can look at the tree between any two; whether there was
    /// one.
    pub fn step(&mut self, now: Time) -> bool {
        self.core.borrow_mut().step(now)
    }

    /// The writes that have changed files so far, in order: client (by mutation id) and inode.
    #[must_use]
    pub fn written(&self) -> Vec<(u64, u64)> {
        self.core.borrow().written.clone()
    }

    /// Number of mutations that wait for acknowledgements.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        u32::try_from(self.core.borrow().pending.len()).unwrap_or(u32::MAX)
    }
}

/// One client's end: a [`Remote`].
#[derive(Clone)]
pub struct Fake {
    control: Control,
}

impl Fake {
    /// The controls of this client's session; they stay usable after the fake is boxed.
    #[must_use]
    pub fn control(&self) -> Control {
        self.control.clone()
    }
}

/// The controls of one client's session, and a record of its actions.
#[derive(Clone)]
pub struct Control {
    core: Rc<RefCell<Core>>,
    client: u64,
}

impl Control {
    /// Sets the delivery plan of later calls.
    pub fn plan(&self, which: CallFilter, fate: CallPlan) {
        self.core.borrow_mut().client_mut(self.client).plans.push((which, fate));
    }

    /// Drops all plans.
    pub fn plan_nothing(&self) {
        self.core.borrow_mut().client_mut(self.client).plans.clear();
    }

    /// Calls held before execution or before their reply.
    #[must_use]
    pub fn held(&self) -> Vec<CallId> {
        self.core.borrow().client(self.client).held_calls()
    }

    /// Releases a held call: executes it, if it was not, and delivers the reply.
    ///
    /// # Panics
    /// If the call is not held.
    pub fn release(&self, call: CallId) {
        self.core.borrow_mut().release(self.client, call);
    }

    /// Releases one chunk of a held reply.
    ///
    /// # Panics
    /// If no reply to the call is held.
    pub fn release_chunk(&self, call: CallId) {
        self.core.borrow_mut().release_chunk(self.client, call);
    }

    /// Sets whether changes by others arrive as updates instead of recalls, where possible. Initially off.
    pub fn takes_updates(&self, on: bool) {
        self.core.borrow_mut().client_mut(self.client).takes_updates = on;
    }

    /// Recalls facts from this client. Earlier replies that are held come after the recall.
    pub fn recall(&self, node: NodeId, covers: LeaseScope, names: &[Name]) -> RecallId {
        self.core.borrow_mut().recall(self.client, node, covers, names.to_vec())
    }

    /// Whether the client has acknowledged a recall.
    #[must_use]
    pub fn acknowledged(&self, recall: RecallId) -> bool {
        self.core.borrow().client(self.client).acknowledged.contains(&recall)
    }

    /// Ends the session: its grants, handles and outstanding calls are lost.
    pub fn lose(&self, why: &str) {
        self.core.borrow_mut().lose(self.client, why);
    }

    /// Disconnects the client for longer than its term: [`Event::Expired`]. The server still executes the calls that it
    /// has received.
    pub fn lapse(&self, why: &str) {
        self.core.borrow_mut().lapse(self.client, why);
    }

    /// Disconnects the client for less than its term, until [`Control::mend`].
    pub fn cut(&self) {
        self.core.borrow_mut().cut(self.client);
    }

    /// Reconnects the client: calls and cancellations made meanwhile arrive in order.
    ///
    /// # Panics
    /// If the client is not disconnected.
    pub fn mend(&self) {
        self.core.borrow_mut().mend(self.client);
    }

    /// While the client is disconnected, frees its locks for others, as a server that has lost the session does;
    /// [`Control::restore`] follows without `kept`.
    pub fn free_locks(&self) {
        self.core.borrow_mut().free_locks(self.client);
    }

    /// Reconnects the client: [`Event::Restored`]. Without `kept` the server has lost the session, except for the
    /// replies to mutations by their ids. There is no grace period: the client cannot reclaim locks that others took
    /// meanwhile, or files that others removed.
    ///
    /// # Panics
    /// If the client is not disconnected.
    pub fn restore(&self, kept: bool) {
        self.core.borrow_mut().restore(self.client, kept);
    }

    /// Number of calls received so far with this `Call::type_name`.
    #[must_use]
    pub fn calls(&self, type_name: &str) -> u64 {
        self.core.borrow().client(self.client).calls.get(type_name).copied().unwrap_or(0)
    }

    /// Number of calls received so far, without releases and pins.
    #[must_use]
    pub fn requests(&self) -> u64 {
        let core = self.core.borrow();
        core.client(self.client)
            .calls
            .iter()
            .filter(|(name, _)| !matches!(**name, "release" | "keep"))
            .map(|(_, n)| n)
            .sum()
    }

    /// Whether the server considers itself bound by a grant to this client.
    #[must_use]
    pub fn has_granted(&self, node: NodeId, covers: LeaseScope) -> bool {
        self.core.borrow().holds(self.client, node, covers)
    }

    /// Calls that the client has cancelled.
    #[must_use]
    pub fn cancelled(&self) -> Vec<CallId> {
        self.core.borrow().client(self.client).cancelled.clone()
    }

    /// Handles that are open in this session.
    #[must_use]
    pub fn open_handles(&self) -> u32 {
        u32::try_from(self.core.borrow().client(self.client).handles.len()).unwrap_or(u32::MAX)
    }
}

impl Remote for Fake {
    fn handle_call(&mut self, now: Time, id: CallId, request: Request) {
        let Control { core, client } = &self.control;
        core.borrow_mut().handle_call(now, *client, id, request);
    }

    fn handle_cancel(&mut self, now: Time, id: CallId) {
        let Control { core, client } = &self.control;
        core.borrow_mut().handle_cancel(now, *client, id);
    }

    fn handle_acknowledge(&mut self, now: Time, id: RecallId) {
        let Control { core, client } = &self.control;
        core.borrow_mut().handle_acknowledge(now, *client, id);
    }

    fn handle_return(&mut self, now: Time, grants: Vec<GrantId>) {
        let Control { core, client } = &self.control;
        core.borrow_mut().handle_return(now, *client, &grants);
    }

    fn handle_reclaimed(&mut self, now: Time) {
        let Control { core, client } = &self.control;
        let mut core = core.borrow_mut();
        core.advance(now);
        core.reclaimed(*client);
    }

    fn handle_input(&mut self, now: Time, _bytes: &[u8]) {
        self.control.core.borrow_mut().advance(now);
    }

    fn handle_disconnect(&mut self, now: Time, why: &str) {
        let Control { core, client } = &self.control;
        let mut core = core.borrow_mut();
        core.advance(now);
        core.lose(*client, why);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.control.core.borrow_mut().advance(now);
    }

    fn poll_output(&mut self) -> Output {
        self.control.core.borrow_mut().poll(self.control.client)
    }
}

#[cfg(test)]
mod tests;
