//! Arguments of each request.

use super::{CopyRange, Fault, Forgets, LockRequest, Operation, SetAttr, SetTime};
use crate::abi::{self, flags};
use crate::{Extensions, FileLock, Negotiated, opcode};
use zerocopy::FromBytes;

/// Arguments and extensions not read yet.
pub(super) struct Body<'a, 'n> {
    pub rest: &'a [u8],
    pub extensions: &'a [u8],
    pub agreed: &'n Negotiated,
}

type Decoded<'a> = Result<Operation<'a>, Fault>;

impl<'a> Body<'a, '_> {
    pub fn operation(mut self, number: u32) -> Decoded<'a> {
        match opcode::since(number) {
            Some(since) if since <= self.agreed.minor => {}
            _ => return Ok(Operation::Unknown { opcode: number }),
        }
        match number {
            opcode::INIT => self.init(),
            opcode::DESTROY => Ok(Operation::Destroy),
            opcode::LOOKUP => Ok(Operation::Lookup { name: self.name()? }),
            opcode::FORGET => Ok(Operation::Forget { nlookup: self.take::<abi::ForgetIn>()?.nlookup }),
            opcode::BATCH_FORGET => self.batch_forget(),
            opcode::GETATTR | opcode::STATX | opcode::SETATTR | opcode::ACCESS => self.attributes(number),
            opcode::READLINK => Ok(Operation::ReadLink),
            opcode::SYMLINK | opcode::MKNOD | opcode::MKDIR | opcode::CREATE | opcode::TMPFILE => {
                self.making(number)
            }
            opcode::UNLINK => Ok(Operation::Unlink { name: self.name()? }),
            opcode::RMDIR => Ok(Operation::Rmdir { name: self.name()? }),
            opcode::RENAME | opcode::RENAME2 | opcode::LINK => self.renaming(number),
            opcode::READ | opcode::READDIR | opcode::READDIRPLUS => self.read(number),
            opcode::WRITE => self.write(),
            opcode::STATFS => Ok(Operation::StatFs),
            opcode::SYNCFS => self.take::<abi::SyncFsIn>().map(|_| Operation::SyncFs),
            opcode::SETXATTR => self.set_xattr(),
            opcode::GETXATTR => {
                let size = self.take::<abi::GetXattrIn>()?.size;
                Ok(Operation::GetXattr { name: self.name()?, size })
            }
            opcode::LISTXATTR => Ok(Operation::ListXattr { size: self.take::<abi::GetXattrIn>()?.size }),
            opcode::REMOVEXATTR => Ok(Operation::RemoveXattr { name: self.name()? }),
            opcode::GETLK => Ok(Operation::GetLk(self.lock()?)),
            opcode::SETLK => Ok(Operation::SetLk(self.lock()?)),
            opcode::SETLKW => Ok(Operation::SetLkW(self.lock()?)),
            opcode::INTERRUPT => {
                let id = self.take::<abi::InterruptIn>()?.unique & !abi::UNIQUE_RESEND;
                Ok(Operation::Interrupt { id })
            }
            opcode::IOCTL => self.ioctl(),
            opcode::NOTIFY_REPLY => {
                let retrieved: abi::NotifyRetrieveIn = self.take()?;
                Ok(Operation::NotifyReply { offset: retrieved.offset, data: self.bytes(retrieved.size)? })
            }
            opcode::COPY_FILE_RANGE => Ok(Operation::CopyFileRange(self.copy_range()?)),
            opcode::COPY_FILE_RANGE_64 => Ok(Operation::CopyFileRange64(self.copy_range()?)),
            _ => self.open_file(number),
        }
    }

    fn take<T: FromBytes>(&mut self) -> Result<T, Fault> {
        let (value, rest) = T::read_from_prefix(self.rest).map_err(|_| Fault::Short)?;
        self.rest = rest;
        Ok(value)
    }

    fn bytes(&mut self, len: u32) -> Result<&'a [u8], Fault> {
        let len = usize::try_from(len).map_err(|_| Fault::Short)?;
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Fault::Short)?;
        self.rest = rest;
        Ok(bytes)
    }

    /// Reads up to the next NUL, and skips it.
    fn name(&mut self) -> Result<&'a [u8], Fault> {
        let end = self.rest.iter().position(|&byte| byte == 0).ok_or(Fault::Unterminated)?;
        let name = &self.rest[..end];
        self.rest = &self.rest[end + 1..];
        Ok(name)
    }

    /// INIT; before 7.36 without the second half.
    fn init(mut self) -> Decoded<'a> {
        let [_, minor] = <[u32; 2]>::read_from_prefix(self.rest).map_err(|_| Fault::Short)?.0;
        if minor >= 36 {
            return Ok(Operation::Init(self.take()?));
        }
        let [major, minor, max_readahead, flags] = self.take()?;
        Ok(Operation::Init(abi::InitIn { major, minor, max_readahead, flags, ..abi::InitIn::default() }))
    }

    fn batch_forget(mut self) -> Decoded<'a> {
        let count = self.take::<abi::BatchForgetIn>()?.count;
        let one = u32::try_from(size_of::<abi::ForgetOne>()).map_err(|_| Fault::Short)?;
        let bytes = self.bytes(count.checked_mul(one).ok_or(Fault::Short)?)?;
        Ok(Operation::BatchForget(Forgets::of(bytes)))
    }

    fn attributes(mut self, number: u32) -> Decoded<'a> {
        Ok(match number {
            opcode::GETATTR => {
                let raw: abi::GetAttrIn = self.take()?;
                Operation::GetAttr { fh: (raw.getattr_flags & flags::GETATTR_FH != 0).then_some(raw.fh) }
            }
            opcode::STATX => {
                let raw: abi::StatxIn = self.take()?;
                let fh = (raw.getattr_flags & flags::GETATTR_FH != 0).then_some(raw.fh);
                Operation::Statx { fh, flags: raw.sx_flags, mask: raw.sx_mask }
            }
            opcode::SETATTR => Operation::SetAttr(set_attr(&self.take()?)),
            _ => Operation::Access { mask: self.take::<abi::AccessIn>()?.mask },
        })
    }

    fn making(mut self, number: u32) -> Decoded<'a> {
        let extensions = Extensions::parse(self.extensions).ok_or(Fault::Extension)?;
        Ok(match number {
            opcode::SYMLINK => Operation::Symlink { name: self.name()?, target: self.name()?, extensions },
            opcode::MKNOD => {
                let abi::MknodIn { mode, rdev, umask, .. } = self.take()?;
                Operation::Mknod { name: self.name()?, mode, rdev, umask, extensions }
            }
            opcode::MKDIR => {
                let abi::MkdirIn { mode, umask } = self.take()?;
                Operation::Mkdir { name: self.name()?, mode, umask, extensions }
            }
            opcode::CREATE => {
                let abi::CreateIn { flags, mode, umask, open_flags } = self.take()?;
                let kill_suidgid = open_flags & flags::OPEN_KILL_SUIDGID != 0;
                Operation::Create { name: self.name()?, flags, mode, umask, kill_suidgid, extensions }
            }
            // A name follows, without a meaning.
            _ => {
                let abi::CreateIn { flags, mode, umask, .. } = self.take()?;
                Operation::Tmpfile { flags, mode, umask, extensions }
            }
        })
    }

    fn renaming(mut self, number: u32) -> Decoded<'a> {
        Ok(match number {
            opcode::RENAME => {
                let new_dir = self.take::<abi::RenameIn>()?.newdir;
                Operation::Rename { name: self.name()?, new_dir, new_name: self.name()?, flags: 0 }
            }
            opcode::RENAME2 => {
                let abi::Rename2In { newdir: new_dir, flags, .. } = self.take()?;
                Operation::Rename { name: self.name()?, new_dir, new_name: self.name()?, flags }
            }
            _ => Operation::Link { node: self.take::<abi::LinkIn>()?.oldnodeid, name: self.name()? },
        })
    }

    fn read(mut self, number: u32) -> Decoded<'a> {
        let abi::ReadIn { fh, offset, size, read_flags, lock_owner, flags, .. } = self.take()?;
        Ok(match number {
            opcode::READDIR => Operation::ReadDir { fh, offset, size },
            opcode::READDIRPLUS => Operation::ReadDirPlus { fh, offset, size },
            _ => {
                let lock_owner = (read_flags & flags::READ_LOCKOWNER != 0).then_some(lock_owner);
                Operation::Read { fh, offset, size, flags, lock_owner }
            }
        })
    }

    fn write(mut self) -> Decoded<'a> {
        let raw: abi::WriteIn = self.take()?;
        Ok(Operation::Write {
            fh: raw.fh,
            offset: raw.offset,
            data: self.bytes(raw.size)?,
            flags: raw.flags,
            cached: raw.write_flags & flags::WRITE_CACHE != 0,
            kill_suidgid: raw.write_flags & flags::WRITE_KILL_SUIDGID != 0,
            lock_owner: (raw.write_flags & flags::WRITE_LOCKOWNER != 0).then_some(raw.lock_owner),
        })
    }

    fn set_xattr(mut self) -> Decoded<'a> {
        let raw = if self.agreed.has(flags::init::SETXATTR_EXT) {
            self.take()?
        } else {
            let [size, flags] = self.take::<[u32; 2]>()?;
            abi::SetXattrIn { size, flags, ..abi::SetXattrIn::default() }
        };
        let name = self.name()?;
        let acl_kill_sgid = raw.setxattr_flags & flags::SETXATTR_ACL_KILL_SGID != 0;
        Ok(Operation::SetXattr { name, value: self.bytes(raw.size)?, flags: raw.flags, acl_kill_sgid })
    }

    fn lock(mut self) -> Result<LockRequest, Fault> {
        let abi::LkIn { fh, owner, lk, lk_flags, .. } = self.take()?;
        let lock = FileLock { start: lk.start, end: lk.end, kind: lk.kind, pid: lk.pid };
        Ok(LockRequest { fh, owner, lock, flock: lk_flags & flags::LK_FLOCK != 0 })
    }

    fn ioctl(mut self) -> Decoded<'a> {
        let abi::IoctlIn { fh, flags, cmd, arg, in_size, out_size } = self.take()?;
        Ok(Operation::Ioctl { fh, flags, cmd, arg, data: self.bytes(in_size)?, out_size })
    }

    fn copy_range(mut self) -> Result<CopyRange, Fault> {
        let raw: abi::CopyFileRangeIn = self.take()?;
        Ok(CopyRange {
            fh_in: raw.fh_in,
            offset_in: raw.off_in,
            node_out: raw.nodeid_out,
            fh_out: raw.fh_out,
            offset_out: raw.off_out,
            length: raw.len,
            flags: raw.flags,
        })
    }

    fn open_file(mut self, number: u32) -> Decoded<'a> {
        Ok(match number {
            opcode::OPEN | opcode::OPENDIR => {
                let abi::OpenIn { flags, open_flags } = self.take()?;
                match number {
                    opcode::OPENDIR => Operation::OpenDir { flags },
                    _ => Operation::Open { flags, kill_suidgid: open_flags & flags::OPEN_KILL_SUIDGID != 0 },
                }
            }
            opcode::RELEASE | opcode::RELEASEDIR => {
                let abi::ReleaseIn { fh, flags, release_flags, lock_owner } = self.take()?;
                if number == opcode::RELEASEDIR {
                    return Ok(Operation::ReleaseDir { fh, flags });
                }
                let flush = release_flags & flags::RELEASE_FLUSH != 0;
                let flock_unlock = release_flags & flags::RELEASE_FLOCK_UNLOCK != 0;
                Operation::Release { fh, flags, flush, flock_unlock, lock_owner }
            }
            opcode::FLUSH => {
                let abi::FlushIn { fh, lock_owner, .. } = self.take()?;
                Operation::Flush { fh, lock_owner }
            }
            opcode::FSYNC | opcode::FSYNCDIR => {
                let abi::FsyncIn { fh, fsync_flags, .. } = self.take()?;
                let data_only = fsync_flags & flags::FSYNC_FDATASYNC != 0;
                match number {
                    opcode::FSYNC => Operation::Fsync { fh, data_only },
                    _ => Operation::FsyncDir { fh, data_only },
                }
            }
            opcode::POLL => {
                let abi::PollIn { fh, kh, flags, events } = self.take()?;
                Operation::Poll { fh, kh, flags, events }
            }
            opcode::FALLOCATE => {
                let abi::FallocateIn { fh, offset, length, mode, .. } = self.take()?;
                Operation::Fallocate { fh, mode, offset, length }
            }
            opcode::LSEEK => {
                let abi::LseekIn { fh, offset, whence, .. } = self.take()?;
                Operation::Lseek { fh, offset, whence }
            }
            _ => Operation::Unknown { opcode: number },
        })
    }
}

fn set_attr(raw: &abi::SetAttrIn) -> SetAttr {
    use flags::fattr;
    let has = |bit: u32| raw.valid & bit != 0;
    let time = |set: u32, now: u32, secs: u64, nanos: u32| match (has(set), has(now)) {
        (false, _) => None,
        (true, true) => Some(SetTime::Now),
        (true, false) => Some(SetTime::At((secs.cast_signed(), nanos))),
    };
    SetAttr {
        fh: has(fattr::FH).then_some(raw.fh),
        mode: has(fattr::MODE).then_some(raw.mode),
        uid: has(fattr::UID).then_some(raw.uid),
        gid: has(fattr::GID).then_some(raw.gid),
        size: has(fattr::SIZE).then_some(raw.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, raw.atime, raw.atimensec),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, raw.mtime, raw.mtimensec),
        ctime: has(fattr::CTIME).then_some((raw.ctime.cast_signed(), raw.ctimensec)),
        lock_owner: has(fattr::LOCKOWNER).then_some(raw.lock_owner),
        kill_suidgid: has(fattr::KILL_SUIDGID),
    }
}
