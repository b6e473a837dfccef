//! Names alone, as getdents64 tells them (docs/decisions/0023-names-before-attributes.md).

use super::{Names, PART_BYTES, Row, open};
use crate::error::{Fault, Result};
use crate::keeper::{Held, Tally};
use crate::ops::Context;
use crate::reach::{Node, hides};
use crate::stat::Stat;
use nigh_native::dirent_bytes;
use nigh_types::{Cookie, Dirent, Name, Place, Reply, Response};
use std::sync::Arc;

/// How far they came.
pub(crate) struct Dirents {
    dir: Node,
    names: Names,
    /// The next of them.
    at: usize,
    counted: Option<Held>,
}

/// As [`super::list`], of the names behind a cookie; nothing is granted.
pub(crate) fn dirents(
    cx: Context<'_>,
    (place, after): (&Place, Cookie),
    begun: Option<Box<Dirents>>,
    sink: &mut dyn FnMut(Response) -> bool,
) -> Result<Option<Box<Dirents>>> {
    let mut dirents = match begun {
        Some(dirents) if !cx.reach().contains(&dirents.dir.fd) => return Err(Fault::STALE),
        Some(dirents) => dirents,
        None => {
            let (dir, open) = open(cx, place)?;
            let names = Names::read(&open, cx.reach().ids.cookie_key(), hides)?;
            let at = names.rows.partition_point(|row| row.cookie <= after);
            Box::new(Dirents { dir, names, at, counted: None })
        }
    };
    loop {
        let part = dirents.part(cx)?;
        let last = dirents.at == dirents.names.rows.len();
        cx.reach().ids.settle()?;
        let room = sink(Response { last, ..Response::plain(Ok(Reply::Dirents(part))) });
        if last {
            return Ok(None);
        }
        if !room {
            return Ok(Some(dirents));
        }
    }
}

impl Dirents {
    /// It waits for its client.
    pub(crate) fn count(&mut self, tally: &Arc<Tally>) {
        let bytes = self.names.bytes();
        self.counted.get_or_insert_with(|| Held::new(tally, bytes));
    }

    /// Equal cookies are in one part.
    fn part(&mut self, cx: Context<'_>) -> Result<Vec<Dirent>> {
        let (mut part, mut bytes) = (Vec::new(), 0);
        while let Some(row) = self.names.rows.get(self.at) {
            self.at += 1;
            let name = self.names.name(row);
            bytes += dirent_bytes(name);
            if let Ok(name) = Name::new(name) {
                part.push(Dirent { name, ino: self.shown(cx, row)?, kind: row.kind });
            }
            let group_ends = self.names.rows.get(self.at).is_none_or(|next| next.cookie != row.cookie);
            if group_ends && bytes >= PART_BYTES {
                break;
            }
        }
        Ok(part)
    }

    fn shown(&self, cx: Context<'_>, row: &Row) -> Result<u64> {
        let stat = Stat { ino: row.ino, known_anew: false, ..self.dir.stat };
        let (ino, _) = cx.reach().ids.shown(&stat, || Ok(self.dir.fd.try_clone()?))?;
        Ok(ino)
    }
}
