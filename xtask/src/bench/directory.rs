//! Measurements of one large directory: a process of its own that prints the figures as a line of JSON.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use nigh_sim::random::Dice;
use serde_json::{Value, json};

use super::latency;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Look {
    /// A scan, and a scan with telldir after each entry.
    Telldir,
    /// seekdir to random positions, and a readdir at each.
    Seekdir,
    /// telldir after each entry read on a hundred streams: the memory of processes before and after.
    Streams,
    /// Time until the first names arrive, and the last.
    FirstNames,
    /// getdents, and a statx of each name, in listing order.
    FlatRate,
    /// getdents to the end, and a sort of the names: the minimum work of a server whose listing order is not the
    /// disk's.
    Sorted,
}

impl Look {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Look::Telldir => "telldir",
            Look::Seekdir => "seekdir",
            Look::Streams => "streams",
            Look::FirstNames => "first-names",
            Look::FlatRate => "flat-rate",
            Look::Sorted => "sorted",
        }
    }
}

#[derive(clap::Args)]
pub struct Options {
    #[arg(value_enum)]
    look: Look,
    #[arg(long)]
    dir: PathBuf,
    /// Run on the first CPU only.
    #[arg(long)]
    pinned: bool,
    /// Processes whose memory is measured.
    #[arg(long, value_delimiter = ',')]
    processes: Vec<u32>,
    /// List the directories in this directory first, without a stat of any file.
    #[arg(long)]
    before: Option<PathBuf>,
    /// Number of seeks, or telldirs.
    #[arg(long, default_value_t = 20_000)]
    calls: u64,
}

pub fn run(options: &Options) -> Result<bool> {
    if options.pinned {
        latency::pin_all()?;
    }
    let dir = &options.dir;
    let said = match options.look {
        Look::Telldir => telldir(dir)?,
        Look::Seekdir => seekdir(dir, options.calls)?,
        Look::Streams => streams(dir, options)?,
        Look::FirstNames => {
            options.before.iter().try_for_each(|before| list_below(before))?;
            first_names(dir)?
        }
        Look::FlatRate => flat_rate(dir)?,
        Look::Sorted => sorted(dir)?,
    };
    println!("{said}");
    Ok(true)
}

/// A directory stream of the C library.
struct Stream(*mut libc::DIR);

impl Stream {
    fn open(dir: &Path) -> Result<Stream> {
        let path = CString::new(dir.as_os_str().as_bytes())?;
        let stream = unsafe { libc::opendir(path.as_ptr()) };
        ensure!(!stream.is_null(), "{}: {}", dir.display(), io::Error::last_os_error());
        Ok(Stream(stream))
    }

    /// Returns the next name, which is valid until the next call.
    fn next(&mut self) -> Option<&[u8]> {
        let entry = unsafe { libc::readdir64(self.0) };
        (!entry.is_null()).then(|| unsafe { std::ffi::CStr::from_ptr((*entry).d_name.as_ptr()) }.to_bytes())
    }

    fn tell(&mut self) -> libc::c_long {
        unsafe { libc::telldir(self.0) }
    }

    fn seek(&mut self, place: libc::c_long) {
        unsafe { libc::seekdir(self.0, place) }
    }

    fn rewind(&mut self) {
        unsafe { libc::rewinddir(self.0) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        unsafe { libc::closedir(self.0) };
    }
}

fn list_below(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let mut stream = Stream::open(&entry?.path())?;
        while stream.next().is_some() {}
    }
    Ok(())
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 100.0
}

/// Counts durations of entries by powers of two of microseconds, as in `{"<1": 990, "1-2": 10}`.
fn histogram(times: &[Duration]) -> Value {
    let mut counts = std::collections::BTreeMap::<u32, u64>::new();
    for time in times {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        *counts.entry(us.checked_ilog2().map_or(0, |log| log + 1)).or_default() += 1;
    }
    let name = |log: u32| {
        if log == 0 { "<1".to_owned() } else { format!("{}-{}", 1_u64 << (log - 1), 1_u64 << log) }
    };
    let pairs = counts.into_iter().map(|(log, count)| (format!("{:02} {} us", log, name(log)), json!(count)));
    Value::Object(pairs.collect())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The directory is warm; each kind of scan runs five times in turn, and the medians count.
fn telldir(dir: &Path) -> Result<Value> {
    let scan = |tells: bool| -> Result<(u64, Duration)> {
        let (start, mut stream, mut count) = (Instant::now(), Stream::open(dir)?, 0);
        while stream.next().is_some() {
            count += 1;
            if tells {
                std::hint::black_box(stream.tell());
            }
        }
        Ok((count, start.elapsed()))
    };
    let (entries, _) = scan(false)?;
    let (mut plain, mut telling) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        plain.push(scan(false)?.1);
        telling.push(scan(true)?.1);
    }
    let (mut stream, mut each) = (Stream::open(dir)?, Vec::new());
    loop {
        let start = Instant::now();
        if stream.next().is_none() {
            break;
        }
        std::hint::black_box(stream.tell());
        each.push(start.elapsed());
    }
    let (plain, telling) = (median(plain), median(telling));
    let ratio = telling.as_secs_f64() / plain.as_secs_f64();
    Ok(json!({"entries": entries, "plain_ms": ms(plain), "telling_ms": ms(telling), "ratio": ratio,
        "per_entry": histogram(&each)}))
}

fn seekdir(dir: &Path, seeks: u64) -> Result<Value> {
    let (mut stream, mut places, mut dice) = (Stream::open(dir)?, Vec::new(), Dice::new(1));
    loop {
        let place = stream.tell();
        let Some(name) = stream.next() else { break };
        places.push((place, name.to_vec()));
    }
    let mut each = Vec::new();
    for _ in 0..seeks {
        let at = usize::try_from(dice.below(places.len() as u64))?;
        let (place, name) = &places[at];
        let start = Instant::now();
        stream.seek(*place);
        let found = stream.next();
        each.push(start.elapsed());
        ensure!(found == Some(name.as_slice()), "another name is at a place than was there");
    }
    let total: Duration = each.iter().sum();
    let mean_us = total.as_secs_f64() * 1e6 / each.len() as f64;
    let median_us = median(each.clone()).as_secs_f64() * 1e6;
    Ok(json!({"entries": places.len(), "seeks": seeks, "mean_us": mean_us, "median_us": median_us,
        "per_seek": histogram(&each)}))
}

const STREAMS: u64 = 100;

/// Reads so many entries on all streams; then as many again, with telldir after each.
fn streams(dir: &Path, options: &Options) -> Result<Value> {
    let each = options.calls / STREAMS;
    let mut streams = (0..STREAMS).map(|_| Stream::open(dir)).collect::<Result<Vec<Stream>>>()?;
    let resident =
        || options.processes.iter().map(|p| latency::resident_kib(*p)).collect::<Result<Vec<u64>>>();
    for stream in &mut streams {
        (0..each).try_for_each(|_| stream.next().map(drop)).context("too few entries")?;
        stream.rewind();
    }
    let (before, mut places) = (resident()?, Vec::new());
    for stream in &mut streams {
        for _ in 0..each {
            stream.next().context("too few entries")?;
            places.push(stream.tell());
        }
    }
    let behind = resident()?;
    Ok(json!({"streams": STREAMS, "telldirs": places.len(), "kib_before": before, "kib_behind": behind}))
}

fn first_names(dir: &Path) -> Result<Value> {
    let (start, mut stream) = (Instant::now(), Stream::open(dir)?);
    let opened = start.elapsed();
    // `.` and `..` need no request.
    (0..3).try_for_each(|_| stream.next().map(drop)).context("it has no names")?;
    let first = start.elapsed();
    let mut names = 1;
    while stream.next().is_some() {
        names += 1;
    }
    Ok(
        json!({"names": names, "opened_ms": ms(opened), "first_ms": ms(first), "last_ms": ms(start.elapsed())}),
    )
}

fn flat_rate(dir: &Path) -> Result<Value> {
    let (start, mut stream, mut count, mut bytes) = (Instant::now(), Stream::open(dir)?, 0_u64, 0);
    let fd = unsafe { libc::dirfd(stream.0) };
    while let Some(name) = stream.next().map(CString::new) {
        let name = name?;
        let mut stat: libc::statx = unsafe { std::mem::zeroed() };
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        let ret = unsafe { libc::statx(fd, name.as_ptr(), flags, libc::STATX_BASIC_STATS, &raw mut stat) };
        ensure!(ret == 0, "statx: {}", io::Error::last_os_error());
        (count, bytes) = (count + 1, bytes + stat.stx_size);
    }
    let took = start.elapsed();
    Ok(json!({"entries": count, "bytes": bytes, "ms": ms(took), "rate": count as f64 / took.as_secs_f64()}))
}

fn sorted(dir: &Path) -> Result<Value> {
    let (start, mut stream, mut names) = (Instant::now(), Stream::open(dir)?, Vec::new());
    while let Some(name) = stream.next() {
        names.push(name.to_vec());
    }
    let read = start.elapsed();
    names.sort();
    Ok(json!({"names": names.len(), "read_ms": ms(read), "sorted_ms": ms(start.elapsed())}))
}

/// Creates a directory of so many empty files.
pub fn build(dir: &Path, files: u32) -> io::Result<()> {
    fs::create_dir(dir)?;
    (0..files).try_for_each(|i| fs::write(dir.join(format!("file-{i:07}")), b""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_by_powers_of_two() {
        let times = [0, 1, 2, 3, 4, 300].map(Duration::from_micros);
        let wanted =
            json!({"00 <1 us": 1, "01 1-2 us": 1, "02 2-4 us": 2, "03 4-8 us": 1, "09 256-512 us": 1});
        assert_eq!(histogram(&times), wanted);
    }
}
