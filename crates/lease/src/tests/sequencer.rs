//! Order of recalls and replies, and blocked calls.

use super::*;
use crate::{LeaseSequencer, ParkResult, ReadGrant, SequencerOutput};
use nigh_types::{Grant, Term};

type Said = SequencerOutput<&'static str>;

/// With A and B.
fn sequencer() -> LeaseSequencer<&'static str> {
    let mut sequencer = LeaseSequencer::new(LeaseConfig::default());
    for holder in [A, B] {
        sequencer.table_mut().handle_attach(T0, holder, false);
    }
    sequencer
}

fn data(ino: u64) -> LeaseKey {
    LeaseKey { object: object(ino), covers: LeaseScope::Data }
}

fn grant(granted: Granted, (holder, key): (Holder, LeaseKey)) -> Grant {
    let (term, node) = (Term::Session, node(holder, key));
    let Granted { id, mode, shared, .. } = granted;
    Grant { id, node, covers: key.covers, mode, term, recallable: true, shared }
}

fn register(sequencer: &mut LeaseSequencer<&'static str>, seat: (Holder, LeaseKey)) -> Grant {
    let granted = sequencer.handle_grant(T0, reading(seat.0, seat.1)).expect("nothing speaks against it");
    grant(granted, seat)
}

fn said(sequencer: &mut LeaseSequencer<&'static str>) -> Vec<Said> {
    let next = || match sequencer.poll_output() {
        SequencerOutput::Timeout(..) => None,
        output => Some(output),
    };
    std::iter::from_fn(next).collect()
}

fn writes(key: LeaseKey) -> Change {
    Change { writes: true, ..change(key) }
}

#[test]
fn reply_with_data_grant_is_queued_before_its_recall() {
    let mut sequencer = sequencer();
    let seat = (A, data(1));
    let ours = register(&mut sequencer, seat);
    sequencer.table_mut().handle_change(T0, Some(B), &[writes(seat.1)]);
    assert_eq!(said(&mut sequencer), [], "the recall waits for the answer");
    sequencer.handle_reply(T0, A, vec![ours]);
    let [SequencerOutput::Reply { holder: A, grants, same: true }, SequencerOutput::Recall { holder: A, .. }] =
        &said(&mut sequencer)[..]
    else {
        panic!()
    };
    assert_eq!(grants[..], [ours]);
}

#[test]
fn reply_carries_no_directory_grant_after_its_recall_was_sent() {
    let mut sequencer = sequencer();
    let seat = (A, names(1));
    let ours = register(&mut sequencer, seat);
    sequencer.table_mut().handle_change(T0, Some(B), &[change(seat.1)]);
    assert!(matches!(said(&mut sequencer)[..], [SequencerOutput::Recall { holder: A, .. }]));
    sequencer.handle_reply(T0, A, vec![ours]);
    assert_eq!(said(&mut sequencer), [SequencerOutput::Reply { holder: A, grants: vec![], same: false }]);
}

#[test]
fn parked_call_resumes_after_last_acknowledgement() {
    let mut sequencer = sequencer();
    let seat = (A, names(1));
    let ours = register(&mut sequencer, seat);
    sequencer.handle_reply(T0, A, vec![ours]);
    said(&mut sequencer);
    let change = sequencer.table_mut().handle_change(T0, Some(B), &[change(seat.1)]);
    let [SequencerOutput::Recall { recall, .. }] = &said(&mut sequencer)[..] else { panic!() };
    assert_eq!(sequencer.park(change, "unwanted", |_| false), ParkResult::Cancelled("unwanted"));
    assert_eq!(sequencer.park(change, "create", |_| true), ParkResult::Parked);
    assert_eq!(sequencer.parked().collect::<Vec<_>>(), [(change, &"create")]);
    assert_eq!(sequencer.take_parked(|call| *call == "unlink"), [""; 0]);
    sequencer.table_mut().handle_acknowledge(T0, A, recall.id);
    assert_eq!(said(&mut sequencer), [SequencerOutput::Ready("create")]);
    assert_eq!(
        sequencer.park(change, "again", |_| false),
        ParkResult::Ready("again"),
        "no holder is waited for"
    );
    assert_eq!(sequencer.take_parked(|_| true), [""; 0]);
}

#[test]
fn unclaimed_grant_of_waiting_read_is_withdrawn() {
    for takes in [true, false] {
        let mut sequencer = sequencer();
        let key = data(1);
        let writing = sequencer.table_mut().handle_change(T0, Some(B), &[writes(key)]);
        let ReadGrant::Waits(reader) = sequencer.handle_read(T0, reading(A, key)) else { panic!() };
        assert_eq!(sequencer.park(reader, "read", |_| true), ParkResult::Parked);
        sequencer.handle_done(T0, writing);
        assert_eq!(said(&mut sequencer), [SequencerOutput::Ready("read")]);
        let granted = takes.then(|| sequencer.take_granted(reader).unwrap());
        sequencer.handle_done(T0, reader);
        said(&mut sequencer);
        assert_eq!(sequencer.report().holders[0].grants, u64::from(takes));
        if let Some(granted) = granted {
            sequencer.handle_reply(T0, A, vec![grant(granted, (A, key))]);
            assert!(matches!(said(&mut sequencer)[..], [SequencerOutput::Reply { same: true, .. }]));
        }
        // No reply delays a recall any more.
        sequencer.handle_recall(T0, key);
        assert_eq!(said(&mut sequencer).len(), usize::from(takes));
    }
}
