//! Races on file sizes.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use super::stage::{Announced, CallTimes, Stage};

/// Changes of one file: during the first ones the reader holds a lease on it.
const EACH: u64 = 4;
const LENGTHS: u64 = 199;

fn length(value: u64) -> Result<usize> {
    Ok(usize::try_from(value * 67 % LENGTHS + 1)?)
}

/// One side writes another length and announces it, and then changes another attribute while the other side reads: the
/// reader's kernel is invalidated while it applies the new size.
pub fn sizes(writer: &Path, reader: &Path, count: u64) -> Result<CallTimes> {
    let (stage, told, looked) = (Stage::default(), Announced::default(), AtomicU64::new(0));
    let name = |value: u64| format!("f{}", (value - 1) / EACH);
    let wait = |counter: &dyn Fn() -> u64, least: u64| stage.wait_until(|| counter() >= least);
    let write = |meter: &mut CallTimes| {
        let mut open: Option<(String, File)> = None;
        for value in 1..=count {
            wait(&|| looked.load(Ordering::SeqCst) + 1, value)?;
            let new =
                || OpenOptions::new().write(true).create(true).truncate(false).open(writer.join(name(value)));
            let (of, file) = match open.take().filter(|(of, _)| *of == name(value)) {
                Some(open) => open,
                None => (name(value), meter.call("create", new)?),
            };
            let bytes = vec![u8::try_from(value % 256)?; length(value)?];
            meter.call("ftruncate", || file.set_len(0))?;
            meter.call("pwrite", || file.write_all_at(&bytes, 0))?;
            told.announce(value);
            std::thread::sleep(Duration::from_micros(value * 37 % 300));
            let mode = Permissions::from_mode(if value.is_multiple_of(2) { 0o600 } else { 0o640 });
            meter.call("fchmod", || file.set_permissions(mode))?;
            open = Some((of, file));
        }
        Ok(())
    };
    let read = |meter: &mut CallTimes| {
        let mut open: Option<(String, File)> = None;
        for value in 1..=count {
            wait(&|| told.announced(), value)?;
            let (of, file) = match open.take().filter(|(of, _)| *of == name(value)) {
                Some(open) => open,
                None => (name(value), meter.call("open", || File::open(reader.join(name(value))))?),
            };
            let mut bytes = [0; 4096];
            let read = meter.call("pread", || file.read_at(&mut bytes, 0))?;
            ensure!(
                read == length(value)?,
                "{read} bytes, the first is {}, are read of {} that were told as change {value}",
                bytes[0],
                length(value)?
            );
            let byte = u8::try_from(value % 256)?;
            ensure!(bytes[..read].iter().all(|b| *b == byte), "change {value} reads as {:?}", &bytes[..8]);
            looked.store(value, Ordering::SeqCst);
            open = Some((of, file));
        }
        Ok(())
    };
    stage.both(write, read).context("lengths")
}

/// One side extends a file and announces it. The other side's kernel, which knows the file as empty, extends it
/// further, while another thread reads there: it reads at least the announced data.
pub fn grows(writer: &Path, reader: &Path, count: u64) -> Result<CallTimes> {
    const TOLD: &[u8] = b"told";
    let (stage, told, looked) = (Stage::default(), Announced::default(), AtomicU64::new(0));
    let wait = |counter: &dyn Fn() -> u64, least: u64| stage.wait_until(|| counter() >= least);
    let name = |value: u64| format!("g{value}");
    let write = |meter: &mut CallTimes| {
        for value in 1..=count {
            wait(&|| looked.load(Ordering::SeqCst) + 2, 2 * value)?;
            let file = meter.call("create", || File::create_new(writer.join(name(value))))?;
            told.announce(2 * value - 1);
            wait(&|| looked.load(Ordering::SeqCst), 2 * value - 1)?;
            meter.call("pwrite", || file.write_all_at(TOLD, 0))?;
            told.announce(2 * value);
        }
        Ok(())
    };
    let read = |meter: &mut CallTimes| {
        for value in 1..=count {
            wait(&|| told.announced(), 2 * value - 1)?;
            let open = || OpenOptions::new().read(true).write(true).open(reader.join(name(value)));
            let file = meter.call("open", open)?;
            ensure!(meter.call("fstat", || file.metadata())?.len() == 0, "it is not empty yet");
            looked.store(2 * value - 1, Ordering::SeqCst);
            wait(&|| told.announced(), 2 * value)?;
            let mut bytes = [0; 64];
            let read = std::thread::scope(|scope| {
                let grows = || match value % 2 {
                    0 => file.set_len(100),
                    _ => file.write_all_at(&[b'w'; 8], 0),
                };
                let growing = scope.spawn(grows);
                std::thread::sleep(Duration::from_micros(value * 37 % 1_500));
                let read = meter.call("pread", || file.read_at(&mut bytes, 0));
                growing.join().map_err(|_| anyhow!("a thread panics"))??;
                read
            })?;
            ensure!(
                read >= TOLD.len(),
                "{read} bytes are read of {} that were told, file {value}",
                TOLD.len()
            );
            looked.store(2 * value, Ordering::SeqCst);
        }
        Ok(())
    };
    stage.both(write, read).context("growth")
}
