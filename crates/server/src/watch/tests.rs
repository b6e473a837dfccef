//! Tests of lost events.

use super::*;
use nigh_lease::{GrantRequest, Granted, Holder, LeaseConfig, LeaseKey};
use nigh_types::{LeaseScope, NodeId, Span, Term};
use rustix::fs::{Mode, OFlags};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const ONE: Holder = Holder(1);
const LIMIT: Span = Span::from_secs(5);

struct Bench {
    leases: Arc<Leases>,
    watch: Arc<Watch>,
    watched: Arc<ExportWatch>,
    dir: tempfile::TempDir,
}

impl Bench {
    fn new(way: WatchMethod) -> Bench {
        // The holder returns no grants.
        let long = Span(u64::MAX / 2);
        let leases = Leases::new(LeaseConfig { term: long, patience: long, ..LeaseConfig::default() }, None);
        leases.attach_unconnected(ONE, Term::Limited(LIMIT));
        leases.with_table(|table, now| table.handle_trusts_watch(now, ONE));
        let watch = Watch::new(&leases, way).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let root = open(dir.path());
        let (stat, filesystem) = look(&root).unwrap();
        let watched = watch.watch_export(&root, &stat, filesystem);
        Bench { leases, watch, watched, dir }
    }

    /// Grants the names of a directory.
    fn grant(&self, name: &str) -> Granted {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        let fd = open(&path);
        let object = look(&fd).unwrap().0.object(false);
        self.watched.watch(object, &fd);
        let key = LeaseKey { object, covers: LeaseScope::Directory };
        let node = NodeId { ino: object.ino, generation: 1 };
        let mode = nigh_types::Mode::Read;
        self.leases.grant(GrantRequest { holder: ONE, key, node, mode }).unwrap()
    }

    fn stands(&self, granted: Granted) -> bool {
        self.leases.with_table(|table, _| table.is_live(ONE, granted.id))
    }

    /// Makes `count` names in a directory from another process.
    fn flood(&self, name: &str, count: u32) {
        let script = format!("cd {name}; i=0; while [ $i -lt {count} ]; do : > n$i; i=$((i+1)); done");
        let done = Command::new("sh").args(["-c", &script]).current_dir(self.dir.path()).status().unwrap();
        assert!(done.success());
    }

    fn overflows(&self) -> u64 {
        self.watch.report().as_array().unwrap().iter().map(|group| group["overflows"].as_u64().unwrap()).sum()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.watch.stop();
    }
}

fn open(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// More names than fit into the kernel's queue (16,384 events).
const MANY: u32 = 10_000;

#[test]
fn grants_older_than_event_loss_are_recalled_and_can_be_granted_again() {
    for way in [WatchMethod::Best, WatchMethod::Objects] {
        let bench = Bench::new(way);
        bench.grant("loud");
        let (before, quiet) = (bench.grant("before"), bench.grant("quiet"));
        assert_eq!((before.limit, quiet.limit), (Span::FOREVER, Span::FOREVER));
        // Blocks the reader.
        let held = bench.watch.inbox.lock();
        bench.flood("loud", MANY);
        // The event of this name is lost.
        bench.flood("before", 1);
        drop(held);
        eventually("all is recalled", || !bench.stands(before) && !bench.stands(quiet));
        assert!(bench.overflows() >= 1);
        let after = bench.grant("after");
        assert_eq!(after.limit, Span::FOREVER, "{way:?}");
        std::thread::sleep(Duration::from_millis(50));
        assert!(bench.stands(after));
        bench.flood("after", 1);
        eventually("it goes on", || !bench.stands(after));
    }
}

#[test]
fn grants_get_time_limit_while_watch_is_paused() {
    for way in [WatchMethod::Best, WatchMethod::Objects] {
        let bench = Bench::new(way);
        let before = bench.grant("before");
        let (_, group) = bench.watch.all_groups().remove(0);
        group.pause();
        assert!(!bench.stands(before), "{way:?}");
        assert_eq!(bench.grant("then").limit, LIMIT);
        group.resume();
        assert_eq!(bench.grant("after").limit, Span::FOREVER);
    }
}

#[test]
fn last_export_of_filesystem_ends_its_watch() {
    let mut bench = Bench::new(WatchMethod::Objects);
    let granted = bench.grant("d");
    let root = open(bench.dir.path());
    let (stat, filesystem) = look(&root).unwrap();
    let twin = bench.watch.watch_export(&root, &stat, filesystem);
    let first = std::mem::replace(&mut bench.watched, twin);
    drop(first);
    assert!(bench.stands(granted), "another export is on it");
    let off = Watch::new(&bench.leases, WatchMethod::Off).unwrap();
    drop(std::mem::replace(&mut bench.watched, off.watch_export(&root, &stat, filesystem)));
    // The reader thread may hold its own reference to the watch for a moment.
    eventually("no change would be reported", || !bench.stands(granted));
    let leases = Arc::clone(&bench.leases);
    eventually("it is watched no more", || {
        !leases.with_table(|table, _| table.is_watched(stat.object(false)))
    });
}

/// Errors other than "gone", such as a lack of descriptors.
#[test]
fn event_whose_object_cannot_be_opened_counts_as_lost() {
    let bench = Bench::new(WatchMethod::Best);
    let granted = bench.grant("d");
    let (token, group) = bench.watch.all_groups().remove(0);
    if !matches!(group.strategy, MarkStrategy::Whole(_)) {
        return println!("SKIPPED: nothing is opened by its handle");
    }
    let hear = |handle: &[u8]| {
        let spot = event::EventLocation {
            dir: None,
            own: crate::export::handle::FileHandle::from_kernel(1, handle),
        };
        assert!(bench.watch.inbox.lock().add(token, libc::FAN_MODIFY, spot));
        bench.watch.wake.notify_one();
    };
    // No inode has this number.
    hear(&[0xff; 8]);
    std::thread::sleep(Duration::from_millis(50));
    assert!(bench.stands(granted));
    // The empty handle is invalid.
    hear(&[]);
    eventually("all is recalled", || !bench.stands(granted));
}

#[test]
fn object_removed_by_server_loses_its_mark() {
    let bench = Bench::new(WatchMethod::Objects);
    bench.grant("d");
    let marks = || bench.watch.report()[0]["marks"].as_u64().unwrap();
    let before = marks();
    let granted = bench.grant("d/e");
    let object = look(&open(&bench.dir.path().join("d/e"))).unwrap().0.object(false);
    assert_eq!(marks(), before + 1);
    std::fs::remove_dir(bench.dir.path().join("d/e")).unwrap();
    eventually("its mark is forgotten", || marks() == before);
    assert!(!bench.leases.with_table(|table, _| table.is_watched(object)) && !bench.stands(granted));
}

/// Device numbers are reused by later mounts.
#[test]
fn filesystem_with_reused_device_number_is_identified_anew() {
    let bench = Bench::new(WatchMethod::Objects);
    let at = bench.dir.path().join("inner");
    let layers = bench.dir.path().join("layers");
    [&at, &layers].into_iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let run = |program: &str, args: &[&str], at: &Path| {
        Command::new(program).args(args).arg(at).output().is_ok_and(|done| done.status.success())
    };
    if !run("mount", &["-t", "tmpfs", "none"], &layers) {
        return println!("SKIPPED: cannot mount a tmpfs");
    }
    let [lower, upper, work] = ["lower", "upper", "work"].map(|name| layers.join(name));
    [&lower, &upper, &work].into_iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    // Overlayfs with these options supports marks and file handles.
    let parts = format!(
        "lowerdir={},upperdir={},workdir={},index=on,nfs_export=on",
        lower.display(),
        upper.display(),
        work.display()
    );
    let mut same = false;
    for _ in 0..20 {
        assert!(run("mount", &["-t", "tmpfs", "none"], &at));
        let before = look(&open(&at)).unwrap().0.dev;
        assert_eq!(bench.grant("inner/d").limit, Span::FOREVER);
        assert!(run("umount", &[], &at));
        let mounted = run("mount", &["-t", "overlay", "none", "-o", &parts], &at);
        same = mounted && look(&open(&at)).unwrap().0.dev == before;
        let limit = same.then(|| bench.grant("inner/e").limit);
        let _ = !mounted || run("umount", &["-l"], &at);
        if same {
            assert_eq!(limit, Some(LIMIT));
            break;
        }
    }
    run("umount", &["-l"], &layers);
    if !same {
        println!("SKIPPED: no number is used again");
    }
}
