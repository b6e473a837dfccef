use super::*;
use crate::driver::tests::Stage;
use std::time::Instant;

impl Notifier {
    /// Whether nothing is queued.
    pub fn is_idle(&self) -> bool {
        self.jobs.lock().is_empty()
    }
}

/// A wakeup that is lost leaves a daemon that never ends.
#[test]
fn it_stops_whenever_it_is_told_to() {
    let driver = Stage::new().driver;
    for round in 0..2_000_u64 {
        let notifier = Arc::new(Notifier::new().unwrap());
        let (running, of) = (Arc::clone(&notifier), Arc::clone(&driver));
        let thread = thread::spawn(move || running.run(&of, true));
        if round % 2 == 0 {
            notifier.queue(Invalidation(round), vec![Stale::Attr { ino: 7 }]);
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

/// With something mounted below, a name there is never dropped, nor all at once; others are.
#[test]
fn nothing_that_leads_to_a_mount_is_dropped() {
    let stage = Stage::new();
    let (driver, transport) = (stage.driver, stage.kernel);
    // Below the root there are mounts.
    driver.mountpoint.set("/".into()).unwrap();
    let of = Arc::clone(&driver);
    let thread = thread::spawn(move || of.notifier.run(&of, true));
    let name = |name: &str| Name::new(name.as_bytes()).unwrap();
    let root = driver.root();
    driver
        .notifier
        .queue(Invalidation(1), vec![Stale::Epoch(vec![(root, name("proc")), (root, name("no"))])]);
    let give_up = Instant::now() + Duration::from_secs(20);
    while transport.notifications().len() < 2 {
        assert!(Instant::now() < give_up, "{:?}", transport.notifications());
        thread::sleep(Duration::from_millis(1));
    }
    let entry = |name: &'static [u8], expire_only| Notification::InvalEntry {
        parent: ROOT,
        name: name.into(),
        expire_only,
    };
    assert_eq!(transport.notifications(), [entry(b"proc", true), entry(b"no", false)]);
    assert_eq!(driver.with(|core, _| core.cache.level()), nigh_cache::Level::NoEpoch);
    driver.notifier.stop();
    thread.join().unwrap();
}
