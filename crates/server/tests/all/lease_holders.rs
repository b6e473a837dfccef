//! Lease holders: how long the server waits for them, when it fences them and when it grants nothing
//! (docs/decisions/0008-leases.md).

use crate::common::client::Client;
use crate::common::world::World;
use crate::common::*;
use nigh_remote::{Event, Remote};
use nigh_server::LeaseConfig;
use nigh_types::*;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

#[test]
fn returned_or_expired_grant_is_not_recalled() {
    let world = World::new();
    let mut holder = world.client();
    let d = holder.place("d");
    let grants = [holder.list(&d).1, holder.attr(&d).1].concat();
    let now = holder.now();
    holder.session.handle_return(now, grants.iter().map(|grant| grant.id).collect());
    holder.drain();
    holder.call(Call::StatFs { node: d.clone() });
    let brief = Term::Limited(Span::from_millis(100));
    let mut short = Client::connect(&world.server, world.dir.path(), brief);
    let here = short.place("d");
    let grants = short.list(&here).1;
    assert!(!grants.is_empty() && grants.iter().all(|grant| grant.term == brief && grant.recallable));
    std::thread::sleep(Duration::from_millis(150));
    let mut mutator = world.client();
    let d = mutator.place("d");
    let made = mutator.call(Call::Mkdir { dir: d, name: name("new"), mode: 0o700, umask: 0 });
    assert!(made.result.is_ok());
    for client in [&mut holder, &mut short] {
        client.pump();
        assert_eq!(client.recalls(), []);
    }
}

#[test]
fn grant_with_time_limit_is_recalled_too() {
    let world = World::new();
    let mut holder = Client::connect(&world.server, world.dir.path(), Term::Limited(Span::from_secs(60)));
    let d = holder.place("d");
    holder.list(&d);
    let mut mutator = world.client();
    let d = mutator.place("d");
    let call = mutator.send(Call::Mkdir { dir: d, name: name("new"), mode: 0o700, umask: 0 });
    assert!(!mutator.is_answered(call));
    holder.give_back_next();
    assert!(mutator.answer(call).result.is_ok());
}

#[test]
fn cancelled_change_has_no_effect_and_blocks_no_client() {
    let world = World::new();
    let (mut holder, _) = world.warm();
    let mut mutator = world.client();
    let d = mutator.place("d");
    let unlink = Call::Unlink { dir: d.clone(), name: name("f"), keep: None };
    let call = mutator.send(unlink.clone());
    assert!(!mutator.is_answered(call));
    mutator.cancel(call);
    assert_eq!(mutator.answer(call).result, Err(Errno::INTR));
    let mut other = world.client();
    let there = other.place("d");
    let waiting = other.send(Call::Unlink { dir: there, name: name("f"), keep: None });
    assert!(!other.is_answered(waiting));
    other.session.handle_close("no more");
    other.drain();
    holder.give_back_next();
    assert!(world.dir.path().join("d/f").exists());
    let give_up = Instant::now() + Duration::from_secs(5);
    while mutator.list(&d).1.iter().all(|grant| grant.node != d.node) {
        assert!(Instant::now() < give_up, "granted again: it is no longer changed");
    }
    assert!(mutator.call(unlink).result.is_ok());
    assert_eq!(world.server.leases().changes, []);
}

#[test]
fn client_that_acknowledges_nothing_gets_no_replies_and_is_fenced() {
    let world = World::hasty();
    let (mut holder, _) = world.warm();
    let mut mutator = world.client();
    let d = mutator.place("d");
    let node = holder.root();
    holder.call(Call::StatFs { node });
    let began = Instant::now();
    let call = mutator.send(Call::Mkdir { dir: d, name: name("new"), mode: 0o700, umask: 0 });
    while began.elapsed() < Duration::from_millis(700) {
        mutator.pump();
        let now = mutator.now();
        mutator.session.handle_timeout(now);
        mutator.drain();
    }
    let node = holder.root();
    let asked = holder.send(Call::StatFs { node });
    assert!(!holder.is_answered(asked), "it is suspect");
    while !mutator.is_answered(call) {
        let now = mutator.now();
        mutator.session.handle_timeout(now);
        mutator.drain();
        // Messages of a client that owes an acknowledgement renew nothing.
        let now = holder.now();
        holder.session.handle_timeout(now);
        holder.drain();
        assert!(began.elapsed() < Duration::from_secs(9), "its lease has run out by now");
    }
    assert!(mutator.answer(call).result.is_ok());
    assert!(began.elapsed() > Duration::from_millis(1_800), "{:?}", began.elapsed());
    holder.cut();
    holder.go_on_over(world.server.serve_in_process().unwrap());
    assert_eq!(holder.wait_linked(), Some(true), "what it was granted has ended");
}

#[test]
fn late_acknowledgement_resumes_replies_and_later_grants() {
    let world = World::with(|options| {
        options.leases = LeaseConfig { patience: Span::from_millis(100), ..options.leases };
    });
    let (mut holder, _) = world.warm();
    let mut mutator = world.client();
    let d = mutator.place("d");
    let call = mutator.send(Call::Mkdir { dir: d, name: name("new"), mode: 0o700, umask: 0 });
    std::thread::sleep(Duration::from_millis(300));
    let node = holder.root();
    let asked = holder.send(Call::StatFs { node });
    let dir = holder.root();
    let looked = holder.send(Call::Lookup { dir, name: name("d") });
    assert!(!holder.is_answered(asked) && !holder.is_answered(looked));
    holder.cancel(looked);
    holder.give_back();
    assert!(holder.answer(asked).result.is_ok());
    holder.answer(looked);
    assert!(mutator.answer(call).result.is_ok());
    let place = holder.place("d");
    assert_eq!(holder.list(&place).1, [], "others waited for it: it is granted nothing for a while");
    let give_up = Instant::now() + Duration::from_secs(20);
    while holder.list(&place).1.is_empty() {
        assert!(Instant::now() < give_up, "and then it is granted again");
    }
}

#[test]
fn grants_of_cut_connection_live_until_client_returns_or_lease_expires() {
    let world = World::hasty();
    let mkdir = |dir: NodeRef, text: &str| Call::Mkdir { dir, name: name(text), mode: 0o700, umask: 0 };
    let mut mutator = world.client();
    let d = mutator.place("d");
    for returns in [false, true] {
        let stream = world.server.serve_in_process().unwrap();
        // A different client each time: the first one delayed others, so the server grants it nothing for a while.
        let incarnation = 77 + u64::from(returns);
        let mut holder = Client::over(stream, world.dir.path(), Term::Session, incarnation);
        let held = holder.place("d");
        holder.list(&held);
        drop(holder);
        let began = Instant::now();
        let call = mutator.send(mkdir(d.clone(), if returns { "two" } else { "one" }));
        assert!(!mutator.is_answered(call));
        let again = returns.then(|| {
            let stream = world.server.serve_in_process().unwrap();
            let mut again = Client::over(stream, world.dir.path(), Term::Session, incarnation);
            again.session();
            again
        });
        while !mutator.is_answered(call) {
            let now = mutator.now();
            mutator.session.handle_timeout(now);
            mutator.drain();
            assert!(began.elapsed() < Duration::from_secs(9));
        }
        assert!(mutator.answer(call).result.is_ok());
        let long = began.elapsed() > Duration::from_millis(1_800);
        assert_eq!(long, !returns, "{:?}", began.elapsed());
        drop(again);
    }
}

#[test]
fn closed_session_no_longer_delays_changes() {
    let world = World::new();
    let (mut holder, _) = world.warm();
    let mut mutator = world.client();
    let d = mutator.place("d");
    let call = mutator.send(Call::Mkdir { dir: d, name: name("new"), mode: 0o700, umask: 0 });
    assert!(!mutator.is_answered(call));
    holder.session.handle_close("unmounted");
    holder.drain();
    let began = Instant::now();
    assert!(mutator.answer(call).result.is_ok());
    assert!(began.elapsed() < Duration::from_secs(2));
}

#[test]
fn contended_directory_is_granted_to_no_client_for_a_while() {
    let world = World::new();
    let (mut mutator, mut holder) = (world.client(), world.client());
    holder.obliging = true;
    let (d, here) = (mutator.place("d"), holder.place("d"));
    let mut ungranted = false;
    for round in 0..10 {
        ungranted = holder.list(&here).1.iter().all(|grant| grant.node != here.node);
        let text = name(&format!("n{round}"));
        let call = mutator.send(Call::Mkdir { dir: d.clone(), name: text, mode: 0o700, umask: 0 });
        while !mutator.is_answered(call) {
            holder.pump();
        }
        mutator.answer(call);
        let returned: Vec<_> = mutator.list(&d).1.iter().map(|grant| grant.id).collect();
        let now = mutator.now();
        mutator.session.handle_return(now, returned);
        mutator.drain();
        if ungranted {
            break;
        }
    }
    assert!(ungranted);
    assert!(!world.server.leases().contended.is_empty());
}

#[test]
fn client_needing_exclusive_directory_lease_gets_it_or_a_shared_mark() {
    let world = World::new();
    let mut alone = Client::connect_alone(&world.server, world.dir.path());
    let names = |client: &mut Client| -> Vec<bool> {
        let d = client.place("d");
        let grants = client.list(&d).1;
        let on_names = grants.iter().filter(|g| (g.node, g.covers) == (d.node, LeaseScope::Directory));
        on_names.map(|grant| grant.shared).collect()
    };
    assert_eq!(names(&mut alone), [false]);
    let mut other = world.client();
    assert_eq!(names(&mut other), [] as [bool; 0], "it is asked back first, and no caller waits for that");
    // The server also recalls its lease on the root, which may arrive separately.
    let d = other.place("d").node;
    let asked = |event: &Event| matches!(event, Event::Recall(recall) if recall.node == d);
    alone.wait(|events| events.iter().any(asked).then_some(()));
    alone.give_back();
    alone.call(Call::StatFs { node: NodeRef::without_hint(world.client().root().node) });
    assert_eq!(names(&mut other), [true]);
    assert_eq!(names(&mut alone), [true]);
}

#[test]
fn concurrent_calls_are_all_granted() {
    let world = World::new();
    let mut client = world.client();
    let d = client.place("d");
    for _ in 0..20 {
        let lookup = Call::Lookup { dir: d.clone(), name: name("f") };
        let calls: Vec<_> = (0..50).map(|_| client.send(lookup.clone())).collect();
        let grants: Vec<Vec<Grant>> = calls.into_iter().map(|call| client.answer(call).grants).collect();
        assert!(grants.iter().all(|grants| grants.len() == 1));
        let ids: BTreeSet<_> = grants.iter().map(|grants| grants[0].id).collect();
        assert_eq!(ids.len(), 50, "each by a number of its own");
        let returned: Vec<_> = ids.into_iter().collect();
        let now = client.now();
        client.session.handle_return(now, returned);
        client.drain();
    }
}
