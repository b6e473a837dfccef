//! Encoding of a reply for FUSE; chooses, logs and counts the errno.

use crate::credentials::sees_privileged_xattrs;
use crate::host::Host;
use nigh_cache::{Node, OpReply, Opened, Page, is_privileged, sized_xattr};
use nigh_fuse::abi::flags::fopen;
use nigh_fuse::{Attr, DirBuffer, Dirent, Entry, FileLock, Reply, StatFs, Statx, Transport};
use nigh_types::{Errno, LockInfo, LockKind, NodeId, Space, Span, Timestamp};
use std::time::Duration;

const ROOT: u64 = nigh_fuse::abi::ROOT_ID;
const STATX_BASIC_STATS: u32 = 0x7ff;
const STATX_BTIME: u32 = 0x800;

/// Format of the reply to a request, where the reply's kind does not determine it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReplyFormat {
    Natural,
    /// Success without data, whatever the cache's reply contains.
    Empty,
    Statx,
    /// COPY_FILE_RANGE_64.
    Copied,
    Page {
        size: u32,
        plus: bool,
    },
    Ioctl {
        out_size: u32,
    },
    /// An xattr value with ids in it.
    Acl,
    /// Xattr names, filtered for this thread.
    XattrNames {
        pid: u32,
    },
}

/// Sends one reply. If the kernel no longer wants it, that is not an error.
pub(crate) fn send(
    (transport, host): (&dyn Transport, &dyn Host),
    root: u64,
    unique: u64,
    shape: ReplyFormat,
    answer: OpReply,
) {
    let answer = match answer {
        OpReply::XattrNames { names, size } => {
            let all = matches!(shape, ReplyFormat::XattrNames { pid } if sees_privileged_xattrs(host, pid));
            sized_xattr(if all { names } else { without_privileged(&names) }, size)
        }
        other => other,
    };
    let sent = match answer {
        OpReply::Page(page) => send_page(transport, root, unique, shape, &page),
        OpReply::Data(data) | OpReply::Value(data) | OpReply::Target(data) => {
            Reply::data(unique, &data).send(transport)
        }
        OpReply::Flags(flags) => {
            let bytes = flags.to_le_bytes();
            let ReplyFormat::Ioctl { out_size } = shape else { return };
            let length = usize::try_from(out_size).unwrap_or(0).min(bytes.len());
            Reply::ioctl(unique, 0, &bytes[..length]).send(transport)
        }
        other => plain(root, unique, shape, &other).send(transport),
    };
    if let Err(error) = sent {
        tracing::warn!(target: "nigh::kernel", %error, unique, "an answer was refused");
    }
}

fn plain(root: u64, unique: u64, shape: ReplyFormat, answer: &OpReply) -> Reply<'static> {
    match answer {
        OpReply::Failed(errno) => {
            tracing::trace!(target: "nigh::answer", unique, %errno);
            Reply::error(unique, errno_for_kernel(*errno).raw())
        }
        _ if shape == ReplyFormat::Empty => Reply::empty(unique),
        OpReply::Done => Reply::empty(unique),
        OpReply::Node(node) => Reply::entry(unique, &entry(root, node)),
        OpReply::Missing(valid) if *valid == Span::ZERO => Reply::error(unique, Errno::NOENT.raw()),
        OpReply::Missing(valid) => Reply::negative(unique, duration(*valid)),
        OpReply::Attr(id, attr, valid) if shape == ReplyFormat::Statx => {
            let btime = attr.birth_time();
            let stat = Statx {
                mask: STATX_BASIC_STATS | if btime.is_some() { STATX_BTIME } else { 0 },
                btime: btime.map_or((0, 0), Timestamp::pair),
                attr: attributes(*id, attr),
                ..Statx::default()
            };
            Reply::statx(unique, &stat, duration(*valid))
        }
        OpReply::Attr(id, attr, valid) => Reply::attr(unique, &attributes(*id, attr), duration(*valid)),
        OpReply::Opened(opened) => Reply::open(unique, opened.fh.0, open_flags(opened)),
        OpReply::Created(node, opened) => {
            Reply::create(unique, &entry(root, node), opened.fh.0, open_flags(opened))
        }
        OpReply::Written(count) if shape == ReplyFormat::Copied => Reply::copied(unique, *count),
        OpReply::Written(count) => Reply::written(unique, u32::try_from(*count).unwrap_or(u32::MAX)),
        OpReply::Size(size) => Reply::xattr_size(unique, *size),
        OpReply::Space(space) => Reply::statfs(unique, &statfs(space)),
        OpReply::Offset(offset) => Reply::lseek(unique, *offset),
        OpReply::Locked(info) => Reply::lock(unique, &file_lock(*info)),
        OpReply::Page(_)
        | OpReply::Data(_)
        | OpReply::Value(_)
        | OpReply::XattrNames { .. }
        | OpReply::Target(_)
        | OpReply::Flags(_) => Reply::error(unique, Errno::IO.raw()),
    }
}

/// NUL-terminated xattr names that every caller may see.
fn without_privileged(names: &[u8]) -> Vec<u8> {
    names.split_inclusive(|&byte| byte == 0).filter(|name| !is_privileged(name)).flatten().copied().collect()
}

/// The errno that the kernel gets. `ENOSYS` would disable the operation for the whole mount, sometimes silently
/// (`fc->no_fsync`). Numbers from 512 on are the kernel's own; it would refuse the reply and leave the caller waiting
/// (`fuse_dev_do_write`).
fn errno_for_kernel(errno: Errno) -> Errno {
    match errno {
        Errno::NOSYS => Errno::OPNOTSUPP,
        errno if errno.raw() >= 512 => Errno::IO,
        errno => errno,
    }
}

fn send_page(
    transport: &dyn Transport,
    root: u64,
    unique: u64,
    shape: ReplyFormat,
    page: &Page,
) -> std::io::Result<()> {
    let ReplyFormat::Page { size, plus } = shape else {
        return Reply::error(unique, Errno::IO.raw()).send(transport);
    };
    let mut buffer = DirBuffer::new(size, plus);
    let mut names = page.names.as_slice();
    for slot in &page.entries {
        let Some((name, rest)) = names.split_at_checked(usize::from(slot.name_len)) else { break };
        names = rest;
        let dirent = Dirent { ino: slot.ino, cookie: slot.next.0, kind: slot.mode >> 12, name };
        let node = slot.node.as_ref().map(|node| entry(root, node));
        if !buffer.push(&dirent, node.as_ref()) {
            tracing::error!(target: "nigh::kernel", "a page was larger than the kernel's buffer");
            break;
        }
    }
    Reply::data(unique, buffer.as_bytes()).send(transport)
}

fn entry(root: u64, node: &Node) -> Entry {
    Entry {
        nodeid: if node.id.ino == root { ROOT } else { node.number },
        generation: node.id.generation,
        entry_valid: duration(node.entry_valid),
        attr_valid: duration(node.attr_valid),
        attr: attributes(node.id, &node.attr),
    }
}

fn attributes(id: NodeId, attr: &nigh_types::Attr) -> Attr {
    Attr {
        ino: id.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: attr.atime.pair(),
        mtime: attr.mtime.pair(),
        ctime: attr.ctime.pair(),
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: 0,
        flags: 0,
    }
}

fn statfs(space: &Space) -> StatFs {
    StatFs {
        blocks: space.blocks,
        bfree: space.blocks_free,
        bavail: space.blocks_available,
        files: space.files,
        ffree: space.files_free,
        bsize: space.block_size,
        namelen: space.name_max,
        frsize: space.fragment_size,
    }
}

/// Encodes a lock as fcntl(2) does.
fn file_lock(info: Option<LockInfo>) -> FileLock {
    let Some(LockInfo { kind, start, end, pid }) = info else {
        return FileLock { kind: libc::F_UNLCK.cast_unsigned(), ..FileLock::default() };
    };
    let kind = match kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
    };
    // The kernel accepts no offset beyond OFFSET_MAX.
    let within = |byte: u64| byte.min(i64::MAX.cast_unsigned());
    FileLock { start: within(start), end: within(end), kind: kind.cast_unsigned(), pid }
}

fn open_flags(opened: &Opened) -> u32 {
    [
        (opened.keep_cache, fopen::KEEP_CACHE),
        (opened.cache_dir, fopen::CACHE_DIR),
        (opened.no_flush, fopen::NOFLUSH),
        (opened.direct, fopen::DIRECT_IO),
    ]
    .into_iter()
    .filter(|(set, _)| *set)
    .fold(0, |all, (_, flag)| all | flag)
}

fn duration(span: Span) -> Duration {
    Duration::from_nanos(span.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn privileged_xattr_names_are_omitted_at_any_position_of_the_list() {
        let names = |text: &str| without_privileged(text.as_bytes());
        assert_eq!(names("trusted.a\0user.b\0trusted.c\0"), b"user.b\0");
        assert_eq!(names("user.trusted.a\0"), b"user.trusted.a\0");
        assert_eq!(names("trusted.a\0"), b"");
    }
}
