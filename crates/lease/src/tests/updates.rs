//! Updates in place of recalls (docs/decisions/0014-pushes.md).

use super::*;
use nigh_types::UpdatePrepare;

fn change(key: LeaseKey) -> Change {
    Change { can_update: true, ..super::change(key) }
}

fn named(ino: u64, names_of: &[&str]) -> Change {
    let names_of = names_of.iter().map(|text| name(text)).collect();
    Change { key: names(ino), names: names_of, writes: false, can_update: true }
}

/// Holders that take updates.
fn bench(holders: &[Holder]) -> Bench {
    let mut bench = Bench::with(holders);
    for holder in holders {
        bench.table.handle_takes_updates(T0, *holder);
    }
    bench
}

impl Bench {
    fn holds(&mut self) -> Vec<(Holder, UpdatePrepare)> {
        let outputs = self.outputs();
        let holds = outputs.into_iter().filter_map(|output| match output {
            LeaseOutput::Prepare { holder, hold } => Some((holder, hold)),
            LeaseOutput::Ready(_) => None,
            other => panic!("not a hold: {other:?}"),
        });
        holds.collect()
    }

    fn hold(&mut self) -> (Holder, UpdatePrepare) {
        let mut holds = self.holds();
        assert_eq!(holds.len(), 1, "one hold: {holds:?}");
        holds.remove(0)
    }

    fn begin(&mut self, by: Holder, changes: &[Change]) -> ChangeId {
        self.table.handle_change(self.now, Some(by), changes)
    }

    /// Ends a change after observing it; returns the names (`-`: attributes) in each commit, by the prepare's id.
    fn end(&mut self, id: ChangeId) -> Vec<(Holder, RecallId, Vec<String>)> {
        let looked = self.table.observation_point();
        assert!(self.table.handle_observed(id, looked));
        self.table.handle_done(self.now, id);
        self.commits()
    }

    fn commits(&mut self) -> Vec<(Holder, RecallId, Vec<String>)> {
        let outputs = self.outputs();
        let commits = outputs.into_iter().filter_map(|output| match output {
            LeaseOutput::Commit { holder, id, told } => {
                let told = told.iter().map(|told| told.name.as_ref().map_or("-".to_owned(), Name::to_string));
                Some((holder, id, told.collect()))
            }
            LeaseOutput::Ready(_) => None,
            other => panic!("not a commit: {other:?}"),
        });
        commits.collect()
    }
}

#[test]
fn change_sends_one_prepare_and_one_commit_per_holder() {
    let mut bench = bench(&[A, B]);
    let grant = bench.granted(B, names(1));
    bench.granted(B, inode(1));
    let id = bench.begin(A, &[named(1, &["x"]), change(inode(1)), named(1, &["y"]), change(names(2))]);
    let (holder, hold) = bench.hold();
    let facts: Vec<_> = hold.facts.iter().map(|held| (held.node, held.covers, held.names.clone())).collect();
    let own = |key: LeaseKey| node(B, key);
    assert_eq!(holder, B);
    assert_eq!(
        facts,
        [
            (own(names(1)), LeaseScope::Directory, vec![name("x"), name("y")]),
            (own(inode(1)), LeaseScope::Attributes, vec![])
        ]
    );
    assert!(!bench.table.is_ready(id) && bench.table.is_live(B, grant.id));
    assert_eq!(bench.refused(B, names(1)), Refusal::Changing);
    bench.acknowledge(B, hold.id);
    assert!(bench.table.is_ready(id) && bench.table.awaiting_update(id).eq([B]));
    assert_eq!(bench.end(id), [(B, hold.id, vec!["x".into(), "y".into(), "-".into()])]);
    assert!(bench.table.is_live(B, grant.id), "the grant goes on");
    assert_eq!(bench.table.report().counters.recalled, 0);
    bench.table.handle_goodbye(T0, A);
    bench.table.handle_goodbye(T0, B);
    bench.go_to(at_ms(100_000));
    bench.assert_empty();
}

#[test]
fn change_that_cannot_be_sent_as_update_causes_recall() {
    let data = LeaseKey { covers: LeaseScope::Data, ..names(1) };
    for (key, change) in [(names(1), change(names(1))), (data, change(data))] {
        let mut bench = bench(&[A, B]);
        bench.granted(B, key);
        bench.begin(A, &[change]);
        bench.recall();
    }
    let mut ends = self::bench(&[A, B]);
    ends.granted(B, inode(1));
    ends.begin(A, &[super::change(inode(1))]);
    ends.recall();
    // Nor does a holder get a prepare that takes no updates, or that delays others.
    let mut plain = Bench::with(&[A, B]);
    plain.granted(B, names(1));
    plain.begin(A, &[named(1, &["x"])]);
    plain.recall();
    let mut late = self::bench(&[A, B]);
    late.granted(B, names(1));
    late.granted(B, names(2));
    late.begin(A, &[named(1, &["x"])]);
    late.hold();
    late.go_to(at_ms(2_500));
    late.begin(A, &[named(2, &["x"])]);
    late.recall();
}

#[test]
fn change_of_all_names_after_some_names_recalls_grant() {
    let mut bench = bench(&[A, B]);
    let grant = bench.granted(B, names(1));
    let some = bench.begin(A, &[named(1, &["x"])]);
    let (_, hold) = bench.hold();
    bench.table.handle_extend(T0, some, &[named(1, &["x"])]);
    assert_eq!(bench.holds(), [], "it is held already");
    bench.table.handle_extend(T0, some, &[named(1, &["y"])]);
    let (_, further) = bench.hold();
    assert_eq!(further.facts[0].names, [name("y")]);
    bench.table.handle_extend(T0, some, &[change(names(1))]);
    let (_, recall) = bench.recall();
    assert!(!bench.table.is_live(B, grant.id));
    for id in [hold.id, further.id, recall.id] {
        assert!(!bench.table.is_ready(some));
        bench.acknowledge(B, id);
    }
    assert!(bench.table.is_ready(some));
    let told = bench.end(some);
    assert_eq!(
        told,
        [(B, hold.id, vec!["x".into()]), (B, further.id, vec!["y".into()])],
        "each ends its hold"
    );
}

#[test]
fn last_of_two_changes_of_one_fact_commits_its_value() {
    let mut bench = bench(&[A, B, C]);
    bench.granted(C, inode(1));
    let [one, two] = [A, B].map(|by| bench.begin(by, &[change(inode(1))]));
    let holds: Vec<RecallId> = bench.holds().into_iter().map(|(_, hold)| hold.id).collect();
    holds.iter().for_each(|id| bench.acknowledge(C, *id));
    // Both changes have had their effect. The second is observed, and then the first ends.
    let early = bench.table.observation_point();
    assert!(bench.table.handle_observed(two, early), "the other has not ended");
    assert_eq!(bench.end(one), [(C, holds[0], vec![])], "the other may have changed it since");
    assert!(!bench.table.handle_observed(two, early), "it is to be looked at again");
    assert_eq!(bench.end(two), [(C, holds[1], vec!["-".into()])]);
}

#[test]
fn commit_omits_value_observed_before_other_change_ended() {
    let mut bench = bench(&[A, B, C]);
    bench.granted(C, inode(1));
    let [one, two] = [A, B].map(|by| bench.begin(by, &[change(inode(1))]));
    let holds: Vec<RecallId> = bench.holds().into_iter().map(|(_, hold)| hold.id).collect();
    holds.iter().for_each(|id| bench.acknowledge(C, *id));
    let early = bench.table.observation_point();
    assert!(bench.table.handle_observed(two, early));
    bench.end(one);
    bench.table.handle_done(T0, two);
    assert_eq!(bench.commits(), [(C, holds[1], vec![])]);
}

#[test]
fn changes_of_different_names_commit_independently() {
    let mut bench = bench(&[A, B, C]);
    bench.granted(C, names(1));
    let one = bench.begin(A, &[named(1, &["x"])]);
    let two = bench.begin(B, &[named(1, &["y"])]);
    let holds: Vec<RecallId> = bench.holds().into_iter().map(|(_, hold)| hold.id).collect();
    holds.iter().for_each(|id| bench.acknowledge(C, *id));
    assert_eq!(bench.end(two), [(C, holds[1], vec!["y".into()])]);
    assert_eq!(bench.end(one), [(C, holds[0], vec!["x".into()])]);
}

#[test]
fn abandoned_change_commits_its_prepares_without_values() {
    let mut bench = bench(&[A, B]);
    bench.granted(B, names(1));
    let id = bench.begin(A, &[named(1, &["x"])]);
    let (_, hold) = bench.hold();
    bench.table.handle_done(T0, id);
    assert_eq!(bench.commits(), [(B, hold.id, vec![])]);
    // The acknowledgement is owed all the same: the kernel must be invalidated first.
    assert_eq!(bench.table.report().holders[1].owed, 1);
    bench.acknowledge(B, hold.id);
    assert_eq!(bench.table.report().holders[1].owed, 0);
}

#[test]
fn holder_ignoring_prepare_is_fenced_and_still_gets_commit() {
    let mut bench = bench(&[A, B]);
    bench.granted(B, names(1));
    let id = bench.begin(A, &[named(1, &["x"])]);
    let (_, hold) = bench.hold();
    assert_eq!(bench.table.report().holders[1].awaited_by, [id]);
    for second in 1..30 {
        bench.go_to(at_ms(second * 1_000));
        bench.heard(A);
        bench.heard(B);
    }
    assert!(
        bench.table.is_ready(id)
            && !bench.table.is_known(B)
            && bench.table.awaiting_update(id).next().is_none()
    );
    // The prepare may be in its stream until it reconnects.
    assert_eq!(bench.end(id), [(B, hold.id, vec!["x".into()])]);
}

#[test]
fn holder_returning_grant_during_prepare_still_gets_commit() {
    let mut bench = bench(&[A, B]);
    let grant = bench.granted(B, names(1));
    let id = bench.begin(A, &[named(1, &["x"])]);
    let (_, hold) = bench.hold();
    bench.table.handle_return(T0, B, &[grant.id]);
    assert!(!bench.table.is_ready(id), "its kernel may still be forgetting");
    bench.acknowledge(B, hold.id);
    assert_eq!(bench.end(id), [(B, hold.id, vec!["x".into()])]);
}

#[test]
fn updated_grant_loses_exclusive_history_and_next_grant_regains_it() {
    let mut bench = bench(&[A, B]);
    let grant = bench.granted(B, inode(1));
    bench.whole_change_of(A);
    let own = bench.begin(B, &[change(inode(1))]);
    bench.outputs();
    assert!(
        !bench.held_exclusively_since(own, (grant.id, LeaseScope::Attributes)),
        "another client has changed it"
    );
    bench.table.handle_done(T0, own);
    bench.outputs();
    let next = bench.granted(B, inode(1));
    let own = bench.begin(B, &[change(inode(1))]);
    assert!(bench.held_exclusively_since(own, (next.id, LeaseScope::Attributes)));
    assert!(!bench.held_exclusively_since(own, (grant.id, LeaseScope::Attributes)));
}

impl Bench {
    fn whole_change_of(&mut self, by: Holder) {
        let id = self.begin(by, &[change(inode(1))]);
        for (holder, hold) in self.holds() {
            self.acknowledge(holder, hold.id);
        }
        self.end(id);
    }
}

#[test]
fn updates_do_not_make_keys_contended() {
    let mut bench = bench(&[A, B]);
    bench.granted(B, inode(1));
    for _ in 0..5 {
        bench.whole_change_of(A);
    }
    bench.granted(B, inode(1));
    assert_eq!(bench.table.report().contended, []);
}
