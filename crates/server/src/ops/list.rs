//! Directory listings in cookie order.

use super::Context;
use crate::export::entry::has_no_xattrs;
use crate::export::node::{Node, open_beneath, reopen, without_atime};
use crate::export::node_resolver::is_reserved;
use crate::limits::reaper::{Charge, MemoryAccount};
use crate::os::error::{Fault, Result};
use crate::os::impersonate::WorkingDirGuard;
use crate::os::stat;
use nigh_lease::Object;
use nigh_types::{
    Cookie, Entries, Entry, Errno, Grant, Kind, LeaseScope, Mode, Name, NodeRef, Reply, Response,
};
use rustix::fs::{FileType, OFlags, RawDir};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Size at which a part of a listing is sent.
pub(super) const PART_BYTES: usize = 128 << 10;
/// Approximate encoded size of a grant.
pub(super) const GRANT_BYTES: usize = 64;

mod dirents;

pub(super) use dirents::dirents;

/// A listing in progress.
pub(crate) struct Listing {
    dir: Node,
    names: Names,
    /// Index of the next name.
    at: usize,
    /// The names were granted, and every name so far could be looked up.
    granted: bool,
    /// Approximate size of the latest part.
    part_bytes: usize,
    /// Subdirectories on the directory's mount, if they are to be collected.
    below: Option<Vec<NodeRef>>,
    /// Memory charge of a listing that waits for its client.
    counted: Option<Charge>,
}

/// Sends a listing in parts, in cookie order. The last part has `last` set and carries the directory's own
/// attributes. `sink` returns whether there is room for more. Without room, the listing is returned, to be passed as
/// `begun` once there is room.
///
/// A name that cannot be looked up (a mount whose server is gone) is omitted. The listing is then incomplete, and
/// carries no directory lease.
pub(crate) fn list(
    cx: Context<'_>,
    place: &NodeRef,
    begun: Option<Box<Listing>>,
    sink: &mut dyn FnMut(Response) -> bool,
) -> Result<Option<Box<Listing>>> {
    let mut grants = Vec::new();
    let mut listing = match begun {
        // The directory may have been moved out of the export meanwhile.
        Some(listing) if !listing.is_confined(cx) => return Err(Fault::STALE),
        Some(listing) => listing,
        None => Box::new(begin(cx, place, &mut grants)?),
    };
    loop {
        let part = listing.part(cx, &mut grants)?;
        let last = listing.is_done();
        let mut after = Vec::new();
        if last {
            cx.watch(listing.dir.object, &listing.dir.fd);
            grants.extend(cx.call_leases.request_grant(
                listing.dir.id,
                listing.dir.object,
                LeaseScope::Attributes,
                Mode::Read,
            ));
            after.push(cx.attr_now(&listing.dir)?);
        }
        cx.resolver().ids.settle()?;
        let (result, grants) = (Ok(Reply::Listed(part)), std::mem::take(&mut grants));
        let room = sink(Response { result, after, grants, last });
        if last {
            return Ok(None);
        }
        if !room {
            return Ok(Some(listing));
        }
    }
}

pub(super) fn begin(cx: Context<'_>, place: &NodeRef, grants: &mut Vec<Grant>) -> Result<Listing> {
    let (dir, open) = open(cx, place)?;
    // Before the names are read, so that later changes cause a recall.
    let granted = cx.grant(grants, &dir, LeaseScope::Directory);
    Ok(Listing::new(dir, Names::read(&open, cx)?, granted))
}

fn open(cx: Context<'_>, place: &NodeRef) -> Result<(Node, OwnedFd)> {
    let dir = cx.resolver().directory(place, cx.files)?;
    let open = {
        let _acting = cx.act_on(&dir)?;
        // Search permission, because attributes come with the names.
        cx.search_unless_vouched(&dir.fd)?;
        reopen(&dir, OFlags::RDONLY)?
    };
    Ok((dir, without_atime(open)))
}

impl Listing {
    fn new(dir: Node, names: Names, granted: bool) -> Listing {
        Listing { dir, names, at: 0, granted, part_bytes: 0, below: None, counted: None }
    }

    /// Whether the next name has another cookie: names with equal cookies go into one part.
    fn group_ends(&self, row: &NameEntry) -> bool {
        self.names.entries.get(self.at).is_none_or(|next| next.cookie != row.cookie)
    }

    /// Charges the memory of a listing that waits for its client.
    pub(crate) fn count(&mut self, account: &Arc<MemoryAccount>) {
        let bytes = self.names.bytes();
        self.counted.get_or_insert_with(|| Charge::new(account, bytes));
    }

    pub(super) fn is_done(&self) -> bool {
        self.at == self.names.entries.len()
    }

    /// Whether the directory still lies in the export.
    pub(super) fn is_confined(&self, cx: Context<'_>) -> bool {
        cx.resolver().is_confined(&self.dir.fd)
    }

    pub(super) fn count_names(&self) -> u64 {
        self.names.entries.len() as u64
    }

    pub(super) fn part_bytes(&self) -> usize {
        self.part_bytes
    }

    pub(super) fn is_granted(&self) -> bool {
        self.granted
    }

    pub(super) fn object(&self) -> Object {
        self.dir.object
    }

    /// Collects subdirectories from now on.
    pub(super) fn collect_subdirs(&mut self) {
        self.below = Some(Vec::new());
    }

    pub(super) fn take_subdirs(&mut self) -> Vec<NodeRef> {
        self.below.take().unwrap_or_default()
    }

    /// Returns the next names with their inodes. Names with equal cookies go into one part.
    pub(super) fn part(&mut self, cx: Context<'_>, grants: &mut Vec<Grant>) -> Result<Entries> {
        let mut part = Entries::default();
        // A directory with read but without search permission can still be seen to be empty.
        if self.is_done() {
            return Ok(part);
        }
        let _inside = WorkingDirGuard::enter(&self.dir.fd)?;
        let mut bytes = 0;
        while let Some(row) = self.names.entries.get(self.at) {
            self.at += 1;
            match look(cx, &self.dir, self.names.name(row), grants) {
                Ok(Some((name, entry, mount))) => {
                    if let Some(below) = self.below.as_mut().filter(|_| entry.attr.is_dir())
                        && mount == self.dir.stat.mount
                    {
                        below.push(NodeRef { node: entry.id, path_hint: Some((self.dir.id, name.clone())) });
                    }
                    bytes += nigh_native::listed_bytes(&name, &entry);
                    part.entries.push((name, entry));
                }
                Ok(None) => {}
                Err(fault) if fault.is_the_servers_own() => return Err(fault),
                Err(Fault(errno)) => {
                    tracing::debug!(%errno, "a name of a listing cannot be looked at");
                    if std::mem::take(&mut self.granted) {
                        cx.call_leases.revoke_partial(grants, self.dir.object, LeaseScope::Directory);
                    }
                }
            }
            if self.group_ends(row) && bytes + grants.len() * GRANT_BYTES >= PART_BYTES {
                break;
            }
        }
        self.part_bytes = bytes;
        Ok(part)
    }
}

/// Looks up a name in this thread's working directory. Returns the entry with its mount; `None` if the name is gone.
fn look(
    cx: Context<'_>,
    dir: &Node,
    name: &[u8],
    grants: &mut Vec<Grant>,
) -> Result<Option<(Name, Entry, u64)>> {
    let Ok(checked) = Name::new(name) else { return Ok(None) };
    let mut stat = match stat::of_name(&dir.fd, name) {
        Err(Fault(Errno::NOENT)) => return Ok(None),
        other => other?,
    };
    let id = match cx.resolver().id_of(&dir.fd, name, &stat) {
        Err(Fault(Errno::NOENT)) => return Ok(None),
        other => other?,
    };
    let object = cx.resolver().ids.object(&stat);
    if !stat.attr.covered_by_parent() {
        cx.export.watch_with(cx.files, object, || open_beneath(&dir.fd, name));
    }
    let own = if stat.attr.covered_by_parent() {
        None
    } else {
        cx.call_leases.request_grant(id, object, LeaseScope::Attributes, Mode::Read)
    };
    if own.is_some() || cx.note_shown(object, dir.object) {
        match stat::of_name(&dir.fd, name) {
            Ok(again) if again.is_same(&stat) => {
                stat = again;
                grants.extend(own);
            }
            Err(Fault(Errno::NOENT)) => return Ok(None),
            // The name leads to a new inode by now; the entry keeps the inode found first, without a grant.
            Ok(_) => {}
            Err(fault) => return Err(fault),
        }
    }
    let target = match stat.attr.kind() {
        Kind::Symlink => match rustix::fs::readlinkat(&dir.fd, name, Vec::with_capacity(128)) {
            Ok(target) => Some(target.into_bytes().into()),
            Err(_) => None,
        },
        _ => None,
    };
    let no_xattrs = has_no_xattrs(|buffer| rustix::fs::llistxattr(name, buffer));
    if stat.attr.is_dir() {
        cx.resolver().remember_parent(id, dir.id, &checked);
    }
    cx.note_parent(id, &stat, dir);
    let again = || match stat::of_name(&dir.fd, name) {
        Ok(again) if again.is_same(&stat) => Ok(again.attr),
        _ => Ok(stat.attr),
    };
    let attr = cx.correct_nlink(object, stat.attr, again)?;
    Ok(Some((checked, Entry { id, attr, target, no_xattrs }, stat.mount)))
}

/// The names of a directory, sorted by cookie: 32 bytes each, plus the name.
struct Names {
    entries: Vec<NameEntry>,
    text: Vec<u8>,
}

struct NameEntry {
    cookie: Cookie,
    start: u64,
    ino: u64,
    kind: Option<Kind>,
    length: u8,
}

impl Names {
    fn read(dir: &OwnedFd, cx: Context<'_>) -> Result<Names> {
        let key = cx.resolver().ids.cookie_key();
        // Not `vec![..; N]`: without optimisation that writes each byte.
        let mut buffer = Vec::<u8>::with_capacity(256 << 10);
        let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
        let mut names = Names { entries: Vec::new(), text: Vec::new() };
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // A removed directory has no names.
                Err(rustix::io::Errno::NOENT) => break,
                Err(errno) => return Err(errno.into()),
            };
            let name = entry.file_name().to_bytes();
            let Ok(length) = u8::try_from(name.len()) else { continue };
            if name == b"." || name == b".." || is_reserved(name) {
                continue;
            }
            let (cookie, ino, kind) = (key.cookie(name), entry.ino(), kind(entry.file_type()));
            names.entries.push(NameEntry { cookie, start: names.text.len() as u64, ino, kind, length });
            names.text.extend_from_slice(name);
        }
        let text = &names.text;
        names.entries.sort_unstable_by(|a, b| {
            a.cookie.cmp(&b.cookie).then_with(|| slice(text, a).cmp(slice(text, b)))
        });
        names.entries.dedup_by(|a, b| a.cookie == b.cookie && slice(text, a) == slice(text, b));
        Ok(names)
    }

    fn bytes(&self) -> u64 {
        (self.entries.capacity() * size_of::<NameEntry>() + self.text.capacity()) as u64
    }

    fn name(&self, row: &NameEntry) -> &[u8] {
        slice(&self.text, row)
    }
}

fn kind(d_type: FileType) -> Option<Kind> {
    Kind::of_mode(d_type.as_raw_mode()).ok()
}

fn slice<'a>(text: &'a [u8], row: &NameEntry) -> &'a [u8] {
    let start = usize::try_from(row.start).unwrap_or(usize::MAX);
    &text[start..start + usize::from(row.length)]
}
