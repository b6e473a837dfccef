//! Disconnection of a client for longer than its term, and its return, as [`crate::Remote`] specifies.

use super::core::Core;
use super::{Event, Span};
use nigh_types::{Call, CallId, Errno, NodeId, RecallId, Reply, Request, Response};
use std::collections::{BTreeSet, VecDeque};

/// State of a disconnected session.
#[derive(Default)]
pub(super) struct Disconnection {
    pub(super) is_disconnected: bool,
    /// Events of the client's own end; they come before all others.
    pub(super) client_events: VecDeque<Event>,
    /// Calls made while disconnected, or during reclaim.
    pub(super) unsent: Vec<(CallId, Request)>,
    /// Calls cancelled while disconnected.
    cancelled: BTreeSet<CallId>,
    /// Calls to send again after the reclaim; `None`: no reclaim is running.
    to_resend: Option<Vec<CallId>>,
    /// Recalls of an ended term, which the server no longer waits for.
    pub(super) recalls: BTreeSet<RecallId>,
}

impl Core {
    /// The term has expired at both ends: the client's grants have ended, and others no longer wait for the client.
    pub(super) fn lapse(&mut self, client: u64, why: &str) {
        let session = self.client_mut(client);
        if session.disconnection.is_disconnected {
            return;
        }
        session.disconnection.is_disconnected = true;
        session.disconnection.client_events.push_back(Event::Expired { why: why.to_owned() });
        session.grants.clear();
        let owed = std::mem::take(&mut session.recalls).into_keys();
        let owed: Vec<RecallId> = owed.chain(std::mem::take(&mut session.prepared)).collect();
        session.disconnection.recalls.extend(&owed);
        self.settle(&owed);
    }

    pub(super) fn free_locks(&mut self, client: u64) {
        assert!(self.client(client).disconnection.is_disconnected, "a connected client keeps its locks");
        let answered = self.locks.forget(client);
        self.lock_answers(answered);
    }

    /// The client reconnects; with `kept` the server has kept its open files and locks.
    pub(super) fn restore(&mut self, client: u64, kept: bool) {
        let event = Event::Restored { session: self.session(), kept };
        let absence = &mut self.client_mut(client).disconnection;
        assert!(std::mem::take(&mut absence.is_disconnected), "it is away");
        absence.client_events.push_back(event);
        if kept {
            return self.put_unsent(client);
        }
        absence.unsent.clear();
        let cancelled = std::mem::take(&mut absence.cancelled);
        self.forget(client, &cancelled);
    }

    /// Stops all traffic for a while; no term expires.
    pub(super) fn cut(&mut self, client: u64) {
        self.client_mut(client).disconnection.is_disconnected = true;
    }

    pub(super) fn mend(&mut self, client: u64) {
        let is_away = &mut self.client_mut(client).disconnection.is_disconnected;
        assert!(std::mem::take(is_away), "it is cut off");
        self.put_unsent(client);
    }

    /// Delivers what waited for the connection.
    fn put_unsent(&mut self, client: u64) {
        let absence = &mut self.client_mut(client).disconnection;
        let (unsent, cancelled) =
            (std::mem::take(&mut absence.unsent), std::mem::take(&mut absence.cancelled));
        for (call, request) in unsent {
            self.put_in_turn(client, call, request);
        }
        for call in cancelled {
            if !self.cancel_while_away(client, call) {
                self.cancel(client, call);
            }
        }
    }

    /// Sends a call, now or later.
    pub(super) fn put_in_turn(&mut self, client: u64, call: CallId, request: Request) {
        let absence = &mut self.client_mut(client).disconnection;
        let at_once = request.call.is_allowed_during_reclaim();
        if absence.is_disconnected || absence.to_resend.is_some() && !at_once {
            absence.unsent.push((call, request));
        } else {
            self.put(client, call, request);
        }
    }

    /// The server has lost the session: a new one replaces it.
    fn forget(&mut self, client: u64, cancelled: &BTreeSet<CallId>) {
        let session = self.client_mut(client);
        session.events.clear();
        session.arriving.clear();
        session.held.clear();
        session.held_replies.clear();
        session.outstanding.retain(|_, request| !request.call.is_reclaim());
        session.prefetches.clear();
        let again: Vec<CallId> = session.outstanding.keys().copied().collect();
        let cancelled: BTreeSet<CallId> = cancelled.iter().chain(&session.cancelled).copied().collect();
        session.disconnection.to_resend = Some(again);
        let handles: Vec<_> = std::mem::take(&mut session.handles).into_iter().collect();
        self.tree.release(&handles);
        self.tree.forget_paths();
        self.drop_pending(|pending| pending.client == client);
        let answered = self.locks.forget(client);
        self.lock_answers(answered);
        for call in cancelled {
            self.cancel_while_away(client, call);
        }
    }

    /// Open files and locks are reclaimed: outstanding calls are sent again.
    pub(super) fn reclaimed(&mut self, client: u64) {
        let absence = &mut self.client_mut(client).disconnection;
        assert!(!absence.is_disconnected, "a disconnected client has not reclaimed");
        let Some(again) = absence.to_resend.take() else { return };
        let unsent = std::mem::take(&mut absence.unsent);
        self.locks.end_reclaim(client);
        for call in again {
            if let Some(request) = self.client(client).outstanding.get(&call).cloned() {
                if let Some(response) = super::prefetch::reply_after_loss(&request) {
                    self.send(client, Span::ZERO, Event::Response { call, response });
                    continue;
                }
                self.put(client, call, request);
            }
        }
        for (call, request) in unsent {
            self.put(client, call, request);
        }
    }

    /// Cancels a call that is not in transit; returns false if it is.
    pub(super) fn cancel_while_away(&mut self, client: u64, call: CallId) -> bool {
        let absence = &mut self.client_mut(client).disconnection;
        if absence.is_disconnected {
            absence.cancelled.insert(call);
            return true;
        }
        let Some(again) = &mut absence.to_resend else { return false };
        let before = again.len() + absence.unsent.len();
        again.retain(|waiting| *waiting != call);
        absence.unsent.retain(|(waiting, _)| *waiting != call);
        let removed = again.len() + absence.unsent.len() < before;
        if removed {
            let response = Response::plain(Err(Errno::INTR));
            self.send(client, Span::ZERO, Event::Response { call, response });
        }
        removed
    }

    /// The remembered reply to a retransmitted mutation. `None`: it was not done, or the file that it opened is
    /// deleted.
    pub(super) fn remembered_reply(&mut self, client: u64, request: &Request) -> Option<Vec<Response>> {
        let mut responses = self.remembered.get(&request.mutation_id?)?.clone();
        for response in &mut responses {
            response.grants.clear();
            let Ok(reply) = &mut response.result else { continue };
            let (node, handle) = match (&*reply, &request.call) {
                (Reply::Created { entry, handle: Some(handle), .. }, _) => (entry.id, *handle),
                (Reply::Opened { handle, .. }, Call::Open { node, .. }) => (node.node, *handle),
                (Reply::Removed { node, pinned: Some(handle) }, _) => (*node, *handle),
                (Reply::Renamed { replaced: Some(node), pinned: Some(handle), .. }, _) => (*node, *handle),
                _ => continue,
            };
            if self.restore_handle(client, node, handle) {
                continue;
            }
            match reply {
                Reply::Removed { pinned: kept, .. } | Reply::Renamed { pinned: kept, .. } => *kept = None,
                _ => return None,
            }
        }
        Some(responses)
    }

    fn restore_handle(&mut self, client: u64, node: NodeId, handle: nigh_types::Handle) -> bool {
        let pinned = self.tree.pin_again(node, handle);
        if pinned {
            self.client_mut(client).handles.insert(handle);
        }
        pinned
    }
}
