//! The write queue of a file's data, and reads that wait in it.

use super::*;

fn data(ino: u64) -> LeaseKey {
    LeaseKey { object: object(ino), covers: LeaseScope::Data }
}

fn write(key: LeaseKey) -> Change {
    Change { key, names: Vec::new(), writes: true, can_update: false }
}

impl Bench {
    fn write(&mut self, by: Holder, key: LeaseKey) -> ChangeId {
        self.table.handle_change(self.now, Some(by), &[write(key)])
    }

    fn flush(&mut self, by: Holder, key: LeaseKey) -> ChangeId {
        self.table.handle_write_back(self.now, by, &[write(key)])
    }

    fn written(&mut self, by: Holder, id: ChangeId, key: LeaseKey) -> Option<Granted> {
        self.table.handle_written(self.now, id, reading(by, key))
    }

    fn wait(&mut self, holder: Holder, key: LeaseKey) -> Option<ChangeId> {
        self.table.handle_wait(self.now, reading(holder, key))
    }

    fn only_recall(&mut self, of: Holder) -> RecallId {
        let recalls = self.recalls();
        assert!(matches!(&recalls[..], [(holder, _)] if *holder == of), "{recalls:?}");
        recalls[0].1.id
    }
}

#[test]
fn writer_is_granted_its_data_before_next_writer_begins() {
    let mut bench = Bench::with(&[A, B]);
    let (one, two) = (bench.write(A, data(1)), bench.write(B, data(1)));
    assert!(bench.table.is_ready(one) && !bench.table.is_ready(two));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(one)]);
    let granted = bench.written(A, one, data(1)).unwrap();
    assert!(!bench.table.is_live(A, granted.id), "and it is recalled at once");
    let recall = bench.only_recall(A);
    assert!(!bench.table.is_ready(two));
    bench.acknowledge(A, recall);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(two)]);
    let granted = bench.written(B, two, data(1)).unwrap();
    assert!(bench.table.is_live(B, granted.id));
}

#[test]
fn writes_of_one_holder_overlap_but_do_not_pass_queued_writers() {
    let mut bench = Bench::with(&[A, B]);
    let (one, two) = (bench.write(A, data(1)), bench.write(A, data(1)));
    assert!(bench.table.is_ready(one) && bench.table.is_ready(two));
    let (other, three) = (bench.write(B, data(1)), bench.write(A, data(1)));
    assert!(!bench.table.is_ready(other) && !bench.table.is_ready(three));
    bench.table.handle_done(T0, one);
    assert!(!bench.table.is_ready(other));
    bench.table.handle_done(T0, two);
    assert!(bench.table.is_ready(other) && !bench.table.is_ready(three));
    bench.table.handle_done(T0, other);
    assert!(bench.table.is_ready(three));
    bench.table.handle_done(T0, three);
    bench.outputs();
    assert!(bench.table.state.keys.is_empty() && bench.table.state.changes.is_empty());
}

#[test]
fn waiting_reader_is_granted_data_between_two_writes() {
    let mut bench = Bench::with(&[A, B, C]);
    assert_eq!(bench.wait(C, data(1)), None, "no writer is active");
    let (one, two) = (bench.write(A, data(1)), bench.write(B, data(1)));
    bench.outputs();
    assert_eq!(bench.refused(C, data(1)), Refusal::Changing);
    let reader = bench.wait(C, data(1)).unwrap();
    assert!(!bench.table.is_ready(reader));
    bench.table.handle_done(T0, one);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(two)], "it came before the reader");
    bench.table.handle_done(T0, two);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(reader)]);
    let granted = bench.table.take_granted(reader).unwrap();
    assert_eq!(bench.table.take_granted(reader), None);
    bench.table.handle_done(T0, reader);
    assert!(bench.table.is_live(C, granted.id));
}

#[test]
fn write_after_read_recalls_reader() {
    let mut bench = Bench::with(&[A, B, C]);
    let one = bench.write(A, data(1));
    let reader = bench.wait(C, data(1)).unwrap();
    let two = bench.write(B, data(1));
    bench.outputs();
    bench.table.handle_done(T0, one);
    let outputs = bench.outputs();
    assert!(
        matches!(&outputs[..], [LeaseOutput::Ready(id), LeaseOutput::Recall { holder: C, .. }] if *id == reader),
        "{outputs:?}"
    );
    assert!(bench.table.take_granted(reader).is_some() && !bench.table.is_ready(two));
}

#[test]
fn own_write_does_not_block_own_read() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, data(1));
    let one = bench.write(A, data(1));
    bench.only_recall(B);
    assert!(!bench.table.is_ready(one));
    bench.granted(A, data(1));
    assert_eq!(bench.refused(B, data(1)), Refusal::Changing);
}

/// The data that it would read could not be granted, and another client's write-back may follow before its kernel has
/// dropped it.
#[test]
fn read_waits_for_acknowledgement_owed_by_its_own_client() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, data(1));
    bench.granted(B, data(1));
    let sync = bench.flush(A, data(1));
    let of_b = bench.only_recall(B);
    // B has stored too, so B's pages go first, and A is recalled.
    let pressed = bench.flush(B, data(1));
    let of_a = bench.only_recall(A);
    bench.table.handle_done(T0, pressed);
    bench.acknowledge(B, of_b);
    assert!(bench.table.is_ready(sync));
    bench.table.handle_done(T0, sync);
    bench.outputs();
    // No change of the file is in progress, and A's kernel has not dropped its pages.
    assert_eq!(bench.refused(A, data(1)), Refusal::Changing);
    let reader = bench.wait(A, data(1)).expect("it waits");
    assert!(!bench.table.is_ready(reader));
    bench.acknowledge(A, of_a);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(reader)]);
    let granted = bench.table.take_granted(reader).expect("it is granted");
    bench.table.handle_done(T0, reader);
    assert!(bench.table.is_live(A, granted.id));
}

/// Another client's write waits for the same acknowledgement.
#[test]
fn read_after_own_acknowledgement_waits_for_write_it_unblocked() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, data(1));
    let write = bench.write(A, data(1));
    let recall = bench.only_recall(B);
    let reader = bench.wait(B, data(1)).unwrap();
    bench.acknowledge(B, recall);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(write)]);
    assert!(!bench.table.is_ready(reader));
    bench.table.handle_done(T0, write);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(reader)]);
    assert!(bench.table.take_granted(reader).is_some());
}

/// That write-back goes before others' changes, and blocks none of them.
#[test]
fn read_waits_for_prioritised_write_back() {
    let mut bench = Bench::with(&[A, B, C]);
    bench.granted(A, data(1));
    bench.granted(B, data(1));
    let write = bench.write(C, data(1));
    let recalls = bench.recalls();
    let pressed = bench.flush(A, data(1));
    bench.table.handle_done(T0, write);
    for (holder, recall) in recalls {
        bench.acknowledge(holder, recall.id);
    }
    bench.outputs();
    let reader = bench.wait(B, data(1)).expect("A's pages are being written");
    bench.table.handle_done(T0, pressed);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(reader)]);
    assert!(bench.table.take_granted(reader).is_some());
}

/// Nor does a read wait for a client that is granted nothing.
#[test]
fn read_stops_waiting_when_its_client_is_suspect_or_gone() {
    for is_gone in [false, true] {
        let mut bench = Bench::with(&[A, B]);
        bench.granted(A, data(1));
        let write = bench.write(B, data(1));
        let recall = bench.only_recall(A);
        bench.table.handle_done(T0, write);
        let reader = bench.wait(A, data(1)).expect("it waits");
        if is_gone {
            bench.table.handle_goodbye(T0, A);
            assert_eq!(bench.outputs(), [LeaseOutput::Ready(reader)]);
        } else {
            assert_eq!(bench.go_to(at_ms(2_000)), [LeaseOutput::Suspect(A), LeaseOutput::Ready(reader)]);
            assert_eq!(bench.wait(A, data(1)), None, "nor does the next");
            bench.acknowledge(A, recall);
        }
        assert_eq!(bench.table.take_granted(reader), None);
        bench.table.handle_done(bench.now, reader);
        bench.outputs();
        assert!(bench.table.state.changes.is_empty() && bench.table.state.recalls.is_empty());
    }
}

#[test]
fn data_key_is_never_contended() {
    let mut bench = Bench::with(&[A, B]);
    for _ in 0..20 {
        bench.granted(A, data(1));
        bench.whole_change(Some(B), data(1));
    }
    bench.granted(A, data(1));
    assert_eq!(bench.table.report().contended, []);
}

#[test]
fn write_back_of_recalled_holder_does_not_wait() {
    let mut bench = Bench::with(&[A, B, C]);
    for holder in [A, B, C] {
        bench.granted(holder, data(1));
    }
    let one = bench.write(A, data(1));
    let recalls = bench.recalls();
    assert_eq!(recalls.len(), 2);
    let flush = bench.flush(B, data(1));
    assert!(bench.table.is_ready(flush) && !bench.table.is_ready(one));
    let outputs = bench.outputs();
    assert!(
        matches!(outputs[..], [LeaseOutput::Recall { holder: A, .. }, LeaseOutput::Ready(_)]),
        "{outputs:?}"
    );
    // A sync waits for all holders that may still see the older data.
    let sync = bench.table.handle_sync_barrier(T0, B, data(1));
    assert!(!bench.table.is_ready(sync));
    bench.table.handle_done(T0, flush);
    for (holder, recall) in recalls {
        bench.acknowledge(holder, recall.id);
    }
    assert!(bench.table.is_ready(one) && !bench.table.is_ready(sync));
    let LeaseOutput::Recall { ref recall, .. } = outputs[0] else { panic!() };
    bench.acknowledge(A, recall.id);
    assert!(bench.table.is_ready(sync));
}

#[test]
fn write_back_waits_like_a_write_until_its_holder_is_recalled() {
    let mut bench = Bench::with(&[A, B, C]);
    let one = bench.write(A, data(1));
    let reader = bench.wait(B, data(1)).unwrap();
    let (two, flush) = (bench.write(C, data(1)), bench.flush(B, data(1)));
    assert!(!bench.table.is_ready(flush));
    bench.outputs();
    // Now B is granted the data that it waited for, and recalled: B's write-back delays that acknowledgement.
    bench.table.handle_done(T0, one);
    assert!(bench.table.take_granted(reader).is_some());
    assert!(bench.table.is_ready(flush) && !bench.table.is_ready(two));
}

#[test]
fn suspect_holder_does_not_delay_reads() {
    let mut bench = Bench::with(&[A, B, C]);
    bench.granted(B, data(1));
    let one = bench.write(A, data(1));
    let reader = bench.wait(C, data(1)).unwrap();
    bench.outputs();
    bench.now = at_ms(2_000);
    bench.table.handle_timeout(bench.now);
    let outputs = bench.outputs();
    assert_eq!(outputs, [LeaseOutput::Suspect(B), LeaseOutput::Ready(reader)]);
    assert_eq!(bench.table.take_granted(reader), None);
    assert_eq!(bench.wait(C, data(1)), None, "nor does the next");
    assert!(!bench.table.is_ready(one));
}

#[test]
fn cancelled_waiting_change_leaves_no_state() {
    let mut bench = Bench::with(&[A, B, C]);
    let (one, two) = (bench.write(A, data(1)), bench.write(B, data(1)));
    let reader = bench.wait(C, data(1)).unwrap();
    for id in [two, reader, one] {
        bench.table.handle_done(T0, id);
    }
    bench.outputs();
    assert!(bench.table.state.keys.is_empty() && bench.table.state.changes.is_empty());
}

#[test]
fn change_leaves_write_queue_when_it_writes_another_object() {
    let mut bench = Bench::with(&[A, B]);
    let one = bench.write(A, data(1));
    bench.table.handle_extend(T0, one, &[write(data(2))]);
    let (two, three) = (bench.write(B, data(1)), bench.write(B, data(2)));
    assert!(bench.table.is_ready(one) && bench.table.is_ready(two) && !bench.table.is_ready(three));
}

/// Its pages are covered by the directory lease. A writer recalls that, and it is returned after the stores are written
/// back.
#[test]
fn write_back_precedes_writer_that_recalled_its_directory_lease() {
    for flushes_first in [false, true] {
        let mut bench = Bench::with(&[A, B, C]);
        let names = names(9);
        let held = bench.granted(A, names).id;
        // Another holder is writing, so that later changes are queued behind it.
        let first = bench.write(C, data(1));
        let early = flushes_first.then(|| bench.flush(A, data(1)));
        let writes =
            [write(data(1)), Change { key: names, names: Vec::new(), writes: false, can_update: false }];
        let writer = bench.table.handle_change(bench.now, Some(B), &writes);
        let recall = bench.only_recall(A);
        bench.table.handle_done(bench.now, first);
        let flush = match early {
            // It was queued before the writer, and ends before it.
            Some(flush) => flush,
            None => bench.table.handle_write_back(bench.now, A, &writes),
        };
        assert!(bench.table.is_ready(flush), "the writer waits for what it belongs to");
        assert!(!bench.table.is_ready(writer));
        if early.is_none() {
            assert!(bench.held_exclusively_since(flush, (held, LeaseScope::Directory)));
        }
        bench.table.handle_done(bench.now, flush);
        assert!(!bench.table.is_ready(writer), "what was asked for is not given back");
        bench.acknowledge(A, recall);
        assert!(bench.table.is_ready(writer));
    }
}

/// It was queued behind the writer before the writer recalled the file.
#[test]
fn queued_write_back_proceeds_when_writer_recalls_its_holder() {
    let mut bench = Bench::with(&[A, B]);
    let names = names(9);
    bench.granted(A, names);
    let writer = bench.write(B, data(1));
    let flush = bench.flush(A, data(1));
    assert!(bench.table.is_ready(writer) && !bench.table.is_ready(flush));
    bench.table.handle_extend(bench.now, writer, &[change(names)]);
    assert!(bench.table.is_ready(flush) && !bench.table.is_ready(writer));
}

/// The disk's change may have followed the write's effect, and the writer's kernel would cache the write's data
/// instead.
#[test]
fn host_change_during_write_recalls_writer_after_its_reply() {
    type Deed = fn(&mut Bench);
    let host: Deed = |bench| bench.whole_change(None, data(1));
    let lost: Deed = |bench| {
        bench.table.handle_missed(bench.now, 8, GrantId(0), (None, 10));
    };
    let unmarked: Deed = |bench| {
        bench.table.handle_watched_object(bench.now, object(1));
        bench.table.handle_unwatched_object(bench.now, object(1));
    };
    for deed in [host, lost, unmarked] {
        let mut bench = Bench::with(&[A]);
        let one = bench.write(A, data(1));
        bench.outputs();
        deed(&mut bench);
        let granted = bench.written(A, one, data(1)).unwrap();
        assert!(!bench.table.is_live(A, granted.id), "the host may have been there after it");
        let recall = bench.only_recall(A);
        bench.acknowledge(A, recall);
        let two = bench.write(A, data(1));
        let granted = bench.written(A, two, data(1)).unwrap();
        assert!(bench.table.is_live(A, granted.id), "that is over");
    }
}

/// More would fill the kernel's queue, and block the acknowledgement that they wait for.
#[test]
fn number_of_waiting_reads_per_holder_is_bounded() {
    let mut bench = Bench::with(&[A, B, C]);
    let writing = bench.write(A, data(1));
    assert!(bench.table.is_ready(writing));
    bench.outputs();
    let waiting: Vec<ChangeId> = (0..32).map(|_| bench.wait(B, data(1)).expect("it waits")).collect();
    assert_eq!(bench.wait(B, data(1)), None);
    let other = bench.wait(C, data(1)).expect("it is another holder's");
    bench.table.handle_done(T0, writing);
    let ready = bench.outputs();
    assert!(waiting.iter().chain([&other]).all(|read| ready.contains(&LeaseOutput::Ready(*read))));
    waiting.into_iter().for_each(|read| bench.table.handle_done(T0, read));
    assert_eq!(bench.wait(B, data(1)), None, "nothing is to be waited for");
}
