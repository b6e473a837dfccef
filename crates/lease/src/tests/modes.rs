//! Write grants: each excludes the grants of all other holders on its key.

use super::*;

const SCOPES: [LeaseScope; 3] = [LeaseScope::Directory, LeaseScope::Attributes, LeaseScope::Data];

fn keys() -> [LeaseKey; 3] {
    SCOPES.map(|covers| LeaseKey { covers, ..names(1) })
}

impl Bench {
    fn grant_to_write(&mut self, holder: Holder, key: LeaseKey) -> Option<Granted> {
        let request = GrantRequest { mode: Mode::Write, ..reading(holder, key) };
        self.table.handle_grant(self.now, request)
    }
}

#[test]
fn grant_has_requested_mode() {
    let mut bench = Bench::with(&[A]);
    for key in keys() {
        assert_eq!(bench.granted(A, key).mode, Mode::Read);
        assert_eq!(bench.grant_to_write(A, key).unwrap().mode, Mode::Write);
    }
    assert_eq!(bench.outputs(), [], "one holder excludes only others");
}

#[test]
fn read_request_recalls_write_grant_of_other_holder_and_is_refused_until_acknowledged() {
    for key in keys() {
        let mut bench = Bench::with(&[A, B]);
        bench.grant_to_write(A, key).unwrap();
        assert_eq!(bench.refused(B, key), Refusal::Exclusive);
        let (asked, recall) = bench.recall();
        assert_eq!((asked, recall.node, recall.covers), (A, node(A, key), key.covers));
        bench.refused(B, key);
        assert_eq!(bench.outputs(), [], "the grant is recalled once");
        bench.acknowledge(A, recall.id);
        bench.granted(B, key);
        bench.granted(A, key);
        assert_eq!(bench.outputs(), []);
    }
}

#[test]
fn write_request_recalls_all_grants_of_other_holders_and_is_refused_until_all_are_acknowledged() {
    for key in keys() {
        let mut bench = Bench::with(&[A, B, C]);
        for holder in [A, B, C] {
            bench.granted(holder, key);
        }
        assert_eq!(bench.grant_to_write(C, key), None);
        let recalls = bench.recalls();
        assert_eq!(recalls.iter().map(|(holder, _)| *holder).collect::<Vec<_>>(), [A, B]);
        for (holder, recall) in recalls {
            assert_eq!(bench.grant_to_write(C, key), None);
            bench.acknowledge(holder, recall.id);
        }
        bench.grant_to_write(C, key).unwrap();
        assert_eq!(bench.outputs(), []);
    }
}

#[test]
fn write_grants_on_different_keys_do_not_conflict() {
    let mut bench = Bench::with(&[A, B]);
    bench.grant_to_write(A, names(1)).unwrap();
    bench.grant_to_write(B, names(2)).unwrap();
    bench.granted(B, inode(1));
    assert_eq!(bench.outputs(), []);
}

#[test]
fn read_request_of_write_holder_keeps_its_write_grant() {
    for key in keys() {
        let mut bench = Bench::with(&[A, B]);
        bench.grant_to_write(A, key).unwrap();
        assert_eq!(bench.granted(A, key).mode, Mode::Read, "as the call asked");
        assert_eq!(bench.refused(B, key), Refusal::Exclusive);
        assert_eq!(bench.recall().0, A);
    }
}

#[test]
fn returned_or_fenced_write_grant_excludes_no_longer() {
    for key in keys() {
        let mut bench = Bench::with(&[A, B]);
        let granted = bench.grant_to_write(A, key).unwrap();
        bench.table.handle_return(bench.now, A, &[granted.id]);
        bench.granted(B, key);
        assert_eq!(bench.outputs(), []);

        let mut bench = Bench::with(&[A, B]);
        bench.grant_to_write(A, key).unwrap();
        assert_eq!(bench.refused(B, key), Refusal::Exclusive);
        // A is silent.
        let term = LeaseConfig::default().lapse();
        assert!(bench.go_to(at_ms(8_000)).contains(&LeaseOutput::Suspect(A)));
        assert!(bench.heard(B));
        bench.go_to(T0.after(Span(term.0 - 1)));
        bench.refused(B, key);
        assert!(bench.go_to(T0.after(term)).contains(&LeaseOutput::Fenced(A)));
        bench.granted(B, key);
    }
}

#[test]
fn data_read_is_refused_while_recalled_write_grant_is_owed_but_not_after_its_return() {
    let mut bench = Bench::with(&[A, B]);
    let key = LeaseKey { covers: LeaseScope::Data, ..names(1) };
    let granted = bench.grant_to_write(A, key).unwrap();
    assert_eq!(bench.refused(B, key), Refusal::Exclusive);
    assert_eq!(
        bench.table.handle_wait(bench.now, reading(B, key)),
        None,
        "the read is answered without a grant"
    );
    let (_, recall) = bench.recall();
    bench.table.handle_return(bench.now, A, &[granted.id]);
    bench.granted(B, key);
    bench.acknowledge(A, recall.id);
}

#[test]
fn write_grant_is_recalled_where_read_grant_is_updated() {
    for mode in [Mode::Read, Mode::Write] {
        let mut bench = Bench::with(&[A, B]);
        bench.table.handle_takes_updates(T0, A);
        bench.table.handle_grant(T0, GrantRequest { mode, ..reading(A, inode(1)) }).unwrap();
        let told = Change { can_update: true, ..change(inode(1)) };
        let id = bench.table.handle_change(T0, Some(B), &[told]);
        let outputs = bench.outputs();
        let is_recalled = matches!(outputs[..], [LeaseOutput::Recall { holder: A, .. }]);
        assert_eq!(is_recalled, mode == Mode::Write, "{outputs:?}");
        assert!(!bench.table.is_ready(id));
    }
}

#[test]
fn own_change_leaves_write_grant_and_change_of_other_holder_recalls_it() {
    for key in keys() {
        let mut bench = Bench::with(&[A, B]);
        let granted = bench.grant_to_write(A, key).unwrap();
        bench.whole_change(Some(A), key);
        assert!(bench.table.is_live(A, granted.id));
        let id = bench.change(B, key);
        let (asked, recall) = bench.recall();
        assert_eq!((asked, bench.table.is_ready(id)), (A, false));
        bench.acknowledge(A, recall.id);
        assert!(bench.table.is_ready(id));
    }
}
