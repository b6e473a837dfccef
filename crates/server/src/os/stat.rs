//! statx(2), and the identity of an inode.

use crate::os::error::Result;
use nigh_lease::Object;
use nigh_types::{Attr, Timestamp};
use rustix::fs::{AtFlags, Statx, StatxFlags, StatxTimestamp};
use std::os::fd::AsFd;

/// The statx result for one inode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stat {
    pub(crate) attr: Attr,
    pub(crate) ino: u64,
    pub(crate) dev: Dev,
    /// Birth time in nanoseconds; 0 if there is none.
    pub(crate) birth_ns: u64,
    /// Mount id, never reused unless `known_anew`.
    pub(crate) mount: u64,
    /// The inode is the root of a mount whose id may be reused (Linux before 6.8).
    pub(crate) known_anew: bool,
    /// Subvolume (btrfs, bcachefs; Linux 6.10), 0 elsewhere.
    pub(crate) subvolume: u64,
}

/// `st_dev` as (major, minor); it changes over boots and remounts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Dev(pub(crate) u32, pub(crate) u32);

const STATX_SUBVOL: u32 = 0x8000;
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;
const STATX_ATTR_MOUNT_ROOT: u64 = 0x2000;

fn wanted() -> StatxFlags {
    StatxFlags::BASIC_STATS
        | StatxFlags::BTIME
        | StatxFlags::MNT_ID
        | StatxFlags::from_bits_retain(STATX_SUBVOL | STATX_MNT_ID_UNIQUE)
}

/// Reads the inode of a descriptor; `O_PATH` is enough.
pub(crate) fn of_fd(fd: impl AsFd) -> Result<Stat> {
    Ok(Stat::new(&rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, wanted())?))
}

/// Reads `name` in `dir`, without following a symlink; at a mount point the mounted root.
pub(crate) fn of_name(dir: impl AsFd, name: &[u8]) -> Result<Stat> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    Ok(Stat::new(&rustix::fs::statx(dir, name, flags, wanted())?))
}

impl Stat {
    /// Returns the lease identity of the inode, equal for all exports. `overlay`: birth times change at the first
    /// write.
    pub(crate) fn object(&self, overlay: bool) -> Object {
        let device = (u64::from(self.dev.0) << 32) | u64::from(self.dev.1);
        Object {
            filesystem: device ^ self.subvolume.rotate_left(44),
            ino: self.ino,
            birth: if overlay { 0 } else { self.birth_ns },
        }
    }

    /// Whether both describe one inode.
    pub(crate) fn is_same(&self, other: &Stat) -> bool {
        (self.dev, self.subvolume, self.ino) == (other.dev, other.subvolume, other.ino)
    }

    fn new(x: &Statx) -> Stat {
        let birth_ns = if x.stx_mask & StatxFlags::BTIME.bits() == 0 { 0 } else { nanos(x.stx_btime) };
        Stat {
            attr: Attr {
                size: x.stx_size,
                blocks: x.stx_blocks,
                mode: u32::from(x.stx_mode),
                nlink: x.stx_nlink,
                uid: x.stx_uid,
                gid: x.stx_gid,
                rdev: encode_dev(x.stx_rdev_major, x.stx_rdev_minor),
                atime: timestamp(x.stx_atime),
                mtime: timestamp(x.stx_mtime),
                ctime: timestamp(x.stx_ctime),
                birth_ns,
            },
            ino: x.stx_ino,
            dev: Dev(x.stx_dev_major, x.stx_dev_minor),
            birth_ns,
            mount: x.stx_mnt_id,
            known_anew: x.stx_mask & STATX_MNT_ID_UNIQUE == 0
                && x.stx_attributes.bits() & STATX_ATTR_MOUNT_ROOT != 0,
            subvolume: if x.stx_mask & STATX_SUBVOL == 0 { 0 } else { x.stx_subvol },
        }
    }
}

fn timestamp(t: StatxTimestamp) -> Timestamp {
    Timestamp { secs: t.tv_sec, nanos: t.tv_nsec.min(999_999_999) }
}

fn nanos(t: StatxTimestamp) -> u64 {
    u64::try_from(t.tv_sec).map_or(0, |s| s.wrapping_mul(1_000_000_000).wrapping_add(u64::from(t.tv_nsec)))
}

/// Encodes a device number in Linux's 32-bit form (`new_encode_dev`).
fn encode_dev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// Decodes a device number from the 32-bit form (`new_decode_dev`).
pub(crate) fn decode_dev(encoded: u32) -> rustix::fs::Dev {
    let major = (encoded & 0x000f_ff00) >> 8;
    let minor = (encoded & 0xff) | ((encoded >> 12) & 0x000f_ff00);
    rustix::fs::makedev(major, minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_their_encoding() {
        for (major, minor) in [(0, 0), (8, 1), (259, 300), (4095, 0xf_ffff)] {
            assert_eq!(decode_dev(encode_dev(major, minor)), rustix::fs::makedev(major, minor));
        }
    }

    #[test]
    fn stat_of_descriptor_and_of_name_identify_one_inode() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "123").unwrap();
        let fd = std::fs::File::open(dir.path()).unwrap();
        let (by_fd, by_name) =
            (of_fd(std::fs::File::open(dir.path().join("f")).unwrap()), of_name(&fd, b"f"));
        let (by_fd, by_name) = (by_fd.unwrap(), by_name.unwrap());
        assert_eq!((by_fd.ino, by_fd.dev, by_fd.birth_ns), (by_name.ino, by_name.dev, by_name.birth_ns));
        assert_eq!(by_name.attr.size, 3);
    }
}
