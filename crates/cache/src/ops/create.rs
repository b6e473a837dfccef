//! Requests that make a name, and the replies to their calls.

use crate::calls::{CallKind, InflightCall, OpenParams};
use crate::facts::{changes, forgetting, inodes, learn, leases};
use crate::grants::LiveGrant;
use crate::op::{Caller, OpReply};
use crate::open::OpenKind;
use crate::ops::{files, name_errors};
use crate::out::{queue, sending};
use crate::pages::ChangeToken;
use crate::state::State;
use crate::view::paths;
use nigh_types::{Call, Entry, Errno, LeaseScope, Name, NodeRef, OpId, Reply, Response, Time};

/// Sends a call that makes `name` in `dir`; `call` gets the directory's reference.
#[allow(clippy::too_many_arguments, reason = "a request, its name, how it is opened and its call")]
pub(crate) fn create(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    dir: u64,
    name: Name,
    file: Option<OpenParams>,
    call: impl FnOnce(NodeRef, Name) -> Call,
) -> Option<OpReply> {
    let Some(place) = paths::node_ref(state, dir) else { return Some(OpReply::Failed(Errno::STALE)) };
    let call = call(place, name.clone());
    sending::send_for(state, now, op, caller, CallKind::Create { dir, name, file }, call)
}

pub(crate) fn on_create_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (dir, name): (u64, &Name),
    file: Option<OpenParams>,
    response: &Response,
) -> OpReply {
    let (entry, handle) = match &response.result {
        Ok(Reply::Created { entry, handle, existed }) => {
            if !existed && (entry.attr.is_dir() || entry.attr.nlink == 1) {
                inodes::reset_reused_id(state, entry.id);
            }
            (entry.clone(), *handle)
        }
        Ok(_) => return OpReply::Failed(Errno::PROTO),
        Err(errno) => {
            if !name_errors::says_nothing_of_names(*errno) {
                leases::discard_uncertain_name(state, dir, name, (*errno == Errno::EXIST).then_some(true));
            }
            return OpReply::Failed(*errno);
        }
    };
    // It may have the inode number of a file that is gone, or be a file that the call has truncated.
    state.drop_contents(entry.id.ino);
    let Some(dir_id) = state.store.id_of(dir) else { return OpReply::Failed(Errno::STALE) };
    learn::apply_attrs_after(state, now, flight, response);
    changes::made(state, &flight.race_log, (dir, name), &entry);
    let held = learn::apply_dentry(state, now, flight, dir_id, name, Some(&entry), &response.grants);
    changes::note_inode(state, dir);
    let node = inodes::entry_reply(state, now, Some((dir, name)), entry.id, entry.attr, held, None);
    let under = learn::apply_attr(state, now, flight, entry.id, entry.attr, &response.grants);
    learn::keep_target(state, now, entry.id, entry.target.clone());
    learn::learn_no_xattrs(state, now, flight, &entry);
    changes::note_inode(state, entry.id.ino);
    begin_new_directory(state, now, flight, &entry, response);
    let attr_valid = queue::attr_timeout(state, now, entry.id.ino, &entry.attr, under);
    let node = crate::op::Node { attr_valid, ..node };
    if flight.waiters.is_empty() {
        forgetting::handle_forget(state, node.number, 1);
        if let Some(handle) = handle {
            sending::release_handle(state, handle);
        }
        return OpReply::Done;
    }
    match (file, handle) {
        (Some(file), Some(handle)) => {
            learn::begin_data_grant(
                state,
                now,
                flight,
                entry.id,
                Some(ChangeToken::of(&entry.attr)),
                response,
            );
            OpReply::Created(node, files::opened_file(state, entry.id, file, OpenKind::Remote(handle), false))
        }
        (Some(_), None) => OpReply::Failed(Errno::PROTO),
        (None, _) => OpReply::Node(node),
    }
}

/// Begins a new directory's lease if the reply grants it: the directory is known to be empty.
fn begin_new_directory(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    entry: &Entry,
    response: &Response,
) {
    let granted =
        flight.granted(&response.grants, entry.id, LeaseScope::Directory).filter(|_| entry.attr.is_dir());
    // Another client may have made a name in it by now, or a local caller before the reply to mkdir.
    let ino = entry.id.ino;
    let is_empty =
        !flight.race_log.has_remote_change_in(ino) && flight.race_log.local_dentries(ino).next().is_none();
    let granted = granted.filter(|_| is_empty && !state.calls.has_local_change_in(ino));
    let held = granted.map(|g| LiveGrant::begin(g, flight.sent)).filter(|h| h.is_live(now));
    if let Some(held) = held {
        changes::made_empty(state, entry.id, held);
    }
}

pub(crate) fn on_tmpfile_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    file: OpenParams,
    response: &Response,
) -> OpReply {
    let (entry, handle) = match &response.result {
        Ok(Reply::Created { entry, handle: Some(handle), .. }) => (entry, *handle),
        Ok(_) => return OpReply::Failed(Errno::PROTO),
        Err(errno) => return OpReply::Failed(*errno),
    };
    if flight.waiters.is_empty() {
        sending::release_handle(state, handle);
        return OpReply::Done;
    }
    state.drop_contents(entry.id.ino);
    let node = inodes::entry_reply(state, now, None, entry.id, entry.attr, None, None);
    learn::apply_attrs_after(state, now, flight, response);
    learn::apply_attr(state, now, flight, entry.id, entry.attr, &response.grants);
    learn::begin_data_grant(state, now, flight, entry.id, Some(ChangeToken::of(&entry.attr)), response);
    OpReply::Created(node, files::opened_file(state, entry.id, file, OpenKind::Remote(handle), false))
}
