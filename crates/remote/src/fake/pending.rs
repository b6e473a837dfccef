//! Mutations that wait until other clients have returned or suspended the affected facts.

use super::core::Core;
use super::{CallPlan, Event};
use crate::model_fs::Change;
use nigh_types::{
    CallId, GrantId, LeaseScope, Name, NodeId, Recall, RecallId, Request, Span, UpdateCommit, UpdatePrepare,
    UpdateScope, UpdatedFact,
};
use std::collections::BTreeSet;

/// A waiting mutation.
pub(super) struct Pending {
    pub(super) client: u64,
    pub(super) call: CallId,
    request: Request,
    fate: CallPlan,
    pub(super) changes: Vec<Change>,
    owed: BTreeSet<RecallId>,
    /// Prepared updates of other clients, committed when the mutation is over.
    held: Vec<(u64, UpdatePrepare)>,
}

impl Core {
    /// Executes a call once no other client holds the affected facts. It never waits for the client's own
    /// acknowledgements (invariant 6).
    pub(super) fn submit(&mut self, client: u64, call: CallId, request: Request, fate: CallPlan) {
        let (changes, owed, held) = (Vec::new(), BTreeSet::new(), Vec::new());
        self.proceed(Pending { client, call, request, fate, changes, owed, held });
    }

    fn proceed(&mut self, mut pending: Pending) {
        let recalls = self.tree.config().recallable;
        pending.changes = if recalls { self.tree.affected(&pending.request.call) } else { Vec::new() };
        let others: Vec<u64> = self.client_ids().filter(|other| *other != pending.client).collect();
        for other in others {
            self.recall_or_prepare(other, &mut pending);
        }
        if pending.owed.is_empty() {
            let Pending { client, call, request, fate, held, .. } = pending;
            self.execute(client, call, &request, fate);
            self.commit(held);
        } else {
            self.pending.push(pending);
        }
    }

    /// Recalls the affected facts from another client, or prepares an update if the client takes updates.
    fn recall_or_prepare(&mut self, other: u64, pending: &mut Pending) {
        let mut facts = Vec::new();
        for Change { node, covers, names } in &pending.changes {
            let (node, covers) = (*node, *covers);
            if !self.holds(other, node, covers) {
                continue;
            }
            let whole = covers == LeaseScope::Data || covers == LeaseScope::Directory && names.is_empty();
            if whole || !self.client(other).takes_updates {
                pending.owed.insert(self.recall(other, node, covers, names.clone()));
                continue;
            }
            let is_held = |name: Option<&Name>| {
                pending.held.iter().any(|(by, hold)| *by == other && has(hold, node, name))
            };
            match covers {
                LeaseScope::Directory => {
                    let names: Vec<Name> =
                        names.iter().filter(|name| !is_held(Some(name))).cloned().collect();
                    facts.extend((!names.is_empty()).then_some(UpdateScope { node, covers, names }));
                }
                _ => {
                    facts.extend((!is_held(None)).then_some(UpdateScope { node, covers, names: Vec::new() }))
                }
            }
        }
        if !facts.is_empty() {
            let hold = UpdatePrepare { id: self.next_recall(), facts };
            pending.owed.insert(hold.id);
            self.prepare(other, &hold);
            pending.held.push((other, hold));
        }
    }

    fn prepare(&mut self, client: u64, hold: &UpdatePrepare) {
        let session = self.client_mut(client);
        session.prepared.insert(hold.id);
        for held in &hold.facts {
            if let Some(granted) = session.grants.get_mut(&(held.node, held.covers)) {
                // Another client changes the fact: the grant is no longer unbroken.
                granted.first = GrantId(granted.id.0 + 1);
            }
        }
        self.send(client, Span::ZERO, Event::UpdatePrepare(hold.clone()));
    }

    /// Sends the new values of the suspended facts.
    fn commit(&mut self, held: Vec<(u64, UpdatePrepare)>) {
        for (client, hold) in held {
            let facts = hold.facts.iter().flat_map(|held| self.facts_of(held)).collect();
            self.send(client, Span::ZERO, Event::UpdateCommit(UpdateCommit { id: hold.id, facts }));
        }
    }

    fn facts_of(&self, held: &UpdateScope) -> Vec<UpdatedFact> {
        let node = held.node;
        let name = |name: &Name| {
            self.tree.entry(node, name).map(|entry| UpdatedFact::Name {
                dir: node,
                name: name.clone(),
                entry,
            })
        };
        match held.covers {
            LeaseScope::Directory => held.names.iter().filter_map(name).collect(),
            _ => self.tree.attr(node).map(|attr| UpdatedFact::Attr { node, attr }).into_iter().collect(),
        }
    }

    pub(super) fn recall(
        &mut self,
        client: u64,
        node: NodeId,
        covers: LeaseScope,
        names: Vec<Name>,
    ) -> RecallId {
        let recall = Recall { id: self.next_recall(), node, covers, names };
        let id = recall.id;
        self.client_mut(client).recalls.insert(id, recall.clone());
        self.send(client, Span::ZERO, Event::Recall(recall));
        id
    }

    /// Continues mutations that waited only for these acknowledgements.
    pub(super) fn settle(&mut self, recalls: &[RecallId]) {
        for pending in &mut self.pending {
            pending.owed.retain(|owed| !recalls.contains(owed));
        }
        while let Some(ready) = self.pending.iter().position(|pending| pending.owed.is_empty()) {
            let pending = self.pending.remove(ready);
            self.proceed(pending);
        }
    }

    /// Drops mutations and commits their suspended facts unchanged.
    pub(super) fn drop_pending(&mut self, which: impl Fn(&Pending) -> bool) {
        let dropped: Vec<Pending> = self.pending.extract_if(.., |pending| which(pending)).collect();
        dropped.into_iter().for_each(|pending| self.commit(pending.held));
    }
}

fn has(hold: &UpdatePrepare, node: NodeId, name: Option<&Name>) -> bool {
    hold.facts.iter().filter(|held| held.node == node).any(|held| match name {
        Some(name) => held.names.contains(name),
        None => held.covers == LeaseScope::Attributes,
    })
}
