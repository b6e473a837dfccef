//! Forgotten inodes, for file handles that name them by number (open_by_handle_at(2), knfsd).
//!
//! For a file handle of an inode that it has dropped, the kernel looks up `.` by number alone (`fuse_get_dentry`), and
//! compares the generation itself. So the cache remembers the latest forgotten inodes: generation and last name. For
//! all others it asks the remote, if that finds inodes by number. See docs/decisions/0035-file-handles.md.

use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::facts::{forgetting, inodes};
use crate::kernel::NodeIdMap;
use crate::op::{Caller, OpReply};
use crate::out::{replies, sending};
use crate::state::State;
use nigh_types::{Attr, Call, Errno, Name, NodeId, OpId, Reply, Time};

/// Looks up an inode without a record by its number.
pub(crate) fn lookup_number(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
) -> Option<OpReply> {
    if !state.session.finds_numbers() || ino == 0 || NodeIdMap::is_assigned(ino) {
        return Some(OpReply::Failed(Errno::STALE));
    }
    if let Some(call) = state.calls.attr_call(ino)
        && state.calls.is_joinable(call)
    {
        return replies::wait(state, op, caller, call, ReplyKind::SelfLookup, true);
    }
    let call = sending::send(state, now, None, CallKind::Attr { ino }, Call::LookupNumber { ino });
    state.calls.enter_joins(call, CallKind::Attr { ino });
    replies::wait(state, op, caller, call, ReplyKind::SelfLookup, false)
}

/// Records where the remote found an inode by number. The record must exist before its attributes are applied.
fn record_found(state: &mut State, id: NodeId, parent_entry: Option<(NodeId, Name)>) {
    let is_placed = inodes::record(state, id).parent_entry().is_some();
    let Some((dir, name)) = parent_entry.filter(|_| !is_placed && id.ino != state.store.root()) else {
        return;
    };
    if state.store.id_of(dir.ino).is_none() && state.store.forgotten.id(dir.ino) != Some(dir) {
        forgetting::put_forgotten(state, dir, None);
    }
    inodes::set_parent_entry(state, id, (dir.ino, &name));
}

/// Returns the attributes in a reply, by id or by number.
pub(crate) fn attr_in_reply(
    state: &mut State,
    flight: &InflightCall,
    result: Result<Reply, Errno>,
) -> Result<(NodeId, Attr), Errno> {
    match (result?, &flight.resend) {
        (Reply::Found { node, attr, parent_entry }, Some(Call::LookupNumber { ino })) if node.ino == *ino => {
            record_found(state, node, parent_entry);
            Ok((node, attr))
        }
        (_, Some(Call::LookupNumber { .. })) => Err(Errno::PROTO),
        (Reply::Attr(id, attr), _) => Ok((id, attr)),
        _ => Err(Errno::PROTO),
    }
}

/// Restores the record of an inode that is looked up by number. It is dropped again if the remote does not find the
/// inode.
pub(crate) fn restore_forgotten(state: &mut State, ino: u64) {
    if state.store.has_inode(ino) {
        return;
    }
    // A directory known only from another inode's reply has no known place: it is looked up by its number.
    let Some((id, parent_entry)) =
        state.store.forgotten.id(ino).zip(state.store.forgotten.parent_entry(ino).cloned())
    else {
        return;
    };
    if state.store.id_of(ino).is_none_or(|known| known == id) {
        inodes::record(state, id).note_found_at(parent_entry.0, parent_entry.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::cache::Cache;
    use crate::op::Op;
    use crate::store::Forgotten;
    use crate::test_fixtures::{T0, asked, cache, name, replied, session};
    use nigh_types::{CallId, Entry, Event, Features, Response, SessionParams};

    const DIRECTORY: NodeId = NodeId { ino: 6, generation: 16 };
    const FILE: NodeId = NodeId { ino: 7, generation: 17 };

    fn answers(cache: &mut Cache, call: CallId, result: Result<Reply, Errno>) -> Option<OpReply> {
        replied(cache, call, Response::plain(result))
    }

    fn attr(id: NodeId) -> Attr {
        let mode = if id == DIRECTORY { 0o040_755 } else { 0o100_644 };
        Attr { mode, nlink: 1, ..Attr::default() }
    }

    fn looks(cache: &mut Cache, dir: u64, at: &str, id: NodeId) {
        let (call, _) = asked(cache, Op::Lookup { dir, name: name(at) });
        let entry = Entry { id, attr: attr(id), target: None, no_xattrs: true };
        assert!(matches!(answers(cache, call, Ok(Reply::Entry(Some(entry)))), Some(OpReply::Node(_))));
    }

    fn forgotten() -> Cache {
        let mut cache = cache(Config::default());
        looks(&mut cache, 1, "d", DIRECTORY);
        looks(&mut cache, DIRECTORY.ino, "f", FILE);
        cache.handle_forget(FILE.ino, 1);
        cache.handle_forget(DIRECTORY.ino, 1);
        assert!(!cache.state.store.has_inode(FILE.ino) && !cache.state.store.has_inode(DIRECTORY.ino));
        cache
    }

    #[test]
    fn forgotten_inode_is_found_by_its_number_and_last_path() {
        let mut cache = forgotten();
        let (call, sent) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
        let Call::GetAttr { node } = sent else { panic!("{sent:?}") };
        assert_eq!((node.node, node.path_hint), (FILE, Some((DIRECTORY, name("f")))));
        assert_eq!(crate::view::paths::path_to(&cache.state, FILE), Some(vec![name("d"), name("f")]));
        let found = answers(&mut cache, call, Ok(Reply::Attr(FILE, attr(FILE))));
        assert!(matches!(found, Some(OpReply::Node(node)) if node.id == FILE && node.number == FILE.ino));
        let (_, sent) = asked(&mut cache, Op::LookupParent { ino: FILE.ino });
        assert!(matches!(sent, Call::GetAttr { ref node } if node.node == DIRECTORY), "{sent:?}");
    }

    #[test]
    fn forgotten_inode_that_is_gone_is_stale_and_has_no_record() {
        let mut cache = forgotten();
        let (call, _) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
        let mut said = answers(&mut cache, call, Err(Errno::STALE));
        // The remote is given its path once more.
        while said.is_none() {
            let walk = cache.state.calls.ids().last().copied().expect("it is sent");
            said = answers(&mut cache, walk, Err(Errno::STALE));
        }
        assert_eq!(said, Some(OpReply::Failed(Errno::STALE)));
        assert!(!cache.state.store.has_inode(FILE.ino));
    }

    /// The remote keeps it for calls in flight, or because another client has it open.
    #[test]
    fn forgotten_inode_without_a_name_is_stale_though_the_remote_has_it() {
        let mut cache = forgotten();
        let (call, _) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
        let removed = Attr { nlink: 0, ..attr(FILE) };
        let said = answers(&mut cache, call, Ok(Reply::Attr(FILE, removed)));
        assert_eq!(said, Some(OpReply::Failed(Errno::STALE)));
        assert!(!cache.state.store.has_inode(FILE.ino));
    }

    #[test]
    fn forgotten_inode_whose_caller_was_killed_has_no_record() {
        let mut cache = forgotten();
        let (killed, _) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
        cache.handle_interrupt(OpId(1), true);
        // Another caller waits for a call of its own.
        let (call, _) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
        answers(&mut cache, killed, Ok(Reply::Attr(FILE, attr(FILE))));
        assert!(cache.state.store.has_inode(FILE.ino));
        cache.handle_interrupt(OpId(1), true);
        answers(&mut cache, call, Ok(Reply::Attr(FILE, attr(FILE))));
        assert!(!cache.state.store.has_inode(FILE.ino));
    }

    #[test]
    fn unknown_inode_number_is_stale() {
        let mut cache = forgotten();
        let answer = cache.handle_op(T0, OpId(1), Caller::default(), Op::LookupSelf { ino: 99 });
        assert_eq!(answer, Some(OpReply::Failed(Errno::STALE)));
    }

    /// Cache of a new mount, with a remote that finds inodes by number.
    fn finding() -> Cache {
        let mut cache = Cache::new(Config::default());
        let session =
            SessionParams { supports: Features { lookup_number: true, ..Features::default() }, ..session() };
        cache.handle_event(T0, Event::Attached(session));
        cache
    }

    fn found(id: NodeId, parent_entry: (NodeId, &str)) -> Result<Reply, Errno> {
        Ok(Reply::Found {
            node: id,
            attr: attr(id),
            parent_entry: Some((parent_entry.0, name(parent_entry.1))),
        })
    }

    #[test]
    fn inode_of_an_earlier_mount_is_found_by_number_and_reached_by_its_hint() {
        let mut cache = finding();
        let (call, sent) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
        assert_eq!(sent, Call::LookupNumber { ino: FILE.ino });
        let said = answers(&mut cache, call, found(FILE, (DIRECTORY, "f")));
        assert!(matches!(said, Some(OpReply::Node(node)) if node.id == FILE && node.number == FILE.ino));
        let (call, sent) = asked(&mut cache, Op::GetAttr { ino: FILE.ino });
        let Call::GetAttr { node } = sent else { panic!("{sent:?}") };
        assert_eq!((node.node, node.path_hint), (FILE, Some((DIRECTORY, name("f")))));
        answers(&mut cache, call, Ok(Reply::Attr(FILE, attr(FILE))));
        cache.handle_forget(FILE.ino, 1);
        let (_, sent) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
        assert!(matches!(sent, Call::GetAttr { .. }), "it is remembered from now on: {sent:?}");
    }

    /// As the kernel does to connect a directory with the root (`reconnect_path`).
    #[test]
    fn parents_of_a_directory_found_by_number_are_found_by_number_too() {
        let mut cache = finding();
        let (call, _) = asked(&mut cache, Op::LookupSelf { ino: DIRECTORY.ino });
        let above = NodeId { ino: 5, generation: 15 };
        assert!(answers(&mut cache, call, found(DIRECTORY, (above, "d"))).is_some());
        let (call, sent) = asked(&mut cache, Op::LookupParent { ino: DIRECTORY.ino });
        assert_eq!(sent, Call::LookupNumber { ino: above.ino });
        let attr = attr(DIRECTORY);
        let parent_entry = Some((NodeId { ino: 1, generation: 1 }, name("above")));
        let said = answers(&mut cache, call, Ok(Reply::Found { node: above, attr, parent_entry }));
        assert!(matches!(said, Some(OpReply::Node(node)) if node.id == above));
        let said = cache.handle_op(T0, OpId(1), Caller::default(), Op::LookupParent { ino: above.ino });
        assert!(said.is_none_or(|said| matches!(said, OpReply::Node(node) if node.id.ino == 1)));
        assert_eq!(
            crate::view::paths::path_to(&cache.state, DIRECTORY),
            Some(vec![name("above"), name("d")])
        );
    }

    #[test]
    fn number_that_the_remote_does_not_find_is_stale_and_has_no_record() {
        let mut cache = finding();
        let elsewhere = found(DIRECTORY, (FILE, "x"));
        for (result, errno) in [(Err(Errno::STALE), Errno::STALE), (elsewhere, Errno::PROTO)] {
            let (call, _) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
            assert_eq!(answers(&mut cache, call, result), Some(OpReply::Failed(errno)));
            assert!(
                cache.state.store.inodes().all(|inode| inode.id.ino == 1) && cache.state.calls.is_empty()
            );
        }
        let (call, _) = asked(&mut cache, Op::LookupSelf { ino: FILE.ino });
        let removed = Attr { nlink: 0, ..attr(FILE) };
        let said =
            answers(&mut cache, call, Ok(Reply::Found { node: FILE, attr: removed, parent_entry: None }));
        assert_eq!(said, Some(OpReply::Failed(Errno::STALE)));
        assert!(!cache.state.store.has_inode(FILE.ino));
    }

    /// An earlier mount gave the number to an inode whose own number another inode had.
    #[test]
    fn node_id_of_our_own_range_is_stale_without_a_call() {
        let mut cache = finding();
        for ino in [0, (1 << 63) - 1, (1 << 63) - (1 << 49) + 1] {
            let said = cache.handle_op(T0, OpId(1), Caller::default(), Op::LookupSelf { ino });
            assert_eq!(said, Some(OpReply::Failed(Errno::STALE)), "{ino:x}");
        }
    }

    #[test]
    fn number_of_forgotten_inodes_is_bounded() {
        let mut forgotten = Forgotten::default();
        for ino in [1, 2, 1, 3, 4] {
            forgotten.put(NodeId { ino, generation: ino }, Some((9, name("x"))), 3);
        }
        let found: Vec<bool> = (1..=4).map(|ino| forgotten.id(ino).is_some()).collect();
        assert_eq!(found, [true, false, true, true]);
    }
}
