//! rename(2) and renameat2(2).

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::room::{Room, or_skip_invalid, refuses};
use crate::sys;

super::cases! { rename::
    file, over_file, over_itself, over_hard_link, between_directories, directory, directory_over_empty,
    directory_over_full, directory_into_itself, file_over_directory, directory_over_file, missing, no_replace,
    exchange, exchange_kinds, exchange_missing, open_file, names_at_once, dot_dot_follows, whiteout, whiteout_over_file,
    whiteout_flags, in_use, many;
}

fn file(room: &Room) -> Result<()> {
    let old = room.file("a", b"contents")?;
    let before = fs::metadata(&old)?;
    refuses(fs::metadata(room.at("b")), libc::ENOENT)?;
    fs::rename(&old, room.at("b"))?;
    refuses(fs::metadata(&old), libc::ENOENT)?;
    let after = fs::metadata(room.at("b"))?;
    ensure!(after.ino() == before.ino() && after.nlink() == 1);
    ensure!(fs::read(room.at("b"))? == b"contents");
    ensure!(listed(room)? == ["b"]);
    Ok(())
}

fn listed(room: &Room) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(&room.path)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn over_file(room: &Room) -> Result<()> {
    room.file("a", b"new")?;
    room.file("b", b"old")?;
    fs::rename(room.at("a"), room.at("b"))?;
    ensure!(fs::read(room.at("b"))? == b"new" && listed(room)? == ["b"]);
    Ok(())
}

fn over_itself(room: &Room) -> Result<()> {
    room.file("a", b"same")?;
    fs::rename(room.at("a"), room.at("a"))?;
    ensure!(fs::read(room.at("a"))? == b"same");
    Ok(())
}

fn over_hard_link(room: &Room) -> Result<()> {
    room.file("a", b"same")?;
    fs::hard_link(room.at("a"), room.at("b"))?;
    fs::rename(room.at("a"), room.at("b"))?;
    ensure!(listed(room)? == ["a", "b"], "two links of one inode: rename does nothing");
    ensure!(fs::metadata(room.at("a"))?.nlink() == 2);
    Ok(())
}

fn between_directories(room: &Room) -> Result<()> {
    room.dir("x")?;
    room.dir("y")?;
    room.file("x/f", b"moved")?;
    fs::rename(room.at("x/f"), room.at("y/g"))?;
    ensure!(fs::read(room.at("y/g"))? == b"moved");
    ensure!(fs::read_dir(room.at("x"))?.count() == 0 && fs::read_dir(room.at("y"))?.count() == 1);
    refuses(fs::metadata(room.at("x/f")), libc::ENOENT)
}

fn directory(room: &Room) -> Result<()> {
    room.dir("x")?;
    room.dir("y")?;
    fs::create_dir_all(room.at("x/d/e"))?;
    room.file("x/d/e/f", b"deep")?;
    ensure!(fs::metadata(room.at("x"))?.nlink() >= 1);
    fs::rename(room.at("x/d"), room.at("y/d2"))?;
    ensure!(fs::read(room.at("y/d2/e/f"))? == b"deep");
    refuses(fs::metadata(room.at("x/d/e/f")), libc::ENOENT)
}

fn directory_over_empty(room: &Room) -> Result<()> {
    room.dir("a")?;
    room.file("a/f", b"kept")?;
    room.dir("b")?;
    let (moved, gone) = (fs::metadata(room.at("a"))?.ino(), fs::metadata(room.at("b"))?.ino());
    fs::rename(room.at("a"), room.at("b"))?;
    ensure!(fs::read(room.at("b/f"))? == b"kept");
    let now = fs::metadata(room.at("b"))?.ino();
    ensure!(now == moved && now != gone);
    Ok(())
}

fn directory_over_full(room: &Room) -> Result<()> {
    room.dir("a")?;
    room.dir("b")?;
    room.file("b/f", b"")?;
    let refused = fs::rename(room.at("a"), room.at("b"));
    ensure!(
        matches!(refused.map_err(|e| e.raw_os_error()), Err(Some(libc::ENOTEMPTY | libc::EEXIST))),
        "renamed over a full directory"
    );
    ensure!(fs::metadata(room.at("a"))?.is_dir() && fs::metadata(room.at("b/f"))?.is_file());
    Ok(())
}

fn directory_into_itself(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("a/b"))?;
    refuses(fs::rename(room.at("a"), room.at("a/b/c")), libc::EINVAL)?;
    refuses(fs::rename(room.at("a/b"), room.at("a")), libc::ENOTEMPTY)
}

fn file_over_directory(room: &Room) -> Result<()> {
    room.file("f", b"")?;
    room.dir("d")?;
    refuses(fs::rename(room.at("f"), room.at("d")), libc::EISDIR)
}

fn directory_over_file(room: &Room) -> Result<()> {
    room.file("f", b"")?;
    room.dir("d")?;
    refuses(fs::rename(room.at("d"), room.at("f")), libc::ENOTDIR)
}

fn missing(room: &Room) -> Result<()> {
    refuses(fs::rename(room.at("a"), room.at("b")), libc::ENOENT)?;
    room.file("a", b"")?;
    refuses(fs::rename(room.at("a"), room.at("no/b")), libc::ENOENT)
}

fn no_replace(room: &Room) -> Result<()> {
    room.file("a", b"a")?;
    room.file("b", b"b")?;
    let refused = sys::rename2(&room.at("a"), &room.at("b"), libc::RENAME_NOREPLACE);
    if refused.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EINVAL)) {
        return crate::room::skip("no RENAME_NOREPLACE here");
    }
    refuses(refused, libc::EEXIST)?;
    sys::rename2(&room.at("a"), &room.at("c"), libc::RENAME_NOREPLACE)?;
    ensure!(listed(room)? == ["b", "c"] && fs::read(room.at("c"))? == b"a");
    Ok(())
}

fn exchange(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("a", b"a")?;
    room.file("d/b", b"b")?;
    let (one, two) = (fs::metadata(room.at("a"))?.ino(), fs::metadata(room.at("d/b"))?.ino());
    or_skip_invalid(sys::rename2(&room.at("a"), &room.at("d/b"), libc::RENAME_EXCHANGE), "RENAME_EXCHANGE")?;
    ensure!(fs::read(room.at("a"))? == b"b" && fs::read(room.at("d/b"))? == b"a");
    ensure!(fs::metadata(room.at("a"))?.ino() == two && fs::metadata(room.at("d/b"))?.ino() == one);
    Ok(())
}

fn exchange_kinds(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/inside", b"")?;
    room.file("f", b"file")?;
    or_skip_invalid(sys::rename2(&room.at("f"), &room.at("d"), libc::RENAME_EXCHANGE), "RENAME_EXCHANGE")?;
    ensure!(fs::read(room.at("d"))? == b"file");
    ensure!(fs::metadata(room.at("f/inside"))?.is_file());
    Ok(())
}

fn exchange_missing(room: &Room) -> Result<()> {
    room.file("f", b"file")?;
    refuses(sys::rename2(&room.at("f"), &room.at("g"), libc::RENAME_EXCHANGE), libc::ENOENT)
}

fn open_file(room: &Room) -> Result<()> {
    use std::io::Write;
    let mut file = fs::File::create_new(room.at("a"))?;
    file.write_all(b"before ")?;
    fs::rename(room.at("a"), room.at("b"))?;
    file.write_all(b"after")?;
    room.file("a", b"another")?;
    ensure!(fs::read(room.at("b"))? == b"before after");
    ensure!(file.metadata()?.ino() == fs::metadata(room.at("b"))?.ino());
    Ok(())
}

fn names_at_once(room: &Room) -> Result<()> {
    room.file("f", b"0")?;
    let (path, new) = (room.at("f"), room.at("new"));
    let pid = sys::fork(move || {
        (1..200).all(|i| fs::write(&new, format!("{i}")).is_ok() && fs::rename(&new, &path).is_ok())
    })?;
    let mut last = 0_u32;
    while last < 199 {
        let text = fs::read_to_string(room.at("f"));
        let text = text.map_err(|e| anyhow::anyhow!("a name that is always there: {e}"))?;
        let now: u32 = text.parse().map_err(|e| anyhow::anyhow!("half a file: {text:?} ({e})"))?;
        ensure!(now >= last, "went back from {last} to {now}");
        last = now;
    }
    ensure!(sys::joined(pid, std::time::Duration::from_secs(10)));
    Ok(())
}

fn dot_dot_follows(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("x/d"))?;
    room.dir("y")?;
    let y = fs::metadata(room.at("y"))?.ino();
    fs::rename(room.at("x/d"), room.at("y/d"))?;
    ensure!(fs::metadata(room.at("y/d/.."))?.ino() == y);
    Ok(())
}

/// A file moves and leaves a whiteout, a character device 0:0, at its old name.
fn whiteout(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/a", b"contents")?;
    let before = fs::metadata(room.at("d/a"))?;
    or_skip_invalid(sys::rename2(&room.at("d/a"), &room.at("b"), libc::RENAME_WHITEOUT), "RENAME_WHITEOUT")?;
    is_whiteout(&room.at("d/a"))?;
    let names: Vec<_> =
        fs::read_dir(room.at("d"))?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
    ensure!(names == ["a"] && fs::metadata(room.at("b"))?.ino() == before.ino());
    ensure!(fs::read(room.at("b"))? == b"contents");
    // A whiteout is moved and removed like any other file.
    fs::rename(room.at("d/a"), room.at("w"))?;
    is_whiteout(&room.at("w"))?;
    refuses(fs::metadata(room.at("d/a")), libc::ENOENT)?;
    fs::remove_file(room.at("w"))?;
    fs::remove_dir(room.at("d"))?;
    Ok(())
}

fn is_whiteout(path: &Path) -> Result<()> {
    let found = fs::symlink_metadata(path)?;
    ensure!(found.file_type().is_char_device() && found.rdev() == 0, "{found:?}");
    ensure!(found.nlink() == 1 && found.mode() & 0o7777 == 0, "{found:?}");
    Ok(())
}

fn whiteout_over_file(room: &Room) -> Result<()> {
    room.file("a", b"new")?;
    let old = fs::File::open(room.file("b", b"old")?)?;
    let rename = |flags| sys::rename2(&room.at("a"), &room.at("b"), libc::RENAME_WHITEOUT | flags);
    refuses(rename(libc::RENAME_NOREPLACE), libc::EEXIST)?;
    or_skip_invalid(rename(0), "RENAME_WHITEOUT")?;
    is_whiteout(&room.at("a"))?;
    ensure!(fs::read(room.at("b"))? == b"new" && old.metadata()?.nlink() == 0);
    // Also of a directory.
    room.dir("d")?;
    sys::rename2(&room.at("d"), &room.at("e"), libc::RENAME_WHITEOUT | libc::RENAME_NOREPLACE)?;
    is_whiteout(&room.at("d"))?;
    ensure!(fs::metadata(room.at("e"))?.is_dir());
    Ok(())
}

fn whiteout_flags(room: &Room) -> Result<()> {
    room.file("a", b"")?;
    room.file("b", b"")?;
    for other in [libc::RENAME_NOREPLACE, libc::RENAME_WHITEOUT] {
        let both = libc::RENAME_EXCHANGE | other;
        refuses(sys::rename2(&room.at("a"), &room.at("b"), both), libc::EINVAL)?;
    }
    Ok(())
}

/// After a rename, the kernel reports the new paths of a process's working directory, an open file and a running
/// program.
fn in_use(room: &Room) -> Result<()> {
    attempts(|nth| in_use_below(room, &format!("from{nth}"), &format!("to{nth}")))
}

/// If a notification races with a reply that its thread has not applied yet, which a busy machine may cause, the
/// kernel must drop dentries that it could keep: docs/semantics.md allows that. So one attempt of three has to pass.
fn attempts(one: impl Fn(u32) -> Result<()>) -> Result<()> {
    one(0).or_else(|_| one(1)).or_else(|_| one(2))
}

fn in_use_below(room: &Room, from: &str, to: &str) -> Result<()> {
    room.dir(from)?;
    room.dir(to)?;
    room.dir(&format!("{from}/work"))?;
    let open = fs::File::open(room.file(&format!("{from}/file"), b"open")?)?;
    let below = room.at(from);
    let user = sys::User::start(&below.join("program"), &below.join("work"))?;
    let names = ["work", "file", "program"];
    for (round, (old, new)) in [(from, to), (to, from)].into_iter().enumerate() {
        for name in names {
            fs::rename(room.at(old).join(name), room.at(new).join(name))?;
        }
        for look in 0..10 {
            let found = [user.working_directory()?, sys::path_of(&open)?, user.program()?];
            for (name, found) in names.iter().zip(found) {
                let path = room.at(new).join(name);
                ensure!(
                    found == path,
                    "round {round}, look {look}: {} for {}",
                    found.display(),
                    path.display()
                );
            }
            if look == 5 {
                names.iter().try_for_each(|name| fs::metadata(room.at(new).join(name)).map(drop))?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

fn many(room: &Room) -> Result<()> {
    for i in 0..100 {
        room.file(&format!("{i}.tmp"), format!("{i}").as_bytes())?;
    }
    for i in 0..100 {
        fs::rename(room.at(format!("{i}.tmp")), room.at(format!("{i}")))?;
    }
    ensure!(listed(room)?.len() == 100);
    for i in 0..100 {
        ensure!(fs::read_to_string(room.at(format!("{i}")))? == format!("{i}"));
        refuses(fs::metadata(room.at(format!("{i}.tmp"))), libc::ENOENT)?;
    }
    Ok(())
}
