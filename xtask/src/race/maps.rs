//! Races between maps and writes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};

use super::stage::{Announced, CallTimes, Stage};

/// The length of a mapped file.
pub const LENGTH: u16 = 8192;

/// A shared map of a file of that length; unmapped when dropped.
pub struct Map(*mut u8);

impl Map {
    pub fn of(file: &File) -> io::Result<Map> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let length = usize::from(LENGTH);
        // SAFETY: a new mapping, of a file that is that long.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Map(at.cast())) }
    }

    /// Returns the word at a multiple of 8 below `LENGTH`.
    fn word(&self, at: u16) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < LENGTH);
        // SAFETY: inside the mapping and aligned; other threads and processes may change it.
        unsafe { AtomicU64::from_ptr(self.0.add(usize::from(at)).cast()) }
    }

    /// Returns the byte at an offset below `LENGTH`.
    pub fn byte(&self, at: u16) -> &AtomicU8 {
        assert!(at < LENGTH);
        // SAFETY: inside the mapping; other threads and processes may change it.
        unsafe { AtomicU8::from_ptr(self.0.add(usize::from(at))) }
    }

    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: the whole mapping.
        let done = unsafe { libc::msync(self.0.cast(), usize::from(LENGTH), libc::MS_SYNC) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: no reference into the mapping exists any more.
        unsafe { libc::munmap(self.0.cast(), usize::from(LENGTH)) };
    }
}

fn in_order(what: &str, value: u64, least: u64, most: u64) -> Result<()> {
    ensure!(value >= least, "{what}: {value} is seen after {least} was told");
    ensure!(value <= most, "{what}: {value} is seen before it was begun ({most})");
    Ok(())
}

/// The first side stores at 0 into a map and syncs; the second writes at `distance`. Each sees the values that the
/// other announced, and its own.
pub fn stored(first: &Path, second: &Path, count: u64, distance: u16) -> Result<CallTimes> {
    fs::write(first.join("f"), vec![0; usize::from(LENGTH)])?;
    let open = |top: &Path| OpenOptions::new().read(true).write(true).open(top.join("f"));
    let (stage, stored, written) = (Stage::default(), Announced::default(), Announced::default());
    let store = |meter: &mut CallTimes| {
        let map = meter.call("mmap", || Map::of(&open(first)?))?;
        for value in 1..=count {
            stage.wait_until(|| written.announced() + 4 > value)?;
            stored.begin(value);
            meter.time("store", || map.word(0).store(value, Ordering::SeqCst));
            meter.call("msync", || map.sync())?;
            stored.announce(value);
            let least = written.announced();
            let seen = meter.time("load", || map.word(distance).load(Ordering::SeqCst));
            in_order("the other's word, by the map", seen, least, written.begun())?;
            let own = meter.time("load", || map.word(0).load(Ordering::SeqCst));
            ensure!(own == value, "a store of {value} became {own}");
        }
        Ok(())
    };
    let write = |meter: &mut CallTimes| {
        let file = meter.call("open", || open(second))?;
        let word = |meter: &mut CallTimes, at| -> Result<u64> {
            let mut bytes = [0; 8];
            meter.call("pread", || file.read_exact_at(&mut bytes, at))?;
            Ok(u64::from_le_bytes(bytes))
        };
        for value in 1..=count {
            stage.wait_until(|| stored.announced() + 4 > value)?;
            written.begin(value);
            meter.call("pwrite", || file.write_all_at(&value.to_le_bytes(), u64::from(distance)))?;
            written.announce(value);
            let own = word(meter, u64::from(distance))?;
            ensure!(own == value, "a write of {value} became {own}");
            let least = stored.announced();
            let seen = word(meter, 0)?;
            in_order("the other's word, by read", seen, least, stored.begun())?;
        }
        Ok(())
    };
    let meter = stage.both(store, write)?;
    in_the_end([first, second], count, distance)?;
    Ok(meter)
}

/// Both sides store into maps and sync, the first at 0 and the second at `distance`. Each sees the values that the
/// other announced; no store is lost.
pub fn both_stored(first: &Path, second: &Path, count: u64, distance: u16) -> Result<CallTimes> {
    fs::write(first.join("f"), vec![0; usize::from(LENGTH)])?;
    let (stage, told) = (Stage::default(), [Announced::default(), Announced::default()]);
    let side = |top: &Path,
                [own, other]: [&Announced; 2],
                [at, others]: [u16; 2],
                meter: &mut CallTimes|
     -> Result<()> {
        let open = || OpenOptions::new().read(true).write(true).open(top.join("f"));
        let map = meter.call("mmap", || Map::of(&open()?))?;
        for value in 1..=count {
            stage.wait_until(|| other.announced() + 4 > value)?;
            own.begin(value);
            meter.time("store", || map.word(at).store(value, Ordering::SeqCst));
            meter.call("msync", || map.sync())?;
            own.announce(value);
            let least = other.announced();
            let seen = meter.time("load", || map.word(others).load(Ordering::SeqCst));
            in_order("the other's word", seen, least, other.begun())?;
            let stored = meter.time("load", || map.word(at).load(Ordering::SeqCst));
            ensure!(stored == value, "a store of {value} became {stored}");
        }
        Ok(())
    };
    let [one, two] = &told;
    let meter = stage.both(
        |meter| side(first, [one, two], [0, distance], meter),
        |meter| side(second, [two, one], [distance, 0], meter),
    )?;
    in_the_end([first, second], count, distance)?;
    Ok(meter)
}

/// Checks that both words have their last values, on both sides.
fn in_the_end(tops: [&Path; 2], count: u64, distance: u16) -> Result<()> {
    for top in tops {
        let bytes = fs::read(top.join("f"))?;
        for at in [0, usize::from(distance)] {
            let word = bytes.get(at..at + 8).context("the file is short")?.try_into()?;
            let value = u64::from_le_bytes(word);
            ensure!(value == count, "{}: the word at {at} is {value} in the end", top.display());
        }
    }
    Ok(())
}
