use super::thread::ROOT;
use super::*;
use crate::driver::tests::DriverHarness;
use crate::reply::ReplyFormat;
use nigh_cache::{Caller, Op};
use nigh_fuse::{Notification, NotifyOutcome};
use nigh_remote::Event;
use nigh_types::{Bug, LeaseScope, Name, OpId, Recall, RecallId, Span, WriteFlags, plant};
use std::thread;
use std::time::{Duration, Instant};

mod names;

impl Notifier {
    /// Invalidations in the queue, and copies.
    fn queued(&self) -> (usize, usize) {
        let jobs = self.jobs.lock();
        (jobs.jobs().map(|job| job.stale.len()).sum(), jobs.jobs().map(|job| job.copies.len()).sum())
    }

    /// Whether nothing is queued.
    pub fn is_idle(&self) -> bool {
        self.jobs.lock().jobs().next().is_none()
    }
}

/// A lost wakeup would leave a daemon that never ends.
#[test]
fn notifier_stops_on_request_at_any_time() {
    let driver = DriverHarness::new().driver;
    for round in 0..2_000_u64 {
        let notifier = Arc::new(Notifier::new().unwrap());
        let (running, of) = (Arc::clone(&notifier), Arc::clone(&driver));
        let thread = thread::spawn(move || running.run(&of, true));
        if round % 2 == 0 {
            let urgency = if round % 4 == 0 { Urgency::AllGrantsEnded } else { Urgency::Ordinary };
            notifier.queue(InvalidationId(round), vec![KernelInvalidation::Attr { ino: 7 }], urgency);
        }
        notifier.stop();
        let give_up = Instant::now() + Duration::from_secs(20);
        while !thread.is_finished() {
            assert!(Instant::now() < give_up, "round {round}: it does not stop");
            thread::yield_now();
        }
        thread.join().unwrap();
    }
}

/// With a mount below, a dentry that leads there is never invalidated, and no epoch is sent; other dentries are
/// invalidated.
#[test]
fn dentry_that_leads_to_a_submount_is_not_invalidated() {
    let stage = DriverHarness::new();
    let (driver, transport) = (stage.driver, stage.kernel);
    // There are mounts below the root.
    driver.mountpoint.set("/".into()).unwrap();
    let thread = running(&driver);
    let root = driver.root();
    // For both names, the last LOOKUP may be unapplied.
    for at in ["proc", "no"] {
        driver.revalidations.note(crate::revalidations::NameKey::of(root, &name(at)), 7, 0);
    }
    driver.notifier.queue(
        InvalidationId(1),
        vec![KernelInvalidation::AllDentries(vec![(root, name("proc")), (root, name("no"))])],
        Urgency::Ordinary,
    );
    until("both are told", || transport.notifications().len() == 2);
    assert_eq!(transport.notifications(), [expired(ROOT, b"proc"), dropped(ROOT, b"no")]);
    assert_eq!(driver.with(|core, _| core.cache.level()), nigh_cache::NotifyLevel::NoEpoch);
    stopped(&driver, thread);
}

/// An overlay's dentries would stay stale after an epoch. An overlay tries a whiteout when it is mounted.
#[test]
fn no_epoch_is_sent_after_a_whiteout_rename() {
    let stage = DriverHarness::new();
    let (driver, transport) = (stage.driver, stage.kernel);
    let thread = running(&driver);
    let root = driver.root();
    let epoch = || vec![KernelInvalidation::AllDentries(vec![(root, name("a"))])];
    driver.notifier.queue(InvalidationId(1), epoch(), Urgency::Ordinary);
    until("it is told", || transport.notifications().len() == 1);
    let (from, to, no_replace, exchange) = (root, root, false, false);
    let op =
        Op::Rename { from, name: name("x"), to, new_name: name("y"), no_replace, exchange, whiteout: true };
    driver.operate(3, OpId(3), Caller::default(), ReplyFormat::Empty, op);
    driver.notifier.queue(InvalidationId(2), epoch(), Urgency::Ordinary);
    until("both are told", || transport.notifications().len() == 2);
    assert_eq!(transport.notifications(), [Notification::IncEpoch, expired(ROOT, b"a")]);
    assert_eq!(driver.with(|core, _| core.cache.level()), nigh_cache::NotifyLevel::NoEpoch);
    stopped(&driver, thread);
}

/// An unapplied LOOKUP reply would revalidate an expired dentry.
#[test]
fn dentry_is_dropped_while_a_lookup_reply_may_not_have_been_applied() {
    let stage = DriverHarness::new();
    let (driver, transport) = (stage.driver, stage.kernel);
    let thread = running(&driver);
    let root = driver.root();
    // The state of a thread of another pid namespace is unknown.
    driver.revalidations.note(crate::revalidations::NameKey::of(root, &name("a")), 7, 0);
    let stale = ["a", "b"].map(|at| KernelInvalidation::Entry { dir: root, name: name(at) });
    driver.notifier.queue(InvalidationId(1), stale.to_vec(), Urgency::Ordinary);
    until("both are told", || transport.notifications().len() == 2);
    assert_eq!(transport.notifications(), [dropped(ROOT, b"a"), expired(ROOT, b"b")]);
    stopped(&driver, thread);
}

/// A kernel in which some notifications block until released.
struct BlockingKernel {
    waits: Mutex<bool>,
    let_go: parking_lot::Condvar,
    holds: fn(&Notification<'_>) -> bool,
}

impl BlockingKernel {
    fn new(holds: fn(&Notification<'_>) -> bool) -> Arc<BlockingKernel> {
        Arc::new(BlockingKernel { waits: Mutex::new(true), let_go: parking_lot::Condvar::new(), holds })
    }

    fn stage(self: &Arc<BlockingKernel>) -> DriverHarness {
        let stuck = Arc::clone(self);
        // `cargo xtask sim --planted` checks that these tests notice a bug; other builds can have none.
        let bug = std::env::var("NIGH_PLANTED").ok().and_then(|name| Bug::of_name(&name));
        let _ = plant(bug.as_slice());
        DriverHarness::judging(move |notification| {
            let mut waits = stuck.waits.lock();
            while *waits && (stuck.holds)(notification) {
                stuck.let_go.wait(&mut waits);
            }
            Ok(NotifyOutcome::Done)
        })
    }

    fn let_go(&self) {
        *self.waits.lock() = false;
        self.let_go.notify_all();
    }
}

fn expired(parent: u64, name: &'static [u8]) -> Notification<'static> {
    Notification::InvalEntry { parent, name: name.into(), expire_only: true }
}

fn dropped(parent: u64, name: &'static [u8]) -> Notification<'static> {
    Notification::InvalEntry { parent, name: name.into(), expire_only: false }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while !so() {
        assert!(Instant::now() < give_up, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn running(driver: &Arc<Driver>) -> thread::JoinHandle<()> {
    let of = Arc::clone(driver);
    thread::spawn(move || of.notifier.run(&of, true))
}

fn stopped(driver: &Driver, thread: thread::JoinHandle<()>) {
    driver.notifier.stop();
    until("it stops", || thread.is_finished());
    thread.join().unwrap();
}

/// The first created inode.
const MADE: u64 = 2;

fn pages_of(ino: u64) -> KernelInvalidation {
    KernelInvalidation::Data { ino, offset: 0, length: 0 }
}

/// A dirty mapping is written back before its page is dropped, and the server is unreachable.
#[test]
fn blocked_invalidation_yields_to_an_urgent_one_and_is_repeated() {
    let stuck =
        BlockingKernel::new(|told| matches!(told, Notification::InvalInode { ino: MADE, offset: 0.., .. }));
    let mut stage = stuck.stage();
    assert_eq!(stage.make("file", false).ino, MADE);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    let stale = vec![pages_of(MADE), KernelInvalidation::Attr { ino: 8 }];
    driver.notifier.queue(InvalidationId(901), stale, Urgency::Ordinary);
    let told =
        |one: &Notification<'static>| kernel.notifications().iter().filter(|other| *other == one).count();
    until("it is told", || told(&Notification::contents(MADE)) == 1);
    let all =
        vec![KernelInvalidation::AllDentries(vec![]), pages_of(MADE), KernelInvalidation::Attr { ino: 9 }];
    driver.notifier.queue(InvalidationId(902), all, Urgency::AllGrantsEnded);
    until("what goes first", || told(&Notification::attributes(9)) == 1);
    assert_eq!((told(&Notification::IncEpoch), told(&Notification::attributes(8))), (1, 0));
    stuck.let_go();
    until("what was left", || told(&Notification::attributes(8)) == 1);
    assert!(told(&Notification::contents(MADE)) >= 3, "told again behind it");
    stopped(&driver, thread);
}

/// The kernel may know an earlier inode of this number: that says nothing of a reply in flight.
#[test]
fn inode_with_two_nodeids_is_unknown_if_the_kernel_lacks_one() {
    use NotifyOutcome::{Done, Unknown};
    assert_eq!(super::thread::of_all(&[Done, Unknown]), Some(Unknown));
    assert_eq!(super::thread::of_all(&[Unknown, Done]), Some(Unknown));
    assert_eq!(super::thread::of_all(&[Done, Done]), Some(Done));
    assert_eq!(super::thread::of_all(&[]), None);
}

/// Advances to just before the end of the session's term.
fn lapse(stage: &DriverHarness) {
    stage.pass(Span::from_secs(14));
    stage.driver.with(|_, _| ());
}

fn is_forgetting(driver: &Driver) -> bool {
    driver.with(|core, _| core.cache.is_flushing_all())
}

/// However many files are blocked, urgent jobs go on with all others, with a bounded number of threads. Invalidations
/// without a free thread stay unacknowledged.
#[test]
fn urgent_job_sends_unblocked_invalidations_and_ends_only_when_all_are_sent() {
    let stuck = BlockingKernel::new(|told| matches!(told, Notification::InvalInode { offset: 0.., .. }));
    let mut stage = stuck.stage();
    let inos: Vec<u64> = (0..100).map(|n| stage.make(&format!("file{n}"), false).ino).collect();
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    lapse(&stage);
    let told = |one: &Notification<'static>| kernel.notifications().contains(one);
    let attributes = Notification::attributes;
    until("attributes of all", || inos.iter().all(|ino| told(&attributes(*ino))));
    until("as many files as there may be threads", || !driver.notifier.crew.has_room(64));
    thread::sleep(Duration::from_millis(50));
    assert!(!told(&Notification::contents(inos[99])));
    assert!(is_forgetting(&driver), "files that were not told of");
    stuck.let_go();
    until("what there was no worker for", || inos.iter().all(|ino| told(&Notification::contents(*ino))));
    until("all", || !is_forgetting(&driver));
    stopped(&driver, thread);
}

/// Dropping many pages takes long, and a thread may get no processor: the acknowledgement must still wait.
#[test]
fn slow_invalidation_delays_the_acknowledgement() {
    let stuck =
        BlockingKernel::new(|told| matches!(told, Notification::InvalInode { ino: MADE, offset: 0.., .. }));
    let mut stage = stuck.stage();
    assert_eq!(stage.make("large", false).ino, MADE);
    let other = stage.make("other", false).ino;
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    lapse(&stage);
    until("the other one", || kernel.notifications().contains(&Notification::contents(other)));
    thread::sleep(Duration::from_millis(50));
    assert!(is_forgetting(&driver), "its pages are there");
    stuck.let_go();
    until("all", || !is_forgetting(&driver));
    stopped(&driver, thread);
}

/// A kernel with a dirty shared mapping of a file's first pages: each page is written back before it is dropped, and
/// the invalidation waits for the write-back.
struct DirtyMappingKernel {
    driver: std::sync::OnceLock<Arc<Driver>>,
    /// Pages not written back yet.
    dirty: Mutex<std::collections::BTreeSet<u64>>,
    waits: Mutex<bool>,
    let_go: parking_lot::Condvar,
}

impl DirtyMappingKernel {
    fn stage(pages: u64) -> (DriverHarness, Arc<DirtyMappingKernel>) {
        let laundry = Arc::new(DirtyMappingKernel {
            driver: std::sync::OnceLock::new(),
            dirty: Mutex::new((0..pages).collect()),
            waits: Mutex::new(true),
            let_go: parking_lot::Condvar::new(),
        });
        let of = Arc::clone(&laundry);
        let stage = DriverHarness::judging(move |told| {
            if let Notification::InvalInode { ino: MADE, offset: offset @ 0.., len } = told {
                of.drop_range(offset.cast_unsigned(), len.cast_unsigned());
            }
            Ok(NotifyOutcome::Done)
        });
        let _ = laundry.driver.set(Arc::clone(&stage.driver));
        (stage, laundry)
    }

    fn drop_range(&self, offset: u64, length: u64) {
        let end = if length == 0 { u64::MAX } else { offset + length };
        let meets = |page: &u64| page * PAGE < end && (page + 1) * PAGE > offset;
        loop {
            let next = self.dirty.lock().iter().copied().find(meets);
            let Some(page) = next.filter(|page| self.dirty.lock().remove(page)) else { return };
            let (fh, data) = (nigh_cache::Fh(1), b"stored".to_vec());
            let offset = page * PAGE;
            let flush = nigh_cache::Op::Write {
                ino: MADE,
                fh,
                offset,
                data,
                flags: WriteFlags { write_back: true, ..WriteFlags::default() },
            };
            let driver = self.driver.get().expect("it was set");
            driver.operate(
                90_000 + page,
                OpId(90_000 + page),
                Caller::default(),
                ReplyFormat::Natural,
                flush,
            );
            let mut waits = self.waits.lock();
            while *waits {
                self.let_go.wait(&mut waits);
            }
        }
    }

    fn let_go(&self) {
        *self.waits.lock() = false;
        self.let_go.notify_all();
    }
}

const PAGE: u64 = 4096;

/// Pages behind an unanswered write-back may be stale: they are dropped too before the acknowledgement.
#[test]
fn pages_behind_many_unanswered_write_backs_are_dropped_before_acknowledgement() {
    let (mut stage, laundry) = DirtyMappingKernel::stage(20);
    assert_eq!(stage.make("mapped", false).ino, MADE);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    lapse(&stage);
    until("all", || !is_forgetting(&driver));
    assert!(laundry.dirty.lock().is_empty(), "all are being written back");
    let behind = Notification::InvalInode { ino: MADE, offset: (20 * PAGE).cast_signed(), len: 0 };
    assert!(kernel.notifications().contains(&behind), "what lies behind them is gone");
    laundry.let_go();
    stopped(&driver, thread);
}

/// One file does not use up all threads, and invalidations without a thread stay unacknowledged.
#[test]
fn file_with_many_write_backs_leaves_worker_threads_for_others() {
    let (mut stage, laundry) = DirtyMappingKernel::stage(200);
    assert_eq!(stage.make("mapped", false).ino, MADE);
    let other = stage.make("other", false).ino;
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    lapse(&stage);
    until("the other one", || kernel.notifications().contains(&Notification::contents(other)));
    thread::sleep(Duration::from_millis(50));
    assert!(driver.notifier.crew.has_room(64), "there is room for what may come");
    for ino in 901..931 {
        driver.notifier.queue(
            InvalidationId(ino),
            vec![pages_of(other), KernelInvalidation::Attr { ino }],
            Urgency::Ordinary,
        );
        until("what comes later", || kernel.notifications().contains(&Notification::attributes(ino)));
    }
    assert!(is_forgetting(&driver), "it is not told");
    laundry.let_go();
    until("all", || !is_forgetting(&driver));
    stopped(&driver, thread);
}

fn writes_in_part(stage: &mut DriverHarness) -> Notification<'static> {
    assert_eq!(stage.make("file", false).ino, MADE);
    // With a whole page between two partial ones: only then does the kernel have a whole page of an unread file.
    let (fh, data) = (nigh_cache::Fh(1), vec![b'x'; 9_000]);
    let write = nigh_cache::Op::Write { ino: MADE, fh, offset: 10, data, flags: WriteFlags::default() };
    stage.driver.operate(900, OpId(900), Caller::default(), ReplyFormat::Natural, write);
    Notification::InvalInode { ino: MADE, offset: 0, len: PAGE.cast_signed() }
}

/// If the kernel had the whole page, it is unlocked and would show other clients' changes as they were before.
#[test]
fn page_under_partial_write_is_dropped_before_acknowledgement() {
    let mut stage = DriverHarness::new();
    let part = writes_in_part(&mut stage);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    let stale = vec![pages_of(MADE), KernelInvalidation::Attr { ino: 9 }];
    driver.notifier.queue(InvalidationId(901), stale, Urgency::Ordinary);
    until("what comes next", || kernel.notifications().contains(&Notification::attributes(9)));
    let told = kernel.notifications();
    let at = |one: &Notification<'_>| told.iter().position(|told| told == one);
    assert!(at(&part).is_some_and(|part| Some(part) < at(&Notification::attributes(9))), "{told:?}");
    stopped(&driver, thread);
}

/// Otherwise the page is locked until the reply to the write, which may wait for this client's acknowledgement.
#[test]
fn page_locked_by_a_partial_write_does_not_delay_the_acknowledgement() {
    let stuck =
        BlockingKernel::new(|told| matches!(told, Notification::InvalInode { ino: MADE, offset: 0, .. }));
    let mut stage = stuck.stage();
    let part = writes_in_part(&mut stage);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    let stale = vec![pages_of(MADE), KernelInvalidation::Attr { ino: 9 }];
    driver.notifier.queue(InvalidationId(901), stale, Urgency::Ordinary);
    until("what comes next", || kernel.notifications().contains(&Notification::attributes(9)));
    assert!(kernel.notifications().contains(&part), "it was tried");
    stuck.let_go();
    stopped(&driver, thread);
}

/// After the write that had the page locked, the kernel may read the page in full before the woken worker gets a
/// processor.
#[test]
fn page_whose_earlier_worker_was_woken_is_dropped_again_before_acknowledgement() {
    let (tries, lock) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(())));
    let [is_running, has_processor] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let locked = lock.lock();
    let shared = (Arc::clone(&tries), Arc::clone(&lock), Arc::clone(&is_running), Arc::clone(&has_processor));
    let mut stage = DriverHarness::judging(move |told| {
        let (tries, lock, is_running, has_processor) = &shared;
        if matches!(told, Notification::InvalInode { ino: MADE, offset: 0, len: 1.. })
            && tries.fetch_add(1, Ordering::SeqCst) == 0
        {
            drop(lock.lock());
            is_running.store(true, Ordering::SeqCst);
            while !has_processor.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
        }
        Ok(NotifyOutcome::Done)
    });
    writes_in_part(&mut stage);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    let told = |ino| kernel.notifications().contains(&Notification::attributes(ino));
    let queue = |id, next| {
        let stale = vec![pages_of(MADE), KernelInvalidation::Attr { ino: next }];
        driver.notifier.queue(InvalidationId(id), stale, Urgency::Ordinary);
    };
    queue(901, 9);
    until("the page counts as locked", || told(9));
    drop(locked);
    until("its worker runs", || is_running.load(Ordering::SeqCst));
    queue(902, 10);
    thread::sleep(Duration::from_millis(200));
    assert!(!told(10), "its worker may drop the page yet");
    assert_eq!(tries.load(Ordering::SeqCst), 1);
    has_processor.store(true, Ordering::SeqCst);
    until("what comes next", || told(10));
    assert_eq!(tries.load(Ordering::SeqCst), 2, "the page was read again since");
    stopped(&driver, thread);
}

/// A closed file may be opened and read while its pages are being dropped. At the server the read waits behind the
/// change that caused the recall, which waits for this client's acknowledgement: the notifier must not wait for the
/// read.
#[test]
fn file_opened_and_read_during_invalidation_does_not_delay_the_acknowledgement() {
    let stuck =
        BlockingKernel::new(|told| matches!(told, Notification::InvalInode { ino: MADE, offset: 0, .. }));
    let mut stage = stuck.stage();
    assert_eq!(stage.make("file", false).ino, MADE);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let operate =
        |unique, op| driver.operate(unique, OpId(unique), Caller::default(), ReplyFormat::Natural, op);
    operate(901, nigh_cache::Op::Release { fh: nigh_cache::Fh(1), flock: None });
    let thread = running(&driver);
    let stale = vec![pages_of(MADE), KernelInvalidation::Attr { ino: 9 }];
    driver.notifier.queue(InvalidationId(901), stale, Urgency::Ordinary);
    let told = |one: &Notification<'static>| kernel.notifications().contains(one);
    until("the whole file", || told(&Notification::contents(MADE)));
    stage.open(MADE);
    operate(902, nigh_cache::Op::Read { ino: MADE, fh: nigh_cache::Fh(2), offset: 0, size: 100 });
    let rest = Notification::InvalInode { ino: MADE, offset: PAGE.cast_signed(), len: 0 };
    until("what is not being read", || told(&rest));
    until("what comes next", || told(&Notification::attributes(9)));
    stuck.let_go();
    stopped(&driver, thread);
}

/// A recall waits for a write-back of a dirty mapping when the connection is cut: at the end of the term the kernel is
/// invalidated all the same.
#[test]
fn kernel_is_invalidated_at_lease_expiry_while_another_invalidation_is_blocked() {
    let stuck =
        BlockingKernel::new(|told| matches!(told, Notification::InvalInode { ino: MADE, offset: 0, .. }));
    let mut stage = stuck.stage();
    let node = stage.make("file", false);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    let thread = running(&driver);
    let (fh, data) = (nigh_cache::Fh(1), b"stored".to_vec());
    let flush = nigh_cache::Op::Write {
        ino: MADE,
        fh,
        offset: 0,
        data,
        flags: WriteFlags { write_back: true, ..WriteFlags::default() },
    };
    driver.operate(900, OpId(900), Caller::default(), ReplyFormat::Natural, flush);
    let recall = Recall { id: RecallId(1), node, covers: LeaseScope::Data, names: Vec::new() };
    driver.with(|core, now| core.cache.handle_event(now, Event::Recall(recall)));
    let told = |one: &Notification<'static>| kernel.notifications().contains(one);
    until("the recall", || told(&Notification::contents(MADE)));
    thread::sleep(Duration::from_millis(20));
    assert!(!told(&Notification::IncEpoch));
    lapse(&stage);
    until("every name", || told(&Notification::IncEpoch));
    until("attributes of what is open", || told(&Notification::attributes(MADE)));
    until("the rest", || !is_forgetting(&driver));
    stuck.let_go();
    stopped(&driver, thread);
}

/// Earlier jobs took time, and a caller has asked for the file's size meanwhile.
#[test]
fn delayed_invalidation_waits_for_getattr_callers_that_came_meanwhile() {
    let mut stage = DriverHarness::new();
    assert_eq!(stage.make("file", false).ino, MADE);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    driver.notifier.queue(
        InvalidationId(901),
        vec![KernelInvalidation::Attr { ino: MADE }],
        Urgency::Ordinary,
    );
    driver.with(|core, now| core.cache.handle_event(now, Event::Recall(of_root(driver.root()))));
    let asks = nigh_cache::Op::GetAttr { ino: MADE };
    driver.operate(900, OpId(900), Caller::default(), ReplyFormat::Natural, asks);
    assert!(driver.with(|core, _| core.cache.has_size_waiter(MADE)), "it is not known");
    let thread = running(&driver);
    let told = || kernel.notifications().contains(&Notification::attributes(MADE));
    thread::sleep(Duration::from_millis(50));
    assert!(!told());
    driver.with(|core, _| core.cache.handle_interrupt(OpId(900), true));
    until("what was queued", told);
    stopped(&driver, thread);
}

/// Other clients wait for the invalidations.
#[test]
fn wait_for_getattr_callers_is_bounded_once_for_the_whole_job() {
    let mut stage = DriverHarness::new();
    let files: Vec<u64> = ["a", "b", "c", "d"].map(|name| stage.make(name, false).ino).to_vec();
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    driver.with(|core, now| core.cache.handle_event(now, Event::Recall(of_root(driver.root()))));
    for (unique, ino) in (900..).step_by(2).zip(&files) {
        let asks = nigh_cache::Op::GetAttr { ino: *ino };
        driver.operate(unique, OpId(unique), Caller::default(), ReplyFormat::Natural, asks);
    }
    let stale = files.iter().map(|ino| KernelInvalidation::Attr { ino: *ino }).collect();
    driver.notifier.queue(InvalidationId(901), stale, Urgency::Ordinary);
    let since = Instant::now();
    let thread = running(&driver);
    let told = |ino: &u64| kernel.notifications().contains(&Notification::attributes(*ino));
    until("all", || files.iter().all(told));
    assert!(since.elapsed() < Duration::from_secs(2), "a second for all of them");
    stopped(&driver, thread);
}

fn of_root(ino: u64) -> Recall {
    let node = nigh_types::NodeId { ino, generation: 1 };
    Recall { id: RecallId(1), node, covers: LeaseScope::Directory, names: Vec::new() }
}
