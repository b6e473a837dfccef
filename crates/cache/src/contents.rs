//! Owner of clean file contents, of the reads ahead in flight, and of the open files' readers.
//!
//! Contents lie under a data grant of their own, whose recall or end drops them. Local changes of a file's data drop them
//! when they are sent, and nothing that comes while such a change is in flight is kept.

use crate::grants::LiveGrant;
use crate::op::{CredentialsId, Fh};
use crate::pages::ChangeToken;
use nigh_contents::{CHUNK, LinkRate, Origin, SendMark, SequentialReader, Store, StoreUse};
use nigh_types::{Attr, DataVersion, NodeId, Span, Time};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::ops::Range;

/// The rights with which contents were read. They are served to callers with the same rights only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReadAs {
    /// The mount's own: the remote reads each file alike for all callers.
    Mount,
    /// Those of a caller with this uid.
    Uid(u32),
    /// Those of a caller with these credentials.
    Credentials(CredentialsId),
}

/// What is kept beside the contents of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContentsTag {
    pub id: NodeId,
    /// Data grant under which the contents came.
    pub held: LiveGrant,
    /// Attributes that came with them.
    pub attr: Attr,
    pub read_as: ReadAs,
}

impl ContentsTag {
    pub fn token(&self) -> ChangeToken {
        ChangeToken::of(&self.attr)
    }

    pub fn version(&self) -> DataVersion {
        DataVersion::of(&self.attr)
    }
}

/// A read ahead in flight.
#[derive(Clone, Copy, Debug)]
struct ReadAhead {
    length: u64,
    mark: SendMark,
}

/// Contents of one mount.
#[derive(Clone, Debug)]
pub(crate) struct Contents {
    store: Store<ContentsTag>,
    link: LinkRate,
    /// By inode number, then by offset.
    in_flight: FxHashMap<u64, BTreeMap<u64, ReadAhead>>,
    in_flight_calls: usize,
    in_flight_bytes: u64,
    readers: FxHashMap<Fh, SequentialReader>,
    /// Most bytes ahead of one reader.
    readahead: u64,
    /// Bytes that were read and had not come ahead.
    demanded: u64,
    /// Useful and wasted bytes that do not count any more ([`Contents::is_wasteful`]).
    counted_useful: u64,
    counted_wasted: u64,
    /// Files of which a reply was not kept, and when.
    refused: FxHashMap<u64, Time>,
    /// Bytes stored in the kernel's page cache since the kernel last read a small file.
    stored: u64,
}

/// Most reads ahead in flight.
const MOST_CALLS: usize = 256;
/// Bytes that readers of one file may have in flight beyond what walks may.
const RESERVED: u64 = 4 * CHUNK;
/// Bytes of a reply beside the contents.
const MESSAGE_BYTES: u64 = 150;
/// Bytes that may be read ahead in vain, or this multiple of those that were read.
const FREE_WASTE: u64 = 2 << 20;
const WASTE_SHARE: u64 = 2;
/// Bytes that are stored in the kernel's page cache before the kernel must read a small file itself.
const MOST_STORED: u64 = 1 << 20;
/// Useful bytes after which earlier ones count half.
const LATELY: u64 = 256 << 20;
/// Time without reads ahead of a file after a reply that was not kept, and most files that are remembered for it.
const REFUSED_FOR: Span = Span::from_millis(1_000);
const MOST_REFUSED: usize = 1_024;

impl Contents {
    /// `budget`: memory for contents, in bytes; `readahead`: most bytes ahead of one reader.
    pub fn new(budget: u64, readahead: u64) -> Contents {
        Contents {
            store: Store::new(budget),
            link: LinkRate::default(),
            in_flight: FxHashMap::default(),
            in_flight_calls: 0,
            in_flight_bytes: 0,
            readers: FxHashMap::default(),
            readahead,
            demanded: 0,
            counted_useful: 0,
            counted_wasted: 0,
            refused: FxHashMap::default(),
            stored: 0,
        }
    }

    pub fn bytes(&self) -> u64 {
        self.store.bytes()
    }

    pub fn files(&self) -> usize {
        self.store.files()
    }

    pub fn totals(&self) -> StoreUse {
        self.store.totals()
    }

    /// Returns whether there may be contents at all.
    pub fn has_budget(&self) -> bool {
        self.store.budget() > 0
    }
}

/// Contents of files.
impl Contents {
    pub fn tag(&self, ino: u64) -> Option<&ContentsTag> {
        self.store.tag(ino)
    }

    /// Reads up to `length` bytes, fewer only at the end of the file. `None`: not all of them are there.
    pub fn read(&mut self, ino: u64, offset: u64, length: u64) -> Option<Vec<u8>> {
        self.store.read(ino, offset, length)
    }

    /// Keeps contents; drops others of the file that came under another node id, in another version or with other rights.
    /// Returns the files that gave way.
    pub fn keep(
        &mut self,
        now: Time,
        mut tag: ContentsTag,
        offset: u64,
        bytes: Vec<u8>,
        is_end: bool,
    ) -> Vec<u64> {
        let ino = tag.id.ino;
        let fits = |kept: &ContentsTag| {
            let is_alike =
                kept.id == tag.id && kept.version() == tag.version() && kept.read_as == tag.read_as;
            is_alike && kept.held.is_live(now)
        };
        match self.tag(ino).copied() {
            // What came earlier ends no later than its own grant, unless a recall would have ended that before any change.
            Some(kept) if fits(&kept) => {
                let is_recalled = |held: &LiveGrant| held.recalled_before_any_change();
                if !(is_recalled(&kept.held) && is_recalled(&tag.held))
                    && kept.held.deadline < tag.held.deadline
                {
                    tag.held = kept.held;
                }
            }
            Some(_) => drop(self.store.drop_file(ino)),
            None => {}
        }
        self.store.insert(ino, tag, offset, bytes, (is_end, Origin::Ahead))
    }

    /// Drops a part of a file that a local write is about to change.
    pub fn drop_changing(&mut self, ino: u64, offset: u64, length: u64) {
        self.store.drop_changing(ino, offset, length);
    }

    /// Keeps what a local write has left behind: the other contents are of the version after it, too. `parts`: its bytes
    /// in pages that it filled in part, with their offsets. Returns the files that gave way.
    pub fn keep_written(&mut self, tag: ContentsTag, parts: Vec<(u64, Vec<u8>)>) -> Vec<u64> {
        let (ino, size) = (tag.id.ino, tag.attr.size);
        self.store.retag(ino, tag);
        let mut gone = Vec::new();
        for (offset, bytes) in parts {
            gone.extend(self.store.insert(ino, tag, offset, bytes, (false, Origin::Local)));
        }
        self.store.note_end(ino, size);
        gone
    }

    /// Drops the contents of a file.
    pub fn drop_file(&mut self, ino: u64) {
        self.store.drop_file(ino);
    }

    /// Drops the contents of all files: all grants have ended.
    pub fn drop_all(&mut self) {
        self.store.clear();
    }
}

/// Reads ahead in flight.
impl Contents {
    /// Records a read ahead that was sent.
    pub fn note_sent(&mut self, now: Time, ino: u64, offset: u64, length: u64) {
        let read = ReadAhead { length, mark: self.link.mark(now) };
        self.in_flight_calls += 1;
        self.in_flight_bytes += length;
        if let Some(older) = self.in_flight.entry(ino).or_default().insert(offset, read) {
            self.note_ended(older);
        }
    }

    /// Records the reply to a read ahead, which brought `bytes`.
    pub fn note_reply(&mut self, now: Time, ino: u64, offset: u64, bytes: u64) {
        let Some(reads) = self.in_flight.get_mut(&ino) else { return };
        let Some(read) = reads.remove(&offset) else { return };
        if reads.is_empty() {
            self.in_flight.remove(&ino);
        }
        self.note_ended(read);
        self.link.note_reply(now, read.mark, bytes + MESSAGE_BYTES);
    }

    fn note_ended(&mut self, read: ReadAhead) {
        self.in_flight_calls -= 1;
        self.in_flight_bytes -= read.length;
    }

    /// Forgets the reads in flight: the session is lost.
    pub fn forget_calls(&mut self) {
        self.in_flight.clear();
        (self.in_flight_calls, self.in_flight_bytes) = (0, 0);
    }

    /// Returns whether the link has room for another file of a walk.
    pub fn has_room(&self) -> bool {
        self.has_room_in(self.link_window())
    }

    /// Returns whether a read ahead of this file may be sent. Walks leave room for a reader's own next bytes, which it needs
    /// first.
    pub fn may_send(&self, now: Time, ino: u64) -> bool {
        self.has_room_in(self.link_window() + RESERVED)
            && self.refused.get(&ino).is_none_or(|since| now >= since.after(REFUSED_FOR))
    }

    fn has_room_in(&self, window: u64) -> bool {
        self.in_flight_calls < MOST_CALLS && self.in_flight_bytes < window
    }

    /// Records a reply that is not kept. For a while nothing of the file is read ahead: its replies may have no grant.
    pub fn note_not_kept(&mut self, now: Time, ino: u64, bytes: u64) {
        self.store.note_not_kept(bytes);
        if self.refused.len() >= MOST_REFUSED {
            self.refused.clear();
        }
        self.refused.insert(ino, now);
    }

    /// Returns whether too much was read ahead in vain lately, with all that is unread now.
    pub fn is_wasteful(&mut self) -> bool {
        let totals = self.store.totals();
        let useful = totals.used + self.demanded - self.counted_useful;
        let wasted = totals.wasted - self.counted_wasted;
        if useful > LATELY {
            self.counted_useful += useful / 2;
            self.counted_wasted += wasted / 2;
        }
        wasted + totals.unread() + self.in_flight_bytes > FREE_WASTE.max(WASTE_SHARE * useful)
    }

    /// Returns the bytes that are worth having in flight on the link.
    pub fn link_window(&self) -> u64 {
        self.link.window().min(self.store.budget() / 2)
    }

    /// Returns the most bytes ahead of a reader of many files: enough for the link to go on while the reader is at many small
    /// files, and for the reader while the link is at a few large ones.
    pub fn walk_window(&self) -> u64 {
        self.readahead.max(2 * self.link_window()).min(self.store.budget() / 2)
    }

    /// Returns whether a read of a file is in flight, or contents of it are there.
    pub fn has_or_expects(&self, ino: u64) -> bool {
        self.in_flight.contains_key(&ino) || self.store.tag(ino).is_some()
    }

    /// Returns what of a part of a file is neither there nor in flight, and whether some of the rest is in flight.
    pub fn gaps(&self, ino: u64, part: Range<u64>) -> (Vec<Range<u64>>, bool) {
        let reads = self.in_flight.get(&ino);
        let (mut at, mut gaps, mut waits) = (part.start, Vec::new(), false);
        loop {
            at = self.store.covered_to(ino, at, part.end);
            if at >= part.end {
                return (gaps, waits);
            }
            let before = reads.and_then(|reads| reads.range(..=at).next_back());
            let comes = before.map_or(0, |(begin, read)| begin + read.length);
            if comes > at {
                (at, waits) = (comes, true);
                continue;
            }
            let sent = reads.and_then(|reads| reads.range(at + 1..).next()).map(|(begin, _)| *begin);
            let next = self.store.next_after(ino, at).into_iter().chain(sent).min();
            let end = next.map_or(part.end, |next| next.min(part.end));
            gaps.push(at..end);
            at = end;
        }
    }
}

/// Readers of open files.
impl Contents {
    /// Records a read through an open file of `size` bytes; `head_came`: its first bytes had come ahead. Returns the part of
    /// the file to fetch ahead of the reader.
    pub fn note_read(
        &mut self,
        fh: Fh,
        (offset, length): (u64, u64),
        size: u64,
        head_came: bool,
    ) -> Option<Range<u64>> {
        if size <= CHUNK {
            return None;
        }
        let share = self.link_window() / self.active_readers(fh);
        let largest = share.max(2 * CHUNK).min(self.readahead);
        let reader = self.readers.entry(fh).or_default();
        if head_came && offset == 0 {
            reader.note_head_came();
        }
        reader.note_read(offset, length, size, largest)
    }

    /// Returns whether a small file may be stored in the kernel's page cache, where reads of it do not show. Now and then one is
    /// left to the kernel to read: a caller that opens files and does not read them would have more and more of them come.
    pub fn may_store(&self) -> bool {
        self.stored < MOST_STORED
    }

    /// Records a small file that is stored in the kernel's page cache.
    pub fn note_stored(&mut self, bytes: u64) {
        self.stored += bytes;
    }

    /// Records that the kernel has read a small file that had come ahead.
    pub fn note_small_read(&mut self) {
        self.stored = 0;
    }

    /// Records bytes that were read and had not come ahead.
    pub fn note_demanded(&mut self, bytes: u64) {
        self.demanded += bytes;
    }

    /// Returns the number of readers with bytes ahead of them, `fh` included: they share the link.
    fn active_readers(&self, fh: Fh) -> u64 {
        let others = self.readers.iter().filter(|(other, reader)| **other != fh && reader.ahead() > 0);
        1 + others.count() as u64
    }

    /// Goes back to the end of what will not come for a reader after all.
    pub fn note_not_fetched(&mut self, fh: Fh, from: u64) {
        self.readers.get_mut(&fh).into_iter().for_each(|reader| reader.note_not_fetched(from));
    }

    pub fn note_close(&mut self, fh: Fh) {
        self.readers.remove(&fh);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_reads_a_small_file_itself_after_so_many_bytes_were_stored() {
        let mut contents = Contents::new(1 << 20, 1 << 20);
        contents.note_stored(MOST_STORED - 1);
        assert!(contents.may_store());
        contents.note_stored(1);
        assert!(!contents.may_store(), "a caller may open files and read none");
        contents.note_small_read();
        assert!(contents.may_store());
    }
}
