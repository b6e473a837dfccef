//! Watched objects have no time limit, and possibly missed changes cause recalls (page 0015).

use super::*;

const LIMIT: Span = Span::from_secs(5);

/// All holders trust the watch on the filesystem of [`object`].
fn watched(holders: &[Holder]) -> Bench {
    let mut bench = Bench::with(holders);
    for holder in holders {
        bench.table.handle_limit(T0, *holder, LIMIT);
        bench.table.handle_trusts_watch(T0, *holder);
    }
    bench.table.handle_watched(T0, 8);
    bench
}

/// Goes over all grants, `most` at a time; returns the number of rounds.
fn missed(bench: &mut Bench, until: GrantId, most: u64) -> u64 {
    let (mut after, mut rounds) = (None, 1);
    while let Some(next) = bench.table.handle_missed(bench.now, 8, until, (after, most)) {
        (after, rounds) = (Some(next), rounds + 1);
    }
    rounds
}

#[test]
fn watched_object_is_granted_without_limit_to_holder_that_trusts_watch() {
    let mut bench = watched(&[A]);
    bench.table.handle_attach(T0, B, false);
    bench.table.handle_limit(T0, B, LIMIT);
    assert_eq!(bench.granted(A, names(1)).limit, Span::FOREVER);
    assert_eq!(bench.granted(B, names(1)).limit, LIMIT);
    let elsewhere = LeaseKey { object: Object { filesystem: 9, ..object(1) }, covers: LeaseScope::Directory };
    assert_eq!(bench.granted(A, elsewhere).limit, LIMIT);
    bench.table.handle_watched_object(T0, elsewhere.object);
    assert_eq!(bench.granted(A, elsewhere).limit, Span::FOREVER);
    for second in 1..10 {
        bench.now = at_ms(second * 1000);
        assert!(bench.table.handle_renewal(bench.now, A) && bench.table.handle_renewal(bench.now, B));
    }
    let held: Vec<u64> = bench.table.report().holders.iter().map(|holder| holder.grants).collect();
    assert_eq!(held, [2, 0]);
}

#[test]
fn limited_and_unlimited_grants_of_one_holder_end_independently() {
    let mut bench = watched(&[A]);
    let elsewhere =
        |ino| LeaseKey { object: Object { filesystem: 9, ..object(ino) }, covers: LeaseScope::Attributes };
    bench.granted(A, names(1));
    let first = bench.granted(A, elsewhere(1));
    bench.now = at_ms(3000);
    let second = bench.granted(A, elsewhere(2));
    // A second grant moves the end.
    let again = bench.granted(A, elsewhere(1));
    bench.now = at_ms(5600);
    bench.table.handle_timeout(bench.now);
    assert!(!bench.table.is_live(A, first.id) && bench.table.is_live(A, second.id));
    assert!(bench.table.is_live(A, again.id));
    bench.now = at_ms(8500);
    bench.table.handle_timeout(bench.now);
    assert!(!bench.table.is_live(A, second.id) && !bench.table.is_live(A, again.id));
    let report = bench.table.report();
    assert_eq!((report.holders[0].grants, report.counters.expired), (1, 2));
}

#[test]
fn limited_grant_never_replaces_unlimited_grant_without_recall() {
    let mut bench = watched(&[A]);
    let unlimited = bench.granted(A, names(1));
    bench.table.handle_unwatched(bench.now, 8);
    assert_eq!(bench.refused(A, names(1)), Refusal::Changing, "it may believe the other one yet");
    assert!(!bench.table.is_live(A, unlimited.id));
    let recalls = bench.recalls();
    assert_eq!(recalls.len(), 1);
    assert_eq!(bench.refused(A, names(1)), Refusal::Changing);
    bench.acknowledge(A, recalls[0].1.id);
    assert_eq!(bench.granted(A, names(1)).limit, LIMIT);
    // A watch on one object.
    bench.table.handle_watched_object(bench.now, object(2));
    let unlimited = bench.granted(A, inode(2));
    bench.table.handle_unwatched_object(bench.now, object(2));
    assert!(!bench.table.is_live(A, unlimited.id) && !bench.table.is_watched(object(2)));
    assert_eq!(bench.refused(A, inode(2)), Refusal::Changing);
    let recalls = bench.recalls();
    bench.acknowledge(A, recalls[0].1.id);
    assert_eq!(bench.granted(A, inode(2)).limit, LIMIT);
}

#[test]
fn watch_overflow_recalls_only_grants_registered_before_it() {
    let mut bench = watched(&[A, B]);
    let elsewhere = LeaseKey { object: Object { filesystem: 9, ..object(1) }, covers: LeaseScope::Directory };
    let kept = bench.granted(B, elsewhere);
    for ino in 1..=10 {
        bench.granted(A, names(ino));
        bench.granted(B, inode(ino));
    }
    let until = bench.table.latest_grant();
    // Read under an earlier grant, and under a later one.
    let anew = bench.granted(A, names(3));
    let later = bench.granted(A, names(11));
    assert_eq!(missed(&mut bench, until, 7), 4);
    assert!(bench.table.is_live(A, later.id) && bench.table.is_live(B, kept.id));
    assert!(!bench.table.is_live(A, anew.id), "an answer of before may be under way");
    assert_eq!(bench.recalls().len(), 20);
}

#[test]
fn watch_overflow_does_not_make_keys_contended() {
    let mut bench = watched(&[A]);
    for _ in 0..5 {
        let granted = bench.granted(A, names(1));
        let until = bench.table.latest_grant();
        assert_eq!(missed(&mut bench, until, 100), 1);
        let recalls = bench.recalls();
        assert_eq!(recalls.len(), 1);
        bench.acknowledge(A, recalls[0].1.id);
        assert!(!bench.table.is_live(A, granted.id));
    }
    assert!(bench.table.report().contended.is_empty());
}

#[test]
fn host_change_recalls_all_holders_and_waits_for_none() {
    let mut bench = watched(&[A, B]);
    bench.granted(A, names(1));
    bench.granted(B, names(1));
    let of = [Change { names: vec![name("n")], ..change(names(1)) }];
    let id = bench.table.handle_change(bench.now, None, &of);
    bench.table.handle_done(bench.now, id);
    let recalls = bench.recalls();
    assert_eq!(recalls.iter().map(|(holder, _)| *holder).collect::<Vec<_>>(), [A, B]);
    assert_eq!(bench.refused(A, names(1)), Refusal::Changing);
    bench.acknowledge(A, recalls[0].1.id);
    assert_eq!(bench.refused(A, names(1)), Refusal::Changing, "nothing until all have dropped it");
    bench.acknowledge(B, recalls[1].1.id);
    bench.granted(A, names(1));
}
