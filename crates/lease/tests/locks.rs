//! Time of lock calls with very many locks.

use nigh_lease::{LockOwner, LockRequest, LockResult, LockTable};
use nigh_types::{Errno, LockKind};
use std::time::{Duration, Instant};

/// The most ranges of one session.
const MOST: u64 = 65_536;

/// A shared flock of one object.
fn shared(session: u64, owner: u64) -> LockRequest<u64> {
    let owner = LockOwner { session, flock: true, owner };
    LockRequest { object: 1, owner, kind: LockKind::Read, start: 0, end: u64::MAX, pid: 1 }
}

#[test]
fn reclaimable_locks_of_many_sessions_do_not_slow_other_calls() {
    let mut table = LockTable::default();
    let begun = Instant::now();
    for session in [1, 2] {
        for number in 0..MOST {
            assert_eq!(table.handle_lock(shared(session, number), None), LockResult::Granted);
        }
        assert_eq!(table.handle_lock(shared(session, MOST), None), LockResult::Refused(Errno::NOLCK));
        table.handle_forgotten(session);
    }
    for number in 0..MOST {
        assert_eq!(table.handle_lock(shared(3, number), None), LockResult::Granted);
    }
    assert_eq!([1, 2].map(|session| table.reclaimable_by(session)), [MOST; 2], "readers share");
    let alone = LockRequest { kind: LockKind::Write, ..shared(4, 1) };
    assert_eq!(table.handle_lock(alone, None), LockResult::Refused(Errno::AGAIN));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}
