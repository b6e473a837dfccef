//! Reclaim order, and deferred replies of the session before.

use super::*;
use crate::{InvalidationId, KernelInvalidation};

/// Returns the invalidations that are not done.
#[derive(Default)]
struct Untold(Vec<InvalidationId>);

impl Rig {
    /// Returns the outputs while the kernel has not dropped its facts.
    fn put_out(&mut self, untold: &mut Untold) -> Vec<Output> {
        let mut all = Vec::new();
        loop {
            match self.cache.poll_output() {
                Output::Timeout(..) => return all,
                Output::Invalidate { id, .. } => untold.0.push(id),
                other => all.push(other),
            }
        }
    }

    /// Answers a call in a session that has kept everything, as a deferred reply; then that session is lost, and
    /// another takes its place. Returns the outputs to the new session.
    fn answered_by_a_session_that_is_forgotten(
        &mut self,
        call: CallId,
        result: Result<Reply, Errno>,
        untold: &mut Untold,
    ) -> Vec<Output> {
        let lapsed = || Event::Expired { why: "test".into() };
        self.cache.handle_event(T0, lapsed());
        self.cache.handle_event(T0, Event::Restored { session: session(), kept: true });
        self.cache.handle_event(T0, Event::Response { call, response: Response::plain(result) });
        self.cache.handle_event(T0, lapsed());
        assert_eq!(self.put_out(untold), [], "nothing is answered before the kernel has forgotten");
        self.cache.handle_event(T0, Event::Restored { session: session(), kept: false });
        self.put_out(untold)
    }

    /// Completes the invalidation; returns the outputs.
    fn forgotten(&mut self, untold: Untold) -> Vec<Output> {
        untold.0.into_iter().for_each(|id| self.cache.handle_invalidated(T0, id));
        self.outputs()
    }

    fn say(&mut self, call: CallId, result: Result<Reply, Errno>, untold: &mut Untold) -> Vec<Output> {
        self.cache.handle_event(T0, Event::Response { call, response: Response::plain(result) });
        self.put_out(untold)
    }
}

fn opened(handle: u64) -> Result<Reply, Errno> {
    Ok(Reply::Opened { handle: Handle(handle), attr: attr() })
}

/// Returns the calls, with the number of the file that each reclaims.
fn reopens(outputs: &[Output]) -> Vec<(CallId, u64)> {
    let reopen = |output: &Output| match output {
        Output::Call { id, call: Call::Reopen { handle, .. }, .. } => (*id, handle.0),
        other => panic!("{other:?}"),
    };
    outputs.iter().map(reopen).collect()
}

const WRITE: Access =
    Access { read: true, write: true, truncate: true, direct: false, sync: false, append: false };

#[test]
fn file_opened_in_a_forgotten_session_is_reclaimed_before_the_reply() {
    for had in [Ok(()), Err(Errno::ACCES)] {
        let (mut rig, mut untold) = (Rig::new(), Untold::default());
        rig.open();
        let (op, answer) = rig.ask(Op::Open { ino: FILE.ino, access: WRITE, append: false });
        assert_eq!(answer, None);
        let (call, _) = rig.call();
        let claims = rig.answered_by_a_session_that_is_forgotten(call, opened(9), &mut untold);
        let [(first, 3), (second, 9)] = reopens(&claims)[..] else { panic!("{claims:?}") };
        assert!(
            matches!(&claims[1], Output::Call { call: Call::Reopen { access, .. }, .. } if !access.truncate && access.write),
            "it was truncated already"
        );
        assert_eq!(rig.say(first, opened(3), &mut untold), []);
        assert_eq!(rig.say(second, had.and(opened(9)), &mut untold), []);
        let after = rig.forgotten(untold);
        match (had, &after[..]) {
            (Ok(()), [Output::Reclaimed, Output::Answer { op: told, answer: OpReply::Opened(file) }]) => {
                assert_eq!(*told, op);
                rig.ask(Op::Read { ino: FILE.ino, fh: file.fh, offset: 0, size: 1 });
                assert!(matches!(rig.call().1, Call::Read { handle: Some(Handle(9)), .. }));
            }
            (Err(errno), [Output::Reclaimed, Output::Answer { op: told, answer }]) => {
                assert_eq!((*told, answer), (op, &OpReply::Failed(errno)));
            }
            (_, other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn file_created_in_a_forgotten_session_is_reclaimed_at_its_name() {
    let (mut rig, mut untold) = (Rig::new(), Untold::default());
    let name = Name::new(b"new").unwrap();
    let access = Access { truncate: false, ..WRITE };
    let create = Op::Create {
        dir: 1,
        name: name.clone(),
        mode: 0o644,
        umask: 0,
        exclusive: true,
        access,
        append: false,
    };
    let (op, answer) = rig.ask(create);
    assert_eq!(answer, None);
    let (call, _) = rig.call();
    let node = NodeId { ino: 8, generation: 8 };
    let entry = Entry { id: node, attr: attr(), target: None, no_xattrs: true };
    let made = Ok(Reply::Created { entry, handle: Some(Handle(9)), existed: false });
    let claims = rig.answered_by_a_session_that_is_forgotten(call, made, &mut untold);
    let [Output::Call { id, call: Call::Reopen { node: place, handle: Handle(9), .. }, .. }] = &claims[..]
    else {
        panic!("{claims:?}")
    };
    assert_eq!((place.node, place.path_hint.as_ref().map(|hint| &hint.1)), (node, Some(&name)));
    assert_eq!(rig.say(*id, opened(9), &mut untold), []);
    let after = rig.forgotten(untold);
    let [Output::Reclaimed, Output::Answer { op: told, answer: OpReply::Created(..) }] = after[..] else {
        panic!("{after:?}")
    };
    assert_eq!(told, op);
}

#[test]
fn lock_granted_in_a_forgotten_session_without_a_reply_is_requested_again() {
    for (result, answer) in
        [(Ok(Reply::Done), OpReply::Done), (Err(Errno::AGAIN), OpReply::Failed(Errno::AGAIN))]
    {
        let (mut rig, mut untold) = (Rig::new(), Untold::default());
        let fh = rig.open();
        let op = rig.want(fh, span(1, (0, 9)), false);
        let (call, _) = rig.call();
        let out = rig.answered_by_a_session_that_is_forgotten(call, Ok(Reply::Done), &mut untold);
        let [claim, Output::Call { id: again, call: Call::Lock { reclaim: false, .. }, .. }] = &out[..]
        else {
            panic!("{out:?}")
        };
        assert_eq!(*again, call);
        let (claim, _) = reopens(std::slice::from_ref(claim))[0];
        assert_eq!(rig.say(claim, opened(3), &mut untold), [], "it is unlocked");
        assert_eq!(rig.forgotten(untold), [Output::Reclaimed]);
        assert_eq!(rig.respond(call, result), [(op, answer)]);
    }
}

/// No other owner may hold the lock that it was about to get.
#[test]
fn lock_granted_in_a_forgotten_session_to_a_dead_caller_is_not_requested_again() {
    let (mut rig, mut untold) = (Rig::new(), Untold::default());
    let fh = rig.open();
    let op = rig.want(fh, span(1, (0, 9)), false);
    let (call, _) = rig.call();
    rig.cache.handle_interrupt(op, true);
    rig.outputs();
    let out = rig.answered_by_a_session_that_is_forgotten(call, Ok(Reply::Done), &mut untold);
    let [(claim, 3)] = reopens(&out)[..] else { panic!("{out:?}") };
    assert_eq!(rig.say(claim, opened(3), &mut untold), []);
    assert_eq!(rig.forgotten(untold), [Output::Reclaimed]);
    assert_eq!(rig.at_once(Rig::flush(1)), OpReply::Done, "it holds nothing");
}

/// The server may grant locks only on open files.
#[test]
fn locks_are_reclaimed_after_all_files() {
    let mut rig = Rig::new();
    let (fh, _) = (rig.open(), rig.open());
    rig.lock(fh, span(1, (0, 9)));
    rig.cache.handle_event(T0, Event::Restored { session: session(), kept: false });
    let claims = rig.outputs();
    let [(first, 3), (second, 3)] = reopens(&claims)[..] else { panic!("{claims:?}") };
    let mut untold = Untold::default();
    assert_eq!(rig.say(second, opened(3), &mut untold), [], "one is not had yet");
    let out = rig.say(first, opened(3), &mut untold);
    let [Output::Call { id, call: Call::Lock { reclaim: true, .. }, .. }] = out[..] else {
        panic!("{out:?}")
    };
    assert_eq!(rig.say(id, Ok(Reply::Done), &mut untold), [Output::Reclaimed]);
    assert!(rig.forgotten(untold).is_empty());
}

/// The forgotten session may have done it, or not.
#[test]
fn lock_downgrade_without_a_reply_is_reclaimed_as_the_weaker_lock() {
    for refused in [false, true] {
        let mut rig = Rig::new();
        let fh = rig.open();
        rig.lock(fh, span(1, (0, 99)));
        let kind = LockKind::Read;
        let weaker = Op::SetLock { ino: FILE.ino, fh, span: span(1, (10, 19)), kind, pid: 4, wait: false };
        let (op, answer) = rig.ask(weaker);
        assert_eq!(answer, None);
        let (call, _) = rig.call();
        rig.cache.handle_event(T0, Event::Expired { why: "test".into() });
        rig.cache.handle_event(T0, Event::Restored { session: session(), kept: false });
        let claims = rig.claims(|call| match call {
            Call::Lock { .. } => Ok(Reply::Done),
            _ => opened(3),
        });
        let locks = claims.iter().filter_map(|call| match call {
            Call::Lock { kind, start, end, .. } => Some((*kind, *start, *end)),
            _ => None,
        });
        let parts = [(LockKind::Write, 0, 9), (LockKind::Read, 10, 19), (LockKind::Write, 20, 99)];
        assert_eq!(locks.collect::<Vec<_>>(), parts);
        let response = |refused| Response::plain(if refused { Err(Errno::NOLCK) } else { Ok(Reply::Done) });
        rig.cache.handle_event(T0, Event::Response { call, response: response(refused) });
        let answer = if refused { OpReply::Failed(Errno::IO) } else { OpReply::Done };
        let after = rig.outputs();
        assert!(after.contains(&Output::Answer { op, answer }), "{after:?}");
        let (_, read) = rig.ask(Op::Read { ino: FILE.ino, fh, offset: 0, size: 1 });
        let told = OpReply::Failed(Errno::IO);
        assert_eq!(
            read,
            refused.then_some(told),
            "a client that assumes more locks than it holds is corrected"
        );
    }
}

/// A request whose pages an invalidation left out fails: the pages show old data.
#[test]
fn pages_left_out_for_a_request_are_dropped_when_it_fails() {
    let range = KernelInvalidation::Data { ino: FILE.ino, offset: 0, length: 100 };
    let read = |fh| Op::Read { ino: FILE.ino, fh, offset: 0, size: 100 };
    let told = |rig: &mut Rig| {
        let mut told = Vec::new();
        loop {
            match rig.cache.poll_output() {
                Output::Timeout(..) => return told,
                Output::Invalidate { id, stale, .. } => {
                    rig.cache.handle_invalidated(T0, id);
                    told.extend(stale);
                }
                _ => {}
            }
        }
    };
    let recall = Recall { id: RecallId(5), node: FILE, covers: LeaseScope::Data, names: vec![] };
    for killed in [false, true] {
        // After a recall: it is refused, or its caller is killed.
        let mut rig = Rig::new();
        let fh = rig.open();
        let (op, _) = rig.ask(read(fh));
        let (call, _) = rig.call();
        rig.cache.handle_event(T0, Event::Recall(recall.clone()));
        told(&mut rig);
        if killed {
            rig.cache.handle_interrupt(op, true);
            assert!(told(&mut rig).contains(&range), "its caller was killed");
            assert!(
                rig.cache.droppable_ranges(InvalidationId(99), FILE.ino, (0, 0)).contains(&(0, 0)),
                "nothing is locked"
            );
        }
        let response = Response::plain(Err(Errno::IO));
        rig.cache.handle_event(T0, Event::Response { call, response });
        assert!(told(&mut rig).contains(&range), "it was refused");
        // While the remote is away: a queued request, and one in flight when the session is lost.
        let (_, answer) = rig.ask(read(fh));
        assert_eq!(answer, None);
        rig.call();
        rig.cache.handle_event(T0, Event::Expired { why: "test".into() });
        let (op, _) = rig.ask(read(fh));
        told(&mut rig);
        rig.cache.handle_interrupt(op, true);
        assert_eq!(told(&mut rig), std::slice::from_ref(&range), "of the one that waited");
        rig.cache.handle_event(T0, Event::Lost { why: "test".into() });
        assert!(told(&mut rig).contains(&range), "of the one that was out");
    }
}
