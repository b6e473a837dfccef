//! Deep trees and working directories.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Result, ensure};

use crate::room::Room;

super::cases! { paths::
    deep, deeper_than_path_max, getcwd, getcwd_after_rename, relative_after_rename, remove_tree, openat_after_rename,
    parent_numbers;
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
