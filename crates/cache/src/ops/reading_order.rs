//! The order in which a reader takes files, from two that it has read.

use crate::ops::walk_levels::{self, find};
use crate::prefetch::{DirsOrder, FinishedFile, ReadingOrder};
use crate::state::State;
use crate::store::{DirEntryRef, Directory};
use nigh_types::{Cookie, Kind, PrefetchOrder};
use std::cmp::Ordering;

/// Most directories above one that are looked at.
const MOST_LEVELS: usize = 16;

/// Returns the order in which one file comes next after another one: in the same directory, or as the first one in the next
/// directory of a walk, which may be levels away. `None`: in no order.
pub(crate) fn between(state: &State, before: FinishedFile, this: FinishedFile) -> Option<ReadingOrder> {
    let last = state.prefetch.files.last_order();
    let others = PrefetchOrder::FORWARD.into_iter().chain(PrefetchOrder::REVERSED);
    let mut all = std::iter::once(last.by).chain(others.filter(|by| *by != last.by));
    if before.dir == this.dir {
        let by = all.find(|by| is_next(state, this.dir, Of::Files, *by, Some(before.ino), this.ino))?;
        let passes = has_between(state, this.dir, Of::Unread, by, (before.ino, Some(this.ino)));
        let dirs =
            if passes && last.dirs == DirsOrder::AmongFiles { DirsOrder::AfterFiles } else { last.dirs };
        return Some(ReadingOrder { by, dirs });
    }
    let step = step_between(state, before, this.dir)?;
    let Step::To { steps } = &step else { return Some(last) };
    let mut fits = all.filter_map(|by| {
        let dirs = dirs_order(state, steps, by, last.dirs)?;
        let is_first = is_next(state, this.dir, Of::Files, by, None, this.ino);
        is_first.then_some(ReadingOrder { by, dirs })
    });
    // Few readers take the last directory first; in another order it may be the next one by chance.
    let first = fits.next()?;
    let is_likely = |order: &ReadingOrder| *order == last || order.dirs != DirsOrder::LastFirst;
    Some(if is_likely(&first) { first } else { fits.find(is_likely).unwrap_or(first) })
}

/// A walk's step from one directory to another one.
#[derive(Clone)]
enum Step {
    /// To the directory above.
    Up,
    To {
        steps: Steps,
    },
}

/// Steps of a walk: it leaves directories, goes from an entry of a directory into another one, and there to one below.
#[derive(Clone)]
struct Steps {
    /// Directories that the walk leaves, each with the one in it that it has left before.
    out: Vec<(u64, u64)>,
    within: u64,
    from: From,
    to: u64,
    /// Directories that the walk goes through, each with the one in it that it enters.
    into: Vec<(u64, u64)>,
}

/// Inode number of the entry that was read before.
#[derive(Clone, Copy)]
enum From {
    File(u64),
    Directory(u64),
}

/// Returns the step from a file to another directory.
fn step_between(state: &State, before: FinishedFile, this: u64) -> Option<Step> {
    let (left, entered) = (with_those_above(state, before.dir), with_those_above(state, this));
    if left.get(1) == Some(&this) {
        return Some(Step::Up);
    }
    let (up, down) = left.iter().enumerate().find_map(|(up, dir)| {
        let down = entered.iter().position(|entered| entered == dir)?;
        Some((up, down))
    })?;
    let pairs = |dirs: &[u64]| dirs.windows(2).map(|pair| (pair[1], pair[0])).collect();
    let to = *entered.get(down.checked_sub(1)?)?;
    let from = match up.checked_sub(1) {
        None => From::File(before.ino),
        Some(below) => From::Directory(left[below]),
    };
    let (out, into) = (pairs(&left[..up]), pairs(&entered[..down]));
    Some(Step::To { steps: Steps { out, within: left[up], from, to, into } })
}

/// Returns a directory and those above it, as far as they are looked at.
fn with_those_above(state: &State, dir: u64) -> Vec<u64> {
    let parent =
        |dir: &u64| state.store.inode(*dir).and_then(|inode| inode.parent_entry()).map(|(parent, _)| *parent);
    std::iter::successors(Some(dir), parent).take(MOST_LEVELS).collect()
}

/// Returns when a walk that takes such steps goes into directories. `None`: they are not those of this order. `last`: when the
/// walk before did, for steps that do not tell.
fn dirs_order(state: &State, steps: &Steps, order: PrefetchOrder, last: DirsOrder) -> Option<DirsOrder> {
    let dirs = dirs_order_within(state, steps, order, last)?;
    let among = if dirs == DirsOrder::LastFirst { order.reversed() } else { order };
    let is_end = |order, (dir, this): &(u64, u64)| is_next(state, *dir, Of::Directories, order, None, *this);
    let is_whole = steps.out.iter().all(|step| is_end(among.reversed(), step))
        && steps.into.iter().all(|step| is_end(among, step));
    is_whole.then_some(dirs)
}

/// The same, by the step within one directory.
fn dirs_order_within(
    state: &State,
    Steps { within, from, to, .. }: &Steps,
    order: PrefetchOrder,
    last: DirsOrder,
) -> Option<DirsOrder> {
    let (within, this) = (*within, *to);
    let is_next_dir = |order, before| is_next(state, within, Of::Directories, order, before, this);
    let either = if last == DirsOrder::LastFirst { DirsOrder::AmongFiles } else { last };
    match *from {
        From::Directory(before) if is_next_dir(order, Some(before)) => {
            let has_files = has_between(state, within, Of::Files, order, (before, Some(this)));
            Some(if has_files { DirsOrder::AfterFiles } else { either })
        }
        From::Directory(before) => {
            is_next_dir(order.reversed(), Some(before)).then_some(DirsOrder::LastFirst)
        }
        From::File(before) => {
            let is_behind = precedes(state, within, order, (before, this));
            let follows = is_behind && !has_between(state, within, Of::Any, order, (before, Some(this)));
            let (is_first, is_last) = (is_next_dir(order, None), is_next_dir(order.reversed(), None));
            match (follows, is_first) {
                (true, true) if !has_between(state, within, Of::Files, order, (this, None)) => Some(either),
                (true, _) => Some(DirsOrder::AmongFiles),
                (false, true) => Some(DirsOrder::AfterFiles),
                (false, false) => is_last.then_some(DirsOrder::LastFirst),
            }
        }
    }
}

/// Entries of a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    /// Regular files with contents: the kernel asks for nothing of an empty one.
    Files,
    Directories,
    /// Directories that a reader in order would have read files of, or would have listed.
    Unread,
    Any,
}

impl Of {
    // Attributes are looked at last: they are stored in a compact form.
    fn contains(self, state: &State, row: &DirEntryRef<'_>) -> bool {
        let Some(child) = row.child else { return false };
        let attr = child.attr();
        let is_file = attr.kind() == Kind::File && attr.size > 0;
        match self {
            Of::Files => is_file,
            Of::Directories => attr.is_dir(),
            Of::Any => is_file || attr.is_dir(),
            Of::Unread => {
                let has_file = |dir: &Directory| {
                    dir.rows.iter().take(walk_levels::LOOKED_AT).any(|row| Of::Files.contains(state, &row))
                };
                attr.is_dir()
                    && state.store.dir(child.id.ino).is_none_or(|dir| !dir.was_read || has_file(dir))
            }
        }
    }
}

/// Returns the entries of a directory that lie between two of them in an order, and perhaps others. `None`: it is too large.
fn rows_between<'a>(
    state: &'a State,
    dir: u64,
    order: PrefetchOrder,
    (from, to): (Option<&DirEntryRef<'_>>, Option<&DirEntryRef<'_>>),
) -> Option<impl Iterator<Item = DirEntryRef<'a>>> {
    let (first, last) = match order {
        PrefetchOrder::Cookie => (from.map(|row| row.cookie), to.map(|row| row.cookie)),
        PrefetchOrder::CookieReversed => (to.map(|row| row.cookie), from.map(|row| row.cookie)),
        _ => (None, None),
    };
    // Rows with the same cookie as the first one are looked at, too.
    let before = first.map_or(Cookie(0), |first| Cookie(first.0.saturating_sub(1)));
    let is_bounded = first.is_some() && last.is_some();
    let directory =
        state.store.dir(dir).filter(|directory| is_bounded || walk_levels::is_small(directory))?;
    let rows = directory.rows.after(before);
    Some(rows.take_while(move |row| last.is_none_or(|last| row.cookie <= last)).take(walk_levels::LOOKED_AT))
}

/// Returns whether an entry comes next after another one, or first, among those of its kind.
fn is_next(state: &State, dir: u64, of: Of, order: PrefetchOrder, before: Option<u64>, this: u64) -> bool {
    let found = |ino| find(state, dir, ino).filter(|row| of.contains(state, row));
    let Some(this) = found(this) else { return false };
    let before = match before.map(found) {
        Some(None) => return false,
        before => before.flatten(),
    };
    let is_after = |row: &DirEntryRef<'_>| before.is_none_or(|before| compare(&before, row, order).is_lt());
    let comes_before = |row: &DirEntryRef<'_>| is_after(row) && compare(row, &this, order).is_lt();
    let between = rows_between(state, dir, order, (before.as_ref(), Some(&this)));
    let lies_between = |row: DirEntryRef<'_>| comes_before(&row) && of.contains(state, &row);
    is_after(&this) && between.is_some_and(|mut rows| !rows.any(lies_between))
}

/// Returns whether one entry of a directory comes before another one.
fn precedes(state: &State, dir: u64, order: PrefetchOrder, (before, this): (u64, u64)) -> bool {
    let found = (find(state, dir, before), find(state, dir, this));
    matches!(found, (Some(before), Some(this)) if compare(&before, &this, order).is_lt())
}

/// Returns whether entries of a kind lie between two entries, or behind one (`to`: `None`), as far as that is known.
fn has_between(
    state: &State,
    dir: u64,
    of: Of,
    order: PrefetchOrder,
    (from, to): (u64, Option<u64>),
) -> bool {
    let Some(from) = find(state, dir, from) else { return false };
    let to = to.and_then(|to| find(state, dir, to));
    let is_between = |row: &DirEntryRef<'_>| {
        compare(&from, row, order).is_lt() && to.is_none_or(|to| compare(row, &to, order).is_lt())
    };
    let rows = rows_between(state, dir, order, (Some(&from), to.as_ref()));
    rows.is_none_or(|mut rows| rows.any(|row| is_between(&row) && of.contains(state, &row)))
}

fn compare(one: &DirEntryRef<'_>, other: &DirEntryRef<'_>, order: PrefetchOrder) -> Ordering {
    fn place<'a>(row: &DirEntryRef<'a>) -> (Cookie, &'a [u8], u64) {
        (row.cookie, row.name, row.child.map_or(0, |child| child.id.ino))
    }
    order.compare(place(one), place(other))
}
