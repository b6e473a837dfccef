//! Names-only listings: names that a reader gets before their attributes, if it wants names only
//! (docs/decisions/0023-names-before-attributes.md, `open/name_streams.rs`).

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::op::{Caller, Fh, OpReply, Output, Page};
use crate::open::FilesWithAttrs;
use crate::oversized::ALWAYS_KEPT;
use nigh_types::{Call, CallId, Errno, OpId, Reply, Response, Time};

/// Names still to come in a listing for which a names-only call is worth its cost.
const WORTH_ASKING: u64 = 16_384;
/// Size of the shortest entry of a page (`struct fuse_dirent` with a name).
const SHORTEST_ENTRY: usize = 32;

/// Page of a names-only listing, as far as it has come.
enum NamesOnlyPage {
    Page(Page),
    /// The page comes with that call.
    Pending(CallId),
    Unavailable,
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
        self.open.names.note_reader(fh);
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
        self.open.names.begin(fh, ino, call, offset);
        Some(self.wait(op, caller, call, want.clone(), false))
    }

    /// Returns whether many names are still to come with attributes that this reader does not get.
    fn is_worth_names_only(&mut self, now: Time, ino: u64, fh: Fh) -> bool {
        let possible = self.session.lists_names() && !self.config.short_cookies && !self.answers_stale();
        let failed = self.open.names.has_failed(fh);
        let keeps = self.open.dirs.get(fh).is_none_or(|open| open.kernel_keeps || open.snapshot.is_some());
        if !possible || failed || keeps {
            return false;
        }
        if self.config.names_first || self.store.oversized.contains(now, ino) {
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
        let most = size as usize / SHORTEST_ENTRY + 2;
        let Some(told) = self.open.names.page(fh, offset, most) else { return NamesOnlyPage::Unavailable };
        let (chosen, full) = self.choose(Time(0), ino, told.rows.iter(), offset, size, plus, None);
        if told.is_receiving && !full {
            return NamesOnlyPage::Pending(told.call);
        }
        if told.is_truncated && chosen.is_empty() {
            return NamesOnlyPage::Unavailable;
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
        let names = match response.result {
            Ok(Reply::Dirents(names)) => Some(names),
            _ => None,
        };
        let goes_on =
            self.open.names.take((fh, call), names, self.store.key(), response.last) && !response.last;
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
            let known = self.live_directory(now, dir).is_some() && !self.store.suspended.has_names(dir);
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
        if self.open.names.has(fh) {
            self.abort_name_stream(now, fh);
            self.open.names.remove(fh);
        }
    }

    /// Makes the readers of a stream wait for the listing from now on.
    fn abort_name_stream(&mut self, now: Time, fh: Fh) {
        if let Some(dir) = self.open.names.dir_of(fh)
            && self.store.oversized.contains(now, dir)
        {
            return self.restart_name_stream(now, dir, fh);
        }
        if let Some((call, dir)) = self.open.names.fail(fh) {
            self.out.push_back(Output::Cancel(call));
            self.serve_waiting(now, call, dir);
        }
    }

    /// Drops the names of a stream and asks for them again from the reader's offset: a directory that is too large is
    /// never listed whole.
    fn restart_name_stream(&mut self, now: Time, dir: u64, fh: Fh) {
        let Some((call, comes)) = self.open.names.remove(fh) else { return };
        if comes {
            self.out.push_back(Output::Cancel(call));
        }
        let waiters = self.calls.get_mut(call).map(|flight| std::mem::take(&mut flight.waiters));
        waiters.into_iter().flatten().for_each(|op| self.answer_beside_listing(now, dir, op));
    }

    /// Bounds the memory of one stream for names that its reader has not reached.
    fn truncate_name_stream(&mut self, fh: Fh, call: CallId) {
        let most = self.config.budget_bytes.max(ALWAYS_KEPT);
        if self.open.names.truncate(fh, call, most) {
            self.out.push_back(Output::Cancel(call));
        }
    }

    /// Drops all streams but that of the last reader: memory is short. The other readers wait for the listing until
    /// they rewind.
    pub(crate) fn drop_name_streams(&mut self, now: Time) {
        self.open.names.of_other_readers().into_iter().for_each(|fh| self.abort_name_stream(now, fh));
    }

    fn serve_waiting(&mut self, now: Time, call: CallId, dir: u64) {
        let waiters = self.calls.get_mut(call).map(|flight| std::mem::take(&mut flight.waiters));
        self.serve_names_only(now, dir, waiters.unwrap_or_default());
    }

    /// Handles a chunk of a listing: it may answer names-only readers of the directory.
    pub(crate) fn after_listing_chunk(&mut self, now: Time, dir: u64) {
        let calls = self.open.names.receiving(dir);
        calls.into_iter().for_each(|call| self.serve_waiting(now, call, dir));
        self.bound_listings(now);
        self.trim(now);
    }
}

#[cfg(test)]
mod tests;
