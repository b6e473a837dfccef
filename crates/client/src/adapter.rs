//! Translation of a FUSE request into an operation: decodes it and calls the driver. It makes no decisions.

use crate::driver::Driver;
use crate::interrupts::Interrupts;
use crate::reply::ReplyFormat;
use nigh_cache::{Caller, Fh, LockSpan, Op};
use nigh_fuse::{CopyRange, Header, LockRequest, Negotiated, Operation, Reply, decode, opcode};
use nigh_types::{
    Access, Cookie, Errno, Kind, LockKind, Name, OpId, SetAttr, SetTime, Timestamp, WriteFlags,
};

const ROOT: u64 = nigh_fuse::abi::ROOT_ID;
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
const RENAME_WHITEOUT: u32 = 4;
const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC32_GETFLAGS: u32 = 0x8004_6601;

/// Handles one request.
pub(crate) fn receive(driver: &Driver, interrupts: &Interrupts, agreed: &Negotiated, bytes: &[u8]) {
    let (header, operation) = match decode(bytes, agreed) {
        Ok(decoded) => decoded,
        Err(error) => {
            tracing::error!(target: "nigh::kernel", %error);
            if error.unique != 0 && opcode::expects_reply(error.opcode) {
                refuse(driver, error.unique, Errno::IO);
            }
            return;
        }
    };
    driver.count(operation.opcode());
    let root = driver.root();
    let real = |node: u64| if node == ROOT { root } else { node };
    match operation {
        Operation::Forget { nlookup } => {
            driver.with(|core, _| core.cache.handle_forget(real(header.nodeid), nlookup))
        }
        Operation::BatchForget(forgets) => driver.with(|core, _| {
            for (node, count) in forgets.iter() {
                core.cache.handle_forget(real(node), count);
            }
        }),
        Operation::Interrupt { id } => interrupt(driver, interrupts, header.unique, OpId(id)),
        Operation::Destroy | Operation::NotifyReply { .. } => {}
        _ if driver.events.replay_filter.is_replay_process(header.pid)
            && driver.answer_replay(&header, &operation) => {}
        _ => match translate(root, &header, &operation, agreed)
            .and_then(|asked| driver.ids.map_request(asked))
        {
            Ok((shape, op)) => {
                let group = operation.extensions().groups().next();
                let caller =
                    Caller { uid: header.uid, gid: header.gid, pid: header.pid, group, credentials: None };
                driver.operate(header.unique, OpId(header.id()), caller, shape, op);
            }
            Err(errno) => refuse(driver, header.unique, errno),
        },
    }
}

fn refuse(driver: &Driver, unique: u64, errno: Errno) {
    if let Err(error) = Reply::error(unique, errno.raw()).send(&*driver.transport) {
        tracing::warn!(target: "nigh::kernel", %error, unique, "an answer was refused");
    }
}

/// If the request is not known to wait, another thread may hold it: EAGAIN makes the kernel send INTERRUPT again.
fn interrupt(driver: &Driver, interrupts: &Interrupts, unique: u64, op: OpId) {
    if driver.caller_of(op).is_some() {
        driver.note_signal(op);
        interrupts.watch(op);
    } else {
        refuse(driver, unique, Errno::AGAIN);
    }
}

type Translated = Result<(ReplyFormat, Op), Errno>;

fn name(bytes: &[u8]) -> Result<Name, Errno> {
    Name::new(bytes).map_err(|why| match why {
        nigh_types::BadName::TooLong => Errno::NAMETOOLONG,
        nigh_types::BadName::Empty | nigh_types::BadName::Forbidden => Errno::INVAL,
    })
}

fn access(flags: u32, truncate_allowed: bool) -> (Access, bool) {
    let has = |flag: i32| flags & flag.cast_unsigned() != 0;
    let mode = flags & libc::O_ACCMODE.cast_unsigned();
    let access = Access {
        read: mode != libc::O_WRONLY.cast_unsigned(),
        write: mode != libc::O_RDONLY.cast_unsigned(),
        truncate: truncate_allowed && has(libc::O_TRUNC),
        direct: has(libc::O_DIRECT),
        sync: has(libc::O_DSYNC),
        append: has(libc::O_APPEND),
    };
    (access, access.append)
}

fn translate(root: u64, header: &Header, operation: &Operation<'_>, agreed: &Negotiated) -> Translated {
    let ino = if header.nodeid == ROOT { root } else { header.nodeid };
    let natural = |op| Ok((ReplyFormat::Natural, op));
    match *operation {
        Operation::Lookup { name: b"." } => natural(Op::LookupSelf { ino }),
        Operation::Lookup { name: b".." } => natural(Op::LookupParent { ino }),
        Operation::Lookup { name: n } => natural(Op::Lookup { dir: ino, name: name(n)? }),
        Operation::GetAttr { .. } => natural(Op::GetAttr { ino }),
        Operation::Statx { .. } => Ok((ReplyFormat::Statx, Op::GetAttr { ino })),
        Operation::ReadLink => natural(Op::ReadLink { ino }),
        Operation::Open { flags, .. } => {
            let (access, append) = access(flags, true);
            natural(Op::Open { ino, access, append })
        }
        Operation::Read { fh, offset, size, .. } => natural(Op::Read { ino, fh: Fh(fh), offset, size }),
        Operation::Write { fh, offset, data, flags, cached, kill_suidgid, .. } => natural(Op::Write {
            ino,
            fh: Fh(fh),
            offset,
            data: data.to_vec(),
            flags: WriteFlags {
                append: flags.cast_signed() & libc::O_APPEND != 0,
                kill_suidgid,
                write_back: cached,
                ..WriteFlags::default()
            },
        }),
        Operation::Flush { lock_owner, .. } => natural(Op::Flush { ino, owner: lock_owner }),
        Operation::Release { fh, flock_unlock, lock_owner, .. } => {
            natural(Op::Release { fh: Fh(fh), flock: flock_unlock.then_some(lock_owner) })
        }
        Operation::GetLk(lock) => test_lock(ino, &lock),
        Operation::SetLk(lock) => set_lock(ino, &lock, false),
        Operation::SetLkW(lock) => set_lock(ino, &lock, true),
        Operation::Fsync { fh, data_only } => natural(Op::Fsync { ino, fh: Some(Fh(fh)), data_only }),
        Operation::FsyncDir { data_only, .. } => natural(Op::Fsync { ino, fh: None, data_only }),
        Operation::OpenDir { .. } => natural(Op::OpenDir { ino }),
        Operation::ReadDir { fh, offset, size } => page(ino, fh, offset, size, false),
        Operation::ReadDirPlus { fh, offset, size } => page(ino, fh, offset, size, true),
        Operation::ReleaseDir { fh, .. } => natural(Op::ReleaseDir { fh: Fh(fh) }),
        Operation::StatFs => natural(Op::StatFs { ino }),
        Operation::GetXattr { name, size } => natural(Op::GetXattr { ino, name: name.to_vec(), size }),
        Operation::ListXattr { size } => {
            Ok((ReplyFormat::XattrNames { pid: header.pid }, Op::ListXattr { ino, size }))
        }
        Operation::Lseek { fh, offset, whence } => seek(ino, fh, offset, whence),
        Operation::Ioctl { cmd: FS_IOC_GETFLAGS | FS_IOC32_GETFLAGS, out_size, .. } => {
            Ok((ReplyFormat::Ioctl { out_size }, Op::GetFlags { ino }))
        }
        Operation::Ioctl { .. } => Err(Errno::NOTTY),
        _ => translate_change(root, ino, operation, agreed),
    }
}

fn page(ino: u64, fh: u64, offset: u64, size: u32, plus: bool) -> Translated {
    Ok((
        ReplyFormat::Page { size, plus },
        Op::ReadDir { ino, fh: Fh(fh), offset: Cookie(offset), size, plus },
    ))
}

fn seek(ino: u64, fh: u64, offset: u64, whence: u32) -> Translated {
    let data = match i32::try_from(whence) {
        Ok(libc::SEEK_DATA) => true,
        Ok(libc::SEEK_HOLE) => false,
        _ => return Err(Errno::INVAL),
    };
    Ok((ReplyFormat::Natural, Op::Seek { ino, fh: Fh(fh), offset, data }))
}

fn set_lock(ino: u64, asked: &LockRequest, wait: bool) -> Translated {
    let span = span(asked)?;
    let op = match lock_kind(asked)? {
        Some(kind) => Op::SetLock { ino, fh: Fh(asked.fh), span, kind, pid: asked.lock.pid, wait },
        None => Op::Unlock { ino, span },
    };
    Ok((ReplyFormat::Natural, op))
}

fn test_lock(ino: u64, asked: &LockRequest) -> Translated {
    let kind = lock_kind(asked)?.ok_or(Errno::INVAL)?;
    Ok((ReplyFormat::Natural, Op::TestLock { ino, span: span(asked)?, kind }))
}

fn span(asked: &LockRequest) -> Result<LockSpan, Errno> {
    let (start, end) = (asked.lock.start, asked.lock.end);
    if start > end {
        return Err(Errno::INVAL);
    }
    Ok(LockSpan { owner: asked.owner, flock: asked.flock, start, end })
}

/// `None`: unlock.
fn lock_kind(asked: &LockRequest) -> Result<Option<LockKind>, Errno> {
    match i32::try_from(asked.lock.kind) {
        Ok(libc::F_RDLCK) => Ok(Some(LockKind::Read)),
        Ok(libc::F_WRLCK) => Ok(Some(LockKind::Write)),
        Ok(libc::F_UNLCK) => Ok(None),
        _ => Err(Errno::INVAL),
    }
}

fn translate_change(root: u64, ino: u64, operation: &Operation<'_>, agreed: &Negotiated) -> Translated {
    let real = |node: u64| if node == ROOT { root } else { node };
    let natural = |op| Ok((ReplyFormat::Natural, op));
    match *operation {
        Operation::SetAttr(set) => natural(Op::SetAttr { ino, fh: set.fh.map(Fh), set: set_attr(&set) }),
        Operation::Symlink { name: n, target, .. } => {
            natural(Op::Symlink { dir: ino, name: name(n)?, target: target.to_vec() })
        }
        Operation::Mknod { name: n, mode, rdev, umask, .. } => {
            let kind = Kind::of_mode(mode).map_err(|_| Errno::INVAL)?;
            natural(Op::Mknod { dir: ino, name: name(n)?, kind, mode: mode & 0o7777, umask, rdev })
        }
        Operation::Mkdir { name: n, mode, umask, .. } => {
            natural(Op::Mkdir { dir: ino, name: name(n)?, mode: mode & 0o7777, umask })
        }
        Operation::Unlink { name: n } => natural(Op::Unlink { dir: ino, name: name(n)? }),
        Operation::Rmdir { name: n } => natural(Op::Rmdir { dir: ino, name: name(n)? }),
        Operation::Rename { name: n, new_dir, new_name, flags } => {
            let others = flags & (RENAME_NOREPLACE | RENAME_WHITEOUT);
            let known = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT;
            if flags & !known != 0 || flags & RENAME_EXCHANGE != 0 && others != 0 {
                return Err(Errno::INVAL);
            }
            natural(Op::Rename {
                from: ino,
                name: name(n)?,
                to: real(new_dir),
                new_name: name(new_name)?,
                no_replace: flags & RENAME_NOREPLACE != 0,
                exchange: flags & RENAME_EXCHANGE != 0,
                whiteout: flags & RENAME_WHITEOUT != 0,
            })
        }
        Operation::Link { node, name: n } => natural(Op::Link { ino: real(node), dir: ino, name: name(n)? }),
        Operation::Create { name: n, flags, mode, umask, .. } => {
            let (access, append) = access(flags, true);
            let exclusive = flags & libc::O_EXCL.cast_unsigned() != 0;
            let mode = mode & 0o7777;
            natural(Op::Create { dir: ino, name: name(n)?, mode, umask, exclusive, access, append })
        }
        Operation::Tmpfile { flags, mode, umask, .. } => {
            let (access, _) = access(flags, false);
            natural(Op::Tmpfile { dir: ino, mode: mode & 0o7777, umask, access })
        }
        Operation::SetXattr { name, value, flags, acl_kill_sgid } => Ok((
            ReplyFormat::Empty,
            Op::SetXattr { ino, name: name.to_vec(), value: value.to_vec(), flags, kill_sgid: acl_kill_sgid },
        )),
        Operation::RemoveXattr { name } => {
            Ok((ReplyFormat::Empty, Op::RemoveXattr { ino, name: name.to_vec() }))
        }
        Operation::Fallocate { fh, mode, offset, length } => {
            Ok((ReplyFormat::Empty, Op::Fallocate { ino, fh: Fh(fh), mode, offset, length }))
        }
        Operation::CopyFileRange(range) => copy(real, ino, &range, ReplyFormat::Natural),
        Operation::CopyFileRange64(range) => copy(real, ino, &range, ReplyFormat::Copied),
        Operation::SyncFs => Ok((ReplyFormat::Empty, Op::Fsync { ino, fh: None, data_only: false })),
        // Under default_permissions the kernel checks access itself. After ENOSYS it polls regular files itself.
        _ => {
            tracing::debug!(target: "nigh::kernel", opcode = operation.opcode(), minor = agreed.minor, "not served");
            Err(Errno::NOSYS)
        }
    }
}

fn copy(real: impl Fn(u64) -> u64, ino: u64, range: &CopyRange, shape: ReplyFormat) -> Translated {
    // The old form's reply has 32 bits: limit it to the size of one write.
    let most = if shape == ReplyFormat::Copied { u64::MAX } else { 1 << 30 };
    Ok((
        shape,
        Op::CopyRange {
            ino,
            fh: Fh(range.fh_in),
            offset: range.offset_in,
            to_ino: real(range.node_out),
            to_fh: Fh(range.fh_out),
            to_offset: range.offset_out,
            length: range.length.min(most),
        },
    ))
}

fn set_attr(set: &nigh_fuse::SetAttr) -> SetAttr {
    let time = |time: nigh_fuse::SetTime| match time {
        nigh_fuse::SetTime::Now => SetTime::Now,
        nigh_fuse::SetTime::At((secs, nanos)) => SetTime::At(Timestamp { secs, nanos }),
    };
    SetAttr {
        mode: set.mode.map(|mode| mode & 0o7777),
        uid: set.uid,
        gid: set.gid,
        size: set.size,
        atime: set.atime.map(time),
        mtime: set.mtime.map(time),
        kill_suidgid: set.kill_suidgid,
    }
}
