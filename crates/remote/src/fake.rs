//! A remote over an in-memory [`Tree`], with everything that can go wrong at the turn of a knob.
//!
//! Several [`Fake`]s of one [`FakeServer`] are several clients of one tree. Time is virtual: it is what the
//! inputs say. A recall or an answer may come out of a fake without an input of its own, because
//! another client or the test caused it; poll all of them after each step.

mod ahead;
mod away;
mod core;
mod pending;

use crate::tree::{Tree, TreeConfig};
use crate::{Event, Output, Reason, Remote, Session};
use core::Core;
use nigh_types::{CallId, Covers, Errno, GrantId, Name, NodeId, RecallId, Request, Span, Time};
use std::cell::RefCell;
use std::rc::Rc;

/// What becomes of a call and its answer. The default: executed at once, answered at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Fate {
    /// From sending to execution.
    pub arrives_after: Span,
    /// From execution to its answer, which something sent later can overtake.
    pub answered_after: Span,
    /// Executed only when released.
    pub hold_call: bool,
    /// Executed, but answered only when released.
    pub hold_reply: bool,
    /// Executed and never answered.
    pub drop_reply: bool,
    /// Answered without grants.
    pub ungranted: bool,
    /// Between the parts of a listing.
    pub part_pause: Span,
    /// Not executed, but answered so.
    pub refuse: Option<Errno>,
}

/// Which calls a fate is for; the most particular one counts, and of equals the latest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    Every,
    /// By `Call::type_name`.
    Type(&'static str),
    Call(CallId),
}

/// The tree and those who are connected to it.
#[derive(Clone)]
pub struct FakeServer {
    core: Rc<RefCell<Core>>,
}

impl FakeServer {
    #[must_use]
    pub fn new(config: TreeConfig) -> FakeServer {
        FakeServer { core: Rc::new(RefCell::new(Core::new(config))) }
    }

    /// A new client with a session of its own. Grants are recalled from it when others change what
    /// they cover, and those wait for its acknowledgement; see [`FakeServer::recall_by_itself`].
    #[must_use]
    pub fn connect(&self, now: Time) -> Fake {
        let client = self.core.borrow_mut().connect(now);
        Fake { control: Control { core: Rc::clone(&self.core), client } }
    }

    /// Whether a mutation recalls what it changes from other clients, and waits for them. On from the
    /// start.
    pub fn recall_by_itself(&self, on: bool) {
        self.core.borrow_mut().recalls_by_itself = on;
    }

    /// Looks at the tree or changes it, as its host does: nobody is told.
    pub fn edit<R>(&self, edit: impl FnOnce(&mut Tree) -> R) -> R {
        edit(&mut self.core.borrow_mut().tree)
    }

    /// Lets one call arrive that is due by now, so that the tree can be looked at between any two; whether there was one.
    pub fn step(&mut self, now: Time) -> bool {
        self.core.borrow_mut().step(now)
    }

    /// Which clients' writes have changed files so far, in their order, and the inodes. Clients are numbered by the names of their operations.
    #[must_use]
    pub fn written(&self) -> Vec<(u64, u64)> {
        self.core.borrow().written.clone()
    }

    /// How many mutations wait for acknowledgements.
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
    /// The knobs of this client's session; they stay usable when the fake is boxed away.
    #[must_use]
    pub fn control(&self) -> Control {
        self.control.clone()
    }
}

/// The knobs of one client's session, and what it did.
#[derive(Clone)]
pub struct Control {
    core: Rc<RefCell<Core>>,
    client: u64,
}

impl Control {
    /// Decides what becomes of calls from now on.
    pub fn plan(&self, which: Which, fate: Fate) {
        self.core.borrow_mut().client_mut(self.client).plans.push((which, fate));
    }

    /// Forgets all plans.
    pub fn plan_nothing(&self) {
        self.core.borrow_mut().client_mut(self.client).plans.clear();
    }

    /// Calls that are held, before execution or before their answer.
    #[must_use]
    pub fn held(&self) -> Vec<CallId> {
        self.core.borrow().client(self.client).held_calls()
    }

    /// Lets a held call go on: executed, if it was not, and answered.
    ///
    /// # Panics
    /// If the call is not held.
    pub fn release(&self, call: CallId) {
        self.core.borrow_mut().release(self.client, call);
    }

    /// Lets one part of a held answer go.
    ///
    /// # Panics
    /// If no answer to the call is held.
    pub fn release_part(&self, call: CallId) {
        self.core.borrow_mut().release_part(self.client, call);
    }

    /// Whether others' changes are told in the place of recalls, where they can be. Off from the start.
    pub fn takes_pushes(&self, on: bool) {
        self.core.borrow_mut().client_mut(self.client).takes_pushes = on;
    }

    /// Recalls facts from this client. What was answered before and is held comes behind it.
    pub fn recall(&self, node: NodeId, covers: Covers, names: &[Name]) -> RecallId {
        self.core.borrow_mut().recall(self.client, node, covers, names.to_vec())
    }

    /// Whether the client has acknowledged a recall.
    #[must_use]
    pub fn acknowledged(&self, recall: RecallId) -> bool {
        self.core.borrow().client(self.client).acknowledged.contains(&recall)
    }

    /// Ends the session: its grants, handles and outstanding calls are gone.
    pub fn lose(&self, why: &str) {
        self.core.borrow_mut().lose(self.client, why);
    }

    /// Cuts the client off for longer than its term: [`Event::Lapsed`]. What the server has of its calls it does
    /// all the same.
    pub fn lapse(&self, why: &str) {
        self.core.borrow_mut().lapse(self.client, why);
    }

    /// Cuts the client off for less than its term, until [`Control::mend`].
    pub fn cut(&self) {
        self.core.borrow_mut().cut(self.client);
    }

    /// The link is back: calls and cancellations that were made meanwhile arrive in their order.
    ///
    /// # Panics
    /// If it is not cut off.
    pub fn mend(&self) {
        self.core.borrow_mut().mend(self.client);
    }

    /// While it is away others get what it has locked, as from a server that has forgotten its session;
    /// [`Control::restore`] follows without `kept`.
    pub fn free_locks(&self) {
        self.core.borrow_mut().free_locks(self.client);
    }

    /// Lets it come back: [`Event::Restored`]. Without `kept` the server has forgotten its session, but for the
    /// answers to mutations by their names. There is no grace: what others have locked meanwhile, or removed,
    /// cannot be had again.
    ///
    /// # Panics
    /// If it is not away.
    pub fn restore(&self, kept: bool) {
        self.core.borrow_mut().restore(self.client, kept);
    }

    /// Calls received so far of one `Call::type_name`.
    #[must_use]
    pub fn calls(&self, type_name: &str) -> u64 {
        self.core.borrow().client(self.client).calls.get(type_name).copied().unwrap_or(0)
    }

    /// Calls received so far, without releases.
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

    /// Whether the server holds itself bound by a grant to this client.
    #[must_use]
    pub fn has_granted(&self, node: NodeId, covers: Covers) -> bool {
        self.core.borrow().holds(self.client, node, covers)
    }

    /// Calls that the client said nobody waits for.
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
