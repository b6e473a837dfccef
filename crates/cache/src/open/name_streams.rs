//! Names-only listings (docs/decisions/0023-names-before-attributes.md). They are no facts: each stream serves one open
//! directory.

use crate::op::Fh;
use crate::store::{CachedEntry, DirEntries};
use nigh_types::{CallId, Cookie, CookieKey, Dirent, Kind, NodeId};
use std::collections::{BTreeMap, VecDeque};

/// Streams by the open directories that they serve.
#[derive(Clone, Debug, Default)]
pub(crate) struct NameStreams {
    open: BTreeMap<Fh, Stream>,
    bytes: u64,
    /// Open directory whose page was asked for last.
    last: Option<Fh>,
}

#[derive(Clone, Debug)]
struct Stream {
    dir: u64,
    call: CallId,
    /// The stream brings names after this cookie, and still has them.
    after: Cookie,
    parts: VecDeque<NameChunk>,
    /// Memory of the chunks, in bytes.
    bytes: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Receiving,
    Complete,
    /// Cancelled because its reader is slower than the remote: the reader gets what came, and another call brings the
    /// rest.
    Truncated,
    /// The remote refuses names-only listings, or the stream was dropped: the reader waits for the listing.
    Failed,
}

/// Some names in order, stored together.
#[derive(Clone, Debug, Default)]
struct NameChunk {
    rows: Vec<PackedName>,
    names: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct PackedName {
    cookie: Cookie,
    ino: u64,
    name_at: u32,
    name_len: u8,
    kind: Option<Kind>,
}

impl NameChunk {
    fn new(dirents: &[Dirent], key: CookieKey) -> NameChunk {
        let names: usize = dirents.iter().map(|dirent| dirent.name.as_bytes().len()).sum();
        let mut part =
            NameChunk { rows: Vec::with_capacity(dirents.len()), names: Vec::with_capacity(names) };
        for Dirent { name, ino, kind } in dirents {
            let (name, ino, kind) = (name.as_bytes(), *ino, *kind);
            let name_at = u32::try_from(part.names.len()).expect("a part is a frame, of 4.5 MiB at the most");
            let name_len = u8::try_from(name.len()).expect("a name has at most 255 bytes");
            part.rows.push(PackedName { cookie: key.cookie(name), ino, name_at, name_len, kind });
            part.names.extend_from_slice(name);
        }
        part
    }

    fn bytes(&self) -> u64 {
        (self.rows.capacity() * size_of::<PackedName>() + self.names.capacity()) as u64
    }

    fn name(&self, row: &PackedName) -> &[u8] {
        let at = row.name_at as usize;
        &self.names[at..at + usize::from(row.name_len)]
    }
}

impl Stream {
    /// Adds a chunk of the reply, without names that came before.
    fn take(&mut self, mut dirents: Vec<Dirent>, key: CookieKey) {
        let last = self.parts.back().and_then(|part| part.rows.last()).map_or(self.after, |row| row.cookie);
        dirents.retain(|dirent| key.cookie(dirent.name.as_bytes()) > last);
        if !dirents.is_empty() {
            let part = NameChunk::new(&dirents, key);
            self.bytes += part.bytes();
            self.parts.push_back(part);
        }
    }

    /// Drops the names: the reader waits for the listing from now on.
    fn fail(&mut self) {
        (self.state, self.bytes) = (State::Failed, 0);
        self.parts = VecDeque::new();
    }

    /// Drops the chunks before the reader's offset.
    fn pass(&mut self, offset: Cookie) {
        while let Some(last) = self.parts.front().and_then(|part| part.rows.last())
            && last.cookie <= offset
        {
            self.after = last.cookie;
            self.bytes -= self.parts.pop_front().map_or(0, |part| part.bytes());
        }
    }

    /// Returns at least `most` rows after an offset, if there are as many; equal cookies stay together.
    fn rows(&self, offset: Cookie, most: usize) -> DirEntries {
        let mut rows = DirEntries::default();
        let (mut count, mut last) = (0, None);
        let all = self.parts.iter().flat_map(|part| part.rows.iter().map(move |row| (part, row)));
        for (part, row) in all.skip_while(|(_, row)| row.cookie <= offset) {
            if count >= most && last != Some(row.cookie) {
                break;
            }
            let id = NodeId { ino: row.ino, generation: 0 };
            rows.insert(row.cookie, part.name(row), Some(CachedEntry::bare(id, row.kind)));
            (count, last) = (count + 1, Some(row.cookie));
        }
        rows
    }
}

/// Names behind an offset, as far as a stream has come.
#[derive(Clone, Debug)]
pub(crate) struct StreamPage {
    pub rows: DirEntries,
    pub call: CallId,
    /// More names come with the call.
    pub is_receiving: bool,
    /// Another call brings the rest.
    pub is_truncated: bool,
}

impl NameStreams {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Drops all streams: the session is lost.
    pub fn forget(&mut self) {
        *self = NameStreams::default();
    }

    /// Records a reader that asks for a page.
    pub fn note_reader(&mut self, fh: Fh) {
        self.last = Some(fh);
    }

    /// Begins a stream of the names of a directory after a cookie, for one open directory.
    pub fn begin(&mut self, fh: Fh, dir: u64, call: CallId, after: Cookie) {
        let (parts, state) = (VecDeque::new(), State::Receiving);
        self.open.insert(fh, Stream { dir, call, after, parts, bytes: 0, state });
    }

    /// Changes a stream, and updates the count of its bytes.
    fn changing<T>(&mut self, fh: Fh, change: impl FnOnce(&mut Stream) -> T) -> Option<T> {
        let stream = self.open.get_mut(&fh)?;
        let before = stream.bytes;
        let changed = change(stream);
        self.bytes = self.bytes + stream.bytes - before;
        Some(changed)
    }

    /// Returns whether chunks of that call are still kept.
    fn takes(&self, fh: Fh, call: CallId) -> bool {
        self.open.get(&fh).is_some_and(|stream| stream.call == call && stream.state == State::Receiving)
    }

    pub fn has(&self, fh: Fh) -> bool {
        self.open.contains_key(&fh)
    }

    pub fn has_failed(&self, fh: Fh) -> bool {
        self.open.get(&fh).is_some_and(|stream| stream.state == State::Failed)
    }

    pub fn dir_of(&self, fh: Fh) -> Option<u64> {
        self.open.get(&fh).map(|stream| stream.dir)
    }

    /// Returns at least `most` names behind an offset, if there are as many, and drops those before it. `None`: this
    /// reader gets none of a stream.
    pub fn page(&mut self, fh: Fh, offset: Cookie, most: usize) -> Option<StreamPage> {
        let serves = |stream: &&Stream| stream.state != State::Failed && stream.after <= offset;
        self.open.get(&fh).filter(serves)?;
        self.changing(fh, |stream| {
            stream.pass(offset);
            StreamPage {
                rows: stream.rows(offset, most),
                call: stream.call,
                is_receiving: stream.state == State::Receiving,
                is_truncated: stream.state == State::Truncated,
            }
        })
    }

    /// Takes a chunk of a stream (`None`: the call has failed). Returns false if the stream ends with it.
    pub fn take(
        &mut self,
        (fh, call): (Fh, CallId),
        names: Option<Vec<Dirent>>,
        key: CookieKey,
        last: bool,
    ) -> bool {
        if !self.takes(fh, call) {
            return true;
        }
        let goes_on = names.is_some();
        self.changing(fh, |stream| match names {
            Some(names) => {
                stream.take(names, key);
                stream.state = if last { State::Complete } else { State::Receiving };
            }
            None => stream.fail(),
        });
        goes_on
    }

    /// Drops the names of a stream: its reader waits for the listing from now on. Returns the call and the directory if
    /// more names were to come.
    pub fn fail(&mut self, fh: Fh) -> Option<(CallId, u64)> {
        let failed = self.changing(fh, |stream| {
            let comes = stream.state == State::Receiving;
            stream.fail();
            comes.then_some((stream.call, stream.dir))
        });
        failed.flatten()
    }

    /// Removes a stream. Returns its call, and whether more names were to come.
    pub fn remove(&mut self, fh: Fh) -> Option<(CallId, bool)> {
        self.changing(fh, |stream| (stream.bytes, stream.parts) = (0, VecDeque::new()));
        self.open.remove(&fh).map(|stream| (stream.call, stream.state == State::Receiving))
    }

    /// Ends a stream with more names than its reader may be ahead of. Returns whether it did.
    pub fn truncate(&mut self, fh: Fh, call: CallId, most: u64) -> bool {
        let is_long = self.takes(fh, call) && self.open.get(&fh).is_some_and(|stream| stream.bytes > most);
        if is_long {
            self.changing(fh, |stream| stream.state = State::Truncated);
        }
        is_long
    }

    /// Returns the streams that take memory, or will, but that of the last reader.
    pub fn of_other_readers(&self) -> Vec<Fh> {
        let costs = |stream: &Stream| stream.state == State::Receiving || stream.bytes > 0;
        let others = self.open.iter().filter(|(fh, stream)| Some(**fh) != self.last && costs(stream));
        others.map(|(fh, _)| *fh).collect()
    }

    /// Returns the calls that are bringing names of a directory.
    pub fn receiving(&self, dir: u64) -> Vec<CallId> {
        let coming =
            self.open.values().filter(|stream| stream.dir == dir && stream.state == State::Receiving);
        coming.map(|stream| stream.call).collect()
    }

    #[cfg(test)]
    pub fn forget_last(&mut self) {
        self.last = None;
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.open.len()
    }
}
