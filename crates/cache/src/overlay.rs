//! Mutations of this client that the server has not answered, by operation name.
//! See docs/decisions/0003-operation-names.md and 0004-facts-and-overlay.md.

use nigh_types::{CallId, OpName};
use std::collections::BTreeMap;

/// What is pending. An application waits for each of these: what it acknowledged is in the facts.
#[derive(Debug)]
pub(crate) struct Overlay {
    client: u64,
    incarnation: u64,
    next: u64,
    pending: BTreeMap<u64, CallId>,
}

impl Overlay {
    pub fn new(client: u64, incarnation: u64) -> Overlay {
        Overlay { client, incarnation, next: 1, pending: BTreeMap::new() }
    }

    /// Names the next mutation.
    pub fn begin(&mut self, call: CallId) -> OpName {
        let sequence = self.next;
        self.next += 1;
        self.pending.insert(sequence, call);
        self.name(sequence)
    }

    pub fn name(&self, sequence: u64) -> OpName {
        OpName { client: self.client, incarnation: self.incarnation, sequence }
    }

    /// The remote has answered it, or never will.
    pub fn finish(&mut self, sequence: u64) {
        let known = self.pending.remove(&sequence).is_some();
        assert!(known, "a mutation ends once");
    }

    pub fn operations(&self) -> u64 {
        self.pending.len() as u64
    }
}
