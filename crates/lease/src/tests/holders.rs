//! Rules 6 and 7: terms, suspects, lost connections; and grants that end by themselves.

use super::*;
use nigh_types::Origin;

const LAPSE_MS: u64 = 16_500;

#[test]
fn a_silent_holder_is_fenced_after_1_1_terms_and_its_grants_end() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.now = at_ms(10_000);
    assert!(bench.heard(A));
    assert_eq!(bench.timeout(), (at_ms(LAPSE_MS), LeaseReason::Lapse));
    assert_eq!(bench.go_to(at_ms(LAPSE_MS - 1)), []);
    assert_eq!(bench.go_to(at_ms(LAPSE_MS)), [LeaseOutput::Fenced(B)]);
    assert!(!bench.table.is_known(B) && bench.table.is_known(A));
    assert!(!bench.heard(B));
    assert_eq!(bench.refused(B, names(1)), Refusal::Detached);
    let id = bench.change(A, names(1));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
}

#[test]
fn message_from_holder_renews_its_lease() {
    let mut bench = Bench::with(&[A]);
    for round in 1..10 {
        assert_eq!(bench.go_to(at_ms(round * (LAPSE_MS - 1))), []);
        assert!(bench.heard(A));
    }
    assert_eq!(bench.go_to(at_ms(9 * (LAPSE_MS - 1) + LAPSE_MS)), [LeaseOutput::Fenced(A)]);
}

#[test]
fn lapsed_holder_is_fenced_before_its_message_renews() {
    let mut bench = Bench::with(&[A]);
    bench.now = at_ms(LAPSE_MS);
    assert!(!bench.heard(A), "no timeout was handled");
    assert_eq!(bench.outputs(), [LeaseOutput::Fenced(A)]);
}

#[test]
fn overdue_holder_becomes_suspect_then_fenced_before_change_proceeds() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.granted(B, names(2));
    bench.now = at_ms(1_000);
    assert!(bench.heard(A));
    let id = bench.change(A, names(1));
    bench.recall();
    assert_eq!(bench.go_to(at_ms(2_999)), []);
    assert_eq!(bench.timeout(), (at_ms(3_000), LeaseReason::Patience));
    assert!(bench.heard(B), "it is given 2 s");
    assert_eq!(bench.go_to(at_ms(3_000)), [LeaseOutput::Suspect(B)]);
    assert_eq!(bench.refused(B, names(3)), Refusal::Suspect);
    for moment in [5_000, 10_000, 15_000, 19_498] {
        assert_eq!(bench.go_to(at_ms(moment)), []);
        assert!(!bench.heard(B), "what a suspect says renews nothing");
        assert!(bench.heard(A));
    }
    assert!(!bench.table.is_ready(id));
    let ended = bench.go_to(at_ms(2_999 + LAPSE_MS));
    assert_eq!(ended, [LeaseOutput::Fenced(B), LeaseOutput::Ready(id)]);
    let other = bench.change(A, names(2));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(other)]);
}

#[test]
fn suspect_is_trusted_after_acknowledging_every_recall() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.granted(B, names(2));
    let id = bench.table.handle_change(T0, Some(A), &[change(names(1)), change(names(2))]);
    let recalls = bench.recalls();
    assert_eq!(bench.go_to(at_ms(2_000)), [LeaseOutput::Suspect(B)]);
    bench.acknowledge(B, recalls[0].1.id);
    assert_eq!(bench.outputs(), []);
    assert!(!bench.heard(B));
    bench.acknowledge(B, recalls[1].1.id);
    assert_eq!(bench.outputs(), [LeaseOutput::Trusted(B), LeaseOutput::Ready(id)]);
    // Being trusted again does not renew the lease.
    assert_eq!(bench.go_to(at_ms(LAPSE_MS - 1)), []);
    assert!(bench.heard(A) && bench.heard(B));
    bench.granted(B, names(3));
    assert_eq!(bench.go_to(at_ms(LAPSE_MS + 10_000)), []);
}

#[test]
fn patience_is_counted_from_each_recall() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.granted(B, names(2));
    bench.change(A, names(1));
    let (_, first) = bench.recall();
    bench.now = at_ms(1_500);
    bench.change(A, names(2));
    bench.recall();
    bench.acknowledge(B, first.id);
    bench.outputs();
    assert_eq!(bench.go_to(at_ms(3_499)), []);
    assert_eq!(bench.go_to(at_ms(3_500)), [LeaseOutput::Suspect(B)]);
}

#[test]
fn goodbye_ends_all_grants_at_once() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.granted(B, names(2));
    let id = bench.change(A, names(1));
    bench.recall();
    bench.table.handle_goodbye(T0, B);
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)]);
    let other = bench.change(A, names(2));
    assert_eq!(bench.outputs(), [LeaseOutput::Ready(other)]);
    for id in [id, other] {
        bench.table.handle_done(T0, id);
    }
    bench.granted(A, names(1));
    bench.table.handle_goodbye(T0, A);
    bench.go_to(at_ms(30_000));
    bench.assert_empty();
}

#[test]
fn grants_survive_lost_connection_and_recalls_are_sent_on_reconnect() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.granted(B, names(2));
    bench.change(A, names(1));
    let (_, sent) = bench.recall();
    bench.table.handle_disconnect(T0, B);
    assert!(!bench.heard(B));
    assert_eq!(bench.refused(B, names(3)), Refusal::Detached);
    let id = bench.change(A, names(2));
    assert_eq!(bench.outputs(), [], "its client is disconnected");
    assert!(!bench.table.is_ready(id));

    bench.now = at_ms(1_000);
    bench.table.handle_attach(bench.now, B, false);
    let again = bench.recalls();
    assert_eq!(again.len(), 2);
    assert_eq!(again[0], (B, sent.clone()), "under its number");
    assert_eq!(again[1].1.node, node(B, names(2)));
    bench.acknowledge(B, again[1].1.id);
    assert!(bench.table.is_ready(id));
    bench.acknowledge(B, sent.id);
    bench.granted(B, names(3));
    bench.outputs();
    assert_eq!(bench.go_to(at_ms(LAPSE_MS - 1)), []);
    assert!(bench.heard(A), "B was heard when it came back");
    assert_eq!(bench.go_to(at_ms(1_000 + LAPSE_MS)), [LeaseOutput::Fenced(B)]);
}

#[test]
fn change_waits_out_lease_of_disconnected_holder() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    bench.table.handle_disconnect(T0, B);
    bench.now = at_ms(10_000);
    assert!(bench.heard(A));
    let id = bench.change(A, names(1));
    assert_eq!(bench.go_to(at_ms(LAPSE_MS - 1)), [LeaseOutput::Suspect(B)]);
    assert!(!bench.table.is_ready(id));
    assert_eq!(bench.go_to(at_ms(LAPSE_MS)), [LeaseOutput::Fenced(B), LeaseOutput::Ready(id)]);
}

#[test]
fn reconnecting_repeatedly_does_not_renew_suspect() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(B, names(1));
    let id = bench.change(A, names(1));
    bench.recall();
    assert_eq!(bench.go_to(at_ms(2_000)), [LeaseOutput::Suspect(B)]);
    for second in 3..16 {
        assert_eq!(bench.go_to(at_ms(second * 1_000)), []);
        bench.table.handle_disconnect(bench.now, B);
        bench.table.handle_attach(bench.now, B, false);
        assert_eq!(bench.recalls().len(), 1, "it may still give back what it owes");
        assert!(bench.heard(A));
    }
    assert_eq!(bench.go_to(at_ms(LAPSE_MS)), [LeaseOutput::Fenced(B), LeaseOutput::Ready(id)]);
}

#[test]
fn limited_grants_expire_1_1_limits_after_registration() {
    let mut bench = Bench::with(&[A, B]);
    bench.granted(A, names(9));
    bench.table.handle_limit(T0, B, Span::from_secs(5));
    bench.granted(B, names(1));
    bench.now = at_ms(1_000);
    bench.granted(B, names(2));
    let id = bench.change(A, names(1));
    let (_, recall) = bench.recall();
    bench.acknowledge(B, recall.id);
    bench.table.handle_done(bench.now, id);
    bench.outputs();

    let grants =
        |bench: &Bench| bench.table.report().holders.iter().map(|holder| holder.grants).collect::<Vec<_>>();
    assert_eq!(grants(&bench), [1, 1]);
    bench.go_to(at_ms(6_499));
    assert_eq!(grants(&bench), [1, 1]);
    bench.go_to(at_ms(6_500));
    assert_eq!(grants(&bench), [1, 0], "only those of the limited one");
    let counters = bench.table.report().counters;
    assert_eq!((counters.expired, counters.acknowledged), (1, 1));
}

#[test]
fn change_waits_at_most_for_limit_of_recalled_grant() {
    let mut bench = Bench::with(&[A, B]);
    bench.table.handle_limit(T0, B, Span::from_secs(5));
    bench.granted(B, names(1));
    let id = bench.change(A, names(1));
    let (_, recall) = bench.recall();
    assert_eq!(bench.go_to(at_ms(5_499)), [LeaseOutput::Suspect(B)]);
    assert_eq!(bench.go_to(at_ms(5_500)), [LeaseOutput::Ready(id)]);
    assert_eq!(bench.table.report().holders[1].owed, 1, "it is still to be acknowledged");
    bench.acknowledge(B, recall.id);
    assert_eq!(bench.outputs(), [LeaseOutput::Trusted(B)]);
}

#[test]
fn limited_grant_expires_although_later_grants_are_unlimited() {
    let mut bench = Bench::with(&[A, B]);
    bench.table.handle_limit(T0, B, Span::from_secs(5));
    bench.granted(B, names(1));
    bench.table.handle_limit(T0, B, Span::FOREVER);
    bench.granted(B, names(2));
    bench.go_to(at_ms(6_000));
    let holder = &bench.table.report().holders[1];
    assert_eq!(holder.grants, 1);
}

#[test]
fn clock_going_backwards_counts_as_latest_time() {
    let mut bench = Bench::with(&[A]);
    bench.now = at_ms(5_000);
    assert!(bench.heard(A));
    bench.now = at_ms(4_000);
    assert!(bench.heard(A));
    bench.now = at_ms(5_000);
    assert_eq!(bench.go_to(at_ms(4_999 + LAPSE_MS)), []);
    assert_eq!(bench.go_to(at_ms(5_000 + LAPSE_MS)), [LeaseOutput::Fenced(A)]);
}

#[test]
fn report_lists_overdue_holders_and_waiting_changes() {
    let mut bench = Bench::with(&[A, B, C]);
    bench.granted(B, names(1));
    bench.granted(B, names(2));
    bench.now = at_ms(500);
    let first = bench.table.handle_change(bench.now, Some(A), &[change(names(1)), change(names(2))]);
    bench.now = at_ms(700);
    let second = bench.change(C, names(2));
    let report = bench.table.report();
    let b = &report.holders[1];
    assert_eq!((b.holder, b.grants, b.owed, b.owes_since), (B, 2, 2, Some(at_ms(500))));
    assert_eq!(b.awaited_by, [first, second]);
    assert_eq!((report.holders[0].owed, report.holders[2].awaited_by.len()), (0, 0));
    let changes: Vec<_> = report.changes.iter().map(|c| (c.change, c.by, c.since, c.owed)).collect();
    assert_eq!(changes, [(first, Some(A), at_ms(500), 2), (second, Some(C), at_ms(700), 1)]);
    assert_eq!((report.counters.granted, report.counters.recalled), (2, 2));
}

fn party(client: Client) -> ClientOrigin {
    ClientOrigin { client, origin: Origin { uid: Some(1000), host: None } }
}

/// A client attaches, gets a grant, and ignores its recall until it is fenced; from `holder` on, each time in another
/// session. Returns its penalty.
fn delay_others(bench: &mut Bench, holder: Holder) -> Span {
    bench.table.handle_attach(bench.now, holder, false);
    bench.table.handle_client(bench.now, holder, party((7, 7)));
    bench.granted(holder, names(1));
    let id = bench.table.handle_change(bench.now, None, &[change(names(1))]);
    bench.recall();
    let ended = bench.go_to(bench.now.after(Span::from_millis(LAPSE_MS)));
    assert_eq!(ended, [LeaseOutput::Suspect(holder), LeaseOutput::Fenced(holder), LeaseOutput::Ready(id)]);
    bench.table.handle_done(bench.now, id);
    bench.outputs();
    penalty_of(bench, Holder(holder.0 + 1), (7, 7))
}

/// Attaches a client for a moment, to read its penalty.
fn penalty_of(bench: &mut Bench, holder: Holder, client: Client) -> Span {
    bench.table.handle_attach(bench.now, holder, false);
    bench.table.handle_client(bench.now, holder, party(client));
    let until = bench.table.report().holders[0].penalised_until;
    if until.is_some() {
        assert_eq!(bench.refused(holder, names(1)), Refusal::Suspect);
        let id = bench.table.handle_change(bench.now, None, &[change(names(1))]);
        assert_eq!(bench.outputs(), [LeaseOutput::Ready(id)], "no change waits for it again");
        bench.table.handle_done(bench.now, id);
    }
    bench.table.handle_goodbye(bench.now, holder);
    bench.outputs();
    until.map_or(Span::ZERO, |until| until.since(bench.now))
}

#[test]
fn penalty_of_delaying_client_doubles_each_time() {
    let mut bench = Bench::with(&[]);
    let mut seconds = Vec::new();
    for round in 0..6 {
        let doubt = delay_others(&mut bench, Holder(10 * round + 1));
        seconds.push(doubt.0 / 1_000_000_000);
        assert_eq!(penalty_of(&mut bench, A, (7, 8)), Span::ZERO, "others of the same machine are not meant");
        bench.go_to(bench.now.after(doubt));
    }
    assert_eq!(seconds, [66, 132, 264, 528, 600, 600]);
    bench.go_to(bench.now.after(Span::from_secs(600)));
    assert_eq!(delay_others(&mut bench, A), Span::from_secs(66), "it behaved well for long enough");
    bench.assert_empty();
}

#[test]
fn late_acknowledgement_or_goodbye_is_penalised_too() {
    for goodbye in [false, true] {
        let mut bench = Bench::with(&[B]);
        bench.table.handle_client(T0, B, party((7, 7)));
        bench.granted(B, names(1));
        let id = bench.table.handle_change(T0, None, &[change(names(1))]);
        let (_, recall) = bench.recall();
        assert_eq!(bench.go_to(at_ms(3_000)), [LeaseOutput::Suspect(B)]);
        if goodbye {
            bench.table.handle_goodbye(bench.now, B);
            bench.table.handle_attach(bench.now, B, false);
            bench.table.handle_client(bench.now, B, party((7, 7)));
        } else {
            bench.acknowledge(B, recall.id);
        }
        bench.table.handle_done(bench.now, id);
        bench.outputs();
        assert_eq!(bench.refused(B, names(2)), Refusal::Suspect);
        assert!(bench.heard(B), "it is answered");
        bench.go_to(at_ms(3_000 + 4 * 3_000 - 1));
        assert_eq!(bench.refused(B, names(2)), Refusal::Suspect);
        bench.go_to(at_ms(3_000 + 4 * 3_000));
        bench.granted(B, names(2));
    }
}

/// `holder` is a new client of uid 7001 and delays the change of `maker` until it is fenced. Returns whether it got its
/// grant.
fn delays(bench: &mut Bench, (holder, number): (Holder, u64), maker: Holder) -> bool {
    bench.table.handle_attach(bench.now, holder, false);
    let origin = Origin { uid: Some(7001), host: None };
    bench.table.handle_client(bench.now, holder, ClientOrigin { client: (number, number), origin });
    let granted = bench.grant(holder, names(1)).is_some();
    let id = bench.change(maker, names(1));
    while !bench.table.is_ready(id) {
        bench.go_to(bench.now.after(Span::from_millis(1_000)));
        bench.heard(maker);
    }
    bench.table.handle_done(bench.now, id);
    bench.outputs();
    bench.table.handle_goodbye(bench.now, holder);
    granted
}

#[test]
fn new_clients_of_penalised_origin_get_no_grants() {
    let mut bench = Bench::with(&[]);
    let origins = [(B, Some(7002)), (C, Some(7001))];
    for (maker, uid) in origins {
        bench.table.handle_attach(T0, maker, false);
        let origin = Origin { uid, host: None };
        bench.table.handle_client(T0, maker, ClientOrigin { client: (maker.0, 1), origin });
    }
    let mut held_up = Vec::new();
    let mut number = 10;
    while bench.now < at_ms(600_000) {
        number += 1;
        if delays(&mut bench, (Holder(number), number), B) {
            held_up.push(bench.now.since(T0).0 / 1_000_000_000);
        }
        bench.go_to(bench.now.after(Span::from_millis(1_000)));
        bench.heard(B);
    }
    assert_eq!(held_up.len(), 4, "each later for twice as long: {held_up:?}");
    assert_eq!(bench.refused(C, names(2)), Refusal::Detached, "it was silent");
}

#[test]
fn delay_within_one_origin_penalises_only_that_client() {
    let mut bench = Bench::with(&[B]);
    let origin = Origin { uid: Some(7001), host: None };
    bench.table.handle_client(T0, B, ClientOrigin { client: (1, 1), origin });
    assert!(delays(&mut bench, (Holder(10), 10), B));
    assert!(bench.grant(B, names(2)).is_some());
    assert!(delays(&mut bench, (Holder(11), 11), B), "another client of the same user");
    assert!(!delays(&mut bench, (Holder(12), 11), B), "the same client again");
}

#[test]
fn write_queued_behind_delayed_change_counts_as_delayed() {
    let data = |ino| LeaseKey { covers: LeaseScope::Data, ..names(ino) };
    let mut bench = Bench::with(&[A, B, C]);
    for (holder, uid) in [(A, 7001), (B, 7001), (C, 7002)] {
        let origin = Origin { uid: Some(uid), host: None };
        bench.table.handle_client(T0, holder, ClientOrigin { client: (holder.0, 1), origin });
    }
    bench.granted(A, data(1));
    let write = |bench: &mut Bench, by| {
        let change = Change { key: data(1), names: vec![], writes: true, can_update: false };
        bench.table.handle_change(bench.now, Some(by), &[change])
    };
    let first = write(&mut bench, B);
    let second = write(&mut bench, C);
    for _ in 0..17 {
        bench.go_to(bench.now.after(Span::from_millis(1_000)));
        bench.heard(B);
        bench.heard(C);
    }
    assert!(bench.table.is_ready(first) && !bench.table.is_ready(second), "A is fenced, B writes");
    assert_eq!(bench.refused(B, names(2)), Refusal::Suspect, "the origin delayed C");
    assert!(bench.grant(C, names(2)).is_some());
}
