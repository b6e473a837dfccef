use super::*;
use crate::driver::tests::DriverHarness as Mounted;
use crate::events::Program;
use nigh_types::Kind;

/// A child that runs a shell script.
fn program(words: &str) -> Program {
    Program { path: "/bin/sh".into(), arguments: vec!["-c".into(), words.into()] }
}

fn made(dir: u64, name: &str) -> RemoteChange {
    RemoteChange::Made { dir, name: Name::new(name.as_bytes()).unwrap(), kind: Kind::File }
}

/// Plays until `done`, for 10 s at most.
fn until(stage: &mut Scheduler<'_>, done: impl Fn(&Scheduler<'_>) -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done(stage) {
        assert!(Instant::now() < end, "nothing more happens");
        stage.run_due();
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn take_in(stage: &mut Scheduler<'_>, changes: impl IntoIterator<Item = RemoteChange>) {
    stage.enqueue(changes.into_iter().map(|change| (1, change)).collect());
}

/// Changes that the cache has queued since.
fn queued(stage: &Scheduler<'_>) -> Vec<RemoteChange> {
    stage.events.waiting.lock().drain(..).map(|(_, change)| change).collect()
}

/// A child that returns this errno for every command.
fn answering(errno: u8) -> Program {
    let words = format!(
        "while dd bs=4096 count=1 2>/dev/null | grep -q .; do printf '\\{errno:03o}\\000\\000\\000'; done"
    );
    program(&words)
}

fn playing(stage: &Scheduler<'_>) -> Vec<RemoteChange> {
    stage.processes.iter().filter_map(ReplayProcess::task).map(|task| task.change.clone()).collect()
}

#[test]
fn blocked_replay_process_delays_only_its_own_directories() {
    let mut mounted = Mounted::new();
    let root = mounted.driver.root();
    let dirs: Vec<u64> = (0..5).map(|number| mounted.make(&format!("d{number}"), true).ino).collect();
    let events = &mounted.driver.events;
    let mut stage = Scheduler::new(events, &mounted.driver, program("exec sleep 100"));
    take_in(&mut stage, [made(root, "a"), made(root, "b"), made(dirs[0], "c")]);
    stage.run_due();
    assert_eq!(playing(&stage), [made(root, "a")]);
    until(&mut stage, |stage| stage.processes.len() == 2);
    assert_eq!(playing(&stage), [made(root, "a"), made(dirs[0], "c")]);
    take_in(&mut stage, dirs[1..].iter().map(|dir| made(*dir, "x")));
    until(&mut stage, |stage| {
        stage.processes.iter().filter(|player| player.is_blocked(Instant::now())).count() == 4
    });
    stage.run_due();
    assert_eq!(stage.processes.len(), MOST_PROCESSES);
    assert_eq!(events.counts.stuck.load(Ordering::Relaxed), 4);
    let waiting: Vec<&RemoteChange> = stage.waiting.iter().map(|task| &task.change).collect();
    assert_eq!(waiting, [&made(root, "b"), &made(dirs[3], "x"), &made(dirs[4], "x")]);
    let begun = Instant::now();
    stage.end();
    assert!(begun.elapsed() < Duration::from_secs(2));
}

#[test]
fn replay_without_a_lookup_is_retried_and_then_counted_as_lost() {
    let mounted = Mounted::new();
    let events = &mounted.driver.events;
    let mut stage = Scheduler::new(events, &mounted.driver, answering(2));
    let root = mounted.driver.root();
    take_in(&mut stage, [made(root, "a")]);
    until(&mut stage, |stage| stage.events.counts.lost.load(Ordering::Relaxed) == 1);
    assert_eq!(events.counts.repeated.load(Ordering::Relaxed), u64::from(TRIES));
    assert_eq!(events.counts.replayed.load(Ordering::Relaxed), 0);
    assert_eq!(queued(&stage), [RemoteChange::Gap { dir: root }]);
    // This one is lost too, and leaves no gap.
    take_in(&mut stage, [RemoteChange::Gap { dir: root }]);
    until(&mut stage, |stage| stage.events.counts.lost.load(Ordering::Relaxed) == 2);
    assert_eq!((queued(&stage), &stage.gaps), (Vec::new(), &BTreeSet::new()));
    stage.end();
}

#[test]
fn ended_replay_process_is_replaced() {
    let mounted = Mounted::new();
    let events = &mounted.driver.events;
    let marker = tempfile::tempdir().unwrap();
    let path = marker.path().join("was");
    // The first child dies of its first command; the next one executes it.
    let words = format!(
        "dd bs=4096 count=1 >/dev/null 2>&1; if mkdir {0} 2>/dev/null; then exit; fi; printf '\\000\\000\\000\\000'; sleep 100",
        path.display()
    );
    let mut stage = Scheduler::new(events, &mounted.driver, program(&words));
    take_in(&mut stage, [made(mounted.driver.root(), "a")]);
    until(&mut stage, |stage| stage.events.counts.replayed.load(Ordering::Relaxed) == 1);
    assert!(path.exists());
    stage.end();
}

#[test]
fn changes_beyond_the_queue_limit_are_counted_as_lost() {
    let mounted = Mounted::new();
    let events = &mounted.driver.events;
    let mut stage = Scheduler::new(events, &mounted.driver, program("exec sleep 100"));
    take_in(&mut stage, (0..MOST_WAITING + 7).map(|number| made(1, &number.to_string())));
    assert_eq!(stage.waiting.len(), MOST_WAITING);
    assert_eq!(events.counts.lost.load(Ordering::Relaxed), 7);
    assert_eq!(queued(&stage), [RemoteChange::Gap { dir: 1 }], "one for all");
    take_in(&mut stage, [RemoteChange::Gap { dir: 1 }]);
    assert_eq!(stage.waiting.len(), MOST_WAITING + 1);
    assert_eq!(events.counts.lost.load(Ordering::Relaxed), 7);
}

#[test]
fn refused_move_reports_a_gap_in_both_directories() {
    let mut mounted = Mounted::new();
    let (root, dir) = (mounted.driver.root(), mounted.make("d", true));
    let mut stage = Scheduler::new(&mounted.driver.events, &mounted.driver, answering(13));
    let name = |text: &str| Name::new(text.as_bytes()).unwrap();
    let (name, new_name, node) = (name("a"), name("b"), NodeId { ino: 9, generation: 1 });
    let moved = RemoteChange::Moved { from: root, name, to: dir.ino, new_name, node, kind: Kind::File };
    take_in(&mut stage, [moved]);
    until(&mut stage, |stage| stage.events.counts.refused.load(Ordering::Relaxed) == 1);
    assert_eq!(queued(&stage), [RemoteChange::Gap { dir: root }, RemoteChange::Gap { dir: dir.ino }]);
    stage.end();
}

#[test]
fn timer_due_between_run_and_wait_does_not_delay_the_next_run() {
    let mounted = Mounted::new();
    let mut stage = Scheduler::new(&mounted.driver.events, &mounted.driver, program("exec sleep 100"));
    take_in(&mut stage, [made(mounted.driver.root(), "a")]);
    stage.waiting[0].not_before = Some(Instant::now() + Duration::from_millis(5));
    let played = stage.run_due();
    std::thread::sleep(Duration::from_millis(10));
    stage.wait(played);
    stage.run_due();
    assert_eq!(playing(&stage).len(), 1);
    stage.end();
}
