//! Pages that own writes bring in part.
//!
//! A kernel that has such a page whole does not keep it locked until the write is answered (`fuse_fill_write_pages`). It would show
//! what others change of the rest as it was, so when it is told to forget it drops that one too. One that it has not whole it does keep
//! locked, and reads anew after the answer: dropping it is tried in vain, which takes its time. So it is known of each file whether its
//! kernel may have whole pages at all: it gets them by reads, and by writes of whole pages, until all are dropped.

use crate::cache::Cache;
use crate::flight::Purpose;
use crate::locked::Pages;
use crate::op::{Fh, Invalidation, Op, Stale};
use crate::recall::{PAGE, meet, pages, within};
use crate::state::Inode;
use nigh_types::{SetAttr, WriteFlags};

/// Whether a kernel may have whole pages of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole {
    /// How often it got some.
    made: u64,
    /// Of these it has none any more.
    gone: u64,
    /// When it was told to drop all, it had got so many.
    told: Option<(Invalidation, u64)>,
}

impl Whole {
    pub const fn none() -> Whole {
        Whole { made: 0, gone: 0, told: None }
    }

    /// Whether it has none, and is not about to drop any.
    pub fn is_none(self) -> bool {
        !self.may_be() && self.told.is_none()
    }

    /// A read or a write of whole pages begins or is answered.
    pub fn make(&mut self) {
        self.made += 1;
    }

    /// A write was answered, of whole pages or of parts: those may have been left out of what is being dropped.
    fn answered(&mut self, whole: bool) {
        self.made += u64::from(whole || self.told.is_some());
    }

    pub fn told(&mut self, id: Invalidation) {
        self.told = Some((id, self.made));
    }

    pub fn dropped(&mut self, id: Invalidation) {
        if let Some((_, made)) = self.told.take_if(|(told, _)| *told == id) {
            self.gone = made;
        }
    }

    fn may_be(self) -> bool {
        self.made > self.gone
    }
}

impl Cache {
    /// The kernel writes: pages that this brings whole it has from now on, and again when it is answered.
    pub(crate) fn write_begins(&mut self, op: &Op) {
        if let Op::Write { ino, offset, data, .. } = op
            && has_whole_page((*offset, data.len() as u64))
            && !self.is_direct(op)
        {
            self.inodes.get_mut(ino).into_iter().for_each(|inode| inode.more().whole.make());
        }
    }

    /// It was answered, and is done or not.
    pub(crate) fn write_ends(&mut self, purpose: &Purpose, is_done: bool) {
        let Purpose::Write { ino, offset, size, direct, .. } = *purpose else { return };
        let inode = self.inodes.get_mut(&ino).filter(|_| direct.is_none());
        inode.into_iter().for_each(|inode| inode.more().whole.answered(has_whole_page((offset, size))));
        let file = direct.filter(|_| is_done).and_then(|fh| self.files.get_mut(&fh));
        file.into_iter().for_each(|file| file.unanswered_at = None);
    }

    /// A page of it could not be tried: the kernel may have it whole for longer.
    pub fn keeps_part(&mut self, ino: u64) {
        self.inodes.get_mut(&ino).into_iter().for_each(|inode| inode.more().whole.make());
    }

    /// Whether stores into maps have to be written back before that part of a file (offset, length) is dropped for that reason, as for
    /// a recall: whether they are being, and whether there may be some of which we have not heard yet.
    #[must_use]
    pub fn stores_into(&self, why: Invalidation, ino: u64, part: (u64, u64)) -> (bool, bool) {
        if !self.is_recalled(why) {
            return (false, false);
        }
        let is_of_it = |pages: Option<Pages>| pages.is_some_and(|(of, range)| of == ino && meet(range, part));
        let is_flush = |op: &Op| matches!(op, Op::Write { flags: WriteFlags { flush: true, .. }, .. });
        let is_out = self.flights.values().any(|f| f.purpose.is_flush() && is_of_it(f.purpose.pages()))
            || self.parked.values().any(|(_, op)| is_flush(op) && is_of_it(op.pages()));
        let has_pages =
            |i: &Inode| i.base.is_some() || i.old.is_some() || self.ungranted_in(i.id, part).next().is_some();
        let may_be = self.inodes.get(&ino).is_some_and(|i| i.writers > 0 && has_pages(i));
        (is_out, may_be)
    }

    /// Whether a request goes past the kernel's pages. (Reads may be those of a map all the same.)
    pub(crate) fn is_direct(&self, op: &Op) -> bool {
        match op {
            Op::Write { fh, flags: WriteFlags { flush: false, .. }, .. } => {
                self.files.get(fh).is_some_and(|file| file.direct)
            }
            _ => false,
        }
    }

    /// The kernel writes past its pages at what it takes for the end. It has dropped those there, but others may have read some again
    /// before we heard of it; reads from now on wait.
    pub(crate) fn writes_past_pages(&mut self, ino: u64, fh: Fh, offset: u64) {
        self.files.get_mut(&fh).into_iter().for_each(|file| file.unanswered_at = Some(offset));
        let has_whole = self.inodes.get(&ino).is_some_and(|inode| inode.whole.may_be());
        if has_whole && self.config.level.may_keep_pages() {
            self.invalidate(vec![Stale::Data { ino, offset: offset / PAGE * PAGE, length: 0 }], None);
        }
    }

    /// A kernel takes back, as it believes, what a write past its pages has left that failed and was to make the file longer: it
    /// truncates to the end that it knew (`fuse_direct_IO`, for `io_submit` and the like), which may be before what others have appended.
    pub(crate) fn takes_back(&self, fh: Option<Fh>, set: &SetAttr) -> bool {
        let file = fh.and_then(|fh| self.files.get(&fh));
        set.size.is_some()
            && *set == SetAttr { size: set.size, kill_suidgid: set.kill_suidgid, ..SetAttr::default() }
            && file.is_some_and(|file| file.direct && file.unanswered_at == set.size)
    }

    /// Of what [`Cache::droppable`] leaves out (offset, length): pages of which own writes bring a part, or all at a place that the
    /// remote chooses, if the kernel may have them whole. They are to be dropped too, one by one: where one is locked that waits for the
    /// write's answer, and need not be waited for.
    #[must_use]
    pub fn partly_written(&self, ino: u64, (offset, length): (u64, u64)) -> Vec<(u64, u64)> {
        if !self.inodes.get(&ino).is_some_and(|inode| inode.whole.may_be()) {
            return Vec::new();
        }
        let out = self.flights.values().filter(|flight| !flight.waiters.is_empty());
        let out = out.filter_map(|flight| match flight.purpose {
            Purpose::Write { ino: of, offset, size, flush: false, append, direct: None } if of == ino => {
                Some(((offset, size), append))
            }
            _ => None,
        });
        let parked = self.parked.values().filter(|(_, op)| !self.is_direct(op));
        let parked = parked.filter_map(|(_, op)| match op {
            Op::Write { ino: of, offset, data, flags, .. } if *of == ino && !flags.flush => {
                Some(((*offset, data.len() as u64), flags.append))
            }
            _ => None,
        });
        let writes = out.chain(parked).filter(|((_, size), _)| *size > 0);
        let parts = writes.flat_map(|(range, append)| if append { vec![pages(range)] } else { ends(range) });
        within(parts.collect(), offset, length)
    }
}

/// Whether a range covers a page from its beginning to its end.
fn has_whole_page((offset, length): (u64, u64)) -> bool {
    let end = offset.saturating_add(length);
    offset.checked_next_multiple_of(PAGE).is_some_and(|at| at.saturating_add(PAGE) <= end)
}

/// The pages that a range covers in part.
fn ends((offset, length): (u64, u64)) -> Vec<(u64, u64)> {
    let end = offset.saturating_add(length);
    let mut ends = vec![offset / PAGE * PAGE, end / PAGE * PAGE];
    ends.dedup();
    let is_cut = |at: &u64| *at < offset || end < at.saturating_add(PAGE);
    ends.into_iter().filter(|at| *at < end).filter(is_cut).map(|at| (at, PAGE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_pages_that_are_covered_in_part() {
        assert!(
            has_whole_page((0, PAGE)) && has_whole_page((7, 2 * PAGE)) && !has_whole_page((7, 2 * PAGE - 8))
        );
        assert!(!has_whole_page((u64::MAX - 7, 10)));
        assert_eq!(ends((0, PAGE)), []);
        assert_eq!(ends((PAGE, 3 * PAGE)), []);
        assert_eq!(ends((PAGE, 10)), [(PAGE, PAGE)]);
        assert_eq!(ends((PAGE + 7, 10)), [(PAGE, PAGE)]);
        assert_eq!(ends((PAGE + 7, PAGE - 7)), [(PAGE, PAGE)]);
        assert_eq!(ends((7, 2 * PAGE)), [(0, PAGE), (2 * PAGE, PAGE)]);
    }

    #[test]
    fn what_was_read_while_all_was_dropped_may_be_there() {
        let mut whole = Whole::none();
        assert!(!whole.may_be());
        whole.make();
        whole.told(Invalidation(1));
        whole.dropped(Invalidation(2));
        assert!(whole.may_be(), "that was another one");
        whole.dropped(Invalidation(1));
        assert!(!whole.may_be());
        whole.make();
        whole.told(Invalidation(3));
        whole.make();
        whole.dropped(Invalidation(3));
        assert!(whole.may_be());
        whole.told(Invalidation(4));
        whole.answered(false);
        whole.dropped(Invalidation(4));
        assert!(whole.may_be(), "of what was being written a part may have been left out");
        whole.told(Invalidation(5));
        whole.dropped(Invalidation(5));
        whole.answered(false);
        assert!(!whole.may_be());
        whole.answered(true);
        assert!(whole.may_be());
    }
}
