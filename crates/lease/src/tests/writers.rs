//! Writers, readers and write-backs of one file, over random histories. No holder writes while another one caches the
//! data. Every read gets a grant on its data, and so does a write unless its holder owes an acknowledgement. All calls
//! finish.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

const HOLDERS: u64 = 3;

#[derive(Clone, Debug)]
enum Step {
    Write(u64),
    Flush(u64),
    Read(u64),
    Acknowledge(usize),
    /// The nth call in progress gets its reply if it is ready; otherwise it is given up if `true`.
    End(usize, bool),
    Return(u64),
    Sync(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let who = || 1..=HOLDERS;
    let step = prop_oneof![
        6 => who().prop_map(Step::Write),
        2 => who().prop_map(Step::Flush),
        6 => who().prop_map(Step::Read),
        8 => (0..4_usize).prop_map(Step::Acknowledge),
        10 => (0..4_usize, prop::bool::weighted(0.1)).prop_map(|(nth, given_up)| Step::End(nth, given_up)),
        1 => who().prop_map(Step::Return),
        1 => who().prop_map(Step::Sync),
    ];
    prop::collection::vec(step, 1..120)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Write,
    Flush,
    Read,
    Sync,
}

struct World {
    bench: Bench,
    key: LeaseKey,
    /// The holders that cache the data, with their grants.
    held: BTreeMap<Holder, GrantId>,
    asked: BTreeSet<(Holder, RecallId)>,
    calls: BTreeMap<ChangeId, (Holder, What)>,
    told: BTreeSet<ChangeId>,
    /// How many calls of each kind got a reply, and how many readers had waited.
    answered: [u64; 4],
}

impl World {
    fn new() -> World {
        let key = LeaseKey { object: object(1), covers: LeaseScope::Data };
        let bench = Bench::with(&[A, B, C]);
        let (held, asked, calls) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        World { bench, key, held, asked, calls, told: BTreeSet::new(), answered: [0; 4] }
    }

    fn step(&mut self, step: &Step) {
        let change = [Change { key: self.key, names: Vec::new(), writes: true, can_update: false }];
        let table = &mut self.bench.table;
        match *step {
            Step::Write(by) => {
                let id = table.handle_change(T0, Some(Holder(by)), &change);
                self.calls.insert(id, (Holder(by), What::Write));
            }
            Step::Flush(by) => {
                let id = table.handle_write_back(T0, Holder(by), &change);
                self.calls.insert(id, (Holder(by), What::Flush));
            }
            Step::Sync(by) => {
                let id = table.handle_sync_barrier(T0, Holder(by), self.key);
                self.calls.insert(id, (Holder(by), What::Sync));
            }
            Step::Read(by) => {
                let (holder, request) = (Holder(by), reading(Holder(by), self.key));
                let writing = self.calls.iter().any(|(id, (other, what))| {
                    *what == What::Write && *other != holder && self.told.contains(id)
                });
                if let Some(granted) = table.handle_grant(T0, request) {
                    assert!(!writing, "it is read while it is written");
                    self.held.insert(holder, granted.id);
                } else {
                    let id = table.handle_wait(T0, request);
                    self.calls.insert(id.expect("it reads ungranted"), (holder, What::Read));
                }
            }
            Step::Acknowledge(nth) => {
                if let Some(&(holder, recall)) = self.asked.iter().nth(nth % self.asked.len().max(1)) {
                    self.acknowledge(holder, recall);
                }
            }
            Step::End(nth, given_up) => {
                if let Some(id) = self.calls.keys().nth(nth % self.calls.len().max(1)).copied() {
                    self.end(id, given_up);
                }
            }
            Step::Return(by) => {
                if let Some(grant) = self.held.remove(&Holder(by)) {
                    table.handle_return(T0, Holder(by), &[grant]);
                }
            }
        }
        self.take_outputs();
    }

    /// A recalled client acknowledges when its mmap stores are written back.
    fn acknowledge(&mut self, holder: Holder, recall: RecallId) {
        let flush = self.calls.iter().find(|(_, (by, what))| (*by, *what) == (holder, What::Flush));
        if let Some((id, _)) = flush {
            let id = *id;
            assert!(self.bench.table.is_ready(id), "a flush of the recalled holder waits");
            self.end(id, false);
            return;
        }
        self.asked.remove(&(holder, recall));
        self.held.remove(&holder);
        self.bench.acknowledge(holder, recall);
    }

    fn end(&mut self, id: ChangeId, given_up: bool) {
        let ready = self.bench.table.is_ready(id);
        if !ready && !given_up {
            return;
        }
        let (holder, what) = self.calls.remove(&id).expect("under way");
        self.told.remove(&id);
        self.answered[match what {
            What::Write => 0,
            What::Flush => 1,
            What::Read => 2,
            What::Sync => 3,
        }] += u64::from(ready);
        if what == What::Write && ready {
            let granted = self.bench.table.handle_written(T0, id, reading(holder, self.key));
            if let Some(granted) = granted {
                self.held.insert(holder, granted.id);
            } else {
                let owes = self.asked.iter().any(|(asked, _)| *asked == holder);
                assert!(owes || self.flushes_beside(holder), "the writer has no grant");
            }
            return;
        }
        // A reader has its grant from the time of its reply.
        self.bench.table.handle_done(T0, id);
    }

    fn flushes_beside(&self, holder: Holder) -> bool {
        self.calls.values().any(|(by, what)| *by != holder && *what == What::Flush)
    }

    fn take_outputs(&mut self) {
        for output in self.bench.outputs() {
            match output {
                LeaseOutput::Recall { holder, recall } => {
                    assert!(self.asked.insert((holder, recall.id)));
                }
                LeaseOutput::Ready(id) => self.ready(id),
                other => panic!("{other:?}"),
            }
        }
    }

    fn ready(&mut self, id: ChangeId) {
        // It may have ended meanwhile.
        let Some(&(holder, what)) = self.calls.get(&id) else { return };
        self.told.insert(id);
        match what {
            What::Read => {
                let granted = self.bench.table.take_granted(id).expect("it has waited for nothing");
                self.held.insert(holder, granted.id);
            }
            What::Write => {
                let believes = self.held.keys().find(|other| **other != holder);
                assert_eq!(believes, None, "{holder:?} writes");
                let mut told = self.told.iter().filter_map(|id| self.calls.get(id));
                let beside = told.find(|(by, what)| *by != holder && *what == What::Write);
                assert_eq!(beside, None, "{holder:?} writes too");
            }
            What::Flush | What::Sync => {}
        }
    }

    /// All clients acknowledge, and all calls finish.
    fn finish(mut self) -> [u64; 4] {
        for _ in 0..2_000 {
            if let Some(&(holder, recall)) = self.asked.iter().next() {
                self.acknowledge(holder, recall);
            } else if let Some(id) = self.calls.keys().find(|id| self.bench.table.is_ready(**id)).copied() {
                self.end(id, false);
            }
            self.take_outputs();
        }
        assert!(self.calls.is_empty() && self.asked.is_empty(), "{:?} hang", self.calls);
        assert!(self.bench.table.state.changes.is_empty() && self.bench.table.state.keys.is_empty());
        self.answered
    }
}

#[test]
fn concurrent_writers_and_readers_of_one_file_all_finish() {
    let seen = std::cell::RefCell::new([0; 4]);
    let config =
        ProptestConfig { cases: histories(700), failure_persistence: None, ..ProptestConfig::default() };
    let run = |steps: Vec<Step>| {
        let mut world = World::new();
        steps.iter().for_each(|step| world.step(step));
        let answered = world.finish();
        seen.borrow_mut().iter_mut().zip(answered).for_each(|(all, more)| *all += more);
        Ok(())
    };
    if let Err(failure) = proptest::test_runner::TestRunner::new(config).run(&steps(), run) {
        panic!("{failure}");
    }
    let seen = seen.into_inner();
    assert!(seen.iter().all(|times| *times > 200), "they went everywhere: {seen:?}");
}
