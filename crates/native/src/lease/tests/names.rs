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
fn alone_they_are_not_shared() {
    let mut bench = bench();
    for holder in [A, B, C] {
        assert!(!bench.granted(holder, names(holder.0)).shared);
        assert!(!bench.granted(holder, names(holder.0)).shared, "asked again");
    }
}

#[test]
fn a_second_holder_is_refused_and_what_was_alone_recalled_and_then_both_share() {
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
        assert!(bench.table.report().contended.is_empty(), "nobody changed anything");
    }
}

#[test]
fn one_that_wants_them_alone_shares_at_once_with_those_that_do_not() {
    let mut bench = bench();
    bench.granted(C, names(1));
    assert!(bench.granted(A, names(1)).shared);
    assert!(bench.granted(B, names(1)).shared);
    assert_eq!(bench.outputs(), []);
}

#[test]
fn those_that_do_not_care_are_told_all_the_same() {
    let mut bench = Bench::with(&[A, B]);
    assert!(!bench.granted(A, names(1)).shared);
    assert!(bench.granted(B, names(1)).shared);
    assert_eq!(bench.outputs(), []);
}

#[test]
fn only_names_are_had_alone() {
    let mut bench = bench();
    for key in [inode(1), LeaseKey { covers: LeaseScope::Data, ..names(1) }] {
        assert!(!bench.granted(A, key).shared);
        assert!(!bench.granted(B, key).shared);
    }
    assert_eq!(bench.outputs(), []);
}

#[test]
fn they_are_shared_until_at_most_one_has_had_them_for_a_while() {
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
fn one_that_comes_back_in_time_keeps_them_shared() {
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
fn two_who_have_been_there_begin_the_waiting_anew() {
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
fn one_that_has_not_acknowledged_is_still_there() {
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
fn a_shared_key_is_forgotten_when_nobody_has_it() {
    let mut bench = bench();
    bench.granted(A, names(1));
    bench.refused(B, names(1));
    let (_, recall) = bench.recall();
    bench.acknowledge(A, recall.id);
    for holder in [A, B, C] {
        bench.table.handle_gone(bench.now, holder);
    }
    bench.go_to(at_ms(10_000));
    bench.assert_empty();
}
