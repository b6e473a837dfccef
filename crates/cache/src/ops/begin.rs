//! Begin of a request with an active session: one function per kind.

use crate::calls::{CallKind, OpenParams};
use crate::op::{Caller, Op, OpReply};
use crate::ops::{
    create, files, locks, lookup, readdir, remove, rename, seek, set_attr, statfs, targets, xattr,
};
use crate::out::{pins, sending};
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, OpId, Time};

pub(crate) fn start(state: &mut State, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
    if view::is_lost(state, &op) {
        return Some(OpReply::Failed(Errno::IO));
    }
    let through = op.open_files();
    let answer = begin_op(state, now, id, caller, op);
    if answer.is_none() {
        state.calls.note_open_files(id, through);
    }
    answer
}

fn begin_op(state: &mut State, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
    match op {
        Op::Lookup { dir, name } => lookup::lookup(state, now, id, caller, dir, name),
        Op::LookupSelf { ino } => lookup::lookup_self(state, now, id, caller, ino),
        Op::LookupParent { ino } => lookup::lookup_parent(state, now, id, caller, ino),
        Op::GetAttr { ino } => lookup::attributes(state, now, id, caller, ino),
        Op::ReadLink { ino } => targets::read_link(state, now, id, caller, ino),
        Op::OpenDir { ino } => readdir::open_dir(state, now, id, caller, ino),
        Op::ReadDir { ino, fh, offset, size, plus } => {
            readdir::read_dir(state, now, id, caller, ino, fh, offset, size, plus)
        }
        Op::Open { ino, access, append } => files::open(state, now, id, caller, ino, access, append),
        Op::Read { ino, fh, offset, size } => files::read(state, now, id, caller, (ino, fh), offset, size),
        Op::Write { ino, fh, offset, data, flags } => {
            files::write(state, now, id, caller, (ino, fh), (offset, data), flags)
        }
        Op::GetXattr { ino, name, size } => xattr::xattr(state, now, id, caller, ino, name, size),
        Op::ListXattr { ino, size } => xattr::list_xattr(state, now, id, caller, ino, size),
        Op::SetLock { ino, fh, span, kind, pid, wait } => {
            locks::set_lock(state, now, id, caller, (ino, fh), span, kind, (pid, wait))
        }
        Op::Unlock { ino, span } => locks::unlock(state, now, id, caller, ino, span),
        Op::TestLock { ino, span, kind } => locks::test_lock(state, now, id, caller, ino, span, kind),
        Op::Seek { ino, fh, offset, data } => seek::seek(state, now, id, caller, (ino, fh), (offset, data)),
        Op::SetAttr { ino, fh, set } => set_attr::set_attr(state, now, id, caller, (ino, fh), set),
        op @ Op::Rename { .. } => rename::rename(state, now, id, caller, op),
        Op::Unlink { dir, name } => remove::unlink(state, now, id, caller, dir, name),
        Op::Rmdir { dir, name } => remove::rmdir(state, now, id, caller, dir, name),
        Op::StatFs { ino } => statfs::stat_fs(state, now, id, caller, ino),
        op => start_create(state, now, id, caller, op),
    }
}

fn start_create(state: &mut State, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
    match op {
        Op::Symlink { dir, name, target } => {
            create::create(state, now, id, caller, dir, name, None, |dir, name| Call::Symlink {
                dir,
                name,
                target,
            })
        }
        Op::Mknod { dir, name, kind, mode, umask, rdev } => {
            create::create(state, now, id, caller, dir, name, None, |dir, name| Call::Mknod {
                dir,
                name,
                kind,
                mode,
                umask,
                rdev,
            })
        }
        Op::Mkdir { dir, name, mode, umask } => {
            create::create(state, now, id, caller, dir, name, None, |dir, name| Call::Mkdir {
                dir,
                name,
                mode,
                umask,
            })
        }
        Op::Link { ino, dir, name } => {
            let Some(node) = paths::node_ref(state, ino) else { return Some(OpReply::Failed(Errno::STALE)) };
            // With another name its attributes stand under another grant.
            pins::pin_open(state, ino);
            create::create(state, now, id, caller, dir, name, None, |dir, name| Call::Link {
                node,
                dir,
                name,
            })
        }
        Op::Create { dir, name, mode, umask, exclusive, access, append } => {
            let file = OpenParams { append, access, caller };
            create::create(state, now, id, caller, dir, name, Some(file), |dir, name| Call::Create {
                dir,
                name,
                mode,
                umask,
                exclusive,
                access,
            })
        }
        Op::Tmpfile { dir, mode, umask, access } => {
            let Some(dir) = paths::node_ref(state, dir) else { return Some(OpReply::Failed(Errno::STALE)) };
            let file = OpenParams { append: false, access, caller };
            let call = Call::Tmpfile { dir, mode, umask, access };
            sending::send_for(state, now, id, caller, CallKind::Tmpfile { file }, call)
        }
        op => start_on_inode(state, now, id, caller, op),
    }
}

fn start_on_inode(state: &mut State, now: Time, id: OpId, caller: Caller, op: Op) -> Option<OpReply> {
    let (ino, fh) = match &op {
        Op::SetXattr { ino, .. } | Op::RemoveXattr { ino, .. } => (*ino, None),
        Op::GetFlags { ino } => (*ino, None),
        Op::Fsync { ino, fh, .. } => (*ino, *fh),
        Op::Fallocate { ino, fh, .. } => (*ino, Some(*fh)),
        Op::CopyRange { to_ino, to_fh, .. } => (*to_ino, Some(*to_fh)),
        _ => return Some(OpReply::Failed(Errno::NOSYS)),
    };
    if let Op::SetXattr { name, .. } | Op::RemoveXattr { name, .. } = &op
        && xattr::is_unsupported(state, name)
    {
        return Some(OpReply::Failed(Errno::OPNOTSUPP));
    }
    let Some((node, handle)) = paths::handle_for(state, ino, fh) else {
        return Some(OpReply::Failed(Errno::STALE));
    };
    let (purpose, call) = match op {
        Op::SetXattr { name, value, flags, kill_sgid, .. } => {
            (CallKind::Change { ino, xattrs: true }, Call::SetXattr { node, name, value, flags, kill_sgid })
        }
        Op::RemoveXattr { name, .. } => {
            (CallKind::Change { ino, xattrs: true }, Call::RemoveXattr { node, name })
        }
        Op::GetFlags { .. } => (CallKind::Flags, Call::GetFlags { node }),
        Op::Fsync { data_only, .. } => (CallKind::Fsync { ino }, Call::Fsync { node, handle, data_only }),
        Op::Fallocate { mode, offset, length, .. } => {
            (CallKind::Change { ino, xattrs: false }, Call::Fallocate { node, handle, mode, offset, length })
        }
        Op::CopyRange { ino: from_ino, fh: from_fh, offset: from_offset, to_offset, length, .. } => {
            let Some((from, from_handle)) = paths::handle_for(state, from_ino, Some(from_fh)) else {
                return Some(OpReply::Failed(Errno::STALE));
            };
            (
                CallKind::Write {
                    ino,
                    offset: to_offset,
                    size: length,
                    writeback: false,
                    append: false,
                    direct: None,
                },
                Call::CopyRange {
                    from,
                    from_handle,
                    from_offset,
                    to: node,
                    to_handle: handle,
                    to_offset,
                    length,
                },
            )
        }
        _ => return Some(OpReply::Failed(Errno::NOSYS)),
    };
    sending::send_for(state, now, id, caller, purpose, call)
}
