//! The order in which a reader takes files, from two that it has read.

use crate::prefetch::{DirsOrder, FinishedFile, ReadingOrder};
use crate::state::State;
use crate::store::DirEntryRef;
use nigh_types::{Attr, Cookie, Kind, PrefetchOrder};
use std::cmp::Ordering;

/// Most entries of a directory that are looked at.
const LOOKED_AT: usize = 16_384;

/// Returns the order in which one file comes next after another one: in the same directory, or as the first one in the next
/// directory of a walk. `None`: in no order.
pub(crate) fn between(state: &State, before: FinishedFile, this: FinishedFile) -> Option<ReadingOrder> {
    let last = state.prefetch.files.last_order();
    let others = PrefetchOrder::FORWARD.into_iter().chain(PrefetchOrder::REVERSED);
    let mut all = std::iter::once(last.by).chain(others.filter(|by| *by != last.by));
    if before.dir == this.dir {
        let by = all.find(|by| is_next(state, this.dir, Of::Files, *by, Some(before.ino), this.ino))?;
        return Some(ReadingOrder { by, ..last });
    }
    match step_between(state, before.dir, this.dir)? {
        Step::Up => Some(last),
        Step::To { within, from } => all.find_map(|by| {
            let dirs = dirs_order(state, (within, from, this.dir), by)?;
            let is_first = is_next(state, this.dir, Of::Files, by, None, this.ino);
            is_first.then_some(ReadingOrder { by, dirs })
        }),
    }
}

/// A walk's step from one directory to another one.
#[derive(Clone, Copy)]
enum Step {
    /// To the directory above.
    Up,
    /// To a directory in `within`: the first one there, or the one after `from`.
    To { within: u64, from: Option<u64> },
}

/// Returns the step from a directory to its parent, child or sibling.
fn step_between(state: &State, before: u64, this: u64) -> Option<Step> {
    let parent =
        |dir: u64| state.store.inode(dir).and_then(|inode| inode.parent_entry()).map(|(parent, _)| *parent);
    let (above, within) = (parent(before), parent(this));
    if above == Some(this) {
        return Some(Step::Up);
    }
    let within = within?;
    match above {
        _ if within == before => Some(Step::To { within, from: None }),
        Some(above) if above == within => Some(Step::To { within, from: Some(before) }),
        _ => None,
    }
}

/// Returns when a walk that takes such a step goes into directories. `None`: it is no step of this order.
fn dirs_order(
    state: &State,
    (within, from, this): (u64, Option<u64>, u64),
    order: PrefetchOrder,
) -> Option<DirsOrder> {
    if is_next(state, within, Of::Directories, order, from, this) {
        Some(DirsOrder::AmongFiles)
    } else if is_next(state, within, Of::Directories, order.reversed(), from, this) {
        Some(DirsOrder::LastFirst)
    } else {
        None
    }
}

/// Entries of a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    /// Regular files with contents: the kernel asks for nothing of an empty one.
    Files,
    Directories,
}

/// Returns whether an entry comes next after another one, or first, among those of its kind.
fn is_next(state: &State, dir: u64, of: Of, order: PrefetchOrder, before: Option<u64>, this: u64) -> bool {
    let Some(directory) = state.store.dir(dir) else { return false };
    let is_of = move |attr: Attr| match of {
        Of::Files => attr.kind() == Kind::File && attr.size > 0,
        Of::Directories => attr.is_dir(),
    };
    let rows = move || directory.rows.iter().take(LOOKED_AT);
    // Attributes are looked at last: they are stored in a compact form.
    let is_of_kind = move |row: &DirEntryRef<'_>| row.child.is_some_and(|child| is_of(child.attr()));
    let find = move |ino: u64| {
        let found = rows().find(|row| row.child.is_some_and(|child| child.id.ino == ino));
        found.filter(is_of_kind)
    };
    let Some(this) = find(this) else { return false };
    let before = match before.map(find) {
        Some(None) => return false,
        before => before.flatten(),
    };
    let is_after = |row: &DirEntryRef<'_>| before.is_none_or(|before| compare(&before, row, order).is_lt());
    let comes_before = |row: &DirEntryRef<'_>| is_after(row) && compare(row, &this, order).is_lt();
    is_after(&this) && !rows().any(|row| comes_before(&row) && is_of_kind(&row))
}

fn compare(one: &DirEntryRef<'_>, other: &DirEntryRef<'_>, order: PrefetchOrder) -> Ordering {
    fn place<'a>(row: &DirEntryRef<'a>) -> (Cookie, &'a [u8], u64) {
        (row.cookie, row.name, row.child.map_or(0, |child| child.id.ino))
    }
    order.compare(place(one), place(other))
}
