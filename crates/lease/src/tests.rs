//! Tests of single rules, and a test of all rules against a model that knows what every client caches.

mod changes;
mod deadlock;
mod exclusive_dir_leases;
mod exclusivity;
mod holders;
mod keys;
mod limits;
mod listing_rights;
mod merging;
mod model;
mod modes;
mod sequencer;
mod updates;
mod write_queue;
mod writers;

use super::*;
use nigh_types::{GrantId, LeaseScope, Mode, Name, NodeId, Recall, RecallId, Span, Time};
use std::collections::BTreeMap;

/// Returns how many random histories a test tries, with `short` of them in the short form of the tests.
pub(super) fn histories(short: u32) -> u32 {
    std::env::var("NIGH_LEASE_HISTORIES").map_or(short, |count| count.parse().expect("a number"))
}

pub(super) const T0: Time = Time(1_000_000_000_000);

pub(super) fn at_ms(ms: u64) -> Time {
    T0.after(Span::from_millis(ms))
}

pub(super) fn object(ino: u64) -> Object {
    Object { filesystem: 8, ino, birth: 100 + ino }
}

pub(super) fn names(ino: u64) -> LeaseKey {
    LeaseKey { object: object(ino), covers: LeaseScope::Directory }
}

pub(super) fn inode(ino: u64) -> LeaseKey {
    LeaseKey { object: object(ino), covers: LeaseScope::Attributes }
}

/// A request for a read grant.
pub(super) fn reading(holder: Holder, key: LeaseKey) -> GrantRequest {
    GrantRequest { holder, key, node: node(holder, key), mode: Mode::Read }
}

/// Each holder's export has its own node ids.
pub(super) fn node(holder: Holder, key: LeaseKey) -> NodeId {
    NodeId { ino: holder.0 * 1000 + key.object.ino, generation: key.object.birth }
}

pub(super) fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

pub(super) fn change(key: LeaseKey) -> Change {
    Change { key, names: Vec::new(), writes: false, can_update: false }
}

pub(super) const A: Holder = Holder(1);
pub(super) const B: Holder = Holder(2);
pub(super) const C: Holder = Holder(3);

/// A table with its outputs, and a clock that a test moves.
pub(super) struct Bench {
    pub(super) table: LeaseTable,
    pub(super) now: Time,
}

impl Bench {
    /// With holders that can drop all dentries at once.
    pub(super) fn with(holders: &[Holder]) -> Bench {
        Bench::of(LeaseConfig::default(), holders)
    }

    pub(super) fn of(config: LeaseConfig, holders: &[Holder]) -> Bench {
        let mut bench = Bench { table: LeaseTable::new(config), now: T0 };
        for holder in holders {
            bench.table.handle_attach(T0, *holder, false);
        }
        bench
    }

    pub(super) fn grant(&mut self, holder: Holder, key: LeaseKey) -> Option<Granted> {
        self.table.handle_grant(self.now, reading(holder, key))
    }

    /// A grant that must not be refused.
    pub(super) fn granted(&mut self, holder: Holder, key: LeaseKey) -> Granted {
        self.grant(holder, key).expect("nothing speaks against it")
    }

    pub(super) fn refused(&mut self, holder: Holder, key: LeaseKey) -> Refusal {
        let before = self.table.report().counters.refused;
        assert_eq!(self.grant(holder, key), None);
        let after = self.table.report().counters.refused;
        *after.iter().find(|(why, times)| before.get(why) != Some(times)).expect("it was counted").0
    }

    pub(super) fn change(&mut self, by: Holder, key: LeaseKey) -> ChangeId {
        self.table.handle_change(self.now, Some(by), &[change(key)])
    }

    /// A change from its beginning to its end; recalled holders acknowledge at once.
    pub(super) fn whole_change(&mut self, by: Option<Holder>, key: LeaseKey) {
        let id = self.table.handle_change(self.now, by, &[change(key)]);
        for (holder, recall) in self.recalls() {
            self.table.handle_acknowledge(self.now, holder, recall.id);
        }
        assert!(self.table.is_ready(id));
        self.table.handle_done(self.now, id);
        self.outputs();
    }

    /// Whether no other holder may have changed the initiator's data since that grant.
    pub(super) fn held_exclusively_since(&mut self, id: ChangeId, under: (GrantId, LeaseScope)) -> bool {
        let base = self.table.merge_base(self.now, id, under, (0, u64::MAX));
        base.is_some_and(|base| base.is_unchanged())
    }

    pub(super) fn acknowledge(&mut self, holder: Holder, recall: RecallId) {
        self.table.handle_acknowledge(self.now, holder, recall);
    }

    /// Outputs since the last call.
    pub(super) fn outputs(&mut self) -> Vec<LeaseOutput> {
        std::iter::from_fn(|| match self.table.poll_output() {
            LeaseOutput::Timeout(..) => None,
            output => Some(output),
        })
        .collect()
    }

    /// Recalls since the last call; the only other outputs may be ready changes.
    pub(super) fn recalls(&mut self) -> Vec<(Holder, Recall)> {
        let mut recalls = Vec::new();
        for output in self.outputs() {
            match output {
                LeaseOutput::Recall { holder, recall } => recalls.push((holder, recall)),
                LeaseOutput::Ready(_) => {}
                other => panic!("not a recall: {other:?}"),
            }
        }
        recalls
    }

    pub(super) fn recall(&mut self) -> (Holder, Recall) {
        let mut recalls = self.recalls();
        assert_eq!(recalls.len(), 1, "one recall: {recalls:?}");
        recalls.remove(0)
    }

    pub(super) fn heard(&mut self, holder: Holder) -> bool {
        self.table.handle_renewal(self.now, holder)
    }

    pub(super) fn timeout(&mut self) -> (Time, LeaseReason) {
        match self.table.poll_output() {
            LeaseOutput::Timeout(moment, reason) => (moment, reason),
            other => panic!("not drained: {other:?}"),
        }
    }

    /// Moves the clock, handling each timeout; returns the outputs on the way.
    pub(super) fn go_to(&mut self, moment: Time) -> Vec<LeaseOutput> {
        let mut outputs = self.outputs();
        loop {
            let (due, _) = self.timeout();
            assert!(due > self.now, "no timeout lies in the past");
            if due > moment {
                break;
            }
            self.now = due;
            self.table.handle_timeout(due);
            outputs.extend(self.outputs());
        }
        self.now = moment;
        outputs
    }

    /// Waits until no key is contended or shared any more, and renews the holders' leases meanwhile.
    pub(super) fn stay_quiet(&mut self, holders: &[Holder]) {
        for _ in 0..6 {
            let next = self.now.after(Span::from_secs(2));
            self.go_to(next);
            for holder in holders {
                assert!(self.heard(*holder));
            }
        }
    }

    /// Asserts that the table is empty after it was in use.
    pub(super) fn assert_empty(&self) {
        assert!(self.table.state.entries.is_empty(), "entries");
        assert!(self.table.state.accounts.is_empty(), "accounts");
        assert!(self.table.state.recalls.is_empty(), "recalls");
        assert!(self.table.state.pending_updates.is_empty(), "holds");
        assert!(self.table.state.facts.is_empty(), "facts");
        assert!(self.table.state.changes.is_empty(), "changes");
        assert!(self.table.state.bypassed.is_empty(), "left");
        assert!(self.table.state.keys.is_empty(), "keys");
        assert!(self.table.state.timers.is_empty(), "timers");
        assert!(self.table.state.outputs.is_empty(), "outputs");
    }
}
