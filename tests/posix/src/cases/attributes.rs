//! stat, chmod, chown, times.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

use crate::room::{Room, needs_root, refuses};
use crate::sys;

super::cases! { attributes::
    kinds, inode_numbers, chmod, chmod_directory, chown, chown_kills_setuid, write_kills_setuid, truncate_kills_setuid,
    times, times_now_and_omit, times_before_1970, write_sets_mtime, change_sets_ctime, directory_mtime, birth_time,
    link_counts, setgid_directory, fchmod_unlinked, stat_after_write, statx_mask, reading_keeps_mtime;
}

fn kinds(room: &Room) -> Result<()> {
    room.file("f", b"123")?;
    room.dir("d")?;
    symlink("f", room.at("l"))?;
    sys::mknod(&room.at("p"), libc::S_IFIFO | 0o644, 0)?;
    for (name, kind) in
        [("f", libc::S_IFREG), ("d", libc::S_IFDIR), ("l", libc::S_IFLNK), ("p", libc::S_IFIFO)]
    {
        let mode = fs::symlink_metadata(room.at(name))?.mode();
        ensure!(mode & libc::S_IFMT == kind, "{name}: {mode:o}");
    }
    Ok(())
}

fn inode_numbers(room: &Room) -> Result<()> {
    for i in 0..10 {
        room.file(&format!("f{i}"), b"")?;
    }
    let mut seen = std::collections::BTreeSet::new();
    for entry in fs::read_dir(&room.path)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        use std::os::unix::fs::DirEntryExt;
        ensure!(entry.ino() == meta.ino(), "d_ino {} but st_ino {}", entry.ino(), meta.ino());
        ensure!(fs::File::open(entry.path())?.metadata()?.ino() == meta.ino());
        ensure!(seen.insert(meta.ino()), "two files with number {}", meta.ino());
    }
    Ok(())
}

fn chmod(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    for mode in [0o000, 0o777, 0o644, 0o4755, 0o2755, 0o1644, 0o7777, 0o600] {
        sys::chmod(&path, mode)?;
        let got = fs::metadata(&path)?.mode() & 0o7777;
        ensure!(got == mode, "asked {mode:o}, got {got:o}");
    }
    refuses(sys::chmod(&room.at("no"), 0o644), libc::ENOENT)
}

fn chmod_directory(room: &Room) -> Result<()> {
    let dir = room.dir("d")?;
    sys::chmod(&dir, 0o1777)?;
    ensure!(fs::metadata(&dir)?.mode() & 0o7777 == 0o1777);
    sys::chmod(&dir, 0o700)?;
    ensure!(fs::metadata(&dir)?.mode() & 0o7777 == 0o700);
    Ok(())
}

fn chown(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    let own = fs::metadata(&path)?;
    ensure!(own.uid() == sys::uid(), "owner {}", own.uid());
    sys::chown(&path, own.uid(), own.gid())?;
    sys::chown(&path, u32::MAX, u32::MAX)?;
    if sys::uid() != 0 {
        return refuses(sys::chown(&path, 0, u32::MAX), libc::EPERM);
    }
    sys::chown(&path, 1234, 5678)?;
    sys::chown(&path, u32::MAX, 99)?;
    let now = fs::metadata(&path)?;
    ensure!((now.uid(), now.gid()) == (1234, 99));
    symlink("f", room.at("l"))?;
    sys::chown(&room.at("l"), 7, 8)?;
    ensure!(fs::symlink_metadata(room.at("l"))?.uid() == 7 && fs::metadata(&path)?.uid() == 1234);
    Ok(())
}

fn chown_kills_setuid(room: &Room) -> Result<()> {
    needs_root()?;
    let path = room.file("f", b"")?;
    sys::chmod(&path, 0o6755)?;
    sys::chown(&path, 1000, 1000)?;
    let mode = fs::metadata(&path)?.mode() & 0o7777;
    ensure!(mode == 0o755, "mode {mode:o}");
    Ok(())
}

fn write_kills_setuid(room: &Room) -> Result<()> {
    killed_by(room, |path| {
        let Ok(mut file) = OpenOptions::new().write(true).open(path) else { return false };
        file.write_all(b"other contents").is_ok()
    })
}

fn truncate_kills_setuid(room: &Room) -> Result<()> {
    killed_by(room, |path| {
        let Ok(file) = OpenOptions::new().write(true).open(path) else { return false };
        file.set_len(1).is_ok()
    })
}

/// A file with setuid and setgid loses both when an unprivileged user changes its contents.
fn killed_by(room: &Room, change: impl Fn(&Path) -> bool) -> Result<()> {
    let path = room.file("f", b"contents")?;
    sys::chmod(&path, 0o6777)?;
    ensure!(fs::metadata(&path)?.mode() & 0o7777 == 0o6777);
    let done = if sys::uid() == 0 {
        sys::chmod(&room.path, 0o755)?;
        sys::as_user(4321, 4321, &[], || change(&path))?
    } else {
        change(&path)
    };
    ensure!(done, "the change was refused");
    let mode = fs::metadata(&path)?.mode() & 0o7777;
    ensure!(mode == 0o777, "mode {mode:o}");
    Ok(())
}

fn times(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    sys::utimens(&path, (1_000_000_000, 123_456_789), (1_500_000_000, 987_654_321))?;
    let meta = fs::metadata(&path)?;
    ensure!((meta.atime(), meta.atime_nsec()) == (1_000_000_000, 123_456_789));
    ensure!((meta.mtime(), meta.mtime_nsec()) == (1_500_000_000, 987_654_321));
    let dir = room.dir("d")?;
    sys::utimens(&dir, (1, 2), (3, 4))?;
    let meta = fs::metadata(&dir)?;
    ensure!((meta.atime(), meta.atime_nsec(), meta.mtime(), meta.mtime_nsec()) == (1, 2, 3, 4));
    Ok(())
}

fn times_now_and_omit(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    sys::utimens(&path, (1000, 0), (2000, 0))?;
    sys::utimens(&path, (0, libc::UTIME_OMIT), (3000, 0))?;
    let meta = fs::metadata(&path)?;
    ensure!((meta.atime(), meta.mtime()) == (1000, 3000));
    let before = seconds_now();
    sys::utimens(&path, (0, libc::UTIME_OMIT), (0, libc::UTIME_NOW))?;
    let meta = fs::metadata(&path)?;
    ensure!(
        meta.atime() == 1000 && meta.mtime() >= before - 1 && meta.mtime() <= before + 10,
        "{}",
        meta.mtime()
    );
    sys::utimens(&path, (0, libc::UTIME_NOW), (0, libc::UTIME_OMIT))?;
    ensure!(fs::metadata(&path)?.atime() >= before - 1);
    refuses(sys::utimens(&path, (0, 2_000_000_000), (0, 0)), libc::EINVAL)
}

fn seconds_now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(0)
}

fn times_before_1970(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    sys::utimens(&path, (-100, 0), (-1000, 500_000_000))?;
    let meta = fs::metadata(&path)?;
    ensure!(meta.atime() == -100, "atime {}", meta.atime());
    ensure!(
        (meta.mtime(), meta.mtime_nsec()) == (-1000, 500_000_000),
        "mtime {}.{}",
        meta.mtime(),
        meta.mtime_nsec()
    );
    Ok(())
}

fn stamp(meta: &fs::Metadata) -> (i64, i64) {
    (meta.mtime(), meta.mtime_nsec())
}

fn ctime(path: &Path) -> Result<(i64, i64)> {
    let meta = fs::symlink_metadata(path)?;
    Ok((meta.ctime(), meta.ctime_nsec()))
}

fn pause() {
    std::thread::sleep(Duration::from_millis(20));
}

fn write_sets_mtime(room: &Room) -> Result<()> {
    let path = room.file("f", b"1")?;
    sys::utimens(&path, (1000, 0), (1000, 0))?;
    let mut file = OpenOptions::new().append(true).open(&path)?;
    file.write_all(b"2")?;
    let written = stamp(&fs::metadata(&path)?);
    ensure!(written.0 > 1000, "a write leaves mtime at {}", written.0);
    drop(file);
    ensure!(stamp(&fs::metadata(&path)?) == written, "mtime moved at close");
    pause();
    drop(sys::open(&path, libc::O_WRONLY | libc::O_TRUNC, 0)?);
    ensure!(stamp(&fs::metadata(&path)?) > written, "O_TRUNC leaves mtime");
    Ok(())
}

fn change_sets_ctime(room: &Room) -> Result<()> {
    let path = room.file("f", b"1")?;
    let mut last = ctime(&path)?;
    let changes: [(&str, &dyn Fn() -> std::io::Result<()>); 5] = [
        ("chmod", &|| sys::chmod(&path, 0o600)),
        ("utimens", &|| sys::utimens(&path, (1, 0), (1, 0))),
        ("link", &|| fs::hard_link(&path, room.at("l"))),
        ("unlink", &|| fs::remove_file(room.at("l"))),
        ("write", &|| fs::write(&path, b"2")),
    ];
    for (what, change) in changes {
        pause();
        change()?;
        let now = ctime(&path)?;
        ensure!(now > last, "{what} leaves ctime");
        last = now;
    }
    Ok(())
}

fn directory_mtime(room: &Room) -> Result<()> {
    let dir = room.dir("d")?;
    let mut last = stamp(&fs::metadata(&dir)?);
    let changes: [(&str, &dyn Fn() -> std::io::Result<()>); 5] = [
        ("create", &|| fs::write(dir.join("f"), b"")),
        ("mkdir", &|| fs::create_dir(dir.join("e"))),
        ("rename", &|| fs::rename(dir.join("f"), dir.join("g"))),
        ("unlink", &|| fs::remove_file(dir.join("g"))),
        ("rmdir", &|| fs::remove_dir(dir.join("e"))),
    ];
    for (what, change) in changes {
        pause();
        change()?;
        let now = stamp(&fs::metadata(&dir)?);
        ensure!(now > last, "{what} leaves the directory's mtime");
        last = now;
    }
    Ok(())
}

fn birth_time(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    let first = sys::statx(&path, libc::STATX_BTIME)?;
    if first.stx_mask & libc::STATX_BTIME == 0 {
        return crate::room::skip("no birth time here");
    }
    ensure!((first.stx_btime.tv_sec - seconds_now()).abs() < 60, "born at {}", first.stx_btime.tv_sec);
    pause();
    fs::write(&path, b"later")?;
    fs::rename(&path, room.at("g"))?;
    let second = sys::statx(&room.at("g"), libc::STATX_BTIME)?;
    ensure!(
        (first.stx_btime.tv_sec, first.stx_btime.tv_nsec)
            == (second.stx_btime.tv_sec, second.stx_btime.tv_nsec),
        "the birth time moved"
    );
    Ok(())
}

fn link_counts(room: &Room) -> Result<()> {
    let dir = room.dir("d")?;
    let first = fs::metadata(&dir)?.nlink();
    room.dir("d/a")?;
    room.dir("d/b")?;
    room.file("d/f", b"")?;
    let now = fs::metadata(&dir)?.nlink();
    ensure!(now == first + 2 || (first == 1 && now == 1), "{first} → {now} with two directories more");
    fs::remove_dir(room.at("d/a"))?;
    let now = fs::metadata(&dir)?.nlink();
    ensure!(now == first + 1 || first == 1, "{now} after rmdir");
    Ok(())
}

fn setgid_directory(room: &Room) -> Result<()> {
    needs_root()?;
    let dir = room.dir("d")?;
    sys::chown(&dir, 0, 4444)?;
    sys::chmod(&dir, 0o2775)?;
    fs::write(dir.join("f"), b"")?;
    fs::create_dir(dir.join("e"))?;
    ensure!(
        fs::metadata(dir.join("f"))?.gid() == 4444,
        "the file has group {}",
        fs::metadata(dir.join("f"))?.gid()
    );
    let sub = fs::metadata(dir.join("e"))?;
    ensure!(sub.gid() == 4444 && sub.mode() & 0o2000 != 0, "the directory does not inherit setgid");
    Ok(())
}

fn fchmod_unlinked(room: &Room) -> Result<()> {
    let file = fs::File::create_new(room.at("f"))?;
    fs::remove_file(room.at("f"))?;
    file.set_permissions(fs::Permissions::from_mode(0o612))?;
    ensure!(file.metadata()?.mode() & 0o7777 == 0o612);
    file.set_modified(UNIX_EPOCH + Duration::from_secs(5555))?;
    ensure!(file.metadata()?.mtime() == 5555);
    Ok(())
}

fn stat_after_write(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    let mut file = OpenOptions::new().append(true).open(&path)?;
    for i in 1..100 {
        file.write_all(b"0123456789")?;
        ensure!(fs::metadata(&path)?.len() == i * 10, "after {i} writes");
    }
    Ok(())
}

fn statx_mask(room: &Room) -> Result<()> {
    let path = room.file("f", b"12")?;
    let out = sys::statx(&path, libc::STATX_BASIC_STATS)?;
    ensure!(out.stx_mask & libc::STATX_BASIC_STATS == libc::STATX_BASIC_STATS, "mask {:x}", out.stx_mask);
    ensure!(out.stx_size == 2 && out.stx_nlink == 1 && out.stx_ino == fs::metadata(&path)?.ino());
    Ok(())
}

fn reading_keeps_mtime(room: &Room) -> Result<()> {
    let path = room.file("f", b"12")?;
    sys::utimens(&path, (1000, 7), (1000, 7))?;
    let before = ctime(&path)?;
    let mut text = String::new();
    fs::File::open(&path)?.read_to_string(&mut text)?;
    ensure!(stamp(&fs::metadata(&path)?) == (1000, 7) && ctime(&path)? == before);
    Ok(())
}
