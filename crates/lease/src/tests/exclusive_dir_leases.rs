//! Rule 9: kernels that cannot drop all dentries at once.

use super::*;

/// A and B need exclusive directory leases, C does not.
fn bench() -> Bench {
    let mut bench = Bench::with(&[C]);
    for holder in [A, B] {
        bench.table.handle_attach(T0, holder, true);
    }
    bench
}

#[test]
fn sole_directory_lease_is_not_marked_shared() {
    let mut bench = bench();
    for holder in [A, B, C] {
        assert!(!bench.granted(holder, names(holder.0)).shared);
        assert!(!bench.granted(holder, names(holder.0)).shared, "asked again");
    }
}

#[test]
fn second_holder_of_exclusive_directory_is_refused_until_recall_then_both_share() {
    for second in [B, C] {
        let mut bench = bench();
        bench.granted(A, names(1));
        assert_eq!(bench.refused(second, names(1)), Refusal::Exclusive);
        let (asked, recall) = bench.recall();
        assert_eq!((asked, recall.node, recall.covers), (A, node(A, names(1)), LeaseScope::Directory));
        assert_eq!(bench.refused(second, names(1)), Refusal::Changing);
        assert_eq!(bench.refused(A, names(1)), Refusal::Changing);
        bench.acknowledge(A, recall.id);
        assert!(bench.granted(A, names(1)).shared, "although it is the first again");
        assert!(bench.granted(second, names(1)).shared);
        assert!(bench.granted(A, names(1)).shared);
        assert_eq!(bench.outputs(), []);
        assert!(bench.table.report().contended.is_empty(), "nothing was changed");
    }
}

#[test]
fn exclusive_holder_gets_shared_lease_beside_ordinary_holders() {
    let mut bench = bench();
    bench.granted(C, names(1));
    assert!(bench.granted(A, names(1)).shared);
    assert!(bench.granted(B, names(1)).shared);
    assert_eq!(bench.outputs(), []);
}

#[test]
fn ordinary_holders_get_shared_mark_in_grant_too() {
    let mut bench = Bench::with(&[A, B]);
    assert!(!bench.granted(A, names(1)).shared);
    assert!(bench.granted(B, names(1)).shared);
    assert_eq!(bench.outputs(), []);
}

#[test]
fn only_directory_leases_are_exclusive() {
    let mut bench = bench();
    for key in [inode(1), LeaseKey { covers: LeaseScope::Data, ..names(1) }] {
        assert!(!bench.granted(A, key).shared);
        assert!(!bench.granted(B, key).shared);
    }
    assert_eq!(bench.outputs(), []);
}

#[test]
fn directory_stays_shared_until_single_holder_outlasts_cooldown() {
    let mut bench = bench();
    bench.granted(C, names(1));
    bench.granted(A, names(1));
    bench.stay_quiet(&[A, B, C]);
    assert!(bench.granted(A, names(1)).shared, "there are still two");
    let of_c = bench.granted(C, names(1));
    bench.table.handle_return(bench.now, C, &[of_c.id]);
    bench.outputs();
    let left = bench.now;
    bench.go_to(left.after(Span::from_millis(9_999)));
    assert!(bench.heard(A) && bench.heard(C));
    assert!(bench.granted(A, names(1)).shared);
    bench.go_to(left.after(Span::from_secs(10)));
    assert!(!bench.granted(A, names(1)).shared);
    assert_eq!(bench.refused(C, names(1)), Refusal::Exclusive);
}

#[test]
fn second_holder_returning_within_cooldown_keeps_directory_shared() {
    let mut bench = bench();
    bench.granted(C, names(1));
    bench.granted(A, names(1));
    for _ in 0..4 {
        let of_c = bench.granted(C, names(1));
        bench.table.handle_return(bench.now, C, &[of_c.id]);
        let next = bench.now.after(Span::from_secs(6));
        bench.go_to(next);
        assert!(bench.heard(A) && bench.heard(B) && bench.heard(C));
        assert!(bench.granted(C, names(1)).shared);
    }
}

#[test]
fn brief_second_holder_restarts_shared_cooldown() {
    let mut bench = bench();
    let of_c = bench.granted(C, names(1));
    bench.granted(A, names(1));
    bench.table.handle_return(T0, C, &[of_c.id]);
    bench.outputs();
    bench.go_to(at_ms(6_000));
    let of_c = bench.granted(C, names(1));
    bench.outputs();
    bench.go_to(at_ms(12_000));
    assert!(bench.heard(A) && bench.heard(C));
    bench.table.handle_return(bench.now, C, &[of_c.id]);
    bench.outputs();
    bench.go_to(at_ms(21_999));
    assert!(bench.heard(A) && bench.heard(C));
    assert!(bench.granted(A, names(1)).shared);
    bench.go_to(at_ms(22_000));
    assert!(!bench.granted(A, names(1)).shared);
}

#[test]
fn holder_with_unacknowledged_recall_counts_for_sharing() {
    let mut bench = bench();
    bench.granted(C, names(1));
    bench.granted(A, names(1));
    let of_b = bench.granted(B, names(1));
    let id = bench.change(A, names(1));
    let recalls = bench.recalls();
    bench.go_to(at_ms(500));
    bench.table.handle_return(bench.now, B, &[of_b.id]);
    bench.outputs();
    bench.go_to(at_ms(1_500));
    for (holder, recall) in recalls {
        bench.acknowledge(holder, recall.id);
    }
    bench.table.handle_done(bench.now, id);
    bench.outputs();
    bench.go_to(at_ms(11_499));
    assert!(bench.heard(A));
    assert!(bench.granted(A, names(1)).shared);
    bench.go_to(at_ms(11_500));
    assert!(!bench.granted(A, names(1)).shared);
}

#[test]
fn shared_key_state_is_dropped_without_holders() {
    let mut bench = bench();
    bench.granted(A, names(1));
    bench.refused(B, names(1));
    let (_, recall) = bench.recall();
    bench.acknowledge(A, recall.id);
    for holder in [A, B, C] {
        bench.table.handle_goodbye(bench.now, holder);
    }
    bench.go_to(at_ms(10_000));
    bench.assert_empty();
}
