//! Search for inotify watches: `inotify` lines of `/proc/*/fdinfo/*` (proc_pid_fdinfo(5)), as far as they are readable.

use rustix::fs::{Dir, Mode, OFlags, open, openat, readlinkat};
use std::collections::BTreeSet;
use std::io::Read;
use std::os::fd::OwnedFd;

/// Most bytes read of one fdinfo: about 10,000 watches.
const MOST: u64 = 1 << 20;
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Inode numbers on this device (major, minor) that any process watches.
pub(super) fn watched(device: (u32, u32)) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    let Ok(proc) = open("/proc", DIRECTORY, Mode::empty()) else { return found };
    for pid in numbers(&proc) {
        // The process has ended, or belongs to another user.
        let Ok(fds) = openat(&proc, format!("{pid}/fd"), DIRECTORY, Mode::empty()) else { continue };
        for fd in numbers(&fds) {
            let is_inotify = readlinkat(&fds, &fd, Vec::new());
            if is_inotify.is_ok_and(|to| matches!(to.to_bytes(), b"anon_inode:inotify" | b"inotify")) {
                let at = format!("{pid}/fdinfo/{fd}");
                let Ok(info) = openat(&proc, at, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
                    continue;
                };
                let mut text = Vec::new();
                let _ = std::fs::File::from(info).take(MOST).read_to_end(&mut text);
                found.extend(inotify_lines(&text, device));
            }
        }
    }
    found
}

/// Entries of a directory whose names are numbers.
fn numbers(directory: &OwnedFd) -> Vec<String> {
    let Ok(entries) = Dir::read_from(directory) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().to_str().ok().map(str::to_owned));
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).collect()
}

/// Watched inodes on this device. Skips all other lines.
fn inotify_lines(text: &[u8], (major, minor): (u32, u32)) -> Vec<u64> {
    let device = (u64::from(major) << 20) | u64::from(minor);
    let lines = text.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    let inode = |line: &str| {
        let words = line.strip_prefix("inotify ")?;
        let hex = |key: &str| {
            let word = words.split(' ').find_map(|word| word.strip_prefix(key))?;
            u64::from_str_radix(word, 16).ok()
        };
        (hex("sdev:")? == device).then(|| hex("ino:"))?
    };
    lines.filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_inotify_lines_of_this_device_are_found() {
        let text = b"pos:\t0\nflags:\t02004000\nmnt_id:\t15\nino:\t1\n\
            inotify wd:2 ino:8000000000000001 sdev:2d mask:fc6 ignored_mask:0 fhandle-bytes:c fhandle-type:81 f_handle:02\n\
            inotify wd:1 ino:7f sdev:2e mask:fc6 ignored_mask:0\n\
            inotify wd:1 ino:5 sdev:80000d mask:fc6\n";
        assert_eq!(inotify_lines(text, (0, 0x2d)), [0x8000_0000_0000_0001]);
        assert_eq!(inotify_lines(text, (0, 0x2e)), [0x7f]);
        assert_eq!(inotify_lines(text, (8, 13)), [5]);
    }

    #[test]
    fn malformed_fdinfo_line_is_skipped() {
        for text in [
            &b""[..],
            b"inotify",
            b"inotify ",
            b"inotify ino:1",
            b"inotify sdev:1",
            b"inotify ino:zz sdev:1",
            b"inotify ino:11112222333344445 sdev:1",
            b"inotify ino:-1 sdev:1",
            b"inotify ino: sdev:1",
            b"\xff\xfeinotify ino:1 sdev:1",
            b"inotify ino:1\tsdev:1",
            b" inotify ino:1 sdev:1",
        ] {
            assert_eq!(inotify_lines(text, (0, 1)), [] as [u64; 0], "{}", text.escape_ascii());
        }
        assert_eq!(inotify_lines(b"inotify sdev:1 x ino:a wd:\n\n", (0, 1)), [10]);
    }

    #[test]
    fn a_watch_of_this_process_is_found() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let fd = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC).unwrap();
        rustix::fs::inotify::add_watch(&fd, dir.path(), rustix::fs::inotify::WatchFlags::CREATE).unwrap();
        let of = std::fs::metadata(dir.path()).unwrap();
        let device = (rustix::fs::major(of.dev()), rustix::fs::minor(of.dev()));
        assert!(watched(device).contains(&of.ino()));
        drop(fd);
        assert!(!watched(device).contains(&of.ino()));
    }
}
