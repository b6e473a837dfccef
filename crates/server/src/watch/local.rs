//! Filesystems on which the kernel reports every change.

/// Magic numbers of statfs(2), with names. On others, changes may be made elsewhere (NFS, SMB, FUSE and cluster
/// filesystems do not report those: fanotify(7), "Limitations"), or this was not examined. On zfs, `zfs rollback`
/// restores whole earlier states.
const LOCAL: [(u64, &str); 11] = [
    (0xef53, "ext4"), // and ext2, ext3
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0xf2f5_2010, "f2fs"),
    (0xca45_1a4e, "bcachefs"),
    (0x4d44, "vfat"),
    (0x2011_bab0, "exfat"),
    (0x7366_746e, "ntfs3"),
    (0x8584_58f6, "ramfs"),
    (0x3153_464a, "jfs"),
];

/// Whether all changes go through this machine's kernel, which reports them.
pub(crate) fn is_local(magic: u64) -> bool {
    LOCAL.iter().any(|(local, _)| *local == magic)
}

/// Whether a path lookup involves only this machine's kernel. Takes a type name from /proc/self/mountinfo.
pub(crate) fn is_quick(name: &str) -> bool {
    LOCAL.iter().any(|(_, local)| *local == name)
        || matches!(name, "ext2" | "ext3" | "zfs" | "overlay" | "rootfs" | "squashfs" | "erofs" | "devtmpfs")
}

/// Whether a change always gets another ctime than the one read before, however soon it follows (multigrain
/// timestamps, Linux 6.13).
pub(crate) fn has_fine_times(magic: u64, release: (u32, u32)) -> bool {
    release >= (6, 13) && matches!(magic, 0xef53 | 0x5846_5342 | 0x9123_683e | 0x0102_1994)
}

/// Returns the running kernel's release; (0, 0) if it cannot be parsed.
pub(crate) fn kernel_release() -> (u32, u32) {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}
