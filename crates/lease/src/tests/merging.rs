//! Holders that write back mmap stores into one file at the same time (docs/decisions/0028).

use super::*;

const DATA: LeaseKey =
    LeaseKey { object: Object { filesystem: 8, ino: 1, birth: 101 }, covers: LeaseScope::Data };

impl Bench {
    fn flush_data(&mut self, by: Holder) -> ChangeId {
        self.table.handle_write_back(self.now, by, &[Change { writes: true, ..change(DATA) }])
    }

    /// Applies a ready write-back of four bytes, from its merge to its end, to the file.
    fn write_back(&mut self, id: ChangeId, held: GrantId, pages: &[u8], file: &mut Vec<u8>) {
        assert!(self.table.is_ready(id));
        let base =
            self.table.merge_base(self.now, id, (held, LeaseScope::Data), (0, 4)).expect("it is known");
        let written = base.merge(0, pages, file);
        let before = self.table.needs_before_image(id).then_some(file.as_slice());
        self.table.handle_wrote_back(id, WroteBack { offset: 0, before, pages, written: &written });
        self.table.handle_done(self.now, id);
        *file = written;
    }
}

/// A syncs; B has stored too, so B's pages go first.
#[test]
fn two_holders_that_store_into_one_page_both_keep_their_stores() {
    let mut bench = Bench::with(&[A, B]);
    let (a, b) = (bench.granted(A, DATA).id, bench.granted(B, DATA).id);
    let mut file = b"....".to_vec();
    let first = bench.flush_data(A);
    let (_, of_b) = bench.recall();
    assert!(!bench.table.is_ready(first));
    let pressed = bench.flush_data(B);
    let (_, of_a) = bench.recall();
    bench.write_back(pressed, b, b"...b", &mut file);
    assert_eq!(file, b"...b");
    bench.acknowledge(B, of_b.id);
    bench.write_back(first, a, b"a...", &mut file);
    assert_eq!(file, b"a..b");
    // A stores once more before its kernel drops the page, which has no bytes of B.
    let again = bench.flush_data(A);
    bench.write_back(again, a, b"aa..", &mut file);
    assert_eq!(file, b"aa.b");
    bench.acknowledge(A, of_a.id);
    let late = bench.flush_data(A);
    assert_eq!(
        bench.table.merge_base(bench.now, late, (a, LeaseScope::Data), (0, 4)),
        None,
        "it was given back"
    );
}

#[test]
fn three_holders_that_store_into_one_page_all_keep_their_stores() {
    let mut bench = Bench::with(&[A, B, C]);
    let held: Vec<GrantId> = [A, B, C].map(|holder| bench.granted(holder, DATA).id).to_vec();
    let mut file = b"....".to_vec();
    let first = bench.flush_data(A);
    let others = [bench.flush_data(B), bench.flush_data(C)];
    let recalls = bench.recalls();
    assert_eq!(recalls.len(), 3);
    for (nth, pages) in [(1, b".b.."), (0, b"..c.")] {
        bench.write_back(others[nth], held[nth + 1], pages, &mut file);
    }
    for (holder, recall) in recalls.iter().filter(|(holder, _)| *holder != A) {
        bench.acknowledge(*holder, recall.id);
    }
    bench.write_back(first, held[0], b"a...", &mut file);
    assert_eq!(file, b"abc.");
}

#[test]
fn own_truncate_or_punch_discards_merge_base_of_its_range() {
    let mut bench = Bench::with(&[A, B]);
    let (a, b) = (bench.granted(A, DATA).id, bench.granted(B, DATA).id);
    let mut file = b"1111".to_vec();
    let first = bench.flush_data(A);
    let pressed = bench.flush_data(B);
    bench.write_back(pressed, b, b"2222", &mut file);
    // A's kernel has punched a hole, and has stored 1 there.
    bench.table.handle_changed(first, (0, 2));
    file[..2].copy_from_slice(b"00");
    for (holder, recall) in bench.recalls() {
        if holder == B {
            bench.acknowledge(B, recall.id);
        }
    }
    bench.write_back(first, a, b"1111", &mut file);
    assert_eq!(file, b"1122");
}

#[test]
fn host_change_during_write_back_prevents_merge() {
    let mut bench = Bench::with(&[A, B]);
    let (a, b) = (bench.granted(A, DATA).id, bench.granted(B, DATA).id);
    let mut file = b"....".to_vec();
    let first = bench.flush_data(A);
    let pressed = bench.flush_data(B);
    bench.write_back(pressed, b, b"...b", &mut file);
    let host = bench.table.handle_change(bench.now, None, &[change(DATA)]);
    bench.table.handle_done(bench.now, host);
    assert_eq!(bench.table.merge_base(bench.now, first, (a, LeaseScope::Data), (0, 4)), None);
}

/// Likewise if the server could not read the earlier content.
#[test]
fn write_back_without_reported_before_image_prevents_merge() {
    let mut bench = Bench::with(&[A, B]);
    let a = bench.granted(A, DATA).id;
    bench.granted(B, DATA);
    let first = bench.flush_data(A);
    let pressed = bench.flush_data(B);
    let wrote = WroteBack { offset: 0, before: None, pages: b"b", written: b"b" };
    bench.table.handle_wrote_back(pressed, wrote);
    bench.table.handle_done(bench.now, pressed);
    assert_eq!(bench.table.merge_base(bench.now, first, (a, LeaseScope::Data), (0, 4)), None);
}

/// The disk was full: the first attempt wrote nothing, and the effect of the second is unknown.
#[test]
fn write_back_with_one_unreported_attempt_prevents_merge() {
    for attempts in [[Some(&[][..]), None], [None, Some(&[][..])]] {
        let mut bench = Bench::with(&[A, B]);
        let a = bench.granted(A, DATA).id;
        bench.granted(B, DATA);
        let first = bench.flush_data(A);
        let pressed = bench.flush_data(B);
        for before in attempts {
            let pages: &[u8] = if before.is_none() { b"b" } else { b"" };
            let wrote = WroteBack { offset: 0, before, pages, written: pages };
            bench.table.handle_wrote_back(pressed, wrote);
        }
        bench.table.handle_done(bench.now, pressed);
        assert_eq!(bench.table.merge_base(bench.now, first, (a, LeaseScope::Data), (0, 4)), None);
    }
}

#[test]
fn merge_memory_is_bounded_by_dropping_largest_holders_base() {
    let mut bench = Bench::of(LeaseConfig { merge_bytes: 10_000, ..LeaseConfig::default() }, &[A, B, C]);
    let (a, c) = (bench.granted(A, DATA).id, bench.granted(C, DATA).id);
    bench.granted(B, DATA);
    let (first, last) = (bench.flush_data(A), bench.flush_data(C));
    let pressed = bench.flush_data(B);
    let (before, pages) = (vec![0; 4096], vec![1; 4096]);
    let wrote = |offset| WroteBack { offset, before: Some(&before), pages: &pages, written: &pages };
    bench.table.handle_wrote_back(pressed, wrote(0));
    bench.table.handle_wrote_back(pressed, wrote(4096));
    let known = [(first, a), (last, c)]
        .map(|(id, held)| bench.table.merge_base(bench.now, id, (held, LeaseScope::Data), (0, 4)).is_some());
    assert_eq!(known.iter().filter(|known| **known).count(), 1, "{known:?}");
    bench.table.handle_goodbye(bench.now, A);
    bench.table.handle_goodbye(bench.now, C);
    assert_eq!(bench.table.report().merge_bytes, 0);
}
