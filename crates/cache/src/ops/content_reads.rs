//! Reads that contents in memory answer, and reads ahead of callers (docs/decisions/0043-contents.md).
//!
//! A read ahead is a READ without a request that waits for it. A request for a part that is on its way is queued and
//! begins again after the reply. So a reply that may not be kept only costs that request its own READ.

use crate::calls::{CallKind, InflightCall};
use crate::config::Prefetch;
use crate::contents::{ContentsTag, ReadAs};
use crate::facts::{inodes, learn};
use crate::grants::LiveGrant;
use crate::op::{Caller, Fh, Op, OpReply};
use crate::out::{invalidate, sending};
use crate::page_cache::writeback;
use crate::prefetch::Reader;
use crate::state::State;
use crate::view::{self, paths};
use nigh_contents::CHUNK;
use nigh_types::{Call, DataVersion, Handle, LeaseScope, NodeId, NodeRef, OpId, Reply, Response, Time};
use std::ops::Range;

/// Answers a read from contents in memory, if they are there and their grant lives.
pub(crate) fn answer(
    state: &mut State,
    now: Time,
    (ino, fh): (u64, Fh),
    (offset, size): (u64, u32),
) -> Option<OpReply> {
    let tag = *state.contents.tag(ino)?;
    // A CREATE that truncates an existing file names it by another name.
    let may_change =
        state.calls.is_data_changing(ino) || tag.attr.nlink > 1 && state.calls.has_truncating_create();
    let file = state.open.files.get(fh)?;
    // A direct read went to the remote before there were contents.
    let may_be_old = file.access.direct && !tag.held.recalled_before_any_change();
    let is_other = file.generation != tag.id.generation;
    let may_read = state.session.reads_ahead_as(file.caller) == Some(tag.read_as);
    if may_change || may_be_old || is_other || !may_read {
        return None;
    }
    if !is_current(state, now, &tag) {
        state.drop_contents(ino);
        return None;
    }
    let data = state.contents.read(ino, offset, u64::from(size))?;
    note_pages(state, now, &tag);
    Some(OpReply::Data(data))
}

/// Returns whether the grant on contents lives, the inode number is that file's, and its attributes and the kernel's pages
/// are of no other version. Where rights depend on the caller, they may have changed unless its cached ctime is the same.
fn is_current(state: &State, now: Time, tag: &ContentsTag) -> bool {
    let pages_differ =
        state.store.inode_of(tag.id).is_some_and(|i| i.pages().is_of_another_version(tag.token()));
    let attr = view::cached_attr(state, now, tag.id);
    let attr_differs = attr.is_some_and(|(attr, _)| DataVersion::of(&attr) != tag.version());
    let is_reused = state.store.id_of(tag.id.ino).is_some_and(|id| id != tag.id);
    let has_same_rights = !matches!(tag.read_as, ReadAs::Credentials(_))
        || attr.is_some_and(|(attr, _)| attr.ctime == tag.attr.ctime);
    tag.held.is_live(now) && !is_reused && !pages_differ && !attr_differs && has_same_rights
}

/// Records that the kernel gets pages from contents, as for the reply to a READ.
fn note_pages(state: &mut State, now: Time, tag: &ContentsTag) {
    let inode = inodes::record(state, tag.id);
    let pages = inode.pages_mut();
    pages.full_mut().note_filled();
    let begins = pages.begin_grant(now, Some(tag.held), Some(tag.token()));
    pages.note_read(Some(tag.token()), false);
    if begins && inode.opens().is_open() {
        invalidate::set_data_timers(state, tag.id.ino);
    }
    writeback::note_page_base(state, now, None, tag.id.ino, tag.version());
}

/// Queues a read whose bytes are on their way, or there in part: the reply that brings the rest starts it again. Returns
/// whether it was queued. A direct read is not: an invalidation leaves out the pages of a queued read, which the kernel has
/// locked, but not for a direct one.
pub(crate) fn queue_behind_read_ahead(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    (ino, fh): (u64, Fh),
    (offset, size): (u64, u32),
) -> bool {
    let known = state.store.id_of(ino).and_then(|id| view::last_attr(state, id));
    let file_size = known.map_or(0, |attr| attr.size);
    let part = offset..file_size.min(offset.saturating_add(u64::from(size)));
    let is_direct = state.open.files.get(fh).is_some_and(|file| file.access.direct);
    if is_direct || state.answers_stale() || part.is_empty() {
        return false;
    }
    let (gaps, waits) = state.contents.gaps(ino, part.clone());
    let asks = !gaps.is_empty();
    // What came for a request that has asked may have taken the place of what had come.
    let may_ask = gaps.first() != Some(&part) && !state.calls.is_asking(op);
    let will_come = if asks { may_ask && ask_for(state, now, (ino, fh), gaps, file_size) } else { waits };
    if will_come {
        state.calls.queue_read(op, caller, Op::Read { ino, fh, offset, size }, asks);
    }
    will_come
}

/// Asks for the gaps of a read, of which the rest is there or on its way: the kernel may read more at a time than came ahead.
/// Returns whether all of them will come.
fn ask_for(
    state: &mut State,
    now: Time,
    (ino, fh): (u64, Fh),
    gaps: Vec<Range<u64>>,
    file_size: u64,
) -> bool {
    let (Some(reader), Some(place)) = (reader_of(state, fh), paths::handle_for(state, ino, Some(fh))) else {
        return false;
    };
    if state.contents.tag(ino).is_some_and(|tag| tag.read_as != reader.read_as) {
        return false;
    }
    gaps.into_iter().all(|gap| {
        // A short reply shows where the file ends.
        let end = if gap.end == file_size { gap.end.saturating_add(1) } else { gap.end };
        (gap.start..end)
            .step_by(CHUNK as usize)
            .all(|at| send_read_ahead(state, now, place.clone(), reader, at, (end - at).min(CHUNK)))
    })
}

/// Returns the rights with which an open file is read ahead. `None`: nothing is read ahead of it.
pub(crate) fn reader_of(state: &State, fh: Fh) -> Option<Reader> {
    if state.config.prefetch == Prefetch::Off || !state.contents.has_budget() {
        return None;
    }
    let opener = state.open.files.get(fh)?.caller;
    Some(Reader { read_as: state.session.reads_ahead_as(opener)?, caller: state.session.read_as(opener) })
}

/// Sends a read ahead. Returns whether it was sent.
pub(crate) fn send_read_ahead(
    state: &mut State,
    now: Time,
    (node, handle): (NodeRef, Option<Handle>),
    Reader { read_as, caller }: Reader,
    offset: u64,
    length: u64,
) -> bool {
    let ino = node.node.ino;
    if !state.contents.may_send(now, ino) || state.calls.is_data_changing(ino) {
        return false;
    }
    let size = u32::try_from(length).unwrap_or(u32::MAX);
    let known = view::cached_attr(state, now, node.node).map(|(attr, _)| DataVersion::of(&attr));
    let purpose = CallKind::ReadAhead { node: node.node, offset, size, known, read_as };
    let call = sending::send(state, now, caller, purpose, Call::Read { node, handle, offset, length: size });
    if state.calls.contains(call) {
        state.contents.note_sent(now, ino, offset, length);
    }
    true
}

/// Handles the reply to a read ahead.
pub(crate) fn on_read_ahead_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    node: NodeId,
    response: Response,
) {
    let bytes = match &response.result {
        Ok(Reply::Data(data)) => data.len() as u64,
        _ => 0,
    };
    if !keep(state, now, flight, response) {
        state.contents.note_not_kept(now, node.ino, bytes);
        state.prefetch.files.note_failed(now, node.ino);
    }
}

/// Keeps the bytes if a grant covers them and nothing overtook the reply. Returns whether it does.
fn keep(state: &mut State, now: Time, flight: &InflightCall, response: Response) -> bool {
    let CallKind::ReadAhead { node, offset, size, known, read_as } = flight.purpose else { return false };
    let Response { result, after, grants, .. } = response;
    let Ok(Reply::Data(data)) = result else {
        state.contents.note_reply(now, node.ino, offset, 0);
        return false;
    };
    state.contents.note_reply(now, node.ino, offset, data.len() as u64);
    let response = Response { result: Ok(Reply::Done), after, grants, last: true };
    learn::apply_attrs_after(state, now, flight, &response);
    let attr = response.after.iter().find(|(id, _)| *id == node).map(|(_, attr)| *attr);
    // A 9P session does not fetch them for a read: then those that were known all the time, if there are any.
    let cached = || view::cached_attr(state, now, node).map(|(attr, _)| attr);
    let attr = attr.or_else(|| cached().filter(|attr| known == Some(DataVersion::of(attr))));
    let granted = flight.granted(&response.grants, node, LeaseScope::Data);
    let held = granted.map(|grant| LiveGrant::begin(grant, flight.sent)).filter(|held| held.is_live(now));
    let (Some(attr), Some(held)) = (attr, held) else { return false };
    let race = &flight.race_log;
    let is_changed = race.local_inodes.contains(&node.ino) || race.remote_inodes.contains(&node.ino);
    let is_reused = state.store.id_of(node.ino).is_some_and(|id| id != node);
    if is_changed || is_reused || state.calls.is_data_changing(node.ino) {
        return false;
    }
    // The attributes may be older than the data: only a short read shows where the file ends.
    let is_end = (data.len() as u64) < u64::from(size) && (offset == 0 || !data.is_empty());
    let tag = ContentsTag { id: node, held, attr, read_as };
    for evicted in state.contents.keep(now, tag, offset, data, is_end) {
        state.prefetch.files.note_gone(evicted);
    }
    true
}

#[cfg(test)]
mod tests;
