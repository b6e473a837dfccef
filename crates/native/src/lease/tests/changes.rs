//! Rules 1 and 2: a grant is registered before the read, a key is changed after the recall.

use super::*;

#[test]
fn others_are_asked_and_the_change_waits_for_all_of_them() {
    let mut bench = Bench::with(&[A, B, C]);
    for holder in [A, B, C] {
        bench.granted(holder, names(1));
    }
    let names_changed = vec![name("new")];
    let id = bench.table.handle_change(
        T0,
        Some(A),
        &[Change { key: names(1), names: names_changed.clone(), writes: false, told: false }],
    );
    let recalls = bench.recalls();
    assert_eq!(recalls.len(), 2, "not the one who changes it: {recalls:?}");
    for (holder, recall) in &recalls {
        assert!(*holder != A);
        assert_eq!((recall.node, recall.covers), (node(*holder, names(1)), LeaseScope::Directory));
        assert_eq!(recall.names, names_changed);
    }
    assert!(!bench.table.is_ready(id));
    bench.acknowledge(recalls[0].0, recalls[0].1.id);
    assert!(!bench.table.is_ready(id));
    assert_eq!(bench.outputs(), []);
    bench.acknowledge(recalls[1].0, recalls[1].1.id);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
    assert!(bench.table.is_ready(id));
}

#[test]
fn a_change_that_finds_nobody_else_is_ready_at_once() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, names(1));
    bench.granted(B, inode(1));
    let id = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
}

#[test]
fn the_disk_itself_asks_everybody() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, inode(1));
    bench.granted(B, inode(1));
    let id = bench.table.handle_change(T0, None, &[change(inode(1))]);
    assert_eq!(bench.recalls().len(), 2);
    assert!(!bench.table.is_ready(id));
}

#[test]
fn nothing_is_granted_while_a_change_is_under_way_not_even_to_its_maker() {
    let mut bench = Bench::with(&[A, B]);
    let id = bench.change(A, names(1));
    assert_eq!(bench.refused(B, names(1)), Refusal::Changing);
    assert_eq!(bench.refused(A, names(1)), Refusal::Changing);
    bench.granted(B, names(2));
    bench.granted(B, inode(1));
    bench.table.handle_done(T0, id);
    bench.granted(A, names(1));
    bench.granted(B, names(1));
}

#[test]
fn with_two_changes_under_way_the_first_to_end_frees_nothing() {
    let mut bench = Bench::with(&[A, B]);
    let first = bench.change(A, names(1));
    let second = bench.change(B, names(1));
    bench.table.handle_done(T0, first);
    bench.table.handle_done(T0, first);
    assert_eq!(bench.refused(A, names(1)), Refusal::Changing);
    bench.table.handle_done(T0, second);
    bench.granted(A, names(1));
}

#[test]
fn nothing_is_granted_until_the_recall_is_acknowledged_even_after_the_change() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    let id = bench.change(A, names(1));
    let (_, recall) = bench.recall();
    bench.table.handle_done(T0, id);
    assert_eq!(bench.refused(A, names(1)), Refusal::Changing);
    bench.acknowledge(B, recall.id);
    bench.granted(A, names(1));
    assert_eq!(bench.outputs(), [], "a change that was given up is not ready any more");
}

#[test]
fn changes_of_one_key_share_one_recall() {
    let mut bench = Bench::with(&[A, B, C]);
    bench.granted(B, names(1));
    let first = bench.change(A, names(1));
    let second = bench.change(C, names(1));
    let (_, recall) = bench.recall();
    assert!(!bench.table.is_ready(first) && !bench.table.is_ready(second));
    bench.acknowledge(B, recall.id);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(first), LeaseOutput::Ready(second)]);
}

#[test]
fn whoever_owes_a_recall_is_not_held_behind_it() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, names(1));
    bench.granted(B, names(1));
    let by_a = bench.change(A, names(1));
    let by_b = bench.change(B, names(1));
    let recalls = bench.recalls();
    assert_eq!(recalls.iter().map(|(holder, _)| *holder).collect::<Vec<_>>(), [B, A]);
    assert!(!bench.table.is_ready(by_a) && !bench.table.is_ready(by_b));
    // Each waits for the other's acknowledgement, not for its own.
    bench.acknowledge(A, recalls[1].1.id);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(by_b)]);
    let again = bench.change(B, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(again)]);
    bench.acknowledge(B, recalls[0].1.id);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(by_a)]);
}

#[test]
fn a_change_is_ready_again_once_what_was_added_is_recalled() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(2));
    let id = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
    bench.table.handle_extend(T0, id, &[change(names(1)), change(names(2))]);
    assert!(!bench.table.is_ready(id));
    let (_, recall) = bench.recall();
    assert_eq!(bench.refused(A, names(2)), Refusal::Changing);
    bench.acknowledge(B, recall.id);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
    bench.table.handle_extend(T0, id, &[change(names(3))]);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)], "said after every extension");
    bench.table.handle_extend(T0, id, &[change(names(4))]);
    bench.table.handle_extend(T0, id, &[change(names(5))]);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)], "and not twice at a time");
    bench.table.handle_done(T0, id);
    for ino in 1..=5 {
        bench.granted(A, names(ino));
    }
}

#[test]
fn what_was_ready_before_it_was_extended_is_not_said_to_be() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(2));
    let id = bench.change(A, names(1));
    bench.table.handle_extend(T0, id, &[change(names(2))]);
    let (_, recall) = match &bench.outputs()[..] {
        [LeaseOutput::Recall { holder, recall }] => (*holder, recall.clone()),
        other => panic!("the stale word was put out: {other:?}"),
    };
    bench.acknowledge(B, recall.id);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
}

#[test]
fn names_of_one_key_that_is_named_twice_are_recalled_together() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.granted(B, names(2));
    let of = |key, text: &[&str]| Change {
        key,
        names: text.iter().map(|t| name(t)).collect(),
        writes: false,
        told: false,
    };
    let renames = [of(names(1), &["from"]), of(names(2), &["x"]), of(names(1), &["to"]), change(names(2))];
    bench.table.handle_change(T0, Some(A), &renames);
    let recalls = bench.recalls();
    assert_eq!(recalls[0].1.names, [name("from"), name("to")]);
    assert_eq!(recalls[1].1.names, [], "all of them, for one who said so");
}

#[test]
fn a_later_grant_takes_the_place_of_an_earlier_one() {
    let mut bench = Bench::with(&[A, B]);
    let first = bench.granted(B, names(1)).id;
    let second = bench.granted(B, names(1)).id;
    assert!(first < second);
    assert!(!bench.table.stands(B, first) && bench.table.stands(B, second));
    bench.table.handle_return(T0, B, &[first]);
    bench.table.handle_return(T0, A, &[second]);
    assert_eq!(bench.table.report().holders[1].grants, 1);
    bench.change(A, names(1));
    bench.recall();
    assert!(!bench.table.stands(B, second), "an answer that carries it comes too late");
}

#[test]
fn what_was_returned_is_not_asked_for() {
    let mut bench = Bench::with(&[A, B]);
    let granted = bench.granted(B, names(1));
    bench.table.handle_return(T0, B, &[granted.id]);
    let id = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
}

#[test]
fn a_return_ends_the_waiting_and_not_the_recall() {
    let mut bench = Bench::with(&[A, B]);
    let granted = bench.granted(B, names(1));
    let id = bench.change(A, names(1));
    let (_, recall) = bench.recall();
    bench.table.handle_return(T0, B, &[granted.id]);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
    bench.table.handle_done(T0, id);
    // The acknowledgement that is on its way would end a grant made now.
    assert_eq!(bench.refused(B, names(1)), Refusal::Changing);
    let next = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(next)], "there is nothing to wait for");
    bench.table.handle_done(T0, next);
    bench.acknowledge(B, recall.id);
    bench.granted(B, names(1));
}

#[test]
fn what_never_left_the_server_is_withdrawn_but_not_what_its_holder_may_have() {
    let mut bench = Bench::with(&[A, B]);
    let alone = bench.granted(B, names(1));
    bench.table.handle_withdraw(T0, B, &[alone.id]);
    let id = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
    bench.table.handle_done(T0, id);

    // The first reply was sent; the second call failed after its grant was registered.
    bench.granted(B, names(1));
    let second = bench.granted(B, names(1));
    bench.table.handle_withdraw(T0, B, &[second.id]);
    let id = bench.change(A, names(1));
    assert!(!bench.table.is_ready(id));
    let (_, recall) = bench.recall();
    bench.table.handle_withdraw(T0, B, &[second.id]);
    assert!(!bench.table.is_ready(id));
    bench.acknowledge(B, recall.id);
    assert!(bench.table.is_ready(id));
}

#[test]
fn acknowledgements_that_are_not_owed_do_nothing() {
    let mut bench = Bench::with(&[A, B, C]);
    bench.granted(B, names(1));
    let id = bench.change(A, names(1));
    let (_, recall) = bench.recall();
    bench.acknowledge(C, recall.id);
    bench.acknowledge(Holder(77), recall.id);
    bench.acknowledge(B, RecallId(recall.id.0 + 1));
    assert!(!bench.table.is_ready(id));
    bench.acknowledge(B, recall.id);
    bench.acknowledge(B, recall.id);
    assert_eq!(bench.table.report().counters.acknowledged, 1);
}
