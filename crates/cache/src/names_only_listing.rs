//! Names-only listings: names that a reader gets before their attributes, if it wants names only
//! (docs/decisions/0023-names-before-attributes.md). They are no facts: each stream serves one open directory.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::dir_entries::{CachedEntry, DirEntries};
use crate::op::{Caller, Fh, OpReply, Output, Page};
use crate::oversized::ALWAYS_KEPT;
use crate::readdirplus_heuristic::FilesWithAttrs;
use nigh_types::{Call, CallId, Cookie, CookieKey, Dirent, Errno, Kind, NodeId, OpId, Reply, Response, Time};
use std::collections::{BTreeMap, VecDeque};

/// Names still to come in a listing for which a names-only call is worth its cost.
const WORTH_ASKING: u64 = 16_384;
/// Size of the shortest entry of a page (`struct fuse_dirent` with a name).
const SHORTEST_ENTRY: usize = 32;

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

/// Page of a names-only listing, as far as it has come.
enum NamesOnlyPage {
    Page(Page),
    /// The page comes with that call.
    Pending(CallId),
    Unavailable,
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

impl NameStreams {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    #[cfg(test)]
    pub fn forget_last(&mut self) {
        self.last = None;
    }

    /// Drops all streams: the session is lost.
    pub fn forget(&mut self) {
        *self = NameStreams::default();
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
}

impl Cache {
    /// Returns a page that the listing has not reached from a names-only listing, if this reader is to have one.
    /// `None`: it is not.
    pub(crate) fn read_names_only(
        &mut self,
        now: Time,
        (op, caller): (OpId, Caller),
        ino: u64,
        want: &ReplyKind,
    ) -> Option<Option<OpReply>> {
        let ReplyKind::Page { fh, offset, .. } = *want else { return None };
        self.dirents.last = Some(fh);
        match self.names_only_page(ino, want) {
            NamesOnlyPage::Page(mut page) => {
                self.on_page_reply(now, fh, &mut page);
                return Some(Some(OpReply::Page(page)));
            }
            NamesOnlyPage::Pending(call) => return Some(self.wait(op, caller, call, want.clone(), true)),
            NamesOnlyPage::Unavailable => {}
        }
        if !self.is_worth_names_only(now, ino, fh) {
            return None;
        }
        let place = self.node_ref(ino)?;
        self.close_name_stream(now, fh);
        let (purpose, what) =
            (CallKind::ListNames { dir: ino, fh }, Call::ListNames { dir: place, after: offset });
        let call = self.send(now, None, purpose, what);
        let (parts, state) = (VecDeque::new(), State::Receiving);
        let stream = Stream { dir: ino, call, after: offset, parts, bytes: 0, state };
        self.dirents.open.insert(fh, stream);
        Some(self.wait(op, caller, call, want.clone(), false))
    }

    /// Returns whether many names are still to come with attributes that this reader does not get.
    fn is_worth_names_only(&mut self, now: Time, ino: u64, fh: Fh) -> bool {
        let possible = self.session.lists_names() && !self.config.short_cookies && !self.answers_stale();
        let failed = self.dirents.open.get(&fh).is_some_and(|stream| stream.state == State::Failed);
        let keeps = self.open_dirs.get(&fh).is_none_or(|open| open.kernel_keeps || open.snapshot.is_some());
        if !possible || failed || keeps {
            return false;
        }
        if self.config.names_first || self.oversized.contains(now, ino) {
            return true;
        }
        let Some((directory, _)) = self.live_directory(now, ino) else { return false };
        let Some(progress) = directory.progress.filter(|_| directory.listing.is_some()) else { return false };
        // Cookies are hashes: the share of the cookie range that has come is the share of the names.
        let (there, come) = (u128::from(directory.rows.existing()), u128::from(progress.0.max(1)));
        let rest = there * u128::from(i64::MAX.unsigned_abs().saturating_sub(progress.0)) / come;
        rest >= u128::from(WORTH_ASKING) && self.files_for(fh) == FilesWithAttrs::None
    }

    fn names_only_page(&mut self, ino: u64, want: &ReplyKind) -> NamesOnlyPage {
        let ReplyKind::Page { fh, offset, size, plus } = *want else { return NamesOnlyPage::Unavailable };
        let serves = |stream: &&Stream| stream.state != State::Failed && stream.after <= offset;
        if self.dirents.open.get(&fh).filter(serves).is_none() {
            return NamesOnlyPage::Unavailable;
        }
        let most = size as usize / SHORTEST_ENTRY + 2;
        let told = self.dirents.changing(fh, |stream| {
            stream.pass(offset);
            (stream.rows(offset, most), stream.state, stream.call)
        });
        let Some((rows, state, call)) = told else { return NamesOnlyPage::Unavailable };
        let (chosen, full) = self.choose(Time(0), ino, rows.iter(), offset, size, plus, None);
        match state {
            State::Receiving if !full => return NamesOnlyPage::Pending(call),
            State::Truncated if chosen.is_empty() => return NamesOnlyPage::Unavailable,
            _ => {}
        }
        self.note_page_content(fh, &chosen, true);
        NamesOnlyPage::Page(self.fill(Time(0), ino, offset, size, plus, chosen))
    }

    /// Handles a chunk, or the end.
    pub(crate) fn on_names_reply(
        &mut self,
        now: Time,
        call: CallId,
        (dir, fh): (u64, Fh),
        mut flight: InflightCall,
        response: Response,
    ) {
        let mut goes_on = !response.last;
        if self.dirents.takes(fh, call) {
            let (key, last) = (self.key, response.last);
            self.dirents.changing(fh, |stream| match response.result {
                Ok(Reply::Dirents(dirents)) => {
                    stream.take(dirents, key);
                    stream.state = if last { State::Complete } else { State::Receiving };
                }
                _ => {
                    goes_on = false;
                    stream.fail();
                }
            });
        }
        let waiters = std::mem::take(&mut flight.waiters);
        if goes_on {
            self.calls.insert(call, flight);
        }
        self.truncate_name_stream(fh, call);
        self.serve_names_only(now, dir, waiters);
        self.trim(now);
    }

    /// Answers requests for pages that have come; those that get no names-only page wait for the listing.
    fn serve_names_only(&mut self, now: Time, dir: u64, waiters: Vec<OpId>) {
        let mut others = Vec::new();
        for op in waiters {
            let Some(want) = self.calls.waiter(op).map(|waiting| waiting.want.clone()) else { continue };
            let ReplyKind::Page { fh, offset, size, plus } = want else { continue };
            let known = self.live_directory(now, dir).is_some() && !self.suspended.has_names(dir);
            let facts = if known { self.page(now, dir, fh, offset, size, plus) } else { None };
            let told = facts.map_or_else(|| self.names_only_page(dir, &want), NamesOnlyPage::Page);
            match told {
                NamesOnlyPage::Page(mut page) => {
                    self.on_page_reply(now, fh, &mut page);
                    self.reply_to(op, OpReply::Page(page));
                }
                NamesOnlyPage::Pending(call) => {
                    self.calls.wait_instead(op, call);
                }
                NamesOnlyPage::Unavailable => others.push(op),
            }
        }
        self.list_instead(now, dir, &others);
    }

    fn list_instead(&mut self, now: Time, dir: u64, waiters: &[OpId]) {
        if waiters.is_empty() {
            return;
        }
        let (call, joined) = match self.list(now, dir) {
            Ok(listing) => listing,
            Err(errno) => return self.reply_all(waiters, &OpReply::Failed(errno)),
        };
        if !self.calls.contains(call) {
            return self.reply_all(waiters, &OpReply::Failed(Errno::IO));
        }
        for op in waiters {
            self.calls.join(*op, call, joined);
        }
    }

    /// Drops the stream of an open directory.
    pub(crate) fn close_name_stream(&mut self, now: Time, fh: Fh) {
        if self.dirents.open.contains_key(&fh) {
            self.abort_name_stream(now, fh);
            self.dirents.open.remove(&fh);
        }
    }

    /// Makes the readers of a stream wait for the listing from now on.
    fn abort_name_stream(&mut self, now: Time, fh: Fh) {
        if let Some(dir) = self.dirents.open.get(&fh).map(|stream| stream.dir)
            && self.oversized.contains(now, dir)
        {
            return self.restart_name_stream(now, dir, fh);
        }
        let given_up = self.dirents.changing(fh, |stream| {
            let comes = stream.state == State::Receiving;
            stream.fail();
            comes.then_some((stream.call, stream.dir))
        });
        if let Some((call, dir)) = given_up.flatten() {
            self.out.push_back(Output::Cancel(call));
            self.serve_waiting(now, call, dir);
        }
    }

    /// Drops the names of a stream and asks for them again from the reader's offset: a directory that is too large is
    /// never listed whole.
    fn restart_name_stream(&mut self, now: Time, dir: u64, fh: Fh) {
        let Some(stream) = self.dirents.open.get(&fh) else { return };
        let (call, comes) = (stream.call, stream.state == State::Receiving);
        self.dirents.changing(fh, Stream::fail);
        self.dirents.open.remove(&fh);
        if comes {
            self.out.push_back(Output::Cancel(call));
        }
        let waiters = self.calls.get_mut(call).map(|flight| std::mem::take(&mut flight.waiters));
        waiters.into_iter().flatten().for_each(|op| self.answer_beside_listing(now, dir, op));
    }

    /// Bounds the memory of one stream for names that its reader has not reached.
    fn truncate_name_stream(&mut self, fh: Fh, call: CallId) {
        let most = self.config.budget_bytes.max(ALWAYS_KEPT);
        if self.dirents.takes(fh, call)
            && self.dirents.open.get(&fh).is_some_and(|stream| stream.bytes > most)
        {
            self.dirents.changing(fh, |stream| stream.state = State::Truncated);
            self.out.push_back(Output::Cancel(call));
        }
    }

    /// Drops all streams but that of the last reader: memory is short. The other readers wait for the listing until
    /// they rewind.
    pub(crate) fn drop_name_streams(&mut self, now: Time) {
        let last = self.dirents.last;
        let costs = |stream: &Stream| stream.state == State::Receiving || stream.bytes > 0;
        let others = self.dirents.open.iter().filter(|(fh, stream)| Some(**fh) != last && costs(stream));
        let others: Vec<Fh> = others.map(|(fh, _)| *fh).collect();
        others.into_iter().for_each(|fh| self.abort_name_stream(now, fh));
    }

    fn serve_waiting(&mut self, now: Time, call: CallId, dir: u64) {
        let waiters = self.calls.get_mut(call).map(|flight| std::mem::take(&mut flight.waiters));
        self.serve_names_only(now, dir, waiters.unwrap_or_default());
    }

    /// Handles a chunk of a listing: it may answer names-only readers of the directory.
    pub(crate) fn after_listing_chunk(&mut self, now: Time, dir: u64) {
        let coming =
            self.dirents.open.values().filter(|stream| stream.dir == dir && stream.state == State::Receiving);
        let calls: Vec<CallId> = coming.map(|stream| stream.call).collect();
        calls.into_iter().for_each(|call| self.serve_waiting(now, call, dir));
        self.bound_listings(now);
        self.trim(now);
    }
}

#[cfg(test)]
mod tests;
