//! Names-only listings: names that a reader gets before their attributes, if it wants names only
//! (docs/decisions/0023-names-before-attributes.md, `open/name_streams.rs`).

use crate::calls::{CallKind, ReplyKind};
use crate::facts::leases;
use crate::op::{Caller, Fh, OpReply, Output, Page};
use crate::open::FilesWithAttrs;
use crate::ops::{dir_pages, listings};
use crate::out::{replies, sending};
use crate::state::State;
use crate::view::paths;
use nigh_types::{Call, CallId, Errno, OpId, Time};

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

/// A listing of this size is kept however small the budget is, in bytes.
pub(crate) const ALWAYS_KEPT: u64 = 4 << 20;

/// Returns a page that the listing has not reached from a names-only listing, if this reader is to have one.
/// `None`: it is not.
pub(crate) fn read_names_only(
    state: &mut State,
    now: Time,
    (op, caller): (OpId, Caller),
    ino: u64,
    want: &ReplyKind,
) -> Option<Option<OpReply>> {
    let ReplyKind::Page { fh, offset, .. } = *want else { return None };
    state.open.names.note_reader(fh);
    match names_only_page(state, ino, want) {
        NamesOnlyPage::Page(mut page) => {
            dir_pages::on_page_reply(state, now, fh, &mut page);
            return Some(Some(OpReply::Page(page)));
        }
        NamesOnlyPage::Pending(call) => {
            return Some(replies::wait(state, op, caller, call, want.clone(), true));
        }
        NamesOnlyPage::Unavailable => {}
    }
    if !is_worth_names_only(state, now, ino, fh) {
        return None;
    }
    let place = paths::node_ref(state, ino)?;
    close_name_stream(state, now, fh);
    let (purpose, what) =
        (CallKind::ListNames { dir: ino, fh }, Call::ListNames { dir: place, after: offset });
    let call = sending::send(state, now, None, purpose, what);
    state.open.names.begin(fh, ino, call, offset);
    Some(replies::wait(state, op, caller, call, want.clone(), false))
}

/// Returns whether many names are still to come with attributes that this reader does not get.
fn is_worth_names_only(state: &mut State, now: Time, ino: u64, fh: Fh) -> bool {
    let possible = state.session.lists_names() && !state.config.short_cookies && !state.answers_stale();
    let failed = state.open.names.has_failed(fh);
    let keeps = state.open.dirs.dir(fh).is_none_or(|open| open.kernel_keeps || open.snapshot.is_some());
    if !possible || failed || keeps {
        return false;
    }
    if state.config.names_first || state.store.oversized.contains(now, ino) {
        return true;
    }
    let Some((directory, _)) = leases::live_directory(state, now, ino) else { return false };
    let Some(progress) = directory.progress.filter(|_| directory.listing.is_some()) else { return false };
    // Cookies are hashes: the share of the cookie range that has come is the share of the names.
    let (there, come) = (u128::from(directory.rows.existing()), u128::from(progress.0.max(1)));
    let rest = there * u128::from(i64::MAX.unsigned_abs().saturating_sub(progress.0)) / come;
    rest >= u128::from(WORTH_ASKING) && dir_pages::files_for(state, fh) == FilesWithAttrs::None
}

fn names_only_page(state: &mut State, ino: u64, want: &ReplyKind) -> NamesOnlyPage {
    let ReplyKind::Page { fh, offset, size, plus } = *want else { return NamesOnlyPage::Unavailable };
    let most = size as usize / SHORTEST_ENTRY + 2;
    let Some(told) = state.open.names.page(fh, offset, most) else { return NamesOnlyPage::Unavailable };
    let (chosen, full) = dir_pages::choose(state, Time(0), ino, told.rows.iter(), offset, size, plus, None);
    if told.is_receiving && !full {
        return NamesOnlyPage::Pending(told.call);
    }
    if told.is_truncated && chosen.is_empty() {
        return NamesOnlyPage::Unavailable;
    }
    dir_pages::note_page_content(state, fh, &chosen, true);
    NamesOnlyPage::Page(dir_pages::fill(state, Time(0), ino, offset, size, plus, chosen))
}

/// Answers requests for pages that have come; those that get no names-only page wait for the listing.
pub(crate) fn serve_names_only(state: &mut State, now: Time, dir: u64, waiters: Vec<OpId>) {
    let mut others = Vec::new();
    for op in waiters {
        let Some(want) = state.calls.waiter(op).map(|waiting| waiting.want.clone()) else { continue };
        let ReplyKind::Page { fh, offset, size, plus } = want else { continue };
        let known =
            leases::live_directory(state, now, dir).is_some() && !state.store.suspended.has_names(dir);
        let facts = if known { dir_pages::page(state, now, dir, fh, offset, size, plus) } else { None };
        let told = facts.map_or_else(|| names_only_page(state, dir, &want), NamesOnlyPage::Page);
        match told {
            NamesOnlyPage::Page(mut page) => {
                dir_pages::on_page_reply(state, now, fh, &mut page);
                replies::reply_to(state, op, OpReply::Page(page));
            }
            NamesOnlyPage::Pending(call) => {
                state.calls.wait_instead(op, call);
            }
            NamesOnlyPage::Unavailable => others.push(op),
        }
    }
    list_instead(state, now, dir, &others);
}

fn list_instead(state: &mut State, now: Time, dir: u64, waiters: &[OpId]) {
    if waiters.is_empty() {
        return;
    }
    let (call, joined) = match listings::list(state, now, dir) {
        Ok(listing) => listing,
        Err(errno) => return replies::reply_all(state, waiters, &OpReply::Failed(errno)),
    };
    if !state.calls.contains(call) {
        return replies::reply_all(state, waiters, &OpReply::Failed(Errno::IO));
    }
    for op in waiters {
        state.calls.join(*op, call, joined);
    }
}

/// Drops the stream of an open directory.
pub(crate) fn close_name_stream(state: &mut State, now: Time, fh: Fh) {
    if state.open.names.has(fh) {
        abort_name_stream(state, now, fh);
        state.open.names.remove(fh);
    }
}

/// Makes the readers of a stream wait for the listing from now on.
fn abort_name_stream(state: &mut State, now: Time, fh: Fh) {
    if let Some(dir) = state.open.names.dir_of(fh)
        && state.store.oversized.contains(now, dir)
    {
        return restart_name_stream(state, now, dir, fh);
    }
    if let Some((call, dir)) = state.open.names.fail(fh) {
        state.out.push_back(Output::Cancel(call));
        serve_waiting(state, now, call, dir);
    }
}

/// Drops the names of a stream and asks for them again from the reader's offset: a directory that is too large is
/// never listed whole.
fn restart_name_stream(state: &mut State, now: Time, dir: u64, fh: Fh) {
    let Some((call, comes)) = state.open.names.remove(fh) else { return };
    if comes {
        state.out.push_back(Output::Cancel(call));
    }
    let waiters = state.calls.inflight_mut(call).map(|flight| std::mem::take(&mut flight.waiters));
    waiters.into_iter().flatten().for_each(|op| answer_beside_listing(state, now, dir, op));
}

/// Bounds the memory of one stream for names that its reader has not reached.
pub(crate) fn truncate_name_stream(state: &mut State, fh: Fh, call: CallId) {
    let most = state.config.budget_bytes.max(ALWAYS_KEPT);
    if state.open.names.truncate(fh, call, most) {
        state.out.push_back(Output::Cancel(call));
    }
}

/// Drops all streams but that of the last reader: memory is short. The other readers wait for the listing until
/// they rewind.
pub(crate) fn drop_name_streams(state: &mut State, now: Time) {
    state.open.names.of_other_readers().into_iter().for_each(|fh| abort_name_stream(state, now, fh));
}

pub(crate) fn serve_waiting(state: &mut State, now: Time, call: CallId, dir: u64) {
    let waiters = state.calls.inflight_mut(call).map(|flight| std::mem::take(&mut flight.waiters));
    serve_names_only(state, now, dir, waiters.unwrap_or_default());
}

/// Answers a request that waited for a listing of a directory that is too large.
pub(crate) fn answer_beside_listing(state: &mut State, now: Time, dir: u64, op: OpId) {
    let Some((caller, want)) = state.calls.waiter(op).map(|w| (w.caller, w.want.clone())) else { return };
    match want {
        ReplyKind::OpenDir { ino } => {
            let opened = dir_pages::opened_dir(state, now, ino, caller.pid);
            replies::reply_to(state, op, OpReply::Opened(opened));
        }
        ReplyKind::Page { .. } => match read_names_only(state, now, (op, caller), dir, &want) {
            Some(Some(answer)) => replies::reply_to(state, op, answer),
            Some(None) => {}
            None => replies::reply_to(state, op, OpReply::Failed(Errno::NOMEM)),
        },
        _ => replies::reply_to(state, op, OpReply::Failed(Errno::NOMEM)),
    }
}

#[cfg(test)]
mod tests;
