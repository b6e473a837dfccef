//! Lock reclaims at a server that has discarded the session (docs/decisions/0011-locks.md).

use crate::common::client::Client;
use crate::common::world::World;
use crate::common::{eventually, lock, name};
use nigh_remote::Remote;
use nigh_types::*;
use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A server with a short session term.
fn forgetful() -> World {
    World::with(|options| options.session_term = Span::from_secs(4))
}

/// Reconnects to a server that has discarded the session.
fn again(world: &World, client: &mut Client) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while !client.session.is_linked() {
        assert!(Instant::now() < give_up, "{:?}", client.events);
        client.tick();
        client.go_on_over(world.server.serve_in_process().unwrap());
        while !client.session.is_linked() && client.session.wants_connection().is_none() {
            client.pump();
        }
    }
    assert_eq!(client.wait_linked(), Some(false));
}

/// Ends the client's connection.
fn cut(client: &mut Client) {
    let now = client.now();
    client.session.handle_disconnect(now, "cut");
    client.drain();
}

/// Ends the connection, and waits until the server has noticed it.
fn hang_up(world: &World, client: &mut Client) {
    let (nobody, _) = UnixStream::pair().unwrap();
    client.go_on_over(nobody);
    let is_away = |session: &Value| session["connected"] == false;
    eventually("the server sees it", || {
        world.server.status()["sessions"].as_array().unwrap().iter().any(is_away)
    });
}

/// Resolves the path again, as a restarted server requires.
fn walk(client: &mut Client, f: &NodeRef) {
    let names = vec![name("d"), name("f")];
    assert_eq!(client.call(Call::ResolvePath { node: f.node, names }).result, Ok(Reply::Done));
}

/// Disconnects the holder until the server discards its session, because another client waits for the holder's lock.
/// The other client then has the lock.
fn forgotten_for(world: &World, holder: &mut Client, other: &mut Client) {
    let there = other.place("d/f");
    let waiting = other.send(lock(&there, 9, true, false));
    cut(holder);
    let give_up = Instant::now() + Duration::from_secs(20);
    while !other.is_answered(waiting) {
        other.tick();
        holder.tick();
        assert!(Instant::now() < give_up);
    }
    assert!(other.answer(waiting).result.is_ok());
    assert!(world.server.session_count() > 0);
}

#[test]
fn lock_granted_to_another_client_meanwhile_is_not_reclaimed() {
    let world = forgetful();
    let (mut holder, mut other) = (world.client(), world.client());
    holder.obliging = true;
    let (f, h) = (holder.place("d/f"), holder.place("d/h"));
    assert!(holder.call(lock(&f, 1, false, false)).result.is_ok());
    assert!(holder.call(lock(&h, 1, false, false)).result.is_ok());
    forgotten_for(&world, &mut holder, &mut other);
    let there = other.place("d/f");
    let unlock = Call::Unlock { node: there, owner: 9, flock: false, start: 0, end: u64::MAX };
    assert!(other.call(unlock).result.is_ok());
    again(&world, &mut holder);
    assert_eq!(other.call(lock(&h, 9, false, true)).result, Err(Errno::AGAIN), "a stranger");
    assert_eq!(
        holder.call(lock(&f, 1, false, true)).result,
        Err(Errno::AGAIN),
        "it is unlocked, but was locked"
    );
    assert_eq!(holder.call(lock(&h, 1, false, true)).result, Ok(Reply::Done), "it was not locked since");
    assert_eq!(other.call(lock(&h, 9, false, false)).result, Err(Errno::AGAIN));
    let now = holder.now();
    holder.session.handle_reclaimed(now);
    assert!(holder.call(lock(&f, 1, false, false)).result.is_ok(), "as any client may");
}

#[test]
fn lock_lost_before_a_restart_is_not_reclaimed_after_it() {
    for comes_between in [false, true] {
        let mut world = forgetful();
        let (mut holder, mut other) = (world.client(), world.client());
        let f = holder.place("d/f");
        assert!(holder.call(lock(&f, 1, false, false)).result.is_ok());
        forgotten_for(&world, &mut holder, &mut other);
        if comes_between {
            again(&world, &mut holder);
        }
        world.restart();
        cut(&mut holder);
        again(&world, &mut holder);
        walk(&mut holder, &f);
        assert_eq!(holder.call(lock(&f, 1, false, true)).result, Err(Errno::AGAIN), "{comes_between}");
        cut(&mut other);
        again(&world, &mut other);
        assert_eq!(other.call(lock(&f, 9, false, true)).result, Ok(Reply::Done));
        let now = other.now();
        other.session.handle_reclaimed(now);
        assert_eq!(other.call(lock(&f, 8, false, true)).result, Err(Errno::AGAIN), "it has claimed");
    }
}

#[test]
fn client_without_the_lock_cannot_reclaim_it_in_the_grace_period() {
    let mut world = World::new();
    let mut holder = world.client();
    let f = holder.place("d/f");
    assert!(holder.call(lock(&f, 1, false, false)).result.is_ok());
    world.restart();
    let mut stranger = world.client();
    let there = stranger.place("d/f");
    assert_eq!(stranger.call(lock(&there, 2, false, true)).result, Err(Errno::AGAIN));
    let asked = stranger.send(lock(&there, 2, false, false));
    cut(&mut holder);
    again(&world, &mut holder);
    assert!(!stranger.is_answered(asked));
    assert_eq!(holder.call(lock(&f, 1, false, true)).result, Ok(Reply::Done));
    let now = holder.now();
    holder.session.handle_reclaimed(now);
    holder.drain();
    assert_eq!(stranger.answer(asked).result, Err(Errno::AGAIN));
}

#[test]
fn stopping_server_grants_no_waiter_a_reclaimable_lock() {
    let mut world = World::new();
    let (mut holder, mut other) = (world.client(), world.client());
    let f = holder.place("d/f");
    assert!(holder.call(lock(&f, 1, false, false)).result.is_ok());
    let there = other.place("d/f");
    let waiting = other.send(lock(&there, 9, true, false));
    assert!(!other.is_answered(waiting));
    hang_up(&world, &mut holder);
    world.server.end_sessions("the test stops it");
    assert!(!other.is_answered(waiting), "its holder was told nothing");
    world.restart();
    again(&world, &mut holder);
    walk(&mut holder, &f);
    assert_eq!(holder.call(lock(&f, 1, false, true)).result, Ok(Reply::Done));
    cut(&mut other);
    again(&world, &mut other);
    for client in [&mut holder, &mut other] {
        let now = client.now();
        client.session.handle_reclaimed(now);
        client.drain();
    }
    assert!(!other.is_answered(waiting), "it is held");
    let unlock = Call::Unlock { node: f, owner: 1, flock: false, start: 0, end: u64::MAX };
    assert!(holder.call(unlock).result.is_ok());
    assert_eq!(other.answer(waiting).result, Ok(Reply::Done));
}
