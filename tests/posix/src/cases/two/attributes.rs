//! Attributes, extended attributes and permissions.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::{all_see, reads, warm};
use crate::acls;
use crate::room::{Room, needs_root, or_skip, refuses};
use crate::sys;

super::cases! { two::
    mode, mode_of_directory, mode_by_descriptor, owner, times, times_of_directory, truncated_by_path,
    truncated_open, attributes_of_linked, xattr_set, xattr_changed, xattr_removed, xattr_of_directory, acl_set,
    acl_default, rights_taken, rights_by_acl, search_taken, attributes_by_turns,
    mode_without_set_id_after_write, mode_without_set_id_after_chown_to_same,
    xattr_of_a_capability_after_write, mode_by_acl;
}

/// A user id without an account.
const STRANGER: u32 = 4321;

/// `d/f` and its siblings, cached on every mount.
fn warm_file(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/f", b"contents")?;
    room.file("d/sibling", b"")?;
    warm(room, &["d/missing"])
}

fn has_mode(dir: &Path, name: &str, mode: u32) -> Result<()> {
    let got = fs::symlink_metadata(dir.join(name)).with_context(|| name.to_owned())?.mode() & 0o7777;
    ensure!(got == mode, "{name} has mode {got:o}, not {mode:o}");
    Ok(())
}

fn has_size(dir: &Path, name: &str, size: u64) -> Result<()> {
    let got = fs::symlink_metadata(dir.join(name)).with_context(|| name.to_owned())?.len();
    ensure!(got == size, "{name} has {got} bytes, not {size}");
    Ok(())
}

fn mode(room: &Room) -> Result<()> {
    warm_file(room)?;
    sys::chmod(&room.at("d/f"), 0o4711)?;
    all_see(room, &[], |dir| has_mode(dir, "d/f", 0o4711))
}

fn mode_of_directory(room: &Room) -> Result<()> {
    warm_file(room)?;
    sys::chmod(&room.at("d"), 0o1751)?;
    all_see(room, &[], |dir| has_mode(dir, "d", 0o1751))
}

fn mode_by_descriptor(room: &Room) -> Result<()> {
    warm_file(room)?;
    let (file, other) = (fs::File::open(room.at("d/f"))?, fs::File::open(room.over("d/f"))?);
    ensure!(other.metadata()?.mode() & 0o7777 == 0o644);
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o604))?;
    let got = other.metadata()?.mode() & 0o7777;
    ensure!(got == 0o604, "an open file has mode {got:o}");
    all_see(room, &[], |dir| has_mode(dir, "d/f", 0o604))
}

fn owner(room: &Room) -> Result<()> {
    needs_root()?;
    warm_file(room)?;
    sys::chown(&room.at("d/f"), STRANGER, STRANGER + 1)?;
    sys::chown(&room.at("d"), u32::MAX, STRANGER)?;
    all_see(room, &[], |dir| {
        let file = fs::symlink_metadata(dir.join("d/f"))?;
        ensure!((file.uid(), file.gid()) == (STRANGER, STRANGER + 1), "of {}:{}", file.uid(), file.gid());
        let above = fs::symlink_metadata(dir.join("d"))?;
        ensure!((above.uid(), above.gid()) == (0, STRANGER), "d is of {}:{}", above.uid(), above.gid());
        Ok(())
    })
}

fn times(room: &Room) -> Result<()> {
    warm_file(room)?;
    sys::utimens(&room.at("d/f"), (5, 6), (7, 8))?;
    all_see(room, &[], |dir| {
        let got = fs::symlink_metadata(dir.join("d/f"))?;
        ensure!((got.mtime(), got.mtime_nsec()) == (7, 8), "mtime {}.{}", got.mtime(), got.mtime_nsec());
        Ok(())
    })
}

fn times_of_directory(room: &Room) -> Result<()> {
    warm_file(room)?;
    sys::utimens(&room.at("d"), (5, 6), (7, 8))?;
    all_see(room, &[], |dir| {
        ensure!(fs::symlink_metadata(dir.join("d"))?.mtime() == 7, "another mtime");
        Ok(())
    })?;
    // A new name changes it again, and every mount shows the new value.
    fs::write(room.over("d/new"), b"")?;
    let local = fs::symlink_metadata(room.over("d"))?;
    ensure!(local.mtime() != 7, "a new name left its directory's mtime");
    all_see(room, &[], |dir| {
        let got = fs::symlink_metadata(dir.join("d"))?;
        ensure!((got.mtime(), got.mtime_nsec()) == (local.mtime(), local.mtime_nsec()), "another mtime");
        Ok(())
    })
}

fn truncated_by_path(room: &Room) -> Result<()> {
    warm_file(room)?;
    let path = sys::c(&room.at("d/f"))?;
    ensure!(
        unsafe { libc::truncate(path.as_ptr(), 3) } == 0,
        "truncate: {}",
        std::io::Error::last_os_error()
    );
    all_see(room, &[], |dir| {
        has_size(dir, "d/f", 3)?;
        reads(dir, "d/f", b"con")
    })
}

fn truncated_open(room: &Room) -> Result<()> {
    warm_file(room)?;
    let (file, other) =
        (fs::File::options().write(true).open(room.at("d/f"))?, fs::File::open(room.over("d/f"))?);
    ensure!(other.metadata()?.len() == 8);
    sys::ftruncate(&file, 5000)?;
    ensure!(other.metadata()?.len() == 5000, "an open file has {} bytes", other.metadata()?.len());
    sys::ftruncate(&file, 2)?;
    ensure!(other.metadata()?.len() == 2, "an open file has {} bytes", other.metadata()?.len());
    all_see(room, &[], |dir| reads(dir, "d/f", b"co"))
}

/// Attributes change through one name, and every mount shows the change under the other name.
fn attributes_of_linked(room: &Room) -> Result<()> {
    warm_file(room)?;
    room.dir("e")?;
    fs::hard_link(room.at("d/f"), room.at("e/g"))?;
    warm(room, &[])?;
    sys::chmod(&room.at("d/f"), 0o600)?;
    all_see(room, &[], |dir| has_mode(dir, "e/g", 0o600))?;
    fs::write(room.over("e/g"), b"longer contents")?;
    all_see(room, &[], |dir| reads(dir, "d/f", b"longer contents"))
}

fn has_xattr(dir: &Path, path: &str, name: &str, value: &[u8]) -> Result<()> {
    let got = sys::xattr(&dir.join(path), name).with_context(|| format!("{path}: {name}"))?;
    ensure!(got == value, "{path}: {name} is {:?}", String::from_utf8_lossy(&got));
    Ok(())
}

/// `d/f` with `user.a`; every mount has cached that `user.b` is absent.
fn warm_xattrs(room: &Room, path: &str) -> Result<()> {
    room.dir("d")?;
    room.file("d/f", b"")?;
    or_skip(sys::set_xattr(&room.at(path), "user.a", b"one", 0), "user xattrs")?;
    for _ in 0..2 {
        warm(room, &[])?;
        for (way, dir) in super::ways(room) {
            has_xattr(dir, path, "user.a", b"one").with_context(|| way.clone())?;
            refuses(sys::xattr(&dir.join(path), "user.b"), libc::ENODATA).context(way)?;
        }
    }
    Ok(())
}

fn xattr_set(room: &Room) -> Result<()> {
    warm_xattrs(room, "d/f")?;
    sys::set_xattr(&room.at("d/f"), "user.b", b"two", libc::XATTR_CREATE)?;
    all_see(room, &[], |dir| {
        has_xattr(dir, "d/f", "user.b", b"two")?;
        ensure!(sys::list_xattrs(&dir.join("d/f"))?.len() == 2, "the list is old");
        Ok(())
    })
}

fn xattr_changed(room: &Room) -> Result<()> {
    warm_xattrs(room, "d/f")?;
    sys::set_xattr(&room.at("d/f"), "user.a", b"a longer value", libc::XATTR_REPLACE)?;
    all_see(room, &[], |dir| has_xattr(dir, "d/f", "user.a", b"a longer value"))
}

fn xattr_removed(room: &Room) -> Result<()> {
    warm_xattrs(room, "d/f")?;
    sys::remove_xattr(&room.at("d/f"), "user.a")?;
    all_see(room, &[], |dir| {
        refuses(sys::xattr(&dir.join("d/f"), "user.a"), libc::ENODATA)?;
        ensure!(sys::list_xattrs(&dir.join("d/f"))?.is_empty(), "the list is old");
        Ok(())
    })
}

fn xattr_of_directory(room: &Room) -> Result<()> {
    warm_xattrs(room, "d")?;
    sys::set_xattr(&room.at("d"), "user.b", b"two", 0)?;
    sys::set_xattr(&room.at("d"), "user.a", b"other", 0)?;
    all_see(room, &[], |dir| {
        has_xattr(dir, "d", "user.a", b"other")?;
        has_xattr(dir, "d", "user.b", b"two")
    })
}

fn acl_set(room: &Room) -> Result<()> {
    warm_file(room)?;
    let acl = acls::with_user(6, STRANGER, 6, 4, 5, 1);
    or_skip(sys::set_xattr(&room.at("d/f"), acls::ACCESS, &acl, 0), "POSIX ACLs")?;
    all_see(room, &[], |dir| {
        has_mode(dir, "d/f", 0o651)?;
        ensure!(sys::xattr(&dir.join("d/f"), acls::ACCESS)? == acl, "another ACL");
        Ok(())
    })?;
    sys::remove_xattr(&room.over("d/f"), acls::ACCESS)?;
    all_see(room, &[], |dir| refuses(sys::xattr(&dir.join("d/f"), acls::ACCESS), libc::ENODATA))
}

fn acl_default(room: &Room) -> Result<()> {
    warm_file(room)?;
    let acl = acls::with_user(7, STRANGER, 7, 5, 7, 0);
    or_skip(sys::set_xattr(&room.at("d"), acls::DEFAULT, &acl, 0), "POSIX ACLs")?;
    fs::write(room.over("d/new"), b"")?;
    all_see(room, &[], |dir| {
        ensure!(sys::xattr(&dir.join("d"), acls::DEFAULT)? == acl, "another default ACL");
        let inherited = sys::xattr(&dir.join("d/new"), acls::ACCESS).context("nothing was inherited")?;
        ensure!(inherited == acls::with_user(6, STRANGER, 7, 5, 6, 0), "another ACL was inherited");
        Ok(())
    })
}

/// Returns whether an unprivileged user, or without root this process, may do it.
fn may(body: impl FnOnce() -> bool) -> Result<bool> {
    Ok(if sys::uid() == 0 { sys::as_user(STRANGER, STRANGER, &[], body)? } else { body() })
}

fn rights_taken(room: &Room) -> Result<()> {
    warm_file(room)?;
    sys::chmod(&room.path, 0o755)?;
    let file = room.over("d/f");
    ensure!(may(|| fs::read(&file).is_ok())?, "it cannot be read to begin with");
    sys::chmod(&room.at("d/f"), 0)?;
    ensure!(!may(|| fs::read(&file).is_ok())?, "it can still be read");
    sys::chmod(&room.at("d/f"), 0o604)?;
    ensure!(may(|| fs::read(&file).is_ok())?, "it cannot be read again");
    all_see(room, &[], |dir| has_mode(dir, "d/f", 0o604))
}

fn rights_by_acl(room: &Room) -> Result<()> {
    needs_root()?;
    warm_file(room)?;
    sys::chmod(&room.path, 0o755)?;
    let (file, path) = (room.over("d/f"), room.at("d/f"));
    ensure!(may(|| fs::read(&file).is_ok())?, "it cannot be read to begin with");
    let denied = acls::with_user(6, STRANGER, 0, 4, 7, 4);
    or_skip(sys::set_xattr(&path, acls::ACCESS, &denied, 0), "POSIX ACLs")?;
    ensure!(!may(|| fs::read(&file).is_ok())?, "the ACL's refusal does not count");
    sys::set_xattr(&path, acls::ACCESS, &acls::with_user(6, STRANGER, 6, 0, 7, 0), 0)?;
    ensure!(may(|| fs::write(&file, b"by the stranger").is_ok())?, "the ACL's permission does not count");
    all_see(room, &[], |dir| reads(dir, "d/f", b"by the stranger"))
}

fn search_taken(room: &Room) -> Result<()> {
    warm_file(room)?;
    sys::chmod(&room.path, 0o755)?;
    let file = room.over("d/f");
    ensure!(may(|| fs::metadata(&file).is_ok())?, "it cannot be reached to begin with");
    sys::chmod(&room.at("d"), 0o600)?;
    let reached = may(|| fs::metadata(&file).is_ok())?;
    sys::chmod(&room.at("d"), 0o755)?;
    ensure!(!reached, "a name was reached without search permission");
    ensure!(may(|| fs::metadata(&file).is_ok())?, "it cannot be reached again");
    all_see(room, &[], |dir| reads(dir, "d/f", b"contents"))
}

fn attributes_by_turns(room: &Room) -> Result<()> {
    warm_file(room)?;
    for round in 0..60 {
        let (mine, theirs) =
            if round % 2 == 0 { (&room.path, &room.beside) } else { (&room.beside, &room.path) };
        let mode = 0o600 + round;
        sys::chmod(&mine.join("d/f"), mode)?;
        has_mode(theirs, "d/f", mode).with_context(|| format!("round {round}"))?;
        sys::utimens(&theirs.join("d"), (1, 1), (i64::from(round), 0))?;
        let got = fs::metadata(mine.join("d"))?.mtime();
        ensure!(got == i64::from(round), "round {round}: mtime {got}");
    }
    all_see(room, &[], |dir| has_mode(dir, "d/f", 0o673))
}

/// Checks the mode by a statx of the mode alone, which a kernel may cache apart from size and times.
fn has_bits(dir: &Path, mode: u32) -> Result<()> {
    let got = u32::from(sys::statx(&dir.join("d/f"), libc::STATX_MODE)?.stx_mode) & 0o7777;
    ensure!(got == mode, "the mode alone is {got:o}, not {mode:o}");
    Ok(())
}

fn written_by_stranger(path: &Path) -> Result<bool> {
    let write = || fs::OpenOptions::new().write(true).open(path).is_ok_and(|mut f| f.write_all(b"x").is_ok());
    Ok(if sys::uid() == 0 { sys::as_user(STRANGER, STRANGER, &[], write)? } else { write() })
}

fn mode_without_set_id_after_write(room: &Room) -> Result<()> {
    sys::chmod(&room.path, 0o755)?;
    for by in [&room.path, &room.beside] {
        room.dir("d")?;
        let path = room.file("d/f", b"contents")?;
        sys::chmod(&path, 0o6777)?;
        warm(room, &[])?;
        all_see(room, &[], |dir| has_bits(dir, 0o6777))?;
        ensure!(written_by_stranger(&by.join("d/f"))?, "the write was refused");
        all_see(room, &[], |dir| has_bits(dir, 0o777))?;
        fs::remove_dir_all(room.at("d"))?;
    }
    Ok(())
}

/// chown(2) to the present owner and group also clears the set-ID bits.
fn mode_without_set_id_after_chown_to_same(room: &Room) -> Result<()> {
    for by in [&room.path, &room.beside] {
        room.dir("d")?;
        let path = room.file("d/f", b"contents")?;
        sys::chmod(&path, 0o4755)?;
        warm(room, &[])?;
        all_see(room, &[], |dir| has_bits(dir, 0o4755))?;
        sys::chown(&by.join("d/f"), u32::MAX, u32::MAX)?;
        all_see(room, &[], |dir| has_bits(dir, 0o755))?;
        fs::remove_dir_all(room.at("d"))?;
    }
    Ok(())
}

fn xattr_of_a_capability_after_write(room: &Room) -> Result<()> {
    needs_root()?;
    const CAPABILITY: &str = "security.capability";
    let value = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    sys::chmod(&room.path, 0o755)?;
    room.dir("d")?;
    let path = room.file("d/f", b"contents")?;
    sys::chmod(&path, 0o777)?;
    or_skip(sys::set_xattr(&path, CAPABILITY, &value, 0), "file capabilities")?;
    let has = |dir: &Path| sys::xattr(&dir.join("d/f"), CAPABILITY);
    all_see(room, &[], |dir| {
        ensure!(has(dir)? == value, "another capability");
        Ok(())
    })?;
    ensure!(written_by_stranger(&room.over("d/f"))?, "the write was refused");
    all_see(room, &[], |dir| refuses(has(dir), libc::ENODATA))
}

/// The mask of an access ACL is the mode's group permission bits.
fn mode_by_acl(room: &Room) -> Result<()> {
    warm_file(room)?;
    all_see(room, &[], |dir| has_bits(dir, 0o644))?;
    let path = room.at("d/f");
    or_skip(sys::set_xattr(&path, acls::ACCESS, &acls::with_user(6, STRANGER, 6, 4, 6, 4), 0), "POSIX ACLs")?;
    all_see(room, &[], |dir| has_bits(dir, 0o664))?;
    sys::chmod(&room.over("d/f"), 0o604)?;
    all_see(room, &[], |dir| has_bits(dir, 0o604))?;
    let own = sys::xattr(&path, acls::ACCESS)?;
    all_see(room, &[], |dir| {
        ensure!(sys::xattr(&dir.join("d/f"), acls::ACCESS)? == own, "another ACL");
        Ok(())
    })?;
    sys::set_xattr(&room.over("d/f"), acls::ACCESS, &acls::with_user(6, STRANGER, 6, 4, 7, 4), 0)?;
    all_see(room, &[], |dir| has_bits(dir, 0o674))?;
    sys::remove_xattr(&path, acls::ACCESS)?;
    all_see(room, &[], |dir| has_bits(dir, 0o674))?;
    all_see(room, &[], |dir| refuses(sys::xattr(&dir.join("d/f"), acls::ACCESS), libc::ENODATA))
}
