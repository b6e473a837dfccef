//! Pins for files that the kernel has open and the remote does not.
//!
//! A file that is only read is opened under a grant, without a call to the remote. Its data depends on that grant: a
//! client that removes its last name waits for the recall. So before the grant ends, the cache asks the remote to pin the
//! file: on a recall, at its deadline, on eviction, when a local change moves the file or links it, and when a session
//! is active again. Nothing waits for the pin, since calls that are sent later are done later.
//!
//! Invariant: each open file has a handle, or its inode is pinned, or a grant lives that is recalled before its last
//! name goes.

use crate::calls::CallKind;
use crate::op::{KernelInvalidation, Output, Urgency};
use crate::open::OpenFile;
use crate::out::invalidate;
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, Handle, Name};
use std::collections::BTreeSet;

/// Pins a file at the remote, if it is open without a handle.
pub(crate) fn pin_open(state: &mut State, ino: u64) {
    if !state.open.files.has_any_without_handle()
        || !state.session.is_attached()
        || !state.store.inode(ino).is_some_and(|inode| inode.opens().needs_pin())
    {
        return;
    }
    let Some(node) = paths::node_ref(state, ino) else { return };
    let is_of_it = |file: &&OpenFile| file.ino == ino && file.lacks_handle_for(node.node);
    let Some(caller) = state.open.files.values().find(is_of_it).map(|file| file.caller) else { return };
    let names = paths::path_to(state, node.node).unwrap_or_default();
    let handle = assign_pin(state, ino);
    let call = Call::PinOpen { node, names, handle };
    state.out.push_back(Output::Call {
        id: state.calls.last_id(),
        caller: Some(caller),
        mutation_id: None,
        call,
    });
}

/// Assigns a handle under which the remote is about to open an inode.
fn assign_pin(state: &mut State, ino: u64) -> Handle {
    state.calls.new_id();
    let handle = new_pin_handle(state);
    if let Some(inode) = state.store.inode_mut(ino) {
        inode.opens_mut().note_pin(handle);
    }
    handle
}

/// Pins all open files: no earlier grant covers them.
pub(crate) fn pin_open_all(state: &mut State) {
    let open: Vec<u64> = state.open.files.values().map(|file| file.ino).collect();
    open.into_iter().for_each(|ino| pin_open(state, ino));
}

/// Assigns pin handles to all open files without a handle; the caller sends the calls.
pub(crate) fn assign_pins(state: &mut State) {
    let known = |file: &&OpenFile| state.store.id_of(file.ino).is_some_and(|id| file.lacks_handle_for(id));
    let open: BTreeSet<u64> = state.open.files.values().filter(known).map(|file| file.ino).collect();
    for ino in open {
        if state.store.inode(ino).is_some_and(|inode| !inode.opens().is_pinned()) {
            assign_pin(state, ino);
        }
    }
}

/// Pins the open file at a name, as far as is known.
pub(crate) fn pin_open_at(state: &mut State, dir: u64, name: &Name) {
    view::open_without_handle_at(state, dir, name).into_iter().for_each(|ino| pin_open(state, ino));
}

/// Pins all open files in a directory, as far as is known.
pub(crate) fn pin_open_below(state: &mut State, dir: u64) {
    if !state.open.files.has_any_without_handle() {
        return;
    }
    let lies_there = |ino: &u64| {
        state
            .store
            .inode(*ino)
            .is_some_and(|i| i.parent_entry().is_some_and(|(parent_entry, _)| *parent_entry == dir))
    };
    let unpinned = state.open.files.values().filter(|file| file.handle().is_none()).map(|file| file.ino);
    let below: Vec<u64> = unpinned.filter(lies_there).collect();
    below.into_iter().for_each(|ino| pin_open(state, ino));
}

/// Suspends the facts of the inodes from which a local change takes a name, and of files that it moves. The kernel
/// has their attributes under the grant on that name, and keeps them when the name is gone (`fuse_entry_unlinked`),
/// where no recall covers them. Other clients may change a moved file by its new name before the reply comes. So
/// the kernel drops the attributes, and gets new ones without a timeout while the change is in flight.
pub(crate) fn suspend_victims(state: &mut State, purpose: &CallKind) -> Vec<u64> {
    let leaving = match purpose {
        CallKind::Remove { dir, name } => view::open_at(state, *dir, name),
        CallKind::Rename { from, name, to, new_name, exchange, .. } => {
            let moved = |dir: u64, name: &Name| {
                let child = view::child_at(state, dir, name);
                child.filter(|ino| state.store.inode(*ino).is_some_and(|inode| inode.kernel.is_known()))
            };
            let other = if *exchange { moved(*to, new_name) } else { None };
            let others = other.map_or_else(|| view::open_at(state, *to, new_name), |other| vec![other]);
            moved(*from, name).into_iter().chain(others).collect()
        }
        _ => Vec::new(),
    };
    let stale: Vec<KernelInvalidation> =
        leaving.iter().map(|ino| KernelInvalidation::Attr { ino: *ino }).collect();
    if !stale.is_empty() && state.kernel.can_notify() {
        invalidate::invalidate_first(state, stale, Urgency::First);
    }
    leaving
}

/// Returns a handle that differs from all others that this mount, or any other mount of this client, has assigned.
fn new_pin_handle(state: &State) -> Handle {
    const CALL_BITS: u32 = 48;
    let mount = (state.config.client ^ state.config.incarnation.rotate_left(7)) << CALL_BITS;
    Handle(Handle::CLIENT_ASSIGNED | mount | (state.calls.last_id().0 & ((1 << CALL_BITS) - 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::op::Caller;
    use crate::test_fixtures::{T0, cache};
    use crate::{Config, Fh, Op};
    use nigh_types::{
        Access, Attr, CallId, Entry, Event, Grant, GrantId, LeaseScope, Mode, NodeId, OpId, Recall, RecallId,
        Reply, Response, SetAttr, Term, UpdatePrepare, UpdateScope,
    };

    fn calls(cache: &mut Cache) -> Vec<(CallId, Call)> {
        let mut calls = Vec::new();
        loop {
            match cache.poll_output() {
                Output::Call { id, call, .. } => calls.push((id, call)),
                Output::Timeout(..) => return calls,
                Output::Invalidate { id, .. } => cache.handle_invalidated(T0, id),
                _ => {}
            }
        }
    }

    /// Starts an operation that sends a call; returns the call.
    fn ask(cache: &mut Cache, op: Op) -> (CallId, Call) {
        assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), op), None);
        calls(cache).pop().expect("the remote is asked")
    }

    fn answer(cache: &mut Cache, call: CallId, reply: Reply) {
        cache.handle_event(T0, Event::Response { call, response: Response::plain(Ok(reply)) });
    }

    /// The open file had the number of a symlink that stands there now: the server was killed, and another client
    /// removed the file.
    #[test]
    fn rename_over_an_inode_that_reuses_an_open_files_number_pins_nothing() {
        let mut cache = cache(Config::default());
        let name = |name: &[u8]| Name::new(name).unwrap();
        let look = |cache: &mut Cache, generation: u64, mode: u32| {
            let (looked, _) = ask(cache, Op::Lookup { dir: 1, name: name(b"f") });
            let id = NodeId { ino: 7, generation };
            let attr = Attr { mode, nlink: 1, ..Attr::default() };
            answer(cache, looked, Reply::Entry(Some(Entry { id, attr, target: None, no_xattrs: true })));
            attr
        };
        let attr = look(&mut cache, 1, 0o100_644);
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        let (opened, _) = ask(&mut cache, Op::Open { ino: 7, access, append: false });
        answer(&mut cache, opened, Reply::Opened { handle: Handle(1), attr });
        cache.state.open.files.take_handles();
        cache.state.store.inode_mut(7).unwrap().opens_mut().note_handle_lost();
        let rename = |cache: &mut Cache| {
            let (new_name, from) = (name(b"f"), name(b"g"));
            let (id, call) = ask(
                cache,
                Op::Rename {
                    from: 1,
                    name: from,
                    to: 1,
                    new_name,
                    no_replace: false,
                    exchange: false,
                    whiteout: false,
                },
            );
            let response = Response::plain(Err(nigh_types::Errno::XDEV));
            cache.handle_event(T0, Event::Response { call: id, response });
            let Call::Rename { keep, .. } = call else { panic!("{call:?}") };
            keep
        };
        assert_eq!(rename(&mut cache), Some(NodeId { ino: 7, generation: 1 }));
        look(&mut cache, 2, 0o120_777);
        assert_eq!(rename(&mut cache), None);
    }

    /// Returns a cache with a file of one name that was opened without a handle and then pinned, and the pin handle.
    fn pinned() -> (Cache, NodeId, Attr, Handle) {
        let mut cache = cache(Config::default());
        let node = NodeId { ino: 7, generation: 1 };
        let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
        let (looked, _) = ask(&mut cache, Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
        let entry = Entry { id: node, attr, target: None, no_xattrs: true };
        answer(&mut cache, looked, Reply::Entry(Some(entry)));
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        let (opened, _) = ask(&mut cache, Op::Open { ino: 7, access, append: false });
        answer(&mut cache, opened, Reply::Opened { handle: Handle(1), attr });
        cache.state.open.files.take_handles();
        cache.state.store.inode_mut(7).unwrap().opens_mut().note_handle_lost();
        crate::out::pins::pin_open(&mut cache.state, 7);
        let Some((_, Call::PinOpen { handle, .. })) = calls(&mut cache).pop() else { panic!("it is kept") };
        (cache, node, attr, handle)
    }

    fn released(cache: &mut Cache) -> Vec<Handle> {
        let handles = |(_, call)| match call {
            Call::Release { handles } => handles,
            other => panic!("{other:?}"),
        };
        calls(cache).into_iter().flat_map(handles).collect()
    }

    #[test]
    fn pin_is_not_released_while_a_call_uses_it() {
        let (mut cache, node, attr, pin) = pinned();
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        let (set, call) = ask(&mut cache, Op::SetAttr { ino: 7, fh: None, set });
        assert!(matches!(call, Call::SetAttr { handle: Some(h), .. } if h == pin), "{call:?}");
        cache.handle_op(T0, OpId(2), Caller::default(), Op::Release { fh: Fh(1), flock: None });
        answer(&mut cache, set, Reply::Attr(node, attr));
        assert_eq!(released(&mut cache), []);
        cache.handle_forget(7, 1);
        assert_eq!(released(&mut cache), [pin]);
    }

    #[test]
    fn pin_is_released_when_the_file_is_closed() {
        let (mut cache, _, _, pin) = pinned();
        cache.handle_op(T0, OpId(2), Caller::default(), Op::Release { fh: Fh(1), flock: None });
        assert_eq!(released(&mut cache), [pin]);
    }

    /// A kernel that looked the name up before may open it after: atomic replacement shows no open that fails.
    #[test]
    fn pin_of_a_replaced_file_stays_until_the_kernel_forgets_it() {
        let (mut cache, node, attr, pin) = pinned();
        let name = |name: &[u8]| Name::new(name).unwrap();
        let rename = Op::Rename {
            from: 1,
            name: name(b"g"),
            to: 1,
            new_name: name(b"f"),
            no_replace: false,
            exchange: false,
            whiteout: false,
        };
        let (renamed, _) = ask(&mut cache, rename);
        let moved = NodeId { ino: 8, generation: 1 };
        answer(
            &mut cache,
            renamed,
            Reply::Renamed { moved, replaced: Some(node), pinned: Some(Handle(9)), whiteout: None },
        );
        assert_eq!(released(&mut cache), [Handle(9)]);
        cache.handle_op(T0, OpId(2), Caller::default(), Op::Release { fh: Fh(1), flock: None });
        assert_eq!(released(&mut cache), []);
        let access =
            Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
        let (opened, _) = ask(&mut cache, Op::Open { ino: 7, access, append: false });
        answer(&mut cache, opened, Reply::Opened { handle: Handle(2), attr });
        cache.handle_op(T0, OpId(3), Caller::default(), Op::Release { fh: Fh(2), flock: None });
        assert_eq!(released(&mut cache), [Handle(2)]);
        cache.handle_forget(7, 1);
        assert_eq!(released(&mut cache), [pin]);
    }

    /// A removed file keeps its name as the hint by which the remote resolves it.
    #[test]
    fn removal_of_a_name_pins_each_open_file_that_had_it() {
        let mut cache = cache(Config::default());
        let root = NodeId { ino: 1, generation: 1 };
        let name = || Name::new(b"f").unwrap();
        let (covers, mode, term) = (LeaseScope::Directory, Mode::Read, Term::Session);
        let access =
            Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
        let open_next = |cache: &mut Cache, ino: u64| {
            let (looked, _) = ask(cache, Op::Lookup { dir: 1, name: name() });
            let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
            let entry = Entry { id: NodeId { ino, generation: 1 }, attr, target: None, no_xattrs: true };
            let grant =
                Grant { id: GrantId(ino), node: root, covers, mode, term, recallable: true, shared: false };
            let response = Response { grants: vec![grant], ..Response::plain(Ok(Reply::Entry(Some(entry)))) };
            cache.handle_event(T0, Event::Response { call: looked, response });
            let opened =
                cache.handle_op(T0, OpId(ino), Caller::default(), Op::Open { ino, access, append: false });
            assert!(
                matches!(opened, Some(crate::OpReply::Opened(_))),
                "without a call to the remote: {opened:?}"
            );
        };
        let pinned = |cache: &mut Cache| -> Vec<u64> {
            let pins = calls(cache).into_iter().filter_map(|(_, call)| match call {
                Call::PinOpen { node, .. } => Some(node.node.ino),
                _ => None,
            });
            pins.collect()
        };
        open_next(&mut cache, 7);
        let recall = Recall { id: RecallId(1), node: root, covers, names: Vec::new() };
        cache.handle_event(T0, Event::Recall(recall));
        assert_eq!(pinned(&mut cache), [7]);
        open_next(&mut cache, 8);
        let facts = vec![UpdateScope { node: root, covers, names: vec![name()] }];
        cache.handle_event(T0, Event::UpdatePrepare(UpdatePrepare { id: RecallId(2), facts }));
        assert_eq!(pinned(&mut cache), [8]);
    }

    /// Other clients may change either file by its new name before the reply to the exchange comes.
    #[test]
    fn exchange_in_flight_suspends_attributes_of_both_files() {
        let mut cache = cache(Config::default());
        let name = |name: &[u8]| Name::new(name).unwrap();
        let node = NodeId { ino: 1, generation: 1 };
        let (id, covers, mode, term) = (GrantId(1), LeaseScope::Directory, Mode::Read, Term::Session);
        let grant = Grant { id, node, covers, mode, term, recallable: true, shared: false };
        for (text, ino) in [(b"f", 7), (b"g", 8)] {
            let (looked, _) = ask(&mut cache, Op::Lookup { dir: 1, name: name(text) });
            let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
            let entry = Entry { id: NodeId { ino, generation: 1 }, attr, target: None, no_xattrs: true };
            let response = Response { grants: vec![grant], ..Response::plain(Ok(Reply::Entry(Some(entry)))) };
            cache.handle_event(T0, Event::Response { call: looked, response });
        }
        assert_eq!(calls(&mut cache), []);
        let list = || Op::ListXattr { ino: 8, size: 0 };
        assert!(cache.handle_op(T0, OpId(2), Caller::default(), list()).is_some());
        let rename = Op::Rename {
            from: 1,
            name: name(b"f"),
            to: 1,
            new_name: name(b"g"),
            no_replace: false,
            exchange: true,
            whiteout: false,
        };
        assert_eq!(cache.handle_op(T0, OpId(3), Caller::default(), rename), None);
        let mut stale = Vec::new();
        loop {
            match cache.poll_output() {
                Output::Invalidate { stale: more, .. } => stale.extend(more),
                Output::Call { call, .. } => break assert!(matches!(call, Call::Rename { .. }), "{call:?}"),
                _ => {}
            }
        }
        assert!(
            stale.contains(&KernelInvalidation::Attr { ino: 7 })
                && stale.contains(&KernelInvalidation::Attr { ino: 8 }),
            "{stale:?}"
        );
        assert_eq!(cache.handle_op(T0, OpId(4), Caller::default(), list()), None);
    }
}
