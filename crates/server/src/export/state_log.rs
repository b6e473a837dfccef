//! Durable state of an export: one small file of records.
//!
//! Records are only appended: the key of its cookies, the secret of its node ids, the device index of each
//! filesystem, and the short number of each large inode number. So the file is a log of 40-byte records, each with a
//! checksum: `kind u8, 3 zero bytes, crc32c u32 (of all other bytes), a u64, b [u8; 16], c u64`, little-endian. The
//! file is created by renaming a complete one into place. A torn last record is cut off. Values are used only after
//! [`Log::sync`] has returned.

use crate::os::file_lock;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

/// Length of a record in bytes.
const LENGTH: usize = 40;

/// A record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Record {
    /// The first record: version of the file, and key of the export's cookies.
    Key { version: u64, key: [u8; 16] },
    /// Device index of a filesystem or subvolume.
    Device { index: u64, uuid: [u8; 16], subvolume: u64 },
    /// Short number, below 2^48, of an inode number on a device. `index` is the device index, 0x7ffe for the main
    /// filesystem.
    Number { short: u64, index: u64, ino: u64 },
    /// Secret of the MAC in node ids. It never leaves the server.
    Secret { key: [u8; 16] },
}

/// The file, open for appending.
#[derive(Debug)]
pub(crate) struct Log {
    file: File,
    pending: Vec<u8>,
}

impl Log {
    /// Reads the file at `path`, or creates it with `first`. Locks the file for the log's lifetime; fails with
    /// `EWOULDBLOCK` if another server holds the lock.
    pub(crate) fn open(path: &Path, first: Record) -> io::Result<(Log, Vec<Record>)> {
        Log::open_within(path, first, file_lock::PATIENCE)
    }

    /// Like [`Log::open`], waiting at most `patience` for the lock.
    fn open_within(path: &Path, first: Record, patience: Duration) -> io::Result<(Log, Vec<Record>)> {
        if !path.exists() {
            let made = path.with_extension("new");
            let mut file = File::create(&made)?;
            file.write_all(&encode(first))?;
            file.sync_all()?;
            std::fs::rename(&made, path)?;
            if let Some(parent) = path.parent() {
                File::open(parent)?.sync_all()?;
            }
        }
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        file_lock::lock_exclusively(&file, patience)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let records: Vec<Record> = bytes.chunks_exact(LENGTH).map_while(decode).collect();
        let whole = (records.len() * LENGTH) as u64;
        if !matches!(records.first(), Some(Record::Key { version: 1, .. })) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a state file of this version"));
        }
        if (bytes.len() as u64) - whole >= (2 * LENGTH) as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the state file is damaged in its middle",
            ));
        }
        file.set_len(whole)?;
        file.seek(SeekFrom::Start(whole))?;
        Ok((Log { file, pending: Vec::new() }, records))
    }

    /// Appends a record with the next [`Log::sync`].
    pub(crate) fn push(&mut self, record: Record) {
        self.pending.extend_from_slice(&encode(record));
    }

    /// Returns the secret in `records`. A file without one (new, or of an earlier version) durably gets `fresh`.
    pub(crate) fn secret(&mut self, records: &[Record], fresh: [u8; 16]) -> io::Result<[u8; 16]> {
        let known = records.iter().find_map(|record| match record {
            Record::Secret { key } => Some(*key),
            _ => None,
        });
        if let Some(key) = known {
            return Ok(key);
        }
        self.push(Record::Secret { key: fresh });
        self.sync()?;
        Ok(fresh)
    }

    /// Makes pushed records durable. After an error they stay pending.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let at = self.file.stream_position()?;
        if let Err(error) = self.file.write_all(&self.pending).and_then(|()| self.file.sync_data()) {
            self.file.set_len(at)?;
            self.file.seek(SeekFrom::Start(at))?;
            return Err(error);
        }
        self.pending.clear();
        Ok(())
    }
}

fn encode(record: Record) -> [u8; LENGTH] {
    let (kind, a, b, c): (u8, u64, [u8; 16], u64) = match record {
        Record::Key { version, key } => (1, version, key, 0),
        Record::Device { index, uuid, subvolume } => (2, index, uuid, subvolume),
        Record::Number { short, index, ino } => {
            let mut b = [0; 16];
            b[..8].copy_from_slice(&index.to_le_bytes());
            (3, short, b, ino)
        }
        Record::Secret { key } => (4, 0, key, 0),
    };
    let mut out = [0; LENGTH];
    out[0] = kind;
    out[8..16].copy_from_slice(&a.to_le_bytes());
    out[16..32].copy_from_slice(&b);
    out[32..40].copy_from_slice(&c.to_le_bytes());
    let sum = crc32c::crc32c(&out);
    out[4..8].copy_from_slice(&sum.to_le_bytes());
    out
}

fn decode(bytes: &[u8]) -> Option<Record> {
    let mut bytes: [u8; LENGTH] = bytes.try_into().ok()?;
    let number = |part: &[u8]| part.iter().rev().fold(0_u64, |n, &byte| (n << 8) | u64::from(byte));
    let sum = number(&bytes[4..8]);
    bytes[4..8].fill(0);
    if u64::from(crc32c::crc32c(&bytes)) != sum {
        return None;
    }
    let (a, c) = (number(&bytes[8..16]), number(&bytes[32..40]));
    let b: [u8; 16] = bytes[16..32].try_into().ok()?;
    match bytes[0] {
        1 => Some(Record::Key { version: a, key: b }),
        2 => Some(Record::Device { index: a, uuid: b, subvolume: c }),
        3 => Some(Record::Number { short: a, index: number(&b[..8]), ino: c }),
        4 => Some(Record::Secret { key: b }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Record = Record::Key { version: 1, key: [7; 16] };

    #[test]
    fn state_records_persist_and_first_key_wins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids");
        let added = [
            Record::Device { index: 3, uuid: [9; 16], subvolume: 256 },
            Record::Number { short: 5, index: 3, ino: u64::MAX },
        ];
        {
            let (mut log, records) = Log::open(&path, KEY).unwrap();
            assert_eq!(records, [KEY]);
            added.into_iter().for_each(|r| log.push(r));
            log.sync().unwrap();
        }
        let (_, records) = Log::open(&path, Record::Key { version: 1, key: [8; 16] }).unwrap();
        assert_eq!(records, [KEY, added[0], added[1]]);
    }

    #[test]
    fn torn_state_record_is_cut_off_and_damage_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids");
        let more = Record::Number { short: 1, index: 2, ino: 3 };
        {
            let (mut log, _) = Log::open(&path, KEY).unwrap();
            (0..4).for_each(|_| log.push(more));
            log.sync().unwrap();
        }
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 7]).unwrap();
        {
            let (mut log, records) = Log::open(&path, KEY).unwrap();
            assert_eq!(records.len(), 4);
            log.push(more);
            log.sync().unwrap();
        }
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        let mut bad = whole;
        bad[LENGTH + 20] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        assert!(Log::open(&path, KEY).is_err());
    }

    #[test]
    fn a_file_without_a_secret_gets_one_and_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids");
        let more = Record::Number { short: 1, index: 2, ino: 3 };
        {
            let (mut log, records) = Log::open(&path, KEY).unwrap();
            assert_eq!(log.secret(&records, [5; 16]).unwrap(), [5; 16]);
            log.push(more);
            log.sync().unwrap();
        }
        let (mut log, records) = Log::open(&path, KEY).unwrap();
        assert_eq!(records, [KEY, Record::Secret { key: [5; 16] }, more]);
        assert_eq!(log.secret(&records, [6; 16]).unwrap(), [5; 16]);
    }

    #[test]
    fn two_servers_do_not_share_a_state_log() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids");
        let first = Log::open(&path, KEY).unwrap();
        let refused = Log::open_within(&path, KEY, Duration::ZERO);
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(first);
        assert!(Log::open(&path, KEY).is_ok());
    }
}
