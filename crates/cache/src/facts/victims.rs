//! Live directories that the kernel takes for removed.
//!
//! After rmdir(2) or rename(2) the kernel marks the inode that it believed at the name as dead (`S_DEAD` in `vfs_rmdir`
//! and `vfs_rename`), and never finds a name in that directory again. Another mount may just have moved the directory
//! away, so that the remote removed another one, or replaced nothing. Replies then name the live directory by another
//! node id.

use crate::state::State;
use nigh_types::NodeId;

/// Gives a directory that the kernel takes for removed another node id, unless it is `gone`, the one that was
/// removed.
pub(crate) fn alias_live_directory(state: &mut State, believed: Option<NodeId>, gone: Option<NodeId>) {
    let Some(id) = believed.filter(|id| Some(*id) != gone && id.ino != state.store.root()) else { return };
    let Some(inode) = state.store.inode_of_mut(id) else { return };
    if let Some(lookups) = inode.kernel.take_lookups() {
        state.kernel.nodeids.alias(id, lookups, None);
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;
    use crate::cache::Cache;
    use crate::op::{Op, OpReply};
    use crate::test_fixtures::{ask, cache, name, replied};
    use nigh_types::{Attr, CallId, Entry, Errno, NodeId, Reply, Response};

    const OLD: NodeId = NodeId { ino: 7, generation: 1 };
    const NEW: NodeId = NodeId { ino: 8, generation: 1 };

    fn answer(cache: &mut Cache, call: CallId, reply: Reply) -> OpReply {
        replied(cache, call, Response::plain(Ok(reply))).expect("it is answered")
    }

    /// Returns the node id in the reply.
    fn looks(cache: &mut Cache, text: &str, id: NodeId) -> u64 {
        let call = ask(cache, Op::Lookup { dir: 1, name: name(text) });
        let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
        let entry = Entry { id, attr, target: None, no_xattrs: true };
        match answer(cache, call, Reply::Entry(Some(entry))) {
            OpReply::Node(node) => node.number,
            other => panic!("{other:?}"),
        }
    }

    fn removes(cache: &mut Cache, gone: NodeId) {
        let call = ask(cache, Op::Rmdir { dir: 1, name: name("t") });
        assert_eq!(answer(cache, call, Reply::Removed { node: gone, pinned: None }), OpReply::Done);
    }

    fn renames(cache: &mut Cache, replaced: Option<NodeId>) {
        let (from, to, no_replace, exchange) = (1, 1, false, false);
        let rename = Op::Rename {
            from,
            name: name("x"),
            to,
            new_name: name("t"),
            no_replace,
            exchange,
            whiteout: false,
        };
        let call = ask(cache, rename);
        let moved = NodeId { ino: 9, generation: 1 };
        assert_eq!(
            answer(cache, call, Reply::Renamed { moved, replaced, pinned: None, whiteout: None }),
            OpReply::Done
        );
    }

    /// Another mount renames `t` to `u` and makes another `t` while this mount removes `t`.
    #[test]
    fn directory_moved_remotely_during_rmdir_gets_another_node_id() {
        let mut cache = cache(Config::default());
        assert_eq!(looks(&mut cache, "t", OLD), 7);
        removes(&mut cache, NEW);
        assert_eq!(
            cache.resolve_nodeid(Op::GetAttr { ino: 7 }),
            Err(Errno::STALE),
            "the kernel takes it for dead"
        );
        let number = looks(&mut cache, "u", OLD);
        assert_ne!(number, 7);
        assert_eq!(cache.resolve_nodeid(Op::GetAttr { ino: number }), Ok(Op::GetAttr { ino: 7 }));
        assert_eq!(looks(&mut cache, "u", OLD), number, "the same for as long as the kernel remembers it");
    }

    #[test]
    fn directory_moved_remotely_during_rename_over_gets_another_node_id() {
        for replaced in [None, Some(NEW)] {
            let mut cache = cache(Config::default());
            assert_eq!(looks(&mut cache, "t", OLD), 7);
            renames(&mut cache, replaced);
            assert_ne!(looks(&mut cache, "u", OLD), 7);
        }
    }

    #[test]
    fn directory_known_by_another_name_keeps_its_node_id() {
        let mut cache = cache(Config::default());
        assert_eq!(looks(&mut cache, "t", OLD), 7);
        assert_eq!(looks(&mut cache, "u", OLD), 7);
        removes(&mut cache, NEW);
        renames(&mut cache, None);
        assert_eq!(looks(&mut cache, "t", NEW), 8);
        renames(&mut cache, Some(NEW));
        assert_eq!((looks(&mut cache, "u", OLD), cache.nodeids_are_inode_numbers()), (7, true));
    }
}
