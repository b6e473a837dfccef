//! Calls as messages: one module for each kind of call.

mod attrs;
mod create;
mod data;
mod list;
mod locks;
mod lookup;
mod open;
mod prefetch;
mod remove;
mod rename;
mod xattrs;

use super::context::CallContext;
use super::prefetch_jobs::PrefetchJob;
use super::reply::{CallReply, Outcome};
use nigh_remote::Event;
use nigh_types::{Call, CallId, Errno, Reply, Request};
use std::sync::Arc;

/// Executes a call and emits its reply.
pub(super) async fn execute(cx: CallContext, id: CallId, request: Arc<Request>) {
    let uid = cx.user(&request.credentials);
    match &request.call {
        Call::List { dir } => return list::list(&cx, id, uid, dir).await,
        Call::Prefetch { roots, order, credit } => {
            let job = PrefetchJob::new(roots, *order, *credit);
            return prefetch::prefetch(&cx, id, uid, job).await;
        }
        Call::PrefetchCredit { walk, credit, want } => {
            if let Some(job) = cx.shared().prefetches.get_mut(walk) {
                job.steer(*credit, want.as_ref());
            }
            return;
        }
        _ => {}
    }
    if may_remove_name(&request.call) {
        cx.until_others(|shared| !shared.files.is_pinning()).await;
    }
    let outcome = outcome(&cx, id, uid, &request).await;
    cx.shared().changes += u64::from(request.call.is_mutation());
    if request.call.has_reply() {
        let response = cx.respond(outcome, true);
        cx.emit(Event::Response { call: id, response });
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

async fn outcome(cx: &CallContext, id: CallId, uid: u32, request: &Request) -> Outcome {
    match &request.call {
        Call::Lookup { dir, name } => lookup::look_up(cx, uid, dir, name).await,
        Call::ResolvePath { node, names } => {
            cx.walk_far(uid, *node, names).await.map(|()| CallReply::plain(Reply::Done))
        }
        Call::GetAttr { node } => attrs::get(cx, uid, node).await,
        Call::ReadLink { node } => lookup::read_link(cx, uid, node).await,
        Call::StatFs { node } => attrs::space(cx, uid, node).await,
        Call::GetFlags { .. } | Call::Fallocate { .. } | Call::CopyRange { .. } | Call::Tmpfile { .. } => {
            Err(Errno::OPNOTSUPP)
        }
        // The protocol has no message for it, and the session reports that.
        Call::LookupNumber { .. } => Err(Errno::STALE),
        Call::Xattrs { node } => xattrs::list(cx, uid, node).await,
        Call::Xattr { node, name } => xattrs::get(cx, uid, node, name).await,
        Call::SetXattr { node, name, value, flags, .. } => {
            xattrs::set(cx, uid, node, name, value, *flags).await
        }
        Call::RemoveXattr { node, name } => xattrs::remove(cx, uid, node, name).await,
        Call::Open { node, access } => open::open(cx, uid, node, *access).await,
        Call::Reopen { node, handle, access } => open::reopen(cx, uid, node, *handle, *access).await,
        Call::PinOpen { node, handle, .. } => open::pin_open(cx, uid, node, *handle).await,
        Call::Release { handles } => {
            open::release(cx, handles);
            Ok(CallReply::plain(Reply::Done))
        }
        Call::Read { node, handle, offset, length } => {
            data::read(cx, uid, node, *handle, (*offset, *length)).await
        }
        Call::Seek { node, offset, data, .. } => attrs::seek(cx, uid, node, *offset, *data).await,
        Call::Write { node, handle, offset, data, flags } => {
            data::write(cx, uid, (node, *handle), (*offset, data), *flags).await
        }
        Call::Fsync { node, handle, data_only } => data::sync(cx, uid, node, *handle, *data_only).await,
        Call::SetAttr { node, handle, set } => attrs::set(cx, uid, node, *handle, set).await,
        call @ (Call::Lock { .. } | Call::Unlock { .. } | Call::GetLock { .. }) => {
            locks::execute_lock_call(cx, id, uid, call).await
        }
        Call::Unlink { dir, name, keep } => remove::unlink(cx, uid, dir, name, *keep).await,
        Call::Rmdir { dir, name } => remove::rmdir(cx, uid, dir, name).await,
        call @ Call::Rename { .. } => rename::rename(cx, uid, call).await,
        call => create::create_name(cx, uid, request.credentials.gid, call).await,
    }
}
