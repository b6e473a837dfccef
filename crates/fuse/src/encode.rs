//! Requests as the kernel sends them: the inverse of [`crate::decode`], for tests, simulation and fuzzing.

#[cfg(test)]
mod golden;

#[cfg(test)]
pub(crate) use golden::golden;

use crate::abi::{self, flags};
use crate::{Header, LockRequest, Negotiated, Operation, SetAttr, SetTime};
use zerocopy::{Immutable, IntoBytes};

/// The bytes of a request under negotiated features.
///
/// Panics if it is longer than 4 GiB, or its extensions than 512 KiB: no kernel sends these.
#[must_use]
pub fn encode(header: &Header, operation: &Operation<'_>, agreed: &Negotiated) -> Vec<u8> {
    let mut request = Request { bytes: vec![0; size_of::<abi::InHeader>()], extlen: 0, agreed };
    request.arguments(operation);
    let raw = abi::InHeader {
        len: u32::try_from(request.bytes.len()).expect("a request below 4 GiB"),
        opcode: operation.opcode(),
        unique: header.unique,
        nodeid: header.nodeid,
        uid: header.uid,
        gid: header.gid,
        pid: header.pid,
        total_extlen: request.extlen,
        padding: 0,
    };
    request.bytes[..size_of::<abi::InHeader>()].copy_from_slice(raw.as_bytes());
    request.bytes
}

struct Request<'n> {
    bytes: Vec<u8>,
    /// Units of 8 bytes.
    extlen: u16,
    agreed: &'n Negotiated,
}

impl Request<'_> {
    fn put(&mut self, part: &(impl IntoBytes + Immutable)) -> &mut Self {
        self.bytes.extend_from_slice(part.as_bytes());
        self
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn name(&mut self, name: &[u8]) -> &mut Self {
        self.bytes(name).bytes(&[0])
    }

    fn extensions(&mut self, extensions: &[u8]) {
        if self.agreed.minor >= 38 {
            self.bytes(extensions);
            self.extlen = u16::try_from(extensions.len() / 8).expect("extensions below 512 KiB");
        }
    }

    fn arguments(&mut self, operation: &Operation<'_>) {
        match *operation {
            Operation::Init(init) => {
                let len = if init.minor >= 36 { size_of_val(&init) } else { abi::COMPAT_INIT_IN_SIZE };
                self.bytes(&init.as_bytes()[..len]);
            }
            Operation::Lookup { name }
            | Operation::Unlink { name }
            | Operation::Rmdir { name }
            | Operation::RemoveXattr { name } => {
                self.name(name);
            }
            Operation::Forget { nlookup } => {
                self.put(&abi::ForgetIn { nlookup });
            }
            Operation::BatchForget(forgets) => {
                let count = u32::try_from(forgets.iter().count()).expect("a request below 4 GiB");
                self.put(&abi::BatchForgetIn { count, dummy: 0 }).bytes(forgets.as_bytes());
            }
            Operation::SetAttr(set) => {
                self.put(&set_attr(&set));
            }
            Operation::Symlink { .. }
            | Operation::Mknod { .. }
            | Operation::Mkdir { .. }
            | Operation::Create { .. }
            | Operation::Tmpfile { .. } => self.making(operation),
            Operation::Rename { name, new_dir, new_name, flags: 0 } => {
                self.put(&abi::RenameIn { newdir: new_dir }).name(name).name(new_name);
            }
            Operation::Rename { name, new_dir, new_name, flags } => {
                let raw = abi::Rename2In { newdir: new_dir, flags, padding: 0 };
                self.put(&raw).name(name).name(new_name);
            }
            Operation::Link { node, name } => {
                self.put(&abi::LinkIn { oldnodeid: node }).name(name);
            }
            Operation::SetXattr { name, value, flags, acl_kill_sgid } => {
                let setxattr_flags = if acl_kill_sgid { flags::SETXATTR_ACL_KILL_SGID } else { 0 };
                let raw = abi::SetXattrIn { size: len(value), flags, setxattr_flags, padding: 0 };
                let extended = self.agreed.has(flags::init::SETXATTR_EXT);
                let size = if extended { size_of_val(&raw) } else { abi::COMPAT_SETXATTR_IN_SIZE };
                self.bytes(&raw.as_bytes()[..size]).name(name).bytes(value);
            }
            Operation::GetXattr { name, size } => {
                self.put(&abi::GetXattrIn { size, padding: 0 }).name(name);
            }
            _ => self.fixed(operation),
        }
    }

    fn making(&mut self, operation: &Operation<'_>) {
        match *operation {
            Operation::Symlink { name, target, extensions } => {
                self.name(name).name(target).extensions(extensions.as_bytes());
            }
            Operation::Mknod { name, mode, rdev, umask, extensions } => {
                let raw = abi::MknodIn { mode, rdev, umask, padding: 0 };
                self.put(&raw).name(name).extensions(extensions.as_bytes());
            }
            Operation::Mkdir { name, mode, umask, extensions } => {
                self.put(&abi::MkdirIn { mode, umask }).name(name).extensions(extensions.as_bytes());
            }
            Operation::Create { name, flags, mode, umask, kill_suidgid, extensions } => {
                let open_flags = if kill_suidgid { flags::OPEN_KILL_SUIDGID } else { 0 };
                let raw = abi::CreateIn { flags, mode, umask, open_flags };
                self.put(&raw).name(name).extensions(extensions.as_bytes());
            }
            Operation::Tmpfile { flags, mode, umask, extensions } => {
                let raw = abi::CreateIn { flags, mode, umask, open_flags: 0 };
                self.put(&raw).name(b"/").extensions(extensions.as_bytes());
            }
            _ => unreachable!("a request that makes an inode"),
        }
    }

    fn fixed(&mut self, operation: &Operation<'_>) {
        match *operation {
            Operation::GetAttr { fh } => self.put(&abi::GetAttrIn {
                getattr_flags: if fh.is_some() { flags::GETATTR_FH } else { 0 },
                dummy: 0,
                fh: fh.unwrap_or(0),
            }),
            Operation::Statx { fh, flags, mask } => self.put(&abi::StatxIn {
                getattr_flags: if fh.is_some() { flags::GETATTR_FH } else { 0 },
                reserved: 0,
                fh: fh.unwrap_or(0),
                sx_flags: flags,
                sx_mask: mask,
            }),
            Operation::Open { flags, kill_suidgid } => {
                let open_flags = if kill_suidgid { flags::OPEN_KILL_SUIDGID } else { 0 };
                self.put(&abi::OpenIn { flags, open_flags })
            }
            Operation::OpenDir { flags } => self.put(&abi::OpenIn { flags, open_flags: 0 }),
            Operation::Read { .. } | Operation::ReadDir { .. } | Operation::ReadDirPlus { .. } => {
                self.read(operation)
            }
            Operation::Write { fh, offset, data, flags, cached, kill_suidgid, lock_owner } => {
                let write_flags = if cached { flags::WRITE_CACHE } else { 0 }
                    | if kill_suidgid { flags::WRITE_KILL_SUIDGID } else { 0 }
                    | if lock_owner.is_some() { flags::WRITE_LOCKOWNER } else { 0 };
                let (size, lock_owner) = (len(data), lock_owner.unwrap_or(0));
                self.put(&abi::WriteIn { fh, offset, size, write_flags, lock_owner, flags, padding: 0 })
                    .bytes(data)
            }
            Operation::Flush { fh, lock_owner } => {
                self.put(&abi::FlushIn { fh, unused: 0, padding: 0, lock_owner })
            }
            Operation::Release { fh, flags, flush, flock_unlock, lock_owner } => {
                let release_flags = if flush { flags::RELEASE_FLUSH } else { 0 }
                    | if flock_unlock { flags::RELEASE_FLOCK_UNLOCK } else { 0 };
                self.put(&abi::ReleaseIn { fh, flags, release_flags, lock_owner })
            }
            Operation::ReleaseDir { fh, flags } => {
                self.put(&abi::ReleaseIn { fh, flags, ..abi::ReleaseIn::default() })
            }
            Operation::Fsync { fh, data_only } | Operation::FsyncDir { fh, data_only } => {
                let fsync_flags = if data_only { flags::FSYNC_FDATASYNC } else { 0 };
                self.put(&abi::FsyncIn { fh, fsync_flags, padding: 0 })
            }
            _ => self.rare(operation),
        };
    }

    fn read(&mut self, operation: &Operation<'_>) -> &mut Self {
        let raw = match *operation {
            Operation::Read { fh, offset, size, flags, lock_owner } => abi::ReadIn {
                fh,
                offset,
                size,
                read_flags: if lock_owner.is_some() { flags::READ_LOCKOWNER } else { 0 },
                lock_owner: lock_owner.unwrap_or(0),
                flags,
                padding: 0,
            },
            Operation::ReadDir { fh, offset, size } | Operation::ReadDirPlus { fh, offset, size } => {
                abi::ReadIn { fh, offset, size, ..abi::ReadIn::default() }
            }
            _ => unreachable!("a request that reads"),
        };
        self.put(&raw)
    }

    fn rare(&mut self, operation: &Operation<'_>) -> &mut Self {
        match *operation {
            Operation::SyncFs => self.put(&abi::SyncFsIn { padding: 0 }),
            Operation::ListXattr { size } => self.put(&abi::GetXattrIn { size, padding: 0 }),
            Operation::Access { mask } => self.put(&abi::AccessIn { mask, padding: 0 }),
            Operation::GetLk(lock) | Operation::SetLk(lock) | Operation::SetLkW(lock) => self.put(&lk(&lock)),
            Operation::Interrupt { id } => self.put(&abi::InterruptIn { unique: id }),
            Operation::Ioctl { fh, flags, cmd, arg, data, out_size } => {
                self.put(&abi::IoctlIn { fh, flags, cmd, arg, in_size: len(data), out_size }).bytes(data)
            }
            Operation::Poll { fh, kh, flags, events } => self.put(&abi::PollIn { fh, kh, flags, events }),
            Operation::NotifyReply { offset, data } => self
                .put(&abi::NotifyRetrieveIn { offset, size: len(data), ..abi::NotifyRetrieveIn::default() })
                .bytes(data),
            Operation::Fallocate { fh, mode, offset, length } => {
                self.put(&abi::FallocateIn { fh, offset, length, mode, padding: 0 })
            }
            Operation::Lseek { fh, offset, whence } => {
                self.put(&abi::LseekIn { fh, offset, whence, padding: 0 })
            }
            Operation::CopyFileRange(range) | Operation::CopyFileRange64(range) => {
                self.put(&abi::CopyFileRangeIn {
                    fh_in: range.fh_in,
                    off_in: range.offset_in,
                    nodeid_out: range.node_out,
                    fh_out: range.fh_out,
                    off_out: range.offset_out,
                    len: range.length,
                    flags: range.flags,
                })
            }
            _ => self,
        }
    }
}

fn len(data: &[u8]) -> u32 {
    u32::try_from(data.len()).expect("a request below 4 GiB")
}

fn lk(lock: &LockRequest) -> abi::LkIn {
    let range = lock.lock;
    abi::LkIn {
        fh: lock.fh,
        owner: lock.owner,
        lk: abi::RawFileLock { start: range.start, end: range.end, kind: range.kind, pid: range.pid },
        lk_flags: if lock.flock { flags::LK_FLOCK } else { 0 },
        padding: 0,
    }
}

fn set_attr(set: &SetAttr) -> abi::SetAttrIn {
    use flags::fattr;
    let time = |time: Option<SetTime>, at: u32, now: u32| match time {
        None => (0, (0, 0)),
        Some(SetTime::Now) => (at | now, (0, 0)),
        Some(SetTime::At((secs, nanos))) => (at, (secs.cast_unsigned(), nanos)),
    };
    let (atime_valid, atime) = time(set.atime, fattr::ATIME, fattr::ATIME_NOW);
    let (mtime_valid, mtime) = time(set.mtime, fattr::MTIME, fattr::MTIME_NOW);
    let (ctime_valid, ctime) = time(set.ctime.map(SetTime::At), fattr::CTIME, 0);
    let bit = |set: bool, bit: u32| if set { bit } else { 0 };
    abi::SetAttrIn {
        valid: bit(set.fh.is_some(), fattr::FH)
            | bit(set.mode.is_some(), fattr::MODE)
            | bit(set.uid.is_some(), fattr::UID)
            | bit(set.gid.is_some(), fattr::GID)
            | bit(set.size.is_some(), fattr::SIZE)
            | bit(set.lock_owner.is_some(), fattr::LOCKOWNER)
            | bit(set.kill_suidgid, fattr::KILL_SUIDGID)
            | atime_valid
            | mtime_valid
            | ctime_valid,
        fh: set.fh.unwrap_or(0),
        size: set.size.unwrap_or(0),
        lock_owner: set.lock_owner.unwrap_or(0),
        atime: atime.0,
        atimensec: atime.1,
        mtime: mtime.0,
        mtimensec: mtime.1,
        ctime: ctime.0,
        ctimensec: ctime.1,
        mode: set.mode.unwrap_or(0),
        uid: set.uid.unwrap_or(0),
        gid: set.gid.unwrap_or(0),
        ..abi::SetAttrIn::default()
    }
}
