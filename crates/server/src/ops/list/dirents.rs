//! Names-only listings, with the contents of getdents64 (docs/decisions/0023-names-before-attributes.md).

use super::{Listing, NameEntry, Names, PART_BYTES, open};
use crate::ops::Context;
use crate::os::error::{Fault, Result};
use crate::os::stat::Stat;
use nigh_native::dirent_bytes;
use nigh_types::{Cookie, Dirent, Name, NodeRef, Reply, Response};

/// Like [`super::list`], for the names after a cookie; registers no grants.
pub(crate) fn dirents(
    cx: Context<'_>,
    (place, after): (&NodeRef, Cookie),
    begun: Option<Box<Listing>>,
    sink: &mut dyn FnMut(Response) -> bool,
) -> Result<Option<Box<Listing>>> {
    let mut listing = match begun {
        Some(listing) if !listing.is_confined(cx) => return Err(Fault::STALE),
        Some(listing) => listing,
        None => {
            let (dir, open) = open(cx, place)?;
            let names = Names::read(&open, cx)?;
            let at = names.entries.partition_point(|row| row.cookie <= after);
            Box::new(Listing { at, ..Listing::new(dir, names, false) })
        }
    };
    loop {
        let part = listing.names_only_part(cx)?;
        let last = listing.is_done();
        cx.resolver().ids.settle()?;
        let room = sink(Response { last, ..Response::plain(Ok(Reply::Dirents(part))) });
        if last {
            return Ok(None);
        }
        if !room {
            return Ok(Some(listing));
        }
    }
}

impl Listing {
    /// Returns the next names.
    fn names_only_part(&mut self, cx: Context<'_>) -> Result<Vec<Dirent>> {
        let (mut part, mut bytes) = (Vec::new(), 0);
        while let Some(row) = self.names.entries.get(self.at) {
            self.at += 1;
            let name = self.names.name(row);
            bytes += dirent_bytes(name);
            if let Ok(name) = Name::new(name) {
                part.push(Dirent { name, ino: self.visible_ino(cx, row)?, kind: row.kind });
            }
            if bytes >= PART_BYTES && self.group_ends(row) {
                break;
            }
        }
        Ok(part)
    }

    fn visible_ino(&self, cx: Context<'_>, row: &NameEntry) -> Result<u64> {
        let stat = Stat { ino: row.ino, known_anew: false, ..self.dir.stat };
        let (ino, _) = cx.resolver().ids.visible_ino(&stat, || Ok(self.dir.fd.try_clone()?))?;
        Ok(ino)
    }
}
