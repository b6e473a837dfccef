//! File handles built from inode numbers, to open an inode by number alone. See docs/decisions/0035-file-handles.md.
//!
//! With generation 0, a handle of ext4, f2fs or btrfs matches any inode with the number (`ext4_nfs_get_inode`,
//! `btrfs_get_dentry`). XFS compares the generation (`xfs_nfs_get_inode`), and reports it to privileged processes.

use crate::export::handle::FileHandle;
use crate::os::error::Result;
use crate::os::filesystem::is_xfs;
use rustix::fd::{AsRawFd, OwnedFd};

/// Handle layout of a filesystem, detected from the handle of a directory with known number.
#[derive(Clone, Debug)]
pub(crate) enum HandleLayout {
    /// u32 number, u32 generation. `told`: the generation must be the inode's.
    Ino32 { told: bool },
    /// XFS: u64 number, u32 generation.
    Ino64,
    /// btrfs: u64 number, u64 subvolume, u32 generation.
    Subvolume { own: u64 },
}

/// `FILEID_INO32_GEN`
const SHORT: i32 = 1;
/// `FILEID_INO32_GEN | XFS_FILEID_TYPE_64FLAG`
const LONG: i32 = 0x81;
/// `FILEID_BTRFS_WITHOUT_PARENT`
const BTRFS: i32 = 0x4d;

impl HandleLayout {
    /// Detects the layout. `directory` has the number `ino`. Returns `None` if handles cannot be built from numbers.
    pub(crate) fn of(directory: &OwnedFd, ino: u64) -> Option<HandleLayout> {
        let handle = FileHandle::plain(directory).ok()?;
        let xfs = is_xfs(directory);
        let (kind, bytes) = handle.parts();
        match (kind, bytes.len()) {
            (SHORT, 8) if u64::from(u32_at(bytes, 0)?) == ino => Some(HandleLayout::Ino32 { told: xfs }),
            (LONG, 12) if xfs && u64_at(bytes, 0)? == ino => Some(HandleLayout::Ino64),
            (BTRFS, 20) if u64_at(bytes, 0)? == ino => {
                Some(HandleLayout::Subvolume { own: u64_at(bytes, 8)? })
            }
            _ => None,
        }
    }

    /// Builds a handle of the inode with this number. `subvolume`: `None` means the directory's own.
    pub(crate) fn handle(
        &self,
        mount: &OwnedFd,
        ino: u64,
        subvolume: Option<u64>,
    ) -> Result<Option<FileHandle>> {
        let generation = |told: bool| if told { generation_of(mount, ino) } else { Ok(Some(0)) };
        let (kind, bytes) = match self {
            HandleLayout::Ino32 { told } => {
                let (Ok(short), Some(generation)) = (u32::try_from(ino), generation(*told)?) else {
                    return Ok(None);
                };
                (SHORT, [short.to_ne_bytes(), generation.to_ne_bytes()].concat())
            }
            HandleLayout::Ino64 => {
                let Some(generation) = generation(true)? else { return Ok(None) };
                (LONG, [&ino.to_ne_bytes()[..], &generation.to_ne_bytes()].concat())
            }
            HandleLayout::Subvolume { own } => {
                let subvolume = subvolume.unwrap_or(*own);
                (BTRFS, [&ino.to_ne_bytes()[..], &subvolume.to_ne_bytes(), &[0; 4]].concat())
            }
        };
        Ok(FileHandle::from_kernel(kind, &bytes))
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// `struct xfs_bulkstat_req` with room for one inode (192 bytes).
#[repr(C, align(8))]
struct Bulk {
    ino: u64,
    flags: u32,
    icount: u32,
    ocount: u32,
    agno: u32,
    reserved: [u64; 5],
    /// `bs_ino`
    found: u64,
    sizes_and_times: [u64; 7],
    /// `bs_gen`
    generation: u32,
    rest: [u32; 31],
}

/// Returns the generation of an XFS inode; `None` if no inode has the number. Requires privilege.
fn generation_of(mount: &OwnedFd, ino: u64) -> Result<Option<u32>> {
    const XFS_IOC_BULKSTAT: libc::Ioctl = 0x8040_587f_u32 as libc::Ioctl;
    let mut bulk = Bulk {
        ino,
        flags: 0,
        icount: 1,
        ocount: 0,
        agno: 0,
        reserved: [0; 5],
        found: 0,
        sizes_and_times: [0; 7],
        generation: 0,
        rest: [0; 31],
    };
    // SAFETY: the buffer has room for the one requested inode: the first with this number or a larger one.
    if unsafe { libc::ioctl(mount.as_raw_fd(), XFS_IOC_BULKSTAT, &raw mut bulk) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok((bulk.ocount == 1 && bulk.found == ino).then_some(bulk.generation))
}

const _: () = assert!(size_of::<Bulk>() == 64 + 192);
