mod remote_updates;

use super::*;
use crate::cache::Cache;
use crate::inotify::{CONTENDED, FAILED, FIRST_LOOK, RemoteChange};
use crate::test_fixtures::{T0, cache, name};
use crate::{Caller, Config, Op, OpReply, Output};
use nigh_types::{
    Attr, CallId, Entries, Entry, Event, Grant, GrantId, LeaseScope, Mode, NodeId, OpId, Recall, RecallId,
    Reply, Response, SetAttr, Term, Timestamp,
};
use std::collections::BTreeMap;

const ROOT: NodeId = NodeId { ino: 1, generation: 1 };

fn id(ino: u64) -> NodeId {
    NodeId { ino, generation: 1 }
}

fn at(secs: i64) -> Timestamp {
    Timestamp { secs, nanos: 0 }
}

fn file(size: u64) -> Attr {
    Attr { mode: 0o100_644, nlink: 1, size, mtime: at(1), ctime: at(1), atime: at(1), ..Attr::default() }
}

fn directory() -> Attr {
    Attr { mode: 0o040_755, nlink: 2, ..Attr::default() }
}

/// Remote with one or two directories, and the changes reported to watchers.
struct Stage {
    cache: Cache,
    now: Time,
    dirs: BTreeMap<u64, BTreeMap<Name, (NodeId, Attr)>>,
    grants: bool,
    lists: Vec<(CallId, u64)>,
    changes: BTreeMap<CallId, &'static str>,
    next: u64,
}

impl Stage {
    fn new() -> Stage {
        let mut stage = Stage {
            cache: cache(Config::default()),
            now: T0,
            dirs: BTreeMap::from([(1, BTreeMap::new())]),
            grants: true,
            lists: Vec::new(),
            changes: BTreeMap::new(),
            next: 0,
        };
        stage.set("a", 10, file(0));
        stage.watch(&[1]);
        stage
    }

    fn watch(&mut self, inos: &[u64]) {
        self.cache.handle_watch(self.now, &inos.iter().copied().collect(), false);
        self.run();
        assert_eq!(self.told(), []);
    }

    fn set(&mut self, text: &str, ino: u64, attr: Attr) {
        self.dirs.get_mut(&1).unwrap().insert(name(text), (id(ino), attr));
    }

    fn remove(&mut self, text: &str) {
        self.dirs.get_mut(&1).unwrap().remove(&name(text));
    }

    fn poll(&mut self) -> Time {
        let due = self.poll_all();
        self.cache.state.watches.check_count();
        due
    }

    fn poll_all(&mut self) -> Time {
        loop {
            match self.cache.poll_output() {
                Output::Call { id, call: nigh_types::Call::List { dir }, .. } => {
                    self.lists.push((id, dir.node.ino))
                }
                Output::Call { id, call, .. } => drop(self.changes.insert(id, call.type_name())),
                Output::Invalidate { id, .. } => self.cache.handle_invalidated(self.now, id),
                Output::Timeout(at, _) => return at,
                _ => {}
            }
        }
    }

    fn answer_lists(&mut self) -> bool {
        let lists = std::mem::take(&mut self.lists);
        let any = !lists.is_empty();
        for (call, dir) in lists {
            let key = self.cache.state.store.key();
            let entries = self.dirs.get(&dir).cloned().unwrap_or_default();
            let mut entries: Vec<(Name, Entry)> = entries
                .into_iter()
                .map(|(name, (id, attr))| (name, Entry { id, attr, target: None, no_xattrs: true }))
                .collect();
            entries.sort_by_key(|(name, _)| key.cookie(name.as_bytes()));
            self.next += 1;
            let grant = Grant {
                id: GrantId(self.next),
                node: id(dir),
                covers: LeaseScope::Directory,
                mode: Mode::Read,
                term: Term::Session,
                recallable: true,
                shared: false,
            };
            let grants = if self.grants { vec![grant] } else { Vec::new() };
            let result = Ok(Reply::Listed(Entries { entries }));
            let response = Response { result, after: Vec::new(), grants, last: true };
            self.cache.handle_event(self.now, Event::Response { call, response });
            self.poll();
        }
        any
    }

    /// Runs until nothing is due within two seconds.
    fn run(&mut self) {
        let end = self.now.after(Span::from_millis(2_000));
        loop {
            let due = self.poll();
            if self.answer_lists() {
                continue;
            }
            if due > end {
                return;
            }
            self.now = due.max(self.now);
            self.cache.handle_timeout(self.now);
        }
    }

    /// Runs what is due within that time.
    fn pass(&mut self, millis: u64) {
        let end = self.now.after(Span::from_millis(millis));
        loop {
            let due = self.poll();
            if self.answer_lists() {
                continue;
            }
            self.now = due.max(self.now).min(end);
            self.cache.handle_timeout(self.now);
            if self.now == end {
                self.poll();
                return;
            }
        }
    }

    fn fail_lists(&mut self) -> usize {
        let lists = std::mem::take(&mut self.lists);
        for (call, _) in &lists {
            let response = Response::plain(Err(nigh_types::Errno::ACCES));
            self.cache.handle_event(self.now, Event::Response { call: *call, response });
            self.poll();
        }
        lists.len()
    }

    fn restore(&mut self) {
        let session =
            nigh_types::SessionParams::plain(ROOT, directory(), self.cache.state.store.key(), Term::Session);
        self.cache.handle_event(self.now, Event::Restored { session, kept: true });
    }

    fn recall(&mut self, dir: u64) {
        self.now = self.now.after(Span::from_millis(300));
        let recall =
            Recall { id: RecallId(1), node: id(dir), covers: LeaseScope::Directory, names: Vec::new() };
        self.cache.handle_event(self.now, Event::Recall(recall));
        self.poll();
    }

    fn told(&mut self) -> Vec<RemoteChange> {
        let told = std::iter::from_fn(|| self.cache.poll_change().map(|(_, change)| change));
        let told: Vec<RemoteChange> = told.collect();
        told.iter().for_each(|change| self.cache.handle_reported(change));
        told
    }

    fn after_a_recall(&mut self) -> Vec<RemoteChange> {
        self.recall(1);
        self.run();
        self.told()
    }

    /// Sends a local request that has no reply yet.
    fn ask(&mut self, op: Op) -> CallId {
        self.next += 1;
        assert_eq!(self.cache.handle_op(self.now, OpId(self.next), Caller::default(), op), None);
        self.poll();
        *self.changes.keys().next_back().unwrap()
    }

    fn respond(&mut self, call: CallId, result: Reply) {
        let response = Response::plain(Ok(result));
        self.cache.handle_event(self.now, Event::Response { call, response });
        self.poll();
    }
}

fn mkdir(text: &str) -> Op {
    Op::Mkdir { dir: 1, name: name(text), mode: 0o755, umask: 0 }
}

fn made(ino: u64) -> Reply {
    let entry = Entry { id: id(ino), attr: directory(), target: None, no_xattrs: true };
    Reply::Created { entry, handle: None, existed: false }
}

#[test]
fn remote_change_is_reported_once() {
    let mut stage = Stage::new();
    stage.set("b", 11, file(0));
    stage.set("d", 12, directory());
    let told = stage.after_a_recall();
    assert!(told.contains(&RemoteChange::Made { dir: 1, name: name("b"), kind: Kind::File }), "{told:?}");
    assert!(
        told.contains(&RemoteChange::Made { dir: 1, name: name("d"), kind: Kind::Directory }),
        "{told:?}"
    );
    assert_eq!(told.len(), 2);
    assert_eq!(stage.after_a_recall(), []);
    stage.remove("b");
    let gone =
        RemoteChange::Removed { dir: 1, name: name("b"), node: id(11), kind: Kind::File, replaced: false };
    assert_eq!(stage.after_a_recall(), [gone]);
    stage.remove("a");
    stage.set("c", 10, file(0));
    let moved = RemoteChange::Moved {
        from: 1,
        name: name("a"),
        to: 1,
        new_name: name("c"),
        node: id(10),
        kind: Kind::File,
    };
    assert_eq!(stage.after_a_recall(), [moved]);
}

#[test]
fn writes_touches_and_setattrs_are_distinguished() {
    let mut stage = Stage::new();
    let written = [RemoteChange::Written { dir: 1, name: name("a"), node: id(10) }];
    let set = [RemoteChange::Attributes { dir: 1, name: name("a"), node: id(10) }];
    let mut attr = file(7);
    for (change, told) in [
        ((|attr| *attr = Attr { mtime: at(2), ctime: at(2), ..*attr }) as fn(&mut Attr), &written[..]),
        (|attr| *attr = Attr { size: 9, ..*attr }, &written),
        (|attr| *attr = Attr { mode: 0o100_600, ctime: at(3), ..*attr }, &set),
        (|attr| *attr = Attr { mtime: at(3), ctime: at(4), ..*attr }, &set),
        (|attr| *attr = Attr { mtime: at(5), ctime: at(5), atime: at(5), ..*attr }, &set),
        (|attr| *attr = Attr { uid: 5, ctime: at(6), ..*attr }, &set),
        (|attr| *attr = Attr { ctime: at(7), nlink: 1, ..*attr }, &[]),
    ] {
        stage.set("a", 10, attr);
        stage.after_a_recall();
        change(&mut attr);
        stage.set("a", 10, attr);
        assert_eq!(stage.after_a_recall(), told);
    }
    stage.set("d", 20, directory());
    stage.after_a_recall();
    stage.set("d", 20, Attr { mtime: at(9), ctime: at(9), nlink: 3, ..directory() });
    assert_eq!(stage.after_a_recall(), [], "something was made in it");
}

#[test]
fn local_changes_are_not_reported() {
    let mut stage = Stage::new();
    let call = stage.ask(mkdir("own"));
    // Others see it before the reply comes.
    stage.set("own", 30, directory());
    assert_eq!(stage.after_a_recall(), []);
    stage.respond(call, made(30));
    stage.run();
    assert_eq!(stage.after_a_recall(), []);
    let call = stage.ask(Op::Rmdir { dir: 1, name: name("own") });
    stage.remove("own");
    assert_eq!(stage.after_a_recall(), []);
    stage.respond(call, Reply::Removed { node: id(30), pinned: None });
    assert_eq!(stage.after_a_recall(), []);
    let call = stage.ask(Op::Rename {
        from: 1,
        name: name("a"),
        to: 1,
        new_name: name("z"),
        no_replace: false,
        exchange: false,
        whiteout: false,
    });
    stage.remove("a");
    stage.set("z", 10, Attr { ctime: at(8), ..file(0) });
    assert_eq!(stage.after_a_recall(), []);
    stage.respond(call, Reply::Renamed { moved: id(10), replaced: None, pinned: None, whiteout: None });
    assert_eq!(stage.after_a_recall(), []);
    let answer =
        stage.cache.handle_op(stage.now, OpId(99), Caller::default(), Op::Lookup { dir: 1, name: name("z") });
    assert!(matches!(answer, Some(OpReply::Node(_))), "{answer:?}");
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let call = stage.ask(Op::SetAttr { ino: 10, fh: None, set });
    let attr = Attr { mode: 0o100_600, ctime: at(9), ..file(0) };
    stage.set("z", 10, attr);
    assert_eq!(stage.after_a_recall(), []);
    stage.respond(call, Reply::Attr(id(10), attr));
    assert_eq!(stage.after_a_recall(), []);
}

#[test]
fn remote_change_during_a_local_change_is_reported_after_it() {
    let mut stage = Stage::new();
    let call = stage.ask(mkdir("x"));
    stage.set("x", 40, file(0));
    assert_eq!(stage.after_a_recall(), []);
    stage.cache.handle_event(
        stage.now,
        Event::Response { call, response: Response::plain(Err(nigh_types::Errno::EXIST)) },
    );
    stage.run();
    let told = stage.told();
    let told = if told.is_empty() { stage.after_a_recall() } else { told };
    assert_eq!(told, [RemoteChange::Made { dir: 1, name: name("x"), kind: Kind::File }]);
}

#[test]
fn changes_while_disconnected_are_reported_after_reconnection() {
    let mut stage = Stage::new();
    stage.cache.handle_event(stage.now, Event::Expired { why: String::new() });
    stage.run();
    stage.set("b", 11, file(0));
    stage.restore();
    stage.run();
    assert_eq!(stage.told(), [RemoteChange::Made { dir: 1, name: name("b"), kind: Kind::File }]);
    assert_eq!(stage.cache.watching().gaps, 1);
}

#[test]
fn directory_without_grants_is_polled_at_growing_intervals() {
    let mut stage = Stage::new();
    stage.grants = false;
    stage.set("b", 11, file(0));
    stage.recall(1);
    let end = stage.now.after(Span::from_millis(10_000));
    while stage.now < end {
        let due = stage.poll();
        if !stage.answer_lists() {
            stage.now = due.max(stage.now);
            stage.cache.handle_timeout(stage.now);
        }
    }
    assert_eq!(stage.told(), [RemoteChange::Made { dir: 1, name: name("b"), kind: Kind::File }]);
    let looks = stage.cache.watching().looks;
    assert!((9..=16).contains(&looks), "{looks}");
}

#[test]
fn directory_recalled_twice_is_listed_after_a_longer_delay() {
    let mut stage = Stage::new();
    stage.recall(1);
    stage.run();
    let looks = stage.cache.watching().looks;
    // One recall is no contention yet.
    for (soon, due) in [(1, FIRST_LOOK), (2, CONTENDED)] {
        let recall = Recall { id: RecallId(2), node: ROOT, covers: LeaseScope::Directory, names: Vec::new() };
        stage.cache.handle_event(stage.now, Event::Recall(recall));
        let granted = stage.now;
        assert_eq!(stage.poll(), granted.after(due));
        assert_eq!(stage.cache.watching().looks, looks + soon - 1);
        stage.run();
        assert_eq!((stage.cache.watching().looks, stage.now), (looks + soon, granted.after(due)));
    }
}

#[test]
fn inode_that_vanishes_here_and_appears_there_is_reported_as_moved() {
    let mut stage = Stage::new();
    stage.set("d", 50, directory());
    stage.dirs.insert(50, BTreeMap::new());
    stage.after_a_recall();
    let look = Op::Lookup { dir: 1, name: name("d") };
    let call = stage.ask(look);
    let entry = Entry { id: id(50), attr: directory(), target: None, no_xattrs: true };
    stage.respond(call, Reply::Entry(Some(entry)));
    stage.watch(&[1, 50]);
    stage.remove("a");
    stage.dirs.get_mut(&50).unwrap().insert(name("b"), (id(10), Attr { ctime: at(3), ..file(0) }));
    stage.recall(1);
    let recall = Recall { id: RecallId(3), node: id(50), covers: LeaseScope::Directory, names: Vec::new() };
    stage.cache.handle_event(stage.now, Event::Recall(recall));
    stage.run();
    let moved = RemoteChange::Moved {
        from: 1,
        name: name("a"),
        to: 50,
        new_name: name("b"),
        node: id(10),
        kind: Kind::File,
    };
    assert_eq!(stage.told(), [moved]);
}

#[test]
fn negative_dentry_has_no_timeout_while_a_change_is_unreported() {
    let mut stage = Stage::new();
    let missing = |stage: &mut Stage| {
        let look = Op::Lookup { dir: 1, name: name("none") };
        let answer = stage.cache.handle_op(stage.now, OpId(1_000), Caller::default(), look);
        let Some(OpReply::Missing(valid)) = answer else { panic!("{answer:?}") };
        valid != Span::ZERO
    };
    assert!(missing(&mut stage));
    stage.remove("a");
    stage.recall(1);
    stage.run();
    assert!(!missing(&mut stage));
    assert_eq!(stage.told().len(), 1);
    assert!(missing(&mut stage));
}

#[test]
fn replaced_inode_is_not_reported_as_removed() {
    let mut stage = Stage::new();
    stage.set("tmp", 11, file(3));
    stage.after_a_recall();
    stage.remove("tmp");
    stage.set("a", 11, file(3));
    let told = stage.after_a_recall();
    let [RemoteChange::Removed { replaced: true, .. }, RemoteChange::Moved { .. }] = &told[..] else {
        panic!("{told:?}")
    };
}

#[test]
fn moves_are_ordered_so_that_a_name_is_free_before_it_is_taken() {
    let mut stage = Stage::new();
    for (text, ino) in [("b", 11), ("c", 12)] {
        stage.set(text, ino, file(0));
    }
    stage.after_a_recall();
    // a → b → c → d, and then two that change places.
    for (text, ino) in [("b", 10), ("c", 11), ("d", 12)] {
        stage.set(text, ino, file(0));
    }
    stage.remove("a");
    let to = |told: Vec<RemoteChange>| -> Vec<Name> {
        told.iter().filter_map(|change| change.target().map(|(_, name)| name)).collect()
    };
    assert_eq!(to(stage.after_a_recall()), [name("d"), name("c"), name("b")]);
    stage.set("b", 11, file(0));
    stage.set("c", 10, file(0));
    assert_eq!(to(stage.after_a_recall()).len(), 2);
}

#[test]
fn directory_with_a_failed_listing_is_listed_again() {
    let mut stage = Stage::new();
    stage.set("b", 11, file(0));
    stage.recall(1);
    let mut failed = Vec::new();
    while failed.len() < 3 {
        stage.now = stage.poll().max(stage.now);
        stage.cache.handle_timeout(stage.now);
        stage.poll();
        if stage.fail_lists() > 0 {
            failed.push(stage.now);
        }
    }
    assert_eq!([failed[1].since(failed[0]), failed[2].since(failed[1])], [FAILED, Span(2 * FAILED.0)]);
    // And at once when the server is back.
    stage.cache.handle_event(stage.now, Event::Expired { why: String::new() });
    stage.poll();
    stage.restore();
    stage.pass(100);
    assert_eq!(stage.told(), [RemoteChange::Made { dir: 1, name: name("b"), kind: Kind::File }]);
}

/// Makes many directories due, of which not all can be listed at once.
fn with_directories(inos: std::ops::Range<u64>) -> Stage {
    let mut stage = Stage::new();
    for ino in inos.clone() {
        stage.set(&format!("d{ino}"), ino, directory());
        stage.dirs.insert(ino, BTreeMap::new());
    }
    stage.after_a_recall();
    for ino in inos {
        let look = Op::Lookup { dir: 1, name: name(&format!("d{ino}")) };
        let answer = stage.cache.handle_op(stage.now, OpId(1_000 + ino), Caller::default(), look);
        let Some(OpReply::Node(_)) = answer else {
            stage.poll();
            let call = *stage.changes.keys().next_back().unwrap();
            let entry = Entry { id: id(ino), attr: directory(), target: None, no_xattrs: true };
            stage.respond(call, Reply::Entry(Some(entry)));
            continue;
        };
    }
    stage
}

#[test]
fn directory_over_the_listing_limit_is_due_when_a_listing_ends() {
    let mut stage = with_directories(100..140);
    stage.cache.handle_watch(stage.now, &(100..140).collect(), false);
    let mut rounds = 0;
    while stage.cache.watching().unsettled > 0 {
        assert!(stage.poll() > stage.now, "the timer has nothing to do now");
        assert!((1..=MOST_LISTINGS).contains(&stage.lists.len()));
        stage.answer_lists();
        rounds += 1;
    }
    assert_eq!(rounds, 40_usize.div_ceil(MOST_LISTINGS));
}

#[test]
fn comparison_of_waiting_directories_leaves_no_timer() {
    let mut stage = with_directories(100..102);
    stage.watch(&[1, 100, 101]);
    let recall_both = |stage: &mut Stage| {
        for dir in [1, 100] {
            stage.recall(dir);
        }
        stage.now = stage.now.after(FIRST_LOOK);
        stage.cache.handle_timeout(stage.now);
        stage.poll();
        stage.lists.retain(|(_, dir)| *dir == 1);
        assert!(stage.answer_lists(), "and the other listing is never answered");
        assert_eq!(stage.poll(), stage.now.after(TOGETHER));
    };
    recall_both(&mut stage);
    stage.cache.handle_watch(stage.now, &[100, 101].into(), false);
    stage.now = stage.now.after(TOGETHER);
    stage.cache.handle_timeout(stage.now);
    assert!(stage.poll() > stage.now.after(CONTENDED));
    stage.cache.handle_watch(stage.now, &BTreeSet::new(), false);
    assert!(stage.poll() > stage.now.after(CONTENDED));
}

#[test]
fn directory_moved_by_another_client_has_its_listed_parent() {
    let mut stage = with_directories(100..102);
    stage.watch(&[1, 100]);
    stage.dirs.get_mut(&1).unwrap().remove(&name("d101"));
    stage.dirs.get_mut(&100).unwrap().insert(name("new"), (id(101), directory()));
    stage.recall(1);
    stage.recall(100);
    stage.run();
    assert_eq!(stage.told().len(), 1);
    assert_eq!(stage.cache.path_of_directory(101), Some(vec![name("d100"), name("new")]));
}

#[test]
fn dentry_has_no_timeout_while_a_change_of_its_directory_is_unreported() {
    let mut stage = Stage::new();
    let valid = |stage: &mut Stage| {
        let look = Op::Lookup { dir: 1, name: name("b") };
        let answer = stage.cache.handle_op(stage.now, OpId(1_000), Caller::default(), look);
        let Some(OpReply::Node(node)) = answer else { panic!("{answer:?}") };
        node.entry_valid != Span::ZERO
    };
    stage.set("b", 11, file(0));
    stage.recall(1);
    stage.run();
    assert!(!valid(&mut stage));
    assert_eq!(stage.told().len(), 1);
    assert!(valid(&mut stage));
}
