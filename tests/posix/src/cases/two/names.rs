//! Names that are created, removed and moved.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::{all_see, reads, warm};
use crate::room::{Room, or_skip, or_skip_invalid, refuses};
use crate::sys;

super::cases! { two::
    created, created_exclusively, made_fifo, made_socket, made_directory, made_symlink, linked, unlinked,
    unlinked_one_of_two, directory_removed, renamed, renamed_over, renamed_across, directory_renamed,
    directory_renamed_across, directory_renamed_over, exchanged, whiteout_left, not_replaced, unnamed_linked, kind_changed,
    symlink_changed, tree_removed, in_the_way, found_missing, names_by_turns, parent_moved, many_created;
}

/// `d/old`, cached on every mount, and `d/new`, cached as absent on every mount.
fn old_and_no_new(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/old", b"old")?;
    warm(room, &["d/new"])
}

fn created(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    fs::write(room.at("d/new"), b"new")?;
    all_see(room, &[], |dir| reads(dir, "d/new", b"new"))
}

fn created_exclusively(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
    drop(sys::open(&room.at("d/new"), flags, 0o640)?);
    refuses(sys::open(&room.over("d/new"), flags, 0o600), libc::EEXIST)?;
    all_see(room, &[], |dir| reads(dir, "d/new", b""))
}

fn made_fifo(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    sys::mknod(&room.at("d/new"), libc::S_IFIFO | 0o600, 0)?;
    all_see(room, &[], |dir| {
        ensure!(fs::symlink_metadata(dir.join("d/new"))?.file_type().is_fifo(), "no FIFO");
        Ok(())
    })
}

fn made_socket(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    // A socket's path must be short; a path relative to the working directory always is.
    std::env::set_current_dir(room.at("d"))?;
    drop(UnixListener::bind("new")?);
    std::env::set_current_dir("/")?;
    all_see(room, &[], |dir| {
        ensure!(fs::symlink_metadata(dir.join("d/new"))?.file_type().is_socket(), "no socket");
        Ok(())
    })
}

fn made_directory(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    fs::create_dir(room.at("d/new"))?;
    refuses(fs::create_dir(room.over("d/new")), libc::EEXIST)?;
    all_see(room, &["d/new/f"], |dir| {
        ensure!(fs::read_dir(dir.join("d/new"))?.count() == 0, "it is not empty");
        ensure!(fs::metadata(dir.join("d"))?.nlink() == fs::metadata(room.at("d"))?.nlink(), "other links");
        Ok(())
    })?;
    fs::write(room.over("d/new/f"), b"below")?;
    all_see(room, &[], |dir| reads(dir, "d/new/f", b"below"))
}

fn leads_to(dir: &Path, name: &str, target: &str) -> Result<()> {
    let got = fs::read_link(dir.join(name)).with_context(|| name.to_owned())?;
    ensure!(got == Path::new(target), "{name} leads to {}, not {target}", got.display());
    Ok(())
}

fn made_symlink(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    symlink("old", room.at("d/new"))?;
    all_see(room, &[], |dir| {
        leads_to(dir, "d/new", "old")?;
        reads(dir, "d/new", b"old")
    })
}

fn links(dir: &Path, name: &str, count: u64) -> Result<()> {
    let got = fs::symlink_metadata(dir.join(name)).with_context(|| name.to_owned())?.nlink();
    ensure!(got == count, "{name} has {got} links, not {count}");
    Ok(())
}

fn linked(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    fs::hard_link(room.at("d/old"), room.at("d/new"))?;
    all_see(room, &[], |dir| {
        links(dir, "d/old", 2)?;
        links(dir, "d/new", 2)?;
        reads(dir, "d/new", b"old")
    })
}

fn unlinked(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    fs::remove_file(room.at("d/old"))?;
    all_see(room, &["d/old"], |dir| {
        ensure!(fs::read_dir(dir.join("d"))?.count() == 0, "the name is still listed");
        refuses(fs::read(dir.join("d/old")), libc::ENOENT)
    })
}

fn unlinked_one_of_two(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.dir("e")?;
    room.file("d/f", b"one file")?;
    fs::hard_link(room.at("d/f"), room.at("e/g"))?;
    warm(room, &[])?;
    fs::remove_file(room.at("d/f"))?;
    all_see(room, &["d/f"], |dir| {
        links(dir, "e/g", 1)?;
        reads(dir, "e/g", b"one file")
    })
}

fn directory_removed(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.dir("d/e")?;
    warm(room, &["d/e/f"])?;
    fs::remove_dir(room.at("d/e"))?;
    refuses(fs::write(room.over("d/e/f"), b"below what is gone"), libc::ENOENT)?;
    all_see(room, &["d/e", "d/e/f"], |dir| {
        ensure!(fs::read_dir(dir.join("d"))?.count() == 0, "the name is still listed");
        Ok(())
    })
}

fn renamed(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    let ino = fs::metadata(room.over("d/old"))?.ino();
    fs::rename(room.at("d/old"), room.at("d/new"))?;
    all_see(room, &["d/old"], |dir| {
        ensure!(fs::metadata(dir.join("d/new"))?.ino() == ino, "another inode");
        reads(dir, "d/new", b"old")
    })
}

fn renamed_over(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/a", b"the new contents")?;
    room.file("d/b", b"the old")?;
    warm(room, &[])?;
    fs::rename(room.at("d/a"), room.at("d/b"))?;
    all_see(room, &["d/a"], |dir| reads(dir, "d/b", b"the new contents"))
}

fn renamed_across(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.dir("e")?;
    room.file("d/f", b"moves")?;
    warm(room, &["e/f", "e/g"])?;
    fs::rename(room.at("d/f"), room.at("e/g"))?;
    all_see(room, &["d/f", "e/f"], |dir| reads(dir, "e/g", b"moves"))
}

/// `d/a/b/f` and `e`, cached on every mount.
fn deep(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("d/a/b"))?;
    room.dir("e")?;
    room.file("d/a/b/f", b"deep")?;
    warm(room, &["d/z", "e/z", "d/a/b/g"])
}

fn directory_renamed(room: &Room) -> Result<()> {
    deep(room)?;
    fs::rename(room.at("d/a"), room.at("d/z"))?;
    all_see(room, &["d/a", "d/a/b/f", "d/z/b/g"], |dir| reads(dir, "d/z/b/f", b"deep"))
}

fn directory_renamed_across(room: &Room) -> Result<()> {
    deep(room)?;
    fs::rename(room.at("d/a"), room.at("e/z"))?;
    all_see(room, &["d/a", "d/a/b/f", "d/z"], |dir| {
        reads(dir, "e/z/b/f", b"deep")?;
        let up = fs::metadata(dir.join("e/z/.."))?.ino();
        ensure!(up == fs::metadata(dir.join("e"))?.ino(), "its .. leads elsewhere");
        Ok(())
    })
}

fn directory_renamed_over(room: &Room) -> Result<()> {
    deep(room)?;
    fs::rename(room.at("d/a"), room.at("e"))?;
    all_see(room, &["d/a", "d/a/b/f", "e/z"], |dir| reads(dir, "e/b/f", b"deep"))
}

fn exchanged(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.dir("e")?;
    room.file("d/f", b"a file")?;
    room.dir("e/g")?;
    room.file("e/g/below", b"in a directory")?;
    warm(room, &[])?;
    or_skip_invalid(sys::rename2(&room.at("d/f"), &room.at("e/g"), libc::RENAME_EXCHANGE), "exchange")?;
    all_see(room, &[], |dir| {
        reads(dir, "e/g", b"a file")?;
        reads(dir, "d/f/below", b"in a directory")
    })
}

fn whiteout_left(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.dir("e")?;
    room.file("d/f", b"a file")?;
    warm(room, &["e/g"])?;
    or_skip_invalid(sys::rename2(&room.at("d/f"), &room.at("e/g"), libc::RENAME_WHITEOUT), "whiteout")?;
    all_see(room, &["e/f"], |dir| {
        reads(dir, "e/g", b"a file")?;
        let left = fs::symlink_metadata(dir.join("d/f"))?;
        ensure!(left.file_type().is_char_device() && left.rdev() == 0, "{left:?}");
        Ok(())
    })
}

fn not_replaced(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/a", b"a")?;
    warm(room, &["d/b"])?;
    let rename = |from: &Path, to: &Path| sys::rename2(from, to, libc::RENAME_NOREPLACE);
    or_skip_invalid(rename(&room.at("d/a"), &room.at("d/b")), "noreplace")?;
    // The second mount had cached that b is absent and that a exists.
    fs::write(room.over("d/c"), b"c")?;
    refuses(rename(&room.over("d/c"), &room.over("d/b")), libc::EEXIST)?;
    rename(&room.over("d/c"), &room.over("d/a"))?;
    all_see(room, &["d/c"], |dir| {
        reads(dir, "d/b", b"a")?;
        reads(dir, "d/a", b"c")
    })
}

fn unnamed_linked(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    let unnamed = or_skip(sys::open(&room.at("d"), libc::O_TMPFILE | libc::O_RDWR, 0o600), "O_TMPFILE")?;
    let mut file = fs::File::from(unnamed);
    std::io::Write::write_all(&mut file, b"written before it had a name")?;
    all_see(room, &["d/new"], |dir| {
        ensure!(fs::read_dir(dir.join("d"))?.count() == 1, "a name is listed");
        Ok(())
    })?;
    warm(room, &["d/new"])?;
    sys::link_fd(&file, &room.at("d/new"))?;
    all_see(room, &[], |dir| {
        links(dir, "d/new", 1)?;
        reads(dir, "d/new", b"written before it had a name")
    })
}

fn kind_changed(room: &Room) -> Result<()> {
    old_and_no_new(room)?;
    fs::remove_file(room.at("d/old"))?;
    fs::create_dir(room.at("d/old"))?;
    fs::write(room.at("d/old/below"), b"below")?;
    all_see(room, &["d/old/missing"], |dir| reads(dir, "d/old/below", b"below"))?;
    fs::remove_dir_all(room.over("d/old"))?;
    symlink("nowhere", room.over("d/old"))?;
    all_see(room, &[], |dir| leads_to(dir, "d/old", "nowhere"))
}

fn symlink_changed(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/one", b"one")?;
    room.file("d/two", b"two")?;
    symlink("one", room.at("d/l"))?;
    symlink("two", room.at("d/tmp"))?;
    warm(room, &[])?;
    fs::rename(room.at("d/tmp"), room.at("d/l"))?;
    all_see(room, &["d/tmp"], |dir| {
        leads_to(dir, "d/l", "two")?;
        reads(dir, "d/l", b"two")
    })
}

fn tree_removed(room: &Room) -> Result<()> {
    deep(room)?;
    fs::remove_dir_all(room.at("d"))?;
    all_see(room, &["d", "d/a", "d/a/b/f"], |dir| {
        ensure!(fs::read_dir(dir)?.count() == 1, "d is still listed");
        Ok(())
    })?;
    fs::create_dir_all(room.over("d/a/b"))?;
    all_see(room, &["d/a/b/f"], |dir| {
        ensure!(fs::read_dir(dir.join("d/a/b"))?.count() == 0, "the old tree is back");
        Ok(())
    })
}

/// Files that the other mount created conflict at once.
fn in_the_way(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.dir("e")?;
    warm(room, &["d/f", "d/g", "e/f"])?;
    fs::write(room.at("d/f"), b"")?;
    fs::write(room.at("e/f"), b"")?;
    refuses(fs::create_dir(room.over("d/f")), libc::EEXIST)?;
    refuses(symlink("x", room.over("d/f")), libc::EEXIST)?;
    refuses(sys::mknod(&room.over("d/f"), libc::S_IFIFO | 0o600, 0), libc::EEXIST)?;
    refuses(fs::hard_link(room.over("e/f"), room.over("d/f")), libc::EEXIST)?;
    refuses(fs::remove_dir(room.over("e")), libc::ENOTEMPTY)?;
    refuses(fs::read_dir(room.over("d/f")), libc::ENOTDIR)?;
    refuses(fs::metadata(room.over("d/f/below")), libc::ENOTDIR)?;
    all_see(room, &["d/g"], |dir| reads(dir, "d/f", b""))
}

/// Files that the other mount removed cannot be used any more.
fn found_missing(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.dir("d/e")?;
    for name in ["d/a", "d/b", "d/c"] {
        room.file(name, b"")?;
    }
    warm(room, &[])?;
    for name in ["d/a", "d/b", "d/c"] {
        fs::remove_file(room.at(name))?;
    }
    fs::remove_dir(room.at("d/e"))?;
    refuses(fs::remove_file(room.over("d/a")), libc::ENOENT)?;
    refuses(fs::rename(room.over("d/b"), room.over("d/z")), libc::ENOENT)?;
    refuses(fs::hard_link(room.over("d/c"), room.over("d/z")), libc::ENOENT)?;
    refuses(fs::remove_dir(room.over("d/e")), libc::ENOENT)?;
    refuses(fs::create_dir(room.over("d/e/f")), libc::ENOENT)?;
    refuses(sys::chmod(&room.over("d/a"), 0o600), libc::ENOENT)?;
    all_see(room, &["d/a", "d/b", "d/c", "d/e", "d/z"], |_| Ok(()))?;
    drop(sys::open(&room.over("d/a"), libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o600)?);
    all_see(room, &["d/b"], |dir| reads(dir, "d/a", b""))
}

/// One mount creates a name, the other moves it, the first removes it, and each looks it up before.
fn names_by_turns(room: &Room) -> Result<()> {
    room.dir("d")?;
    for i in 0..100_usize {
        let (made, moved) = (format!("d/made{i}"), format!("d/moved{i}"));
        fs::write(room.at(&made), made.as_bytes())?;
        reads(&room.beside, &made, made.as_bytes()).with_context(|| format!("round {i}"))?;
        fs::rename(room.over(&made), room.over(&moved))?;
        refuses(fs::metadata(room.at(&made)), libc::ENOENT).with_context(|| format!("round {i}: {made}"))?;
        reads(&room.path, &moved, made.as_bytes()).with_context(|| format!("round {i}"))?;
        if i % 2 == 0 {
            fs::remove_file(room.at(&moved))?;
            refuses(fs::metadata(room.over(&moved)), libc::ENOENT)
                .with_context(|| format!("round {i}: {moved}"))?;
        }
        // Every second round leaves its name.
        let count = fs::read_dir(room.over("d"))?.count();
        ensure!(count == i.div_ceil(2), "round {i}: {count} names are listed");
    }
    all_see(room, &["d/made0", "d/moved0"], |dir| reads(dir, "d/moved99", b"d/made99"))
}

/// The other mount at once uses a file that moved together with its parent directories.
fn parent_moved(room: &Room) -> Result<()> {
    deep(room)?;
    fs::rename(room.at("d"), room.at("e/d"))?;
    fs::write(room.over("e/d/a/b/f"), b"written by the other")?;
    fs::write(room.over("e/d/a/b/g"), b"made by the other")?;
    all_see(room, &["d", "d/a/b/f"], |dir| {
        reads(dir, "e/d/a/b/f", b"written by the other")?;
        reads(dir, "e/d/a/b/g", b"made by the other")
    })
}

fn many_created(room: &Room) -> Result<()> {
    room.dir("d")?;
    for i in 0..100 {
        room.file(&format!("d/old{i}"), b"")?;
    }
    warm(room, &["d/new0", "d/new99"])?;
    for i in 0..100 {
        fs::write(room.at(format!("d/new{i}")), b"")?;
        fs::remove_file(room.at(format!("d/old{i}")))?;
    }
    all_see(room, &["d/old0", "d/old99"], |dir| {
        let count = fs::read_dir(dir.join("d"))?.count();
        ensure!(count == 100, "{count} names are listed");
        Ok(())
    })
}
