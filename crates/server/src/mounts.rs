//! Which filesystems an export shows.

use rustc_hash::FxHashSet;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The devices, `major:minor` as mountinfo numbers them, of the filesystem on which `path` lies and of
/// all that is mounted below it.
pub(crate) fn devices_below(path: &Path) -> io::Result<FxHashSet<String>> {
    let path = path.canonicalize()?;
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(select(&table, path.as_os_str().as_bytes()))
}

fn select(table: &[u8], path: &[u8]) -> FxHashSet<String> {
    let mut below = FxHashSet::default();
    let mut holds: Option<(usize, String)> = None;
    for line in table.split(|&b| b == b'\n') {
        let fields: Vec<&[u8]> = line.split(|&b| b == b' ').collect();
        let [_, _, device, _, mount_point, ..] = fields[..] else { continue };
        let device = String::from_utf8_lossy(device).into_owned();
        let mount_point = unescape(mount_point);
        if lies_in(path, &mount_point) {
            // The longest one holds the path; of equal ones the last is on top.
            if holds.as_ref().is_none_or(|(length, _)| mount_point.len() >= *length) {
                holds = Some((mount_point.len(), device));
            }
        } else if lies_in(&mount_point, path) {
            below.insert(device);
        }
    }
    below.extend(holds.map(|(_, device)| device));
    below
}

fn lies_in(path: &[u8], dir: &[u8]) -> bool {
    dir == b"/" || path.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// mountinfo writes space, tab, newline and backslash as `\ooo`.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut at = 0;
    while at < field.len() {
        let octal = field.get(at + 1..at + 4).and_then(|d| std::str::from_utf8(d).ok());
        match octal.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) if field[at] == b'\\' => {
                out.push(byte);
                at += 4;
            }
            _ => {
                out.push(field[at]);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"20 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        21 20 0:30 / /srv rw - tmpfs none rw\n\
        22 21 0:31 / /srv/with\\040space rw - tmpfs none rw\n\
        23 20 8:1 /home /srvx rw - ext4 /dev/sda1 rw\n";

    fn devices(path: &str) -> Vec<String> {
        let mut all: Vec<_> = select(TABLE, path.as_bytes()).into_iter().collect();
        all.sort();
        all
    }

    #[test]
    fn an_export_shows_its_own_filesystem_and_those_below() {
        assert_eq!(devices("/srv"), ["0:30", "0:31"]);
        assert_eq!(devices("/srv/with space/x"), ["0:31"]);
        assert_eq!(devices("/srvx/y"), ["8:1"]);
        assert_eq!(devices("/"), ["0:30", "0:31", "8:1"]);
    }
}
