//! Names in recalls to holders that may not list the directory (docs/decisions/0026-names-in-recalls.md).

use super::*;

fn bench() -> Bench {
    let mut bench = Bench::with(&[A, B]);
    bench.table.handle_confine(T0, B);
    bench
}

/// The names in the one recall that a change of `named` in a directory causes.
fn told(bench: &mut Bench, named: &str) -> Vec<Name> {
    let change = Change { names: vec![name(named)], ..change(names(1)) };
    let id = bench.table.handle_change(bench.now, Some(A), &[change]);
    let (holder, recall) = bench.recall();
    assert_eq!((holder, recall.covers), (B, LeaseScope::Directory));
    bench.acknowledge(B, recall.id);
    bench.table.handle_done(bench.now, id);
    bench.outputs();
    recall.names
}

#[test]
fn confined_holder_without_right_to_list_gets_recall_without_names() {
    let mut bench = bench();
    assert!(!bench.granted(B, names(1)).listed);
    assert_eq!(told(&mut bench, "secret"), []);
    assert!(bench.granted(B, inode(1)).listed, "other grants carry no names");
}

#[test]
fn confined_holder_that_may_list_gets_names_and_keeps_the_right_over_later_grants() {
    let mut bench = bench();
    let grant = bench.granted(B, names(1));
    bench.table.handle_may_list(bench.now, B, grant.id);
    assert!(bench.granted(B, names(1)).listed, "rights are looked at once");
    assert_eq!(told(&mut bench, "x"), [name("x")]);
    assert!(!bench.granted(B, names(1)).listed, "and anew after a recall");
}

#[test]
fn permission_change_recalls_grants_of_confined_holders() {
    let mut bench = bench();
    let before = bench.granted(B, names(1));
    bench.table.handle_may_list(bench.now, B, before.id);
    bench.granted(A, names(1));
    bench.table.handle_rights_changed(bench.now, object(1));
    let (holder, recall) = bench.recall();
    assert_eq!((holder, recall.covers, recall.names), (B, LeaseScope::Directory, vec![]));
    assert_eq!(bench.grant(B, names(1)), None, "its recall is out");
    bench.acknowledge(B, recall.id);
    assert!(!bench.granted(B, names(1)).listed);
}

#[test]
fn list_permission_read_before_change_does_not_apply_to_later_grant() {
    let mut bench = bench();
    let grant = bench.granted(B, names(1));
    bench.table.handle_rights_changed(bench.now, object(1));
    let (_, recall) = bench.recall();
    bench.acknowledge(B, recall.id);
    let later = bench.granted(B, names(1));
    bench.table.handle_may_list(bench.now, B, grant.id);
    assert_eq!(told(&mut bench, "secret"), [], "{later:?} was not looked at");
}

#[test]
fn confined_holder_is_sent_no_updates() {
    let mut bench = bench();
    bench.table.handle_takes_updates(T0, B);
    let grant = bench.granted(B, names(1));
    bench.table.handle_may_list(bench.now, B, grant.id);
    let named = Change { names: vec![name("x")], can_update: true, ..change(names(1)) };
    bench.table.handle_change(bench.now, Some(A), &[named]);
    assert_eq!(bench.recall().1.names, [name("x")]);
}
