//! Dentries of locked directories, which are invalidated one by one with a mount below.

use super::*;

/// With a mount below, names are invalidated one by one: those of a locked directory delay no others, and no urgent
/// job.
#[test]
fn names_of_a_locked_directory_do_not_delay_other_invalidations() {
    let stuck = BlockingKernel::new(|told| matches!(told, Notification::InvalEntry { parent: MADE, .. }));
    let mut stage = stuck.stage();
    assert_eq!(stage.make("nothing-is-mounted-here", true).ino, MADE);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    driver.mountpoint.set("/".into()).unwrap();
    let thread = running(&driver);
    let name = name("x");
    let entry = |dir| KernelInvalidation::Entry { dir, name: name.clone() };
    driver.notifier.queue(
        InvalidationId(901),
        vec![entry(MADE), entry(MADE), entry(driver.root())],
        Urgency::Ordinary,
    );
    let told =
        |one: &Notification<'static>| kernel.notifications().iter().filter(|other| *other == one).count();
    until("another directory", || told(&expired(ROOT, b"x")) == 1);
    driver.notifier.queue(
        InvalidationId(902),
        vec![KernelInvalidation::Attr { ino: 9 }, entry(MADE)],
        Urgency::AllGrantsEnded,
    );
    until("what goes first", || told(&Notification::attributes(9)) == 1);
    stuck.let_go();
    until("both names", || told(&expired(MADE, b"x")) >= 4);
    stopped(&driver, thread);
}

/// With a mount below, a job for the end of all grants sends copies of the queued names. What is left of it keeps the
/// copies, and no later job copies them: otherwise each would double them. A local rename or removal queues an urgent
/// job too, which copies nothing.
#[test]
fn urgent_jobs_do_not_multiply_names_of_a_locked_directory() {
    const JOBS: usize = 12;
    for (stale, urgency, copies) in [
        (KernelInvalidation::Attr { ino: 9 }, Urgency::First, 0),
        (pages_of(9), Urgency::AllGrantsEnded, 4 * JOBS),
    ] {
        let stuck = BlockingKernel::new(|told| matches!(told, Notification::InvalEntry { parent: MADE, .. }));
        let mut stage = stuck.stage();
        assert_eq!(stage.make("nothing-is-mounted-here", true).ino, MADE);
        let driver = Arc::clone(&stage.driver);
        driver.mountpoint.set("/".into()).unwrap();
        let thread = running(&driver);
        let entry = |text| KernelInvalidation::Entry { dir: MADE, name: name(text) };
        driver.notifier.queue(InvalidationId(901), vec![entry("x"), entry("y")], Urgency::Ordinary);
        for urgent in 0..JOBS as u64 {
            driver.notifier.queue(InvalidationId(902 + urgent), vec![stale.clone()], urgency);
            until("it is sent", || !driver.notifier.jobs.lock().has_urgent());
            thread::sleep(Duration::from_millis(30));
            let queued = driver.notifier.queued();
            assert!(queued.0 <= 8 && queued.1 <= copies, "{queued:?} are queued");
        }
        stuck.let_go();
        until("all are sent", || driver.notifier.queued() == (0, 0));
        stopped(&driver, thread);
    }
}

/// With a mount below, the end of all grants covers the names of earlier jobs too, also if another urgent job interrupts
/// the wait for them.
#[test]
fn end_of_all_grants_is_done_only_when_queued_names_are_dropped() {
    let stuck = BlockingKernel::new(|told| matches!(told, Notification::InvalEntry { parent: MADE, .. }));
    let mut stage = stuck.stage();
    assert_eq!(stage.make("nothing-is-mounted-here", true).ino, MADE);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    driver.mountpoint.set("/".into()).unwrap();
    let thread = running(&driver);
    let entry = KernelInvalidation::Entry { dir: MADE, name: name("x") };
    driver.notifier.queue(InvalidationId(901), vec![entry], Urgency::Ordinary);
    thread::sleep(Duration::from_millis(30));
    lapse(&stage);
    until("what can be dropped", || kernel.notifications().contains(&Notification::attributes(MADE)));
    for urgent in 0..3 {
        let attributes = vec![KernelInvalidation::Attr { ino: 9 }];
        driver.notifier.queue(InvalidationId(902 + urgent), attributes, Urgency::First);
        thread::sleep(Duration::from_millis(50));
        assert!(is_forgetting(&driver), "the kernel may still have a name");
    }
    stuck.let_go();
    until("the rest", || !is_forgetting(&driver));
    stopped(&driver, thread);
}

/// Names of a directory that is locked until an operation's reply do not delay the next job.
fn are_left_to_their_worker(made: &str, locks: impl FnOnce(u64) -> nigh_cache::Op) {
    let stuck = BlockingKernel::new(|told| matches!(told, Notification::InvalEntry { parent: MADE, .. }));
    let mut stage = stuck.stage();
    assert_eq!(stage.make(made, true).ino, MADE);
    let (driver, kernel) = (Arc::clone(&stage.driver), Arc::clone(&stage.kernel));
    driver.operate(900, OpId(900), Caller::default(), ReplyFormat::Natural, locks(driver.root()));
    let thread = running(&driver);
    let entry = KernelInvalidation::Entry { dir: MADE, name: name("x") };
    driver.notifier.queue(InvalidationId(901), vec![entry], Urgency::AllGrantsEnded);
    driver.notifier.queue(InvalidationId(902), vec![KernelInvalidation::Attr { ino: 9 }], Urgency::Ordinary);
    until("what comes next", || kernel.notifications().contains(&Notification::attributes(9)));
    stuck.let_go();
    stopped(&driver, thread);
}

/// The removal holds the directory's lock, and its reply comes after the invalidation.
#[test]
fn names_of_a_directory_under_removal_do_not_delay_later_jobs() {
    let name = name("victim");
    are_left_to_their_worker("victim", |dir| nigh_cache::Op::Rmdir { dir, name });
}

/// A rename(2) holds both directories' locks while it looks a name up in one of them, which waits for the invalidation.
#[test]
fn names_of_a_directory_locked_by_a_rename_during_lookup_do_not_delay_later_jobs() {
    let name = name("from");
    are_left_to_their_worker("to", |dir| nigh_cache::Op::Lookup { dir, name });
}
