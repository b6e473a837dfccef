//! Whether another holder may have changed the file whose pages a writer's kernel has (rule 12).

use super::*;

fn data(ino: u64) -> LeaseKey {
    LeaseKey { object: object(ino), covers: LeaseScope::Data }
}

/// Makes a change by A; returns whether only A has changed that data since the grant.
fn held_exclusively_since(bench: &mut Bench, key: LeaseKey, since: GrantId) -> bool {
    let change = bench.change(A, key);
    let unbroken = bench.held_exclusively_since(change, (since, key.covers));
    bench.table.handle_done(bench.now, change);
    bench.outputs();
    unbroken
}

#[test]
fn exclusive_history_continues_over_replaced_grants_until_one_ends() {
    let mut bench = Bench::with(&[A, B]);
    let first = bench.granted(A, data(1)).id;
    let later = bench.granted(A, data(1)).id;
    assert!(
        held_exclusively_since(&mut bench, data(1), first)
            && held_exclusively_since(&mut bench, data(1), later)
    );
    assert!(!held_exclusively_since(&mut bench, inode(1), first), "it is on something else");
    bench.whole_change(Some(B), data(1));
    assert!(!held_exclusively_since(&mut bench, data(1), later), "it was given back");
    let anew = bench.granted(A, data(1)).id;
    assert!(held_exclusively_since(&mut bench, data(1), anew));
    assert!(!held_exclusively_since(&mut bench, data(1), later), "there was a gap");
}

#[test]
fn recalled_grant_keeps_exclusive_history_until_it_ends() {
    let mut bench = Bench::with(&[A, B]);
    bench.table.handle_limit(bench.now, A, Span::from_secs(5));
    let held = bench.granted(A, data(1)).id;
    let waits = bench.change(B, data(1));
    let (_, recall) = bench.recall();
    assert!(held_exclusively_since(&mut bench, data(1), held), "the requester has not changed it yet");
    let end = T0.after(Span::from_millis(5_500));
    bench.go_to(end);
    assert!(bench.table.is_ready(waits) && !held_exclusively_since(&mut bench, data(1), held));
    bench.acknowledge(A, recall.id);
    bench.table.handle_done(bench.now, waits);
    assert!(!held_exclusively_since(&mut bench, data(1), held));
}

#[test]
fn grant_after_fence_does_not_restore_exclusive_history() {
    let mut bench = Bench::with(&[A, B]);
    let held = bench.granted(A, data(1)).id;
    while bench.table.is_known(A) {
        let next = bench.now.after(Span::from_secs(1));
        bench.go_to(next);
        assert!(bench.heard(B));
    }
    bench.table.handle_attach(bench.now, A, false);
    assert!(!held_exclusively_since(&mut bench, data(1), held));
    let anew = bench.granted(A, data(1)).id;
    assert!(
        held_exclusively_since(&mut bench, data(1), anew)
            && !held_exclusively_since(&mut bench, data(1), held)
    );
}

/// The disk's change waits for no acknowledgement.
#[test]
fn host_change_ends_exclusive_history_until_next_grant() {
    for asked_before in [false, true] {
        let mut bench = Bench::with(&[A, B]);
        let held = bench.granted(A, data(1)).id;
        let waits = asked_before.then(|| bench.change(B, data(1)));
        let host = bench.table.handle_change(bench.now, None, &[change(data(1))]);
        bench.table.handle_done(bench.now, host);
        let (_, recall) = bench.recall();
        assert!(!held_exclusively_since(&mut bench, data(1), held), "asked before: {asked_before}");
        bench.acknowledge(A, recall.id);
        waits.into_iter().for_each(|waits| bench.table.handle_done(bench.now, waits));
        bench.outputs();
        let anew = bench.granted(A, data(1)).id;
        assert!(held_exclusively_since(&mut bench, data(1), anew));
    }
}

#[test]
fn possibly_missed_host_change_ends_exclusive_history() {
    let mut bench = Bench::with(&[A]);
    let held = bench.granted(A, data(1)).id;
    assert_eq!(bench.table.handle_missed(bench.now, 8, held, (None, 10)), None);
    bench.recall();
    assert!(!held_exclusively_since(&mut bench, data(1), held));
}

/// The write-back goes before the change of the recalling holder, which is recalled too and has not acknowledged
/// either.
#[test]
fn write_back_by_recalled_holder_ends_exclusive_history_of_recaller() {
    let mut bench = Bench::with(&[A, B]);
    let held = bench.granted(A, data(1)).id;
    bench.granted(B, data(1));
    let write = Change { writes: true, ..change(data(1)) };
    let asks = bench.table.handle_write_back(bench.now, A, std::slice::from_ref(&write));
    bench.outputs();
    assert!(bench.held_exclusively_since(asks, (held, LeaseScope::Data)));
    let flush = bench.table.handle_write_back(bench.now, B, &[write]);
    assert!(bench.table.is_ready(flush));
    bench.table.handle_done(bench.now, flush);
    assert!(!bench.held_exclusively_since(asks, (held, LeaseScope::Data)));
}

/// The directory lease may be the only cover of another holder's pages of that file.
#[test]
fn write_back_ends_exclusive_history_of_holder_recalled_for_names() {
    let mut bench = Bench::with(&[A, B, C]);
    let held = bench.granted(A, names(9)).id;
    bench.granted(B, data(1));
    let write = [Change { writes: true, ..change(data(1)) }, change(names(9))];
    bench.table.handle_change(bench.now, Some(C), &write);
    let first = bench.table.handle_write_back(bench.now, B, &write);
    assert!(bench.table.is_ready(first), "B is asked for that data");
    let second = bench.table.handle_write_back(bench.now, A, &write);
    assert!(bench.held_exclusively_since(second, (held, LeaseScope::Directory)), "it is not changed yet");
    bench.table.handle_done(bench.now, first);
    assert!(!bench.held_exclusively_since(second, (held, LeaseScope::Directory)));
}
