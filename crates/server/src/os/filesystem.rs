//! Identity of a mounted filesystem, stable over boots and remounts.

use crate::os::stat::{Dev, Stat};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// Properties of the filesystem or subvolume that contains an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Filesystem {
    /// `None` if no identity outlives the mount (an old tmpfs, a pseudo filesystem, a lower layer of an overlay).
    pub(crate) identity: Option<Identity>,
    /// An overlay: birth times change at copy-up, so they identify nothing.
    pub(crate) overlay: bool,
    pub(crate) kind: u64,
}

/// UUID and subvolume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Identity {
    pub(crate) uuid: [u8; 16],
    pub(crate) subvolume: u64,
}

impl Identity {
    /// Whether both are subvolumes of one filesystem. btrfs mixes the subvolume into `f_fsid` (`btrfs_statfs`).
    pub(crate) fn is_beside(self, other: Identity) -> bool {
        let btrfs = |id: Identity| {
            let (kind, fsid) = id.uuid.split_at(8);
            let fsid = u64::from_le_bytes(fsid.try_into().ok()?);
            let is_fsid = kind == BTRFS_SUPER_MAGIC.to_le_bytes();
            is_fsid.then_some(fsid ^ id.subvolume >> 32 ^ id.subvolume << 32)
        };
        self.uuid == other.uuid || btrfs(self).is_some_and(|base| btrfs(other) == Some(base))
    }
}

const OVERLAYFS_SUPER_MAGIC: u64 = 0x794c_7630;
const BTRFS_SUPER_MAGIC: u64 = 0x9123_683e;
const XFS_SUPER_MAGIC: u64 = 0x5846_5342;
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Identifies the filesystem of an `O_PATH` descriptor with the given stat.
pub(crate) fn identify(fd: impl AsFd, stat: &Stat) -> std::io::Result<Filesystem> {
    let (kind, fsid) = magic_and_fsid(fd.as_fd())?;
    let overlay = kind == OVERLAYFS_SUPER_MAGIC;
    if overlay && !stat.attr.is_dir() {
        // If a file's device differs from its directory's, the inode number belongs to a layer.
        return Ok(Filesystem { identity: None, overlay, kind });
    }
    let mut subvolume = stat.subvolume;
    if kind == BTRFS_SUPER_MAGIC && subvolume == 0 {
        subvolume = fsid; // btrfs mixes the subvolume into it
    }
    let uuid = open_for_ioctl(fd, stat)
        .and_then(|open| uuid_by_ioctl(&open))
        .or_else(|| uuid_by_device(stat.dev))
        .or_else(|| uuid_by_fsid(kind, fsid));
    Ok(Filesystem { identity: uuid.map(|uuid| Identity { uuid, subvolume }), overlay, kind })
}

impl Filesystem {
    /// Name for display and for a state directory.
    pub(crate) fn label(&self) -> &'static str {
        match self.kind {
            OVERLAYFS_SUPER_MAGIC => "overlayfs",
            TMPFS_MAGIC => "tmpfs",
            BTRFS_SUPER_MAGIC => "btrfs",
            XFS_SUPER_MAGIC => "xfs",
            0xef53 => "ext4",
            0x6969 => "nfs",
            0x6573_5546 => "fuse",
            _ => "this filesystem",
        }
    }

    /// Whether its inodes vanish with the mount.
    pub(crate) fn in_memory(&self) -> bool {
        self.kind == TMPFS_MAGIC
    }
}

/// Whether the inode lies on XFS.
pub(crate) fn is_xfs(fd: impl AsFd) -> bool {
    kind_of(fd).is_ok_and(|kind| kind == XFS_SUPER_MAGIC)
}

/// Returns the filesystem magic number from statfs(2).
pub(crate) fn kind_of(fd: impl AsFd) -> std::io::Result<u64> {
    Ok(magic_and_fsid(fd)?.0)
}

fn magic_and_fsid(fd: impl AsFd) -> std::io::Result<(u64, u64)> {
    // SAFETY: statfs64 is plain data, fully written by a successful call on a live descriptor.
    let buffer = unsafe {
        let mut buffer: libc::statfs64 = std::mem::zeroed();
        if libc::fstatfs64(fd.as_fd().as_raw_fd(), &raw mut buffer) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        buffer
    };
    // SAFETY: the kernel's fsid is two ints, which libc hides.
    let [low, high]: [u32; 2] = unsafe { std::mem::transmute(buffer.f_fsid) };
    Ok((buffer.f_type.cast_unsigned(), (u64::from(high) << 32) | u64::from(low)))
}

fn open_for_ioctl(fd: impl AsFd, stat: &Stat) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    if stat.attr.is_dir() {
        return rustix::fs::openat(fd, c".", flags | OFlags::DIRECTORY, Mode::empty()).ok();
    }
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    (stat.attr.kind() == nigh_types::Kind::File)
        .then(|| rustix::fs::open(path, flags, Mode::empty()).ok())
        .flatten()
}

/// `FS_IOC_GETFSUUID` (Linux 6.9).
fn uuid_by_ioctl(fd: &OwnedFd) -> Option<[u8; 16]> {
    const FS_IOC_GETFSUUID: libc::Ioctl = 0x8011_1500_u32 as libc::Ioctl;
    let mut buffer = [0_u8; 17];
    // SAFETY: the ioctl writes a length and at most 16 bytes.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_GETFSUUID, buffer.as_mut_ptr()) };
    if result != 0 || buffer[0] == 0 || buffer[1..].iter().all(|&b| b == 0) {
        return None;
    }
    buffer[1..].try_into().ok()
}

/// Looks the UUID up in `/dev/disk/by-uuid`, which udev maintains.
fn uuid_by_device(dev: Dev) -> Option<[u8; 16]> {
    let dev = rustix::fs::makedev(dev.0, dev.1);
    for entry in std::fs::read_dir("/dev/disk/by-uuid").ok()?.flatten() {
        if std::fs::metadata(entry.path()).is_ok_and(|m| m.rdev() == dev) {
            let mut uuid = [0; 16];
            let name = entry.file_name();
            let digits = name.to_str()?.chars().filter_map(|c| c.to_digit(16)).take(32);
            for (place, digit) in digits.enumerate() {
                uuid[place / 2] = (uuid[place / 2] << 4) | u8::try_from(digit).unwrap_or(0);
            }
            return Some(uuid);
        }
    }
    None
}

/// Derives an identity from `f_fsid` of statfs(2), where that is made from the UUID (XFS makes it from the device
/// number).
fn uuid_by_fsid(kind: u64, fsid: u64) -> Option<[u8; 16]> {
    if fsid == 0 || kind == XFS_SUPER_MAGIC || kind == OVERLAYFS_SUPER_MAGIC {
        return None;
    }
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&kind.to_le_bytes());
    uuid[8..].copy_from_slice(&fsid.to_le_bytes());
    Some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filesystem_identity_is_equal_for_all_its_inodes() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "").unwrap();
        let open = |path: &std::path::Path| {
            let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
            let stat = crate::os::stat::of_fd(&fd).unwrap();
            identify(&fd, &stat).unwrap()
        };
        let (a, b) = (open(dir.path()), open(&dir.path().join("f")));
        if !a.overlay {
            assert_eq!(a, b);
        }
    }
}
