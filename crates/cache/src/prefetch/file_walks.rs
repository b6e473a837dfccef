//! Walks of readers of files: where each stands, and which files come next.
//!
//! A walk goes depth first, in one order of the entries of each directory. It goes on into directories that are listed, and
//! waits at one that a prefetch job will bring.

use crate::contents::ReadAs;
use crate::op::Caller;
use nigh_types::{Cookie, Name, NodeId, NodeRef, PrefetchOrder, Span, Time};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Most walks; the one used longest ago gives way.
const MOST_WALKS: usize = 4;
/// Files that were read to their end last, by which a walk is recognised.
const REMEMBERED: usize = 8;
/// Files asked for by walks that gave way are forgotten beyond this number of files.
const MOST_ASKED: usize = 16_384;
/// Most files of which a part was read that are remembered.
const MOST_BEGUN: usize = 64;
/// A file costs this beside its bytes: a call, and records.
const FILE_COST: u64 = 512;
/// Files in a row without an order that are all looked at.
const LOOKED_AT_FIRST: u32 = 4;
/// Time in which no walk begins where nothing came for the last one.
const REFUSED_FOR: Span = Span::from_millis(1_000);
/// Part of what may be ahead of a reader that one file may take, of which the reader may read a part only.
const WHOLE_SHARE: u64 = 4;
/// Bytes that a walk may have in flight or unread before any of it was used.
const FIRST_WINDOW: u64 = 128 << 10;

/// Order in which a reader takes the entries of a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ReadingOrder {
    /// Order of the files among each other, and of the directories among them.
    pub by: PrefetchOrder,
    pub dirs: DirsOrder,
}

/// When a reader goes into the directories of a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum DirsOrder {
    /// In their places among the files: tar, cp, grep.
    #[default]
    AmongFiles,
    /// After the files, in the same order: rsync, `os.walk`.
    AfterFiles,
    /// After the files, the last one first: a walker with a stack of directories.
    LastFirst,
}

/// Entry of a directory that a walk has not reached.
#[derive(Clone, Debug)]
pub(crate) struct WalkEntry {
    pub id: NodeId,
    pub name: Name,
    pub is_dir: bool,
}

/// Directory in which a walk stands.
#[derive(Clone, Debug)]
pub(crate) struct WalkLevel {
    pub dir: NodeId,
    /// Entries ahead, the next one first.
    pub left: VecDeque<WalkEntry>,
    /// For a directory of which a part was taken: where the next part begins.
    pub taken_to: Option<Cookie>,
}

/// The rights with which a walk reads files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader {
    pub read_as: ReadAs,
    /// A caller with these rights; `None`: the mount itself.
    pub caller: Option<Caller>,
}

/// The rest of a file's head, for which the link had no room.
#[derive(Clone, Debug)]
pub(crate) struct RestOfHead {
    pub file: NodeRef,
    /// What is still to be asked for.
    pub part: Range<u64>,
}

/// Walk of a reader, or of several that share it.
#[derive(Clone, Debug)]
pub(crate) struct FileWalk {
    pub order: ReadingOrder,
    pub reader: Reader,
    /// From the outermost directory to the one in which the walk stands.
    pub levels: Vec<WalkLevel>,
    pub rest: Option<RestOfHead>,
    /// Its readers read large files to their ends, too.
    reads_whole: bool,
    /// Cost of the files that were used, and of those that were asked for and not used.
    used: u64,
    unused: u64,
    last_used: Time,
    /// When a file that was asked for did not come last.
    failed: Option<Time>,
}

impl FileWalk {
    pub fn new(order: ReadingOrder, reader: Reader, levels: Vec<WalkLevel>, now: Time) -> FileWalk {
        let (used, unused) = (0, 0);
        FileWalk {
            order,
            reader,
            levels,
            rest: None,
            reads_whole: false,
            used,
            unused,
            last_used: now,
            failed: None,
        }
    }

    /// Returns how many bytes of the next file come ahead at most. `largest`: most bytes ahead of a reader; `share`: those of a
    /// file whose reader asks for the rest in time.
    pub fn head(&self, largest: u64, share: u64) -> u64 {
        let most = if self.reads_whole { share.max(largest / WHOLE_SHARE) } else { share };
        self.room(largest).min(most)
    }

    /// Returns the number of entries ahead.
    pub fn entries(&self) -> usize {
        self.levels.iter().map(|level| level.left.len()).sum()
    }

    /// Returns how many bytes may still be asked for. `largest`: most bytes ahead of a reader.
    pub fn room(&self, largest: u64) -> u64 {
        (2 * self.used).clamp(FIRST_WINDOW, largest.max(FIRST_WINDOW)).saturating_sub(self.unused)
    }
}

/// Number of a walk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct WalkNumber(u64);

/// File that was read to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FinishedFile {
    pub ino: u64,
    pub dir: u64,
}

/// Where a reader stands that none of the walks has asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WalkAt {
    /// In the directory of this walk, which goes on behind it.
    Here(WalkNumber),
    /// In the directory of a walk of which nothing has come lately.
    Refused,
    /// In no walk.
    Nowhere,
}

/// Walks of one mount.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileWalks {
    walks: BTreeMap<WalkNumber, FileWalk>,
    last_number: u64,
    /// Files that were asked for and not used: the walk, and the cost.
    asked: FxHashMap<u64, (WalkNumber, u64)>,
    /// Files that walks have asked for, of which a part was read. The latest last.
    begun: VecDeque<(u64, WalkNumber)>,
    /// The latest last.
    finished: VecDeque<FinishedFile>,
    /// Order of the walk that began last.
    last_order: ReadingOrder,
    /// Files in a row that were read in no order or began a walk that asked for nothing, and how many are not looked at
    /// before the next one is.
    without_order: u32,
    skipped: u32,
}

impl FileWalks {
    pub fn forget(&mut self) {
        *self = FileWalks { last_number: self.last_number, ..FileWalks::default() };
    }

    pub fn numbers(&self) -> Vec<WalkNumber> {
        self.walks.keys().copied().collect()
    }

    pub fn last_order(&self) -> ReadingOrder {
        self.last_order
    }

    /// Returns whether to look for the order in which a file was read, which takes long in large directories.
    pub fn may_look(&mut self) -> bool {
        let may = self.skipped == 0;
        self.skipped = self.skipped.saturating_sub(1);
        may
    }

    /// Records a file that was read in no order, or behind which nothing is to come: after some of them only every few files are
    /// looked at.
    pub fn note_nothing_ahead(&mut self) {
        self.without_order = (self.without_order + 1).min(LOOKED_AT_FIRST + 5);
        self.skipped = (1 << self.without_order.saturating_sub(LOOKED_AT_FIRST)) - 1;
    }

    /// Goes on with the walk in whose directory a file was read with these rights, behind that file.
    pub fn go_on_at(
        &mut self,
        now: Time,
        order: ReadingOrder,
        read_as: ReadAs,
        file: FinishedFile,
    ) -> WalkAt {
        let stands = |walk: &FileWalk| {
            let is_alike = walk.order == order && walk.reader.read_as == read_as;
            is_alike && walk.levels.last().is_some_and(|level| level.dir.ino == file.dir)
        };
        let Some((&number, walk)) = self.walks.iter_mut().find(|(_, walk)| stands(walk)) else {
            return WalkAt::Nowhere;
        };
        if walk.failed.is_some_and(|failed| now < failed.after(REFUSED_FOR)) {
            return WalkAt::Refused;
        }
        let left = walk.levels.last_mut().map(|level| &mut level.left);
        let at = left.as_ref().and_then(|left| left.iter().position(|entry| entry.id.ino == file.ino));
        if let (Some(left), Some(at), None) = (left, at, walk.failed) {
            left.drain(..=at);
            (walk.last_used, self.without_order) = (now, 0);
            return WalkAt::Here(number);
        }
        self.end(number);
        WalkAt::Nowhere
    }

    /// Begins a walk.
    pub fn begin(&mut self, walk: FileWalk) -> WalkNumber {
        while self.walks.len() >= MOST_WALKS {
            let oldest = self.walks.iter().min_by_key(|(_, walk)| walk.last_used).map(|(number, _)| *number);
            let Some(oldest) = oldest else { break };
            self.end(oldest);
        }
        self.last_number += 1;
        self.last_order = walk.order;
        let number = WalkNumber(self.last_number);
        self.walks.insert(number, walk);
        number
    }

    fn end(&mut self, number: WalkNumber) {
        self.walks.remove(&number);
        if self.asked.len() > MOST_ASKED {
            self.asked.retain(|_, (of, _)| self.walks.contains_key(of));
        }
    }

    /// Takes a walk out, to go on with it; [`FileWalks::put_back`] follows.
    pub fn take(&mut self, number: WalkNumber) -> Option<FileWalk> {
        self.walks.remove(&number)
    }

    /// Puts a walk back, unless it is at its end and nothing of it is left to use.
    pub fn put_back(&mut self, number: WalkNumber, walk: FileWalk) {
        if !walk.levels.is_empty() || walk.unused > 0 {
            self.walks.insert(number, walk);
        }
    }

    /// Records a file that is asked for, by a walk that is taken out.
    pub fn note_asked(&mut self, number: WalkNumber, walk: &mut FileWalk, ino: u64, bytes: u64) {
        let cost = bytes + FILE_COST;
        self.without_order = 0;
        walk.unused += cost;
        self.asked.insert(ino, (number, cost));
    }

    /// Records more bytes of a file that a walk has asked for.
    pub fn note_asked_on(&mut self, walk: &mut FileWalk, ino: u64, bytes: u64) {
        if let Some((_, cost)) = self.asked.get_mut(&ino) {
            walk.unused += bytes;
            *cost += bytes;
        }
    }

    /// Returns whether a walk has asked for a file with which no reader has begun.
    pub fn is_asked_by(&self, number: WalkNumber, ino: u64) -> bool {
        self.asked.get(&ino).is_some_and(|(by, _)| *by == number)
    }

    /// Records that a reader of a walk has read a large file to its end.
    pub fn note_whole(&mut self, number: WalkNumber) {
        self.walks.get_mut(&number).into_iter().for_each(|walk| walk.reads_whole = true);
    }

    /// Records a read of a file, which may go up to its end. Returns the walk that asked for it, at the first read and at the last
    /// one.
    pub fn note_used(&mut self, now: Time, ino: u64, is_end: bool) -> Option<WalkNumber> {
        let Some((number, cost)) = self.asked.remove(&ino) else {
            let at = self.begun.iter().position(|(file, _)| is_end && *file == ino)?;
            let (_, number) = self.begun.remove(at)?;
            return self.heir_of(number);
        };
        if let Some(walk) = self.walks.get_mut(&number) {
            walk.unused = walk.unused.saturating_sub(cost);
        }
        let number = self.heir_of(number)?;
        let walk = self.walks.get_mut(&number)?;
        walk.used += cost;
        walk.last_used = now;
        if !is_end {
            self.begun.push_back((ino, number));
            if self.begun.len() > MOST_BEGUN {
                self.begun.pop_front();
            }
        }
        Some(number)
    }

    /// Returns the walk that goes on for a reader: that one, or the latest if it gave way because another one began beside it.
    fn heir_of(&self, number: WalkNumber) -> Option<WalkNumber> {
        let latest = || self.walks.iter().max_by_key(|(_, walk)| walk.last_used).map(|(latest, _)| *latest);
        if self.walks.contains_key(&number) { Some(number) } else { latest() }
    }

    /// Records that a file that had come is not there any more.
    pub fn note_gone(&mut self, ino: u64) {
        let Some((number, cost)) = self.asked.remove(&ino) else { return };
        if let Some(walk) = self.walks.get_mut(&number) {
            walk.unused = walk.unused.saturating_sub(cost);
        }
    }

    /// Records that a file that was asked for did not come. It goes on counting as unused, so that a walk of which nothing comes
    /// ends soon.
    pub fn note_failed(&mut self, now: Time, ino: u64) {
        let Some((number, _)) = self.asked.remove(&ino) else { return };
        self.walks.get_mut(&number).into_iter().for_each(|walk| walk.failed = Some(now));
    }

    /// Records a file that was read to its end. Returns those before it, the latest first; none if it is the latest itself.
    pub fn note_finished(&mut self, file: FinishedFile) -> Vec<FinishedFile> {
        if self.finished.back() == Some(&file) {
            return Vec::new();
        }
        let before = self.finished.iter().rev().copied().filter(|one| *one != file).collect();
        self.finished.push_back(file);
        if self.finished.len() > REMEMBERED {
            self.finished.pop_front();
        }
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk() -> FileWalk {
        let level =
            WalkLevel { dir: NodeId { ino: 1, generation: 1 }, left: VecDeque::new(), taken_to: None };
        FileWalk::new(
            ReadingOrder::default(),
            Reader { read_as: ReadAs::Mount, caller: None },
            vec![level],
            Time(0),
        )
    }

    #[test]
    fn window_is_twice_what_was_used_within_its_bounds() {
        let (mut walks, largest) = (FileWalks::default(), 1 << 20);
        let number = walks.begin(walk());
        let mut one = walks.take(number).unwrap();
        let ask = |walks: &mut FileWalks, from: u64, one: &mut FileWalk| {
            let files = (from..).take_while(|ino| {
                let room = one.room(largest) > 0;
                if room {
                    walks.note_asked(number, one, *ino, 1_024 - FILE_COST);
                }
                room
            });
            files.count() as u64
        };
        let first = ask(&mut walks, 0, &mut one);
        assert_eq!(first, FIRST_WINDOW / 1_024);
        walks.put_back(number, one);
        (0..first).for_each(|ino| assert_eq!(walks.note_used(Time(1), ino, true), Some(number)));
        assert_eq!(walks.note_used(Time(1), 0, true), None, "it was used before");
        let mut one = walks.take(number).unwrap();
        let second = ask(&mut walks, 10_000, &mut one);
        assert_eq!(second, 2 * first);
        walks.put_back(number, one);
        (10_000..10_000 + second).for_each(|ino| walks.note_gone(ino));
        let mut one = walks.take(number).unwrap();
        assert_eq!(
            ask(&mut walks, 20_000, &mut one),
            2 * first,
            "what is gone leaves room and counts as not used"
        );
        walks.put_back(number, one);
    }

    /// Else the link would stand still while a reader waits for the rest of one file after the other.
    #[test]
    fn head_of_a_file_grows_once_large_files_are_read_to_their_ends() {
        let (mut walks, largest, share) = (FileWalks::default(), 32 << 20, 1 << 20);
        let number = walks.begin(FileWalk { used: 64 << 20, ..walk() });
        let head = |walks: &mut FileWalks| {
            let one = walks.take(number).unwrap();
            let head = one.head(largest, share);
            walks.put_back(number, one);
            head
        };
        assert_eq!(head(&mut walks), share);
        walks.note_whole(number);
        assert_eq!(head(&mut walks), largest / WHOLE_SHARE);
    }

    #[test]
    fn more_of_a_file_counts_until_its_reader_begins() {
        let mut walks = FileWalks::default();
        let number = walks.begin(walk());
        let mut one = walks.take(number).unwrap();
        walks.note_asked(number, &mut one, 7, 1_000);
        walks.note_asked_on(&mut one, 7, 500);
        assert_eq!(one.unused, 1_500 + FILE_COST);
        walks.put_back(number, one);
        assert!(walks.is_asked_by(number, 7));
        assert_eq!(walks.note_used(Time(1), 7, false), Some(number));
        assert!(!walks.is_asked_by(number, 7));
        let mut one = walks.take(number).unwrap();
        walks.note_asked_on(&mut one, 7, 500);
        assert_eq!((one.unused, one.used), (0, 1_500 + FILE_COST));
    }

    #[test]
    fn large_file_counts_once_and_its_last_read_belongs_to_its_walk() {
        let mut walks = FileWalks::default();
        let number = walks.begin(walk());
        let mut one = walks.take(number).unwrap();
        walks.note_asked(number, &mut one, 7, 1_000);
        walks.put_back(number, one);
        let reads = [false, false, true, true].map(|is_end| walks.note_used(Time(1), 7, is_end));
        assert_eq!(reads, [Some(number), None, Some(number), None]);
        let one = walks.take(number);
        assert!(one.is_none_or(|one| one.used == 1_000 + FILE_COST));
    }

    #[test]
    fn file_of_a_walk_that_gave_way_belongs_to_the_latest_one() {
        let mut walks = FileWalks::default();
        let numbers: Vec<WalkNumber> = (0..MOST_WALKS as u64)
            .map(|at| walks.begin(FileWalk { last_used: Time(at), ..walk() }))
            .collect();
        let mut one = walks.take(numbers[0]).unwrap();
        walks.note_asked(numbers[0], &mut one, 7, 1_000);
        walks.put_back(numbers[0], one);
        let latest = walks.begin(FileWalk { last_used: Time(9), ..walk() });
        assert!(!walks.numbers().contains(&numbers[0]));
        assert_eq!(walks.note_used(Time(10), 7, true), Some(latest), "no other walk begins");
    }

    #[test]
    fn walk_used_longest_ago_gives_way() {
        let mut walks = FileWalks::default();
        let numbers: Vec<WalkNumber> = (0..=MOST_WALKS as u64)
            .map(|at| walks.begin(FileWalk { last_used: Time(if at == 1 { 0 } else { at + 1 }), ..walk() }))
            .collect();
        let left = walks.numbers();
        assert!(!left.contains(&numbers[1]) && left.len() == MOST_WALKS, "{left:?}");
    }

    #[test]
    fn reader_behind_its_walk_begins_no_other_one_and_waits_after_a_refusal() {
        let mut walks = FileWalks::default();
        let entry = |ino| WalkEntry {
            id: NodeId { ino, generation: 1 },
            name: Name::new(b"f").unwrap(),
            is_dir: false,
        };
        let mut one = walk();
        one.levels[0].left = (5..9).map(entry).collect();
        let number = walks.begin(one);
        let order = ReadingOrder::default();
        let file = |ino| FinishedFile { ino, dir: 1 };
        assert_eq!(
            walks.go_on_at(Time(1), order, ReadAs::Mount, FinishedFile { ino: 6, dir: 2 }),
            WalkAt::Nowhere
        );
        assert_eq!(walks.go_on_at(Time(1), order, ReadAs::Mount, file(6)), WalkAt::Here(number));
        let mut one = walks.take(number).unwrap();
        assert_eq!(one.levels[0].left.iter().map(|entry| entry.id.ino).collect::<Vec<_>>(), [7, 8]);
        walks.note_asked(number, &mut one, 7, 100);
        walks.put_back(number, one);
        walks.note_failed(Time(2), 7);
        assert_eq!(walks.go_on_at(Time(3), order, ReadAs::Mount, file(8)), WalkAt::Refused);
        assert_eq!(
            walks.go_on_at(Time(2).after(REFUSED_FOR), order, ReadAs::Mount, file(8)),
            WalkAt::Nowhere
        );
        assert_eq!(walks.numbers(), []);
    }

    #[test]
    fn order_is_looked_for_less_often_where_there_is_none() {
        let mut walks = FileWalks::default();
        let looked = |walks: &mut FileWalks, files: u32| {
            let looks = (0..files).filter(|_| {
                let looks = walks.may_look();
                if looks {
                    walks.note_nothing_ahead();
                }
                looks
            });
            looks.count()
        };
        assert_eq!(looked(&mut walks, 4), 4);
        assert!(looked(&mut walks, 1_000) < 40);
        let number = walks.begin(walk());
        let mut one = walks.take(number).unwrap();
        walks.note_asked(number, &mut one, 7, 1);
        walks.skipped = 0;
        assert_eq!(looked(&mut walks, 4), 4);
    }

    #[test]
    fn file_that_is_read_again_at_once_is_no_walk() {
        let mut walks = FileWalks::default();
        let file = |ino| FinishedFile { ino, dir: 1 };
        assert_eq!(walks.note_finished(file(5)), []);
        assert_eq!(walks.note_finished(file(5)), []);
        assert_eq!(walks.note_finished(file(6)), [file(5)]);
        assert_eq!(walks.note_finished(file(5)), [file(6)]);
    }
}
