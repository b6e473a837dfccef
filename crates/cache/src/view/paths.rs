//! Node references and paths: how the remote finds an inode, and how it is shown in log lines.

use crate::op::{Fh, Op};
use crate::open::OpenFile;
use crate::state::State;
use nigh_types::{Call, Errno, Handle, Name, NodeId, NodeRef};

/// Inode number of no inode.
const NO_INODE: u64 = 0;

/// Returns the inodes that a call must reach, in the order of its `ResolvePath` calls; none for calls that are not
/// resent after one.
pub(crate) fn nodes_to_resolve(call: &Call) -> [Option<NodeId>; 2] {
    let one = match call {
        Call::Lookup { dir, .. }
        | Call::List { dir }
        | Call::Create { dir, .. }
        | Call::Tmpfile { dir, .. }
        | Call::Mknod { dir, .. }
        | Call::Mkdir { dir, .. }
        | Call::Symlink { dir, .. }
        | Call::Unlink { dir, .. }
        | Call::Rmdir { dir, .. } => dir.node,
        Call::GetAttr { node }
        | Call::ReadLink { node }
        | Call::Xattrs { node }
        | Call::Xattr { node, .. }
        | Call::StatFs { node }
        | Call::Open { node, .. }
        | Call::Read { node, .. }
        | Call::Seek { node, .. }
        | Call::GetFlags { node }
        | Call::Lock { node, .. }
        | Call::GetLock { node, .. }
        | Call::Reopen { node, .. }
        | Call::SetAttr { node, .. }
        | Call::Fallocate { node, .. }
        | Call::SetXattr { node, .. }
        | Call::RemoveXattr { node, .. }
        | Call::Fsync { node, .. } => node.node,
        Call::Link { node, dir, .. } => return [Some(dir.node), Some(node.node)],
        Call::Rename { from, to, .. } => return [Some(to.node), Some(from.node)],
        Call::ResolvePath { .. }
        | Call::LookupNumber { .. }
        | Call::ListNames { .. }
        | Call::Prefetch { .. }
        | Call::PrefetchCredit { .. }
        | Call::Release { .. }
        | Call::PinOpen { .. }
        | Call::Unlock { .. }
        | Call::Write { .. }
        | Call::CopyRange { .. } => return [None, None],
    };
    [Some(one), None]
}

/// Returns the reference and handle for an open file; `None` if another inode has its number now.
pub(crate) fn handle_for(
    state: &State,
    ino: u64,
    fh: Option<Fh>,
) -> Option<(nigh_types::NodeRef, Option<Handle>)> {
    let node = node_ref(state, ino)?;
    let file = fh.and_then(|fh| state.open.files.get(fh));
    if file.is_some_and(|file| file.generation != node.node.generation) {
        return None;
    }
    let handle = file.and_then(OpenFile::handle);
    let pinned = state.store.inode(ino).and_then(|i| i.opens().pin());
    Some((node, handle.or(pinned)))
}

/// Returns a request with the inode numbers that its node ids stand for. A request through an open file means the
/// opened inode, whichever inode has the number now.
///
/// # Errors
///
/// `ESTALE`: a node id stands for an inode that is gone. The kernel looks the name up again.
pub(crate) fn resolve_nodeid(state: &State, mut op: Op) -> Result<Op, Errno> {
    if state.kernel.nodeids.is_identity() {
        return Ok(op);
    }
    let is_former = |number: u64| state.kernel.nodeids.resolve(number).is_err();
    if op.nodes_by_number().into_iter().flatten().any(is_former) {
        return Err(Errno::STALE);
    }
    if let Op::LookupSelf { ino } = op
        && state.kernel.nodeids.nodeid(inode_of_nodeid(state, ino)) != ino
    {
        // The reply would name the inode by another node id than the kernel asked for (`fuse_get_dentry`).
        return Err(Errno::STALE);
    }
    // Locks of a file that is gone are gone too: the inode that has its number now keeps its locks.
    let unlocks = matches!(op, Op::Flush { .. } | Op::Unlock { .. });
    for number in op.inode_numbers().into_iter().flatten() {
        *number = if unlocks && is_former(*number) { NO_INODE } else { inode_of_nodeid(state, *number) };
    }
    Ok(op)
}

/// Returns the inode that a node id stands for, or stood for if it is gone.
pub(crate) fn inode_of_nodeid(state: &State, number: u64) -> u64 {
    state.kernel.nodeids.resolve(number).unwrap_or_else(|former| former.id.ino)
}

/// Returns the reference to an inode, with its hint; `None` if the kernel uses a number that no reply gave it, or
/// that another server gave.
pub(crate) fn node_ref(state: &State, ino: u64) -> Option<NodeRef> {
    let node = state.store.id_of(ino)?;
    let id_of = |dir: u64| state.store.id_of(dir).or_else(|| state.store.forgotten.id(dir));
    let inode = state.store.inode(ino);
    let parent_entry = inode.and_then(|i| i.path_hint());
    let hint = parent_entry.and_then(|(dir, name)| Some((id_of(*dir)?, name.clone())));
    Some(NodeRef { node, path_hint: hint })
}

/// Returns the directory and name under which the kernel last looked an inode up, if it still knows the inode.
pub(crate) fn parent_entry_of(state: &State, ino: u64) -> Option<(u64, Name)> {
    state.store.inode(ino).filter(|i| i.kernel.is_known()).and_then(|i| i.parent_entry().cloned())
}

/// Returns the known path from the root to `name` in a directory.
pub(crate) fn path_of(state: &State, dir: u64, name: &Name) -> Option<Vec<Name>> {
    let mut names = path_to(state, state.store.id_of(dir)?)?;
    names.push(name.clone());
    Some(names)
}

/// Returns the known path from the root to a directory.
pub(crate) fn path_of_directory(state: &State, dir: u64) -> Option<Vec<Name>> {
    path_to(state, state.store.id_of(dir)?)
}

/// Returns the known path from the root to an inode.
pub(crate) fn path_to(state: &State, node: NodeId) -> Option<Vec<Name>> {
    path_by(state, node, |cache, at| cache.store.last_parent_entry(at).cloned())
}

/// Returns an inode's parent entry after the renames in flight.
pub(crate) fn parent_after_renames(state: &State, ino: u64) -> Option<(u64, Name)> {
    let parent_entry = state.store.inode(ino)?.parent_entry()?.clone();
    let moved = state.calls.name_after_renames((parent_entry.0, &parent_entry.1));
    moved.or(Some(parent_entry))
}

pub(crate) fn path_by(
    state: &State,
    node: NodeId,
    parent_entry: impl Fn(&State, u64) -> Option<(u64, Name)>,
) -> Option<Vec<Name>> {
    let mut names = Vec::new();
    let mut at = node.ino;
    for _ in 0..=Call::MOST_NAMES {
        if at == state.store.root() {
            names.reverse();
            return Some(names);
        }
        let (dir, name) = parent_entry(state, at)?;
        names.push(name);
        at = dir;
    }
    None
}

pub(crate) fn shown_name(state: &State, dir: u64, name: &Name) -> String {
    format!("{}/{}", shown_path(state, dir), String::from_utf8_lossy(name.as_bytes()))
}

/// Returns an inode's path below the mount point, for log lines.
pub(crate) fn shown_path(state: &State, ino: u64) -> String {
    let names = state.store.id_of(ino).and_then(|id| path_to(state, id));
    let Some(names) = names else { return format!("inode {ino} of {}", state.shown_root) };
    let names = names.iter().map(|name| String::from_utf8_lossy(name.as_bytes()));
    names.fold(state.shown_root.clone(), |path, name| format!("{path}/{name}"))
}

#[cfg(test)]
mod numbers {
    use super::*;
    use crate::Config;
    use crate::cache::Cache;
    use crate::op::{Caller, KernelInvalidation, Op, OpReply, Output};
    use crate::test_fixtures::{T0, cache, calls, replied, session};
    use nigh_types::{Attr, CallId, Entry, Errno, Event, Grant, GrantId, OpId, Reply, Response, Term};

    const FIRST: NodeId = NodeId { ino: 7, generation: 7 };
    const NEXT: NodeId = NodeId { ino: 7, generation: 8 };

    fn name(bytes: &[u8]) -> Name {
        Name::new(bytes).unwrap()
    }

    fn finds(cache: &mut Cache, id: NodeId) -> Option<crate::op::Node> {
        let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
        let entry = Entry { id, attr, target: None, no_xattrs: true };
        let result = Ok(Reply::Entry(Some(entry)));
        let response = Response { result, after: Vec::new(), grants: Vec::new(), last: true };
        let call = calls(cache).pop().expect("it is asked");
        match replied(cache, call, response) {
            Some(OpReply::Node(node)) => Some(node),
            _ => None,
        }
    }

    /// A file is removed, and another file gets its number, while link(2) of the first file is on its way. The kernel
    /// sends the number alone, and cannot mean a file that no reply named.
    #[test]
    fn request_for_an_inode_with_a_reused_number_is_stale() {
        let mut cache = cache(Config::default());
        let mut op = 0;
        let mut ask = |cache: &mut Cache, what: Op| {
            op += 1;
            cache.handle_op(T0, OpId(op), Caller::default(), what)
        };
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"first") }), None);
        finds(&mut cache, FIRST);
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"next") }), None);
        // Its caller is killed, so the kernel receives no reply.
        crate::ops::aborting::abort(&mut cache.state, OpId(2), Errno::INTR);
        let link = |ino: u64| Op::Link { ino, dir: 1, name: name(b"link") };
        finds(&mut cache, NEXT);
        let gone = Err(Errno::STALE);
        assert_eq!(cache.resolve_nodeid(link(7)), gone);
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"next") }), None);
        let told = finds(&mut cache, NEXT).expect("it is answered").number;
        assert_ne!(told, 7);
        assert_eq!(cache.resolve_nodeid(link(7)), gone);
        assert_eq!(cache.resolve_nodeid(Op::GetAttr { ino: 7 }), gone);
        let read = Op::Read { ino: 7, fh: crate::Fh(1), offset: 0, size: 1 };
        assert_eq!(cache.resolve_nodeid(read.clone()), Ok(read), "by what it opened");
        assert_eq!(cache.resolve_nodeid(link(told)), Ok(link(7)));
        cache.handle_forget(7, 1);
        assert_eq!(
            (cache.resolve_nodeid(link(7)), cache.nodeid_of(7)),
            (Ok(link(7)), told),
            "the first number is unused"
        );
        assert_eq!(ask(&mut cache, link(7)), None);
        assert_eq!(calls(&mut cache).len(), 1, "it is asked for");
        // A late reply does no harm to the second inode.
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"late") }), None);
        assert_eq!(finds(&mut cache, FIRST).expect("it is answered").number, 7);
        assert_eq!(cache.resolve_nodeid(link(told)), gone);
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"next") }), None);
        assert_eq!(finds(&mut cache, NEXT).expect("it is answered").number, told);
        assert_eq!((cache.resolve_nodeid(link(told)), cache.resolve_nodeid(link(7))), (Ok(link(7)), gone));
    }

    fn granted(reply: Reply) -> Response {
        let grant =
            Grant { id: GrantId(1), term: Term::Session, ..crate::grants::fabricated(session().root) };
        Response { grants: vec![grant], ..Response::plain(Ok(reply)) }
    }

    fn told(
        cache: &mut Cache,
        call: CallId,
        response: Response,
    ) -> (Vec<(OpId, OpReply)>, Vec<KernelInvalidation>) {
        cache.handle_event(T0, Event::Response { call, response });
        let (mut answers, mut forgotten) = (Vec::new(), Vec::new());
        loop {
            match cache.poll_output() {
                Output::Timeout(..) => return (answers, forgotten),
                Output::Answer { op, answer } => answers.push((op, answer)),
                Output::Invalidate { id, stale, .. } => {
                    forgotten.extend(stale);
                    cache.handle_invalidated(T0, id);
                }
                _ => {}
            }
        }
    }

    /// Grants what a name of the root leads to; returns what the kernel must drop.
    fn looks(cache: &mut Cache, text: &[u8], id: NodeId) -> Vec<KernelInvalidation> {
        assert_eq!(
            cache.handle_op(T0, OpId(1), Caller::default(), Op::Lookup { dir: 1, name: name(text) }),
            None
        );
        let call = calls(cache).pop().expect("it is asked");
        let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
        let entry = Entry { id, attr, target: None, no_xattrs: true };
        told(cache, call, granted(Reply::Entry(Some(entry)))).1
    }

    /// The server's own disk gives the inode number of one file to another file. The first file's entry lives on for a
    /// moment.
    #[test]
    fn directory_entry_of_an_inode_with_a_reused_number_is_not_served() {
        let mut cache = cache(Config::default());
        looks(&mut cache, b"first", FIRST);
        looks(&mut cache, b"next", NEXT);
        let look = |text: &[u8]| Op::Lookup { dir: 1, name: name(text) };
        assert!(cache.handle_op(T0, OpId(2), Caller::default(), look(b"next")).is_some(), "it is known");
        assert_eq!(
            cache.handle_op(T0, OpId(3), Caller::default(), look(b"first")),
            None,
            "one of the two is gone"
        );
    }

    /// A late reply says that a file is gone which other clients go on changing. The kernel hears of none of these
    /// changes.
    #[test]
    fn inode_with_a_reused_number_is_invalidated_in_the_kernel() {
        let mut cache = cache(Config::default());
        looks(&mut cache, b"first", FIRST);
        let forgotten = looks(&mut cache, b"next", NEXT);
        let all =
            [KernelInvalidation::Data { ino: 7, offset: 0, length: 0 }, KernelInvalidation::Attr { ino: 7 }];
        assert!(all.iter().all(|one| forgotten.contains(one)), "{forgotten:?}");
    }

    #[test]
    fn request_for_a_new_inode_does_not_join_a_call_for_the_old_one() {
        let mut cache = cache(Config::default());
        finds_by(&mut cache, b"first", FIRST);
        let asks = |cache: &mut Cache, op: u64| {
            assert_eq!(cache.handle_op(T0, OpId(op), Caller::default(), Op::GetAttr { ino: 7 }), None);
            calls(cache).pop()
        };
        let old = asks(&mut cache, 2).expect("it is asked");
        finds_by(&mut cache, b"next", NEXT);
        let new = asks(&mut cache, 3).expect("of another one");
        let attr = Attr { mode: 0o100_644, nlink: 1, size: 9, ..Attr::default() };
        let (answers, _) =
            told(&mut cache, old, Response::plain(Ok(Reply::Attr(FIRST, Attr { size: 1, ..attr }))));
        assert_eq!(answers, [(OpId(2), OpReply::Failed(Errno::STALE))]);
        let (answers, _) = told(&mut cache, new, Response::plain(Ok(Reply::Attr(NEXT, attr))));
        assert_eq!(answers, [(OpId(3), OpReply::Attr(NEXT, attr, nigh_types::Span::ZERO))]);
    }

    fn finds_by(cache: &mut Cache, text: &[u8], id: NodeId) {
        assert_eq!(
            cache.handle_op(T0, OpId(1), Caller::default(), Op::Lookup { dir: 1, name: name(text) }),
            None
        );
        finds(cache, id).expect("it is answered");
    }

    #[test]
    fn unlock_of_a_gone_file_leaves_locks_of_the_inode_that_reuses_its_number() {
        let mut cache = cache(Config::default());
        finds_by(&mut cache, b"first", FIRST);
        finds_by(&mut cache, b"next", NEXT);
        let number = cache.nodeid_of(7);
        let flush = |ino: u64| Op::Flush { ino, owner: 5 };
        assert_eq!(cache.resolve_nodeid(flush(number)), Ok(flush(7)));
        assert_eq!(cache.resolve_nodeid(flush(7)), Ok(flush(NO_INODE)));
        assert_eq!(cache.resolve_nodeid(Op::GetFlags { ino: 7 }), Err(Errno::STALE));
        // A file handle of the first inode, after its FORGET.
        cache.handle_forget(7, 1);
        assert_eq!(cache.resolve_nodeid(Op::LookupSelf { ino: 7 }), Err(Errno::STALE));
        assert_eq!(cache.resolve_nodeid(Op::LookupSelf { ino: number }), Ok(Op::LookupSelf { ino: 7 }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::{Caller, Config, Fh, Op, OpReply, Output};
    use nigh_types::{
        Access, Attr, CallId, CookieKey, Entry, Errno, Event, Handle, OpId, Reply, Response, SessionParams,
        SetAttr, Span, Term, Time,
    };

    fn attach(cache: &mut Cache, key: u8, generation: u64) {
        let (root, key) = (NodeId { ino: 1, generation }, CookieKey([key; 16]));
        let session = SessionParams::plain(root, Attr::default(), key, Term::Limited(Span::ZERO));
        cache.handle_event(Time(1), Event::Attached(session));
    }

    fn call(cache: &mut Cache) -> Option<(CallId, Call)> {
        loop {
            match cache.poll_output() {
                Output::Call { id, call, .. } => return Some((id, call)),
                Output::Timeout(..) => return None,
                Output::Invalidate { id, .. } => cache.handle_invalidated(Time(5), id),
                _ => {}
            }
        }
    }

    #[test]
    fn ids_of_a_server_that_lost_its_state_are_never_sent_to_it() {
        let mut cache = Cache::new(Config::default());
        attach(&mut cache, 1, 5 << 32);
        let lookup = || Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() };
        let ask = |cache: &mut Cache, id, op| cache.handle_op(Time(2), OpId(id), Caller::default(), op);
        assert_eq!(ask(&mut cache, 1, lookup()), None);
        let (id, _) = call(&mut cache).unwrap();
        let node = NodeId { ino: 7, generation: 6 << 32 };
        let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
        let entry = Entry { id: node, attr, target: None, no_xattrs: true };
        let response = Response::plain(Ok(Reply::Entry(Some(entry))));
        cache.handle_event(Time(3), Event::Response { call: id, response });
        let getattr = Op::GetAttr { ino: 7 };
        assert_eq!(ask(&mut cache, 2, getattr.clone()), None);
        assert!(matches!(call(&mut cache), Some((_, Call::GetAttr { node: place })) if place.node == node));
        // The same server again: ids stay valid.
        cache.handle_event(Time(4), Event::Lost { why: String::new() });
        attach(&mut cache, 1, 5 << 32);
        assert_eq!(ask(&mut cache, 3, getattr.clone()), None);
        assert!(matches!(call(&mut cache), Some((_, Call::GetAttr { node: place })) if place.node == node));
        let access =
            Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
        assert_eq!(ask(&mut cache, 6, Op::Open { ino: 7, access, append: false }), None);
        let (id, _) = call(&mut cache).unwrap();
        let response = Response::plain(Ok(Reply::Opened { handle: Handle(1), attr }));
        cache.handle_event(Time(4), Event::Response { call: id, response });
        // A server that makes ids from other secrets.
        cache.handle_event(Time(5), Event::Lost { why: String::new() });
        attach(&mut cache, 2, 8 << 32);
        assert_eq!(call(&mut cache), None, "the kernel forgets");
        assert_eq!(ask(&mut cache, 4, getattr), Some(OpReply::Failed(Errno::STALE)));
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        let change = Op::SetAttr { ino: 7, fh: Some(Fh(1)), set };
        assert_eq!(ask(&mut cache, 7, change), Some(OpReply::Failed(Errno::IO)), "what is open is no other");
        assert_eq!(ask(&mut cache, 5, lookup()), None);
        let Some((_, Call::Lookup { dir, .. })) = call(&mut cache) else { panic!("not asked") };
        assert_eq!(dir.node, NodeId { ino: 1, generation: 8 << 32 });
    }
}
