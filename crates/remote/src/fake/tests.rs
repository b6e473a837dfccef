//! Properties of the fake on which tests rely.

use super::*;
use crate::conformance::{Harness, assert_conforms};
use nigh_types::{Access, Call, Credentials, MutationId, NodeRef, Recall, Reply, Response, Term};

const T0: Time = Time(1_000_000_000);

fn request(call: Call, sequence: u64) -> Request {
    let name = call.is_mutation().then_some(MutationId { client: 1, incarnation: 1, sequence });
    Request { credentials: Credentials::default(), mutation_id: name, call }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn drain(fake: &mut Fake) -> Vec<Event> {
    std::iter::from_fn(|| match fake.poll_output() {
        Output::Event(event) => Some(event),
        Output::Timeout(..) => None,
        Output::Transmit(_) => panic!("a fake has no transport"),
    })
    .collect()
}

fn response(events: &[Event]) -> (CallId, &Response) {
    match events {
        [Event::Response { call, response }] => (*call, response),
        other => panic!("not one response: {other:?}"),
    }
}

fn recall(events: &[Event]) -> Vec<&Recall> {
    fn one(event: &Event) -> &Recall {
        match event {
            Event::Recall(recall) => recall,
            other => panic!("not a recall: {other:?}"),
        }
    }
    events.iter().map(one).collect()
}

fn two(server: &FakeServer) -> (Fake, Fake) {
    let (mut a, mut b) = (server.connect(T0), server.connect(T0));
    assert!(matches!(drain(&mut a)[..], [Event::Attached(_)]));
    assert!(matches!(drain(&mut b)[..], [Event::Attached(_)]));
    (a, b)
}

fn lookup(dir: NodeId, leaf: &str) -> Request {
    request(Call::Lookup { dir: NodeRef::without_hint(dir), name: name(leaf) }, 0)
}

fn mkdir(dir: NodeId, leaf: &str) -> Request {
    request(Call::Mkdir { dir: NodeRef::without_hint(dir), name: name(leaf), mode: 0o755, umask: 0 }, 1)
}

#[test]
fn mutation_waits_for_acknowledgements_of_other_clients_only() {
    let server = FakeServer::new(ModelFsConfig::default());
    let root = server.edit(|tree| tree.root());
    let (mut a, mut b) = two(&server);
    for fake in [&mut a, &mut b] {
        fake.handle_call(T0, CallId(1), lookup(root, "x"));
        assert!(fake.control().has_granted(root, LeaseScope::Directory));
        drain(fake);
    }
    a.handle_call(T0, CallId(2), mkdir(root, "x"));
    assert_eq!((drain(&mut a), server.waiting()), (vec![], 1));
    let events = drain(&mut b);
    let recalls = recall(&events);
    assert_eq!((recalls[0].covers, &recalls[0].names[..]), (LeaseScope::Directory, &[name("x")][..]));
    b.handle_call(T0, CallId(2), lookup(root, "x"));
    let events = drain(&mut b);
    let (_, early) = response(&events);
    assert_eq!((&early.result, &early.grants[..]), (&Ok(Reply::Entry(None)), &[][..]));
    let mut third = server.connect(T0);
    drain(&mut third);
    third.handle_call(T0, CallId(1), lookup(root, "x"));
    assert_eq!(response(&drain(&mut third)).1.grants, [], "what is about to change is not granted to anyone");
    b.handle_acknowledge(T0, recalls[0].id);
    assert!(matches!(response(&drain(&mut a)).1.result, Ok(Reply::Created { .. })));
    assert!(!b.control().has_granted(root, LeaseScope::Directory));
}

#[test]
fn recall_overtakes_a_held_or_delayed_reply() {
    let server = FakeServer::new(ModelFsConfig::default());
    let root = server.edit(|tree| tree.root());
    let (mut a, _) = two(&server);
    let control = a.control();
    control.plan(CallFilter::Type("lookup"), CallPlan { hold_reply: true, ..CallPlan::default() });
    let late = CallPlan { answered_after: Span::from_millis(5), ..CallPlan::default() };
    control.plan(CallFilter::Call(CallId(2)), late);
    a.handle_call(T0, CallId(1), lookup(root, "x"));
    a.handle_call(T0, CallId(2), lookup(root, "y"));
    server.edit(|tree| tree.plant_dir(T0, "x"));
    let recalled = control.recall(root, LeaseScope::Directory, &[]);
    assert_eq!(recall(&drain(&mut a))[0].id, recalled);
    assert_eq!(control.held(), [CallId(1)]);
    control.release(CallId(1));
    let events = drain(&mut a);
    let (call, held) = response(&events);
    assert_eq!((call, &held.result, held.grants.len()), (CallId(1), &Ok(Reply::Entry(None)), 1));
    let due = T0.after(Span::from_millis(5));
    assert_eq!(a.poll_output(), Output::Timeout(due, Reason::Delay));
    a.handle_timeout(due);
    assert_eq!(response(&drain(&mut a)).0, CallId(2));
    assert!(!control.acknowledged(recalled));
    a.handle_acknowledge(due, recalled);
    assert!(control.acknowledged(recalled));
}

#[test]
fn listing_comes_in_chunks_with_configured_pauses() {
    let server = FakeServer::new(ModelFsConfig { chunk_entries: 2, ..ModelFsConfig::default() });
    let root = server.edit(|tree| tree.root());
    for i in 0..5 {
        server.edit(|tree| tree.plant_file(T0, &format!("f{i}"), b""));
    }
    let (mut a, _) = two(&server);
    a.control().plan(CallFilter::Type("list"), CallPlan { chunk_pause: Span(10), ..CallPlan::default() });
    a.handle_call(T0, CallId(1), request(Call::List { dir: NodeRef::without_hint(root) }, 0));
    let mut now = T0;
    for last in [false, false, true] {
        let events = drain(&mut a);
        let (_, part) = response(&events);
        assert_eq!(part.last, last);
        assert_eq!(part.grants.iter().any(|grant| grant.covers == LeaseScope::Directory), now == T0);
        now = now.after(Span(10));
        a.handle_timeout(now);
    }
    a.control().plan(CallFilter::Type("list"), CallPlan { hold_reply: true, ..CallPlan::default() });
    a.handle_call(now, CallId(2), request(Call::List { dir: NodeRef::without_hint(root) }, 0));
    for last in [false, false, true] {
        a.control().release_chunk(CallId(2));
        assert_eq!(response(&drain(&mut a)).1.last, last);
    }
    assert_eq!(a.control().held(), []);
}

#[test]
fn lost_session_frees_its_handles_and_unblocks_waiting_mutations() {
    let server = FakeServer::new(ModelFsConfig::default());
    let root = server.edit(|tree| tree.root());
    let file = server.edit(|tree| tree.plant_file(T0, "f", b"x"));
    let (mut a, mut b) = two(&server);
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    b.handle_call(T0, CallId(1), request(Call::Open { node: NodeRef::without_hint(file), access }, 0));
    b.handle_call(T0, CallId(2), lookup(root, "x"));
    drain(&mut b);
    assert_eq!(b.control().open_handles(), 1);
    a.handle_call(T0, CallId(1), mkdir(root, "x"));
    assert_eq!(server.waiting(), 1);
    b.control().lose("gone");
    assert_eq!(drain(&mut b), [Event::Lost { why: "gone".to_owned() }]);
    assert_eq!(response(&drain(&mut a)).0, CallId(1));
    b.handle_call(T0, CallId(3), lookup(root, "x"));
    assert_eq!((drain(&mut b), b.control().open_handles()), (vec![], 0));
}

#[test]
fn call_plans_hold_drop_refuse_and_count_calls() {
    let server = FakeServer::new(ModelFsConfig { term: Term::Limited(Span(7)), ..ModelFsConfig::default() });
    let root = server.edit(|tree| tree.root());
    let (mut a, _) = two(&server);
    let control = a.control();
    control.plan(CallFilter::Every, CallPlan { ungranted: true, ..CallPlan::default() });
    control.plan(CallFilter::Call(CallId(1)), CallPlan { hold_call: true, ..CallPlan::default() });
    control.plan(
        CallFilter::Call(CallId(2)),
        CallPlan { drop_reply: true, ungranted: true, ..CallPlan::default() },
    );
    control.plan(CallFilter::Call(CallId(3)), CallPlan { refuse: Some(Errno::IO), ..CallPlan::default() });
    a.handle_call(T0, CallId(1), mkdir(root, "x"));
    a.handle_call(T0, CallId(2), lookup(root, "x"));
    a.handle_call(T0, CallId(3), lookup(root, "x"));
    let events = drain(&mut a);
    assert_eq!(response(&events).1.result, Err(Errno::IO));
    a.handle_call(T0, CallId(4), lookup(root, "x"));
    let events = drain(&mut a);
    assert_eq!((&response(&events).1.result, response(&events).1.grants.len()), (&Ok(Reply::Entry(None)), 0));
    a.handle_cancel(T0, CallId(1));
    assert_eq!(response(&drain(&mut a)).1.result, Err(Errno::INTR));
    control.plan_nothing();
    a.handle_call(T0, CallId(5), lookup(root, "x"));
    let events = drain(&mut a);
    let (_, looked) = response(&events);
    assert_eq!(looked.grants[0].term, Term::Limited(Span(7)));
    assert_eq!((control.calls("lookup"), control.calls("mkdir"), control.requests()), (4, 1, 5));
    assert_eq!(control.cancelled(), [CallId(1)]);
    a.handle_return(T0, vec![looked.grants[0].id]);
    assert!(!control.has_granted(root, LeaseScope::Directory));
}

/// The suite over fakes with a given tree, slow or not.
struct Fakes {
    config: ModelFsConfig,
    fate: CallPlan,
    now: Time,
}

impl Harness for Fakes {
    fn attach(&mut self) -> Box<dyn Remote> {
        let fake = FakeServer::new(self.config.clone()).connect(self.now);
        fake.control().plan(CallFilter::Every, self.fate);
        Box::new(fake)
    }

    fn now(&self) -> Time {
        self.now
    }

    fn pump(&mut self, remote: &mut dyn Remote) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            match remote.poll_output() {
                Output::Event(event) => events.push(event),
                Output::Transmit(_) => panic!("a fake has no transport"),
                Output::Timeout(due, _) if events.is_empty() && due != Time::FAR => {
                    self.now = due;
                    remote.handle_timeout(due);
                }
                Output::Timeout(..) => return events,
            }
        }
    }
}

#[test]
fn fake_passes_the_conformance_suite() {
    assert_conforms(&mut Fakes { config: ModelFsConfig::default(), fate: CallPlan::default(), now: T0 });
}

#[test]
fn slow_fake_with_inode_reuse_and_required_hints_passes_the_suite() {
    let config =
        ModelFsConfig { chunk_entries: 3, reuse_inos: true, by_hint_only: true, ..ModelFsConfig::default() };
    let slow = Span::from_millis(3);
    let fate =
        CallPlan { arrives_after: slow, answered_after: slow, chunk_pause: slow, ..CallPlan::default() };
    assert_conforms(&mut Fakes { config, fate, now: T0 });
}
