//! Visibility of changes that are made through another path to the same directory, within the staleness bound.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::room::{Room, or_skip};
use crate::sys;

super::cases! { shared::
    name_appears, name_vanishes, missing_directory_appears, attributes, data, data_of_open_file, longer, shorter,
    replaced, renamed, link_target, listing, listing_of_many, directory_renamed, kind_changes, xattr, mode_closes,
    hard_link_count, our_changes_show_beside, mapped;
}

/// Creates a file that is also visible on the other path. A mount with time-limited grants only may know this case's
/// directory by the inode number of another case's directory, and cache that directory's absent names until the limit.
fn file(room: &Room, name: &str, contents: &[u8]) -> Result<PathBuf> {
    let path = room.file(name, contents)?;
    room.comes("a file made here", || room.over(name).exists())?;
    Ok(path)
}

fn name_appears(room: &Room) -> Result<()> {
    for i in 0..3 {
        let name = format!("n{i}");
        ensure!(!room.at(&name).exists() && !room.at(&name).exists());
        fs::write(room.over(&name), b"made beside")?;
        room.comes("a new name", || fs::read(room.at(&name)).is_ok_and(|t| t == b"made beside"))?;
    }
    Ok(())
}

fn name_vanishes(room: &Room) -> Result<()> {
    file(room, "f", b"x")?;
    ensure!(room.at("f").exists());
    fs::remove_file(room.over("f"))?;
    room.comes("a removed name", || !room.at("f").exists())
}

fn missing_directory_appears(room: &Room) -> Result<()> {
    ensure!(!room.at("a/b/f").exists());
    fs::create_dir_all(room.over("a/b"))?;
    fs::write(room.over("a/b/f"), b"x")?;
    room.comes("a new tree", || room.at("a/b/f").exists())
}

fn attributes(room: &Room) -> Result<()> {
    let path = file(room, "f", b"x")?;
    ensure!(fs::metadata(&path)?.mode() & 0o777 == 0o644);
    sys::chmod(&room.over("f"), 0o600)?;
    room.comes("a mode", || fs::metadata(&path).is_ok_and(|m| m.mode() & 0o777 == 0o600))?;
    sys::utimens(&room.over("f"), (5, 0), (7, 9))?;
    room.comes("a time", || fs::metadata(&path).is_ok_and(|m| (m.mtime(), m.mtime_nsec()) == (7, 9)))
}

fn data(room: &Room) -> Result<()> {
    let path = file(room, "f", b"first contents")?;
    ensure!(fs::read(&path)? == b"first contents");
    fs::write(room.over("f"), b"other contents")?;
    room.comes("data of the same size", || fs::read(&path).is_ok_and(|t| t == b"other contents"))
}

fn data_of_open_file(room: &Room) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let path = file(room, "f", b"first contents")?;
    let file = fs::File::open(&path)?;
    let mut buffer = [0; 14];
    file.read_exact_at(&mut buffer, 0)?;
    fs::write(room.over("f"), b"other contents")?;
    room.comes("data of an open file", || {
        file.read_exact_at(&mut buffer, 0).is_ok() && &buffer == b"other contents"
    })
}

fn longer(room: &Room) -> Result<()> {
    let path = file(room, "f", b"short")?;
    ensure!(fs::read(&path)?.len() == 5);
    fs::write(room.over("f"), [b'l'; 100_000])?;
    room.comes("a longer file", || fs::read(&path).is_ok_and(|t| t == [b'l'; 100_000]))
}

fn shorter(room: &Room) -> Result<()> {
    let path = file(room, "f", &[b'l'; 100_000])?;
    ensure!(fs::read(&path)?.len() == 100_000);
    fs::write(room.over("f"), b"short")?;
    room.comes("a shorter file", || fs::read(&path).is_ok_and(|t| t == b"short"))
}

fn replaced(room: &Room) -> Result<()> {
    let path = file(room, "f", b"old")?;
    let old = fs::metadata(&path)?.ino();
    fs::write(room.over("new"), b"new")?;
    fs::rename(room.over("new"), room.over("f"))?;
    room.comes("a replaced file", || {
        fs::read(&path).is_ok_and(|t| t == b"new") && fs::metadata(&path).is_ok_and(|m| m.ino() != old)
    })
}

fn renamed(room: &Room) -> Result<()> {
    file(room, "f", b"x")?;
    ensure!(!room.at("g").exists() && room.at("f").exists());
    fs::rename(room.over("f"), room.over("g"))?;
    room.comes("a renamed file", || room.at("g").exists() && !room.at("f").exists())
}

fn link_target(room: &Room) -> Result<()> {
    symlink("one", room.at("l"))?;
    room.comes("a link made here", || room.over("l").is_symlink())?;
    ensure!(fs::read_link(room.at("l"))? == Path::new("one"));
    fs::remove_file(room.over("l"))?;
    symlink("two", room.over("l"))?;
    room.comes("a link's target", || fs::read_link(room.at("l")).is_ok_and(|t| t == Path::new("two")))
}

fn names(path: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    let mut names: Vec<_> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn listing(room: &Room) -> Result<()> {
    file(room, "a", b"")?;
    file(room, "b", b"")?;
    ensure!(names(&room.path) == ["a", "b"]);
    fs::write(room.over("c"), b"")?;
    fs::remove_file(room.over("a"))?;
    room.comes("a listing", || names(&room.path) == ["b", "c"])
}

fn listing_of_many(room: &Room) -> Result<()> {
    for i in 0..2000 {
        fs::write(room.over(format!("n{i}")), b"")?;
    }
    room.comes("2,000 names", || names(&room.path).len() == 2000)?;
    for i in 0..1000 {
        fs::remove_file(room.over(format!("n{i}")))?;
    }
    room.comes("1,000 names gone", || names(&room.path).len() == 1000)?;
    room.comes("none of them found", || (0..1000).all(|i| !room.at(format!("n{i}")).exists()))
}

fn directory_renamed(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("a/b"))?;
    file(room, "a/b/f", b"x")?;
    ensure!(names(&room.at("a/b")) == ["f"]);
    fs::rename(room.over("a"), room.over("z"))?;
    room.comes("a renamed directory", || room.at("z/b/f").exists() && !room.at("a/b/f").exists())?;
    fs::write(room.at("z/b/g"), b"through the new name")?;
    room.comes("a file made below it", || fs::read(room.over("z/b/g")).is_ok_and(|t| t.len() == 20))
}

fn kind_changes(room: &Room) -> Result<()> {
    file(room, "x", b"file")?;
    ensure!(fs::metadata(room.at("x"))?.is_file());
    fs::remove_file(room.over("x"))?;
    fs::create_dir(room.over("x"))?;
    fs::write(room.over("x/f"), b"")?;
    room.comes("a directory in a file's place", || names(&room.at("x")) == ["f"])
}

fn xattr(room: &Room) -> Result<()> {
    let path = file(room, "f", b"")?;
    or_skip(sys::set_xattr(&path, "user.a", b"one", 0), "user xattrs")?;
    ensure!(sys::xattr(&path, "user.a")? == b"one" && sys::xattr(&path, "user.b").is_err());
    sys::set_xattr(&room.over("f"), "user.a", b"two", 0)?;
    sys::set_xattr(&room.over("f"), "user.b", b"new", 0)?;
    room.comes("xattrs", || {
        sys::xattr(&path, "user.a").is_ok_and(|v| v == b"two")
            && sys::xattr(&path, "user.b").is_ok_and(|v| v == b"new")
    })
}

fn mode_closes(room: &Room) -> Result<()> {
    if sys::uid() == 0 {
        return crate::room::skip("root may read all");
    }
    let path = file(room, "f", b"x")?;
    ensure!(fs::read(&path)? == b"x");
    sys::chmod(&room.over("f"), 0)?;
    room.comes("a closed file", || fs::read(&path).is_err())
}

fn hard_link_count(room: &Room) -> Result<()> {
    let path = file(room, "f", b"x")?;
    ensure!(fs::metadata(&path)?.nlink() == 1);
    fs::hard_link(room.over("f"), room.over("g"))?;
    room.comes("a second link", || {
        fs::metadata(&path).is_ok_and(|m| m.nlink() == 2) && room.at("g").exists()
    })?;
    fs::write(room.over("g"), b"by the other name")?;
    room.comes("its data by the first name", || fs::read(&path).is_ok_and(|t| t.len() == 17))
}

fn our_changes_show_beside(room: &Room) -> Result<()> {
    room.file("f", b"one")?;
    room.comes("a file made here", || fs::read(room.over("f")).is_ok_and(|t| t == b"one"))?;
    fs::write(room.at("f"), b"two, longer")?;
    room.comes("its new data", || fs::read(room.over("f")).is_ok_and(|t| t == b"two, longer"))?;
    fs::rename(room.at("f"), room.at("g"))?;
    room.comes("its new name", || room.over("g").exists() && !room.over("f").exists())?;
    fs::remove_file(room.at("g"))?;
    room.comes("its end", || !room.over("g").exists())
}

fn mapped(room: &Room) -> Result<()> {
    let path = file(room, "f", &[b'a'; 4096])?;
    let file = fs::File::open(&path)?;
    let at = unsafe {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, fd, 0)
    };
    ensure!(at != libc::MAP_FAILED);
    ensure!(unsafe { std::ptr::read_volatile(at.cast::<u8>()) } == b'a');
    // Written in place: between a truncation and a write a reader would see a file without pages.
    let beside = fs::File::options().write(true).open(room.over("f"))?;
    std::os::unix::fs::FileExt::write_all_at(&beside, &[b'b'; 4096], 0)?;
    drop(beside);
    // A map alone sends no request; a stat or an open beside it makes the staleness bound apply.
    let seen = room.comes("data under a map", || {
        fs::read(&path).is_ok() && unsafe { std::ptr::read_volatile(at.cast::<u8>()) } == b'b'
    });
    unsafe { libc::munmap(at, 4096) };
    seen
}
