//! Codec, transports and notifications against the running kernel.

mod corpus;
mod tiny;

use nigh_fuse::abi::flags::init;
use nigh_fuse::mount::{self, Liveness, MountError, MountOptions, UnmountError};
use nigh_fuse::*;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use tiny::{Tiny, mounted};

fn lookups(tiny: &Tiny, wanted: &[u8]) -> usize {
    tiny.count(|_, operation| matches!(operation, Operation::Lookup { name } if *name == wanted))
}

#[test]
fn files_can_be_listed_looked_at_and_read() {
    mounted(RequestedFeatures::default(), |tiny| {
        let ino = tiny.add("f\u{fc}r".as_bytes(), 0o100_600, &[9; 300_000]);
        let names: Vec<_> = fs::read_dir(&tiny.mountpoint).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["f\u{fc}r", "hello"]);
        assert!(tiny.count(|_, operation| matches!(operation, Operation::ReadDirPlus { .. })) > 0);
        let metadata = fs::metadata(tiny.path("f\u{fc}r")).unwrap();
        assert_eq!((metadata.ino(), metadata.len(), metadata.mode()), (ino, 300_000, 0o100_600));
        assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (1_000, 7));
        assert_eq!(lookups(tiny, "f\u{fc}r".as_bytes()), 0, "the listing brought it");
        assert_eq!(fs::read(tiny.path("f\u{fc}r")).unwrap(), [9; 300_000]);
        assert_eq!(fs::read(tiny.path("hello")).unwrap(), b"hello, world\n");
    });
}

#[test]
fn an_absent_name_is_asked_for_once_until_it_is_invalidated() {
    mounted(RequestedFeatures::default(), |tiny| {
        for _ in 0..10 {
            assert_eq!(fs::metadata(tiny.path("new")).unwrap_err().kind(), ErrorKind::NotFound);
        }
        assert_eq!(lookups(tiny, b"new"), 1);
        tiny.add(b"new", 0o100_644, b"");
        assert!(fs::metadata(tiny.path("new")).is_err());
        assert_eq!(tiny.device.notify(&Notification::entry(1, b"new")).unwrap(), NotifyOutcome::Done);
        assert!(fs::metadata(tiny.path("new")).is_ok());
        assert_eq!(lookups(tiny, b"new"), 2);
        let unknown = tiny.device.notify(&Notification::entry(999, b"new")).unwrap();
        assert_eq!(unknown, NotifyOutcome::Unknown);
    });
}

#[test]
fn an_epoch_makes_every_name_be_looked_up_again() {
    mounted(RequestedFeatures::default(), |tiny| {
        if tiny.device.level() != Level::All {
            eprintln!("SKIPPED: this kernel has no INC_EPOCH");
            return;
        }
        for expected in [1, 1, 1] {
            fs::metadata(tiny.path("hello")).unwrap();
            assert_eq!(lookups(tiny, b"hello"), expected);
        }
        tiny.device.notify(&Notification::IncEpoch).unwrap();
        fs::metadata(tiny.path("hello")).unwrap();
        assert_eq!(lookups(tiny, b"hello"), 2);

        assert_eq!(tiny.device.probe_level(Level::NoEpoch), Level::NoEpoch);
        let masked = tiny.device.notify(&Notification::IncEpoch).unwrap_err();
        assert_eq!(masked.kind(), ErrorKind::Unsupported);
        assert!(tiny.device.notify(&Notification::entry(1, b"hello")).is_ok());
        assert_eq!(tiny.device.probe_level(Level::None), Level::None);
        assert!(tiny.device.notify(&Notification::entry(1, b"hello")).is_err());
    });
}

#[test]
fn notifications_drop_attributes_pages_and_inodes() {
    mounted(RequestedFeatures::default(), |tiny| {
        assert_eq!(fs::read(tiny.path("hello")).unwrap().len(), 13);
        // The read invalidated the access time, so the kernel asks for it once.
        assert_eq!(fs::metadata(tiny.path("hello")).unwrap().len(), 13);
        tiny.state.lock().unwrap().nodes.get_mut(&2).unwrap().content = b"longer than before".to_vec();
        assert_eq!(fs::metadata(tiny.path("hello")).unwrap().len(), 13);
        assert_eq!(tiny.device.notify(&Notification::attributes(2)).unwrap(), NotifyOutcome::Done);
        assert_eq!(fs::metadata(tiny.path("hello")).unwrap().len(), 18);
        tiny.device.notify(&Notification::contents(2)).unwrap();
        assert_eq!(fs::read(tiny.path("hello")).unwrap(), b"longer than before");
        let unknown = tiny.device.notify(&Notification::contents(999)).unwrap();
        assert_eq!(unknown, NotifyOutcome::Unknown);

        let store = Notification::Store { ino: 2, offset: 0, data: b"LONGER".as_slice().into() };
        assert_eq!(tiny.device.notify(&store).unwrap(), NotifyOutcome::Done);
        let retrieve = Notification::Retrieve { id: 77, ino: 2, offset: 0, size: 6 };
        assert_eq!(tiny.device.notify(&retrieve).unwrap(), NotifyOutcome::Done);
        tiny.wait_for(|header, operation| {
            header.unique == 77
                && matches!(operation, Operation::NotifyReply { data, .. } if data.starts_with(b"LONGER"))
        });
        if tiny.agreed.minor >= 45 {
            let prune = Notification::Prune { inos: vec![2, 999].into() };
            assert_eq!(tiny.device.notify(&prune).unwrap(), NotifyOutcome::Done);
            tiny.wait_for(|header, operation| match operation {
                Operation::Forget { nlookup: 1.. } => header.nodeid == 2,
                Operation::BatchForget(forgets) => forgets.iter().any(|(nodeid, _)| nodeid == 2),
                _ => false,
            });
        }
    });
}

#[test]
fn resent_request_is_answered_with_its_resend_bit() {
    mounted(RequestedFeatures::default(), |tiny| {
        if !tiny.agreed.has(init::HAS_RESEND) {
            eprintln!("SKIPPED: this kernel has no RESEND");
            return;
        }
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| fs::metadata(tiny.path("resent")).map(|metadata| metadata.ino()));
            let is_it =
                |operation: &Operation<'_>| matches!(operation, Operation::Lookup { name: b"resent" });
            let first = tiny.wait_for(|_, operation| is_it(operation));
            assert!(!first.resent);
            tiny.device.notify(&Notification::Resend).unwrap();
            assert_eq!(caller.join().unwrap().unwrap(), 2);
            let second = tiny.wait_for(|header, operation| header.resent && is_it(operation));
            assert_eq!((second.id(), second.unique), (first.id(), first.unique | abi::UNIQUE_RESEND));
        });
    });
}

#[test]
fn a_killed_caller_is_announced_and_freed_by_an_answer() {
    mounted(RequestedFeatures::default(), |tiny| {
        let mut child = std::process::Command::new("stat").arg(tiny.path("withheld")).spawn().unwrap();
        let held = tiny.wait_for(|_, operation| matches!(operation, Operation::Lookup { name: b"withheld" }));
        assert_eq!(held.pid, child.id());
        child.kill().unwrap();
        tiny.wait_for(|_, operation| matches!(operation, Operation::Interrupt { id } if *id == held.id()));
        assert!(child.try_wait().unwrap().is_none(), "it cannot end before its answer");
        Reply::error(held.unique, libc::EINTR).send(&tiny.device).unwrap();
        assert!(!child.wait().unwrap().success());
        Reply::error(held.unique, libc::EIO).send(&tiny.device).expect("an answer too late is no error");
    });
}

#[test]
fn a_mount_is_found_refused_twice_busy_and_cleared_when_dead() {
    mounted(RequestedFeatures::default(), |tiny| {
        let path = &tiny.mountpoint;
        let seen = mount::mounts().into_iter().find(|mount| mount.mountpoint == *path).unwrap();
        assert_eq!((seen.fstype.as_str(), seen.source.to_str()), ("fuse.nigh", Some("tiny \\ source")));
        assert!(mount::is_mounted(path));
        assert_eq!(mount::liveness(path), Liveness::Alive);
        assert_eq!(mount::connection_id(path), Some(seen.device.1));
        let aside = tempfile::tempdir().unwrap();
        let link = aside.path().join("link");
        std::os::unix::fs::symlink(path, &link).unwrap();
        assert_eq!(mount::liveness(&link), Liveness::Alive);
        assert_eq!(mount::connection_id(&link), Some(seen.device.1));
        let again = mount::mount(&MountOptions::new(&link, "x")).unwrap_err();
        assert!(matches!(again, MountError::Busy { .. }), "{again}");

        let open = fs::File::open(tiny.path("hello")).unwrap();
        let busy = mount::unmount(path, false).unwrap_err();
        assert!(matches!(busy, UnmountError::Busy { .. }), "{busy}");
        if mount::abort(path).is_err() {
            eprintln!("SKIPPED: this user may not abort connections");
            return;
        }
        assert_eq!(mount::liveness(path), Liveness::Dead);
        let dead = mount::mount(&MountOptions::new(path, "x")).unwrap_err();
        assert!(matches!(dead, MountError::Dead { .. }), "{dead}");
        assert_eq!(mount::liveness(&link), Liveness::Dead);
        drop(open);
        mount::unmount(&link, true).unwrap();
        assert_eq!(mount::liveness(path), Liveness::Absent);
        assert!(fs::read_dir(path).unwrap().next().is_none());
    });
}

#[test]
fn permissions_are_checked_by_the_kernel_and_setuid_is_off() {
    mounted(RequestedFeatures::default(), |tiny| {
        let statvfs = rustix::fs::statvfs(&tiny.mountpoint).unwrap();
        assert!(statvfs.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID));
        assert_eq!((statvfs.f_blocks, statvfs.f_namemax), (7, 255));
        assert_eq!(fs::metadata(&tiny.mountpoint).unwrap().permissions().mode(), 0o040_755);
    });
}
