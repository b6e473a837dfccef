//! Races on file contents.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write as _};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use nigh_sim::random::Dice;

use super::stage::{Announced, CallTimes, Stage};

const WORDS: usize = 64;
/// A record repeats one number.
const RECORD: usize = WORDS * 8;
const RECORD_BYTES: u64 = 512;

fn record(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(WORDS)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes))
}

/// Returns the number of a record, which must be whole.
fn value_of(bytes: &[u8]) -> Result<u64> {
    let value = words(bytes).next().context("an empty record")?;
    ensure!(words(bytes).all(|w| w == value), "a record of {value} is torn");
    Ok(value)
}

fn read_write(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

/// One write of a record: its value, and its begin and return in ticks of a common clock.
#[derive(Clone, Copy)]
struct Write {
    value: u64,
    began: u64,
    returned: u64,
}

/// Both sides write random records of one file; each record must be whole afterwards, and have the last value.
pub fn records(first: &Path, second: &Path, count: u64) -> Result<CallTimes> {
    const RECORDS: u64 = 128;
    fs::write(first.join("f"), vec![0; RECORD * 8])?;
    let (stage, clock) = (Stage::default(), AtomicU64::new(1));
    let tick = || clock.fetch_add(1, Ordering::SeqCst);
    let side = |top: &Path, who: u64, last: &mut BTreeMap<u64, Write>, meter: &mut CallTimes| {
        let file = meter.call("open", || read_write(&top.join("f")))?;
        let mut dice = Dice::new(who);
        for i in 0..count {
            let (at, value) = (dice.below(RECORDS), (who << 56) | (i + 1));
            let began = tick();
            meter.call("pwrite", || file.write_all_at(&record(value), at * RECORD_BYTES))?;
            last.insert(at, Write { value, began, returned: tick() });
            if stage.failed() {
                break;
            }
        }
        Ok(())
    };
    let (mut ours, mut theirs) = (BTreeMap::new(), BTreeMap::new());
    let meter =
        stage.both(|meter| side(first, 1, &mut ours, meter), |meter| side(second, 2, &mut theirs, meter))?;
    for top in [first, second] {
        let bytes = fs::read(top.join("f"))?;
        for (at, record) in (0..RECORDS).zip(bytes.chunks_exact(RECORD)) {
            let got = value_of(record).with_context(|| format!("{}: record {at}", top.display()))?;
            let allowed = last_of(ours.get(&at), theirs.get(&at));
            ensure!(allowed.contains(&got), "{}: record {at} is {got:x}, not of {allowed:x?}", top.display());
        }
    }
    Ok(meter)
}

/// Returns the possible values of a record: that of the last write, or either value if the writes overlapped.
fn last_of(ours: Option<&Write>, theirs: Option<&Write>) -> Vec<u64> {
    match (ours, theirs) {
        (None, None) => vec![0],
        (Some(one), None) | (None, Some(one)) => vec![one.value],
        (Some(one), Some(two)) if one.returned < two.began => vec![two.value],
        (Some(one), Some(two)) if two.returned < one.began => vec![one.value],
        (Some(one), Some(two)) => vec![one.value, two.value],
    }
}

/// Both sides append: each record is there once, whole, and in its writer's order.
pub fn appends(first: &Path, second: &Path, count: u64) -> Result<CallTimes> {
    fs::write(first.join("f"), b"")?;
    let (stage, done) = (Stage::default(), AtomicU64::new(0));
    let side = |top: &Path, who: u64, meter: &mut CallTimes| {
        let path = top.join("f");
        let mut file = meter.call("open", || OpenOptions::new().append(true).open(&path))?;
        for i in 0..count {
            let written = meter.call("append", || file.write(&record((who << 56) | i)))?;
            ensure!(written == RECORD, "{written} bytes were appended");
            let least = (done.fetch_add(1, Ordering::SeqCst) + 1) * RECORD_BYTES;
            let seen = meter.call("fstat", || file.metadata())?.len();
            ensure!(seen >= least, "{seen} bytes are seen after {least} were appended");
            if stage.failed() {
                break;
            }
        }
        Ok(())
    };
    let meter = stage.both(|meter| side(first, 1, meter), |meter| side(second, 2, meter))?;
    for top in [first, second] {
        let bytes = fs::read(top.join("f"))?;
        let mut next = BTreeMap::from([(1, 0), (2, 0)]);
        for record in bytes.chunks(RECORD) {
            let value = value_of(record)?;
            let expected = next.get_mut(&(value >> 56)).context("a record without a writer")?;
            ensure!(value & 0xffff_ffff == *expected, "a record is {value:x}, expected {expected:x}");
            *expected += 1;
        }
        ensure!(next.values().all(|n| *n == count), "{}: records of each: {next:?}", top.display());
    }
    Ok(meter)
}

type OneWay = fn(&Path, &Path, u64) -> Result<CallTimes>;

/// Runs half of the race with the first side as the writer, and half with the second.
pub fn both_ways(first: &Path, second: &Path, count: u64, race: OneWay) -> Result<CallTimes> {
    let mut meter = CallTimes::default();
    for (name, writer, reader) in [("forth", first, second), ("back", second, first)] {
        fs::create_dir(writer.join(name))?;
        let half = race(&writer.join(name), &reader.join(name), count / 2);
        meter.add(&half.with_context(|| format!("{name}, written by {}", writer.display()))?);
    }
    Ok(meter)
}

/// The pace of the writer in [`tell`].
struct Pace {
    /// Number of writes to one file before the next file is created.
    each: u64,
    /// Number of writes by which the reader may be behind.
    behind: u64,
}

pub fn told(writer: &Path, reader: &Path, count: u64) -> Result<CallTimes> {
    tell(writer, reader, count, &Pace { each: u64::MAX, behind: 20 })
}

/// Four writes to each file; each version is read before the file is written again. At the first two writes the reader
/// holds a lease on the file.
pub fn told_spread(writer: &Path, reader: &Path, count: u64) -> Result<CallTimes> {
    tell(writer, reader, count, &Pace { each: 4, behind: 0 })
}

/// The reader never sees a value older than the one announced before its read, nor newer than the one begun after the
/// read.
fn tell(writer: &Path, reader: &Path, count: u64, pace: &Pace) -> Result<CallTimes> {
    let (stage, told, looked) = (Stage::default(), Announced::default(), AtomicU64::new(0));
    let name = |value: u64| format!("f{}", value.saturating_sub(1) / pace.each);
    let write = |meter: &mut CallTimes| {
        let mut open: Option<(String, File)> = None;
        for value in 1..=count {
            let mut file = open.take().filter(|(of, _)| *of == name(value));
            if file.is_none() {
                let new = meter.call("create", || read_write(&writer.join(name(value))))?;
                file = Some((name(value), new));
            }
            let (of, file) = file.context("no file")?;
            stage.wait_until(|| looked.load(Ordering::SeqCst) + pace.behind + 1 >= value)?;
            told.begin(value);
            meter.call("pwrite", || file.write_all_at(&record(value), 0))?;
            if value.is_multiple_of(4) {
                meter.call("ftruncate", || file.set_len(RECORD_BYTES + value))?;
            }
            told.announce(value);
            open = Some((of, file));
        }
        Ok(())
    };
    let read = |meter: &mut CallTimes| {
        let mut open: Option<(String, File)> = None;
        loop {
            let least = told.announced();
            if least == 0 {
                stage.wait_until(|| told.announced() > 0)?;
                continue;
            }
            let path = reader.join(name(least));
            let mut file = open.take().filter(|(of, _)| *of == name(least));
            if file.is_none() {
                file = Some((name(least), meter.call("open", || File::open(&path))?));
            }
            let (of, file) = file.context("no file")?;
            look(meter, &path, &file, least, &|| told.begun())?;
            open = Some((of, file));
            looked.store(least, Ordering::SeqCst);
            if least == count {
                return Ok(());
            }
            ensure!(!stage.failed(), "(the other side failed)");
        }
    };
    stage.both(write, read)
}

/// Reads by descriptor, by path, and the length.
fn look(meter: &mut CallTimes, path: &Path, file: &File, least: u64, begun: &dyn Fn() -> u64) -> Result<()> {
    let mut bytes = vec![0; RECORD];
    meter.call("pread", || file.read_exact_at(&mut bytes, 0))?;
    let most = begun();
    check(&bytes, least, most).context("by an open file")?;
    meter.call("open and read", || File::open(path)?.read_exact(&mut bytes))?;
    let most = begun();
    check(&bytes, least, most).context("by its path")?;
    if least >= 4 && least.is_multiple_of(4) {
        let length = meter.call("stat", || fs::metadata(path))?.len();
        ensure!(length >= RECORD_BYTES + least, "{length} bytes at value {least}");
    }
    Ok(())
}

fn check(bytes: &[u8], least: u64, most: u64) -> Result<()> {
    for word in words(bytes) {
        ensure!(word >= least, "{word} is read after {least} was told");
        ensure!(word <= most, "{word} is read before it was begun ({most})");
    }
    Ok(())
}

/// Whole files of changing length, replaced by rename.
pub fn saves(writer: &Path, reader: &Path, count: u64) -> Result<CallTimes> {
    let (stage, told, looked) = (Stage::default(), Announced::default(), AtomicU64::new(0));
    let records = |value: u64| value % 7 + 1;
    let write = |meter: &mut CallTimes| {
        let (aside, path) = (writer.join(".f.swp"), writer.join("f"));
        for value in 1..=count {
            stage.wait_until(|| looked.load(Ordering::SeqCst) + 4 >= value)?;
            told.begin(value);
            let mut file =
                meter.call("create", || OpenOptions::new().write(true).create_new(true).open(&aside))?;
            for _ in 0..records(value) {
                meter.call("write", || file.write_all(&record(value)))?;
            }
            meter.call("fsync", || file.sync_all())?;
            drop(file);
            meter.call("rename", || fs::rename(&aside, &path))?;
            told.announce(value);
        }
        Ok(())
    };
    let read = |meter: &mut CallTimes| {
        loop {
            let least = told.announced();
            if least == 0 {
                stage.wait_until(|| told.announced() > 0)?;
                continue;
            }
            let bytes = meter.call("open and read", || fs::read(reader.join("f")))?;
            let most = told.begun();
            let value = value_of(&bytes)?;
            let length = u64::try_from(bytes.len())?;
            ensure!(length == records(value) * RECORD_BYTES, "version {value} has {length} bytes");
            check(&bytes, least, most)?;
            looked.store(least, Ordering::SeqCst);
            if least == count {
                return Ok(());
            }
            ensure!(!stage.failed(), "(the other side failed)");
        }
    };
    stage.both(write, read)
}
