//! Extended attributes, and POSIX ACLs in their xattr form.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use anyhow::{Result, ensure};

use crate::acls;
use crate::room::{Room, needs_root, or_skip, refuses};
use crate::sys;

super::cases! {
    xattr:: set_read, missing, create_replace, sizes, list, remove, directory, on_symlink, name_limits, value_limits,
    namespaces, not_text, survives_rename, trusted, capability, size_queries;
    acl:: access_denies, access_mode, default_inherited, default_on_file, removed, invalid, chmod_changes_mask;
}

/// Creates a file that supports user xattrs, or skips.
fn tagged(room: &Room) -> Result<std::path::PathBuf> {
    let path = room.file("f", b"")?;
    or_skip(sys::set_xattr(&path, "user.probe", b"1", 0), "user xattrs")?;
    sys::remove_xattr(&path, "user.probe")?;
    Ok(path)
}

fn set_read(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    sys::set_xattr(&path, "user.a", b"value", 0)?;
    ensure!(sys::xattr(&path, "user.a")? == b"value");
    sys::set_xattr(&path, "user.a", b"another value", 0)?;
    ensure!(sys::xattr(&path, "user.a")? == b"another value");
    sys::set_xattr(&path, "user.a", b"", 0)?;
    ensure!(sys::xattr(&path, "user.a")?.is_empty());
    Ok(())
}

fn missing(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    refuses(sys::xattr(&path, "user.none"), libc::ENODATA)?;
    refuses(sys::remove_xattr(&path, "user.none"), libc::ENODATA)?;
    refuses(sys::xattr(&room.at("no"), "user.none"), libc::ENOENT)?;
    sys::set_xattr(&path, "user.none", b"now", 0)?;
    ensure!(sys::xattr(&path, "user.none")? == b"now", "absence was remembered");
    Ok(())
}

fn create_replace(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    refuses(sys::set_xattr(&path, "user.a", b"1", libc::XATTR_REPLACE), libc::ENODATA)?;
    sys::set_xattr(&path, "user.a", b"1", libc::XATTR_CREATE)?;
    refuses(sys::set_xattr(&path, "user.a", b"2", libc::XATTR_CREATE), libc::EEXIST)?;
    sys::set_xattr(&path, "user.a", b"3", libc::XATTR_REPLACE)?;
    ensure!(sys::xattr(&path, "user.a")? == b"3");
    Ok(())
}

fn sizes(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    sys::set_xattr(&path, "user.a", b"0123456789", 0)?;
    refuses(sys::xattr_sized(&path, "user.a", 5), libc::ERANGE)?;
    ensure!(sys::xattr_sized(&path, "user.a", 10)? == b"0123456789");
    Ok(())
}

fn size_queries(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    sys::set_xattr(&path, "user.a", b"0123456789", 0)?;
    ensure!(sys::xattr_sized(&path, "user.a", 0)?.len() == 10);
    let at = sys::c(&path)?;
    let length = unsafe { libc::llistxattr(at.as_ptr(), std::ptr::null_mut(), 0) };
    let names = sys::list_xattrs(&path)?;
    let expected: i64 = names.iter().map(|n| i64::try_from(n.len()).unwrap_or(0) + 1).sum();
    ensure!(i64::try_from(length)? == expected, "list: {length} for {names:?}");
    let mut small = [0_i8; 3];
    let ret = unsafe { libc::llistxattr(at.as_ptr(), small.as_mut_ptr().cast(), small.len()) };
    ensure!(ret == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ERANGE));
    Ok(())
}

fn user_names(path: &Path) -> Result<Vec<String>> {
    let mut names = sys::list_xattrs(path)?;
    names.retain(|n| n.starts_with("user."));
    names.sort();
    Ok(names)
}

fn list(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    ensure!(user_names(&path)?.is_empty());
    for name in ["user.c", "user.a", "user.b"] {
        sys::set_xattr(&path, name, name.as_bytes(), 0)?;
    }
    ensure!(user_names(&path)? == ["user.a", "user.b", "user.c"]);
    Ok(())
}

fn remove(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    sys::set_xattr(&path, "user.a", b"1", 0)?;
    sys::remove_xattr(&path, "user.a")?;
    refuses(sys::xattr(&path, "user.a"), libc::ENODATA)?;
    ensure!(user_names(&path)?.is_empty());
    Ok(())
}

fn directory(room: &Room) -> Result<()> {
    tagged(room)?;
    let dir = room.dir("d")?;
    sys::set_xattr(&dir, "user.a", b"on a directory", 0)?;
    ensure!(sys::xattr(&dir, "user.a")? == b"on a directory");
    Ok(())
}

fn on_symlink(room: &Room) -> Result<()> {
    tagged(room)?;
    symlink("f", room.at("l"))?;
    refuses(sys::set_xattr(&room.at("l"), "user.a", b"1", 0), libc::EPERM)?;
    ensure!(user_names(&room.at("l"))?.is_empty());
    Ok(())
}

fn name_limits(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    let longest = format!("user.{}", "n".repeat(250));
    sys::set_xattr(&path, &longest, b"v", 0)?;
    ensure!(sys::xattr(&path, &longest)? == b"v" && user_names(&path)? == [longest]);
    let too_long = format!("user.{}", "n".repeat(251));
    refuses(sys::set_xattr(&path, &too_long, b"v", 0), libc::ERANGE)
}

fn value_limits(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    let value = vec![b'v'; 3000];
    sys::set_xattr(&path, "user.large", &value, 0)?;
    ensure!(sys::xattr(&path, "user.large")? == value);
    let refused = sys::set_xattr(&path, "user.larger", &vec![b'v'; 65_537], 0);
    ensure!(matches!(refused.map_err(|e| e.raw_os_error()), Err(Some(libc::E2BIG | libc::ENOSPC))));
    Ok(())
}

fn namespaces(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    refuses(sys::set_xattr(&path, "nonsense.a", b"1", 0), libc::EOPNOTSUPP)?;
    let refused = sys::set_xattr(&path, "user.", b"1", 0);
    ensure!(matches!(refused.map_err(|e| e.raw_os_error()), Err(Some(libc::EINVAL | libc::EOPNOTSUPP))));
    Ok(())
}

fn not_text(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    let value: Vec<u8> = (0..=255).collect();
    sys::set_xattr(&path, "user.bytes", &value, 0)?;
    ensure!(sys::xattr(&path, "user.bytes")? == value);
    Ok(())
}

fn survives_rename(room: &Room) -> Result<()> {
    let path = tagged(room)?;
    sys::set_xattr(&path, "user.a", b"kept", 0)?;
    fs::rename(&path, room.at("g"))?;
    ensure!(sys::xattr(&room.at("g"), "user.a")? == b"kept");
    fs::write(&path, b"")?;
    refuses(sys::xattr(&path, "user.a"), libc::ENODATA)
}

fn trusted(room: &Room) -> Result<()> {
    needs_root()?;
    let path = tagged(room)?;
    or_skip(sys::set_xattr(&path, "trusted.a", b"roots", 0), "trusted xattrs")?;
    ensure!(sys::xattr(&path, "trusted.a")? == b"roots");
    Ok(())
}

fn capability(room: &Room) -> Result<()> {
    let path = room.file("f", b"x")?;
    let missing = sys::xattr(&path, "security.capability").map_err(|e| e.raw_os_error());
    ensure!(matches!(missing, Err(Some(libc::ENODATA | libc::EOPNOTSUPP))), "{missing:?}");
    fs::write(&path, b"still writable")?;
    Ok(())
}

fn acl_or_skip(room: &Room, acl: &[u8]) -> Result<std::path::PathBuf> {
    let path = room.file("f", b"x")?;
    or_skip(sys::set_xattr(&path, acls::ACCESS, acl, 0), "POSIX ACLs")?;
    Ok(path)
}

fn access_denies(room: &Room) -> Result<()> {
    needs_root()?;
    sys::chmod(&room.path, 0o755)?;
    let path = acl_or_skip(room, &acls::with_user(6, 4321, 0, 4, 7, 4))?;
    ensure!(!sys::as_user(4321, 4321, &[], || fs::read(&path).is_ok())?, "the ACL's refusal does not count");
    ensure!(sys::as_user(4322, 4322, &[], || fs::read(&path).is_ok())?);
    sys::set_xattr(&path, acls::ACCESS, &acls::with_user(6, 4321, 6, 0, 7, 0), 0)?;
    let ok = sys::as_user(4321, 4321, &[], || fs::read(&path).is_ok() && fs::write(&path, b"y").is_ok())?;
    ensure!(ok, "the ACL's permission does not count");
    ensure!(!sys::as_user(4322, 4322, &[], || fs::read(&path).is_ok())?);
    Ok(())
}

fn access_mode(room: &Room) -> Result<()> {
    let acl = acls::with_user(6, 4321, 6, 4, 5, 1);
    let path = acl_or_skip(room, &acl)?;
    let mode = fs::metadata(&path)?.mode() & 0o777;
    ensure!(mode == 0o651, "the mask must show as the group's bits, got {mode:o}");
    ensure!(sys::xattr(&path, acls::ACCESS)? == acl);
    ensure!(sys::list_xattrs(&path)?.iter().any(|n| n == acls::ACCESS));
    Ok(())
}

fn default_inherited(room: &Room) -> Result<()> {
    let dir = room.dir("d")?;
    let acl = acls::with_user(7, 4321, 7, 5, 7, 0);
    or_skip(sys::set_xattr(&dir, acls::DEFAULT, &acl, 0), "POSIX ACLs")?;
    sys::set_umask(0o077);
    fs::write(dir.join("f"), b"")?;
    fs::create_dir(dir.join("e"))?;
    let mode = fs::metadata(dir.join("f"))?.mode() & 0o777;
    ensure!(mode == 0o660, "with a default ACL the umask does not count; mode {mode:o}");
    ensure!(sys::xattr(&dir.join("f"), acls::ACCESS)? == acls::with_user(6, 4321, 7, 5, 6, 0));
    ensure!(
        sys::xattr(&dir.join("e"), acls::DEFAULT)? == acl,
        "a directory does not inherit the default ACL"
    );
    Ok(())
}

fn default_on_file(room: &Room) -> Result<()> {
    let path = acl_or_skip(room, &acls::with_user(6, 1, 6, 6, 7, 4))?;
    refuses(sys::set_xattr(&path, acls::DEFAULT, &acls::with_user(6, 1, 6, 6, 7, 4), 0), libc::EACCES)
}

fn removed(room: &Room) -> Result<()> {
    let path = acl_or_skip(room, &acls::with_user(6, 4321, 6, 4, 7, 4))?;
    sys::remove_xattr(&path, acls::ACCESS)?;
    refuses(sys::xattr(&path, acls::ACCESS), libc::ENODATA)?;
    let mode = fs::metadata(&path)?.mode() & 0o777;
    ensure!(mode == 0o674, "mode {mode:o}");
    Ok(())
}

fn invalid(room: &Room) -> Result<()> {
    let path = acl_or_skip(room, &acls::with_user(6, 4321, 6, 4, 7, 4))?;
    let mut broken = acls::with_user(6, 4321, 6, 4, 7, 4);
    broken.truncate(11);
    refuses(sys::set_xattr(&path, acls::ACCESS, &broken, 0), libc::EINVAL)?;
    ensure!(sys::xattr(&path, acls::ACCESS)? == acls::with_user(6, 4321, 6, 4, 7, 4));
    Ok(())
}

fn chmod_changes_mask(room: &Room) -> Result<()> {
    let path = acl_or_skip(room, &acls::with_user(6, 4321, 7, 4, 7, 4))?;
    sys::chmod(&path, 0o640)?;
    ensure!(
        sys::xattr(&path, acls::ACCESS)? == acls::with_user(6, 4321, 7, 4, 4, 0),
        "chmod does not reach the ACL"
    );
    Ok(())
}
