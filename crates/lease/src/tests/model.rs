//! All rules together, over random histories, against a model of what every client believes it holds. The model sees
//! only the table's outputs, and is as simple as possible.

use super::*;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::RefCell;
use std::collections::BTreeSet;

const HOLDERS: u64 = 4;
/// The holder whose grants are limited.
const LIMITED: Holder = Holder(4);
const LIMIT: Span = Span::from_secs(3);

const CONFIG: LeaseConfig = LeaseConfig {
    term: Span::from_secs(10),
    patience: Span::from_secs(2),
    max_penalty: Span::from_secs(600),
    contention_window: Span::from_secs(1),
    contention_recalls: 2,
    young: Span::from_millis(200),
    cooldown: Span::from_secs(4),
    grants_per_holder: 2,
    merge_bytes: 64 << 20,
};

fn keys() -> [LeaseKey; 6] {
    [names(1), names(2), inode(1), inode(2), LeaseKey { covers: LeaseScope::Data, ..names(1) }, names(3)]
}

fn wants_names_alone(holder: Holder) -> bool {
    holder.0 <= 2
}

#[derive(Clone, Debug)]
enum Step {
    Attach(u64),
    Heard(u64),
    Grant(u64, usize),
    GrantToWrite(u64, usize),
    Return(u64, usize),
    Withdraw(u64, usize),
    Acknowledge(u64, usize),
    /// By the server's own disk if the holder is 0; keys as a set of bits.
    Change(u64, u8),
    Extend(usize, u8),
    Done(usize),
    /// One holder is granted a key and another changes it, with all acknowledgements; twice.
    Quarrel(u64, u64, usize),
    Gone(u64),
    Cut(u64),
    WaitMs(u64),
    /// Time passes without timeouts being handled.
    OversleepMs(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let who = || 1..=HOLDERS;
    let any_key = || 0..keys().len();
    let bits = || prop_oneof![4 => any_key().prop_map(|key| 1_u8 << key), 1 => 1..(1_u8 << keys().len())];
    let some_ms = || prop::sample::select(vec![0_u64, 20, 100, 300, 700, 1_000, 2_000, 5_000]);
    let step = prop_oneof![
        5 => who().prop_map(Step::Attach),
        12 => who().prop_map(Step::Heard),
        24 => (who(), any_key()).prop_map(|(holder, key)| Step::Grant(holder, key)),
        4 => (who(), any_key()).prop_map(|(holder, key)| Step::GrantToWrite(holder, key)),
        3 => (who(), any_key()).prop_map(|(holder, key)| Step::Return(holder, key)),
        2 => (who(), any_key()).prop_map(|(holder, key)| Step::Withdraw(holder, key)),
        9 => (who(), 0..4_usize).prop_map(|(holder, nth)| Step::Acknowledge(holder, nth)),
        6 => (0..=HOLDERS, bits()).prop_map(|(holder, keys)| Step::Change(holder, keys)),
        2 => (0..4_usize, bits()).prop_map(|(nth, keys)| Step::Extend(nth, keys)),
        7 => (0..4_usize).prop_map(Step::Done),
        2 => (who(), who(), any_key()).prop_map(|(one, other, key)| Step::Quarrel(one, other, key)),
        1 => who().prop_map(Step::Gone),
        2 => who().prop_map(Step::Cut),
        8 => some_ms().prop_map(Step::WaitMs),
        1 => some_ms().prop_map(Step::OversleepMs),
    ];
    prop::collection::vec(step, 1..160)
}

/// A grant as its client knows it.
#[derive(Clone, Copy, Debug)]
struct Held {
    id: GrantId,
    mode: Mode,
    shared: bool,
    /// The client may have an earlier grant on the key.
    again: bool,
    since: Time,
}

/// An unacknowledged recall of a client.
#[derive(Clone, Copy, Debug)]
struct Asked {
    since: Time,
    recall: Option<RecallId>,
    /// Sent on this connection.
    delivered: bool,
}

struct Client {
    held: BTreeMap<LeaseKey, Held>,
    asked: BTreeMap<LeaseKey, Asked>,
    heard: Time,
    cut: bool,
    suspect: bool,
}

impl Client {
    fn new(now: Time) -> Client {
        let (held, asked) = (BTreeMap::new(), BTreeMap::new());
        Client { held, asked, heard: now, cut: false, suspect: false }
    }
}

struct Under {
    by: Option<Holder>,
    keys: BTreeSet<LeaseKey>,
    waits_for: BTreeSet<(Holder, LeaseKey)>,
    /// It must be ready by this time.
    bound: Time,
    told: bool,
}

struct World {
    bench: Bench,
    clients: BTreeMap<Holder, Client>,
    changes: BTreeMap<ChangeId, Under>,
    /// When a change of the key was last in progress.
    changed: BTreeMap<LeaseKey, Time>,
    /// Timeouts were not handled in time.
    late: bool,
    /// A grant is being registered: only then may a recall occur without a change.
    granting: bool,
    trusted: u64,
}

impl World {
    fn new() -> World {
        World {
            bench: Bench::of(CONFIG, &[]),
            clients: BTreeMap::new(),
            changes: BTreeMap::new(),
            changed: BTreeMap::new(),
            late: false,
            granting: false,
            trusted: 0,
        }
    }

    fn now(&self) -> Time {
        self.bench.now
    }

    fn step(&mut self, step: &Step) {
        if let Step::OversleepMs(ms) = *step {
            self.bench.now = self.now().after(Span::from_millis(ms));
            self.late = true;
            return;
        }
        if std::mem::take(&mut self.late) {
            // An input instead of a timeout: each input handles what is due.
            self.hear(Holder(1));
        }
        let now = self.now();
        match *step {
            Step::Attach(holder) => self.attach(Holder(holder)),
            Step::Heard(holder) => self.hear(Holder(holder)),
            Step::Grant(holder, key) => self.grant(Holder(holder), keys()[key], Mode::Read),
            Step::GrantToWrite(holder, key) => self.grant(Holder(holder), keys()[key], Mode::Write),
            Step::Return(holder, key) => self.give_back(Holder(holder), keys()[key]),
            Step::Withdraw(holder, key) => self.withdraw(Holder(holder), keys()[key]),
            Step::Acknowledge(holder, nth) => self.acknowledge(Holder(holder), nth),
            Step::Change(by, bits) => {
                let by = (by > 0).then_some(Holder(by));
                let id = self.bench.table.handle_change(now, by, &changes(bits));
                let (keys, waits_for) = (BTreeSet::new(), BTreeSet::new());
                self.changes.insert(id, Under { by, keys, waits_for, bound: now, told: false });
                self.take_to(id, bits);
            }
            Step::Extend(nth, bits) => {
                if let Some(id) = self.nth_change(nth) {
                    self.bench.table.handle_extend(now, id, &changes(bits));
                    self.take_to(id, bits);
                }
            }
            Step::Done(nth) => {
                if let Some(id) = self.nth_change(nth) {
                    self.bench.table.handle_done(now, id);
                    let keys = self.changes.remove(&id).expect("it is one of them").keys;
                    self.changed.extend(keys.into_iter().map(|key| (key, now)));
                }
            }
            Step::Quarrel(one, other, key) => {
                for _ in 0..2 {
                    self.step(&Step::Grant(one, key));
                    self.step(&Step::Change(other, 1 << key));
                    (0..4).for_each(|nth| self.step(&Step::Acknowledge(one, nth)));
                    self.step(&Step::Done(self.changes.len() - 1));
                }
            }
            Step::Gone(holder) => {
                self.bench.table.handle_goodbye(now, Holder(holder));
                self.forget(Holder(holder));
            }
            Step::Cut(holder) => {
                self.bench.table.handle_disconnect(now, Holder(holder));
                if let Some(client) = self.clients.get_mut(&Holder(holder)) {
                    client.cut = true;
                }
            }
            Step::WaitMs(ms) => self.wait(now.after(Span::from_millis(ms))),
            Step::OversleepMs(_) => unreachable!("done above"),
        }
        self.take_outputs();
        self.check();
    }

    fn nth_change(&self, nth: usize) -> Option<ChangeId> {
        self.changes.keys().nth(nth % self.changes.len().max(1)).copied()
    }

    fn attach(&mut self, holder: Holder) {
        let now = self.now();
        self.bench.table.handle_attach(now, holder, wants_names_alone(holder));
        if holder == LIMITED {
            self.bench.table.handle_limit(now, holder, LIMIT);
        }
        let client = self.clients.entry(holder).or_insert_with(|| Client::new(now));
        client.cut = false;
        client.heard = if client.suspect { client.heard } else { now };
        client.asked.values_mut().for_each(|asked| asked.delivered = false);
    }

    fn hear(&mut self, holder: Holder) {
        let now = self.now();
        let answered = self.bench.heard(holder);
        self.expire();
        self.take_outputs();
        let client = self.clients.get_mut(&holder).filter(|client| !client.suspect && !client.cut);
        assert_eq!(answered, client.is_some(), "{holder:?} is answered");
        if let Some(client) = client {
            client.heard = now;
        }
    }

    fn grant(&mut self, holder: Holder, key: LeaseKey, mode: Mode) {
        let now = self.now();
        let exclusive =
            |world: &World| world.bench.table.report().counters.refused.get(&Refusal::Exclusive).copied();
        let before = exclusive(self);
        let granted = self.bench.table.handle_grant(now, GrantRequest { mode, ..reading(holder, key) });
        let asks = exclusive(self) != before;
        let data = key.covers == LeaseScope::Data;
        // Its own kernel keeps data in step with its own writes.
        let changing = self
            .changes
            .values()
            .any(|change| change.keys.contains(&key) && !(data && change.by == Some(holder)))
            || (self.clients.iter())
                .any(|(other, client)| client.asked.contains_key(&key) && !(data && *other != holder));
        let alone = |(other, client): (&Holder, &Client)| {
            let unshared = client.held.get(&key).is_some_and(|held| !held.shared);
            *other != holder && wants_names_alone(*other) && unshared
        };
        let conflicts = |(other, client): (&Holder, &Client)| {
            let conflicts = |held: &Held| mode == Mode::Write || held.mode == Mode::Write;
            *other != holder && client.held.get(&key).is_some_and(conflicts)
        };
        let alone = key.covers == LeaseScope::Directory && self.clients.iter().any(alone)
            || self.clients.iter().any(conflicts);
        assert!(alone || !asks, "{key:?} is not exclusive");
        for (other, client) in self.clients.iter_mut().filter(|_| asks) {
            if *other != holder && client.held.contains_key(&key) {
                let asked = Asked { since: now, recall: None, delivered: false };
                client.asked.entry(key).or_insert(asked);
            }
        }
        let quiet = self.changed.get(&key).is_none_or(|at| at.after(CONFIG.cooldown) <= now);
        let Some(client) = self.clients.get_mut(&holder).filter(|client| !client.cut && !client.suspect)
        else {
            assert_eq!(granted, None, "it has no holder");
            return;
        };
        self.granting = true;
        let Some(granted) = granted else {
            let full = client.held.len() as u64 > CONFIG.grants_per_holder;
            assert!(changing || !quiet || full || alone, "nothing speaks against {key:?} for {holder:?}");
            return;
        };
        assert!(!changing, "{key:?} is granted while it is changed or a recall is out");
        assert!(!alone, "{key:?} is exclusive");
        let earlier = client.held.get(&key).copied();
        assert!(earlier.is_none_or(|earlier| earlier.id < granted.id));
        let shared = granted.shared && earlier.is_none_or(|earlier| earlier.shared);
        assert_eq!(granted.mode, mode);
        let mode =
            earlier.map_or(mode, |earlier| if earlier.mode == Mode::Write { earlier.mode } else { mode });
        let held = Held { id: granted.id, mode, shared, again: earlier.is_some(), since: now };
        client.held.insert(key, held);
        assert!(client.held.len() as u64 <= CONFIG.grants_per_holder + 1, "the quota");
    }

    fn give_back(&mut self, holder: Holder, key: LeaseKey) {
        let client = self.clients.get_mut(&holder).filter(|client| !client.cut);
        if let Some(held) = client.and_then(|client| client.held.remove(&key)) {
            self.bench.table.handle_return(self.bench.now, holder, &[held.id]);
            self.waits_no_more(holder, key);
        }
    }

    fn withdraw(&mut self, holder: Holder, key: LeaseKey) {
        let Some(client) = self.clients.get_mut(&holder) else { return };
        let Some(held) = client.held.get(&key).copied() else { return };
        self.bench.table.handle_withdraw(self.bench.now, holder, &[held.id]);
        if !held.again && !client.asked.contains_key(&key) {
            client.held.remove(&key);
        }
    }

    fn acknowledge(&mut self, holder: Holder, nth: usize) {
        let Some(client) = self.clients.get_mut(&holder) else { return };
        let known = client.asked.iter().filter_map(|(key, asked)| Some((*key, asked.recall?)));
        let known: Vec<_> = known.collect();
        let Some((key, recall)) = known.get(nth % known.len().max(1)).copied() else { return };
        client.asked.remove(&key);
        client.held.remove(&key);
        self.waits_no_more(holder, key);
        self.bench.acknowledge(holder, recall);
    }

    /// Adds keys to a change.
    fn take_to(&mut self, id: ChangeId, bits: u8) {
        let now = self.now();
        let change = self.changes.get_mut(&id).expect("it is under way");
        change.told = false;
        change.bound = now.after(CONFIG.patience).after(CONFIG.lapse());
        for Change { key, .. } in changes(bits) {
            self.changed.insert(key, now);
            if !change.keys.insert(key) {
                continue;
            }
            for (holder, client) in &mut self.clients {
                if Some(*holder) != change.by && client.held.contains_key(&key) {
                    change.waits_for.insert((*holder, key));
                    let asked = Asked { since: now, recall: None, delivered: false };
                    client.asked.entry(key).or_insert(asked);
                }
            }
        }
    }

    fn waits_no_more(&mut self, holder: Holder, key: LeaseKey) {
        for change in self.changes.values_mut() {
            change.waits_for.remove(&(holder, key));
        }
    }

    fn forget(&mut self, holder: Holder) {
        self.clients.remove(&holder);
        for change in self.changes.values_mut() {
            change.waits_for.retain(|(waited, _)| *waited != holder);
        }
    }

    /// Ends grants that have reached their limit.
    fn expire(&mut self) {
        let now = self.now();
        let Some(client) = self.clients.get_mut(&LIMITED) else { return };
        let lives = |held: &Held| held.since.after(types::with_margin(LIMIT)) > now;
        let ended: Vec<LeaseKey> =
            client.held.iter().filter(|(_, held)| !lives(held)).map(|(key, _)| *key).collect();
        for key in ended {
            self.clients.get_mut(&LIMITED).expect("just seen").held.remove(&key);
            self.waits_no_more(LIMITED, key);
        }
    }

    fn wait(&mut self, until: Time) {
        loop {
            self.take_outputs();
            self.check();
            let (due, reason) = self.bench.timeout();
            assert_eq!(due == Time::FAR, reason == LeaseReason::Idle);
            if due > until {
                break;
            }
            assert!(due > self.now(), "no timeout lies in the past");
            self.bench.now = due;
            self.bench.table.handle_timeout(due);
            self.expire();
        }
        self.bench.now = until;
    }

    fn take_outputs(&mut self) {
        let now = self.now();
        for output in self.bench.outputs() {
            match output {
                LeaseOutput::Recall { holder, recall } => self.take_recall(holder, &recall),
                LeaseOutput::Ready(id) => {
                    let change = self.changes.get_mut(&id).expect("what is ready is under way");
                    change.told = true;
                    for (holder, client) in self.clients.iter().filter(|c| Some(*c.0) != change.by) {
                        let believed = change.keys.iter().find(|key| client.held.contains_key(key));
                        assert_eq!(believed, None, "{holder:?} believes what {id:?} makes false");
                    }
                }
                LeaseOutput::Suspect(holder) => {
                    let client = self.clients.get_mut(&holder).expect("a suspect is known");
                    let oldest = client.asked.values().map(|asked| asked.since).min();
                    assert!(oldest.is_some_and(|since| since.after(CONFIG.patience) <= now));
                    assert!(!std::mem::replace(&mut client.suspect, true));
                }
                LeaseOutput::Trusted(holder) => {
                    let client = self.clients.get_mut(&holder).expect("it is known");
                    assert!(client.asked.is_empty() && std::mem::take(&mut client.suspect));
                    self.trusted += 1;
                }
                LeaseOutput::Fenced(holder) => {
                    let heard = self.clients[&holder].heard;
                    assert!(heard.after(CONFIG.lapse()) <= now, "{holder:?} was fenced early");
                    self.forget(holder);
                }
                LeaseOutput::Prepare { .. } | LeaseOutput::Commit { .. } => panic!("this model takes none"),
                LeaseOutput::Timeout(..) => unreachable!("left out"),
            }
        }
        self.granting = false;
    }

    fn take_recall(&mut self, holder: Holder, recall: &Recall) {
        let client = self.clients.get_mut(&holder).expect("each recall has a holder");
        assert!(!client.cut, "its client is disconnected");
        let is_meant = |key: &LeaseKey| (node(holder, *key), key.covers) == (recall.node, recall.covers);
        let key = keys().into_iter().find(is_meant).expect("it names what it recalls");
        if !client.asked.contains_key(&key) {
            assert!(self.granting && client.held.contains_key(&key), "recalled for no reason");
        }
        let none = Asked { since: self.bench.now, recall: None, delivered: false };
        let asked = client.asked.entry(key).or_insert(none);
        assert!(!asked.delivered, "put out twice");
        assert!(asked.recall.is_none_or(|earlier| earlier == recall.id), "a recall keeps its number");
        asked.recall = Some(recall.id);
        asked.delivered = true;
    }

    /// Invariants after every step.
    fn check(&self) {
        let now = self.now();
        for (id, change) in &self.changes {
            let ready = change.waits_for.is_empty();
            assert_eq!(self.bench.table.is_ready(*id), ready, "{id:?} waits for {:?}", change.waits_for);
            assert!(change.told || !ready, "{id:?} is ready without an output");
            assert!(ready || now < change.bound, "{id:?} has waited too long for {:?}", change.waits_for);
        }
        let report = self.bench.table.report();
        assert_eq!(report.holders.len(), self.clients.len());
        for holder in &report.holders {
            let client = &self.clients[&holder.holder];
            assert_eq!(holder.grants, client.held.len() as u64, "{:?}", holder.holder);
            assert_eq!(holder.owed, client.asked.len() as u64, "{:?}", holder.holder);
            assert_eq!(
                (holder.last_renewed, holder.suspect, holder.disconnected),
                (client.heard, client.suspect, client.cut)
            );
            assert!(now < client.heard.after(CONFIG.lapse()), "{:?} should be fenced", holder.holder);
            let patient = client.asked.values().all(|asked| now < asked.since.after(CONFIG.patience));
            assert!(client.suspect || patient, "{:?} should be suspect", holder.holder);
            assert!(
                client.cut || client.asked.values().all(|asked| asked.delivered),
                "a recall is kept back"
            );
        }
        for key in keys() {
            let holders = self.clients.iter().filter_map(|(holder, c)| Some((*holder, c.held.get(&key)?)));
            let holders: Vec<_> = holders.collect();
            let names = key.covers == LeaseScope::Directory;
            let alone = holders.iter().any(|(holder, held)| {
                held.mode == Mode::Write || names && wants_names_alone(*holder) && !held.shared
            });
            assert!(!alone || holders.len() == 1, "{key:?} is had alone, by {holders:?}");
        }
    }

    /// Ends all sessions, by goodbye or by silence, and checks that the table is empty.
    fn finish(mut self) -> (LeaseCounters, u64) {
        while let Some(first) = self.changes.keys().next().copied() {
            assert_eq!(self.nth_change(0), Some(first));
            self.step(&Step::Done(0));
        }
        self.step(&Step::Gone(1));
        self.step(&Step::Gone(4));
        let silence = CONFIG.lapse().0 + CONFIG.cooldown.0;
        self.step(&Step::WaitMs(Span(silence).as_millis()));
        self.bench.assert_empty();
        (self.bench.table.report().counters, self.trusted)
    }
}

fn changes(bits: u8) -> Vec<Change> {
    let chosen = keys().into_iter().enumerate().filter(|(bit, _)| bits & (1 << bit) != 0);
    chosen.map(|(_, key)| change(key)).collect()
}

#[test]
fn random_history_never_changes_a_fact_that_a_client_caches() {
    let config =
        ProptestConfig { cases: histories(1_000), failure_persistence: None, ..ProptestConfig::default() };
    let seen = RefCell::new((LeaseCounters::default(), 0));
    let run = |steps: Vec<Step>| {
        let mut world = World::new();
        (1..=HOLDERS).for_each(|holder| world.step(&Step::Attach(holder)));
        steps.iter().for_each(|step| world.step(step));
        let (counters, trusted) = world.finish();
        let mut seen = seen.borrow_mut();
        seen.1 += trusted;
        let all = &mut seen.0;
        for (refusal, times) in counters.refused {
            *all.refused.entry(refusal).or_default() += times;
        }
        all.expired += counters.expired;
        all.returned += counters.returned;
        all.suspected += counters.suspected;
        all.fenced += counters.fenced;
        Ok(())
    };
    if let Err(failure) = TestRunner::new(config).run(&steps(), run) {
        panic!("{failure}");
    }
    // All kinds of events occurred.
    let (all, trusted) = seen.into_inner();
    println!("{all:?}, {trusted} trusted again");
    for (what, times) in [
        ("expired", all.expired),
        ("returned", all.returned),
        ("suspected", all.suspected),
        ("fenced", all.fenced),
        ("trusted", trusted),
    ] {
        assert!(times > 100, "{what}: {times}");
    }
    let every = [
        Refusal::Detached,
        Refusal::Suspect,
        Refusal::Changing,
        Refusal::Contended,
        Refusal::Quota,
        Refusal::Exclusive,
    ];
    for refusal in every {
        let times = all.refused.get(&refusal).copied().unwrap_or(0);
        assert!(times > 100, "{refusal:?}: {times}");
    }
}
