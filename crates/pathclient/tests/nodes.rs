//! The registry of nodes: which file ids it keeps, the paths that it knows, and what it forgets.

use nigh_pathclient::{InodeNumbers, Nodes};
use nigh_types::{Attr, Name, NodeId};
use std::collections::BTreeSet;
use std::sync::Arc;

const ROOT: NodeId = NodeId { ino: 2, generation: 1 };
const USER: u32 = 1_000;
const OTHER_USER: u32 = 1_001;

/// File ids are numbers here.
type Registry = Nodes<u32>;

fn registry(capacity: usize) -> Registry {
    let mut nodes = Nodes::new(capacity, InodeNumbers::default());
    nodes.set_root(ROOT);
    nodes
}

fn node(ino: u64) -> NodeId {
    NodeId { ino, generation: 1 }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// Notes that the user reaches a node by its own number as the file id, as `fINO` in the root.
fn note(nodes: &mut Registry, ino: u32) -> Arc<u32> {
    let fid = Arc::new(ino);
    let entry = Some((ROOT, name(&format!("f{ino}"))));
    nodes.note_known(USER, node(u64::from(ino)), Arc::clone(&fid), entry, false);
    fid
}

fn known(nodes: &mut Registry, user: u32, inos: impl IntoIterator<Item = u64>) -> Vec<u64> {
    inos.into_iter().filter(|ino| nodes.known(user, node(*ino)).is_some()).collect()
}

fn sized(size: u64) -> Attr {
    Attr { size, ..Attr::default() }
}

#[test]
fn users_reach_a_node_by_file_ids_of_their_own() {
    let mut nodes = registry(8);
    nodes.note_known(USER, node(10), Arc::new(1), None, false);
    nodes.note_known(OTHER_USER, node(10), Arc::new(2), None, true);
    let mine = nodes.known(USER, node(10)).unwrap();
    assert_eq!((*mine.fid, mine.open), (1, false));
    let theirs = nodes.known(OTHER_USER, node(10)).unwrap();
    assert_eq!((*theirs.fid, theirs.open), (2, true));
    assert_eq!(nodes.forget(USER, node(10)).map(|known| *known.fid), Some(1));
    assert!(nodes.known(USER, node(10)).is_none());
    assert!(nodes.known(OTHER_USER, node(10)).is_some());
}

#[test]
fn same_number_of_another_generation_is_another_node() {
    let mut nodes = registry(8);
    let (first, second) = (nodes.node_id(77, 1), nodes.node_id(77, 2));
    assert_eq!((first.ino, second.ino), (77, 77));
    nodes.note_known(USER, first, Arc::new(1), None, false);
    assert!(nodes.known(USER, second).is_none());
}

#[test]
fn least_recently_used_file_id_is_dropped_first() {
    let mut nodes = registry(3);
    let fids: Vec<Arc<u32>> = (10..13).map(|ino| note(&mut nodes, ino)).collect();
    nodes.note_attr(node(11), sized(1));
    assert!(nodes.known(USER, node(10)).is_some(), "10 is used again, so 11 is the least recently used");
    note(&mut nodes, 13);
    assert_eq!(known(&mut nodes, USER, 10..14), [10, 12, 13]);
    assert_eq!(Arc::strong_count(&fids[1]), 1, "the registry has dropped it");
    assert_eq!(nodes.attr(node(11)), None, "its attributes go too");
    note(&mut nodes, 14);
    assert_eq!(known(&mut nodes, USER, 10..15), [12, 13, 14]);
}

#[test]
fn replaced_file_id_is_dropped_and_takes_no_room() {
    let mut nodes = registry(2);
    let first = note(&mut nodes, 10);
    note(&mut nodes, 11);
    for _ in 0..5 {
        note(&mut nodes, 10);
    }
    assert_eq!(Arc::strong_count(&first), 1);
    assert_eq!(known(&mut nodes, USER, [10, 11]), [10, 11]);
}

/// Whatever is noted, looked for and forgotten, at most `capacity` file ids stay alive.
#[test]
fn file_ids_never_exceed_the_capacity() {
    let mut nodes = registry(5);
    let mut fids = Vec::new();
    for step in 0..500_u32 {
        let ino = step * 7 % 11;
        match step % 5 {
            0 => drop(nodes.forget(USER, node(u64::from(ino)))),
            1 => drop(nodes.known(USER, node(u64::from(ino)))),
            2 => nodes.reset_reused(node(u64::from(ino / 2))),
            _ => fids.push(note(&mut nodes, ino)),
        }
        let alive = fids.iter().filter(|fid| Arc::strong_count(fid) > 1).count();
        assert!(alive <= 5, "{alive} file ids after step {step}");
    }
}

#[test]
fn path_leads_from_the_root_to_the_node() {
    let mut nodes = registry(8);
    nodes.note_parent_entry(node(10), ROOT, &name("a"));
    nodes.note_parent_entry(node(11), node(10), &name("b"));
    nodes.note_known(USER, node(12), Arc::new(1), Some((node(11), name("c"))), false);
    assert_eq!(nodes.path(ROOT), Some(vec![]));
    assert_eq!(nodes.path(node(12)), Some(vec![name("a"), name("b"), name("c")]));
    assert_eq!(nodes.path(node(13)), None, "never seen");
    nodes.note_parent_entry(node(11), ROOT, &name("moved"));
    assert_eq!(nodes.path(node(12)), Some(vec![name("moved"), name("c")]), "the latest name counts");
    nodes.note_name_removed(node(11), (ROOT, &name("moved")));
    assert_eq!(nodes.path(node(12)), None, "its directory has no known name");
}

#[test]
fn path_in_a_circle_is_none() {
    let mut nodes = registry(8);
    nodes.note_parent_entry(node(10), node(11), &name("a"));
    nodes.note_parent_entry(node(11), node(10), &name("b"));
    assert_eq!(nodes.path(node(10)), None);
}

#[test]
fn removed_name_takes_its_file_ids_along_for_all_users() {
    let mut nodes = registry(8);
    let (old, other) = (Some((ROOT, name("old"))), Some((ROOT, name("other"))));
    nodes.note_known(USER, node(10), Arc::new(1), old.clone(), false);
    nodes.note_known(OTHER_USER, node(10), Arc::new(2), old.clone(), false);
    nodes.note_known(3, node(10), Arc::new(3), other, false);
    nodes.note_known(USER, node(11), Arc::new(4), old, false);
    nodes.note_name_removed(node(10), (ROOT, &name("old")));
    assert_eq!(known(&mut nodes, USER, [10, 11]), [11], "another node that had the name before or after");
    assert_eq!(known(&mut nodes, OTHER_USER, [10]), [0; 0]);
    assert_eq!(known(&mut nodes, 3, [10]), [10], "it was reached by another name");
    assert_eq!(nodes.path(node(10)), Some(vec![name("other")]), "the latest name was another one");
}

#[test]
fn moved_directory_may_take_all_directories_along() {
    let mut nodes = registry(8);
    let dir = NodeId { ino: 20, generation: 2 };
    nodes.note_known(USER, dir, Arc::new(1), None, false);
    nodes.note_known(OTHER_USER, dir, Arc::new(2), None, false);
    note(&mut nodes, 10);
    nodes.forget_nodes(|node| node.generation == 2);
    assert!(nodes.known(USER, dir).is_none() && nodes.known(OTHER_USER, dir).is_none());
    assert!(nodes.known(USER, node(10)).is_some());
}

#[test]
fn links_are_the_known_names_of_a_node() {
    let mut nodes = registry(8);
    nodes.note_link(node(10), ROOT, &name("a"));
    nodes.note_link(node(10), node(20), &name("b"));
    nodes.note_link(node(10), ROOT, &name("a"));
    assert_eq!(nodes.links(node(10)), [(ROOT, name("a")), (node(20), name("b"))]);
    nodes.note_name_removed(node(10), (ROOT, &name("a")));
    assert_eq!(nodes.links(node(10)), [(node(20), name("b"))]);
    assert_eq!(nodes.links(node(11)), []);
}

#[test]
fn created_node_has_nothing_of_the_inode_before_it() {
    let mut nodes = registry(8);
    let fid = note(&mut nodes, 10);
    nodes.note_attr(node(10), sized(5));
    nodes.note_link(node(10), ROOT, &name("a"));
    nodes.reset_reused(node(10));
    assert!(nodes.known(USER, node(10)).is_none());
    assert_eq!((nodes.attr(node(10)), nodes.links(node(10))), (None, vec![]));
    assert_eq!(Arc::strong_count(&fid), 1);
}

#[test]
fn unused_file_id_is_taken_and_a_shared_or_open_one_is_not() {
    let mut nodes = registry(8);
    let held = note(&mut nodes, 10);
    assert!(nodes.take_unused(USER, node(10)).is_none(), "a call has it");
    drop(held);
    let taken = nodes.take_unused(USER, node(10)).expect("it is unused");
    assert_eq!((*taken.fid, taken.parent_entry), (10, Some((ROOT, name("f10")))));
    assert!(nodes.known(USER, node(10)).is_none());
    nodes.note_known(USER, node(11), Arc::new(1), None, true);
    assert!(nodes.take_unused(USER, node(11)).is_none(), "it is open for reading");
}

#[test]
fn nothing_but_the_root_outlives_the_connection() {
    let mut nodes = registry(8);
    let fid = note(&mut nodes, 10);
    nodes.note_attr(node(10), sized(5));
    nodes.note_link(node(10), ROOT, &name("a"));
    nodes.clear();
    assert_eq!(Arc::strong_count(&fid), 1);
    assert!(nodes.known(USER, node(10)).is_none());
    assert_eq!((nodes.attr(node(10)), nodes.links(node(10)), nodes.path(node(10))), (None, vec![], None));
    assert_eq!((nodes.root(), nodes.path(ROOT)), (Some(ROOT), Some(vec![])));
}

/// Names, links and attributes of nodes without file ids are bounded too.
#[test]
fn facts_without_file_ids_are_bounded() {
    let mut nodes = registry(4);
    let inos = 10..1_000;
    for ino in inos.clone() {
        nodes.note_attr(node(ino), sized(ino));
        nodes.note_parent_entry(node(ino), ROOT, &name("n"));
        nodes.note_link(node(ino), ROOT, &name("n"));
    }
    let count = |is_one: &dyn Fn(NodeId) -> bool| inos.clone().filter(|ino| is_one(node(*ino))).count();
    assert!(count(&|node| nodes.attr(node).is_some()) <= 9);
    assert!(count(&|node| nodes.path(node).is_some()) <= 17);
    assert!(count(&|node| !nodes.links(node).is_empty()) <= 5);
    assert_eq!(nodes.attr(node(999)), Some(sized(999)), "the latest is there");
}

#[test]
fn node_ids_of_reserved_numbers_are_distinct() {
    let nodes = registry(8);
    let ids: BTreeSet<NodeId> = [0, 1, 5, 1 << 62, u64::MAX].map(|number| nodes.node_id(number, 1)).into();
    assert_eq!(ids.len(), 5);
    assert!(ids.contains(&node(5)));
}
