//! Listings in small parts, between which directories change.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::fs::RawDir;
use rustix::io::Result;

/// Names and their inodes, and the cookie of the last entry read if there is one.
pub type Part = (Vec<(Vec<u8>, u64)>, Option<u64>);

/// What getdents(2) gives into a buffer for two or three names, without `.` and `..`. Empty only at the end.
///
/// # Errors
/// Those of getdents.
pub fn part(dir: impl AsFd) -> Result<Part> {
    let mut buffer = [MaybeUninit::uninit(); 80];
    loop {
        let mut raw = RawDir::new(&dir, &mut buffer);
        let (mut entries, mut last) = (Vec::new(), None);
        while let Some(entry) = raw.next() {
            let entry = entry?;
            last = Some(entry.next_entry_cookie());
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                entries.push((name.to_vec(), entry.ino()));
            }
            if raw.is_buffer_empty() {
                break;
            }
        }
        if !entries.is_empty() || last.is_none() {
            return Ok((entries, last));
        }
    }
}
