//! mmap(2): shared and private maps beside read and write.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::room::Room;
use crate::sys;

super::cases! { map::
    read, shared_store_is_read, write_is_mapped, private, grown, two_processes, after_close_and_unlink, execute,
    running_programs_cannot_be_written;
}

/// A mapping of a whole file's first bytes, unmapped when dropped.
struct Map {
    at: *mut u8,
    length: u16,
}

impl Map {
    fn new(file: &impl AsRawFd, length: u16, write: bool, shared: bool) -> io::Result<Map> {
        let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        let flags = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let bytes = usize::from(length);
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Map { at: at.cast(), length })
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        unsafe { std::slice::from_raw_parts_mut(self.at, usize::from(self.length)) }
    }

    fn sync(&self) -> bool {
        unsafe { libc::msync(self.at.cast(), usize::from(self.length), libc::MS_SYNC) == 0 }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.at.cast(), usize::from(self.length)) };
    }
}

fn read_write(path: &std::path::Path) -> io::Result<fs::File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn read(room: &Room) -> Result<()> {
    let contents: Vec<u8> = (0..10_000_u32).map(|i| i.to_le_bytes()[0]).collect();
    let file = fs::File::open(room.file("f", &contents)?)?;
    let mut map = Map::new(&file, 10_000, false, true)?;
    ensure!(map.bytes() == contents);
    Ok(())
}

fn shared_store_is_read(room: &Room) -> Result<()> {
    let path = room.file("f", &[b'.'; 9000])?;
    let file = read_write(&path)?;
    let mut map = Map::new(&file, 9000, true, true)?;
    map.bytes()[5000..5005].copy_from_slice(b"store");
    let mut back = [0; 5];
    file.read_exact_at(&mut back, 5000)?;
    ensure!(&back == b"store", "read does not see a mapped store");
    ensure!(map.sync(), "msync: {}", io::Error::last_os_error());
    drop(map);
    drop(file);
    ensure!(&fs::read(&path)?[5000..5005] == b"store");
    Ok(())
}

fn write_is_mapped(room: &Room) -> Result<()> {
    let path = room.file("f", &[b'.'; 9000])?;
    let file = read_write(&path)?;
    let mut map = Map::new(&file, 9000, false, true)?;
    ensure!(map.bytes()[4100] == b'.');
    file.write_all_at(b"write", 4100)?;
    ensure!(&map.bytes()[4100..4105] == b"write", "the map does not see a write");
    Ok(())
}

fn private(room: &Room) -> Result<()> {
    let path = room.file("f", &[b'.'; 5000])?;
    let file = fs::File::open(&path)?;
    let mut map = Map::new(&file, 5000, true, false)?;
    map.bytes()[100] = b'!';
    ensure!(map.bytes()[100] == b'!');
    drop(map);
    ensure!(fs::read(&path)?[100] == b'.', "a private store reached the file");
    Ok(())
}

fn grown(room: &Room) -> Result<()> {
    let path = room.file("f", &[b'a'; 100])?;
    let file = read_write(&path)?;
    let mut map = Map::new(&file, 8192, true, true)?;
    ensure!(map.bytes()[99] == b'a' && map.bytes()[100] == 0);
    file.set_len(8192)?;
    map.bytes()[8000] = b'z';
    ensure!(map.sync());
    drop(map);
    let back = fs::read(&path)?;
    ensure!(back.len() == 8192 && back[8000] == b'z' && back[150] == 0);
    Ok(())
}

fn two_processes(room: &Room) -> Result<()> {
    let path = room.file("f", &[0; 4096])?;
    let file = read_write(&path)?;
    let mut map = Map::new(&file, 4096, true, true)?;
    let other = path.clone();
    let pid = sys::fork(move || {
        let Ok(file) = read_write(&other) else { return false };
        let Ok(mut map) = Map::new(&file, 4096, true, true) else { return false };
        map.bytes()[..5].copy_from_slice(b"child");
        map.sync()
    })?;
    ensure!(sys::joined(pid, Duration::from_secs(20)));
    ensure!(&map.bytes()[..5] == b"child", "a store of another process is not seen");
    Ok(())
}

fn after_close_and_unlink(room: &Room) -> Result<()> {
    let path = room.file("f", &[b'k'; 6000])?;
    let file = read_write(&path)?;
    let mut map = Map::new(&file, 6000, true, true)?;
    drop(file);
    fs::remove_file(&path)?;
    ensure!(map.bytes().iter().all(|&b| b == b'k'));
    map.bytes()[5999] = b'm';
    ensure!(map.bytes()[5999] == b'm' && map.sync());
    Ok(())
}

fn execute(room: &Room) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let path = room.at("true");
    fs::copy("/bin/true", &path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    ensure!(std::process::Command::new(&path).status()?.success());
    let script = room.file("script", b"#!/bin/sh\nexit 7\n")?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    ensure!(std::process::Command::new(&script).status()?.code() == Some(7));
    Ok(())
}

/// Opening a running program for writing fails and leaves it unchanged; a filesystem that truncates during open would
/// empty it.
fn running_programs_cannot_be_written(room: &Room) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let path = room.at("sleep");
    let whole = fs::read("/bin/sleep")?;
    fs::write(&path, &whole)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    let mut running = std::process::Command::new(&path).arg("20").spawn()?;
    let refused = [libc::O_WRONLY, libc::O_RDWR, libc::O_RDONLY | libc::O_TRUNC]
        .map(|flags| sys::open(&path, flags, 0).is_err_and(|e| e.raw_os_error() == Some(libc::ETXTBSY)));
    let alive = running.try_wait()?.is_none();
    running.kill()?;
    running.wait()?;
    ensure!(refused == [true; 3] && alive, "{refused:?}, alive: {alive}");
    ensure!(fs::read(&path)? == whole);
    Ok(())
}
