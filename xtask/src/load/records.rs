//! Workers that use file contents.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, ensure};

use super::{Calls, GIVEN, moment};

/// Appends numbered records through one descriptor. At the end each is there once and in order; a record may be there
/// twice in a row only if the server was killed while it was written.
pub fn appends(path: &Path, calls: &mut Calls<'_>) -> Result<()> {
    let mut file = calls.must("create", || OpenOptions::new().append(true).create(true).open(path))?;
    let mut times = Vec::new();
    while calls.goes_on() {
        let record = format!("{:015}\n", times.len());
        let written = calls.must("append", || file.write(record.as_bytes()))?;
        ensure!(written == record.len(), "{written} bytes were appended");
        times.push((calls.began, moment()));
        if times.len().is_multiple_of(100) {
            calls.must("fsync", || file.sync_all())?;
        }
    }
    let bytes = calls.must("read", || fs::read(path))?;
    let mut counts = BTreeMap::<u64, u64>::new();
    let mut latest = 0;
    for line in String::from_utf8(bytes).context("not what was written")?.lines() {
        let number: u64 = line.parse().with_context(|| format!("not a record: {line:?}"))?;
        ensure!(line.len() == 15 && number >= latest, "{line:?} stands behind record {latest}");
        latest = number;
        *counts.entry(number).or_default() += 1;
    }
    for (number, (began, ended)) in (0..).zip(&times) {
        match counts.remove(&number).unwrap_or(0) {
            1 => {}
            2 if calls.shared.was_killed(*began, *ended)? => {
                calls.shared.doubts.fetch_add(1, Ordering::Relaxed);
            }
            count => anyhow::bail!("record {number} of {} stands there {count} times", times.len()),
        }
    }
    ensure!(counts.is_empty(), "records that no process wrote: {counts:?}");
    Ok(())
}

/// Writes numbers at their offsets in one file and reads them again, by its descriptor and by its path.
pub fn in_place(dir: &Path, calls: &mut Calls<'_>) -> Result<()> {
    const PLACES: u64 = 64;
    let path = dir.join("in-place");
    let open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let file = calls.must("create", open)?;
    let mut written = vec![0_u64; 64];
    for value in 1.. {
        let (place, at) = (value % PLACES, value % PLACES * 512);
        calls.must("pwrite", || file.write_all_at(&value.to_le_bytes(), at))?;
        written[usize::try_from(place)?] = value;
        let mut bytes = [0; 8];
        if value.is_multiple_of(2) {
            calls.must("pread", || file.read_exact_at(&mut bytes, at))?;
        } else {
            calls.must("open and read", || File::open(&path)?.read_exact_at(&mut bytes, at))?;
        }
        let read = u64::from_le_bytes(bytes);
        ensure!(read == value, "{read} is read where {value} was written");
        if !calls.goes_on() {
            break;
        }
    }
    let bytes = calls.must("read", || fs::read(&path))?;
    for (place, value) in (0..).zip(written) {
        let at: usize = place * 512;
        let there = bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes);
        ensure!(there == value, "at place {place} stands {there} and not {value}");
    }
    Ok(())
}

/// Reads a file that never changes, at all offsets in turn, by a descriptor that stays open and by its path.
pub fn reads(dir: &Path, calls: &mut Calls<'_>) -> Result<()> {
    let path = dir.join("given");
    let file = calls.must("open", || File::open(&path))?;
    let mut at = 0;
    while calls.goes_on() {
        at = (at + 73 * 4096) % GIVEN;
        let mut bytes = vec![0; 4096];
        calls.must("pread", || file.read_exact_at(&mut bytes, at))?;
        check(&bytes, at)?;
        // The kernel caches pages that it has read; these reads go to the server each time.
        let direct = || {
            let other = File::open(&path)?;
            // SAFETY: a number and no pointer.
            unsafe {
                libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(&other), 0, 0, libc::POSIX_FADV_DONTNEED)
            };
            other.read_exact_at(&mut bytes, at)
        };
        calls.must("open and read", direct)?;
        check(&bytes, at)?;
        let length = calls.must("fstat", || file.metadata())?.len();
        ensure!(length == GIVEN, "it is {length} bytes long");
    }
    check(&calls.must("read", || fs::read(&path))?, 0)
}

fn check(bytes: &[u8], at: u64) -> Result<()> {
    for (word, bytes) in (0..).zip(bytes.chunks_exact(8)) {
        let (expected, read) = (at + word * 8, bytes.try_into().map_or(0, u64::from_le_bytes));
        ensure!(read == expected, "{read} is read at {expected}");
    }
    Ok(())
}
