//! Regular files: open, read, write.

use crate::calls::{CallKind, InflightCall, OpenParams, attr_after};
use crate::facts::{changes, inodes, learn, leases};
use crate::grants::LiveGrant;
use crate::op::{Caller, Fh, KernelInvalidation, Op, OpReply, Opened};
use crate::open::{OpenFile, OpenKind};
use crate::ops::{content_reads, content_writes, page_fill};
use crate::out::{invalidate, page_drops, replies, sending};
use crate::page_cache::{full_pages, writeback};
use crate::pages::ChangeToken;
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{
    Access, Attr, Call, DataVersion, Errno, LeaseScope, NodeId, OpId, Reply, Response, Time, WriteFlags,
};

pub(crate) fn open(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
    access: Access,
    append: bool,
) -> Option<OpReply> {
    let Some(id) = state.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    let file = OpenParams { append, access, caller };
    let local = !access.write && !access.truncate && !view::is_name_removal_in_flight(state, ino);
    if local && let Some((attr, held)) = view::cached_attr(state, now, id) {
        let keep = pages_match(state, now, None, id, &attr, Some(held));
        // The remote recalls the grant before the last name goes.
        invalidate::set_timers(state, held.deadline, ino);
        let opened = opened_file(state, id, file, OpenKind::Granted, keep);
        let is_filled = held.recallable && page_fill::fill(state, now, (ino, opened.fh), attr.size);
        return Some(OpReply::Opened(Opened { keep_cache: keep || is_filled, ..opened }));
    }
    let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    sending::send_for(state, now, op, caller, CallKind::Open { ino, file }, Call::Open { node, access })
}

/// Returns whether the kernel's pages match the file's present attributes, under a grant that covers later changes.
fn pages_match(
    state: &mut State,
    now: Time,
    flight: Option<&InflightCall>,
    id: NodeId,
    attr: &Attr,
    under: Option<LiveGrant>,
) -> bool {
    let keeps = state.kernel.can_notify();
    let inode = inodes::record(state, id);
    let (lives, token) = (inode.pages().live_grant(now), ChangeToken::of(attr));
    inode.pages_if_any().into_iter().for_each(|pages| pages.adopt(now, token, under));
    let (same, mixed) = (inode.pages().is_of(token), inode.pages().is_mixed());
    let told = lives.filter(|h| h.on.1 == LeaseScope::Data);
    // Up to the grant's deadline, pages that may mix with local writes stay; but not beside attributes of another
    // version.
    let hold = told.is_some_and(|h| h.recalled_before_any_change() || h.stale || mixed)
        || same && inode.pages().grant().is_some();
    if hold && !(mixed && told.is_some_and(|h| !h.recalled_before_any_change())) {
        writeback::note_page_base(state, now, flight, id.ino, DataVersion::of(attr));
    }
    keeps && hold
}

pub(crate) fn opened_file(
    state: &mut State,
    id: NodeId,
    file: OpenParams,
    kind: OpenKind,
    keep_cache: bool,
) -> Opened {
    let fh = state.open.new_fh();
    // The kernel would put appended data into pages at the end of file that it knows, where other clients may have
    // appended. Reads that bypass the pages would be taken for reads that have them locked.
    let appends = file.append && file.access.write && !file.access.read;
    let direct = appends && state.config.direct_appends;
    let inode = inodes::record(state, id);
    // A lock owner's close of any descriptor must reach the cache.
    let (may_lock, is_first) = (inode.opens().may_have_locks(), !inode.opens().is_open());
    inode.opens_mut().note_open(kind, file.access.write);
    if !keep_cache {
        inode.pages_mut().note_open_without_pages(is_first);
    }
    state.open.files.insert(
        fh,
        OpenFile {
            ino: id.ino,
            generation: id.generation,
            kind,
            access: Access { truncate: false, ..file.access },
            direct,
            unfinished_write_at: None,
            caller: file.caller,
        },
    );
    invalidate::set_data_timers(state, id.ino);
    let no_flush = kind == OpenKind::Granted && !may_lock;
    Opened { fh, keep_cache, cache_dir: false, no_flush, direct }
}

pub(crate) fn on_open_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    ino: u64,
    file: OpenParams,
    response: &Response,
) -> OpReply {
    let (handle, attr) = match &response.result {
        Ok(Reply::Opened { handle, attr }) => (*handle, *attr),
        Ok(_) => return OpReply::Failed(Errno::PROTO),
        Err(errno) => return OpReply::Failed(*errno),
    };
    let Some(id) = state.store.id_of(ino) else {
        sending::release_handle(state, handle);
        return OpReply::Failed(Errno::STALE);
    };
    if flight.is_mutation() {
        changes::note_inode(state, ino);
        inodes::record(state, id).pages_mut().note_truncated();
    }
    let under = learn::apply_attr(state, now, flight, id, attr, &response.grants);
    if flight.waiters.is_empty() {
        sending::release_handle(state, handle);
        return OpReply::Done;
    }
    let data =
        flight.granted(&response.grants, id, LeaseScope::Data).map(|g| LiveGrant::begin(g, flight.sent));
    let keep = pages_match(state, now, Some(flight), id, &attr, data.filter(|h| h.is_live(now)).or(under));
    learn::begin_data_grant(state, now, flight, id, Some(ChangeToken::of(&attr)), response);
    OpReply::Opened(opened_file(state, id, file, OpenKind::Remote(handle), keep))
}

pub(crate) fn read(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    (ino, fh): (u64, Fh),
    offset: u64,
    size: u32,
) -> Option<OpReply> {
    if let Some(answer) = content_reads::answer(state, now, (ino, fh), (offset, size)) {
        return Some(answer);
    }
    let Some((node, handle)) = paths::handle_for(state, ino, Some(fh)) else {
        return Some(OpReply::Failed(Errno::STALE));
    };
    let call = Call::Read { node, handle, offset, length: size };
    if queue_behind_write(state, op, caller, (ino, fh), (offset, size)) {
        return None;
    }
    if content_reads::queue_behind_read_ahead(state, now, op, caller, (ino, fh), (offset, size)) {
        return None;
    }
    let read_as = opener(state, fh, caller);
    let id = sending::send(state, now, read_as, CallKind::Read { ino, fh, offset, size }, call);
    replies::wait(state, op, caller, id, crate::calls::ReplyKind::Reply, false)
}

/// Returns the caller with whose rights an open file is read. Another process may have the opener's number by now; so where
/// the opener's credentials are unknown it is the reader, whose groups can be seen, if it has the opener's uid.
fn opener(state: &State, fh: Fh, reader: Caller) -> Option<Caller> {
    let opener = state.session.read_as(state.open.files.get(fh)?.caller)?;
    let is_alike = opener.credentials.is_none() && reader.uid == opener.uid;
    Some(if is_alike { reader } else { Caller { pid: 0, ..opener } })
}

pub(crate) fn write(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    (ino, fh): (u64, Fh),
    (offset, data): (u64, Vec<u8>),
    flags: WriteFlags,
) -> Option<OpReply> {
    let Some(file) = state.open.files.get(fh) else { return Some(OpReply::Failed(Errno::BADF)) };
    let (Some(handle), Some(node)) = (file.handle(), paths::node_ref(state, ino)) else {
        return Some(OpReply::Failed(Errno::BADF));
    };
    let (is_flush, size) = (flags.write_back, data.len() as u64);
    let since =
        match if is_flush { writeback::writeback_precondition(state, ino, (offset, size)) } else { Ok(None) }
        {
            Ok(since) => since,
            Err(errno) => {
                page_drops::drop_after_reply(state, &[op], Some((ino, (offset, size))));
                return Some(OpReply::Failed(errno));
            }
        };
    let keeps = !is_flush && state.contents.has_budget() && state.session.serves_callers_alike();
    let written = if keeps { content_writes::partial_pages(offset, &data) } else { Vec::new() };
    let flush = is_flush.then(|| Box::new(Op::Write { ino, fh, offset, data: data.clone(), flags }));
    let append = flags.append && !is_flush;
    let flags = WriteFlags { append, sync: file.access.sync, since, ..flags };
    let (opener, direct) = (file.caller, (file.direct && !is_flush).then_some(fh));
    let purpose = CallKind::Write { ino, offset, size, writeback: is_flush, append, direct };
    let call = Call::Write { node, handle: Some(handle), offset, data, flags };
    let id = sending::send(state, now, Some(opener), purpose, call);
    if !is_flush {
        state.calls.mark_reads_before_write(ino, (offset, size));
    }
    if let Some(flight) = state.calls.inflight_mut(id) {
        flight.writeback_op = flush;
        flight.written = written;
    }
    if direct.is_some() {
        full_pages::on_direct_append(state, ino, fh, offset);
    }
    replies::wait(state, op, caller, id, crate::calls::ReplyKind::Reply, false)
}

pub(crate) fn on_written(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    ino: u64,
    at: u64,
    response: &Response,
) -> OpReply {
    learn::apply_attrs_after(state, now, flight, response);
    if response.result.is_ok() && attr_after(response, ino).is_none() {
        // The reply carries no attributes, so those after the write are unknown.
        leases::drop_attr(state, ino);
    }
    changes::note_inode(state, ino);
    note_local_write(state, now, ino, response);
    if let Some(id) = state.store.id_of(ino).filter(|_| !response.grants.is_empty()) {
        let token = attr_after(response, ino).map(|attr| ChangeToken::of(&attr));
        learn::begin_data_grant(state, now, flight, id, token, response);
    }
    writeback::note_page_base_after(state, now, flight, ino, response);
    content_writes::keep_written(state, now, flight, (ino, at), response);
    let is_flush = flight.purpose.is_writeback();
    full_pages::note_write_reply(state, &flight.purpose, response.result.is_ok());
    match response.result {
        Ok(Reply::Written { offset, count }) => {
            if is_flush {
                writeback::on_writeback_reply(state, ino, response);
            }
            if offset != at {
                let stale = vec![
                    KernelInvalidation::Data { ino, offset: 0, length: 0 },
                    KernelInvalidation::Attr { ino },
                ];
                invalidate::invalidate(state, stale, None);
            }
            OpReply::Written(count)
        }
        Ok(_) => OpReply::Failed(Errno::PROTO),
        Err(Errno::CANCELED) if is_flush => {
            writeback::fail_writeback(state, ino);
            OpReply::Failed(Errno::IO)
        }
        Err(errno) => {
            leases::drop_attr(state, ino);
            OpReply::Failed(errno)
        }
    }
}

/// Drops a write's pages after its reply, if no grant covers them, since no recall would say that another client
/// overwrites them. Also if a write-back failed, since the pages would look written.
pub(crate) fn drop_pages_after_write(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    response: &Response,
) {
    let CallKind::Write { ino, writeback: flush, .. } = flight.purpose else { return };
    let has_failed = flush && response.result.is_err();
    if !flight.drop_data && !has_failed && view::has_data_grant(state, now, ino) {
        return;
    }
    let (pages, id) = (flight.purpose.pages(), state.store.id_of(ino));
    match (pages, id) {
        // Write-back brings no new pages.
        (Some((_, range)), Some(id)) if !flush => {
            page_drops::drop_ungranted(state, flight, (id, range), response)
        }
        (pages, _) => page_drops::drop_after_reply(state, &flight.waiters, pages),
    }
}

/// Records the kernel's pages after a local write.
pub(crate) fn note_local_write(state: &mut State, now: Time, ino: u64, response: &Response) {
    let Some(inode) = state.store.inode_mut(ino) else { return };
    let after = match (&response.result, attr_after(response, ino)) {
        (Ok(Reply::Attr(node, attr)), _) if node.ino == ino => Some(*attr),
        (_, after) => after,
    };
    inode.pages_mut().note_write(now, after.as_ref().map(ChangeToken::of));
}

/// Queues a read until the writes of its pages have replies. Returns whether there are any.
fn queue_behind_write(
    state: &mut State,
    op: OpId,
    caller: Caller,
    (ino, fh): (u64, Fh),
    range: (u64, u32),
) -> bool {
    let (offset, size) = range;
    let pages = (offset, u64::from(size));
    let is_met = state.calls.is_being_written(ino, pages);
    if is_met {
        state.calls.queue(op, caller, Op::Read { ino, fh, offset, size });
    }
    is_met
}
