//! A file lock table with arbitrary requests.

use super::Reached;
use super::script::Script;
use nigh_lease::{LockOwner, LockRequest, LockResult, LockTable};
use nigh_types::{CallId, LockKind};
use std::collections::BTreeSet;

const SESSIONS: u64 = 3;
const ENDS: [u64; 8] = [0, 1, 2, 100, 101, u64::MAX - 2, u64::MAX - 1, u64::MAX];

/// Input: steps, each a byte and its arguments. Checked: granted locks exclude conflicting ones, each wait ends once,
/// and the table is empty when all sessions have ended.
pub fn locks(input: &[u8]) -> Reached {
    let mut reached = Reached::new();
    let mut script = Script::new(input);
    let mut table = LockTable::default();
    let mut waits = BTreeSet::new();
    let mut calls = 0;
    while let Some(step) = script.byte() {
        let owner = LockOwner {
            session: script.small() % SESSIONS,
            flock: step.is_multiple_of(16),
            owner: script.small() % 3,
        };
        let (object, one, two) = (script.small() % 2, script.one_of(&ENDS), script.one_of(&ENDS));
        let (start, end) = if owner.flock { (0, u64::MAX) } else { (one.min(two), one.max(two)) };
        match step / 16 % 8 {
            0..=4 => {
                let kind = if step.is_multiple_of(2) { LockKind::Read } else { LockKind::Write };
                let claim = LockRequest { object, owner, kind, start, end, pid: 1 };
                calls += 1;
                let call = CallId(calls);
                // A process waits for one lock at a time.
                let wait = (step / 16 % 8 < 3).then_some(call);
                match table.handle_lock(claim, wait) {
                    LockResult::Granted => {
                        reached.insert("granted");
                        let other = LockOwner { session: SESSIONS, ..owner };
                        let rival = LockRequest { owner: other, kind: LockKind::Write, ..claim };
                        assert!(table.conflict(&rival).is_some(), "a lock that was granted keeps others out");
                    }
                    LockResult::Waits => {
                        assert!(wait.is_some(), "who does not want to wait does not");
                        reached.insert("waits");
                        waits.insert((owner.session, call));
                    }
                    LockResult::Refused(_) => drop(reached.insert("refused")),
                }
            }
            5 => drop(table.handle_unlock(object, owner, start, end)),
            6 => {
                let call = CallId(script.small());
                let was_waiting = table.handle_cancel(owner.session, call).is_some();
                assert_eq!(was_waiting, waits.remove(&(owner.session, call)), "call {} waits", call.0);
            }
            _ => {
                table.handle_session_end(owner.session);
                waits.retain(|(session, _)| *session != owner.session);
                assert_eq!(table.held(owner.session), 0);
            }
        }
        while let Some((session, call, result)) = table.poll_ended() {
            reached.insert(if result.is_ok() { "waited and granted" } else { "waited in vain" });
            assert!(waits.remove(&(session, call)), "call {} waited, and ends once", call.0);
        }
        assert_eq!(table.waits().count(), waits.len());
    }
    (0..SESSIONS).for_each(|session| table.handle_session_end(session));
    assert!(table.is_empty(), "something is left of sessions that have ended");
    reached
}
