//! Prefetch, where the remote supports it.

use super::Named;
use super::caller::{Caller, at, name};
use nigh_types::{Call, CallId, Entry, Errno, Name, NodeId, NodeRef, PrefetchOrder, Reply, Response};
use std::collections::{BTreeMap, BTreeSet};

pub(super) const CASES: &[Named] = &[
    ("a_walk_tells_each_directory_before_what_is_beside_it", in_order),
    ("a_walk_tells_what_a_listing_tells", as_listed),
    ("prefetch_sends_a_directory_once_that_is_found_twice", found_twice),
    ("a_walk_goes_no_further_than_it_may", with_credit),
    ("who_wants_a_directory_is_told_it_next", wanted),
    ("requested_directories_come_before_what_is_found_below_one_of_them", requested_together),
    ("a_walk_of_what_is_no_directory_leaves_it_out", left_out),
    ("a_walk_is_cancelled_while_it_waits", cancelled),
];

/// `a` to `c` in the root, `x` and `y` in each of them, and a file in each directory; returns the directories by path.
fn tree(c: &mut Caller<'_>) -> Option<BTreeMap<String, NodeRef>> {
    if !c.session.supports.prefetch {
        return None;
    }
    let (root, mut places) = (c.root(), BTreeMap::new());
    for above in ["a", "b", "c"] {
        let dir = c.mkdir(&root, above.as_bytes());
        c.file(&dir, b"file", b"1");
        for below in ["x", "y"] {
            let leaf = c.mkdir(&dir, below.as_bytes());
            c.file(&leaf, b"file", b"22");
            places.insert(format!("{above}/{below}"), leaf);
        }
        places.insert(above.to_owned(), dir);
    }
    Some(places)
}

fn start(c: &mut Caller<'_>, roots: &[&NodeRef], credit: u32) -> CallId {
    let roots = roots.iter().map(|place| (*place).clone()).collect();
    c.start(Call::Prefetch { roots, order: PrefetchOrder::Name, credit })
}

fn add_credit(c: &mut Caller<'_>, walk: CallId, credit: u32, want: Option<&NodeRef>) {
    c.start(Call::PrefetchCredit { walk, credit, want: want.cloned() });
}

type Prefetched = (NodeId, Option<Vec<(Name, Entry)>>);

/// Prefetched directories in order of arrival, with their names; `None`: left out.
fn prefetched(responses: &[Response]) -> Vec<Prefetched> {
    let mut told: Vec<Prefetched> = Vec::new();
    let mut goes_on = false;
    for response in responses {
        let Ok(Reply::Prefetched(steps)) = &response.result else { panic!("{response:?}") };
        for step in steps {
            let entries = step.listed.as_ref().map(|listed| listed.entries.clone());
            match told.last_mut().filter(|(dir, _)| goes_on && *dir == step.dir) {
                Some((_, Some(before))) => before.extend(entries.into_iter().flatten()),
                _ => told.push((step.dir, entries)),
            }
            goes_on = !step.last;
        }
    }
    told
}

fn dirs(responses: &[Response]) -> Vec<NodeId> {
    prefetched(responses).into_iter().map(|(dir, _)| dir).collect()
}

fn in_order(c: &mut Caller<'_>) {
    let Some(places) = tree(c) else { return };
    let walk = start(c, &[&places["a"], &places["b"], &places["c"]], 1_000);
    let responses = c.finish(walk);
    let expected: Vec<NodeId> = places.values().map(|place| place.node).collect();
    assert_eq!(dirs(&responses), in_some_order(c, expected, &["a", "b", "c"].map(|root| places[root].node)));
    let walk = start(c, &[&places["c"], &places["a"]], 1_000);
    let responses = c.finish(walk);
    let expected = ["c", "c/x", "c/y", "a", "a/x", "a/y"].map(|path| places[path].node);
    assert_eq!(dirs(&responses), in_some_order(c, expected.to_vec(), &[places["c"].node, places["a"].node]));
}

/// The order in which the remote sends directories: where the session prefetches, those found below others may come after
/// those beside them, and here all of `roots` come first.
fn in_some_order(c: &Caller<'_>, depth_first: Vec<NodeId>, roots: &[NodeId]) -> Vec<NodeId> {
    if !c.session.supports.prefetch_in_session {
        return depth_first;
    }
    let below = depth_first.into_iter().filter(|dir| !roots.contains(dir));
    roots.iter().copied().chain(below).collect()
}

/// A directory that is pending is found again below another, as after a rename.
fn found_twice(c: &mut Caller<'_>) {
    let Some(places) = tree(c) else { return };
    let walk = start(c, &[&places["a"], &places["a/x"], &places["b/y"], &places["b"]], 1_000);
    let sent = dirs(&c.finish(walk));
    let expected = match c.session.supports.prefetch_in_session {
        true => &["a", "a/x", "b/y", "b", "a/y", "b/x"][..],
        false => &["a", "a/y", "a/x", "b/y", "b", "b/x", "b/y"],
    };
    assert!(sent.into_iter().eq(expected.iter().map(|path| places[*path].node)));
}

fn as_listed(c: &mut Caller<'_>) {
    if tree(c).is_none() {
        return;
    }
    let root = c.root();
    // Several chunks of a listing; a session that prefetches sends whole directories, and some servers create slowly.
    let files = if c.session.supports.prefetch_in_session { 50 } else { 700 };
    for n in 0..files {
        c.file(&root, format!("file-{n}").as_bytes(), b"");
    }
    let walk = start(c, &[&root], 10_000);
    let responses = c.finish(walk);
    let mut places = BTreeMap::from([(root.node, root.clone())]);
    for (dir, entries) in prefetched(&responses) {
        let entries = entries.expect("it is told");
        let below = entries
            .iter()
            .map(|(leaf, entry)| (entry.id, at(&NodeRef::without_hint(dir), leaf.as_bytes(), entry.id)));
        places.extend(below);
        let listed = c.list(&places[&dir]);
        let of_walk = entries.into_iter().map(|(name, entry)| (name, entry.id));
        let of_listing = listed.into_iter().map(|(name, listee)| (name, listee.id));
        assert!(of_walk.eq(of_listing));
    }
}

fn with_credit(c: &mut Caller<'_>) {
    let Some(places) = tree(c) else { return };
    let walk = start(c, &[&places["a"], &places["b"], &places["c"]], 2);
    // `a` has three names: more than the credit, and sent whole.
    let so_far = c.so_far(walk, 1);
    assert_eq!(dirs(&so_far), [places["a"].node]);
    add_credit(c, walk, 3, None);
    let root = c.root();
    c.getattr(&root);
    // One unit of the credit is left, and a directory with one name takes two.
    let so_far = c.so_far(walk, 2);
    assert_eq!(dirs(&so_far), [places["a"].node, places["a/x"].node]);
    add_credit(c, walk, 1_000, None);
    assert_eq!(dirs(&c.finish(walk)).len(), 9);
}

fn wanted(c: &mut Caller<'_>) {
    let Some(places) = tree(c) else { return };
    let walk = start(c, &[&places["a"], &places["b"], &places["c"]], 1);
    c.so_far(walk, 1);
    add_credit(c, walk, 0, Some(&places["c"]));
    let so_far = c.so_far(walk, 2);
    assert_eq!(dirs(&so_far), [places["a"].node, places["c"].node]);
    // A directory found meanwhile, one that was sent already, and one not mentioned before.
    add_credit(c, walk, 0, Some(&places["c/y"]));
    add_credit(c, walk, 0, Some(&places["a"]));
    add_credit(c, walk, 0, Some(&places["b/y"]));
    let so_far = c.so_far(walk, 4);
    assert_eq!(dirs(&so_far)[2..], [places["c/y"].node, places["b/y"].node]);
    add_credit(c, walk, 1_000, None);
    let all = dirs(&c.finish(walk));
    assert!(places.values().all(|place| all.contains(&place.node)), "{all:?}");
}

/// Two directories are requested at a time, without credit.
fn requested_together(c: &mut Caller<'_>) {
    let Some(places) = tree(c) else { return };
    let walk = start(c, &[&places["a"], &places["b"], &places["c"]], 1);
    c.so_far(walk, 1);
    add_credit(c, walk, 0, Some(&places["b"]));
    add_credit(c, walk, 0, Some(&places["c"]));
    let sent: BTreeSet<NodeId> = dirs(&c.so_far(walk, 3))[1..].iter().copied().collect();
    assert_eq!(sent, BTreeSet::from([places["b"].node, places["c"].node]));
    add_credit(c, walk, 1_000, None);
    assert_eq!(dirs(&c.finish(walk)).len(), places.len());
}

fn left_out(c: &mut Caller<'_>) {
    let Some(places) = tree(c) else { return };
    let root = c.root();
    let file = c.file(&root, b"plain", b"");
    let gone = c.mkdir(&root, b"gone");
    c.ok(Call::Rmdir { dir: root, name: name(b"gone") });
    let walk = start(c, &[&file, &gone, &places["a/x"]], 1_000);
    let responses = c.finish(walk);
    let told = prefetched(&responses);
    assert_eq!(
        told.iter().map(|(dir, _)| *dir).collect::<Vec<_>>(),
        [file.node, gone.node, places["a/x"].node]
    );
    assert_eq!(told.iter().map(|(_, names)| names.is_some()).collect::<Vec<_>>(), [false, false, true]);
}

fn cancelled(c: &mut Caller<'_>) {
    let Some(places) = tree(c) else { return };
    // More often than the limit on concurrent prefetches.
    for _ in 0..40 {
        let walk = start(c, &[&places["a"], &places["b"]], 1);
        c.so_far(walk, 1);
        c.cancel(walk);
        let responses = c.finish(walk);
        assert_eq!(responses.last().map(|response| response.result.clone()), Some(Err(Errno::INTR)));
    }
}
