//! Deadlocks between write-backs.

use super::*;

fn data(ino: u64) -> LeaseKey {
    LeaseKey { object: object(ino), covers: LeaseScope::Data }
}

/// A file of a directory.
fn file(ino: u64, dir: u64) -> [Change; 2] {
    [Change { writes: true, ..change(data(ino)) }, change(names(dir))]
}

impl Bench {
    fn flush_of(&mut self, by: Holder, changes: &[Change]) -> ChangeId {
        self.table.handle_write_back(self.now, by, changes)
    }

    /// The holder whose directory lease is recalled.
    fn asked(&mut self) -> (Holder, RecallId) {
        let (holder, recall) = self.recall();
        (holder, recall.id)
    }
}

/// Each holder has stored into an mmap of a file in one directory, and returns the directory lease after its
/// write-back.
#[test]
fn write_backs_in_one_directory_break_deadlock_before_holders_are_suspect() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, names(9));
    bench.granted(B, names(9));
    let one = bench.flush_of(A, &file(1, 9));
    let (asked, of_b) = bench.asked();
    assert_eq!(asked, B);
    bench.now = at_ms(100);
    let two = bench.flush_of(B, &file(2, 9));
    let (asked, of_a) = bench.asked();
    assert_eq!(asked, A);
    assert!(!bench.table.is_ready(one) && !bench.table.is_ready(two));
    assert_eq!(bench.timeout(), (at_ms(500), LeaseReason::Deadlock));
    assert_eq!(
        bench.go_to(at_ms(500)),
        [LeaseOutput::Ready(one)],
        "the client recalled first has dropped its names"
    );
    assert!(!bench.table.is_ready(two), "the other may believe what this changes");
    bench.table.handle_done(bench.now, one);
    bench.acknowledge(A, of_a);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(two)]);
    bench.table.handle_done(bench.now, two);
    bench.acknowledge(B, of_b);
    for holder in [A, B] {
        bench.table.handle_goodbye(bench.now, holder);
    }
    bench.outputs();
    bench.go_to(at_ms(20_000));
    bench.assert_empty();
}

#[test]
fn write_back_chain_without_cycle_keeps_waiting() {
    let mut bench = Bench::with(&[A, B, C]);
    bench.granted(B, names(9));
    bench.granted(C, names(8));
    let one = bench.flush_of(A, &file(1, 9));
    let (_, of_b) = bench.asked();
    let two = bench.flush_of(B, &file(2, 8));
    let (_, of_c) = bench.asked();
    assert_eq!(bench.go_to(at_ms(1_999)), []);
    bench.acknowledge(C, of_c);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(two)]);
    bench.acknowledge(B, of_b);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(one)]);
}

/// Both owe and both wait, but for unrelated recalls: the apparent cycle ends by itself.
#[test]
fn recall_acknowledged_early_is_not_treated_as_deadlock() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, names(8));
    bench.granted(B, names(9));
    let one = bench.flush_of(A, &file(1, 9));
    let (_, of_b) = bench.asked();
    let two = bench.flush_of(B, &file(2, 8));
    let (_, of_a) = bench.asked();
    assert_eq!(bench.go_to(at_ms(499)), []);
    bench.acknowledge(B, of_b);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(one)]);
    assert_eq!(bench.go_to(at_ms(1_999)), [], "no request goes before the recall of A");
    bench.acknowledge(A, of_a);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(two)]);
}

#[test]
fn deadlock_of_three_holders_is_broken_and_all_finish() {
    let mut bench = Bench::with(&[A, B, C]);
    let mut asked = Vec::new();
    let mut flushes = Vec::new();
    // Each writes a file in a directory that the next one has a lease on.
    for (dir, holder) in [(1, A), (2, B), (3, C)] {
        bench.granted(holder, names(dir));
    }
    for (ino, dir, by) in [(11, 2, A), (12, 3, B), (13, 1, C)] {
        flushes.push(bench.flush_of(by, &file(ino, dir)));
        asked.push(bench.asked());
    }
    let outputs = bench.go_to(at_ms(500));
    let [LeaseOutput::Ready(mut first)] = outputs[..] else { panic!("{outputs:?}") };
    for _ in 0..3 {
        let at = flushes.iter().position(|flush| *flush == first).unwrap();
        bench.table.handle_done(bench.now, first);
        let by = [A, B, C][at];
        let (holder, recall) = asked[(at + 2) % 3];
        assert_eq!(holder, by, "what it owes waited for that");
        bench.acknowledge(holder, recall);
        match bench.outputs()[..] {
            [LeaseOutput::Ready(next)] => first = next,
            ref other => assert_eq!((at, other), (at, &[][..])),
        }
    }
    assert_eq!(bench.go_to(at_ms(1_999)), []);
}

/// The write-backs are queued behind a plain write, whose holder waits in the queue of another write.
#[test]
fn deadlock_through_queued_write_backs_is_broken() {
    let mut bench = Bench::with(&[A, B, C]);
    bench.granted(B, names(9));
    bench.granted(C, names(8));
    let one = bench.table.handle_change(bench.now, Some(A), &file(1, 9));
    let (_, of_b) = bench.asked();
    let two = bench.table.handle_change(bench.now, Some(A), &file(2, 8));
    let (_, of_c) = bench.asked();
    let of = |ino| [Change { writes: true, ..change(data(ino)) }];
    let (behind_two, behind_one) = (bench.flush_of(B, &of(2)), bench.flush_of(C, &of(1)));
    let outputs = bench.go_to(at_ms(500));
    let [LeaseOutput::Ready(first)] = outputs[..] else { panic!("{outputs:?}") };
    assert!([behind_one, behind_two].contains(&first));
    bench.table.handle_done(bench.now, first);
    let (owes, recall, writer) = if first == behind_two { (B, of_b, one) } else { (C, of_c, two) };
    bench.acknowledge(owes, recall);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(writer)]);
}

/// The directory lease may be the only cover of another holder's pages of that file.
#[test]
fn write_back_bypassing_acknowledgement_ends_exclusive_history_of_its_holder() {
    let mut bench = Bench::with(&[A, B]);
    let held = bench.granted(B, names(9)).id;
    bench.granted(A, names(9));
    let one = bench.flush_of(A, &file(1, 9));
    let same = bench.flush_of(B, &file(2, 9));
    bench.recalls();
    assert!(bench.held_exclusively_since(same, (held, LeaseScope::Directory)));
    assert_eq!(bench.go_to(at_ms(500)), [LeaseOutput::Ready(one)]);
    bench.table.handle_done(bench.now, one);
    assert!(!bench.held_exclusively_since(same, (held, LeaseScope::Directory)), "it may be of the same page");
}

/// The directory lease that was bypassed may be the only cover of another holder's pages of the file.
#[test]
fn sync_waits_for_directory_recalls_that_write_back_bypassed() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, names(9));
    bench.granted(B, names(9));
    let one = bench.flush_of(A, &file(1, 9));
    let (_, of_b) = bench.asked();
    let two = bench.flush_of(B, &file(2, 9));
    let (_, of_a) = bench.asked();
    assert_eq!(bench.go_to(at_ms(500)), [LeaseOutput::Ready(one)]);
    bench.table.handle_done(bench.now, one);
    let sync = bench.table.handle_sync_barrier(bench.now, A, data(1));
    let own = bench.table.handle_sync_barrier(bench.now, B, data(1));
    assert!(!bench.table.is_ready(sync), "B may read what was there before");
    assert!(bench.table.is_ready(own), "no change waits for its own client");
    bench.acknowledge(A, of_a);
    assert!(bench.table.is_ready(two));
    bench.table.handle_done(bench.now, two);
    bench.acknowledge(B, of_b);
    assert!(bench.table.is_ready(sync));
    for sync in [sync, own] {
        bench.table.handle_done(bench.now, sync);
    }
    let later = bench.table.handle_sync_barrier(bench.now, A, data(1));
    assert!(bench.table.is_ready(later));
    bench.table.handle_done(bench.now, later);
    for holder in [A, B] {
        bench.table.handle_goodbye(bench.now, holder);
    }
    bench.outputs();
    bench.go_to(at_ms(20_000));
    bench.assert_empty();
}
