//! Calls on file data.

use super::open::{DataFile, for_reading, for_writing};
use super::space::with_space;
use super::write_back::{self, WriteBack};
use super::write_tracking::TrackedWrite;
use super::{Context, Outcome};
use crate::export::node::reopen;
use crate::os::error::{Fault, Result};
use crate::os::impersonate::SetIdBits;
use nigh_types::{Attr, Errno, Handle, Kind, LeaseScope, Mode, NodeId, NodeRef, Reply, WriteFlags};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::ReadWriteFlags;
use std::io::IoSlice;

/// Maximum length of a read reply.
const MAX_READ: u32 = 4 << 20;
/// Maximum bytes of one copy call; the caller sees a short count and continues.
const MAX_COPY: u64 = 1 << 30;
const COPY_BUFFER: u64 = 1 << 20;

pub(crate) fn read(
    cx: Context<'_>,
    place: &NodeRef,
    handle: Option<Handle>,
    offset: u64,
    length: u32,
) -> Result<Outcome> {
    let file = for_reading(cx, place, handle)?;
    // Read before the data: after a concurrent change the attributes are recognisably older.
    let (node, attr) = now(cx, place.node, &file)?;
    let grants =
        Vec::from_iter(cx.call_leases.request_grant(place.node, file.object(), LeaseScope::Data, Mode::Read));
    let wanted = usize::try_from(length.min(MAX_READ)).unwrap_or(0);
    let mut data = Vec::with_capacity(wanted);
    while data.len() < wanted {
        let at = offset.checked_add(data.len() as u64).ok_or(Fault(Errno::INVAL))?;
        let room = data.spare_capacity_mut();
        let limit = room.len().min(wanted);
        let (init, _) = match rustix::io::pread(file.fd(), &mut room[..limit], at) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        let count = init.len();
        if count == 0 {
            break;
        }
        // SAFETY: pread initialised that many bytes after the present end.
        unsafe { data.set_len(data.len() + count) };
        // A short read that ends there needs no other one to show the end of the file.
        if at + count as u64 == attr.size {
            break;
        }
    }
    Ok(Outcome { reply: Reply::Data(data), after: vec![(node, attr)], grants })
}

pub(crate) fn seek(
    cx: Context<'_>,
    place: &NodeRef,
    handle: Option<Handle>,
    offset: u64,
    data: bool,
) -> Result<Outcome> {
    let file = for_reading(cx, place, handle)?;
    let from = if data { SeekFrom::Data(offset) } else { SeekFrom::Hole(offset) };
    let _position = file.lock_position();
    Ok(Outcome::plain(Reply::Offset(rustix::fs::seek(file.fd(), from)?)))
}

pub(crate) fn write(
    cx: Context<'_>,
    place: &NodeRef,
    handle: Option<Handle>,
    offset: u64,
    data: &[u8],
    flags: WriteFlags,
) -> Result<Outcome> {
    let file = for_writing(cx, place, handle, flags.append)?;
    let change = TrackedWrite::begin(cx, place.node, file.fd())?;
    let back = match flags.write_back {
        false => None,
        true => match WriteBack::begin(cx, &change, (place.node, &file), flags.since, (offset, data))? {
            Some(back) => Some(back),
            None => {
                drop(change);
                return write_back::after_conflict(cx, place.node, &file, offset, data);
            }
        },
    };
    let mut how = ReadWriteFlags::empty();
    if flags.sync {
        how |= ReadWriteFlags::DSYNC;
    }
    let acting = cx.act_on_data(match flags {
        WriteFlags { write_back: true, .. } => SetIdBits::Kept,
        WriteFlags { kill_suidgid: true, .. } => SetIdBits::Dropped,
        _ => SetIdBits::AsForCaller,
    })?;
    let bytes = back.as_ref().map_or(data, |back| back.bytes(data));
    let (offset, count) = if flags.append {
        let _position = file.lock_position();
        let count = rustix::io::pwritev2(
            file.fd(),
            &[IoSlice::new(data)],
            u64::MAX, // at the descriptor's own position, which then shows where the write went
            how | ReadWriteFlags::APPEND,
        )? as u64;
        let end = rustix::fs::tell(file.fd())?;
        (end.saturating_sub(count), count)
    } else {
        let wrote = write_at(cx, &file, offset, bytes, how);
        if let Some(back) = back {
            back.end(cx, (offset, data), wrote.as_ref().copied().unwrap_or(0));
        }
        (offset, wrote?)
    };
    drop(acting);
    if !flags.write_back {
        cx.call_leases.changed((offset, count));
    }
    // After `written` another session may change the file.
    drop(change);
    let grants = Vec::from_iter(cx.call_leases.written(place.node, file.object()));
    let after = now(cx, place.node, &file)?;
    Ok(Outcome { reply: Reply::Written { offset, count }, after: vec![after], grants })
}

pub(crate) fn fallocate(
    cx: Context<'_>,
    place: &NodeRef,
    handle: Option<Handle>,
    mode: u32,
    offset: u64,
    length: u64,
) -> Result<Outcome> {
    let file = for_writing(cx, place, handle, true)?;
    {
        let _change = TrackedWrite::begin(cx, place.node, file.fd())?;
        let _acting = cx.act_on_data(SetIdBits::AsForCaller)?;
        rustix::fs::fallocate(file.fd(), FallocateFlags::from_bits_retain(mode), offset, length)?;
    }
    cx.call_leases.changed((offset, length));
    let (id, attr) = now(cx, place.node, &file)?;
    Ok(Outcome::plain(Reply::Attr(id, attr)))
}

/// One side of a copy.
pub(crate) struct End<'a> {
    pub(crate) place: &'a NodeRef,
    pub(crate) handle: Option<Handle>,
    pub(crate) offset: u64,
}

pub(crate) fn copy(cx: Context<'_>, from: End<'_>, to: End<'_>, length: u64) -> Result<Outcome> {
    let source = for_reading(cx, from.place, from.handle)?;
    let target = for_writing(cx, to.place, to.handle, false)?;
    let length = length.min(MAX_COPY);
    let change = TrackedWrite::begin(cx, to.place.node, target.fd())?;
    let acting = cx.act_on_data(SetIdBits::AsForCaller)?;
    let (mut read_at, mut write_at) = (from.offset, to.offset);
    let mut left = length;
    while left > 0 {
        let step = usize::try_from(left).unwrap_or(usize::MAX);
        let copied = rustix::fs::copy_file_range(
            source.fd(),
            Some(&mut read_at),
            target.fd(),
            Some(&mut write_at),
            step,
        );
        match copied {
            Ok(0) => break,
            Ok(count) => left = left.saturating_sub(count as u64),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) if left < length => break,
            Err(rustix::io::Errno::XDEV | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => {
                left -= copy_through(cx, (&source, &target), (read_at, write_at), left)?;
                break;
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    drop(acting);
    drop(change);
    cx.call_leases.changed((to.offset, length - left));
    let after = vec![now(cx, to.place.node, &target)?];
    let reply = Reply::Written { offset: to.offset, count: length - left };
    Ok(Outcome { reply, after, grants: Vec::new() })
}

/// Syncs a file or directory, and the directory that contains its name.
pub(crate) fn fsync(
    cx: Context<'_>,
    place: &NodeRef,
    handle: Option<Handle>,
    data_only: bool,
) -> Result<Outcome> {
    if let Some(handle) = handle {
        let file = cx.files.find(handle, place.node)?;
        sync(&file.fd, data_only)?;
    } else {
        let node = cx.resolver().node(place, cx.files)?;
        if matches!(node.stat.attr.kind(), Kind::File | Kind::Directory) {
            let open = {
                let _acting = cx.act_unless_vouched()?;
                match reopen(&node, OFlags::RDONLY) {
                    Err(Fault(Errno::ACCES)) if !node.stat.attr.is_dir() => reopen(&node, OFlags::WRONLY),
                    other => other,
                }
            };
            sync(&open?, data_only)?;
        }
    }
    if let Some((parent, _)) = &place.path_hint
        && !data_only
    {
        match cx.resolver().directory(&NodeRef::without_hint(*parent), cx.files) {
            // A caller that may not search the directory has no name there to sync.
            Ok(dir)
                if cx.act_unless_vouched().and_then(|_acting| cx.search_unless_vouched(&dir.fd)).is_err() => {
            }
            Ok(dir) => match reopen(&dir, OFlags::RDONLY) {
                Ok(open) => rustix::fs::fsync(&open)?,
                // A directory without read permission cannot be synced by itself.
                Err(Fault(Errno::ACCES)) => {}
                Err(fault) => return Err(fault),
            },
            // The file lost this name, so there is none to sync.
            Err(Fault::STALE) => {}
            Err(fault) => return Err(fault),
        }
    }
    Ok(Outcome::plain(Reply::Done))
}

fn sync(fd: &std::os::fd::OwnedFd, data_only: bool) -> Result<()> {
    let done = if data_only { rustix::fs::fdatasync(fd) } else { rustix::fs::fsync(fd) };
    Ok(done?)
}

fn now(cx: Context<'_>, node: NodeId, file: &DataFile) -> Result<(NodeId, Attr)> {
    Ok((node, cx.visible_attr(file.object(), file.fd())?))
}

fn write_at(cx: Context<'_>, file: &DataFile, offset: u64, data: &[u8], how: ReadWriteFlags) -> Result<u64> {
    let mut done = 0;
    loop {
        let at = offset.checked_add(done as u64).ok_or(Fault(Errno::FBIG))?;
        if at > i64::MAX.cast_unsigned() {
            return Err(Fault(Errno::FBIG));
        }
        // Retried here, so that a write already begun is not short when space can be freed.
        let written = with_space(cx, Some(file.object().filesystem), || {
            Ok(rustix::io::pwritev2(file.fd(), &[IoSlice::new(&data[done..])], at, how)?)
        });
        match written {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Fault(Errno::INTR)) => {}
            Err(_) if done > 0 => break,
            Err(fault) => return Err(fault),
        }
        if done == data.len() {
            break;
        }
    }
    Ok(done as u64)
}

/// Copies by reading and writing, up to a limit. Returns the number of bytes copied.
fn copy_through(
    cx: Context<'_>,
    (source, target): (&DataFile, &DataFile),
    (mut read_offset, mut write_offset): (u64, u64),
    length: u64,
) -> Result<u64> {
    let mut done = 0;
    let mut buffer = vec![0_u8; usize::try_from(COPY_BUFFER.min(length)).unwrap_or(0)];
    while done < length.min(64 * COPY_BUFFER) {
        let step = usize::try_from(length - done).unwrap_or(usize::MAX).min(buffer.len());
        let count = rustix::io::pread(source.fd(), &mut buffer[..step], read_offset)?;
        if count == 0 {
            break;
        }
        let written = write_at(cx, target, write_offset, &buffer[..count], ReadWriteFlags::empty())?;
        done += written;
        read_offset += written;
        write_offset += written;
        if written < count as u64 {
            break;
        }
    }
    Ok(done)
}
