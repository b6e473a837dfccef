//! Locks that are granted too late, locks that cannot be reclaimed, and requests sent under them.

use super::*;
use crate::OnDisconnect;
use nigh_types::WriteFlags;

const EIO: OpReply = OpReply::Failed(Errno::IO);
const EINTR: OpReply = OpReply::Failed(Errno::INTR);

impl Rig {
    fn ask_for(&mut self, fh: Fh, span: LockSpan, kind: LockKind) -> OpId {
        let (op, answer) = self.ask(Op::SetLock { ino: FILE.ino, fh, span, kind, pid: 4, wait: true });
        assert_eq!(answer, None);
        op
    }

    fn write(&mut self, fh: Fh) -> (OpId, CallId) {
        let (ino, data) = (FILE.ino, vec![1]);
        let (op, answer) = self.ask(Op::Write { ino, fh, offset: 0, data, flags: WriteFlags::default() });
        assert_eq!(answer, None);
        (op, self.call().0)
    }

    fn answer_to(&mut self, call: CallId, result: Result<Reply, Errno>) -> Vec<Output> {
        self.cache.handle_event(T0, Event::Response { call, response: Response::plain(result) });
        self.outputs()
    }

    fn is_back(&mut self, kept: bool) {
        self.cache.handle_event(T0, Event::Restored { session: session(), kept });
    }

    fn is_away(&mut self) {
        self.cache.handle_event(T0, Event::Expired { why: "test".into() });
    }

    /// Answers all reclaims, a lock as `lock` says for its first byte; returns the outputs.
    fn claim(&mut self, lock: impl Fn(u64) -> Result<Reply, Errno>) -> Vec<Output> {
        let claims = self.outputs();
        self.answer_claims(claims, lock)
    }

    fn answer_claims(
        &mut self,
        claims: Vec<Output>,
        lock: impl Fn(u64) -> Result<Reply, Errno>,
    ) -> Vec<Output> {
        let (mut claims, mut after) = (std::collections::VecDeque::from(claims), Vec::new());
        while let Some(output) = claims.pop_front() {
            let Output::Call { id, call, .. } = output else { panic!("{output:?}") };
            let result = match call {
                Call::Lock { start, reclaim: true, .. } => lock(start),
                Call::Reopen { handle, .. } => Ok(Reply::Opened { handle, attr: attr() }),
                other => panic!("{other:?}"),
            };
            let (more, others): (Vec<_>, Vec<_>) = self.answer_to(id, result).into_iter().partition(is_claim);
            claims.extend(more);
            after.extend(others);
        }
        after
    }
}

fn is_claim(output: &Output) -> bool {
    matches!(output, Output::Call { call: Call::Lock { reclaim: true, .. }, .. })
}

/// Returns a call's lock kind, `None` for an unlock.
fn asks(output: &Output) -> (CallId, Option<LockKind>, u64, u64) {
    match output {
        Output::Call { id, call: Call::Unlock { start, end, .. }, .. } => (*id, None, *start, *end),
        Output::Call {
            id, call: Call::Lock { kind, start, end, wait: false, reclaim: false, .. }, ..
        } => (*id, Some(*kind), *start, *end),
        other => panic!("{other:?}"),
    }
}

#[test]
fn late_lock_grant_does_not_release_the_next_lock() {
    let mut rig = Rig::new();
    let fh = rig.open();
    let first = rig.ask_for(fh, span(1, (0, 9)), LockKind::Write);
    let (first_call, _) = rig.call();
    rig.is_away();
    rig.cache.handle_interrupt(first, false);
    let outputs = rig.outputs();
    assert!(outputs.contains(&Output::Answer { op: first, answer: EINTR }), "{outputs:?}");
    assert!(outputs.contains(&Output::Cancel(first_call)), "{outputs:?}");
    rig.is_back(true);
    let second = rig.ask_for(fh, span(1, (0, 9)), LockKind::Write);
    let (second_call, _) = rig.call();
    assert_eq!(rig.respond(first_call, Ok(Reply::Done)), [], "it may be what the second is about to get");
    assert_eq!(rig.respond(second_call, Ok(Reply::Done)), [(second, OpReply::Done)]);
    // The part of another one that it does not hold is released.
    let third = rig.ask_for(fh, span(1, (5, 19)), LockKind::Write);
    let (call, _) = rig.call();
    rig.cache.handle_interrupt(third, true);
    rig.outputs();
    let given_back: Vec<_> = rig.answer_to(call, Ok(Reply::Done)).iter().map(asks).collect();
    assert!(matches!(given_back[..], [(_, None, 10, 19)]), "{given_back:?}");
}

#[test]
fn late_lock_grant_is_reverted_to_the_held_lock() {
    let mut rig = Rig::new();
    let fh = rig.open();
    let held = rig.ask_for(fh, span(1, (0, 9)), LockKind::Read);
    assert_eq!(rig.reply(Ok(Reply::Done)), [(held, OpReply::Done)]);
    let op = rig.ask_for(fh, span(1, (5, 14)), LockKind::Write);
    let (call, _) = rig.call();
    rig.cache.handle_interrupt(op, true);
    rig.outputs();
    let set: Vec<_> = rig.answer_to(call, Ok(Reply::Done)).iter().map(asks).collect();
    let [(again, Some(LockKind::Read), 5, 9), (_, None, 10, 14)] = set[..] else { panic!("{set:?}") };
    assert_eq!(rig.respond(again, Ok(Reply::Done)), []);
    assert_eq!(rig.ends_locks(Rig::flush(1), span(1, ALL)), None, "what it held is held");
}

#[test]
fn owner_with_a_weaker_lock_than_granted_gets_eio() {
    let mut rig = Rig::new();
    let fh = rig.open();
    rig.lock(fh, span(1, (0, 9)));
    let op = rig.ask_for(fh, span(1, (0, 9)), LockKind::Read);
    let (call, _) = rig.call();
    rig.cache.handle_interrupt(op, true);
    rig.outputs();
    let set: Vec<_> = rig.answer_to(call, Ok(Reply::Done)).iter().map(asks).collect();
    assert!(matches!(set[..], [(_, None, 0, u64::MAX)]), "{set:?}");
    assert_eq!(rig.at_once(Op::Read { ino: FILE.ino, fh, offset: 0, size: 1 }), EIO);
}

#[test]
fn requests_sent_under_a_lost_lock_fail_and_are_cancelled() {
    let mut rig = Rig::new();
    let (fh, other) = (rig.open(), rig.open());
    rig.lock(fh, span(1, ALL));
    let ((write, call), (elsewhere, elsewhere_call)) = (rig.write(fh), rig.write(other));
    rig.is_away();
    rig.outputs();
    rig.is_back(false);
    let after = rig.claim(|_| Err(Errno::AGAIN));
    let told = [Output::Answer { op: write, answer: EIO }, Output::Cancel(call)];
    assert_eq!(after[..2], told, "before what is out goes out again");
    assert!(matches!(asks(&after[2]), (_, None, 0, u64::MAX)));
    assert_eq!(after[3..], [Output::Reclaimed]);
    assert_eq!(rig.respond(call, Err(Errno::INTR)), []);
    let written = rig.respond(elsewhere_call, Ok(Reply::Written { offset: 0, count: 1 }));
    assert_eq!(written, [(elsewhere, OpReply::Written(1))]);
}

#[test]
fn owner_of_a_lost_lock_releases_its_other_locks() {
    let mut rig = Rig::new();
    let fh = rig.open();
    rig.lock(fh, span(1, (0, 9)));
    rig.lock(fh, span(1, (20, 29)));
    let op = rig.ask_for(fh, span(1, (40, 49)), LockKind::Write);
    let (call, _) = rig.call();
    rig.is_back(false);
    let after = rig.claim(|start| if start == 0 { Err(Errno::AGAIN) } else { Ok(Reply::Done) });
    assert_eq!(after[..2], [Output::Answer { op, answer: EIO }, Output::Cancel(call)]);
    assert!(matches!(asks(&after[2]), (_, None, 0, u64::MAX)), "this goes behind what is claimed");
    assert_eq!(after[3..], [Output::Reclaimed]);
    // The lock that it waited for is granted after all.
    let given_back: Vec<_> = rig.answer_to(call, Ok(Reply::Done)).iter().map(asks).collect();
    assert!(matches!(given_back[..], [(_, None, 40, 49)]), "{given_back:?}");
    assert_eq!(rig.at_once(Rig::flush(1)), OpReply::Done);
    rig.lock(fh, span(1, (0, 9)));
}

#[test]
fn close_during_a_lock_call_clears_a_lost_lock() {
    let mut rig = Rig::new();
    let (fh, other) = (rig.open(), rig.open());
    rig.lock(fh, span(1, (0, 9)));
    rig.ask_for(fh, span(1, (40, 49)), LockKind::Write);
    let (call, _) = rig.call();
    rig.is_back(false);
    rig.claim(|_| Err(Errno::AGAIN));
    assert_eq!(rig.ends_locks(Rig::flush(1), span(1, ALL)), None, "the one that is out may come");
    rig.respond(call, Err(Errno::INTR));
    rig.lock(other, span(1, (0, 9)));
    rig.lock(fh, span(1, (0, 9)));
}

#[test]
fn unlock_during_reclaim_releases_only_its_range() {
    let mut rig = Rig::new();
    let fh = rig.open();
    rig.lock(fh, span(1, (0, 99)));
    rig.is_back(false);
    let claims = rig.reopen();
    rig.ask(Op::Unlock { ino: FILE.ino, span: span(1, (10, 19)) });
    rig.outputs();
    let after = rig.answer_claims(claims, |_| Ok(Reply::Done));
    let ends: Vec<_> = after.iter().filter(|output| **output != Output::Reclaimed).map(asks).collect();
    assert!(matches!(ends[..], [(_, None, 10, 19)]), "{ends:?}");
}

#[test]
fn lock_wait_outlasts_the_request_deadline_while_connected() {
    let limit = Span::from_secs(30);
    let config = Config { on_disconnect: OnDisconnect::Fail(limit), ..Config::default() };
    let mut rig = Rig::with(config);
    let fh = rig.open();
    let op = rig.ask_for(fh, span(1, ALL), LockKind::Write);
    let (call, _) = rig.call();
    let after = |times: u64| T0.after(Span(limit.0 * times));
    for times in 1..3 {
        rig.cache.handle_timeout(after(times));
        assert_eq!(rig.outputs(), [], "the range is locked");
    }
    rig.is_away();
    rig.outputs();
    rig.cache.handle_timeout(after(3));
    assert_eq!(rig.outputs(), [Output::Answer { op, answer: EIO }, Output::Cancel(call)]);
    // A queued wait that was not sent ends too.
    let op = rig.ask_for(fh, span(1, ALL), LockKind::Write);
    assert_eq!(rig.outputs(), []);
    rig.cache.handle_timeout(after(4));
    assert_eq!(rig.outputs(), [Output::Answer { op, answer: EIO }]);
}
