//! Listings in small parts, so that directories can change between the parts.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::fs::RawDir;
use rustix::io::Result;

/// Names and their inodes, and the cookie of the last entry read, if any.
pub type ListingChunk = (Vec<(Vec<u8>, u64)>, Option<u64>);

/// Returns the result of getdents(2) with a buffer for two or three names, without `.` and `..`. Empty only at the
/// end.
///
/// # Errors
/// Errors of getdents.
pub fn part(dir: impl AsFd) -> Result<ListingChunk> {
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
