//! Pending mutations of this client, by operation name. See docs/decisions/0003-mutation-ids.md and
//! 0004-facts-and-overlay.md.

use nigh_types::MutationId;
use std::collections::BTreeMap;

/// Mutations without a reply. An application waits for each: an acknowledged mutation is in the facts.
#[derive(Clone, Debug)]
pub(crate) struct PendingMutations {
    client: u64,
    incarnation: u64,
    next: u64,
    pending: BTreeMap<u64, Pending>,
    /// Of these, the number that take names from inodes.
    unbinding: u64,
}

#[derive(Clone, Debug)]
struct Pending {
    /// Inodes that will lose the name under whose grant their attributes stand: their facts are suspended meanwhile.
    losing_name: Vec<u64>,
}

impl Pending {
    fn unbinds(&self) -> bool {
        !self.losing_name.is_empty()
    }
}

impl PendingMutations {
    pub fn new(client: u64, incarnation: u64) -> PendingMutations {
        PendingMutations { client, incarnation, next: 1, pending: BTreeMap::new(), unbinding: 0 }
    }

    /// Names the next mutation, which takes names from these inodes.
    pub fn begin(&mut self, leaving: Vec<u64>) -> MutationId {
        let sequence = self.next;
        self.next += 1;
        let pending = Pending { losing_name: leaving };
        self.unbinding += u64::from(pending.unbinds());
        self.pending.insert(sequence, pending);
        self.name(sequence)
    }

    pub fn name(&self, sequence: u64) -> MutationId {
        MutationId { client: self.client, incarnation: self.incarnation, sequence }
    }

    /// Ends a mutation: the remote has replied, or never will.
    pub fn finish(&mut self, sequence: u64) {
        let known = self.pending.remove(&sequence).expect("a mutation ends once");
        self.unbinding -= u64::from(known.unbinds());
    }

    /// Returns whether a pending mutation takes a name from this inode.
    pub fn is_losing_name(&self, ino: u64) -> bool {
        self.unbinding > 0 && self.pending.values().any(|pending| pending.losing_name.contains(&ino))
    }

    pub fn operations(&self) -> u64 {
        self.pending.len() as u64
    }
}
