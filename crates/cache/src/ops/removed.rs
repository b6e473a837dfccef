//! Directories that a local change removed while a process has them open or is in them.
//!
//! On a local disk such a directory is empty, and can be inspected, changed and synced until the last process leaves
//! it. The remote no longer has it, so the cache answers from its last attributes until the kernel forgets it.
//! Meanwhile another inode may have taken its number.

use crate::op::{Op, OpReply, Opened, Page};
use crate::state::State;
use nigh_types::{Attr, Errno, NodeId, SetAttr, SetTime, Span, Timestamp};

const PERMISSIONS: u32 = 0o7777;

/// Applies a SETATTR. The kernel has checked the caller's permission (`setattr_prepare`).
pub(crate) fn change(attr: &mut Attr, set: &SetAttr, wall: Timestamp) {
    let time = |time: SetTime| match time {
        SetTime::Now => wall,
        SetTime::At(at) => at,
    };
    if let Some(mode) = set.mode {
        attr.mode = attr.mode & !PERMISSIONS | mode & PERMISSIONS;
    }
    attr.uid = set.uid.unwrap_or(attr.uid);
    attr.gid = set.gid.unwrap_or(attr.gid);
    attr.atime = set.atime.map_or(attr.atime, time);
    attr.mtime = set.mtime.map_or(attr.mtime, time);
    attr.ctime = wall;
}

/// Answers a request about such a directory, before [`crate::Cache::resolve_nodeid`]. `wall`: the time of day.
///
/// # Errors
///
/// The request, if it is to be handled as any other.
pub(crate) fn answer_if_removed(state: &mut State, wall: Timestamp, op: Op) -> Result<OpReply, Op> {
    let (number, set) = match &op {
        Op::GetAttr { ino }
        | Op::OpenDir { ino }
        | Op::ReadDir { ino, .. }
        | Op::Fsync { ino, fh: None, .. }
        | Op::GetXattr { ino, .. }
        | Op::ListXattr { ino, .. }
        | Op::StatFs { ino } => (*ino, None),
        Op::SetAttr { ino, set, .. } => (*ino, Some(*set)),
        _ => return Err(op),
    };
    let root = state.store.root();
    let Some((id, attr)) = removed_directory(state, number) else { return Err(op) };
    if let Some(set) = set {
        change(attr, &set, wall);
    }
    Ok(match op {
        Op::OpenDir { .. } => OpReply::Opened(Opened {
            fh: state.open.new_fh(),
            keep_cache: false,
            cache_dir: false,
            no_flush: false,
            direct: false,
        }),
        Op::ReadDir { .. } => OpReply::Page(Page::default()),
        Op::Fsync { .. } => OpReply::Done,
        Op::GetXattr { .. } => OpReply::Failed(Errno::NODATA),
        Op::ListXattr { size: 0, .. } => OpReply::Size(0),
        Op::ListXattr { .. } => OpReply::Value(Vec::new()),
        // The directory was on the export's filesystem.
        Op::StatFs { .. } => return Err(Op::StatFs { ino: root }),
        _ => OpReply::Attr(id, *attr, Span::ZERO),
    })
}

fn removed_directory(state: &mut State, number: u64) -> Option<(NodeId, &mut Attr)> {
    let ino = match state.kernel.nodeids.resolve(number) {
        Ok(ino) => ino,
        Err(former) => return Some((former.id, state.kernel.nodeids.removed_attr(number)?)),
    };
    let inode = state.store.inode_mut(ino)?;
    let id = inode.id;
    Some((id, inode.unlinked_attr_mut()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::cache::Cache;
    use crate::op::Output;
    use crate::test_fixtures::{T0, ask, cache};
    use nigh_types::{CallId, Entry, Event, Grant, GrantId, LeaseScope, Mode, Name, Reply, Response, Term};

    const OLD: NodeId = NodeId { ino: 7, generation: 1 };
    const NEW: NodeId = NodeId { ino: 7, generation: 2 };
    const WALL: Timestamp = Timestamp { secs: 5, nanos: 6 };

    fn answers(cache: &mut Cache, call: CallId, reply: Reply) -> Option<u64> {
        answers_all(cache, call, Response::plain(Ok(reply)))
    }

    fn answers_all(cache: &mut Cache, call: CallId, response: Response) -> Option<u64> {
        cache.handle_event(T0, Event::Response { call, response });
        let mut number = None;
        loop {
            match cache.poll_output() {
                Output::Answer { answer: OpReply::Node(node), .. } => number = Some(node.number),
                Output::Timeout(..) => return number,
                _ => {}
            }
        }
    }

    fn entry(id: NodeId) -> Entry {
        let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
        Entry { id, attr, target: None, no_xattrs: true }
    }

    fn name() -> Name {
        Name::new(b"build").unwrap()
    }

    /// A cache with known attributes of a directory that was removed.
    fn removed() -> Cache {
        let mut cache = cache(Config::default());
        let call = ask(&mut cache, Op::Lookup { dir: 1, name: name() });
        assert_eq!(answers(&mut cache, call, Reply::Entry(Some(entry(OLD)))), Some(7));
        let call = ask(&mut cache, Op::Rmdir { dir: 1, name: name() });
        answers(&mut cache, call, Reply::Removed { node: OLD, pinned: None });
        cache
    }

    fn attr_of(answer: Result<OpReply, Op>) -> Attr {
        match answer {
            Ok(OpReply::Attr(id, attr, Span::ZERO)) => {
                assert_eq!(id, OLD);
                attr
            }
            other => panic!("{other:?}"),
        }
    }

    fn is_empty_and_can_be_changed(cache: &mut Cache) {
        let set = SetAttr { mode: Some(0o700), mtime: Some(SetTime::Now), ..SetAttr::default() };
        let attr = attr_of(cache.answer_if_removed(WALL, Op::SetAttr { ino: 7, fh: None, set }));
        assert_eq!((attr.mode, attr.mtime, attr.ctime, attr.nlink), (0o040_700, WALL, WALL, 0));
        assert_eq!(attr_of(cache.answer_if_removed(WALL, Op::GetAttr { ino: 7 })), attr);
        let synced = cache.answer_if_removed(WALL, Op::Fsync { ino: 7, fh: None, data_only: false });
        assert_eq!(synced, Ok(OpReply::Done));
        let Ok(OpReply::Opened(opened)) = cache.answer_if_removed(WALL, Op::OpenDir { ino: 7 }) else {
            panic!("it is not opened")
        };
        let (fh, offset) = (opened.fh, nigh_types::Cookie(0));
        let read = Op::ReadDir { ino: 7, fh, offset, size: 4096, plus: true };
        assert_eq!(cache.answer_if_removed(WALL, read), Ok(OpReply::Page(Page::default())));
    }

    fn ends_with_the_forget(cache: &mut Cache) {
        is_empty_and_can_be_changed(cache);
        cache.handle_forget(7, 1);
        let look = Op::GetAttr { ino: 7 };
        assert_eq!(cache.answer_if_removed(WALL, look.clone()), Err(look));
    }

    /// `number`: node id of the new directory.
    fn stays_itself_beside(cache: &mut Cache, number: u64) {
        assert_ne!(number, 7);
        let of_new = Op::GetAttr { ino: number };
        assert_eq!(cache.answer_if_removed(WALL, of_new.clone()), Err(of_new));
        ends_with_the_forget(cache);
    }

    #[test]
    fn removed_directory_is_empty_and_can_be_changed_until_it_is_forgotten() {
        ends_with_the_forget(&mut removed());
    }

    /// Neither a grant nor a recent LOOKUP leaves attributes of it in the cache.
    #[test]
    fn removed_directory_has_the_attributes_of_the_removal_reply_if_the_cache_has_none() {
        let mut cache = cache(Config::default());
        let others = (0..32).map(|nth| (NodeId { ino: 100 + nth, generation: 1 }, format!("o{nth}")));
        for (id, text) in std::iter::once((OLD, "build".into())).chain(others) {
            let call = ask(&mut cache, Op::Lookup { dir: 1, name: Name::new(text.as_bytes()).unwrap() });
            assert_eq!(answers(&mut cache, call, Reply::Entry(Some(entry(id)))), Some(id.ino));
        }
        let call = ask(&mut cache, Op::Rmdir { dir: 1, name: name() });
        let removed = Response::plain(Ok(Reply::Removed { node: OLD, pinned: None }));
        let after = vec![(OLD, Attr { nlink: 0, ..entry(OLD).attr })];
        answers_all(&mut cache, call, Response { after, ..removed });
        ends_with_the_forget(&mut cache);
    }

    #[test]
    fn removed_directory_stays_itself_when_another_takes_its_number() {
        let mut cache = removed();
        let call = ask(&mut cache, Op::Mkdir { dir: 1, name: name(), mode: 0o755, umask: 0 });
        let made = Reply::Created { entry: entry(NEW), handle: None, existed: false };
        let number = answers(&mut cache, call, made).expect("it is made");
        stays_itself_beside(&mut cache, number);
    }

    /// As on overlayfs, which has no birth times.
    #[test]
    fn removed_directory_stays_itself_when_another_takes_its_id() {
        for is_made in [true, false] {
            let mut cache = removed();
            let reply = if is_made {
                let call = ask(&mut cache, Op::Mkdir { dir: 1, name: name(), mode: 0o755, umask: 0 });
                (call, Reply::Created { entry: entry(OLD), handle: None, existed: false })
            } else {
                (ask(&mut cache, Op::Lookup { dir: 1, name: name() }), Reply::Entry(Some(entry(OLD))))
            };
            let number = answers(&mut cache, reply.0, reply.1).expect("it is found");
            stays_itself_beside(&mut cache, number);
        }
    }

    /// The record of the removed directory stays under its grant after its FORGET.
    #[test]
    fn directory_with_the_id_of_a_forgotten_removed_one_is_not_treated_as_removed() {
        let mut cache = cache(Config::default());
        let grant = |id| Grant {
            id: GrantId(id),
            node: OLD,
            covers: LeaseScope::Attributes,
            mode: Mode::Read,
            term: Term::Session,
            recallable: true,
            shared: false,
        };
        let response = |reply, id, attr| Response {
            after: vec![(OLD, attr)],
            grants: vec![grant(id)],
            ..Response::plain(Ok(reply))
        };
        let looked = Reply::Entry(Some(entry(OLD)));
        let call = ask(&mut cache, Op::Lookup { dir: 1, name: name() });
        let number = answers_all(&mut cache, call, response(looked.clone(), 1, entry(OLD).attr));
        assert_eq!(number, Some(7));
        let call = ask(&mut cache, Op::Rmdir { dir: 1, name: name() });
        let gone = Attr { nlink: 0, ..entry(OLD).attr };
        answers_all(&mut cache, call, response(Reply::Removed { node: OLD, pinned: None }, 2, gone));
        cache.handle_forget(7, 1);
        assert!(
            cache.state.store.inode(7).is_some_and(|inode| inode.unlinked_attr().is_some()),
            "its record stays"
        );
        let call = ask(&mut cache, Op::Lookup { dir: 1, name: name() });
        let number = answers(&mut cache, call, looked).expect("it is found");
        let list = Op::GetAttr { ino: number };
        assert_eq!(cache.answer_if_removed(WALL, list.clone()), Err(list));
    }
}
