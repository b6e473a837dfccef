//! Rules 5 and 8: contention and quotas.

use super::*;

/// A key of A that was recalled twice within the window.
fn contended() -> Bench {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, names(1));
    bench.granted(B, names(1));
    bench.whole_change(Some(A), names(1));
    bench.now = at_ms(900);
    bench.granted(B, names(1));
    bench.whole_change(Some(A), names(1));
    bench
}

#[test]
fn key_recalled_twice_within_window_is_contended_until_cooldown() {
    let mut bench = contended();
    assert_eq!(bench.table.report().contended, [names(1)]);
    assert_eq!(bench.refused(B, names(1)), Refusal::Contended);
    assert_eq!(bench.refused(A, names(1)), Refusal::Contended);
    bench.granted(B, inode(1));
    bench.outputs();
    bench.go_to(at_ms(10_899));
    assert_eq!(bench.refused(B, names(1)), Refusal::Contended);
    bench.go_to(at_ms(10_900));
    bench.granted(B, names(1));
    assert_eq!(bench.table.report().contended, []);
}

#[test]
fn every_change_keeps_a_contended_key_contended() {
    let mut bench = contended();
    bench.go_to(at_ms(8_000));
    let id = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)], "it recalls no holder");
    bench.go_to(at_ms(9_000));
    assert!(bench.heard(A) && bench.heard(B));
    bench.table.handle_done(bench.now, id);
    bench.go_to(at_ms(18_999));
    assert_eq!(bench.refused(B, names(1)), Refusal::Contended, "it was changed until its end");
    bench.go_to(at_ms(19_000));
    bench.granted(B, names(1));
}

#[test]
fn key_stays_contended_during_change_longer_than_cooldown() {
    let mut bench = contended();
    assert!(bench.heard(A) && bench.heard(B));
    bench.go_to(at_ms(1_000));
    let id = bench.change(A, names(1));
    bench.go_to(at_ms(14_000));
    assert!(bench.heard(A) && bench.heard(B));
    // Other events at the key make no difference.
    bench.table.handle_return(bench.now, A, &[GrantId(1)]);
    assert_eq!(bench.table.report().holders[0].grants, 0);
    bench.table.handle_done(bench.now, id);
    assert_eq!(bench.refused(B, names(1)), Refusal::Contended);
}

#[test]
fn recalls_outside_contention_window_do_not_make_key_contended() {
    let mut bench = Bench::with(&[A, B]);
    for second in 0..8 {
        bench.go_to(at_ms(second * 1_000));
        assert!(bench.heard(A));
        bench.granted(B, names(1));
        bench.whole_change(Some(A), names(1));
    }
    bench.granted(B, names(1));
}

#[test]
fn recalls_of_old_grants_do_not_make_key_contended() {
    let mut bench = Bench::with(&[A, B]);
    for turn in 0..4 {
        bench.granted(B, names(1));
        // A second grant on the key is no younger than the first.
        bench.go_to(at_ms(turn * 200 + 199));
        bench.granted(B, names(1));
        bench.go_to(at_ms(turn * 200 + 200));
        bench.whole_change(Some(A), names(1));
    }
    bench.granted(B, names(1));
}

#[test]
fn changes_without_recalls_do_not_make_key_contended() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.granted(A, names(1));
    for _ in 0..5 {
        bench.whole_change(Some(A), names(1));
    }
    bench.granted(B, names(1));
    bench.whole_change(Some(A), names(1));
    assert_eq!(bench.refused(B, names(1)), Refusal::Contended, "that was the second");
}

#[test]
fn change_counts_once_for_contention_and_joined_change_not_at_all() {
    let mut bench = Bench::with(&[A, B, C]);
    bench.granted(B, names(1));
    bench.granted(C, names(1));
    let first = bench.change(A, names(1));
    let second = bench.change(A, names(1));
    bench.table.handle_extend(T0, first, &[change(names(1))]);
    for (holder, recall) in bench.recalls() {
        bench.acknowledge(holder, recall.id);
    }
    bench.table.handle_done(T0, first);
    bench.table.handle_done(T0, second);
    bench.granted(B, names(1));
}

#[test]
fn host_changes_count_towards_contention() {
    let mut bench = Bench::with(&[A]);
    for _ in 0..2 {
        bench.granted(A, inode(1));
        bench.whole_change(None, inode(1));
    }
    assert_eq!(bench.refused(A, inode(1)), Refusal::Contended);
}

fn quota(grants_per_holder: u64) -> Bench {
    Bench::of(LeaseConfig { grants_per_holder, ..LeaseConfig::default() }, &[A, B])
}

#[test]
fn grant_above_quota_recalls_oldest_grant_without_waiting() {
    let mut bench = quota(3);
    for ino in 1..=3 {
        bench.granted(A, names(ino));
    }
    bench.granted(A, names(1));
    assert_eq!(bench.outputs(), []);
    bench.granted(A, names(4));
    let (_, recall) = bench.recall();
    assert_eq!(recall.node, node(A, names(2)), "the first was registered anew");
    assert_eq!(recall.names, []);
    assert_eq!(bench.refused(B, names(2)), Refusal::Changing);
    assert_eq!(bench.refused(A, names(5)), Refusal::Quota);
    bench.granted(A, names(4));
    bench.granted(B, names(5));
    bench.acknowledge(A, recall.id);
    bench.granted(A, names(5));
    assert_eq!(bench.recall().1.node, node(A, names(3)));
    assert!(bench.table.report().contended.is_empty());
}

#[test]
fn quota_recall_must_be_acknowledged_like_any_other() {
    let mut bench = quota(1);
    bench.granted(A, names(1));
    bench.granted(A, names(2));
    bench.recall();
    let id = bench.change(B, names(1));
    assert!(!bench.table.is_ready(id), "it is held until it is acknowledged");
    assert_eq!(bench.go_to(at_ms(2_000)), [LeaseOutput::Suspect(A)]);
}

#[test]
fn zero_quota_refuses_every_grant() {
    let mut bench = quota(0);
    assert_eq!(bench.refused(A, names(1)), Refusal::Quota);
    assert_eq!(bench.outputs(), []);
}
