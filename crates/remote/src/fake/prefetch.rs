//! Prefetch: one directory after the other, each read after the one before was sent.

use super::core::Core;
use super::{CallPlan, Event, ModelFs, Span};
use nigh_types::{
    Call, CallId, Cookie, CookieKey, Entry, Errno, Name, NodeId, NodeRef, PrefetchOrder, PrefetchedDir,
    Reply, Request, Response,
};
use std::collections::BTreeSet;

/// A running prefetch.
#[derive(Default)]
pub(super) struct PrefetchJob {
    /// Directories still to send, the next one last.
    stack: Vec<NodeRef>,
    sent: BTreeSet<NodeId>,
    /// Directories in `stack` that cost no credit.
    wanted: BTreeSet<NodeId>,
    order: PrefetchOrder,
    credit: i64,
    /// Whether it waits for credit.
    pub(super) waits: bool,
}

impl PrefetchJob {
    fn next(&mut self) -> Option<NodeRef> {
        let next = self.stack.last()?;
        if self.credit <= 0 && !self.wanted.contains(&next.node) {
            self.waits = true;
            return None;
        }
        self.stack.pop()
    }

    fn steer(&mut self, credit: u32, want: Option<&NodeRef>) {
        self.credit += i64::from(credit);
        let is_sent = |want: &NodeRef| {
            self.sent.contains(&want.node) && !self.stack.iter().any(|place| place.node == want.node)
        };
        if let Some(want) = want.filter(|want| !is_sent(want)) {
            self.stack.retain(|place| place.node != want.node);
            self.stack.push(want.clone());
            self.wanted.insert(want.node);
        }
    }

    fn push(&mut self, dir: NodeId, mut children: Vec<(Name, Entry)>, key: CookieKey) {
        fn in_order((name, entry): &(Name, Entry), key: CookieKey) -> (Cookie, &[u8], u64) {
            (key.cookie(name.as_bytes()), name.as_bytes(), entry.id.ino)
        }
        children.sort_by(|a, b| self.order.compare(in_order(a, key), in_order(b, key)));
        let place = |(name, entry): (Name, Entry)| NodeRef { node: entry.id, path_hint: Some((dir, name)) };
        // A directory that moves while the job runs is found below two others.
        let pending: BTreeSet<NodeId> = self.stack.iter().map(|place| place.node).collect();
        let places = children.into_iter().rev().map(place).filter(|place| !pending.contains(&place.node));
        // Requested directories come before all others.
        let is_wanted = |place: &&NodeRef| self.wanted.contains(&place.node);
        let first = self.stack.iter().rev().take_while(is_wanted).count();
        let mut first = self.stack.split_off(self.stack.len() - first);
        self.stack.extend(places);
        self.stack.append(&mut first);
    }
}

impl Core {
    /// Starts or continues a prefetch.
    pub(super) fn prefetch(&mut self, client: u64, call: CallId, request: Request, fate: CallPlan) {
        let Call::Prefetch { roots, order, credit } = &request.call else { return };
        let key = self.tree.config().cookie_key;
        let mut walk = self.client_mut(client).prefetches.remove(&call).unwrap_or_else(|| {
            let stack = roots.iter().rev().cloned().collect();
            PrefetchJob { stack, order: *order, credit: i64::from(*credit), ..PrefetchJob::default() }
        });
        walk.waits = false;
        let Some(place) = walk.next() else {
            if walk.waits {
                self.client_mut(client).prefetches.insert(call, walk);
            } else {
                let response = Response::plain(Ok(Reply::Prefetched(Vec::new())));
                self.send(client, Span::ZERO, Event::Response { call, response });
            }
            return;
        };
        let wanted = walk.wanted.remove(&place.node);
        walk.sent.insert(place.node);
        let (steps, found) = read_dir(&mut self.tree, &place);
        walk.credit -= if wanted { 0 } else { found.len() as i64 + 1 };
        let dirs = found.into_iter().filter(|(_, entry)| entry.attr.is_dir()).collect();
        walk.push(place.node, dirs, key);
        let mut delay = Span::ZERO;
        for mut response in steps {
            self.register(client, &mut response, fate);
            self.send(client, delay, Event::Response { call, response });
            delay = Span(delay.0.saturating_add(fate.chunk_pause.0));
        }
        self.client_mut(client).prefetches.insert(call, walk);
        let key = self.later(delay);
        self.client_mut(client).arriving.insert(key, (call, request, fate));
    }

    pub(super) fn steer(&mut self, client: u64, what: &Call) {
        let Call::PrefetchCredit { walk: call, credit, want } = what else { return };
        let session = self.client_mut(client);
        let Some(walk) = session.prefetches.get_mut(call) else { return };
        walk.steer(*credit, want.as_ref());
        if walk.waits
            && let Some(request) = session.outstanding.get(call).cloned()
        {
            let fate = session.plan_for(*call, &request);
            self.prefetch(client, *call, request, fate);
        }
    }
}

/// The chunks of one directory as of now, and its entries.
fn read_dir(tree: &mut ModelFs, place: &NodeRef) -> (Vec<Response>, Vec<(Name, Entry)>) {
    let mut found = Vec::new();
    let listed = tree.list(place).into_iter().map(|part| {
        let (listed, last) = match part.result {
            Ok(Reply::Listed(listed)) => (Some(listed), part.last),
            _ => (None, true),
        };
        found.extend(listed.iter().flat_map(|listed| listed.entries.iter().cloned()));
        let result = Ok(Reply::Prefetched(vec![PrefetchedDir { dir: place.node, listed, last }]));
        Response { result, after: Vec::new(), grants: part.grants, last: false }
    });
    (listed.collect(), found)
}

/// The reply to a prefetch of a lost session.
pub(super) fn reply_after_loss(request: &Request) -> Option<Response> {
    matches!(request.call, Call::Prefetch { .. }).then(|| Response::plain(Err(Errno::CANCELED)))
}
