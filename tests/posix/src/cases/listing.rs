//! Directory scans, telldir and seekdir, through libc's directory streams.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};

use crate::room::{Room, refuses};
use crate::sys;

super::cases! { listing::
    empty, kinds, ten_thousand, every_position, seek_in_reopened, rewind_sees_changes, insert_and_remove_meanwhile,
    rename_meanwhile, remove_while_reading, removed_while_open, small_buffer, two_streams, after_changes, seek_to_end;
}

/// One entry of readdir(3); `position` is the telldir(3) position behind it.
pub struct Entry {
    pub name: Vec<u8>,
    pub ino: u64,
    pub kind: u8,
    pub position: i64,
}

/// A directory stream.
struct Stream(*mut libc::DIR);

impl Stream {
    fn open(path: &Path) -> io::Result<Stream> {
        let path = sys::c(path)?;
        let dir = unsafe { libc::opendir(path.as_ptr()) };
        if dir.is_null() { Err(io::Error::last_os_error()) } else { Ok(Stream(dir)) }
    }

    fn next(&mut self) -> io::Result<Option<Entry>> {
        unsafe { *libc::__errno_location() = 0 };
        let entry = unsafe { libc::readdir64(self.0) };
        if entry.is_null() {
            let e = io::Error::last_os_error();
            return if e.raw_os_error() == Some(0) { Ok(None) } else { Err(e) };
        }
        let name = unsafe { CStr::from_ptr((*entry).d_name.as_ptr()) }.to_bytes().to_vec();
        let (ino, kind) = unsafe { ((*entry).d_ino, (*entry).d_type) };
        let position = unsafe { libc::telldir(self.0) };
        Ok(Some(Entry { name, ino, kind, position }))
    }

    fn seek(&mut self, position: i64) {
        unsafe { libc::seekdir(self.0, position) };
    }

    fn rest(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        while let Some(entry) = self.next()? {
            names.push(entry.name);
        }
        Ok(names)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        unsafe { libc::closedir(self.0) };
    }
}

/// A whole scan, `.` and `..` included.
pub fn raw(path: &Path) -> io::Result<Vec<Entry>> {
    let mut stream = Stream::open(path)?;
    let mut entries = Vec::new();
    while let Some(entry) = stream.next()? {
        entries.push(entry);
    }
    Ok(entries)
}

fn filled(room: &Room, count: u32) -> Result<()> {
    for i in 0..count {
        fs::write(room.at(format!("entry {i:05}")), b"")?;
    }
    Ok(())
}

fn empty(room: &Room) -> Result<()> {
    let mut names: Vec<_> = raw(&room.path)?.into_iter().map(|e| e.name).collect();
    names.sort();
    ensure!(names == [b".".to_vec(), b"..".to_vec()]);
    Ok(())
}

fn kinds(room: &Room) -> Result<()> {
    room.file("f", b"")?;
    room.dir("d")?;
    symlink("f", room.at("l"))?;
    sys::mknod(&room.at("p"), libc::S_IFIFO | 0o600, 0)?;
    drop(std::os::unix::net::UnixListener::bind(room.at("s"))?);
    let kinds: BTreeMap<_, _> = raw(&room.path)?.into_iter().map(|e| (e.name, e.kind)).collect();
    let expected = [
        ("f", libc::DT_REG),
        ("d", libc::DT_DIR),
        ("l", libc::DT_LNK),
        ("p", libc::DT_FIFO),
        ("s", libc::DT_SOCK),
    ];
    for (name, kind) in expected {
        ensure!(
            kinds.get(name.as_bytes()) == Some(&kind),
            "{name} is listed as {:?}",
            kinds.get(name.as_bytes())
        );
    }
    Ok(())
}

fn ten_thousand(room: &Room) -> Result<()> {
    let count = room.entries;
    filled(room, count)?;
    for round in 0..2 {
        let entries = raw(&room.path)?;
        let names: BTreeSet<_> = entries.iter().map(|e| e.name.clone()).collect();
        ensure!(entries.len() == count as usize + 2, "round {round}: {} entries", entries.len());
        ensure!(names.len() == entries.len(), "round {round}: names are listed twice");
        ensure!((0..count).all(|i| names.contains(format!("entry {i:05}").as_bytes())));
    }
    Ok(())
}

fn every_position(room: &Room) -> Result<()> {
    filled(room, 400)?;
    let mut stream = Stream::open(&room.path)?;
    let mut seen = Vec::new();
    while let Some(entry) = stream.next()? {
        seen.push(entry);
    }
    ensure!(seen.len() == 402);
    for i in (0..seen.len()).rev().chain(0..seen.len()) {
        stream.seek(seen[i].position);
        let next = stream.next()?.map(|e| e.name);
        let expected = seen.get(i + 1).map(|e| e.name.clone());
        ensure!(next == expected, "behind entry {i} came {next:?}, not {expected:?}");
    }
    Ok(())
}

fn seek_in_reopened(room: &Room) -> Result<()> {
    filled(room, 300)?;
    let seen = raw(&room.path)?;
    let mut again = Stream::open(&room.path)?;
    again.next()?;
    again.seek(seen[150].position);
    let rest = again.rest()?;
    ensure!(rest == seen[151..].iter().map(|e| e.name.clone()).collect::<Vec<_>>());
    Ok(())
}

fn seek_to_end(room: &Room) -> Result<()> {
    filled(room, 50)?;
    let seen = raw(&room.path)?;
    let mut stream = Stream::open(&room.path)?;
    // ext4 of Linux 6.18 does not rewind a stream whose first operation was a seek to its end.
    stream.next()?;
    stream.seek(seen[51].position);
    ensure!(stream.next()?.is_none());
    unsafe { libc::rewinddir(stream.0) };
    ensure!(stream.rest()?.len() == 52);
    Ok(())
}

fn rewind_sees_changes(room: &Room) -> Result<()> {
    filled(room, 10)?;
    let mut stream = Stream::open(&room.path)?;
    ensure!(stream.rest()?.len() == 12);
    room.file("new", b"")?;
    fs::remove_file(room.at("entry 00003"))?;
    unsafe { libc::rewinddir(stream.0) };
    let names = stream.rest()?;
    ensure!(names.contains(&b"new".to_vec()) && !names.contains(&b"entry 00003".to_vec()));
    Ok(())
}

/// Scans with `change` called before each entry; entries in `stay` must be returned exactly once.
fn scan_changing(room: &Room, stay: u32, mut change: impl FnMut(u32) -> io::Result<()>) -> Result<()> {
    let mut stream = Stream::open(&room.path)?;
    let mut times: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    let mut step = 0;
    while let Some(entry) = stream.next()? {
        *times.entry(entry.name).or_default() += 1;
        change(step)?;
        step += 1;
        ensure!(step < 100_000, "the scan does not end");
    }
    for i in 0..stay {
        let name = format!("entry {i:05}");
        let count = times.get(name.as_bytes()).copied().unwrap_or(0);
        ensure!(count == 1, "{name}, there throughout, came {count} times");
    }
    Ok(())
}

fn insert_and_remove_meanwhile(room: &Room) -> Result<()> {
    let count = room.entries * 3 / 10;
    filled(room, count)?;
    for i in 0..count {
        fs::write(room.at(format!("goes {i}")), b"")?;
    }
    scan_changing(room, count, |step| {
        if step < count {
            fs::remove_file(room.at(format!("goes {step}")))?;
            fs::write(room.at(format!("comes {step}")), b"")?;
        }
        Ok(())
    })
}

fn rename_meanwhile(room: &Room) -> Result<()> {
    let count = room.entries / 5;
    filled(room, count)?;
    fs::write(room.at("wanders 0"), b"")?;
    scan_changing(room, count, |step| {
        let next = step + 1;
        fs::rename(room.at(format!("wanders {step}")), room.at(format!("wanders {next}")))
    })
}

fn remove_while_reading(room: &Room) -> Result<()> {
    let count = room.entries / 4;
    filled(room, count)?;
    let mut stream = Stream::open(&room.path)?;
    let mut removed = 0;
    while let Some(entry) = stream.next()? {
        if entry.name.starts_with(b"entry") {
            use std::os::unix::ffi::OsStrExt;
            fs::remove_file(room.at(std::ffi::OsStr::from_bytes(&entry.name)))?;
            removed += 1;
        }
    }
    ensure!(removed == count, "removed {removed}");
    ensure!(fs::read_dir(&room.path)?.count() == 0);
    Ok(())
}

fn small_buffer(room: &Room) -> Result<()> {
    filled(room, 500)?;
    let dir = sys::open(&room.path, libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
    let mut names = BTreeSet::new();
    let mut buffer = [0_u8; 300];
    loop {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&dir);
        let ret = unsafe { libc::syscall(libc::SYS_getdents64, fd, buffer.as_mut_ptr(), buffer.len()) };
        ensure!(ret >= 0, "{}", io::Error::last_os_error());
        if ret == 0 {
            break;
        }
        let mut rest = &buffer[..usize::try_from(ret)?];
        while let [_, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, low, high, _, ..] = rest {
            let record = usize::from(u16::from_le_bytes([*low, *high]));
            let name: Vec<u8> = rest[19..record].iter().copied().take_while(|&b| b != 0).collect();
            ensure!(names.insert(name), "a name came twice");
            rest = &rest[record..];
        }
    }
    ensure!(names.len() == 502, "{} names", names.len());
    Ok(())
}

fn two_streams(room: &Room) -> Result<()> {
    filled(room, 600)?;
    let mut first = Stream::open(&room.path)?;
    let mut second = Stream::open(&room.path)?;
    let mut names = (Vec::new(), Vec::new());
    for _ in 0..602 {
        names.0.extend(first.next()?.map(|e| e.name));
        names.1.extend(second.next()?.map(|e| e.name));
    }
    ensure!(names.0 == names.1 && names.0.len() == 602 && first.next()?.is_none());
    Ok(())
}

fn after_changes(room: &Room) -> Result<()> {
    let mut expected = BTreeSet::from([b".".to_vec(), b"..".to_vec()]);
    for i in 0..60_u32 {
        let name = format!("n{i}");
        fs::write(room.at(&name), b"")?;
        expected.insert(name.clone().into_bytes());
        if i % 3 == 0 {
            fs::remove_file(room.at(&name))?;
            expected.remove(name.as_bytes());
        }
        if i % 3 == 1 {
            fs::rename(room.at(&name), room.at(format!("renamed {i}")))?;
            expected.remove(name.as_bytes());
            expected.insert(format!("renamed {i}").into_bytes());
        }
        let listed: BTreeSet<_> = raw(&room.path)?.into_iter().map(|e| e.name).collect();
        ensure!(listed == expected, "after step {i}");
    }
    Ok(())
}

/// An open directory is empty after it was removed or replaced, and stat, chmod and fsync succeed, also when another
/// directory has its name, and perhaps its inode number.
fn removed_while_open(room: &Room) -> Result<()> {
    for replaced in [false, true] {
        let path = room.dir("d")?;
        let open = File::open(&path)?;
        let number = open.metadata()?.ino();
        if replaced {
            fs::rename(room.dir("other")?, &path)?;
        } else {
            fs::remove_dir(&path)?;
        }
        is_removed(&open, number)?;
        if !replaced {
            room.dir("d")?;
        }
        room.file("d/f", b"in another directory")?;
        sys::chmod(&path, 0o751)?;
        is_removed(&open, number)?;
        let meta = fs::metadata(&path)?;
        ensure!(meta.mode() & 0o777 == 0o751 && fs::read_dir(&path)?.count() == 1);
        fs::remove_dir_all(&path)?;
    }
    Ok(())
}

fn is_removed(open: &File, number: u64) -> Result<()> {
    let meta = open.metadata()?;
    ensure!(meta.is_dir() && meta.ino() == number && meta.nlink() == 0, "{} links", meta.nlink());
    for mode in [0o700, 0o755] {
        open.set_permissions(fs::Permissions::from_mode(mode))?;
        ensure!(open.metadata()?.mode() & 0o777 == mode);
    }
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
    open.set_times(fs::FileTimes::new().set_modified(time))?;
    ensure!(open.metadata()?.modified()? == time);
    fchown(open, Some(sys::uid()), None)?;
    open.sync_all()?;
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(open));
    ensure!(fs::read_dir(&path)?.count() == 0);
    refuses(File::create(format!("{path}/x")), libc::ENOENT)?;
    refuses(fs::metadata(format!("{path}/f")), libc::ENOENT)
}
