//! SETATTR, and replies to changes of attributes and xattrs.

use crate::calls::{CallKind, InflightCall};
use crate::facts::{changes, learn, leases};
use crate::op::{Caller, Fh, OpReply};
use crate::open::OpenFile;
use crate::ops::{files, lookup, privs};
use crate::out::{pins, queue, sending};
use crate::page_cache::{full_pages, writeback};
use crate::state::State;
use crate::view::paths;
use nigh_types::{Call, DataVersion, Errno, OpId, Reply, Response, SetAttr, Time};

pub(crate) fn set_attr(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    (ino, fh): (u64, Option<Fh>),
    set: SetAttr,
) -> Option<OpReply> {
    if set.is_empty() {
        return privs::set_attr_empty(state, now, op, caller, ino);
    }
    if full_pages::is_failed_append_rollback(state, fh, &set) {
        return lookup::attributes(state, now, op, caller, ino);
    }
    let who_may = set.mode.is_some() || set.uid.is_some() || set.gid.is_some();
    if who_may {
        pins::pin_open(state, ino);
    }
    let Some((node, handle)) = paths::handle_for(state, ino, fh) else {
        return Some(OpReply::Failed(Errno::STALE));
    };
    // A handle is sent only where it makes a difference: truncation depends on the access mode of the open.
    let own = fh.and_then(|fh| state.open.files.get(fh)).and_then(OpenFile::handle);
    let handle = if set.size.is_some() { own } else { handle };
    let call = Call::SetAttr { node, handle, set };
    sending::send_for(state, now, op, caller, CallKind::Change { ino, xattrs: set.mode.is_some() }, call)
}

/// Handles the reply to a change of attributes or xattrs.
pub(crate) fn on_change_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (ino, xattrs): (u64, bool),
    response: &Response,
) -> OpReply {
    learn::apply_attrs_after(state, now, flight, response);
    if xattrs {
        leases::drop_xattrs(state, ino);
    }
    let answer = match response.result {
        Ok(Reply::Attr(id, attr)) => {
            files::note_local_write(state, now, ino, response);
            writeback::note_page_base(state, now, Some(flight), ino, DataVersion::of(&attr));
            let under = learn::apply_attr(state, now, flight, id, attr, &response.grants);
            OpReply::Attr(id, attr, queue::attr_timeout(state, now, id.ino, &attr, under))
        }
        Ok(_) => OpReply::Failed(Errno::PROTO),
        Err(errno) => {
            if !matches!(errno, Errno::PERM | Errno::ACCES | Errno::ROFS | Errno::NODATA | Errno::EXIST) {
                leases::drop_attr(state, ino);
            }
            OpReply::Failed(errno)
        }
    };
    changes::note_inode(state, ino);
    answer
}
