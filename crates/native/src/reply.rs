//! Responses on the wire.

use crate::ProtocolError;
use crate::call::{check_range, check_target, check_xattr};
use crate::names_only_listing::{put_dirents, take_dirents};
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{
    Attr, Entries, Entry, Errno, Grant, Handle, LockInfo, LockKind, Name, NodeId, PrefetchedDir, Reply,
    Response, Space, XattrSet,
};

/// The most bytes of an entry in a listing beyond its name and target.
pub(crate) const ENTRY_BYTES: usize = 128;

impl Wire for Entry {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            self.id.put(w);
            self.attr.put(w);
            self.target.put(w);
            self.no_xattrs.put(w);
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<Entry, ProtocolError> {
        let r = &mut r.record()?;
        let (id, attr, target) = (NodeId::parse(r)?, Attr::parse(r)?, Option::<Box<[u8]>>::parse(r)?);
        if let Some(target) = &target {
            check_target(target)?;
        }
        Ok(Entry { id, attr, target, no_xattrs: bool::parse(r)? })
    }
}

impl Wire for Space {
    fn put(&self, w: &mut Writer) {
        for count in [self.blocks, self.blocks_free, self.blocks_available, self.files, self.files_free] {
            w.u64(count);
        }
        for count in [self.block_size, self.fragment_size, self.name_max] {
            w.u32(count);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Space, ProtocolError> {
        Ok(Space {
            blocks: r.u64()?,
            blocks_free: r.u64()?,
            blocks_available: r.u64()?,
            files: r.u64()?,
            files_free: r.u64()?,
            block_size: r.u32()?,
            fragment_size: r.u32()?,
            name_max: r.u32()?,
        })
    }
}

impl Wire for LockInfo {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            self.kind.put(w);
            w.u64(self.start);
            w.u64(self.end);
            w.u32(self.pid);
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<LockInfo, ProtocolError> {
        let r = &mut r.record()?;
        let (kind, start, end) = (LockKind::parse(r)?, r.u64()?, r.u64()?);
        check_range(start, end)?;
        Ok(LockInfo { kind, start, end, pid: r.u32()? })
    }
}

fn tag(reply: &Reply) -> u8 {
    match reply {
        Reply::Entry(_) => 1,
        Reply::Attr(..) => 2,
        Reply::Listed(_) => 3,
        // Native servers send attributes; no peer knows this tag.
        Reply::Names(_) => 0,
        Reply::Prefetched(_) => 18,
        Reply::Dirents(_) => 19,
        Reply::Found { .. } => 20,
        Reply::Target(_) => 4,
        Reply::Xattrs(_) => 5,
        Reply::Value(_) => 6,
        Reply::Space(_) => 7,
        Reply::Opened { .. } => 8,
        Reply::Data(_) => 9,
        Reply::Offset(_) => 10,
        Reply::Flags(_) => 11,
        Reply::Created { .. } => 12,
        Reply::Removed { .. } => 13,
        Reply::Renamed { .. } => 14,
        Reply::Written { .. } => 15,
        Reply::Done => 16,
        Reply::LockConflict(_) => 17,
    }
}

fn put_fields(w: &mut Writer, reply: &Reply) {
    match reply {
        Reply::Entry(entry) => entry.put(w),
        Reply::Attr(node, attr) => {
            node.put(w);
            attr.put(w);
        }
        Reply::Found { node, attr, parent_entry: home } => {
            node.put(w);
            attr.put(w);
            home.is_some().put(w);
            if let Some((dir, name)) = home {
                dir.put(w);
                name.put(w);
            }
        }
        Reply::Listed(listed) => put_listed(w, listed),
        Reply::Prefetched(steps) => w.sequence(steps, |w, step| step.put(w)),
        Reply::Dirents(dirents) => put_dirents(w, dirents),
        Reply::Names(_) => {}
        Reply::Target(target) => target.put(w),
        Reply::Xattrs(set) => w.sequence(&set.items, |w, (name, value)| {
            name.put(w);
            value.put(w);
        }),
        Reply::Value(bytes) | Reply::Data(bytes) => bytes.put(w),
        Reply::Space(space) => space.put(w),
        Reply::Opened { handle, attr } => {
            handle.put(w);
            attr.put(w);
        }
        Reply::Offset(offset) => offset.put(w),
        Reply::Flags(flags) => flags.put(w),
        Reply::Created { entry, handle, existed } => {
            entry.put(w);
            handle.put(w);
            existed.put(w);
        }
        Reply::Removed { node, pinned: kept } => {
            node.put(w);
            kept.put(w);
        }
        Reply::Renamed { moved, replaced, pinned: kept, whiteout } => {
            moved.put(w);
            replaced.put(w);
            kept.put(w);
            // The last field: a client that does not know it has not requested a whiteout.
            if let Some(whiteout) = whiteout {
                whiteout.put(w);
            }
        }
        Reply::Written { offset, count } => {
            offset.put(w);
            count.put(w);
        }
        Reply::Done => {}
        Reply::LockConflict(info) => info.put(w),
    }
}

fn take_fields(tag: u8, r: &mut Reader<'_>) -> Result<Reply, ProtocolError> {
    Ok(match tag {
        1 => Reply::Entry(Option::parse(r)?),
        2 => Reply::Attr(NodeId::parse(r)?, Attr::parse(r)?),
        3 => Reply::Listed(take_listed(r)?),
        4 => Reply::Target(take_target(r)?),
        5 => Reply::Xattrs(XattrSet { items: r.sequence(5, take_xattr)? }),
        6 => Reply::Value(Vec::parse(r)?),
        7 => Reply::Space(Space::parse(r)?),
        8 => Reply::Opened { handle: Handle::parse(r)?, attr: Attr::parse(r)? },
        9 => Reply::Data(Vec::parse(r)?),
        10 => Reply::Offset(r.u64()?),
        11 => Reply::Flags(r.u32()?),
        12 => Reply::Created { entry: Entry::parse(r)?, handle: Option::parse(r)?, existed: bool::parse(r)? },
        13 => Reply::Removed { node: NodeId::parse(r)?, pinned: Option::parse(r)? },
        14 => Reply::Renamed {
            moved: NodeId::parse(r)?,
            replaced: Option::parse(r)?,
            pinned: Option::parse(r)?,
            whiteout: if r.is_empty() { None } else { Some(NodeId::parse(r)?) },
        },
        15 => Reply::Written { offset: r.u64()?, count: r.u64()? },
        16 => Reply::Done,
        17 => Reply::LockConflict(Option::parse(r)?),
        18 => Reply::Prefetched(r.sequence(17, PrefetchedDir::parse)?),
        19 => Reply::Dirents(take_dirents(r)?),
        20 => Reply::Found {
            node: NodeId::parse(r)?,
            attr: Attr::parse(r)?,
            parent_entry: bool::parse(r)?.then(|| Ok((NodeId::parse(r)?, Name::parse(r)?))).transpose()?,
        },
        _ => return Err(ProtocolError::Malformed("unknown reply")),
    })
}

pub(crate) fn put_listed(w: &mut Writer, listed: &Entries) {
    w.sequence(&listed.entries, |w, (name, entry)| {
        name.put(w);
        entry.put(w);
    });
}

pub(crate) fn take_listed(r: &mut Reader<'_>) -> Result<Entries, ProtocolError> {
    Ok(Entries { entries: r.sequence(7, |r| Ok((Name::parse(r)?, Entry::parse(r)?)))? })
}

fn take_target(r: &mut Reader<'_>) -> Result<Box<[u8]>, ProtocolError> {
    let target = r.bytes()?;
    check_target(target)?;
    Ok(target.into())
}

/// An xattr's name and, if it was sent along, its value.
type Xattr = (Box<[u8]>, Option<Box<[u8]>>);

fn take_xattr(r: &mut Reader<'_>) -> Result<Xattr, ProtocolError> {
    let (name, value) = (Box::<[u8]>::parse(r)?, Option::<Box<[u8]>>::parse(r)?);
    check_xattr(&name, value.as_deref().unwrap_or_default())?;
    Ok((name, value))
}

/// Encodes a response except `last`, which is a flag of the frame.
pub(crate) fn put_response(w: &mut Writer, response: &Response) {
    match &response.result {
        Ok(reply) => {
            w.u16(0);
            w.u8(tag(reply));
            w.record(|w| put_fields(w, reply));
        }
        Err(errno) => put_errno(w, *errno),
    }
    w.sequence(&response.after, |w, (node, attr)| {
        node.put(w);
        attr.put(w);
    });
    w.sequence(&response.grants, |w, grant| grant.put(w));
}

pub(crate) fn take_response(last: bool, r: &mut Reader<'_>) -> Result<Response, ProtocolError> {
    let result = match r.u16()? {
        0 => {
            let tag = r.u8()?;
            Ok(take_fields(tag, &mut r.record()?)?)
        }
        errno => Err(checked_errno(errno)?),
    };
    let after = r.sequence(20, |r| Ok((NodeId::parse(r)?, Attr::parse(r)?)))?;
    let grants = r.sequence(4, Grant::parse)?;
    Ok(Response { result, after, grants, last })
}

pub(crate) fn put_errno(w: &mut Writer, errno: Errno) {
    w.u16(u16::try_from(errno.raw()).expect("an errno is at most 4095"));
}

pub(crate) fn checked_errno(number: u16) -> Result<Errno, ProtocolError> {
    match number {
        1..=4095 => Ok(Errno::from_raw(i32::from(number))),
        _ => Err(ProtocolError::Malformed("an error number is out of range")),
    }
}

fn listed_size(listed: &Entries) -> usize {
    listed.entries.iter().map(|(name, entry)| crate::message::listed_bytes(name, entry)).sum()
}

/// About how many bytes a response takes, so that it is encoded without reallocation.
pub(crate) fn size_hint(response: &Response) -> usize {
    let reply = match &response.result {
        Ok(Reply::Data(bytes) | Reply::Value(bytes)) => bytes.len(),
        Ok(Reply::Listed(listed)) => listed_size(listed),
        Ok(Reply::Dirents(dirents)) => {
            dirents.iter().map(|dirent| crate::dirent_bytes(dirent.name.as_bytes())).sum()
        }
        Ok(Reply::Prefetched(steps)) => {
            steps.iter().map(|step| 32 + step.listed.as_ref().map_or(0, listed_size)).sum()
        }
        _ => 256,
    };
    reply + response.after.len() * 96 + response.grants.len() * 48 + 64
}
