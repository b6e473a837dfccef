//! Hard links, symlinks, unlink and rmdir.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::room::{Room, refuses};
use crate::sys;

super::cases! { link::
    two_names, across_directories, last_name_goes, to_directory, existing, of_symlink, data_by_other_name,
    descriptor_outlives_latest_name;
    symlink:: relative, absolute, dangling, long, looping, not_utf8, attributes, existing_name, empty_target, read_file;
    unlink:: missing, directory, negative_then_made;
    rmdir:: empty, full, file, working_directory, dot;
}

fn two_names(room: &Room) -> Result<()> {
    let path = room.file("a", b"x")?;
    ensure!(fs::metadata(&path)?.nlink() == 1);
    fs::hard_link(&path, room.at("b"))?;
    let (a, b) = (fs::metadata(&path)?, fs::metadata(room.at("b"))?);
    ensure!(a.ino() == b.ino() && a.nlink() == 2 && b.nlink() == 2);
    fs::set_permissions(room.at("b"), fs::Permissions::from_mode(0o600))?;
    ensure!(fs::metadata(&path)?.mode() & 0o777 == 0o600, "the other name shows old attributes");
    fs::remove_file(&path)?;
    ensure!(fs::metadata(room.at("b"))?.nlink() == 1);
    Ok(())
}

/// A descriptor reaches its inode through the remaining names after its own name was removed.
fn descriptor_outlives_latest_name(room: &Room) -> Result<()> {
    let path = room.at("a");
    sys::mknod(&path, libc::S_IFIFO | 0o600, 0)?;
    let held = sys::open(&path, libc::O_PATH, 0)?;
    fs::hard_link(&path, room.at("b"))?;
    fs::hard_link(&path, room.at("c"))?;
    fs::remove_file(room.at("c"))?;
    fs::remove_file(room.at("b"))?;
    sys::link_fd(&held, &room.at("d"))?;
    ensure!(fs::symlink_metadata(room.at("d"))?.nlink() == 2);
    Ok(())
}

fn across_directories(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("a", b"first")?;
    fs::hard_link(room.at("a"), room.at("d/b"))?;
    fs::write(room.at("d/b"), b"changed by the other name")?;
    ensure!(fs::metadata(room.at("a"))?.len() == 25);
    ensure!(fs::read(room.at("a"))? == b"changed by the other name");
    Ok(())
}

fn last_name_goes(room: &Room) -> Result<()> {
    let file = fs::File::open(room.file("a", b"x")?)?;
    fs::hard_link(room.at("a"), room.at("b"))?;
    fs::remove_file(room.at("a"))?;
    ensure!(file.metadata()?.nlink() == 1);
    fs::remove_file(room.at("b"))?;
    ensure!(file.metadata()?.nlink() == 0);
    Ok(())
}

fn to_directory(room: &Room) -> Result<()> {
    room.dir("d")?;
    refuses(fs::hard_link(room.at("d"), room.at("e")), libc::EPERM)
}

fn existing(room: &Room) -> Result<()> {
    room.file("a", b"")?;
    room.file("b", b"")?;
    refuses(fs::hard_link(room.at("a"), room.at("b")), libc::EEXIST)?;
    refuses(fs::hard_link(room.at("c"), room.at("d")), libc::ENOENT)
}

fn of_symlink(room: &Room) -> Result<()> {
    symlink("nowhere", room.at("l"))?;
    fs::hard_link(room.at("l"), room.at("m"))?;
    ensure!(fs::read_link(room.at("m"))? == Path::new("nowhere"));
    ensure!(fs::symlink_metadata(room.at("l"))?.nlink() == 2);
    Ok(())
}

fn data_by_other_name(room: &Room) -> Result<()> {
    room.file("a", b"old old old")?;
    fs::hard_link(room.at("a"), room.at("b"))?;
    ensure!(fs::read(room.at("b"))? == b"old old old");
    let before = fs::metadata(room.at("b"))?;
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::write(room.at("a"), b"new")?;
    let after = fs::metadata(room.at("b"))?;
    ensure!(after.len() == 3 && fs::read(room.at("b"))? == b"new");
    ensure!(
        (after.mtime(), after.mtime_nsec()) > (before.mtime(), before.mtime_nsec()),
        "mtime stands still"
    );
    Ok(())
}

fn relative(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("f", b"through")?;
    symlink("../f", room.at("d/l"))?;
    ensure!(fs::read_link(room.at("d/l"))? == Path::new("../f"));
    ensure!(fs::read(room.at("d/l"))? == b"through");
    symlink("d", room.at("dl"))?;
    ensure!(fs::read(room.at("dl/l"))? == b"through");
    Ok(())
}

fn absolute(room: &Room) -> Result<()> {
    symlink("/etc/passwd", room.at("l"))?;
    ensure!(fs::read_link(room.at("l"))? == Path::new("/etc/passwd"), "an absolute target was changed");
    ensure!(fs::read(room.at("l"))? == fs::read("/etc/passwd")?);
    Ok(())
}

fn dangling(room: &Room) -> Result<()> {
    symlink("nowhere/at/all", room.at("l"))?;
    refuses(fs::metadata(room.at("l")), libc::ENOENT)?;
    ensure!(fs::symlink_metadata(room.at("l"))?.is_symlink());
    ensure!(fs::read_link(room.at("l"))? == Path::new("nowhere/at/all"));
    room.dir("nowhere")?;
    room.dir("nowhere/at")?;
    room.file("nowhere/at/all", b"now there")?;
    ensure!(fs::read(room.at("l"))? == b"now there");
    Ok(())
}

fn long(room: &Room) -> Result<()> {
    for length in [1_usize, 59, 60, 61, 255, 1000, 4000, 4095] {
        let target = "x".repeat(length);
        let path = room.at(format!("l{length}"));
        match symlink(&target, &path) {
            Ok(()) => {}
            // xfs supports 1,023 bytes.
            Err(e) if length > 1000 && e.raw_os_error() == Some(libc::ENAMETOOLONG) => continue,
            Err(e) => return Err(e.into()),
        }
        ensure!(fs::read_link(&path)?.as_os_str().len() == length, "{length} bytes");
        ensure!(fs::symlink_metadata(&path)?.len() == u64::try_from(length)?);
    }
    refuses(symlink("x".repeat(4096), room.at("too long")), libc::ENAMETOOLONG)
}

fn looping(room: &Room) -> Result<()> {
    symlink("b", room.at("a"))?;
    symlink("a", room.at("b"))?;
    refuses(fs::metadata(room.at("a")), libc::ELOOP)?;
    refuses(fs::File::open(room.at("b")), libc::ELOOP)
}

fn not_utf8(room: &Room) -> Result<()> {
    let target = OsStr::from_bytes(b"\xff\xfe/\x80target");
    symlink(target, room.at("l"))?;
    ensure!(fs::read_link(room.at("l"))?.as_os_str() == target);
    Ok(())
}

fn attributes(room: &Room) -> Result<()> {
    room.file("f", b"12345")?;
    symlink("f", room.at("l"))?;
    let link = fs::symlink_metadata(room.at("l"))?;
    ensure!(link.mode() & 0o7777 == 0o777, "mode {:o}", link.mode());
    ensure!(link.len() == 1);
    sys::utimens(&room.at("l"), (1000, 5), (2000, 6))?;
    let link = fs::symlink_metadata(room.at("l"))?;
    ensure!(link.mtime() == 2000 && link.mtime_nsec() == 6);
    ensure!(fs::metadata(room.at("l"))?.mtime() != 2000, "the target's time was set");
    Ok(())
}

fn existing_name(room: &Room) -> Result<()> {
    room.file("f", b"")?;
    refuses(symlink("x", room.at("f")), libc::EEXIST)?;
    refuses(fs::read_link(room.at("f")), libc::EINVAL)
}

fn empty_target(room: &Room) -> Result<()> {
    refuses(symlink("", room.at("l")), libc::ENOENT)
}

fn read_file(room: &Room) -> Result<()> {
    for i in 0..20 {
        symlink(format!("target {i}"), room.at("l"))?;
        ensure!(fs::read_link(room.at("l"))?.to_string_lossy() == format!("target {i}"));
        fs::remove_file(room.at("l"))?;
    }
    Ok(())
}

fn missing(room: &Room) -> Result<()> {
    refuses(fs::remove_file(room.at("f")), libc::ENOENT)?;
    room.file("f", b"")?;
    fs::remove_file(room.at("f"))?;
    refuses(fs::remove_file(room.at("f")), libc::ENOENT)
}

fn directory(room: &Room) -> Result<()> {
    room.dir("d")?;
    let path = sys::c(&room.at("d"))?;
    ensure!(unsafe { libc::unlink(path.as_ptr()) } == -1);
    let errno = std::io::Error::last_os_error().raw_os_error();
    ensure!(errno == Some(libc::EISDIR), "{errno:?}");
    Ok(())
}

fn negative_then_made(room: &Room) -> Result<()> {
    for i in 0..50 {
        let path = room.at(format!("n{i}"));
        refuses(fs::metadata(&path), libc::ENOENT)?;
        refuses(fs::metadata(&path), libc::ENOENT)?;
        match i % 4 {
            0 => fs::write(&path, b"x")?,
            1 => fs::create_dir(&path)?,
            2 => symlink("/", &path)?,
            _ => fs::hard_link(room.at("n0"), &path)?,
        }
        ensure!(fs::metadata(&path).is_ok(), "made, and still missing: {i}");
    }
    Ok(())
}

fn empty(room: &Room) -> Result<()> {
    room.dir("d")?;
    fs::remove_dir(room.at("d"))?;
    refuses(fs::metadata(room.at("d")), libc::ENOENT)?;
    room.dir("d")?;
    ensure!(fs::read_dir(room.at("d"))?.count() == 0);
    Ok(())
}

fn full(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/f", b"")?;
    refuses(fs::remove_dir(room.at("d")), libc::ENOTEMPTY)?;
    fs::remove_file(room.at("d/f"))?;
    fs::remove_dir(room.at("d"))?;
    Ok(())
}

fn file(room: &Room) -> Result<()> {
    room.file("f", b"")?;
    refuses(fs::remove_dir(room.at("f")), libc::ENOTDIR)?;
    refuses(fs::remove_dir(room.at("g")), libc::ENOENT)
}

fn working_directory(room: &Room) -> Result<()> {
    let dir = room.dir("d")?;
    std::env::set_current_dir(&dir)?;
    fs::remove_dir(&dir)?;
    refuses(std::env::current_dir(), libc::ENOENT).context("getcwd")?;
    refuses(fs::write("f", b""), libc::ENOENT).context("create a file")?;
    ensure!(fs::read_dir(".").context("list")?.count() == 0);
    ensure!(fs::metadata(".").context("stat")?.is_dir());
    std::env::set_current_dir("/")?;
    Ok(())
}

fn dot(room: &Room) -> Result<()> {
    room.dir("d")?;
    refuses(fs::remove_dir(room.at("d/.")), libc::EINVAL)?;
    refuses(fs::remove_dir(room.at("d/..")), libc::ENOTEMPTY)
}
