//! The calls of a worker, by descriptors of a window's two directories and of files opened in them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use nigh_sim::history::{
    CELLS, Call, CallResult, File, Kind, LAST_SET_TIME, Label, NAMES, ObservedAttrs, RenameMode, Slot,
};
use nigh_types::Errno;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, SeekFrom, Stat, StatxFlags, Timespec, XattrFlags};

use super::worker::{NOT_FOLLOWED, name};
use crate::listing;
use crate::load::moment;
use crate::race::maps::Map;

const XATTR: &str = "user.word";

/// A file that stays open until the window ends.
pub struct Opened {
    pub file: File,
    pub fd: OwnedFd,
}

/// A window's directories.
pub struct Dirs(pub Vec<OwnedFd>);

/// Offsets of the cells in a window's shared file: two adjacent bytes in one page, and two bytes in another page.
const CELLS_AT: [u16; CELLS as usize] = [7, 8, 4096, 8191];

/// How a read is made, if there are several ways.
#[derive(Clone, Copy)]
pub struct ReadMode {
    /// Bypass the kernel's cached attributes.
    pub forced: bool,
    /// Seek a listing back to an earlier position.
    pub seek: bool,
}

/// The result of a call.
pub struct CallOutcome {
    pub end: u64,
    /// `None`: unknown.
    pub result: Option<CallResult>,
    pub opened: Option<Opened>,
}

type Result<T> = rustix::io::Result<T>;

impl Dirs {
    pub fn make(&self, call: Call, files: &[Opened], way: ReadMode) -> CallOutcome {
        let result = match call {
            Call::Create { slot, label, mode } => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
                return opened(as_maker(label, || self.open(slot, flags, mode)));
            }
            Call::Open { slot } => return opened(self.open(slot, OFlags::RDWR, 0)),
            Call::Stat { slot } => self.stat(slot, way).map(|stat| CallResult::Attributes(seen(&stat))),
            Call::ReadLink { slot } => self.target(slot),
            Call::List { dir } => listing(self.0[usize::from(dir)].as_fd(), way).map(CallResult::Entries),
            _ => match call.file().map(|file| files.iter().find(|opened| opened.file == file)) {
                Some(Some(opened)) => of_file(opened.fd.as_fd(), call, way),
                Some(None) => Err(rustix::io::Errno::BADF),
                None => self.change(call).map(|()| CallResult::Done),
            },
        };
        let answer = result.unwrap_or_else(failed);
        CallOutcome { end: moment(), result: Some(answer), opened: None }
    }

    fn dir(&self, slot: Slot) -> BorrowedFd<'_> {
        self.0[usize::from(slot.dir())].as_fd()
    }

    fn open(&self, slot: Slot, flags: OFlags, mode: u32) -> Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self.dir(slot), name(slot.name()), flags, Mode::from_raw_mode(mode))
    }

    fn stat(&self, slot: Slot, way: ReadMode) -> Result<Stat> {
        if way.forced {
            let flags = NOT_FOLLOWED | AtFlags::STATX_FORCE_SYNC;
            rustix::fs::statx(self.dir(slot), name(slot.name()), flags, StatxFlags::BASIC_STATS)?;
        }
        rustix::fs::statat(self.dir(slot), name(slot.name()), NOT_FOLLOWED)
    }

    fn target(&self, slot: Slot) -> Result<CallResult> {
        let target = rustix::fs::readlinkat(self.dir(slot), name(slot.name()), Vec::new())?;
        let label = target.to_str().ok().and_then(|target| target.parse().ok());
        // 0 is no label: an unreadable target belongs to another file.
        Ok(CallResult::Target(label.unwrap_or(0)))
    }

    /// Makes a change of names.
    fn change(&self, call: Call) -> Result<()> {
        let at = |slot: Slot| (self.dir(slot), name(slot.name()));
        match call {
            Call::Mkdir { slot, label } => {
                let (dir, name) = at(slot);
                as_maker(label, || rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755)))
            }
            Call::Symlink { slot, label } => {
                let (dir, name) = at(slot);
                as_maker(label, || rustix::fs::symlinkat(label.to_string(), dir, name))
            }
            Call::Link { old, new } => {
                let ((dir, name), (new_dir, new_name)) = (at(old), at(new));
                rustix::fs::linkat(dir, name, new_dir, new_name, AtFlags::empty())
            }
            Call::Unlink { slot } => rustix::fs::unlinkat(at(slot).0, at(slot).1, AtFlags::empty()),
            Call::Rmdir { slot } => rustix::fs::unlinkat(at(slot).0, at(slot).1, AtFlags::REMOVEDIR),
            Call::Rename { old, new, how } => {
                let ((dir, name), (new_dir, new_name)) = (at(old), at(new));
                let flags = match how {
                    RenameMode::Plain => RenameFlags::empty(),
                    RenameMode::NoReplace => RenameFlags::NOREPLACE,
                    RenameMode::Exchange => RenameFlags::EXCHANGE,
                };
                rustix::fs::renameat_with(dir, name, new_dir, new_name, flags)
            }
            _ => Err(rustix::io::Errno::NOSYS),
        }
    }
}

/// Stores into a map with write-back, or loads from it.
pub fn of_map(map: &Map, call: Call) -> CallOutcome {
    let result = match call {
        Call::Store { cell, byte } => {
            map.byte(CELLS_AT[usize::from(cell)]).store(byte, Ordering::SeqCst);
            map.sync().map(|()| CallResult::Done)
        }
        Call::Load { cell } => Ok(loaded(map.byte(CELLS_AT[usize::from(cell)]).load(Ordering::SeqCst))),
        _ => Err(std::io::Error::from_raw_os_error(libc::ENOSYS)),
    };
    let errno = |error: std::io::Error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
    let answer = result.unwrap_or_else(|error| CallResult::Failed(errno(error)));
    CallOutcome { end: moment(), result: Some(answer), opened: None }
}

/// Returns the contents of a shared file's cells.
pub fn cells(bytes: &[u8]) -> Vec<(Call, CallResult)> {
    let byte = |at: &u16| bytes.get(usize::from(*at)).copied().unwrap_or(0);
    (0..).zip(&CELLS_AT).map(|(cell, at)| (Call::Load { cell }, loaded(byte(at)))).collect()
}

fn loaded(byte: u8) -> CallResult {
    CallResult::Value(Some(u64::from(byte)).filter(|byte| *byte > 0))
}

/// Creates a file with the label as its group, so that every mount sees its creator.
fn as_maker<T>(label: Label, make: impl FnOnce() -> T) -> T {
    // SAFETY: it changes a number of this thread; root may take any.
    let before = unsafe { libc::setfsgid(label) };
    let made = make();
    // SAFETY: as above; what it was before is a group.
    unsafe { libc::setfsgid(u32::from_ne_bytes(before.to_ne_bytes())) };
    made
}

fn failed(errno: rustix::io::Errno) -> CallResult {
    CallResult::Failed(Errno::from_raw(errno.raw_os_error()))
}

/// Identifies an open file by fstat.
fn opened(result: Result<OwnedFd>) -> CallOutcome {
    let end = moment();
    match result {
        Err(errno) => CallOutcome { end, result: Some(failed(errno)), opened: None },
        Ok(fd) => match rustix::fs::fstat(&fd) {
            Ok(stat) => {
                let file = seen(&stat).file;
                CallOutcome { end, result: Some(CallResult::Opened(file)), opened: Some(Opened { file, fd }) }
            }
            Err(_) => CallOutcome { end, result: None, opened: None },
        },
    }
}

/// Converts a stat result to a history's form.
#[must_use]
pub fn seen(stat: &Stat) -> ObservedAttrs {
    let kind = match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
        rustix::fs::FileType::Directory => Kind::Dir,
        rustix::fs::FileType::Symlink => Kind::Symlink,
        _ => Kind::File,
    };
    ObservedAttrs {
        file: File { label: stat.st_gid, ino: stat.st_ino },
        kind,
        nlink: stat.st_nlink,
        mode: stat.st_mode & 0o7777,
        size: u64::try_from(stat.st_size).unwrap_or(u64::MAX),
        mtime: Some(stat.st_mtime).filter(|secs| *secs <= LAST_SET_TIME),
    }
}

/// Makes a call by a descriptor. A value that no call has written becomes 1, which no call writes.
pub fn of_file(fd: BorrowedFd<'_>, call: Call, way: ReadMode) -> Result<CallResult> {
    match call {
        Call::Fstat { .. } => {
            if way.forced {
                let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
                rustix::fs::statx(fd, "", flags, StatxFlags::BASIC_STATS)?;
            }
            return rustix::fs::fstat(fd).map(|stat| CallResult::Attributes(seen(&stat)));
        }
        Call::Chmod { mode, .. } => rustix::fs::fchmod(fd, Mode::from_raw_mode(mode))?,
        Call::Truncate { size, .. } => rustix::fs::ftruncate(fd, size)?,
        Call::Times { secs, .. } => {
            let at = Timespec { tv_sec: secs, tv_nsec: 0 };
            rustix::fs::futimens(fd, &rustix::fs::Timestamps { last_access: at, last_modification: at })?;
        }
        Call::SetXattr { value, .. } => {
            rustix::fs::fsetxattr(fd, XATTR, value.to_string().as_bytes(), XattrFlags::empty())?;
        }
        Call::RemoveXattr { .. } => match rustix::fs::fremovexattr(fd, XATTR) {
            Err(rustix::io::Errno::NODATA) => {}
            result => result?,
        },
        Call::GetXattr { .. } => {
            let mut bytes = [0_u8; 32];
            return match rustix::fs::fgetxattr(fd, XATTR, &mut bytes) {
                Err(rustix::io::Errno::NODATA) => Ok(CallResult::Value(None)),
                Err(errno) => Err(errno),
                Ok(length) => {
                    let value = std::str::from_utf8(&bytes[..length]).ok();
                    Ok(CallResult::Value(Some(value.and_then(|value| value.parse().ok()).unwrap_or(1))))
                }
            };
        }
        Call::Write { word, .. } => {
            let bytes = word.to_le_bytes();
            if rustix::io::pwrite(fd, &bytes, 0)? != bytes.len() {
                return Err(rustix::io::Errno::NOSPC);
            }
        }
        Call::Read { .. } => {
            let mut bytes = [0_u8; 8];
            let value = match rustix::io::pread(fd, &mut bytes, 0)? {
                0 => None,
                8 => Some(u64::from_le_bytes(bytes)),
                _ => Some(1),
            };
            return Ok(CallResult::Value(value));
        }
        Call::Fsync { .. } => rustix::fs::fsync(fd)?,
        _ => return Err(rustix::io::Errno::NOSYS),
    }
    Ok(CallResult::Done)
}

/// Lists a whole directory in small parts, optionally with a seek back to an entry's cookie, from which the listing
/// continues.
fn listing(dir: BorrowedFd<'_>, way: ReadMode) -> Result<Vec<(u8, u64)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(dir, ".", flags, Mode::empty())?;
    let mut entries = Vec::new();
    let mut back = way.seek;
    loop {
        let (part, end) = listing::part(&dir)?;
        if part.is_empty() {
            return Ok(entries);
        }
        entries.extend(part.into_iter().map(|(bytes, ino)| (number(&bytes), ino)));
        if back && let Some(end) = end {
            // It has read on, and the listing repeats the entries behind that one.
            back = false;
            listing::part(&dir)?;
            rustix::fs::seek(&dir, SeekFrom::Start(end))?;
        }
    }
}

/// Returns a name's number; [`NAMES`] for a name that is not the window's.
fn number(bytes: &[u8]) -> u8 {
    (0..NAMES).find(|number| name(*number).as_bytes() == bytes).unwrap_or(NAMES)
}
