//! Execution of one call on an export, in one attempt or several.

use super::prefetch::{self, ReplyStream};
use super::space::with_space;
use super::{Context, Outcome, attributes, conflicts, data, lookup, make, open, remove, rename};
use crate::export::Export;
use crate::lease::call_leases::CallLeases;
use crate::lease::pending_change::PendingChange;
use crate::lease::session_files::SessionFiles;
use crate::os::error::{Fault, Result};
use nigh_types::{Call, CallId, Credentials, Errno, Handle, Name, NodeRef, Request, Response};

/// Progress of a call.
pub(crate) enum Progress {
    Answered,
    /// The call has had no effect yet, and waits for other clients to return leases on the facts that it changes.
    Waits(PendingChange),
    /// Part of the reply is sent, and the send queue is full.
    Pauses(ReplyStream),
}

impl Export {
    /// Executes one call. `sink` is called once, or for a listing several times, the last time with `last` set. It is
    /// not called if [`Call::has_reply`] is false. May be called from several threads; each calling thread gets its
    /// own umask and working directory.
    ///
    /// # Panics
    /// If the session shares its lease table with other sessions, because the call may then have to wait for them.
    pub fn execute(
        &self,
        files: &SessionFiles,
        call: CallId,
        request: Request,
        sink: &mut dyn FnMut(Response),
    ) {
        let mut sink = |response| {
            sink(response);
            true
        };
        match self.attempt(files, call, (&request, false), (None, None), &mut sink) {
            Progress::Answered => {}
            Progress::Waits(_) => panic!("no other client holds a grant"),
            Progress::Pauses(_) => unreachable!("there is always room"),
        }
    }

    /// Makes one attempt to execute a call. If another client holds a conflicting lease, the lease is recalled, and
    /// the call is to be attempted again when its change is ready. `sink` returns whether there is room for more;
    /// without room a listing pauses. `again`: the client first sent the call in a session that the server has
    /// discarded.
    pub(crate) fn attempt(
        &self,
        files: &SessionFiles,
        call: CallId,
        (request, again): (&Request, bool),
        (change, begun): (Option<PendingChange>, Option<ReplyStream>),
        sink: &mut dyn FnMut(Response) -> bool,
    ) -> Progress {
        let what = &request.call;
        let call_leases = CallLeases::new(files, change, again);
        let cx = Context { export: self, files, who: &request.credentials, call_leases: &call_leases };
        let mut sink = |response: Response| {
            call_leases.mark_carried(&response.grants);
            sink(response)
        };
        let refuse = |fault: Fault| {
            let errno = Errno::from(fault);
            tracing::trace!(call = call.0, kind = what.type_name(), %errno, "refused");
            Response::plain(Err(errno))
        };
        match what {
            Call::Release { handles } => files.release(handles),
            Call::PinOpen { node, names, handle } => {
                self.pin_open(files, &request.credentials, (node, names), *handle);
            }
            // Handled by `Server::handle_request` before.
            Call::PrefetchCredit { .. } => {}
            what if prefetch::is_streamed(what) => match prefetch::stream_reply(cx, what, begun, &mut sink) {
                Ok(Some(begun)) => return Progress::Pauses(begun),
                Ok(None) => {}
                Err(fault) => {
                    sink(refuse(fault));
                }
            },
            what => {
                let mut places = files.leases().places.empty_set();
                let done = match conflicts::prepare(cx, what, &mut places) {
                    Ok(true) => with_space(cx, places.filesystem(), || dispatch(cx, what)),
                    Ok(false) => match call_leases.take_change() {
                        Some(change) => return Progress::Waits(change),
                        None => Err(Fault(Errno::IO)),
                    },
                    Err(fault) => Err(fault),
                };
                // Other calls may proceed before this reply is queued, except those that need an inode lock of this call.
                // If a recall for one of them precedes the reply, the reply carries no grant on what was recalled.
                call_leases.done();
                let settled = done.and_then(|outcome| self.resolver().ids.settle().map(|()| outcome));
                sink(settled.map_or_else(refuse, Outcome::into_response));
            }
        }
        Progress::Answered
    }

    /// Keeps a file open that a client opened without a handle ([`Call::PinOpen`]). Completes before any later message
    /// of the client is handled.
    pub(crate) fn pin_open(
        &self,
        files: &SessionFiles,
        who: &Credentials,
        (node, names): (&NodeRef, &[Name]),
        handle: Handle,
    ) {
        let call_leases = CallLeases::new(files, None, false);
        let cx = Context { export: self, files, who, call_leases: &call_leases };
        if let Err(Fault(errno)) = open::pin_open(cx, node, names, handle) {
            tracing::debug!(ino = node.node.ino, %errno, "a file that a client has open cannot be kept for it");
        }
    }
}

fn dispatch(cx: Context<'_>, call: &Call) -> Result<Outcome> {
    match call {
        Call::Lookup { dir, name } => lookup::lookup(cx, dir, name),
        Call::ResolvePath { node, names } => {
            cx.resolver().walk(*node, names).map(|()| Outcome::plain(nigh_types::Reply::Done))
        }
        Call::GetAttr { node } => lookup::getattr(cx, node),
        Call::LookupNumber { ino } => lookup::by_number(cx, *ino),
        Call::ReadLink { node } => lookup::readlink(cx, node),
        Call::Xattrs { node } => lookup::xattrs(cx, node),
        Call::Xattr { node, name } => lookup::xattr(cx, node, name),
        Call::StatFs { node } => lookup::statfs(cx, node),
        Call::Open { node, access } => open::open(cx, node, *access),
        Call::Reopen { node, handle, access } => open::reopen_as(cx, node, *handle, *access),
        Call::Read { node, handle, offset, length } => data::read(cx, node, *handle, *offset, *length),
        Call::Seek { node, handle, offset, data } => data::seek(cx, node, *handle, *offset, *data),
        Call::GetFlags { node } => lookup::flags(cx, node),
        // `Export::attempt` handles calls with several replies or none.
        _ => mutate(cx, call),
    }
}

fn mutate(cx: Context<'_>, call: &Call) -> Result<Outcome> {
    match call {
        Call::Create { dir, name, mode, umask, exclusive, access } => {
            make::create(cx, dir, &make::New { name, mode: *mode, umask: *umask }, *exclusive, *access)
        }
        Call::Tmpfile { dir, mode, umask, access } => make::tmpfile(cx, dir, *mode, *umask, *access),
        Call::Mknod { dir, name, kind, mode, umask, rdev } => {
            make::mknod(cx, dir, &make::New { name, mode: *mode, umask: *umask }, *kind, *rdev)
        }
        Call::Mkdir { dir, name, mode, umask } => {
            make::mkdir(cx, dir, &make::New { name, mode: *mode, umask: *umask })
        }
        Call::Symlink { dir, name, target } => make::symlink(cx, dir, name, target),
        Call::Link { node, dir, name } => make::link(cx, node, dir, name),
        Call::Unlink { dir, name, keep } => remove::unlink(cx, dir, name, *keep),
        Call::Rmdir { dir, name } => remove::rmdir(cx, dir, name),
        Call::Rename { from, name, to, new_name, no_replace, exchange, whiteout, keep } => {
            let names = rename::Names { from, name, to, new_name };
            rename::rename(cx, &names, rename::flags(*no_replace, *exchange, *whiteout), *keep)
        }
        Call::SetAttr { node, handle, set } => attributes::setattr(cx, node, *handle, set),
        Call::Write { node, handle, offset, data, flags } => {
            data::write(cx, node, *handle, *offset, data, *flags)
        }
        Call::Fallocate { node, handle, mode, offset, length } => {
            data::fallocate(cx, node, *handle, *mode, *offset, *length)
        }
        Call::CopyRange { from, from_handle, from_offset, to, to_handle, to_offset, length } => {
            let from = data::End { place: from, handle: *from_handle, offset: *from_offset };
            let to = data::End { place: to, handle: *to_handle, offset: *to_offset };
            data::copy(cx, from, to, *length)
        }
        Call::SetXattr { node, name, value, flags, kill_sgid } => {
            attributes::setxattr(cx, node, (name, value), *flags, *kill_sgid)
        }
        Call::RemoveXattr { node, name } => attributes::removexattr(cx, node, name),
        Call::Fsync { node, handle, data_only } => data::fsync(cx, node, *handle, *data_only),
        _ => Err(Fault(Errno::PROTO)),
    }
}
