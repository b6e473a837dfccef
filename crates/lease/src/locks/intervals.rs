//! Interval tree: locked ranges of many owners, found by overlap.

use super::LockOwner;
use nigh_types::LockInfo;
use std::cmp::Ordering;

/// A balanced tree (AVL) of ranges, by start. Each node knows the furthest end below it, and the furthest end of any
/// owner other than that range's. So a search skips all subtrees without an overlap, also where the ranges of one owner
/// do not count: it takes time with the logarithm of the number of ranges, whichever owners chose them.
#[derive(Default, Debug)]
pub(super) struct Intervals {
    root: Link,
}

type Link = Option<Box<Node>>;

#[derive(Debug)]
struct Node {
    at: Interval,
    height: u8,
    furthest: Furthest,
    left: Link,
    right: Link,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Interval {
    pub(super) owner: LockOwner,
    pub(super) info: LockInfo,
}

impl Interval {
    /// An owner's ranges do not overlap, so each has a start of its own.
    fn key(&self) -> (u64, LockOwner) {
        (self.info.start, self.owner)
    }
}

/// The furthest end of some ranges.
#[derive(Clone, Copy, Debug)]
struct Furthest {
    end: u64,
    owner: LockOwner,
    /// The furthest end of any other owner.
    other: Option<u64>,
}

impl Furthest {
    fn of(at: &Interval) -> Furthest {
        Furthest { end: at.info.end, owner: at.owner, other: None }
    }

    fn with(self, more: Option<Furthest>) -> Furthest {
        let Some(more) = more else { return self };
        let (far, near) = if self.end >= more.end { (self, more) } else { (more, self) };
        let other = if far.owner == near.owner { near.other } else { Some(near.end) };
        Furthest { other: far.other.max(other), ..far }
    }

    /// The furthest end without the ranges of that owner.
    fn except(self, owner: LockOwner) -> Option<u64> {
        if self.owner == owner { self.other } else { Some(self.end) }
    }
}

/// A search: ranges that overlap these bytes, of all owners but one.
#[derive(Clone, Copy)]
pub(super) struct OverlapQuery {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) not_of: LockOwner,
}

impl Intervals {
    pub(super) fn insert(&mut self, at: Interval) {
        self.root = Some(insert(self.root.take(), at));
    }

    pub(super) fn remove(&mut self, at: &Interval) {
        self.root = remove(self.root.take(), at.key());
    }

    /// The overlapping ranges, in the order of their starts.
    pub(super) fn overlapping(&self, wanted: OverlapQuery) -> impl Iterator<Item = &Interval> {
        std::iter::successors(first(&self.root, None, wanted), move |found| {
            first(&self.root, Some(found.key()), wanted)
        })
    }
}

fn first(link: &Link, after: Option<(u64, LockOwner)>, wanted: OverlapQuery) -> Option<&Interval> {
    let node = link.as_ref()?;
    if node.furthest.except(wanted.not_of).is_none_or(|end| end < wanted.start) {
        return None;
    }
    let at = &node.at;
    if after.is_none_or(|after| at.key() > after) {
        let found = first(&node.left, after, wanted);
        if found.is_some() || at.info.start > wanted.end {
            return found;
        }
        if at.owner != wanted.not_of && at.info.end >= wanted.start {
            return Some(at);
        }
    } else if at.info.start > wanted.end {
        return None;
    }
    first(&node.right, after, wanted)
}

fn insert(link: Link, at: Interval) -> Box<Node> {
    let Some(mut node) = link else {
        return Box::new(Node { at, height: 1, furthest: Furthest::of(&at), left: None, right: None });
    };
    if at.key() < node.at.key() {
        node.left = Some(insert(node.left.take(), at));
    } else {
        node.right = Some(insert(node.right.take(), at));
    }
    balanced(node)
}

fn remove(link: Link, key: (u64, LockOwner)) -> Link {
    let mut node = link?;
    match key.cmp(&node.at.key()) {
        Ordering::Less => node.left = remove(node.left.take(), key),
        Ordering::Greater => node.right = remove(node.right.take(), key),
        Ordering::Equal => {
            let (left, right) = (node.left.take(), node.right.take());
            let Some(right) = right else { return left };
            let (mut next, rest) = split_first(right);
            (next.left, next.right) = (left, rest);
            return Some(balanced(next));
        }
    }
    Some(balanced(node))
}

/// Splits a tree into its first node and the rest.
fn split_first(mut node: Box<Node>) -> (Box<Node>, Link) {
    match node.left.take() {
        None => {
            let rest = node.right.take();
            (node, rest)
        }
        Some(left) => {
            let (first, rest) = split_first(left);
            node.left = rest;
            (first, Some(balanced(node)))
        }
    }
}

fn height(link: &Link) -> u8 {
    link.as_ref().map_or(0, |node| node.height)
}

/// Rebalances a node after one of its sides grew or shrank by one.
fn balanced(mut node: Box<Node>) -> Box<Node> {
    let (left, right) = (height(&node.left), height(&node.right));
    if left > right + 1 {
        node.left = node
            .left
            .take()
            .map(|left| if height(&left.left) < height(&left.right) { turned_left(left) } else { left });
        return turned_right(node);
    }
    if right > left + 1 {
        node.right = node.right.take().map(|right| {
            if height(&right.right) < height(&right.left) { turned_right(right) } else { right }
        });
        return turned_left(node);
    }
    node.note();
    node
}

fn turned_right(mut node: Box<Node>) -> Box<Node> {
    let Some(mut top) = node.left.take() else { return node };
    node.left = top.right.take();
    node.note();
    top.right = Some(node);
    top.note();
    top
}

fn turned_left(mut node: Box<Node>) -> Box<Node> {
    let Some(mut top) = node.right.take() else { return node };
    node.right = top.left.take();
    node.note();
    top.left = Some(node);
    top.note();
    top
}

impl Node {
    /// Updates the summary of a node whose sides have changed.
    fn note(&mut self) {
        self.height = 1 + height(&self.left).max(height(&self.right));
        let below = |link: &Link| link.as_ref().map(|node| node.furthest);
        self.furthest = Furthest::of(&self.at).with(below(&self.left)).with(below(&self.right));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::LockKind;
    use proptest::prelude::*;

    fn interval(owner: u64, start: u64, end: u64) -> Interval {
        let owner = LockOwner { session: owner, flock: false, owner: 1 };
        Interval { owner, info: LockInfo { kind: LockKind::Write, start, end, pid: 1 } }
    }

    fn depth(link: &Link) -> u8 {
        let Some(node) = link else { return 0 };
        let (left, right) = (depth(&node.left), depth(&node.right));
        assert!(left.abs_diff(right) <= 1 && node.height == 1 + left.max(right));
        node.height
    }

    proptest! {
        #[test]
        fn interval_search_finds_overlaps_of_other_owners(
            steps in prop::collection::vec((1..5_u64, 0..60_u64, 0..20_u64, any::<bool>()), 1..200),
            wanted in prop::collection::vec((0..6_u64, 0..70_u64, 0..30_u64), 1..20),
        ) {
            let (mut tree, mut plain) = (Intervals::default(), Vec::<Interval>::new());
            for (owner, start, length, adds) in steps {
                let at = interval(owner, start, start + length);
                if let Some(known) = plain.iter().position(|other| other.key() == at.key()) {
                    tree.remove(&plain.swap_remove(known));
                }
                if adds {
                    tree.insert(at);
                    plain.push(at);
                }
                depth(&tree.root);
            }
            plain.sort_by_key(Interval::key);
            for (owner, start, length) in wanted {
                let (end, not_of) = (start + length, interval(owner, 0, 0).owner);
                let found: Vec<_> = tree.overlapping(OverlapQuery { start, end, not_of }).copied().collect();
                let overlaps = |at: &&Interval| {
                    at.owner != not_of && at.info.start <= end && at.info.end >= start
                };
                prop_assert_eq!(found, plain.iter().filter(overlaps).copied().collect::<Vec<_>>());
            }
        }
    }
}
