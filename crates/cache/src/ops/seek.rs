//! Searches for data and holes in a file.

use crate::calls::CallKind;
use crate::op::{Caller, Fh, OpReply};
use crate::out::sending;
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, Kind, OpId, Time};

/// Bytes of a unit of `st_blocks`.
const BLOCK: u64 = 512;

/// Finds the next data (`data`) or hole at or after an offset. A file with as many blocks as its size takes counts as data
/// from its begin to its end, which lseek(2) permits; `grep` searches each file of more than 96 KiB for holes. The others are
/// searched by the remote.
pub(crate) fn seek(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    (ino, fh): (u64, Fh),
    (offset, data): (u64, bool),
) -> Option<OpReply> {
    if let Some(answer) = seek_in_full(state, now, ino, offset, data) {
        return Some(answer);
    }
    let Some((node, handle)) = paths::handle_for(state, ino, Some(fh)) else {
        return Some(OpReply::Failed(Errno::STALE));
    };
    let call = Call::Seek { node, handle, offset, data };
    sending::send_for(state, now, op, caller, CallKind::Seek, call)
}

/// Answers for a file that has all its blocks, by attributes under a grant.
fn seek_in_full(state: &State, now: Time, ino: u64, offset: u64, data: bool) -> Option<OpReply> {
    let id = state.store.id_of(ino).filter(|_| !state.calls.is_data_changing(ino))?;
    let (attr, _) = view::cached_attr(state, now, id)?;
    let is_full = attr.kind() == Kind::File && attr.blocks.saturating_mul(BLOCK) >= attr.size;
    is_full.then_some(match (offset < attr.size, data) {
        (true, true) => OpReply::Offset(offset),
        (true, false) => OpReply::Offset(attr.size),
        (false, _) => OpReply::Failed(Errno::NXIO),
    })
}
