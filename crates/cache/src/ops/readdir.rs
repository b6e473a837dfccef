//! Open directories: open, read, close.

use crate::calls::ReplyKind;
use crate::facts::{forgetting, leases};
use crate::op::{Caller, Fh, Op, OpReply, Page};
use crate::ops::{dir_pages, listings, names_only, prefetch_policy, prefetch_use};
use crate::out::replies;
use crate::state::State;
use crate::view;
use nigh_types::{Cookie, Errno, OpId, Time};

pub(crate) fn open_dir(state: &mut State, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
    if state.store.id_of(ino).is_none() {
        return Some(OpReply::Failed(Errno::STALE));
    }
    if view::is_removed_dir(state, ino) {
        return Some(OpReply::Opened(dir_pages::opened_dir(state, now, ino, caller.pid)));
    }
    let descent = prefetch_policy::note_descent(state, now, ino);
    prefetch_use::use_prefetched(state, now, ino);
    if leases::live_directory(state, now, ino).is_some_and(|(d, _)| d.complete || d.progress.is_some()) {
        return Some(OpReply::Opened(dir_pages::opened_dir(state, now, ino, caller.pid)));
    }
    let began = listings::is_to_be_listed(state, ino)
        && prefetch_policy::prefetch_from(state, now, ino, descent).is_some();
    match listings::list(state, now, ino) {
        Ok((call, joined)) => {
            replies::wait(state, op, caller, call, ReplyKind::OpenDir { ino }, joined && !began)
        }
        Err(Errno::NOMEM) => Some(OpReply::Opened(dir_pages::opened_dir(state, now, ino, caller.pid))),
        Err(errno) => Some(OpReply::Failed(errno)),
    }
}

pub(crate) fn release_dir(state: &mut State, now: Time, fh: Fh) -> Option<OpReply> {
    names_only::close_name_stream(state, now, fh);
    if let Some(open) = state.open.dirs.remove(fh)
        && let Some(inode) = state.store.inode_mut(open.ino)
    {
        inode.opens_mut().note_dir_close();
        forgetting::drop_if_idle(state, open.ino);
    }
    Some(OpReply::Done)
}

#[allow(clippy::too_many_arguments, reason = "the fields of one FUSE request")]
pub(crate) fn read_dir(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
    fh: Fh,
    offset: Cookie,
    size: u32,
    plus: bool,
) -> Option<OpReply> {
    let Some(open) = state.open.dirs.dir_mut(fh) else { return Some(OpReply::Failed(Errno::BADF)) };
    open.reader = caller.pid;
    if offset == Cookie(0) {
        state.open.readers.began(caller.pid);
        state.open.dirs.leave_snapshot(fh);
        names_only::close_name_stream(state, now, fh);
    }
    if let Some(mut page) = dir_pages::snapshot_page(state, fh, offset, size, plus) {
        dir_pages::on_page_reply(state, now, fh, &mut page);
        return Some(OpReply::Page(page));
    }
    if view::is_removed_dir(state, ino) {
        return Some(OpReply::Page(Page::default()));
    }
    let known = leases::live_directory(state, now, ino).is_some();
    if known && state.store.suspended.has_names(ino) {
        return replies::wait_for_commit(
            state,
            now,
            op,
            caller,
            ino,
            Op::ReadDir { ino, fh, offset, size, plus },
        );
    }
    if known && let Some(mut page) = dir_pages::page(state, now, ino, fh, offset, size, plus) {
        dir_pages::on_page_reply(state, now, fh, &mut page);
        return Some(OpReply::Page(page));
    }
    let want = ReplyKind::Page { fh, offset, size, plus };
    if let Some(answer) = names_only::read_names_only(state, now, (op, caller), ino, &want) {
        return answer;
    }
    match listings::list(state, now, ino) {
        Ok((call, joined)) => replies::wait(state, op, caller, call, want, joined),
        Err(errno) => Some(OpReply::Failed(errno)),
    }
}
