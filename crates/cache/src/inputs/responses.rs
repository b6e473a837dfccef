//! Replies of the remote, by the kind of their call.

use crate::calls::{CallKind, InflightCall};
use crate::facts::{inodes, learn, leases, order};
use crate::inputs::{reclaim, updates};
use crate::kernel::DeferredReply;
use crate::memory::evict;
use crate::op::{Fh, KernelInvalidation, OpReply, Output};
use crate::ops::{
    arrivals, content_reads, create, file_prefetch, files, listing_chunks, locks, lookup, prefetching, privs,
    remove, rename, restart, revalidate, set_attr, statfs, targets, xattr,
};
use crate::out::{invalidate, page_drops, queue, replies, sending};
use crate::page_cache::writeback;
use crate::pages::ChangeToken;
use crate::state::State;
use crate::view::paths;
use crate::view::paths::nodes_to_resolve;
use crate::watching::local_changes;
use nigh_types::{Call, CallId, Errno, Name, Reply, Response, Time};

fn plain(response: &Response) -> OpReply {
    match &response.result {
        Ok(Reply::Flags(flags)) => OpReply::Flags(*flags),
        Ok(Reply::Offset(offset)) => OpReply::Offset(*offset),
        Ok(Reply::LockConflict(info)) => OpReply::Locked(*info),
        Ok(Reply::Done) => OpReply::Done,
        Ok(_) => OpReply::Failed(Errno::PROTO),
        Err(errno) => OpReply::Failed(*errno),
    }
}

fn handle_reply(state: &mut State, now: Time, flight: InflightCall, response: Response) {
    if order::is_for_old_inode(state, &flight) {
        if let Ok(Reply::Opened { handle, .. }) = response.result {
            sending::release_handle(state, handle);
        }
        return replies::reply_all(state, &flight.waiters, &OpReply::Failed(Errno::STALE));
    }
    if privs::may_precede_write(state, &flight, &response) {
        return restart::answer_unchanged(state, now, &flight);
    }
    let files = order::changed_files_awaited(state, &flight.purpose, &response);
    privs::note_set_id_after(state, &flight, &response);
    let answer = match &flight.purpose {
        CallKind::Lookup { dir, name } => {
            let (dir, name) = (*dir, name.clone());
            return on_lookup_reply(state, now, flight, dir, &name, response);
        }
        CallKind::Attr { .. } => return lookup::on_getattr_reply(state, now, flight, response),
        CallKind::ReadLink { ino } => return targets::on_readlink_reply(state, now, &flight, *ino, response),
        CallKind::Xattrs { ino } => return xattr::on_xattrs_reply(state, now, &flight, *ino, response),
        CallKind::Xattr { ino } => return xattr::on_xattr_value_reply(state, now, &flight, *ino, &response),
        CallKind::Read { ino, fh, offset, size } => {
            return on_read_reply(state, now, &flight, (*ino, *fh), (*offset, *size), response);
        }
        CallKind::Reopen { .. } | CallKind::ReclaimLock { .. } => {
            return reclaim::on_reclaim_reply(state, now, &flight, &response);
        }
        CallKind::Revalidate { ino } => {
            return revalidate::on_revalidate_reply(state, now, &flight, *ino, &response);
        }
        CallKind::ResolvePath { then } => {
            return on_resolved(state, now, *then, response.result.map(drop));
        }
        CallKind::List { .. } | CallKind::ListNames { .. } => return,
        CallKind::Prefetch | CallKind::ReadAhead { .. } => return,
        CallKind::Open { ino, file } => files::on_open_reply(state, now, &flight, *ino, *file, &response),
        CallKind::Create { dir, name, file } => {
            create::on_create_reply(state, now, &flight, (*dir, name), *file, &response)
        }
        CallKind::Tmpfile { file } => create::on_tmpfile_reply(state, now, &flight, *file, &response),
        CallKind::Remove { dir, name } => {
            remove::on_remove_reply(state, now, &flight, (*dir, name), &response)
        }
        CallKind::Rename { .. } => rename::on_rename_reply(state, now, &flight, &response),
        CallKind::Change { ino, xattrs } => {
            set_attr::on_change_reply(state, now, &flight, (*ino, *xattrs), &response)
        }
        CallKind::Write { ino, offset, .. } => {
            files::on_written(state, now, &flight, *ino, *offset, &response)
        }
        CallKind::StatFs { ino } => statfs::on_statfs_reply(state, &flight, *ino, &response),
        CallKind::Lock { .. } => locks::on_lock_reply(state, now, &flight, &response),
        CallKind::Unlock { .. } => locks::on_unlock_reply(state, &flight, &response),
        CallKind::Flags | CallKind::Seek | CallKind::Fsync { .. } | CallKind::TestLock => plain(&response),
    };
    let sent = order::may_predate_replies(&flight).then_some(flight.sent);
    let name = match &flight.purpose {
        CallKind::Create { dir, name, .. } => Some((*dir, name.clone())),
        _ => None,
    };
    queue::enqueue_reply(state, &files, &flight.waiters, DeferredReply { answer, sent, name });
    local_changes::note_local_change(state, &flight, &response);
    if flight.is_mutation() && flight.waiters.is_empty() {
        invalidate::invalidate_abandoned(state, &flight, &response);
    }
    files::drop_pages_after_write(state, now, &flight, &response);
    if let CallKind::Write { ino, writeback: false, .. } = flight.purpose {
        restart::start_queued_reads(state, now, ino);
    }
}

fn on_read_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (ino, fh): (u64, Fh),
    (offset, size): (u64, u32),
    response: Response,
) {
    if flight.read_before_write && response.result.is_ok() {
        return restart::resend_reads(state, now, &flight.waiters, fh, (ino, offset, size));
    }
    let range = (offset, u64::from(size));
    let data = match response.result {
        Ok(Reply::Data(data)) => data,
        failed => {
            let errno = failed.err().unwrap_or(Errno::PROTO);
            replies::reply_all(state, &flight.waiters, &OpReply::Failed(errno));
            let pages = flight.purpose.pages().filter(|_| flight.drop_data);
            return page_drops::drop_after_reply(state, &flight.waiters, pages);
        }
    };
    if let Some(&op) = flight.waiters.first() {
        replies::reply_to(state, op, OpReply::Data(data));
    }
    state.store.inode_mut(ino).into_iter().for_each(|inode| inode.pages_mut().full_mut().note_filled());
    let Some(id) = state.store.id_of(ino) else { return };
    let response = Response { result: Ok(Reply::Done), ..response };
    learn::apply_attrs_after(state, now, flight, &response);
    let token = response.after.iter().find(|(node, _)| *node == id).map(|(_, attr)| ChangeToken::of(attr));
    learn::begin_data_grant(state, now, flight, id, token, &response);
    writeback::note_page_base_after(state, now, flight, ino, &response);
    let changed = flight.race_log.local_inodes.contains(&ino);
    let inode = inodes::record(state, id);
    let lives = inode.pages().live_grant(now).is_some();
    let foreign = inode.pages_mut().note_read(token, changed);
    if !state.kernel.can_notify() {
        return;
    }
    let ungranted = flight.drop_data || !lives;
    if foreign {
        let until =
            invalidate::invalidate(state, vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }], None);
        page_drops::note_drop_after_reply(state, &flight.waiters, ino, until);
        if ungranted {
            page_drops::note_ungranted(state, (id, range), until, &response);
        }
    } else if ungranted {
        page_drops::drop_ungranted(state, flight, (id, range), &response);
    }
}

fn on_lookup_reply(
    state: &mut State,
    now: Time,
    flight: InflightCall,
    dir: u64,
    name: &Name,
    response: Response,
) {
    let kept = lookup::apply_lookup_reply(state, now, flight, dir, name, response);
    updates::on_suspended_lookup(state, now, dir, name, kept);
}

/// Handles a call's response, or a chunk of it.
pub(crate) fn handle_response(state: &mut State, now: Time, id: CallId, response: Response) {
    if let Some(&CallKind::List { dir }) = state.calls.inflight(id).map(|flight| &flight.purpose) {
        // A deadline that passed in mid-listing detaches the entries so far, before more come.
        leases::live_directory(state, now, dir);
    }
    let Some(mut flight) = state.calls.remove(id) else { return };
    let lost_its_way = response.result == Err(Errno::STALE) && !flight.is_unwanted_lock();
    if lost_its_way && resolve_again(state, now, id, &mut flight) {
        state.calls.insert(id, flight);
        return;
    }
    if let CallKind::List { dir } = flight.purpose {
        if let Some(flight) = listing_chunks::on_listing_chunk(state, now, id, dir, flight, response) {
            state.calls.insert(id, flight);
        }
        return arrivals::after_listing_chunk(state, now, dir);
    }
    if let CallKind::ListNames { dir, fh } = flight.purpose {
        return arrivals::on_names_reply(state, now, id, (dir, fh), flight, response);
    }
    if matches!(flight.purpose, CallKind::Prefetch) {
        prefetching::on_prefetch_reply(state, now, id, flight, response);
        file_prefetch::go_on(state, now);
        return evict::trim(state, now);
    }
    if let Some(sequence) = flight.sequence {
        state.calls.finish_mutation(sequence);
    }
    state.calls.leave_joins(id, &flight.purpose);
    order::refresh_grant_ids(state, &flight, &response.grants);
    if let CallKind::ReadAhead { node, .. } = flight.purpose {
        content_reads::on_read_ahead_reply(state, now, &flight, node, response);
        restart::start_reads_behind_read_ahead(state, now, node.ino);
        file_prefetch::go_on(state, now);
    } else {
        handle_reply(state, now, flight, response);
    }
    evict::trim(state, now);
}

/// Sends a `ResolvePath` when the remote cannot find an inode: gives it the names from the root. Once for each
/// inode that the call names.
fn resolve_again(state: &mut State, now: Time, id: CallId, flight: &mut InflightCall) -> bool {
    let Some(call) = &flight.resend else { return false };
    let anchors = nodes_to_resolve(call);
    let (node, names) = match (anchors.get(flight.resolve_attempts), anchors[0]) {
        (Some(Some(node)), _) => (*node, paths::path_to(state, *node)),
        // A reclaimed inode may have moved by a change that took effect and has no reply yet.
        (_, Some(node)) if flight.purpose.is_reclaim() && flight.resolve_attempts == 1 => {
            let moved = paths::path_by(state, node, paths::parent_after_renames);
            (node, moved.filter(|moved| paths::path_to(state, node).as_ref() != Some(moved)))
        }
        _ => return false,
    };
    let Some(names) = names else { return false };
    flight.resolve_attempts += 1;
    sending::send(state, now, None, CallKind::ResolvePath { then: id }, Call::ResolvePath { node, names });
    true
}

/// Handles the reply to a `ResolvePath`: resends the call that waited for it, or fails it for good.
fn on_resolved(state: &mut State, now: Time, then: CallId, result: Result<(), Errno>) {
    let Some(flight) = state.calls.inflight_mut(then) else { return };
    if flight.is_abandoned() {
        // The call was not sent yet, so the change is not made (S8).
        flight.resend = None;
        return handle_response(state, now, then, Response::plain(Err(Errno::INTR)));
    }
    match (result, &flight.resend) {
        (Ok(()), Some(call)) if !flight.is_unwanted_lock() => {
            flight.sent = now;
            let (call, caller) = (call.clone(), flight.caller);
            let name = flight.sequence.map(|s| state.calls.mutation_id(s));
            state.out.push_back(Output::Call { id: then, caller, mutation_id: name, call });
        }
        _ => {
            if !flight.purpose.is_reclaim() {
                flight.resend = None;
            }
            handle_response(state, now, then, Response::plain(Err(Errno::STALE)));
        }
    }
}
