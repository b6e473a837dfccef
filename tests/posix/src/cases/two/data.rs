//! File contents: writes, truncation, maps.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::{all_see, reads, same, warm};
use crate::room::{Room, or_skip, or_skip_invalid};
use crate::sys;

super::cases! { two::
    overwritten, overwritten_open, extended, extended_open, written_anew, shortened_and_grown, appended_by_turns,
    written_by_turns, allocated, hole_punched, copied_by_the_kernel, map_synced, mapped, mapped_alone,
    stored_and_written, written_through_link;
}

const SIZE: u16 = 20_000;

/// `SIZE` bytes; no two pages are equal.
fn pattern(seed: u8) -> Vec<u8> {
    (0..SIZE).map(|i| i.to_le_bytes()[0].wrapping_add(i.to_le_bytes()[1]).wrapping_add(seed)).collect()
}

/// `d/f` with a pattern, cached on every mount.
fn warm_pattern(room: &Room) -> Result<Vec<u8>> {
    let contents = pattern(0);
    room.dir("d")?;
    room.file("d/f", &contents)?;
    warm(room, &[])?;
    Ok(contents)
}

fn read_write(path: &Path) -> Result<File> {
    OpenOptions::new().read(true).write(true).open(path).with_context(|| path.display().to_string())
}

/// Returns an open file's contents; no file here is longer.
fn whole(file: &File) -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::from(u16::MAX)];
    let mut length = 0;
    loop {
        let read = file.read_at(&mut bytes[length..], u64::try_from(length)?)?;
        length += read;
        if read == 0 {
            bytes.truncate(length);
            return Ok(bytes);
        }
    }
}

fn overwritten(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    read_write(&room.at("d/f"))?.write_all_at(b"over a page's end", 4090)?;
    contents[4090..4107].copy_from_slice(b"over a page's end");
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn overwritten_open(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let (file, other) = (read_write(&room.at("d/f"))?, File::open(room.over("d/f"))?);
    same(&whole(&other)?, &contents)?;
    for at in [0, 4095, 9000, 19_990] {
        file.write_all_at(b"0123456789", at)?;
        let at = usize::try_from(at)?;
        contents[at..at + 10].copy_from_slice(b"0123456789");
        same(&whole(&other)?, &contents).with_context(|| format!("an open file after a write at {at}"))?;
    }
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn extended(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    OpenOptions::new().append(true).open(room.at("d/f"))?.write_all(b"and more")?;
    contents.extend(b"and more");
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn extended_open(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let (file, other) = (read_write(&room.at("d/f"))?, File::open(room.over("d/f"))?);
    same(&whole(&other)?, &contents)?;
    for round in 0..5 {
        file.write_all_at(&[b'm'; 5000], u64::try_from(contents.len())?)?;
        contents.extend([b'm'; 5000]);
        ensure!(
            other.metadata()?.len() == u64::try_from(contents.len())?,
            "round {round}: the length is old"
        );
        same(&whole(&other)?, &contents).with_context(|| format!("round {round}"))?;
    }
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn written_anew(room: &Room) -> Result<()> {
    warm_pattern(room)?;
    // Equal size: only the data differs.
    fs::write(room.at("d/f"), pattern(9))?;
    all_see(room, &[], |dir| reads(dir, "d/f", &pattern(9)))
}

/// Data behind the new end does not reappear.
fn shortened_and_grown(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let (file, other) = (read_write(&room.at("d/f"))?, File::open(room.over("d/f"))?);
    same(&whole(&other)?, &contents)?;
    file.set_len(5000)?;
    file.set_len(20_000)?;
    contents[5000..].fill(0);
    same(&whole(&other)?, &contents).context("an open file")?;
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn appended_by_turns(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.file("d/f", b"")?;
    warm(room, &[])?;
    let open = |path| OpenOptions::new().append(true).read(true).open(path);
    let (mine, theirs) = (open(room.at("d/f"))?, open(room.over("d/f"))?);
    let mut expected = Vec::new();
    for round in 0..100 {
        for (mut file, other, who) in [(&mine, &theirs, "mine"), (&theirs, &mine, "theirs")] {
            let record = format!("{round:04} of {who:.<60}\n");
            ensure!(file.write(record.as_bytes())? == record.len());
            expected.extend(record.as_bytes());
            let length = other.metadata()?.len();
            ensure!(length == u64::try_from(expected.len())?, "round {round}: {length} bytes are seen");
            same(&whole(other)?, &expected).with_context(|| format!("round {round}"))?;
        }
    }
    all_see(room, &[], |dir| reads(dir, "d/f", &expected))
}

fn written_by_turns(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let (mine, theirs) = (read_write(&room.at("d/f"))?, read_write(&room.over("d/f"))?);
    for round in 0..100_u16 {
        // Adjacent words within one page.
        let at = usize::from(round) * 8;
        let (file, other) = if round % 2 == 0 { (&mine, &theirs) } else { (&theirs, &mine) };
        let word = format!("turn{round:04}");
        file.write_all_at(word.as_bytes(), u64::from(round) * 8)?;
        contents[at..at + 8].copy_from_slice(word.as_bytes());
        same(&whole(other)?, &contents).with_context(|| format!("round {round}"))?;
    }
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn allocated(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    or_skip(sys::fallocate(&read_write(&room.at("d/f"))?, 0, 0, 50_000), "fallocate")?;
    contents.resize(50_000, 0);
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn hole_punched(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    or_skip(sys::fallocate(&read_write(&room.at("d/f"))?, mode, 3000, 9000), "hole punching")?;
    contents[3000..12_000].fill(0);
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn copied_by_the_kernel(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    room.file("d/from", &pattern(5))?;
    warm(room, &[])?;
    let (from, to) = (File::open(room.at("d/from"))?, read_write(&room.at("d/f"))?);
    let copied = or_skip_invalid(sys::copy_range(&from, 1000, &to, 2000, 6000), "copy_file_range")?;
    ensure!(copied == 6000, "{copied} bytes were copied");
    contents[2000..8000].copy_from_slice(&pattern(5)[1000..7000]);
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

/// A shared map of the whole file; unmapped when dropped.
struct Map(*mut u8);

impl Map {
    fn of(file: &File, write: bool) -> io::Result<Map> {
        let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        let length = usize::from(SIZE);
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Map(at.cast())) }
    }

    fn store(&self, at: u16, text: &[u8]) {
        for (i, byte) in (at..).zip(text) {
            unsafe { self.0.add(usize::from(i)).write_volatile(*byte) };
        }
    }

    fn load(&self) -> Vec<u8> {
        (0..SIZE).map(|i| unsafe { self.0.add(usize::from(i)).read_volatile() }).collect()
    }

    fn sync(&self) -> Result<()> {
        let done = unsafe { libc::msync(self.0.cast(), usize::from(SIZE), libc::MS_SYNC) };
        ensure!(done == 0, "msync: {}", io::Error::last_os_error());
        Ok(())
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.0.cast(), usize::from(SIZE)) };
    }
}

fn map_synced(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let map = Map::of(&read_write(&room.at("d/f"))?, true)?;
    for (at, text) in [(100_u16, b"first store "), (8190, b"second store"), (100, b"once more   ")] {
        map.store(at, text);
        map.sync()?;
        contents[usize::from(at)..usize::from(at) + 12].copy_from_slice(text);
        all_see(room, &[], |dir| reads(dir, "d/f", &contents)).with_context(|| format!("stored at {at}"))?;
    }
    Ok(())
}

/// A map shows data that another process has read on its mount.
fn mapped(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let map = Map::of(&File::open(room.over("d/f"))?, false)?;
    ensure!(map.load() == contents);
    read_write(&room.at("d/f"))?.write_all_at(b"beside a map", 4090)?;
    contents[4090..4102].copy_from_slice(b"beside a map");
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))?;
    same(&map.load(), &contents).context("the map")?;
    Ok(())
}

/// A map without such a reader. Needs a kernel that supports invalidation of pages.
fn mapped_alone(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let map = Map::of(&File::open(room.over("d/f"))?, false)?;
    ensure!(map.load() == contents);
    let file = read_write(&room.at("d/f"))?;
    for (at, text) in [(0_u16, b"alone"), (4094, b"again"), (0, b"third")] {
        file.write_all_at(text, u64::from(at))?;
        contents[usize::from(at)..usize::from(at) + 5].copy_from_slice(text);
        same(&map.load(), &contents).with_context(|| format!("the map after a write at {at}"))?;
    }
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

/// One mount stores into a map and syncs, the other writes into the same page: both changes remain.
fn stored_and_written(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    let map = Map::of(&read_write(&room.at("d/f"))?, true)?;
    let other = read_write(&room.over("d/f"))?;
    for round in 0..30_u16 {
        let at = round * 16;
        map.store(at, b"stored..");
        map.sync()?;
        other.write_all_at(b"written.", u64::from(at) + 8)?;
        contents[usize::from(at)..usize::from(at) + 16].copy_from_slice(b"stored..written.");
        same(&whole(&other)?, &contents).with_context(|| format!("round {round}"))?;
        reads(&room.path, "d/f", &contents).with_context(|| format!("round {round}"))?;
        same(&map.load(), &contents).with_context(|| format!("round {round}: the map"))?;
    }
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}

fn written_through_link(room: &Room) -> Result<()> {
    let mut contents = warm_pattern(room)?;
    room.dir("e")?;
    fs::hard_link(room.at("d/f"), room.at("e/g"))?;
    warm(room, &[])?;
    read_write(&room.at("e/g"))?.write_all_at(b"by the other name", 0)?;
    contents[..17].copy_from_slice(b"by the other name");
    all_see(room, &[], |dir| reads(dir, "d/f", &contents))
}
