//! Permission checks. Cases with other users run as root.

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Result, ensure};

use crate::room::{Room, needs_root, refuses};
use crate::sys;

super::cases! { permissions::
    access, access_missing, own_without_read, directory_without_search, directory_without_write, other_user_file,
    other_user_group, supplementary_group, other_user_creates, sticky_directory, chmod_by_stranger,
    utimens_by_stranger, search_after_cached_walk, root_reads_all;
}

const STRANGER: u32 = 4321;

fn access(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    sys::chmod(&path, 0o644)?;
    sys::access(&path, libc::F_OK)?;
    sys::access(&path, libc::R_OK | libc::W_OK)?;
    refuses(sys::access(&path, libc::X_OK), libc::EACCES)?;
    sys::chmod(&path, 0o755)?;
    sys::access(&path, libc::X_OK)?;
    sys::access(&room.path, libc::R_OK | libc::W_OK | libc::X_OK)?;
    Ok(())
}

fn access_missing(room: &Room) -> Result<()> {
    refuses(sys::access(&room.at("f"), libc::F_OK), libc::ENOENT)?;
    room.file("f", b"")?;
    sys::access(&room.at("f"), libc::F_OK)?;
    refuses(sys::access(&room.at("f"), 0o100), libc::EINVAL)
}

fn own_without_read(room: &Room) -> Result<()> {
    let path = room.file("f", b"secret")?;
    sys::chmod(&path, 0)?;
    if sys::uid() == 0 {
        ensure!(fs::read(&path)? == b"secret");
        return Ok(());
    }
    refuses(fs::read(&path), libc::EACCES)?;
    sys::chmod(&path, 0o400)?;
    ensure!(fs::read(&path)? == b"secret");
    refuses(fs::OpenOptions::new().write(true).open(&path), libc::EACCES)
}

fn directory_without_search(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/f", b"x")?;
    sys::chmod(&room.path, 0o755)?;
    ensure!(fs::read(room.at("d/f"))? == b"x");
    sys::chmod(&room.at("d"), 0o600)?;
    let refused = || refuses(fs::metadata(room.at("d/f")), libc::EACCES).is_ok();
    let ok = if sys::uid() == 0 {
        sys::chown(&room.at("d"), STRANGER, STRANGER)?;
        sys::as_user(STRANGER, STRANGER, &[], refused)?
    } else {
        refused()
    };
    sys::chmod(&room.at("d"), 0o700)?;
    ensure!(ok, "a cached name was reached without search permission");
    Ok(())
}

fn directory_without_write(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/f", b"x")?;
    sys::chmod(&room.at("d"), 0o555)?;
    sys::chmod(&room.path, 0o755)?;
    let refused = || {
        refuses(fs::write(room.at("d/new"), b""), libc::EACCES).is_ok()
            && refuses(fs::remove_file(room.at("d/f")), libc::EACCES).is_ok()
            && refuses(fs::rename(room.at("d/f"), room.at("d/g")), libc::EACCES).is_ok()
            && refuses(fs::create_dir(room.at("d/new")), libc::EACCES).is_ok()
            && fs::read(room.at("d/f")).is_ok()
    };
    let ok = if sys::uid() == 0 { sys::as_user(STRANGER, STRANGER, &[], refused)? } else { refused() };
    sys::chmod(&room.at("d"), 0o755)?;
    ensure!(ok, "something was allowed without write permission");
    Ok(())
}

fn other_user_file(room: &Room) -> Result<()> {
    needs_root()?;
    let path = room.file("f", b"x")?;
    sys::chmod(&room.path, 0o755)?;
    for (mode, may_read, may_write) in
        [(0o644, true, false), (0o600, false, false), (0o606, true, true), (0o602, false, true)]
    {
        sys::chmod(&path, mode)?;
        let ok = sys::as_user(STRANGER, STRANGER, &[], || {
            fs::read(&path).is_ok() == may_read
                && fs::OpenOptions::new().write(true).open(&path).is_ok() == may_write
        })?;
        ensure!(ok, "mode {mode:o}");
    }
    Ok(())
}

fn other_user_group(room: &Room) -> Result<()> {
    needs_root()?;
    let path = room.file("f", b"x")?;
    sys::chmod(&room.path, 0o755)?;
    sys::chown(&path, 0, 5000)?;
    sys::chmod(&path, 0o640)?;
    ensure!(sys::as_user(STRANGER, 5000, &[], || fs::read(&path).is_ok())?, "the group may not read");
    ensure!(!sys::as_user(STRANGER, 5001, &[], || fs::read(&path).is_ok())?, "another group may read");
    Ok(())
}

fn supplementary_group(room: &Room) -> Result<()> {
    needs_root()?;
    let dir = room.dir("d")?;
    sys::chmod(&room.path, 0o755)?;
    sys::chown(&dir, 0, 5000)?;
    sys::chmod(&dir, 0o770)?;
    let write = || fs::write(dir.join("f"), b"by group").is_ok() && fs::read(dir.join("f")).is_ok();
    ensure!(!sys::as_user(STRANGER, STRANGER, &[6000], write)?, "a stranger may create");
    ensure!(sys::as_user(STRANGER, STRANGER, &[6000, 5000], write)?, "a supplementary group does not count");
    ensure!(fs::metadata(dir.join("f"))?.uid() == STRANGER);
    Ok(())
}

fn other_user_creates(room: &Room) -> Result<()> {
    needs_root()?;
    sys::chmod(&room.path, 0o777)?;
    let made = sys::as_user(STRANGER, 5432, &[], || {
        fs::write(room.at("f"), b"").is_ok()
            && fs::create_dir(room.at("d")).is_ok()
            && std::os::unix::fs::symlink("f", room.at("l")).is_ok()
            && sys::mknod(&room.at("p"), libc::S_IFIFO | 0o600, 0).is_ok()
    })?;
    ensure!(made);
    for name in ["f", "d", "l", "p"] {
        let meta = fs::symlink_metadata(room.at(name))?;
        ensure!(
            (meta.uid(), meta.gid()) == (STRANGER, 5432),
            "{name} belongs to {}:{}",
            meta.uid(),
            meta.gid()
        );
    }
    Ok(())
}

fn sticky_directory(room: &Room) -> Result<()> {
    needs_root()?;
    let dir = room.dir("d")?;
    sys::chmod(&room.path, 0o755)?;
    sys::chmod(&dir, 0o1777)?;
    fs::write(dir.join("roots"), b"")?;
    let ok = sys::as_user(STRANGER, STRANGER, &[], || {
        refuses(fs::remove_file(dir.join("roots")), libc::EPERM).is_ok()
            && fs::write(dir.join("mine"), b"").is_ok()
            && fs::remove_file(dir.join("mine")).is_ok()
    })?;
    ensure!(ok);
    Ok(())
}

fn chmod_by_stranger(room: &Room) -> Result<()> {
    needs_root()?;
    let path = room.file("f", b"")?;
    sys::chmod(&room.path, 0o755)?;
    sys::chmod(&path, 0o666)?;
    let ok = sys::as_user(STRANGER, STRANGER, &[], || {
        refuses(sys::chmod(&path, 0o777), libc::EPERM).is_ok()
            && refuses(sys::chown(&path, STRANGER, u32::MAX), libc::EPERM).is_ok()
    })?;
    ensure!(ok);
    ensure!(fs::metadata(&path)?.mode() & 0o777 == 0o666);
    Ok(())
}

fn utimens_by_stranger(room: &Room) -> Result<()> {
    needs_root()?;
    let path = room.file("f", b"")?;
    sys::chmod(&room.path, 0o755)?;
    sys::chmod(&path, 0o666)?;
    let now = (0, libc::UTIME_NOW);
    let ok = sys::as_user(STRANGER, STRANGER, &[], || {
        refuses(sys::utimens(&path, (1, 0), (1, 0)), libc::EPERM).is_ok()
            && sys::utimens(&path, now, now).is_ok()
    })?;
    ensure!(ok);
    Ok(())
}

fn search_after_cached_walk(room: &Room) -> Result<()> {
    needs_root()?;
    fs::create_dir_all(room.at("a/b"))?;
    room.file("a/b/f", b"x")?;
    sys::chmod(&room.path, 0o755)?;
    let read = || fs::read(room.at("a/b/f")).is_ok();
    ensure!(sys::as_user(STRANGER, STRANGER, &[], read)?, "cannot read what all may read");
    sys::chmod(&room.at("a"), 0o700)?;
    ensure!(!sys::as_user(STRANGER, STRANGER, &[], read)?, "read through a closed directory");
    sys::chmod(&room.at("a"), 0o711)?;
    ensure!(sys::as_user(STRANGER, STRANGER, &[], read)?, "search permission is enough");
    Ok(())
}

fn root_reads_all(room: &Room) -> Result<()> {
    needs_root()?;
    let dir = room.dir("d")?;
    room.file("d/f", b"x")?;
    sys::chown(&room.at("d/f"), STRANGER, STRANGER)?;
    sys::chmod(&room.at("d/f"), 0o000)?;
    sys::chown(&dir, STRANGER, STRANGER)?;
    sys::chmod(&dir, 0o000)?;
    ensure!(fs::read(room.at("d/f"))? == b"x");
    ensure!(fs::read_dir(&dir)?.count() == 1);
    Ok(())
}
