//! FIFOs, devices and sockets: they are opened by the local kernel, not on the server.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::room::{Room, needs_root, refuses, skip};
use crate::sys;

super::cases! { special::
    fifo, fifo_without_reader, fifo_attributes, null_device, device_numbers, device_as_user, socket, socket_gone,
    open_socket, rename_and_unlink;
}

fn fifo(room: &Room) -> Result<()> {
    let path = room.at("p");
    sys::mknod(&path, libc::S_IFIFO | 0o644, 0)?;
    let to = path.clone();
    let pid = sys::fork(move || {
        let Ok(mut out) = OpenOptions::new().write(true).open(&to) else { return false };
        (0..100).all(|i| writeln!(out, "line {i}").is_ok())
    })?;
    let mut text = String::new();
    fs::File::open(&path)?.read_to_string(&mut text)?;
    ensure!(sys::joined(pid, Duration::from_secs(20)));
    ensure!(text.lines().count() == 100 && text.ends_with("line 99\n"));
    Ok(())
}

fn fifo_without_reader(room: &Room) -> Result<()> {
    let path = room.at("p");
    sys::mknod(&path, libc::S_IFIFO | 0o644, 0)?;
    let opened = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&path);
    refuses(opened, libc::ENXIO)?;
    let mut reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path)?;
    ensure!(reader.read(&mut [0; 5])? == 0);
    Ok(())
}

fn fifo_attributes(room: &Room) -> Result<()> {
    let path = room.at("p");
    sys::mknod(&path, libc::S_IFIFO | 0o640, 0)?;
    let meta = fs::metadata(&path)?;
    ensure!(meta.file_type().is_fifo() && meta.mode() & 0o777 == 0o640 && meta.len() == 0);
    sys::chmod(&path, 0o600)?;
    ensure!(fs::metadata(&path)?.mode() & 0o777 == 0o600);
    Ok(())
}

fn null_device(room: &Room) -> Result<()> {
    needs_root()?;
    let path = room.at("null");
    sys::mknod(&path, libc::S_IFCHR | 0o666, libc::makedev(1, 3))?;
    let meta = fs::metadata(&path)?;
    ensure!(
        meta.file_type().is_char_device() && meta.rdev() == libc::makedev(1, 3),
        "rdev {:x}",
        meta.rdev()
    );
    match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(mut device) => ensure!(device.write(b"into nothing")? == 12 && device.read(&mut [0; 4])? == 0),
        Err(e) => ensure!(e.raw_os_error() == Some(libc::EACCES), "only nodev may refuse it: {e}"),
    }
    Ok(())
}

fn device_numbers(room: &Room) -> Result<()> {
    needs_root()?;
    for (i, (major, minor)) in [(7, 0), (8, 255), (253, 300), (511, 70_000)].into_iter().enumerate() {
        let path = room.at(format!("b{i}"));
        sys::mknod(&path, libc::S_IFBLK | 0o600, libc::makedev(major, minor))?;
        let meta = fs::metadata(&path)?;
        ensure!(meta.file_type().is_block_device());
        ensure!(meta.rdev() == libc::makedev(major, minor), "{major}:{minor} shows as {:x}", meta.rdev());
    }
    Ok(())
}

fn device_as_user(room: &Room) -> Result<()> {
    if sys::uid() == 0 {
        return skip("root may make devices");
    }
    refuses(sys::mknod(&room.at("null"), libc::S_IFCHR | 0o666, libc::makedev(1, 3)), libc::EPERM)
}

fn socket(room: &Room) -> Result<()> {
    std::env::set_current_dir(&room.path)?;
    let listener = UnixListener::bind("s")?;
    ensure!(fs::metadata("s")?.file_type().is_socket());
    let pid = sys::fork(|| {
        let Ok(mut stream) = UnixStream::connect("s") else { return false };
        stream.write_all(b"hello").is_ok()
    })?;
    let (mut stream, _) = listener.accept()?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    ensure!(sys::joined(pid, Duration::from_secs(20)) && text == "hello");
    refuses(UnixListener::bind("s"), libc::EADDRINUSE)
}

fn socket_gone(room: &Room) -> Result<()> {
    std::env::set_current_dir(&room.path)?;
    drop(UnixListener::bind("s")?);
    refuses(UnixStream::connect("s"), libc::ECONNREFUSED)?;
    fs::remove_file("s")?;
    refuses(UnixStream::connect("s"), libc::ENOENT)
}

fn open_socket(room: &Room) -> Result<()> {
    std::env::set_current_dir(&room.path)?;
    drop(UnixListener::bind("s")?);
    refuses(fs::File::open("s"), libc::ENXIO)
}

fn rename_and_unlink(room: &Room) -> Result<()> {
    sys::mknod(&room.at("p"), libc::S_IFIFO | 0o644, 0)?;
    fs::rename(room.at("p"), room.at("q"))?;
    fs::hard_link(room.at("q"), room.at("r"))?;
    ensure!(fs::metadata(room.at("r"))?.nlink() == 2);
    fs::remove_file(room.at("q"))?;
    ensure!(fs::metadata(room.at("r"))?.file_type().is_fifo());
    Ok(())
}
