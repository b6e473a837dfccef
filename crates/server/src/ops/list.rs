//! Listing a directory in cookie order.

use super::{Context, has_no_xattrs};
use crate::acting::Inside;
use crate::error::{Fault, Result};
use crate::reach::{Node, hides, reopen, without_atime};
use crate::stat;
use nigh_types::{
    Cookie, CookieKey, Covers, Entry, Errno, Grant, Kind, Listed, Name, Place, Reply, Response,
};
use rustix::fs::{OFlags, RawDir};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

/// A part of a listing is sent when it has this many bytes.
const PART_BYTES: usize = 128 << 10;
/// What a grant takes on the wire, about.
const GRANT_BYTES: usize = 64;

/// Puts out parts in cookie order; the last one has `last` set and the directory's own attributes.
pub(crate) fn list(cx: Context<'_>, place: &Place, sink: &mut dyn FnMut(Response)) -> Result<()> {
    let dir = cx.reach().directory(place, cx.files)?;
    // Before reading: what changes from here on is recalled.
    let mut grants = Vec::new();
    cx.grant(&mut grants, &dir, Covers::Names);
    let own = cx.stake.ask(dir.id, dir.object, Covers::Inode);
    let open = {
        let _acting = cx.act()?;
        // Attributes come with the names.
        cx.search_unless_vouched(&dir)?;
        reopen(&dir, OFlags::RDONLY)?
    };
    let open = without_atime(open);
    let names = Names::read(&open, cx.reach().ids.cookie_key(), hides)?;
    drop(open);
    // A directory that may be read but not searched can still be seen to be empty.
    let mut inside = if names.rows.is_empty() { None } else { Some(Inside::enter(&dir.fd)?) };
    let mut part = Listed::default();
    let mut bytes = 0;
    for (at, row) in names.rows.iter().enumerate() {
        let Some((name, entry)) = look(cx, &dir, names.name(row), &mut grants)? else { continue };
        bytes += nigh_native::listed_bytes(&name, &entry);
        part.entries.push((name, entry));
        let group_ends = names.rows.get(at + 1).is_none_or(|next| next.cookie != row.cookie);
        if group_ends && bytes + grants.len() * GRANT_BYTES >= PART_BYTES && at + 1 < names.rows.len() {
            cx.reach().ids.settle()?;
            // Whoever takes it may take long.
            drop(inside.take());
            sink(Response {
                result: Ok(Reply::Listed(std::mem::take(&mut part))),
                after: Vec::new(),
                grants: std::mem::take(&mut grants),
                last: false,
            });
            bytes = 0;
            inside = Some(Inside::enter(&dir.fd)?);
        }
    }
    drop(inside);
    grants.extend(own);
    cx.reach().ids.settle()?;
    let after = vec![cx.attr_now(&dir)?];
    sink(Response { result: Ok(Reply::Listed(part)), after, grants, last: true });
    Ok(())
}

/// What one name of the directory that this thread is in leads to; `None` where it is gone by now.
fn look(cx: Context<'_>, dir: &Node, name: &[u8], grants: &mut Vec<Grant>) -> Result<Option<(Name, Entry)>> {
    let Ok(checked) = Name::new(name) else { return Ok(None) };
    let mut stat = match stat::of_name(&dir.fd, name) {
        Err(Fault(Errno::NOENT)) => return Ok(None),
        other => other?,
    };
    let id = match cx.reach().id_of(&dir.fd, name, &stat) {
        Err(Fault(Errno::NOENT)) => return Ok(None),
        other => other?,
    };
    let object = cx.reach().ids.object(&stat);
    let own = if stat.attr.covered_by_parent() { None } else { cx.stake.ask(id, object, Covers::Inode) };
    if own.is_some() || cx.show(object, dir.object) {
        match stat::of_name(&dir.fd, name) {
            Ok(again) if again.is_same(&stat) => {
                stat = again;
                grants.extend(own);
            }
            Err(Fault(Errno::NOENT)) => return Ok(None),
            // Another one has that name by now: what was there when the directory was read.
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
    let no_xattrs = has_no_xattrs(rustix::fs::llistxattr_query(name));
    if stat.attr.is_dir() {
        cx.reach().note_place(id, dir.id, &checked);
    }
    Ok(Some((checked, Entry { id, attr: stat.attr, target, no_xattrs })))
}

/// A directory's names, sorted by cookie: 24 bytes each and the name.
struct Names {
    rows: Vec<Row>,
    text: Vec<u8>,
}

struct Row {
    cookie: Cookie,
    start: u64,
    length: u8,
}

impl Names {
    fn read(dir: &OwnedFd, key: CookieKey, hides: impl Fn(&[u8]) -> bool) -> Result<Names> {
        let mut buffer = vec![MaybeUninit::uninit(); 256 << 10];
        let mut entries = RawDir::new(dir, &mut buffer);
        let mut names = Names { rows: Vec::new(), text: Vec::new() };
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // A directory that was removed: it has no names.
                Err(rustix::io::Errno::NOENT) => break,
                Err(errno) => return Err(errno.into()),
            };
            let name = entry.file_name().to_bytes();
            let Ok(length) = u8::try_from(name.len()) else { continue };
            if name == b"." || name == b".." || hides(name) {
                continue;
            }
            names.rows.push(Row { cookie: key.cookie(name), start: names.text.len() as u64, length });
            names.text.extend_from_slice(name);
        }
        let text = &names.text;
        names.rows.sort_unstable_by(|a, b| {
            a.cookie.cmp(&b.cookie).then_with(|| slice(text, a).cmp(slice(text, b)))
        });
        names.rows.dedup_by(|a, b| a.cookie == b.cookie && slice(text, a) == slice(text, b));
        Ok(names)
    }

    fn name(&self, row: &Row) -> &[u8] {
        slice(&self.text, row)
    }
}

fn slice<'a>(text: &'a [u8], row: &Row) -> &'a [u8] {
    let start = usize::try_from(row.start).unwrap_or(usize::MAX);
    &text[start..start + usize::from(row.length)]
}
