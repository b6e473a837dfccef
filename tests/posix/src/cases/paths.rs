//! Deep trees and working directories.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, ensure};

use crate::room::{Room, needs_root, refuses, skip};
use crate::sys::FileHandle;

super::cases! { paths::
    deep, deeper_than_path_max, getcwd, getcwd_after_rename, relative_after_rename, remove_tree, openat_after_rename,
    parent_numbers, file_handles;
}

fn deep(room: &Room) -> Result<()> {
    let mut path = room.path.clone();
    for i in 0..100 {
        path.push(format!("d{i}"));
        fs::create_dir(&path)?;
    }
    fs::write(path.join("f"), b"bottom")?;
    ensure!(fs::read(path.join("f"))? == b"bottom");
    let up = path.join("../".repeat(100));
    ensure!(fs::metadata(up)?.ino() == fs::metadata(&room.path)?.ino());
    Ok(())
}

fn deeper_than_path_max(room: &Room) -> Result<()> {
    let name = "d".repeat(200);
    env::set_current_dir(&room.path)?;
    for _ in 0..30 {
        fs::create_dir(&name)?;
        env::set_current_dir(&name)?;
    }
    fs::write("f", b"below 6,000 bytes of path")?;
    ensure!(fs::read("f")?.len() == 25);
    fs::remove_file("f")?;
    for _ in 0..30 {
        env::set_current_dir("..")?;
        fs::remove_dir(&name)?;
    }
    ensure!(env::current_dir()? == fs::canonicalize(&room.path)?);
    Ok(())
}

fn getcwd(room: &Room) -> Result<()> {
    let dir = room.dir("d")?;
    env::set_current_dir(&dir)?;
    ensure!(env::current_dir()? == fs::canonicalize(&dir)?);
    fs::write("f", b"relative")?;
    ensure!(fs::read(dir.join("f"))? == b"relative");
    Ok(())
}

fn getcwd_after_rename(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("a/b/c"))?;
    env::set_current_dir(room.at("a/b/c"))?;
    fs::rename(room.at("a"), room.at("x"))?;
    ensure!(env::current_dir()? == fs::canonicalize(room.at("x/b/c"))?);
    fs::rename(room.at("x/b"), room.at("y"))?;
    ensure!(env::current_dir()? == fs::canonicalize(room.at("y/c"))?);
    Ok(())
}

fn relative_after_rename(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("a/b"))?;
    env::set_current_dir(room.at("a/b"))?;
    fs::rename(room.at("a"), room.at("x"))?;
    fs::write("f", b"after")?;
    ensure!(fs::read(room.at("x/b/f"))? == b"after");
    fs::write("../g", b"up")?;
    ensure!(fs::read(room.at("x/g"))? == b"up");
    Ok(())
}

fn remove_tree(room: &Room) -> Result<()> {
    for i in 0..20 {
        for j in 0..10 {
            let dir = room.at(format!("t/{i}/{j}"));
            fs::create_dir_all(&dir)?;
            fs::write(dir.join("f"), b"x")?;
        }
    }
    fs::remove_dir_all(room.at("t"))?;
    ensure!(fs::read_dir(&room.path)?.count() == 0);
    fs::create_dir_all(room.at("t/0/0"))?;
    ensure!(fs::read_dir(room.at("t/0/0"))?.count() == 0, "old names in a new directory");
    Ok(())
}

fn openat_after_rename(room: &Room) -> Result<()> {
    let dir = room.dir("d")?;
    room.file("d/f", b"inside")?;
    let open = fs::File::open(&dir)?;
    fs::rename(&dir, room.at("e"))?;
    let through = format!("/proc/self/fd/{}/f", std::os::fd::AsRawFd::as_raw_fd(&open));
    ensure!(fs::read(through)? == b"inside");
    Ok(())
}

fn parent_numbers(room: &Room) -> Result<()> {
    let dir = room.dir("d")?;
    let listed = crate::cases::listing::raw(&dir)?;
    let find = |name: &[u8]| listed.iter().find(|e| e.name == name).map(|e| e.ino);
    ensure!(find(b".") == Some(fs::metadata(&dir)?.ino()), "the number of .");
    ensure!(find(b"..") == Some(fs::metadata(&room.path)?.ino()), "the number of ..");
    Ok(())
}

/// A file handle opens its file after the kernel has dropped the inode, however often, and wherever the file was moved
/// before.
fn file_handles(room: &Room) -> Result<()> {
    needs_root()?;
    room.dir("d")?;
    let paths = [room.file("a", b"a")?, room.file("b", b"b")?, room.file("d/c", b"c")?];
    let of = || paths.iter().map(|path| FileHandle::of(path)).collect::<std::io::Result<Vec<_>>>();
    let handles = match of() {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return skip("no file handles"),
        handles => handles?,
    };
    let (directory, gone) = (FileHandle::of(&room.at("d"))?, FileHandle::of(&room.file("gone", b"")?)?);
    fs::rename(room.at("b"), room.at("b2"))?;
    fs::rename(room.at("d"), room.at("d2"))?;
    fs::remove_file(room.at("gone"))?;
    let mount = fs::File::open(&room.path)?;
    for round in 0..2 {
        for (handle, expected) in handles.iter().zip(["a", "b", "c"]) {
            let read = std::io::read_to_string(
                handle.open(&mount).with_context(|| format!("{expected}, {round}"))?,
            )?;
            ensure!(read == expected, "round {round}: {read} for {expected}");
        }
        ensure!(directory.open(&mount)?.metadata()?.ino() == fs::metadata(room.at("d2"))?.ino());
        refuses(gone.open(&mount), libc::ESTALE)?;
        // Drops unused dentries and inodes.
        fs::write("/proc/sys/vm/drop_caches", "2")?;
    }
    Ok(())
}
