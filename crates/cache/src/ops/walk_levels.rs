//! Directories that a walk of a reader goes through: which of their entries lie ahead.

use crate::prefetch::{DirsOrder, ReadingOrder, WalkEntry, WalkLevel};
use crate::state::State;
use crate::store::{DirEntryRef, Directory};
use nigh_types::{Cookie, Kind, NodeId, PrefetchOrder, Time};
use std::collections::VecDeque;

/// Most entries of a directory that a walk takes at a time. Of larger directories it takes them in the order of the listing alone:
/// the others need all entries at once.
pub(crate) const LOOKED_AT: usize = 65_536;

/// Returns the entries of a directory that a walk enters. `None`: it is not listed.
pub(crate) fn first(state: &State, now: Time, dir: u64, order: ReadingOrder) -> Option<WalkLevel> {
    level(listed(state, now, dir)?, order, None)
}

/// Returns the entries behind one of them.
pub(crate) fn behind(state: &State, now: Time, dir: u64, order: ReadingOrder, ino: u64) -> Option<WalkLevel> {
    let directory = listed(state, now, dir)?;
    let mut level = if is_small(directory) {
        level(directory, order, None)?
    } else {
        let cookie = find(state, dir, ino)?.cookie;
        return level(directory, order, Some(cookie));
    };
    let at = level.left.iter().position(|entry| entry.id.ino == ino)?;
    level.left.drain(..=at);
    Some(level)
}

/// Returns the next entries of a large directory of which a walk has taken a part.
pub(crate) fn rest(state: &State, now: Time, done: &WalkLevel, order: ReadingOrder) -> Option<WalkLevel> {
    let cookie = done.taken_to?;
    let directory = listed(state, now, done.dir.ino).filter(|directory| directory.id == done.dir)?;
    level(directory, order, Some(cookie)).filter(|level| !level.left.is_empty() || level.taken_to.is_some())
}

/// Returns the rest of the directory above one that is done, if the walk came down from there. A directory that no caller has
/// read is above the walk: names were looked up in it, as `rg` does for `.gitignore`.
pub(crate) fn above(state: &State, now: Time, done: NodeId, order: ReadingOrder) -> Option<WalkLevel> {
    state.store.dir(done.ino).filter(|directory| directory.id == done && directory.opened_in_walk)?;
    let (above, _) = state.store.inode(done.ino)?.parent_entry()?;
    state.store.dir(*above).filter(|directory| directory.was_read)?;
    behind(state, now, *above, order, done.ino)
}

fn listed(state: &State, now: Time, dir: u64) -> Option<&Directory> {
    let is_complete = |d: &&Directory| d.complete && d.held.is_some_and(|held| held.is_live(now));
    state.store.dir(dir).filter(is_complete)
}

/// Returns whether all entries of a directory are looked at.
pub(crate) fn is_small(directory: &Directory) -> bool {
    directory.rows.existing() <= LOOKED_AT as u64
}

/// Returns the entry of an inode in a directory.
pub(crate) fn find(state: &State, dir: u64, ino: u64) -> Option<DirEntryRef<'_>> {
    let directory = state.store.dir(dir)?;
    let is_it = |row: &DirEntryRef<'_>| row.child.is_some_and(|child| child.id.ino == ino);
    let named = state.store.inode(ino).and_then(|inode| inode.parent_entry()).filter(|(at, _)| *at == dir);
    let named = named.and_then(|(_, name)| directory.rows.find(state.store.cookie(name), name.as_bytes()));
    named.filter(is_it).or_else(|| directory.rows.iter().take(LOOKED_AT).find(is_it))
}

/// Returns the regular files and the directories of a directory, in an order. `from`: only those that are listed behind it.
fn level(directory: &Directory, order: ReadingOrder, from: Option<Cookie>) -> Option<WalkLevel> {
    if !is_small(directory) && order.by != PrefetchOrder::Cookie {
        return None;
    }
    let rows: Vec<DirEntryRef<'_>> = match from {
        Some(cookie) => directory.rows.after(cookie).take(LOOKED_AT).collect(),
        None => directory.rows.iter().take(LOOKED_AT).collect(),
    };
    let taken_to = rows.last().filter(|_| rows.len() == LOOKED_AT).map(|row| row.cookie);
    let mut left: Vec<(Cookie, WalkEntry)> = Vec::with_capacity(rows.len());
    for row in rows {
        let Some(child) = row.child else { continue };
        let is_dir = child.attr().is_dir();
        if is_dir || child.attr().kind() == Kind::File {
            left.push((row.cookie, WalkEntry { id: child.id, name: row.to_name(), is_dir }));
        }
    }
    fn place((cookie, entry): &(Cookie, WalkEntry)) -> (Cookie, &[u8], u64) {
        (*cookie, entry.name.as_bytes(), entry.id.ino)
    }
    left.sort_unstable_by(|a, b| order.by.compare(place(a), place(b)));
    let mut left: VecDeque<WalkEntry> = left.into_iter().map(|(_, entry)| entry).collect();
    if order.dirs != DirsOrder::AmongFiles {
        let (mut dirs, files): (VecDeque<WalkEntry>, VecDeque<WalkEntry>) =
            left.into_iter().partition(|entry| entry.is_dir);
        if order.dirs == DirsOrder::LastFirst {
            dirs.make_contiguous().reverse();
        }
        left = files.into_iter().chain(dirs).collect();
    }
    Some(WalkLevel { dir: directory.id, left, taken_to })
}
