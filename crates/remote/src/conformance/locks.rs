//! Locks of several owners of one session.

use super::Named;
use super::caller::{Caller, unlink};
use nigh_types::{Call, Errno, LockInfo, LockKind, NodeRef, Reply};

pub(super) const CASES: &[Named] = &[
    ("locks_exclude_each_other", exclusive),
    ("locks_are_split_joined_and_changed", ranges),
    ("the_first_lock_in_the_way_is_told", getlock),
    ("flock_and_fcntl_locks_do_not_meet", spaces),
    ("a_waiting_lock_is_granted_when_it_can_be", waiting),
    ("a_waiting_lock_can_be_cancelled", cancelled),
    ("a_lock_that_was_not_held_before_cannot_be_claimed", claimed),
    ("locks_of_removed_and_of_other_things", elsewhere),
];

const READ: LockKind = LockKind::Read;
const WRITE: LockKind = LockKind::Write;
const ALL: (u64, u64) = (0, u64::MAX);

fn lock(node: &NodeRef, owner: u64, kind: LockKind, (start, end): (u64, u64)) -> Call {
    let pid = u32::try_from(owner).expect("small owners");
    Call::Lock { node: node.clone(), owner, flock: false, kind, start, end, wait: false, pid, reclaim: false }
}

fn waits(call: Call) -> Call {
    match call {
        Call::Lock { node, owner, flock, kind, start, end, pid, .. } => {
            Call::Lock { node, owner, flock, kind, start, end, wait: true, pid, reclaim: false }
        }
        other => other,
    }
}

fn flock(node: &NodeRef, owner: u64, kind: LockKind) -> Call {
    Call::Lock {
        node: node.clone(),
        owner,
        flock: true,
        kind,
        start: 0,
        end: 5,
        wait: false,
        pid: 1,
        reclaim: false,
    }
}

fn unlock(node: &NodeRef, owner: u64, (start, end): (u64, u64)) -> Call {
    Call::Unlock { node: node.clone(), owner, flock: false, start, end }
}

fn done(c: &mut Caller<'_>, call: Call) {
    assert_eq!(c.ok(call), Reply::Done);
}

fn in_the_way(c: &mut Caller<'_>, node: &NodeRef, owner: u64, kind: LockKind, at: u64) -> Option<LockInfo> {
    match c.ok(Call::GetLock { node: node.clone(), owner, flock: false, kind, start: at, end: at }) {
        Reply::LockConflict(info) => info,
        other => panic!("not about locks: {other:?}"),
    }
}

fn exclusive(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    done(c, lock(&file, 1, WRITE, ALL));
    done(c, lock(&file, 1, WRITE, ALL));
    assert_eq!(c.errno(lock(&file, 2, WRITE, (5, 5))), Errno::AGAIN);
    assert_eq!(c.errno(lock(&file, 2, READ, (1 << 40, 1 << 41))), Errno::AGAIN);
    done(c, unlock(&file, 2, ALL));
    assert_eq!(c.errno(lock(&file, 2, READ, ALL)), Errno::AGAIN, "another's lock is not ended");
    done(c, unlock(&file, 1, ALL));
    done(c, unlock(&file, 1, ALL));
    done(c, lock(&file, 2, READ, ALL));
    done(c, lock(&file, 3, READ, ALL));
    assert_eq!(c.errno(lock(&file, 3, WRITE, ALL)), Errno::AGAIN);
    assert_eq!(c.errno(lock(&file, 2, WRITE, (3, 3))), Errno::AGAIN, "and its own share stays");
}

fn ranges(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    done(c, lock(&file, 1, WRITE, (100, 199)));
    done(c, lock(&file, 2, WRITE, (0, 99)));
    done(c, lock(&file, 2, WRITE, (200, u64::MAX)));
    done(c, unlock(&file, 1, (140, 159)));
    done(c, lock(&file, 2, WRITE, (140, 159)));
    assert_eq!(c.errno(lock(&file, 2, WRITE, (139, 139))), Errno::AGAIN);
    assert_eq!(c.errno(lock(&file, 2, WRITE, (160, 160))), Errno::AGAIN);
    done(c, lock(&file, 1, READ, (100, 110)));
    done(c, lock(&file, 2, READ, (100, 110)));
    assert_eq!(c.errno(lock(&file, 2, READ, (110, 111))), Errno::AGAIN);
}

fn getlock(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    assert_eq!(in_the_way(c, &file, 1, WRITE, 0), None);
    done(c, lock(&file, 1, READ, (10, 19)));
    done(c, lock(&file, 2, WRITE, (20, 29)));
    let info = |kind, start, end, pid| Some(LockInfo { kind, start, end, pid });
    assert_eq!(in_the_way(c, &file, 3, WRITE, 15), info(READ, 10, 19, 1));
    assert_eq!(in_the_way(c, &file, 3, READ, 15), None);
    assert_eq!(in_the_way(c, &file, 3, READ, 25), info(WRITE, 20, 29, 2));
    assert_eq!(in_the_way(c, &file, 2, WRITE, 25), None, "one's own");
    assert_eq!(in_the_way(c, &file, 3, WRITE, 30), None);
    let both = Call::GetLock { node: file, owner: 3, flock: false, kind: WRITE, start: 0, end: u64::MAX };
    assert_eq!(c.ok(both), Reply::LockConflict(info(READ, 10, 19, 1)));
}

fn spaces(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    done(c, flock(&file, 1, WRITE));
    done(c, lock(&file, 2, WRITE, ALL));
    assert_eq!(c.errno(flock(&file, 2, READ)), Errno::AGAIN);
    assert_eq!(c.errno(lock(&file, 1, READ, ALL)), Errno::AGAIN, "the same number is another owner");
    done(c, flock(&file, 1, READ));
    done(c, flock(&file, 2, READ));
    done(c, unlock(&file, 1, ALL));
    done(c, unlock(&file, 2, ALL));
    assert_eq!(c.errno(flock(&file, 3, WRITE)), Errno::AGAIN, "unlocked were the others");
    for owner in [1, 2] {
        done(c, Call::Unlock { node: file.clone(), owner, flock: true, start: 9, end: 9 });
    }
    done(c, flock(&file, 3, WRITE));
}

fn waiting(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    done(c, waits(lock(&file, 1, WRITE, ALL)));
    let (writer, reader) = (waits(lock(&file, 2, WRITE, (0, 9))), waits(lock(&file, 3, READ, (20, 29))));
    let (second, third) = (c.start(writer), c.start(reader));
    assert_eq!(c.errno(lock(&file, 4, READ, (50, 50))), Errno::AGAIN, "others are answered meanwhile");
    done(c, unlock(&file, 1, (20, u64::MAX)));
    assert_eq!(c.finish(third)[0].result, Ok(Reply::Done));
    done(c, unlock(&file, 1, ALL));
    assert_eq!(c.finish(second)[0].result, Ok(Reply::Done));
    assert_eq!(c.errno(lock(&file, 1, READ, (9, 9))), Errno::AGAIN);
    assert_eq!(c.errno(lock(&file, 1, WRITE, (29, 29))), Errno::AGAIN);
}

fn cancelled(c: &mut Caller<'_>) {
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    done(c, lock(&file, 1, WRITE, ALL));
    let waiter = c.start(waits(lock(&file, 2, WRITE, ALL)));
    // Ensures that the lock call is waiting by now.
    assert_eq!(c.errno(lock(&file, 3, READ, ALL)), Errno::AGAIN);
    c.cancel(waiter);
    assert_eq!(c.finish(waiter)[0].result, Err(Errno::INTR));
    done(c, unlock(&file, 1, ALL));
    done(c, lock(&file, 3, WRITE, ALL));
}

/// No state was lost here, so there is nothing to reclaim.
fn claimed(c: &mut Caller<'_>) {
    let again = |call| match call {
        Call::Lock { node, owner, flock, kind, start, end, wait, pid, .. } => {
            Call::Lock { node, owner, flock, kind, start, end, wait, pid, reclaim: true }
        }
        other => other,
    };
    let root = c.root();
    let file = c.file(&root, b"f", b"");
    assert_eq!(c.errno(again(lock(&file, 1, WRITE, (0, 9)))), Errno::AGAIN);
    assert_eq!(c.errno(again(flock(&file, 1, READ))), Errno::AGAIN);
    done(c, lock(&file, 2, WRITE, ALL));
    done(c, unlock(&file, 2, ALL));
    assert_eq!(c.errno(again(waits(lock(&file, 2, READ, (9, 9))))), Errno::AGAIN, "it was unlocked");
    done(c, lock(&file, 1, WRITE, (0, 9)));
}

fn elsewhere(c: &mut Caller<'_>) {
    let root = c.root();
    let dir = c.mkdir(&root, b"d");
    assert_eq!(c.errno(lock(&dir, 1, READ, ALL)), Errno::ISDIR);
    let (file, handle) = c.create(&root, b"f");
    let other = c.file(&root, b"g", b"");
    done(c, lock(&file, 1, WRITE, ALL));
    done(c, lock(&other, 2, WRITE, ALL));
    c.ok(unlink(&root, b"f"));
    assert_eq!(c.errno(lock(&file, 2, WRITE, ALL)), Errno::AGAIN, "it is still open");
    done(c, unlock(&file, 1, ALL));
    done(c, lock(&file, 2, WRITE, ALL));
    done(c, unlock(&file, 2, ALL));
    c.release(handle);
    assert_eq!(c.errno_after_release(&lock(&file, 2, WRITE, ALL)), Errno::STALE);
}
