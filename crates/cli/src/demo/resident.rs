//! Residency of a file's contents in the page cache.

use anyhow::Result;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

const PAGE: usize = 4096;

/// Whether all of a file's contents are in the page cache (mincore(2)). Nothing is read.
pub fn is_resident(path: &Path) -> Result<bool> {
    let file = File::open(path)?;
    let length = usize::try_from(file.metadata()?.len())?;
    if length == 0 {
        return Ok(true);
    }
    // Larger pages mean fewer flags.
    let mut flags = vec![0_u8; length.div_ceil(PAGE)];
    let (access, kind) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: a new mapping, of which nothing is read.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), length, access, kind, file.as_raw_fd(), 0) };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: `flags` has a byte for each page of the mapping.
    let looked = unsafe { libc::mincore(map, length, flags.as_mut_ptr()) };
    let error = io::Error::last_os_error();
    // SAFETY: nothing else knows of the mapping.
    unsafe { libc::munmap(map, length) };
    if looked != 0 {
        return Err(error.into());
    }
    // SAFETY: it takes no pointers.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE);
    Ok(flags[..length.div_ceil(page)].iter().all(|flag| flag & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn file_just_written_is_resident_until_it_is_dropped() {
        let path = std::env::temp_dir().join(format!("nigh-resident-{}", std::process::id()));
        let mut file = File::create(&path).unwrap();
        file.write_all(&[7; 3 * PAGE + 1]).unwrap();
        file.sync_all().unwrap();
        assert!(is_resident(&path).unwrap());
        // SAFETY: it takes no pointers.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        let dropped = is_resident(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        if rustix::fs::statfs("/tmp").is_ok_and(|fs| fs.f_type != 0x0102_1994) {
            assert!(!dropped, "posix_fadvise drops what is written");
        }
    }
}
