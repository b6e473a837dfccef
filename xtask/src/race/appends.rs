//! Races between appends and reads.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, anyhow, ensure};

use super::stage::{CallTimes, Stage};

/// Record lengths: less than a page, a whole page, and partial pages.
const LENGTHS: [usize; 3] = [100, 4096, 6000];
/// Number of bytes already read that a reader reads again.
const AGAIN: usize = 40_000;

/// Both sides append records. On each side a second thread reads the new data, and the old data once more: data never
/// changes after a read, and the final contents equal the data read.
pub fn seen(first: &Path, second: &Path, count: u64) -> Result<CallTimes> {
    let mut meter = CallTimes::default();
    for length in LENGTHS {
        let name = format!("f{length}");
        fs::write(first.join(&name), b"")?;
        let (first, second) = (first.join(&name), second.join(&name));
        let each = count / LENGTHS.len() as u64;
        let (stage, at_work) = (Stage::default(), AtomicU32::new(2));
        let side = |path: &Path, who: u8, meter: &mut CallTimes| {
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| read(path, &stage, &at_work));
                let appended = append(path, &vec![who; length], each, &stage, meter);
                at_work.fetch_sub(1, Ordering::SeqCst);
                let read = reader.join().map_err(|_| anyhow!("it panicked")).and_then(|read| read);
                appended.and(read.context("who reads beside it"))
            })
        };
        let both = stage.both(|meter| side(&first, b'1', meter), |meter| side(&second, b'2', meter));
        meter.add(&both.with_context(|| format!("records of {length} bytes"))?);
        let bytes = fs::read(&first)?;
        ensure!(bytes.len() as u64 == 2 * each * length as u64, "{} bytes in the end", bytes.len());
        for record in bytes.chunks(length) {
            ensure!(record.iter().all(|byte| *byte == record[0]), "a record of {length} is torn");
        }
    }
    Ok(meter)
}

fn append(path: &Path, record: &[u8], count: u64, stage: &Stage, meter: &mut CallTimes) -> Result<()> {
    let mut file = meter.call("open", || OpenOptions::new().append(true).open(path))?;
    for _ in 0..count {
        let written = meter.call("append", || file.write(record))?;
        ensure!(written == record.len(), "{written} bytes were appended");
        if stage.failed() {
            break;
        }
    }
    Ok(())
}

/// Reads until both sides have stopped appending, and once after that.
fn read(path: &Path, stage: &Stage, at_work: &AtomicU32) -> Result<()> {
    let file = File::open(path)?;
    let mut seen = Vec::new();
    loop {
        let is_last = at_work.load(Ordering::SeqCst) == 0;
        look(&file, &mut seen)?;
        if is_last || stage.failed() {
            break;
        }
    }
    let whole = fs::read(path)?;
    ensure!(whole.starts_with(&seen), "what was read is not what is there in the end");
    Ok(())
}

fn look(file: &File, seen: &mut Vec<u8>) -> Result<()> {
    let from = seen.len().saturating_sub(AGAIN);
    let mut bytes = vec![0; 4 * AGAIN];
    let read = file.read_at(&mut bytes, from as u64).context("pread")?;
    let (before, now) = (&seen[from..], &bytes[..read]);
    ensure!(now.len() >= before.len(), "{} bytes are read where there were {}", now.len(), before.len());
    if let Some(at) = (0..before.len()).find(|at| before[*at] != now[*at]) {
        let (was, is) = (char::from(before[at]), char::from(now[at]));
        return Err(anyhow!("byte {} was {was}, and is {is}", from + at));
    }
    let new = now[before.len()..].to_vec();
    seen.extend(new);
    Ok(())
}
