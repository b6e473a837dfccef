//! Rules 1 and 2: a grant is registered before the read, a key is changed after the recall.

use super::*;

#[test]
fn change_recalls_other_holders_and_waits_for_all_acknowledgements() {
    let mut bench = Bench::with(&[A, B, C]);
    for holder in [A, B, C] {
        bench.granted(holder, names(1));
    }
    let names_changed = vec![name("new")];
    let id = bench.table.handle_change(
        T0,
        Some(A),
        &[Change { key: names(1), names: names_changed.clone(), writes: false, can_update: false }],
    );
    let recalls = bench.recalls();
    assert_eq!(recalls.len(), 2, "not the client that changes it: {recalls:?}");
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
fn change_without_other_holders_is_ready_at_once() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, names(1));
    bench.granted(B, inode(1));
    let id = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
}

#[test]
fn host_change_recalls_every_holder() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, inode(1));
    bench.granted(B, inode(1));
    let id = bench.table.handle_change(T0, None, &[change(inode(1))]);
    assert_eq!(bench.recalls().len(), 2);
    assert!(!bench.table.is_ready(id));
}

#[test]
fn no_grant_is_given_during_change_even_to_its_initiator() {
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
fn first_of_two_overlapping_changes_to_end_allows_no_grant() {
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
fn no_grant_is_given_before_acknowledgement_even_after_change_ends() {
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
fn concurrent_changes_of_one_key_share_one_recall() {
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
fn change_does_not_wait_for_recall_owed_by_its_own_initiator() {
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
fn extended_change_is_ready_after_added_keys_are_recalled() {
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
fn ready_output_is_withheld_after_change_is_extended() {
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
fn names_of_key_listed_twice_are_sent_in_one_recall() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.granted(B, names(2));
    let of = |key, text: &[&str]| Change {
        key,
        names: text.iter().map(|t| name(t)).collect(),
        writes: false,
        can_update: false,
    };
    let renames = [of(names(1), &["from"]), of(names(2), &["x"]), of(names(1), &["to"]), change(names(2))];
    bench.table.handle_change(T0, Some(A), &renames);
    let recalls = bench.recalls();
    assert_eq!(recalls[0].1.names, [name("from"), name("to")]);
    assert_eq!(recalls[1].1.names, [], "all of them, for a client that asked so");
}

#[test]
fn later_grant_on_key_replaces_earlier_grant() {
    let mut bench = Bench::with(&[A, B]);
    let first = bench.granted(B, names(1)).id;
    let second = bench.granted(B, names(1)).id;
    assert!(first < second);
    assert!(!bench.table.is_live(B, first) && bench.table.is_live(B, second));
    bench.table.handle_return(T0, B, &[first]);
    bench.table.handle_return(T0, A, &[second]);
    assert_eq!(bench.table.report().holders[1].grants, 1);
    bench.change(A, names(1));
    bench.recall();
    assert!(!bench.table.is_live(B, second), "an answer that carries it comes too late");
}

#[test]
fn change_does_not_recall_returned_grant() {
    let mut bench = Bench::with(&[A, B]);
    let granted = bench.granted(B, names(1));
    bench.table.handle_return(T0, B, &[granted.id]);
    let id = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
}

#[test]
fn return_unblocks_change_but_recall_still_needs_acknowledgement() {
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
fn unsent_grant_is_withdrawn_unless_it_replaced_a_sent_one() {
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
fn unexpected_acknowledgement_has_no_effect() {
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
