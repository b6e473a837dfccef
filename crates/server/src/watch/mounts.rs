//! Changes of mounts below exports. They cause no fanotify event, but /proc/self/mountinfo shows them.

use super::Watch;
use super::group::MarkStrategy;
use super::local::{is_local, is_quick};
use crate::os::own_mounts::unescape;
use crate::os::stat;
use nigh_lease::{Change, LeaseKey};
use nigh_types::{LeaseScope, Name};
use rustix::fs::{CWD, Mode, OFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek};

/// One mount.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Mount {
    /// Id of the parent mount.
    parent: u64,
    point: Vec<u8>,
    /// `major:minor`.
    device: (u32, u32),
    /// See [`is_quick`].
    quick: bool,
}

/// The mount table, by mount id.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Table(BTreeMap<u64, Mount>);

impl Table {
    pub(super) fn read(mut file: &File) -> io::Result<Table> {
        let mut text = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut text)?;
        Ok(Table::parse(&text))
    }

    /// Parses the format in proc(5): `ID PARENT MAJOR:MINOR ROOT POINT … - TYPE …`. Malformed lines are skipped:
    /// names are arbitrary bytes, and a user with the right to mount chooses some.
    fn parse(text: &[u8]) -> Table {
        let line = |line: &[u8]| {
            let separator = line.windows(3).position(|three| three == b" - ")?;
            let mut fields = line[..separator].split(|&byte| byte == b' ');
            let (id, parent) = (decimal(fields.next()?)?, decimal(fields.next()?)?);
            let (major, minor) = str::from_utf8(fields.next()?).ok()?.split_once(':')?;
            let point = unescape(fields.nth(1)?);
            let device = (major.parse().ok()?, minor.parse().ok()?);
            let kind = line[separator + 3..].split(|&byte| byte == b' ').next()?;
            let quick = str::from_utf8(kind).is_ok_and(is_quick);
            Some((id, Mount { parent, point, device, quick }))
        };
        Table(text.split(|&byte| byte == b'\n').filter_map(line).collect())
    }

    /// Returns mounts that are in only one of the tables.
    fn differing(&self, other: &Table) -> Vec<Mount> {
        let gone = self.0.iter().filter(|(id, mount)| other.0.get(id) != Some(mount));
        let new = other.0.iter().filter(|(id, mount)| self.0.get(id) != Some(mount));
        gone.chain(new).map(|(_, mount)| mount.clone()).collect()
    }
}

/// Returns the device of the filesystem that contains a mount point. Returns `None` if the path leads through a mount
/// that depends on another machine or a program: a lookup could block on it, and would keep it from being unmounted.
fn stands_on(mount: &Mount, tables: [&Table; 2]) -> Option<(u32, u32)> {
    /// Maximum depth of stacked mounts.
    const DEPTH: u32 = 256;
    let above = |mount: &Mount| tables.iter().find_map(|table| table.0.get(&mount.parent)).cloned();
    let first = above(mount)?;
    let device = first.device;
    let mut at = Some(first);
    for _ in 0..DEPTH {
        match at {
            None => return Some(device),
            Some(mount) if !mount.quick => return None,
            // The root mount may be its own parent.
            Some(mount) => at = above(&mount).filter(|parent| *parent != mount),
        }
    }
    None
}

fn number((major, minor): (u32, u32)) -> u64 {
    (u64::from(major) << 32) | u64::from(minor)
}

fn decimal(field: &[u8]) -> Option<u64> {
    str::from_utf8(field).ok()?.parse().ok()
}

impl Watch {
    /// Recalls the names of changed mount points. If the tables are equal, a mount was replaced by one with equal
    /// data, and its names are unknown.
    pub(super) fn mounts_changed(self: &Watch, before: &Table, now: &Table) {
        let differing = before.differing(now);
        let groups = self.all_groups();
        let mut changes = Vec::new();
        for mount in &differing {
            let on = stands_on(mount, [now, before]).map(number);
            // On other filesystems every grant has a time limit.
            if on.is_some_and(|on| groups.iter().any(|(_, group)| group.filesystem == on)) {
                changes.extend(names_at(&mount.point).into_iter().flatten());
            }
        }
        for some in changes.chunks(256) {
            self.leases.with_table(|table, now| {
                let change = table.handle_change(now, None, some);
                table.handle_done(now, change);
            });
        }
        for (_, group) in groups {
            let is_it = |mount: &Mount| group.filesystem == number(mount.device);
            let touched = differing.is_empty() || differing.iter().any(is_it);
            if touched && let MarkStrategy::Objects(_) = group.strategy {
                group.remark_all();
            }
        }
    }
}

/// Returns the changes for a mount point: its name and its directory's attributes. `None` if the directory must not
/// be accessed.
fn names_at(point: &[u8]) -> Option<[Change; 2]> {
    let slash = point.iter().rposition(|&byte| byte == b'/')?;
    let name = Name::new(&point[slash + 1..]).ok()?;
    let parent = if slash == 0 { &b"/"[..] } else { &point[..slash] };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, parent, flags, Mode::empty()).ok()?;
    let kind = rustix::fs::fstatfs(&dir).ok()?.f_type;
    // On other filesystems grants have a time limit, and an access may block on another machine.
    if !u64::try_from(kind).is_ok_and(is_local) {
        return None;
    }
    let object = stat::of_fd(&dir).ok()?.object(false);
    let change =
        |covers, names| Change { key: LeaseKey { object, covers }, names, writes: false, can_update: false };
    Some([change(LeaseScope::Directory, vec![name]), change(LeaseScope::Attributes, Vec::new())])
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "25 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
        26 25 0:23 / /mnt/a\\040b rw shared:1 - tmpfs t rw\nnonsense\n27 x\n";

    #[test]
    fn mount_table_difference_lists_added_and_removed_mounts() {
        let before = Table::parse(BEFORE.as_bytes());
        assert_eq!(before.0.len(), 2);
        let mount = Mount { parent: 25, point: b"/mnt/a b".to_vec(), device: (0, 23), quick: true };
        assert_eq!(before.0[&26], mount);
        assert!(before.differing(&before).is_empty());
        let now = Table::parse(BEFORE.replace("/mnt/a\\040b", "/mnt/c").as_bytes());
        let points: Vec<Vec<u8>> = before.differing(&now).into_iter().map(|mount| mount.point).collect();
        assert_eq!(points, [b"/mnt/a b".to_vec(), b"/mnt/c".to_vec()]);
        assert_eq!(unescape(b"a\\134b\\0"), b"a\\b\\0");
    }

    /// Malformed text in another user's mount, which ordinary users can make.
    #[test]
    fn mount_table_with_non_utf8_entry_keeps_other_mounts() {
        let mut lines = b"30 25 0:40 / /mnt/\xff rw - fuse.x\xff \xfe rw\n".to_vec();
        lines.extend_from_slice(BEFORE.as_bytes());
        let table = Table::parse(&lines[..]);
        assert_eq!(table.0.keys().copied().collect::<Vec<_>>(), [25, 26, 30]);
        assert_eq!((&table.0[&30].point[..], table.0[&30].quick), (&b"/mnt/\xff"[..], false));
    }

    #[test]
    fn mount_points_behind_remote_mounts_are_not_accessed() {
        let lines = "25 1 254:0 / / rw - ext4 /dev/vda rw\n\
            26 25 0:40 / /mnt rw - fuse.nigh nigh rw\n\
            27 26 0:41 / /mnt/a rw - tmpfs t rw\n\
            28 27 0:42 / /mnt/a/b rw - tmpfs t rw\n\
            29 25 0:43 / /srv rw - xfs /dev/vdb rw\n\
            30 29 0:44 / /srv/x rw - nfs4 host:/ rw\n";
        let table = Table::parse(lines.as_bytes());
        let on = |id: u64| stands_on(&table.0[&id], [&table, &Table::default()]);
        assert_eq!(on(26), Some((254, 0)), "it stands on the root");
        assert_eq!((on(27), on(28)), (None, None), "the way there goes through a mount of ours");
        assert_eq!(on(30), Some((0, 43)));
        assert_eq!(on(25), None, "the root stands nowhere");
    }
}
