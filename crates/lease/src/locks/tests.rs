//! The lock table against a model that keeps each byte by itself, and further tests.

use super::*;
use proptest::prelude::*;

const READ: LockKind = LockKind::Read;
const WRITE: LockKind = LockKind::Write;
/// Bytes of a model's object.
const BYTES: u64 = 16;

fn owner(session: u64, owner: u64) -> LockOwner {
    LockOwner { session, flock: false, owner }
}

fn flock(session: u64, number: u64) -> LockOwner {
    LockOwner { flock: true, ..owner(session, number) }
}

fn claim(object: u64, owner: LockOwner, kind: LockKind, start: u64, end: u64) -> LockRequest<u64> {
    let pid = u32::try_from(owner.owner).unwrap();
    LockRequest { object, owner, kind, start, end, pid }
}

fn whole(object: u64, owner: LockOwner, kind: LockKind) -> LockRequest<u64> {
    claim(object, owner, kind, 0, u64::MAX)
}

fn granted(table: &mut LockTable<u64>) -> Vec<(u64, CallId)> {
    let ended = std::iter::from_fn(|| table.poll_ended());
    ended.map(|(session, call, result)| result.map(|()| (session, call)).unwrap()).collect()
}

/// The lock of each owner on each byte, and the waiting calls.
#[derive(Default)]
struct Model {
    held: BTreeMap<(u64, u64, LockOwner), LockKind>,
    waits: Vec<(LockRequest<u64>, CallId)>,
    /// The reclaimable lock of each byte, from forgotten sessions.
    left: BTreeMap<(u64, u64, LockOwner), LockKind>,
}

impl Model {
    fn blockers(&self, claim: &LockRequest<u64>) -> BTreeSet<LockOwner> {
        let in_the_way = |(&(object, byte, owner), kind): (&(u64, u64, LockOwner), &LockKind)| {
            let there = object == claim.object && (claim.start..=claim.end).contains(&byte);
            let other = owner != claim.owner && owner.flock == claim.owner.flock;
            (there && other && kind.excludes(claim.kind)).then_some(owner)
        };
        self.held.iter().filter_map(in_the_way).collect()
    }

    fn set(&mut self, claim: &LockRequest<u64>) {
        let struck = |(object, byte, owner): &(u64, u64, LockOwner), kind: &LockKind| {
            let there = *object == claim.object && (claim.start..=claim.end).contains(byte);
            let other = *owner != claim.owner && owner.flock == claim.owner.flock;
            there && other && kind.excludes(claim.kind)
        };
        self.left.retain(|at, kind| !struck(at, kind));
        for byte in claim.start..=claim.end {
            self.held.insert((claim.object, byte, claim.owner), claim.kind);
        }
    }

    /// All owners that `claim` would wait for, directly or transitively.
    fn ahead(&self, claim: &LockRequest<u64>) -> BTreeSet<LockOwner> {
        let mut ahead = self.blockers(claim);
        loop {
            let waiting = self.waits.iter().filter(|(wait, _)| ahead.contains(&wait.owner));
            let further: Vec<LockOwner> = waiting.flat_map(|(wait, _)| self.blockers(wait)).collect();
            let before = ahead.len();
            ahead.extend(further);
            if ahead.len() == before {
                return ahead;
            }
        }
    }

    fn lock(&mut self, claim: LockRequest<u64>, wait: Option<CallId>) -> LockResult {
        if claim.owner.flock {
            let LockRequest { object, owner, kind, .. } = claim;
            self.held.retain(|(o, _, holder), held| (*o, *holder) != (object, owner) || *held == kind);
        }
        if self.blockers(&claim).is_empty() {
            self.set(&claim);
            return LockResult::Granted;
        }
        match wait {
            None => LockResult::Refused(Errno::AGAIN),
            Some(_) if !claim.owner.flock && self.ahead(&claim).contains(&claim.owner) => {
                LockResult::Refused(Errno::DEADLK)
            }
            Some(call) => {
                self.waits.push((claim, call));
                LockResult::Waits
            }
        }
    }

    /// Whether it may be reclaimed.
    fn claim(&mut self, claim: LockRequest<u64>) -> bool {
        let keys = |byte| (claim.object, byte, claim.owner);
        let strong = |kind: &LockKind| *kind == WRITE || claim.kind == READ;
        let may = (claim.start..=claim.end).all(|byte| self.left.get(&keys(byte)).is_some_and(strong));
        if may {
            for byte in claim.start..=claim.end {
                self.left.remove(&keys(byte));
            }
            assert_eq!(
                self.lock(claim, None),
                LockResult::Granted,
                "nothing that is held excludes what is left"
            );
        }
        may
    }

    fn end(&mut self, session: u64, forgotten: bool) {
        let ends = |owner: &LockOwner| owner.session == session;
        if forgotten {
            let held = self.held.iter().filter(|((.., owner), _)| ends(owner));
            self.left.extend(held.map(|(at, kind)| (*at, *kind)));
        } else {
            self.left.retain(|(.., owner), _| !ends(owner));
        }
        self.held.retain(|(.., owner), _| !ends(owner));
        self.waits.retain(|(claim, _)| !ends(&claim.owner));
    }

    fn unlock(&mut self, object: u64, owner: LockOwner, start: u64, end: u64) {
        self.held
            .retain(|(o, byte, holder), _| (*o, *holder) != (object, owner) || !(start..=end).contains(byte));
    }

    /// Grants waiting requests that no longer conflict, in their order of arrival for each object and space.
    fn settle(&mut self, spaces: &[(u64, bool)]) -> Vec<(u64, CallId)> {
        let mut granted = Vec::new();
        for space in spaces {
            loop {
                let mut again = false;
                let mut at = 0;
                while let Some((claim, call)) = self.waits.get(at).copied() {
                    if claim.space() == *space && self.blockers(&claim).is_empty() {
                        self.waits.remove(at);
                        self.set(&claim);
                        granted.push((claim.owner.session, call));
                        again = true;
                    } else {
                        at += 1;
                    }
                }
                if !again {
                    break;
                }
            }
        }
        granted
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Lock { object: u64, owner: LockOwner, kind: LockKind, start: u64, end: u64, wait: bool },
    Unlock { object: u64, owner: LockOwner, start: u64, end: u64 },
    Cancel { nth: usize },
    Claim { object: u64, owner: LockOwner, kind: LockKind, start: u64, end: u64 },
    End { session: u64, forgotten: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let object = 0..2_u64;
    let owner = (1..4_u64, 0..2_u64, prop::bool::weighted(0.2))
        .prop_map(|(session, owner, flock)| LockOwner { session, flock, owner });
    let range = (0..BYTES, 0..BYTES).prop_map(|(a, b)| (a.min(b), a.max(b)));
    let kind = prop::bool::ANY.prop_map(|write| if write { WRITE } else { READ });
    let again = (object.clone(), owner.clone(), kind.clone(), range.clone());
    let again = again.prop_map(|(object, owner, kind, (start, end))| {
        let (start, end) = if owner.flock { (0, BYTES - 1) } else { (start, end.min(start + 3)) };
        Step::Claim { object, owner, kind, start, end }
    });
    let lock = (object.clone(), owner.clone(), kind, range.clone(), prop::bool::weighted(0.7));
    let lock = lock.prop_map(|(object, owner, kind, (start, end), wait)| {
        let (start, end) = if owner.flock { (0, BYTES - 1) } else { (start, end) };
        Step::Lock { object, owner, kind, start, end, wait }
    });
    let unlock = (object, owner, range).prop_map(|(object, owner, (start, end))| {
        let (start, end) = if owner.flock { (0, BYTES - 1) } else { (start, end) };
        Step::Unlock { object, owner, start, end }
    });
    prop_oneof![
        6 => lock,
        4 => unlock,
        1 => (0..8_usize).prop_map(|nth| Step::Cancel { nth }),
        2 => again,
        1 => (1..4_u64, prop::bool::ANY).prop_map(|(session, forgotten)| Step::End { session, forgotten }),
    ]
}

/// The table's lock on each byte, for comparison.
fn bytes_of(table: &LockTable<u64>) -> BTreeMap<(u64, u64, LockOwner), LockKind> {
    let mut bytes = BTreeMap::new();
    for ((object, space), owners) in table.held.objects() {
        for (owner, ranges) in &owners.all {
            assert_eq!(owner.flock, *space);
            for byte in 0..BYTES {
                // Only a write lock conflicts with a read lock, any lock conflicts with a write lock.
                if ranges.first_conflict(byte, byte, READ).is_some() {
                    bytes.insert((*object, byte, *owner), WRITE);
                } else if ranges.first_conflict(byte, byte, WRITE).is_some() {
                    bytes.insert((*object, byte, *owner), READ);
                }
            }
        }
    }
    bytes
}

/// Indices and counts agree with the ranges.
fn check_books(table: &LockTable<u64>) {
    for book in [&table.held, table.reclaimable.book()] {
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        for (space, holders) in book.objects() {
            assert!(!holders.all.is_empty());
            for (owner, ranges) in &holders.all {
                assert!(ranges.count() > 0);
                *counts.entry(owner.session).or_default() += ranges.count();
                assert!(book.spaces(owner.session).any(|other| other == space));
                for byte in 0..BYTES {
                    let Some(info) = ranges.first_conflict(byte, byte, WRITE) else { continue };
                    let other = LockOwner { session: u64::MAX, ..*owner };
                    let claim = |kind| LockRequest {
                        object: space.0,
                        owner: other,
                        kind,
                        start: byte,
                        end: byte,
                        pid: 0,
                    };
                    let seen = |kind| book.conflicts(&claim(kind)).any(|found| found == (*owner, info));
                    assert_eq!((seen(WRITE), seen(READ)), (true, info.kind == WRITE));
                }
            }
        }
        for (session, count) in &counts {
            assert_eq!(book.count_of(*session), *count);
            let has = |space: &(u64, bool)| book.of_session(*space, *session).next().is_some();
            assert!(book.spaces(*session).all(has));
        }
        assert_eq!(book.count(), counts.values().sum());
    }
    let arrivals: Vec<u64> = table.waits.keys().copied().collect();
    let sorted = |all: Vec<u64>| BTreeSet::from_iter(all).into_iter().collect::<Vec<_>>();
    assert_eq!(arrivals, sorted(table.waits_of_object.values().flatten().copied().collect()));
    assert_eq!(arrivals, sorted(table.waits_of_owner.values().flatten().copied().collect()));
    assert_eq!(arrivals, sorted(table.waits_of_call.values().copied().collect()));
}

proptest! {
    #[test]
    fn lock_table_matches_per_byte_model(steps in prop::collection::vec(step(), 1..60)) {
        let (mut table, mut model) = (LockTable::default(), Model::default());
        for (number, step) in (1..).zip(steps) {
            let mut touched = Vec::new();
            match step {
                Step::Lock { object, owner, kind, start, end, wait } => {
                    let wanted = claim(object, owner, kind, start, end);
                    let wait = wait.then_some(CallId(number));
                    let first = table.conflict(&wanted).map(|(_, info)| info.start);
                    let blocked = model.blockers(&wanted);
                    prop_assert_eq!(first.is_some(), !blocked.is_empty());
                    prop_assert_eq!(table.handle_lock(wanted, wait), model.lock(wanted, wait));
                    touched.push((object, owner.flock));
                }
                Step::Unlock { object, owner, start, end } => {
                    prop_assert_eq!(table.handle_unlock(object, owner, start, end), Ok(()));
                    model.unlock(object, owner, start, end);
                    touched.push((object, owner.flock));
                }
                Step::Cancel { nth } => {
                    if let Some((claim, call)) = model.waits.get(nth).copied() {
                        model.waits.remove(nth);
                        prop_assert_eq!(table.handle_cancel(claim.owner.session, call), Some(claim.object));
                        prop_assert_eq!(table.handle_cancel(claim.owner.session, call), None);
                    }
                }
                Step::Claim { object, owner, kind, start, end } => {
                    let wanted = claim(object, owner, kind, start, end);
                    let granted = table.handle_reclaim(wanted, false) == LockResult::Granted;
                    prop_assert_eq!(granted, model.claim(wanted));
                    touched.push((object, owner.flock));
                }
                Step::End { session, forgotten } => {
                    if forgotten {
                        table.handle_forgotten(session);
                    } else {
                        table.handle_session_end(session);
                    }
                    model.end(session, forgotten);
                    touched.extend([(0, false), (0, true), (1, false), (1, true)]);
                }
            }
            prop_assert_eq!(granted(&mut table), model.settle(&touched));
            prop_assert_eq!(bytes_of(&table), model.held.clone());
            check_books(&table);
        }
        (1..4).for_each(|session| table.handle_session_end(session));
        prop_assert!(table.is_empty() && table.ranges() == 0);
        prop_assert_eq!(table.reclaimable.book().count(), 0);
    }
}

#[test]
fn forgotten_lock_is_reclaimed_unless_conflicting_lock_was_granted() {
    let mut table = LockTable::default();
    table.handle_lock(claim(1, owner(1, 1), WRITE, 0, 9), None);
    table.handle_lock(claim(1, owner(1, 1), READ, 10, 19), None);
    table.handle_lock(claim(1, owner(1, 1), WRITE, 30, 39), None);
    table.handle_lock(whole(1, flock(1, 1), READ), None);
    table.handle_forgotten(1);
    assert_eq!((table.reclaimable_by(1), table.reclaimable_by(2)), (4, 0));
    let again = |session, kind, start, end| claim(1, owner(session, 1), kind, start, end);
    assert_eq!(
        table.handle_reclaim(again(2, WRITE, 0, 9), false),
        LockResult::Refused(Errno::AGAIN),
        "a stranger"
    );
    // Other owners lock and unlock.
    for wanted in [claim(1, owner(3, 1), READ, 4, 15), whole(1, flock(3, 1), READ)] {
        assert_eq!(table.handle_lock(wanted, None), LockResult::Granted);
    }
    table.handle_session_end(3);
    table.handle_successor(1, 2);
    let refused = LockResult::Refused(Errno::AGAIN);
    assert_eq!(table.handle_reclaim(again(2, WRITE, 0, 9), false), refused);
    assert_eq!(table.handle_reclaim(again(2, WRITE, 0, 3), false), LockResult::Granted);
    assert_eq!(table.handle_reclaim(again(2, WRITE, 0, 3), false), refused, "once");
    assert_eq!(table.handle_reclaim(again(2, WRITE, 10, 19), false), refused, "it held a weaker one");
    assert_eq!(table.handle_reclaim(again(2, READ, 10, 19), false), LockResult::Granted, "readers share");
    assert_eq!(table.handle_reclaim(whole(1, flock(2, 1), READ), false), LockResult::Granted);
    // Forgotten again, before all locks were reclaimed.
    table.handle_forgotten(2);
    table.handle_successor(2, 4);
    assert_eq!(
        table.handle_reclaim(again(4, WRITE, 30, 39), false),
        LockResult::Granted,
        "not claimed before"
    );
    assert_eq!(table.handle_reclaim(again(4, WRITE, 0, 3), false), LockResult::Granted);
    table.handle_reclaim_ended(4);
    assert_eq!(table.handle_reclaim(again(4, READ, 10, 19), false), refused, "too late");
    assert_eq!(table.reclaimable.book().count(), 0);
}

#[test]
fn waiting_locks_are_granted_in_arrival_order() {
    let mut table = LockTable::default();
    assert_eq!(table.handle_lock(whole(1, owner(1, 1), WRITE), None), LockResult::Granted);
    for (session, kind) in [(2, WRITE), (3, READ), (4, READ), (5, WRITE)] {
        let tried = table.handle_lock(whole(1, owner(session, 1), kind), Some(CallId(7)));
        assert_eq!(tried, LockResult::Waits);
    }
    table.handle_unlock(1, owner(1, 1), 0, u64::MAX).unwrap();
    assert_eq!(granted(&mut table), [(2, CallId(7))]);
    table.handle_session_end(2);
    assert_eq!(granted(&mut table), [(3, CallId(7)), (4, CallId(7))], "readers together");
    assert_eq!(table.handle_cancel(5, CallId(7)), Some(1));
    table.handle_session_end(3);
    table.handle_session_end(4);
    assert_eq!(granted(&mut table), []);
    assert!(table.is_empty());
}

#[test]
fn conflicting_lock_is_reported() {
    let mut table = LockTable::default();
    table.handle_lock(claim(1, owner(1, 5), READ, 20, 29), None);
    table.handle_lock(claim(1, owner(2, 6), WRITE, 10, 19), None);
    let (holder, info) = table.conflict(&whole(1, owner(3, 1), WRITE)).unwrap();
    assert_eq!((holder, info), (owner(2, 6), LockInfo { kind: WRITE, start: 10, end: 19, pid: 6 }));
    assert_eq!(table.conflict(&claim(1, owner(3, 1), READ, 20, 29)), None, "readers share");
    assert_eq!(table.conflict(&whole(1, flock(3, 1), WRITE)), None, "flock is a space of its own");
    assert_eq!(table.conflict(&claim(1, owner(2, 6), WRITE, 10, 19)), None, "one's own is not in the way");
    assert_eq!(table.conflict(&whole(2, owner(3, 1), WRITE)), None, "another object");
}

#[test]
fn lock_deadlock_across_sessions_and_objects_is_refused() {
    let mut table = LockTable::default();
    for n in 1..=3 {
        table.handle_lock(whole(n, owner(n, 1), WRITE), None);
    }
    assert_eq!(table.handle_lock(whole(2, owner(1, 1), READ), Some(CallId(1))), LockResult::Waits);
    assert_eq!(table.handle_lock(whole(3, owner(2, 1), READ), Some(CallId(1))), LockResult::Waits);
    let back = whole(1, owner(3, 1), READ);
    assert_eq!(table.handle_lock(back, Some(CallId(1))), LockResult::Refused(Errno::DEADLK));
    assert_eq!(table.handle_lock(back, None), LockResult::Refused(Errno::AGAIN));
    assert_eq!(table.handle_lock(whole(1, owner(3, 2), READ), Some(CallId(2))), LockResult::Waits);
    table.handle_unlock(3, owner(3, 1), 0, u64::MAX).unwrap();
    assert_eq!(granted(&mut table), [(2, CallId(1))]);
}

#[test]
fn converted_flock_releases_old_lock_to_waiters() {
    let mut table = LockTable::default();
    for n in [1, 2] {
        assert_eq!(table.handle_lock(whole(1, flock(n, 1), READ), None), LockResult::Granted);
    }
    // Both request an exclusive lock: as on Linux, the first releases its shared lock, and the second gets the
    // exclusive one.
    assert_eq!(table.handle_lock(whole(1, flock(1, 1), WRITE), Some(CallId(1))), LockResult::Waits);
    assert_eq!(table.handle_lock(whole(1, flock(2, 1), WRITE), Some(CallId(1))), LockResult::Granted);
    assert_eq!(granted(&mut table), []);
    assert_eq!(table.handle_lock(whole(1, flock(2, 1), READ), None), LockResult::Granted);
    assert_eq!(granted(&mut table), []);
    table.handle_unlock(1, flock(2, 1), 0, u64::MAX).unwrap();
    assert_eq!(granted(&mut table), [(1, CallId(1))]);
}

#[test]
fn number_of_lock_ranges_per_session_is_bounded() {
    let mut table = LockTable::default();
    for n in 0..MAX_RANGES {
        assert_eq!(table.handle_lock(claim(1, owner(1, 1), READ, 2 * n, 2 * n), None), LockResult::Granted);
    }
    let more = claim(2, owner(1, 2), READ, 0, 0);
    assert_eq!(table.handle_lock(more, None), LockResult::Refused(Errno::NOLCK));
    assert_eq!(table.handle_lock(claim(2, owner(2, 2), READ, 0, 0), None), LockResult::Granted);
    table.handle_unlock(1, owner(1, 1), 0, 0).unwrap();
    assert_eq!(table.handle_lock(more, None), LockResult::Granted);
}

/// A session that has locked every second byte of an object, up to its limit minus `less`.
fn nearly_full(table: &mut LockTable<u64>, less: u64) {
    for n in 0..MAX_RANGES - less {
        assert_eq!(table.handle_lock(claim(1, owner(1, 1), READ, 2 * n, 2 * n), None), LockResult::Granted);
    }
}

#[test]
fn a_range_is_not_split_into_more_than_a_session_may_hold() {
    let mut table = LockTable::default();
    assert_eq!(table.handle_lock(whole(1, owner(1, 1), WRITE), None), LockResult::Granted);
    let mut unlocked = 0;
    while table.handle_unlock(1, owner(1, 1), 2 * unlocked + 1, 2 * unlocked + 1).is_ok() {
        unlocked += 1;
    }
    assert_eq!((unlocked, table.held(1)), (MAX_RANGES - 1, MAX_RANGES));
    let beyond = 2 * unlocked + 9;
    assert_eq!(table.handle_unlock(1, owner(1, 1), beyond, beyond), Err(Errno::NOLCK));
    let other = claim(1, owner(2, 1), READ, beyond, beyond);
    assert_eq!(table.handle_lock(other, None), LockResult::Refused(Errno::AGAIN), "it is held as before");
    let convert = claim(1, owner(1, 1), READ, beyond, beyond);
    assert_eq!(table.handle_lock(convert, None), LockResult::Refused(Errno::NOLCK));
    // An unlock that reduces the number of ranges is always possible.
    table.handle_unlock(1, owner(1, 1), 0, 0).unwrap();
    table.handle_unlock(1, owner(1, 1), beyond, beyond).unwrap();
    table.handle_unlock(1, owner(1, 1), 0, u64::MAX).unwrap();
    assert!(table.is_empty() && table.ranges() == 0);
}

#[test]
fn waiting_lock_is_refused_when_session_reached_range_limit() {
    let mut table = LockTable::default();
    nearly_full(&mut table, 1);
    table.handle_lock(whole(2, owner(2, 1), WRITE), None);
    for call in [1, 2] {
        let wanted = claim(2, owner(1, call), READ, 0, 9);
        assert_eq!(table.handle_lock(wanted, Some(CallId(call))), LockResult::Waits);
    }
    table.handle_unlock(2, owner(2, 1), 0, u64::MAX).unwrap();
    let ended: Vec<_> = std::iter::from_fn(|| table.poll_ended()).collect();
    assert_eq!(ended, [(1, CallId(1), Ok(())), (1, CallId(2), Err(Errno::NOLCK))]);
    check_books(&table);
}

#[test]
fn number_of_waiting_lock_calls_per_object_is_bounded() {
    let mut table = LockTable::default();
    table.handle_lock(whole(1, flock(1, 1), WRITE), None);
    let wait = |table: &mut LockTable<u64>, object, n: usize| {
        let n = n as u64 + 2;
        table.handle_lock(whole(object, flock(n, 1), WRITE), Some(CallId(n)))
    };
    for n in 0..MAX_WAITS_OF_OBJECT {
        assert_eq!(wait(&mut table, 1, n), LockResult::Waits);
    }
    assert_eq!(wait(&mut table, 1, MAX_WAITS_OF_OBJECT), LockResult::Refused(Errno::NOLCK));
    table.handle_lock(whole(2, flock(1, 1), WRITE), None);
    assert_eq!(wait(&mut table, 2, MAX_WAITS_OF_OBJECT), LockResult::Waits, "of another one");
}

/// Each call takes time with the logarithm of the number of locks, or this would take minutes.
#[test]
fn lock_calls_of_many_owners_take_no_longer_than_those_of_few() {
    const OWNERS: u64 = 40_000;
    let mut table = LockTable::default();
    let claim = |session, number: u64, kind, start, end| {
        let owner = LockOwner { session, flock: false, owner: number };
        LockRequest { object: 1_u64, owner, kind, start, end, pid: 1 }
    };
    // Readers that all overlap a distant byte, and writers side by side.
    for number in 0..OWNERS {
        assert_eq!(table.handle_lock(claim(1, number, READ, number, 1 << 40), None), LockResult::Granted);
        let at = (1 << 41) + 10 * number;
        assert_eq!(table.handle_lock(claim(2, number, WRITE, at, at), None), LockResult::Granted);
    }
    for number in 0..OWNERS {
        let at = (1 << 41) + 10 * number + 5;
        let probe = claim(3, number, WRITE, at, at);
        assert_eq!(table.conflict(&probe), None);
        assert_eq!(table.handle_lock(probe, None), LockResult::Granted);
        let all = claim(3, number, WRITE, 1 << 40, 1 << 42);
        assert_eq!(table.handle_lock(all, Some(CallId(number))), LockResult::Waits);
        assert_eq!(table.handle_cancel(3, CallId(number)), Some(1));
        assert!(table.conflict(&claim(3, number, WRITE, 0, u64::MAX)).is_some());
    }
    table.handle_forgotten(1);
    table.handle_session_end(2);
    table.handle_session_end(3);
    assert!(table.is_empty());
}
