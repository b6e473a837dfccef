//! How long a file has stale pages: until all its pages are dropped, and those that were left out.

use super::*;

/// An invalidation leaves out pages that a request has locked: they are dropped after the reply.
#[test]
fn left_out_pages_keep_a_file_stale_until_they_are_dropped() {
    let mut rig = Rig::with_pages();
    rig.write(false);
    rig.pass(TERM);
    rig.calls.retain(|(_, call)| matches!(call, Call::Write { .. }));
    let why = rig.stale[0].0;
    assert_eq!(rig.cache.droppable_ranges(why, FILE.ino, (0, 0)), [(4096, 0)]);
    rig.told();
    assert_eq!(rig.flush(), ended(1));
    let (late, _) = rig.calls.pop().expect("it is out");
    assert_eq!(rig.written(2, None), OpReply::Written(4));
    assert_eq!(rig.dropped(), [(0, 4)]);
    assert_eq!(rig.flush(), ended(1));
    rig.written(3, Some(GrantId(13)));
    rig.told();
    assert!(!rig.is_old());
    rig.answered(late, Reply::Written { offset: 0, count: 4 }, attr(4), Some(GrantId(13)));
    rig.told();
    assert_eq!(rig.flush(), under(4, GrantId(13)));
}

/// Two threads read, and one of them always has pages locked while the other's pages are dropped.
#[test]
fn later_requests_do_not_keep_a_file_stale() {
    let mut rig = Rig::with_pages();
    let first = rig.reads_at(4096);
    rig.pass(TERM);
    rig.tell();
    assert!(rig.is_old());
    let second = rig.reads_at(4096);
    rig.write(false);
    // Another client appended to the file, so all pages are dropped.
    rig.respond(Ok(Reply::Written { offset: 4, count: 4 }), 2, None);
    rig.answered(first, Reply::Data(b"text".to_vec()), attr(2), None);
    rig.told();
    assert!(!rig.is_old());
    rig.answered(second, Reply::Data(b"text".to_vec()), attr(2), Some(GrantId(13)));
    assert!(!rig.is_old());
    assert_eq!(rig.flush(), under(2, GrantId(13)));
}

#[test]
fn partial_invalidation_while_disconnected_does_not_end_staleness() {
    let on_disconnect = OnDisconnect::Fail(Span::from_secs(30));
    let mut rig = Rig::with(Config { on_disconnect, ..Config::default() });
    rig.read(Some(FIRST), 1);
    rig.event(Event::Expired { why: String::new() });
    rig.write(true);
    rig.pass(Span::from_secs(30));
    assert!(rig.dropped().contains(&(0, 4)));
    rig.told();
    assert!(rig.is_old());
    rig.event(Event::Restored { session: session(), kept: true });
    assert_eq!(rig.dropped(), [(0, 0)]);
    rig.told();
    assert!(!rig.is_old());
}

#[test]
fn reply_during_a_full_invalidation_keeps_a_file_stale_until_its_pages_drop() {
    let mut rig = Rig::with_pages();
    let read = rig.reads();
    rig.pass(TERM);
    let why = rig.stale[0].0;
    assert_eq!(rig.cache.droppable_ranges(why, FILE.ino, (0, 0)), [(4096, 0)]);
    rig.answered(read, Reply::Data(b"text".to_vec()), attr(1), None);
    assert_eq!(rig.dropped(), [(0, 0), (0, 4096)]);
    rig.tell();
    assert!(rig.is_old());
    rig.tell();
    assert!(!rig.is_old());
}

/// A grant ends again while left-out pages are stale.
#[test]
fn second_grant_end_requires_another_full_invalidation() {
    let mut rig = Rig::with_pages();
    let first = rig.reads();
    rig.pass(TERM);
    rig.tell();
    rig.read(Some(GrantId(12)), 1);
    rig.answered(first, Reply::Data(b"text".to_vec()), attr(1), None);
    rig.pass(TERM);
    assert_eq!(rig.dropped(), [(0, 4096), (0, 0)]);
    rig.tell();
    assert!(rig.is_old(), "other pages are");
    rig.tell();
    assert!(!rig.is_old());
}

/// How a request in flight ends.
type End = fn(&mut Rig, OpId, CallId);

/// However the request ends, the pages that were left out are dropped, and then no page is stale.
#[test]
fn file_is_no_longer_stale_after_requests_with_left_out_pages_fail() {
    let ends: [(&str, End); 5] = [
        ("refused", |rig, _, call| {
            rig.event(Event::Response { call, response: Response::plain(Err(Errno::IO)) });
        }),
        ("killed", |rig, op, _| {
            rig.cache.handle_interrupt(op, true);
            rig.drain();
        }),
        ("given up", |rig, _, _| rig.pass(Span::from_secs(30))),
        ("lost", |rig, _, _| {
            rig.event(Event::Expired { why: String::new() });
            rig.event(Event::Lost { why: String::new() });
        }),
        ("of another export", |rig, _, _| {
            rig.event(Event::Expired { why: String::new() });
            let root = NodeId { ino: 1, generation: 2 };
            rig.event(Event::Restored { session: SessionParams { root, ..session() }, kept: false });
        }),
    ];
    for write in [false, true] {
        for (how, end) in ends {
            let on_disconnect = OnDisconnect::Fail(Span::from_secs(30));
            let mut rig = Rig::with(Config { on_disconnect, ..Config::default() });
            rig.read(Some(FIRST), 1);
            let op = if write {
                rig.write(false)
            } else {
                rig.ask(Op::Read { ino: FILE.ino, fh: rig.fh, offset: 0, size: 4096 })
            };
            let (call, _) = rig.calls.pop().unwrap();
            rig.pass(TERM);
            rig.tell();
            assert!(rig.is_old(), "{how}");
            end(&mut rig, op, call);
            let range = (0, if write { 4 } else { 4096 });
            assert!(rig.dropped().contains(&range), "{how}: {:?}", rig.stale);
            rig.told();
            assert!(!rig.is_old(), "{how}");
        }
    }
}

/// Its reply shows another version of the file than was read meanwhile: all pages are dropped after it.
#[test]
fn left_out_pages_may_drop_with_a_later_full_invalidation() {
    let mut rig = Rig::with_pages();
    let first = rig.reads();
    rig.pass(TERM);
    rig.tell();
    rig.read(Some(GrantId(12)), 1);
    rig.answered(first, Reply::Data(b"text".to_vec()), attr(2), None);
    assert_eq!(rig.dropped(), [(0, 0)]);
    rig.told();
    assert!(!rig.is_old());
}

/// The request came while the kernel was dropping its facts; then the server goes away again, and the request fails.
#[test]
fn pages_of_a_refused_queued_request_are_dropped() {
    let mut rig = Rig::with(Config { on_disconnect: OnDisconnect::Stale, ..Config::default() });
    rig.read(Some(FIRST), 1);
    rig.pass(TERM);
    rig.event(Event::Expired { why: String::new() });
    rig.event(Event::Restored { session: session(), kept: true });
    rig.write(true);
    rig.tell();
    assert!(rig.is_old());
    rig.event(Event::Expired { why: String::new() });
    assert_eq!(rig.answers.pop().unwrap().1, OpReply::Failed(Errno::ROFS));
    assert!(rig.dropped().contains(&(0, 4)));
    rig.told();
    assert!(!rig.is_old());
}

/// The reply to a read tells another version, so all pages are dropped. The recall that follows has an invalidation of
/// its own: until that one is done, the kernel may write back the pages of that reply.
#[test]
fn invalidation_before_a_recall_does_not_end_the_page_base() {
    let mut rig = Rig::with_pages();
    rig.read(Some(FIRST), 2);
    assert_eq!(rig.dropped(), [(0, 0)]);
    rig.recall();
    rig.tell();
    assert_eq!(rig.flush(), under(2, FIRST));
    rig.written(3, None);
    rig.told();
    assert_eq!(rig.flush(), None);
}
