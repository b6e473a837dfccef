//! Packed attributes, without alignment gaps: they are most of an entry's memory.

use nigh_types::{Attr, Timestamp};

/// [`Attr`] in 78 bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(2))]
pub(crate) struct PackedAttr {
    size: u64,
    blocks: u64,
    birth_ns: u64,
    atime: Timestamp,
    mtime: Timestamp,
    ctime: Timestamp,
    nlink: u32,
    uid: u32,
    gid: u32,
    rdev: u32,
    /// Mode bits: the codec refuses larger values.
    mode: u16,
}

impl From<Attr> for PackedAttr {
    fn from(attr: Attr) -> PackedAttr {
        let Attr { size, blocks, mode, nlink, uid, gid, rdev, atime, mtime, ctime, birth_ns } = attr;
        let mode = u16::try_from(mode & 0xffff).unwrap_or(0);
        PackedAttr { size, blocks, birth_ns, atime, mtime, ctime, nlink, uid, gid, rdev, mode }
    }
}

impl From<PackedAttr> for Attr {
    fn from(attr: PackedAttr) -> Attr {
        let PackedAttr { size, blocks, birth_ns, atime, mtime, ctime, nlink, uid, gid, rdev, mode } = attr;
        let mode = u32::from(mode);
        Attr { size, blocks, mode, nlink, uid, gid, rdev, atime, mtime, ctime, birth_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_attr_round_trips_in_78_bytes() {
        let at = |secs| Timestamp { secs, nanos: 999_999_999 };
        let attr = Attr {
            size: u64::MAX,
            blocks: u64::MAX - 1,
            mode: 0o177_777,
            nlink: 1 << 31,
            uid: u32::MAX,
            gid: u32::MAX - 1,
            rdev: 0xf00f_0103,
            atime: at(i64::MIN),
            mtime: at(-1),
            ctime: at(i64::MAX),
            birth_ns: u64::MAX - 2,
        };
        assert_eq!(Attr::from(PackedAttr::from(attr)), attr);
        assert_eq!(size_of::<PackedAttr>(), 78);
    }
}
