//! `/proc/self/mountinfo` (proc_pid_mountinfo(5)): the mount table, without access to the mounts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One line of mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    pub parent: u64,
    /// Major and minor number, as in `st_dev`.
    pub device: (u32, u32),
    pub mountpoint: PathBuf,
    pub fstype: String,
    pub source: OsString,
    /// Options of the filesystem, with commas between them.
    pub options: OsString,
}

/// All mounts of this process's namespace, lower ones first; empty if they cannot be read.
#[must_use]
pub fn mounts() -> Vec<Mount> {
    let text = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    text.split(|&byte| byte == b'\n').filter_map(parse).collect()
}

/// Whether anything is mounted exactly at this path (absolute, without symlinks).
#[must_use]
pub fn is_mounted(path: &Path) -> bool {
    topmost(path).is_some()
}

/// The visible mount on a path.
pub(super) fn topmost(path: &Path) -> Option<Mount> {
    mounts().into_iter().rfind(|mount| mount.mountpoint == path)
}

fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let device = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = (device.0.parse().ok()?, device.1.parse().ok()?);
    let mountpoint = PathBuf::from(unescape(fields.nth(1)?));
    // Optional fields end with a lone dash.
    fields.find(|field| *field == b"-")?;
    let fstype = String::from_utf8_lossy(&unescape(fields.next()?).into_vec()).into_owned();
    let source = unescape(fields.next()?);
    let options = fields.next().map(unescape).unwrap_or_default();
    Some(Mount { id, parent, device, mountpoint, fstype, source, options })
}

/// Space, tab, newline, backslash and `#` are encoded as a backslash and three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        match (byte, tail) {
            (b'\\', &[a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ref tail @ ..]) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            _ => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn a_line_is_taken_apart() {
        let line = b"36 35 0:98 /sub /mnt/a\\040b\\134c\\011\xff rw,noatime master:1 shared:2 - fuse.nigh host:/x\\040y rw,user_id=0";
        let mount = parse(line).unwrap();
        assert_eq!((mount.id, mount.parent, mount.device), (36, 35, (0, 98)));
        assert_eq!(mount.mountpoint.as_os_str().as_bytes(), b"/mnt/a b\\c\t\xff");
        assert_eq!((mount.fstype.as_str(), mount.source.as_bytes()), ("fuse.nigh", &b"host:/x y"[..]));
        for len in 0..60 {
            assert_eq!(parse(&line[..len]), None);
        }
    }

    #[test]
    fn a_backslash_that_starts_no_number_stays() {
        for text in ["\\", "\\0", "\\04", "\\09x", "\\400", "a\\"] {
            assert_eq!(unescape(text.as_bytes()).as_bytes(), text.as_bytes());
        }
    }

    #[test]
    fn the_mounts_of_this_machine_can_be_read() {
        assert!(is_mounted(Path::new("/")) && is_mounted(Path::new("/proc")));
        assert!(!is_mounted(Path::new("/proc/self")));
    }
}
