//! Calls for locks and for closing files, and replies when locks are lost.

mod lock_reclaim;
mod reclaim_order;

use crate::test_fixtures::session;
use crate::{Cache, Caller, Config, Fh, LockSpan, Op, OpReply, Output};
use nigh_types::*;

const T0: Time = Time(1_000_000_000);
const FILE: NodeId = NodeId { ino: 7, generation: 7 };
const ALL: (u64, u64) = (0, i64::MAX.cast_unsigned());

struct Rig {
    cache: Cache,
    last: u64,
}

fn attr() -> Attr {
    Attr { mode: 0o100_644, nlink: 1, ..Attr::default() }
}

fn span(owner: u64, (start, end): (u64, u64)) -> LockSpan {
    LockSpan { owner, flock: false, start, end }
}

impl Rig {
    fn new() -> Rig {
        Rig::with(Config::default())
    }

    /// Cache that knows one file.
    fn with(config: Config) -> Rig {
        let mut rig = Rig { cache: Cache::new(config), last: 0 };
        rig.cache.handle_event(T0, Event::Attached(session()));
        let (op, answer) = rig.ask(Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
        assert_eq!(answer, None);
        let entry = Entry { id: FILE, attr: attr(), target: None, no_xattrs: true };
        let answers = rig.reply(Ok(Reply::Entry(Some(entry))));
        assert!(matches!(answers[..], [(id, OpReply::Node(_))] if id == op));
        rig
    }

    fn ask(&mut self, op: Op) -> (OpId, Option<OpReply>) {
        self.last += 1;
        let id = OpId(self.last);
        let caller = Caller { pid: 4, ..Caller::default() };
        (id, self.cache.handle_op(T0, id, caller, op))
    }

    /// Returns the outputs, except invalidations.
    fn outputs(&mut self) -> Vec<Output> {
        let mut all = Vec::new();
        loop {
            match self.cache.poll_output() {
                Output::Timeout(..) => return all,
                Output::Invalidate { id, .. } => self.cache.handle_invalidated(T0, id),
                other => all.push(other),
            }
        }
    }

    /// Returns the one call that was put out.
    fn call(&mut self) -> (CallId, Call) {
        match &mut self.outputs()[..] {
            [Output::Call { id, call, .. }] => (*id, call.clone()),
            other => panic!("not one call: {other:?}"),
        }
    }

    fn respond(&mut self, call: CallId, result: Result<Reply, Errno>) -> Vec<(OpId, OpReply)> {
        self.cache.handle_event(T0, Event::Response { call, response: Response::plain(result) });
        let mut answers = Vec::new();
        for output in self.outputs() {
            match output {
                Output::Answer { op, answer } => answers.push((op, answer)),
                other => panic!("not an answer: {other:?}"),
            }
        }
        answers
    }

    fn reply(&mut self, result: Result<Reply, Errno>) -> Vec<(OpId, OpReply)> {
        let (call, _) = self.call();
        self.respond(call, result)
    }

    fn open(&mut self) -> Fh {
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        self.ask(Op::Open { ino: FILE.ino, access, append: false });
        match &self.reply(Ok(Reply::Opened { handle: Handle(3), attr: attr() }))[..] {
            [(_, OpReply::Opened(opened))] => opened.fh,
            other => panic!("not opened: {other:?}"),
        }
    }

    fn want(&mut self, fh: Fh, span: LockSpan, wait: bool) -> OpId {
        let (op, answer) =
            self.ask(Op::SetLock { ino: FILE.ino, fh, span, kind: LockKind::Write, pid: 4, wait });
        assert_eq!(answer, None);
        op
    }

    fn lock(&mut self, fh: Fh, span: LockSpan) {
        let op = self.want(fh, span, false);
        assert_eq!(self.reply(Ok(Reply::Done)), [(op, OpReply::Done)]);
    }

    /// Checks that the cache replies at once, without a call.
    #[track_caller]
    fn at_once(&mut self, op: Op) -> OpReply {
        let (_, answer) = self.ask(op);
        let outputs = self.outputs();
        assert!(
            outputs.iter().all(|o| matches!(o, Output::Call { call: Call::Release { .. }, .. })),
            "{outputs:?}"
        );
        answer.expect("it waits")
    }

    /// Starts the request, and checks that it ends all locks of `owner`.
    #[track_caller]
    fn ends_locks(&mut self, op: Op, span: LockSpan) -> Option<OpReply> {
        let (_, answer) = self.ask(op);
        let outputs = self.outputs();
        let is_end = |output: &Output| match output {
            Output::Call { call: Call::Unlock { owner, flock, start: 0, end: u64::MAX, .. }, .. } => {
                (*owner, *flock) == (span.owner, span.flock)
            }
            _ => false,
        };
        assert_eq!(outputs.iter().filter(|o| is_end(o)).count(), 1, "{outputs:?}");
        answer
    }

    fn flush(owner: u64) -> Op {
        Op::Flush { ino: FILE.ino, owner }
    }

    /// Answers every reclaim, after which the end of reclaiming must be put out.
    fn claims(&mut self, mut answer: impl FnMut(&Call) -> Result<Reply, Errno>) -> Vec<Call> {
        let mut claims = Vec::new();
        loop {
            let outputs = self.outputs();
            if outputs == [Output::Reclaimed] {
                return claims;
            }
            assert!(!outputs.is_empty(), "after {claims:?}");
            for output in outputs {
                let Output::Call { id, call, .. } = output else { panic!("{output:?}") };
                let response = Response::plain(answer(&call));
                self.cache.handle_event(T0, Event::Response { call: id, response });
                claims.push(call);
            }
        }
    }

    /// Answers reclaims of files, which come first; returns the outputs.
    fn reopen(&mut self) -> Vec<Output> {
        for output in self.outputs() {
            let Output::Call { id, call: Call::Reopen { handle, .. }, .. } = output else {
                panic!("{output:?}")
            };
            let response = Response::plain(Ok(Reply::Opened { handle, attr: attr() }));
            self.cache.handle_event(T0, Event::Response { call: id, response });
        }
        self.outputs()
    }

    fn lose(&mut self) -> Vec<Output> {
        self.cache.handle_event(T0, Event::Lost { why: "test".into() });
        self.outputs()
    }
}

#[test]
fn close_sends_an_unlock_only_for_possible_lock_owners() {
    let mut rig = Rig::new();
    let (one, two) = (rig.open(), rig.open());
    assert_eq!(rig.at_once(Rig::flush(1)), OpReply::Done, "no lock was ever held");
    rig.lock(one, span(1, (0, 9)));
    assert_eq!(rig.at_once(Rig::flush(2)), OpReply::Done, "another process");
    assert_eq!(rig.ends_locks(Rig::flush(1), span(1, ALL)), None);
    assert_eq!(rig.at_once(Rig::flush(1)), OpReply::Done, "once is enough");
    assert_eq!(rig.at_once(Op::Release { fh: one, flock: None }), OpReply::Done);

    rig.lock(two, span(1, ALL));
    let (op, _) = rig.ask(Op::Unlock { ino: FILE.ino, span: span(1, ALL) });
    assert_eq!(rig.reply(Ok(Reply::Done)), [(op, OpReply::Done)]);
    assert_eq!(rig.at_once(Rig::flush(1)), OpReply::Done, "all was unlocked");
    let op = rig.want(two, span(1, ALL), false);
    assert_eq!(rig.reply(Err(Errno::AGAIN)), [(op, OpReply::Failed(Errno::AGAIN))]);
    assert_eq!(rig.at_once(Rig::flush(1)), OpReply::Done, "none was granted");
}

#[test]
fn locks_owned_by_an_open_file_end_with_it() {
    let mut rig = Rig::new();
    let (one, two) = (rig.open(), rig.open());
    rig.lock(one, span(90, ALL));
    let flock = LockSpan { flock: true, ..span(91, ALL) };
    rig.lock(two, flock);
    assert_eq!(rig.at_once(Rig::flush(1)), OpReply::Done);
    let released = rig.ends_locks(Op::Release { fh: one, flock: None }, span(90, ALL));
    assert_eq!(released, Some(OpReply::Done), "no caller waits for that");
    assert_eq!(rig.ends_locks(Op::Release { fh: two, flock: Some(91) }, flock), Some(OpReply::Done));
}

#[test]
fn signal_cancels_a_lock_wait_and_the_remotes_reply_decides() {
    let mut rig = Rig::new();
    let fh = rig.open();
    for (result, answer) in
        [(Err(Errno::INTR), OpReply::Failed(Errno::INTR)), (Ok(Reply::Done), OpReply::Done)]
    {
        let op = rig.want(fh, span(1, ALL), true);
        let (call, _) = rig.call();
        rig.cache.handle_interrupt(op, false);
        rig.cache.handle_interrupt(op, false);
        assert_eq!(rig.outputs(), [Output::Cancel(call)], "once");
        assert_eq!(rig.respond(call, result), [(op, answer)]);
    }
    let op = rig.want(fh, span(1, ALL), false);
    let (call, _) = rig.call();
    rig.cache.handle_interrupt(op, false);
    assert_eq!(rig.outputs(), [], "what does not wait for others is not ended");
    assert_eq!(rig.respond(call, Ok(Reply::Done)), [(op, OpReply::Done)]);
}

#[test]
fn lock_granted_to_a_dead_caller_is_released() {
    let mut rig = Rig::new();
    let fh = rig.open();
    let op = rig.want(fh, span(1, (5, 9)), true);
    let (call, _) = rig.call();
    rig.cache.handle_interrupt(op, true);
    let outputs = rig.outputs();
    assert_eq!(outputs, [Output::Answer { op, answer: OpReply::Failed(Errno::INTR) }, Output::Cancel(call)]);
    assert_eq!(rig.ends_locks(Rig::flush(1), span(1, ALL)), None, "its call may yet be granted");
    let response = Response::plain(Ok(Reply::Done));
    rig.cache.handle_event(T0, Event::Response { call, response });
    let (_, call) = rig.call();
    assert!(matches!(call, Call::Unlock { owner: 1, start: 5, end: 9, .. }), "{call:?}");
}

#[test]
fn aborted_lock_wait_is_not_sent_again() {
    let mut rig = Rig::new();
    let fh = rig.open();
    let op = rig.want(fh, span(1, ALL), true);
    let (call, _) = rig.call();
    rig.cache.handle_event(T0, Event::Response { call, response: Response::plain(Err(Errno::STALE)) });
    let (walk, what) = rig.call();
    assert!(matches!(what, Call::ResolvePath { .. }));
    rig.cache.handle_interrupt(op, false);
    assert_eq!(rig.outputs(), [Output::Cancel(call)]);
    assert_eq!(rig.respond(walk, Ok(Reply::Done)), [(op, OpReply::Failed(Errno::INTR))]);
}

#[test]
fn owner_of_a_lost_lock_gets_eio_until_it_closes() {
    let mut rig = Rig::new();
    let (fh, other) = (rig.open(), rig.open());
    rig.lock(fh, span(1, ALL));
    let waiting = rig.want(other, span(2, ALL), true);
    rig.outputs();
    let lost = rig.lose();
    assert_eq!(lost, [Output::Answer { op: waiting, answer: OpReply::Failed(Errno::IO) }]);
    rig.cache.handle_event(T0, Event::Attached(session()));
    rig.claims(|call| match call {
        Call::Reopen { .. } => Ok(Reply::Opened { handle: Handle(3), attr: attr() }),
        _ => Err(Errno::AGAIN),
    });

    let eio = OpReply::Failed(Errno::IO);
    let ino = FILE.ino;
    let write = |fh| Op::Write { ino, fh, offset: 0, data: vec![1], flags: WriteFlags::default() };
    assert_eq!(rig.at_once(Op::Read { ino, fh, offset: 0, size: 1 }), eio);
    assert_eq!(rig.at_once(write(fh)), eio);
    assert_eq!(rig.at_once(Op::Unlock { ino, span: span(1, ALL) }), eio);
    assert_eq!(rig.at_once(Op::TestLock { ino, span: span(1, ALL), kind: LockKind::Read }), eio);
    let again = Op::SetLock { ino, fh: other, span: span(1, ALL), kind: LockKind::Read, pid: 1, wait: true };
    assert_eq!(rig.at_once(again), eio, "whichever file it asks through");

    rig.lock(other, span(2, ALL));
    assert_eq!(rig.at_once(Rig::flush(1)), OpReply::Done);
    let (_, answer) = rig.ask(Op::Read { ino, fh, offset: 0, size: 1 });
    assert_eq!(answer, None, "it has closed the file");
    rig.call();
    rig.lock(fh, span(1, (3, 3)));
}

#[test]
fn close_succeeds_when_the_session_is_lost() {
    let mut rig = Rig::new();
    let fh = rig.open();
    rig.lock(fh, span(1, ALL));
    let (op, answer) = rig.ask(Rig::flush(1));
    assert_eq!(answer, None);
    rig.outputs();
    assert_eq!(rig.lose(), [Output::Answer { op, answer: OpReply::Done }]);
    let span = span(1, ALL);
    let (parked, _) = rig.ask(Op::SetLock { ino: 7, fh, span, kind: LockKind::Read, pid: 1, wait: true });
    rig.cache.handle_interrupt(parked, false);
    assert_eq!(rig.outputs(), [Output::Answer { op: parked, answer: OpReply::Failed(Errno::INTR) }]);
}

#[test]
fn held_locks_and_nothing_else_are_reclaimed() {
    let mut rig = Rig::new();
    let (one, two) = (rig.open(), rig.open());
    rig.lock(one, span(1, (0, 99)));
    let (op, _) = rig.ask(Op::Unlock { ino: FILE.ino, span: span(1, (10, 19)) });
    assert_eq!(rig.reply(Ok(Reply::Done)), [(op, OpReply::Done)]);
    let flock = LockSpan { flock: true, ..span(91, (0, 0)) };
    rig.lock(two, flock);
    rig.lock(two, span(2, (200, 299)));
    // An unlock without a reply.
    let (unlock, _) = rig.ask(Op::Unlock { ino: FILE.ino, span: span(2, (200, 299)) });
    let (unlock_call, _) = rig.call();
    rig.cache.handle_event(T0, Event::Expired { why: "test".into() });
    let (closing, answer) = rig.ask(Rig::flush(1));
    assert_eq!(answer, None);
    let (closing_call, _) = rig.call();
    rig.cache.handle_event(T0, Event::Restored { session: session(), kept: false });
    let claims = rig.claims(|call| match call {
        Call::Lock { .. } => Ok(Reply::Done),
        _ => Ok(Reply::Opened { handle: Handle(3), attr: attr() }),
    });
    let locks = claims.iter().filter_map(|call| match call {
        Call::Lock { owner, flock, start, end, wait, reclaim, .. } => {
            assert!(*reclaim && !*wait);
            Some((*owner, *flock, *start, *end))
        }
        _ => None,
    });
    assert_eq!(locks.collect::<Vec<_>>(), [(91, true, 0, u64::MAX)]);
    assert_eq!(rig.respond(closing_call, Ok(Reply::Done)), [(closing, OpReply::Done)]);
    assert_eq!(rig.respond(unlock_call, Ok(Reply::Done)), [(unlock, OpReply::Done)]);
}

#[test]
fn lock_reclaimed_while_its_owner_closes_is_released() {
    let mut rig = Rig::new();
    let fh = rig.open();
    rig.lock(fh, span(1, (5, 9)));
    rig.cache.handle_event(T0, Event::Restored { session: session(), kept: false });
    let claims = rig.reopen();
    let (closing, _) = rig.ask(Rig::flush(1));
    let (closing_call, _) = rig.call();
    let [Output::Call { id, call: Call::Lock { .. }, .. }] = claims[..] else { panic!("{claims:?}") };
    rig.cache.handle_event(T0, Event::Response { call: id, response: Response::plain(Ok(Reply::Done)) });
    let after = rig.outputs();
    let given_back = |output: &Output| match output {
        Output::Call { call: Call::Unlock { start, end, .. }, .. } => (*start, *end) == (5, 9),
        _ => false,
    };
    assert_eq!(after.iter().filter(|output| given_back(output)).count(), 1, "{after:?}");
    assert_eq!(rig.respond(closing_call, Ok(Reply::Done)), [(closing, OpReply::Done)]);
}

#[test]
fn another_export_in_a_new_session_fails_all_open_files() {
    let mut rig = Rig::new();
    let fh = rig.open();
    rig.lock(fh, span(1, ALL));
    let (waits, _) = rig.ask(Op::Read { ino: FILE.ino, fh, offset: 0, size: 1 });
    let (call, _) = rig.call();
    rig.cache.handle_event(T0, Event::Expired { why: "test".into() });
    let other = SessionParams { root: NodeId { ino: 1, generation: 9 }, ..session() };
    rig.cache.handle_event(T0, Event::Restored { session: other, kept: false });
    let answer = OpReply::Failed(Errno::IO);
    assert_eq!(
        rig.outputs(),
        [Output::Answer { op: waits, answer: answer.clone() }, Output::Cancel(call), Output::Reclaimed]
    );
    assert_eq!(rig.at_once(Op::Read { ino: FILE.ino, fh, offset: 0, size: 1 }), answer);
    assert_eq!(rig.at_once(Op::Unlock { ino: FILE.ino, span: span(1, ALL) }), answer);
    assert_eq!(rig.at_once(Op::Release { fh, flock: None }), OpReply::Done);
}

#[test]
fn acknowledgement_is_never_sent_to_another_session() {
    let mut rig = Rig::new();
    for kept in [true, false] {
        let recall = Recall { id: RecallId(5), node: FILE, covers: LeaseScope::Data, names: vec![] };
        rig.cache.handle_event(T0, Event::Recall(recall));
        let Output::Invalidate { id, .. } = rig.cache.poll_output() else { panic!("not told") };
        rig.cache.handle_event(T0, Event::Expired { why: "test".into() });
        rig.cache.handle_event(T0, Event::Restored { session: session(), kept });
        rig.cache.handle_invalidated(T0, id);
        let said = rig.outputs().contains(&Output::Acknowledge(RecallId(5)));
        assert_eq!(said, kept, "only a session that was kept waits for it");
    }
}
