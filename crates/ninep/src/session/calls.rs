//! Calls as messages: one module for each kind of call.

mod attrs;
mod create;
mod data;
mod list;
mod locks;
mod lookup;
mod open;
mod remove;
mod rename;
mod xattrs;

pub(super) use locks::FileLocks;

use super::executor::CallContext;
use super::reply::{CallReply, Outcome};
use nigh_remote::{Event, Output};
use nigh_types::{Call, CallId, Errno, Reply, Request};
use std::sync::Arc;

/// Executes a call and emits its reply.
pub(super) async fn execute(desk: CallContext, id: CallId, request: Arc<Request>) {
    let uid = desk.user(&request.credentials);
    if let Call::List { dir } = &request.call {
        return list::list(&desk, id, uid, dir).await;
    }
    if may_remove_name(&request.call) {
        desk.until_others(|shared| !shared.files.is_pinning()).await;
    }
    let outcome = outcome(&desk, id, uid, &request).await;
    if request.call.has_reply() {
        let response = desk.respond(outcome, true);
        desk.shared().out.push_back(Output::Event(Event::Response { call: id, response }));
    }
}

/// Whether a call may remove the name under which a file is still to be opened.
fn may_remove_name(call: &Call) -> bool {
    matches!(
        call,
        Call::Unlink { .. }
            | Call::Rename { .. }
            | Call::Rmdir { .. }
            | Call::SetAttr { .. }
            | Call::Link { .. }
    )
}

async fn outcome(desk: &CallContext, id: CallId, uid: u32, request: &Request) -> Outcome {
    match &request.call {
        Call::Lookup { dir, name } => lookup::look_up(desk, uid, dir, name).await,
        Call::ResolvePath { node, names } => {
            desk.walk_far(uid, *node, names).await.map(|()| CallReply::plain(Reply::Done))
        }
        Call::GetAttr { node } => attrs::get(desk, uid, node).await,
        Call::ReadLink { node } => lookup::read_link(desk, uid, node).await,
        Call::StatFs { node } => attrs::space(desk, uid, node).await,
        Call::GetFlags { .. } | Call::Fallocate { .. } | Call::CopyRange { .. } | Call::Tmpfile { .. } => {
            Err(Errno::OPNOTSUPP)
        }
        // The protocol has no message for it, and the session reports that.
        Call::LookupNumber { .. } => Err(Errno::STALE),
        Call::Xattrs { node } => xattrs::list(desk, uid, node).await,
        Call::Xattr { node, name } => xattrs::get(desk, uid, node, name).await,
        Call::SetXattr { node, name, value, flags, .. } => {
            xattrs::set(desk, uid, node, name, value, *flags).await
        }
        Call::RemoveXattr { node, name } => xattrs::remove(desk, uid, node, name).await,
        Call::Open { node, access } => open::open(desk, uid, node, *access).await,
        Call::Reopen { node, handle, access } => open::reopen(desk, uid, node, *handle, *access).await,
        Call::PinOpen { node, handle, .. } => open::pin_open(desk, uid, node, *handle).await,
        Call::Release { handles } => {
            open::release(desk, handles);
            Ok(CallReply::plain(Reply::Done))
        }
        Call::Read { node, handle, offset, length } => {
            data::read(desk, uid, node, *handle, (*offset, *length)).await
        }
        Call::Seek { node, offset, data, .. } => attrs::seek(desk, uid, node, *offset, *data).await,
        Call::Write { node, handle, offset, data, flags } => {
            data::write(desk, uid, (node, *handle), (*offset, data), *flags).await
        }
        Call::Fsync { node, handle, data_only } => data::sync(desk, uid, node, *handle, *data_only).await,
        Call::SetAttr { node, handle, set } => attrs::set(desk, uid, node, *handle, set).await,
        call @ (Call::Lock { .. } | Call::Unlock { .. } | Call::GetLock { .. }) => {
            locks::execute_lock_call(desk, id, uid, call).await
        }
        Call::Unlink { dir, name, keep } => remove::unlink(desk, uid, dir, name, *keep).await,
        Call::Rmdir { dir, name } => remove::rmdir(desk, uid, dir, name).await,
        call @ Call::Rename { .. } => rename::rename(desk, uid, call).await,
        call => create::create_name(desk, uid, request.credentials.gid, call).await,
    }
}
