//! Directories that the kernel has locked for requests without a reply.

use crate::calls::CallKind;
use crate::op::Op;
use crate::state::State;

/// Returns whether the kernel may have a directory locked for a waiting request: invalidating a dentry in it waits
/// for the lock.
pub(crate) fn is_locked(state: &State, dir: u64) -> bool {
    let parent_entry = state.store.inode(dir).and_then(|inode| inode.parent_entry());
    let mut out = state.calls.awaited();
    out.any(|flight| flight.purpose.locks_names(dir) || flight.purpose.locks_victim(parent_entry))
        || state.calls.queued().any(|(_, op)| op.locks_names(dir) || op.locks_victim(parent_entry))
        || state.store.suspended.waiting().any(|op| op.locks_names(dir))
}

/// Returns whether a LOOKUP waits. If it is part of rename(2), the kernel has another directory locked too
/// (`do_renameat2`), which the request does not name.
pub(crate) fn has_waiting_lookup(state: &State) -> bool {
    let mut out = state.calls.awaited();
    out.any(|flight| matches!(flight.purpose, CallKind::Lookup { .. }))
        || state.calls.queued().any(|(_, op)| matches!(op, Op::Lookup { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::cache::Cache;
    use crate::op::Caller;
    use crate::test_fixtures::{T0, cache, calls};
    use nigh_types::{Attr, Entry, Event, Name, NodeId, OpId, Reply, Response};

    /// Directories below the root.
    const MET: u64 = 7;
    const OTHER: u64 = 8;

    fn name(bytes: &[u8]) -> Name {
        Name::new(bytes).unwrap()
    }

    fn with_directories() -> Cache {
        let mut cache = cache(Config::default());
        for (ino, named) in [(MET, "met"), (OTHER, "other")] {
            let lookup = Op::Lookup { dir: 1, name: name(named.as_bytes()) };
            assert_eq!(cache.handle_op(T0, OpId(ino), Caller::default(), lookup), None);
            let [call] = calls(&mut cache)[..] else { panic!("it is looked up") };
            let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
            let id = NodeId { ino, generation: 1 };
            let entry = Entry { id, attr, target: None, no_xattrs: true };
            let response = Response::plain(Ok(Reply::Entry(Some(entry))));
            cache.handle_event(T0, Event::Response { call, response });
        }
        cache
    }

    fn rename(from: u64, old: &[u8], to: u64, new: &[u8]) -> Op {
        let (name, new_name) = (name(old), name(new));
        Op::Rename { from, name, to, new_name, no_replace: false, exchange: false, whiteout: false }
    }

    /// Returns which of `MET`, the root and `OTHER` may be locked for a request, in flight or queued while the remote
    /// was away.
    fn locked(op: &Op) -> [bool; 3] {
        let [out, parked] = [false, true].map(|parked| {
            let mut cache = with_directories();
            if parked {
                cache.handle_event(T0, Event::Expired { why: String::new() });
            }
            assert_eq!(cache.handle_op(T0, OpId(99), Caller::default(), op.clone()), None);
            assert_eq!(cache.state.calls.queued_op(OpId(99)).is_some(), parked);
            [MET, 1, OTHER].map(|dir| cache.is_locked(dir))
        });
        assert_eq!(out, parked, "{op:?}");
        out
    }

    #[test]
    fn directory_counts_as_locked_during_xattr_changes_and_fsync() {
        let (value, flags) = (b"1".to_vec(), 0);
        let set = Op::SetXattr { ino: MET, name: b"user.x".to_vec(), value, flags, kill_sgid: false };
        let remove = Op::RemoveXattr { ino: MET, name: b"user.x".to_vec() };
        let sync = Op::Fsync { ino: MET, fh: None, data_only: false };
        for op in [set, remove, sync] {
            assert_eq!(locked(&op), [true, false, false], "{op:?}");
        }
        assert_eq!(locked(&Op::GetAttr { ino: MET }), [false; 3]);
    }

    #[test]
    fn directory_counts_as_locked_during_rmdir_and_rename() {
        assert_eq!(locked(&Op::Rmdir { dir: 1, name: name(b"met") }), [true, true, false]);
        assert_eq!(locked(&rename(OTHER, b"x", 1, b"met")), [true, true, true]);
        assert_eq!(locked(&rename(1, b"met", OTHER, b"x")), [true, true, true]);
        assert_eq!(locked(&Op::Rmdir { dir: 1, name: name(b"x") }), [false, true, false]);
        assert_eq!(locked(&Op::Rmdir { dir: OTHER, name: name(b"met") }), [false, false, true]);
        assert_eq!(locked(&rename(1, b"x", 1, b"y")), [false, true, false]);
    }
}
