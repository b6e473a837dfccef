//! Remote changes that come as updates in place.

use super::*;
use nigh_types::{UpdateCommit, UpdatePrepare, UpdateScope, UpdatedFact};

impl Stage {
    /// Another client changes these names of the root: each then leads to an inode, or to nothing. No listing follows.
    fn push(&mut self, names: &[(&str, Option<(u64, Attr)>)]) {
        self.now = self.now.after(Span::from_millis(300));
        let held = names.iter().map(|(text, _)| name(text)).collect();
        let facts = vec![UpdateScope { node: ROOT, covers: LeaseScope::Directory, names: held }];
        self.cache.handle_event(self.now, Event::UpdatePrepare(UpdatePrepare { id: RecallId(7), facts }));
        self.poll();
        let fact = |(text, entry): &(&str, Option<(u64, Attr)>)| {
            let entry = entry.map(|(ino, attr)| Entry { id: id(ino), attr, target: None, no_xattrs: true });
            UpdatedFact::Name { dir: ROOT, name: name(text), entry }
        };
        let facts = names.iter().map(fact).collect();
        self.cache.handle_event(self.now, Event::UpdateCommit(UpdateCommit { id: RecallId(7), facts }));
        self.poll();
        assert_eq!((self.lists.len(), self.cache.watching().unsettled), (0, 0), "nothing is looked at again");
    }
}

#[test]
fn update_in_place_is_reported_without_a_listing() {
    let mut stage = Stage::new();
    stage.push(&[("b", Some((11, file(0))))]);
    assert_eq!(stage.told(), [RemoteChange::Made { dir: 1, name: name("b"), kind: Kind::File }]);
    stage.push(&[("b", Some((11, Attr { size: 5, mtime: at(2), ctime: at(2), ..file(0) })))]);
    assert_eq!(stage.told(), [RemoteChange::Written { dir: 1, name: name("b"), node: id(11) }]);
    stage.push(&[("b", None), ("c", Some((11, Attr { size: 5, mtime: at(2), ctime: at(3), ..file(0) })))]);
    let moved = RemoteChange::Moved {
        from: 1,
        name: name("b"),
        to: 1,
        new_name: name("c"),
        node: id(11),
        kind: Kind::File,
    };
    assert_eq!(stage.told(), [moved]);
    stage.push(&[("c", None)]);
    let removed =
        RemoteChange::Removed { dir: 1, name: name("c"), node: id(11), kind: Kind::File, replaced: false };
    assert_eq!(stage.told(), [removed]);
}

#[test]
fn name_under_update_is_not_served_from_memory() {
    let mut stage = Stage::new();
    stage.push(&[("b", Some((11, file(0))))]);
    let known = |stage: &mut Stage| stage.cache.cached_lookup(stage.now, 1, &name("b"), Kind::File);
    assert!(matches!(known(&mut stage), Some(OpReply::Node(node)) if node.id == id(11)));
    let facts = vec![UpdateScope { node: ROOT, covers: LeaseScope::Directory, names: vec![name("b")] }];
    stage.cache.handle_event(stage.now, Event::UpdatePrepare(UpdatePrepare { id: RecallId(9), facts }));
    assert_eq!(known(&mut stage), None);
    let facts = vec![UpdatedFact::Name { dir: ROOT, name: name("b"), entry: None }];
    stage.cache.handle_event(stage.now, Event::UpdateCommit(UpdateCommit { id: RecallId(9), facts }));
    assert_eq!(known(&mut stage), None);
}

#[test]
fn short_lived_name_is_reported_as_made_and_removed() {
    let mut stage = Stage::new();
    for ino in 20..23 {
        stage.push(&[("b", Some((ino, file(0))))]);
        stage.push(&[("b", None)]);
    }
    let told = stage.told();
    assert_eq!(told.len(), 6, "{told:?}");
}

#[test]
fn name_with_a_local_change_in_flight_is_compared_after_its_reply() {
    let mut stage = Stage::new();
    let call = stage.ask(mkdir("d"));
    stage.push(&[("d", Some((30, directory()))), ("e", Some((31, file(0))))]);
    assert_eq!(stage.told(), [RemoteChange::Made { dir: 1, name: name("e"), kind: Kind::File }]);
    stage.set("d", 30, directory());
    stage.set("e", 31, file(0));
    let response = Response::plain(Err(nigh_types::Errno::EXIST));
    stage.cache.handle_event(stage.now, Event::Response { call, response });
    stage.run();
    assert_eq!(stage.told(), [RemoteChange::Made { dir: 1, name: name("d"), kind: Kind::Directory }]);
}

/// The kernel reports local changes at once: an earlier change must not be reported after them.
#[test]
fn remote_change_superseded_by_a_local_change_is_not_reported() {
    let mut stage = Stage::new();
    stage.push(&[("b", Some((11, file(0)))), ("c", Some((12, file(0))))]);
    stage.told();
    stage.push(&[("a", None)]);
    stage.push(&[("b", None), ("x", Some((11, file(0))))]);
    stage.push(&[("c", None), ("y", Some((12, file(0))))]);
    let told: Vec<(u64, RemoteChange)> = std::iter::from_fn(|| stage.cache.poll_change()).collect();
    let left = |stage: &Stage| -> Vec<RemoteChange> {
        told.iter().filter_map(|(number, change)| stage.cache.unreported_part(*number, change)).collect()
    };
    let all: Vec<RemoteChange> = told.iter().map(|(_, change)| change.clone()).collect();
    assert_eq!((all.len(), left(&stage)), (3, all.clone()));
    for (text, ino, before) in [("a", 30, 3), ("b", 31, 2)] {
        let call = stage.ask(mkdir(text));
        assert_eq!(left(&stage).len(), before, "it is not answered");
        stage.respond(call, made(ino));
    }
    let call = stage.ask(Op::Unlink { dir: 1, name: name("y") });
    stage.respond(call, Reply::Removed { node: id(12), pinned: None });
    let arrived = RemoteChange::Made { dir: 1, name: name("x"), kind: Kind::File };
    let went =
        RemoteChange::Removed { dir: 1, name: name("c"), node: id(12), kind: Kind::File, replaced: false };
    assert_eq!(left(&stage), [arrived, went]);
    // A remote change after it is reported.
    stage.push(&[("a", None)]);
    let (number, change) = stage.cache.poll_change().expect("it is gone");
    assert_eq!(stage.cache.unreported_part(number, &change), Some(change.clone()));
    assert_eq!(left(&stage).len(), 2);
    all.iter().chain([&change]).for_each(|change| stage.cache.handle_reported(change));
    assert!(!stage.cache.is_superseded(1, 1, &name("a")), "nothing of the reply is kept");
}
