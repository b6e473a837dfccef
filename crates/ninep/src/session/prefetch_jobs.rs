//! State of running prefetches: the directories still to send, and the credit for them.

use super::fids::Fid;
use nigh_types::{Cookie, CookieKey, Name, NodeId, NodeRef, PrefetchOrder};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The most directories that are read at a time, and the most at first.
const MOST_AT_ONCE: usize = 64;
const FIRST_AT_ONCE: usize = 8;
/// The most directories that wait.
const MOST_WAITING: usize = 1 << 20;

/// A running prefetch.
///
/// Invariants: requested directories are the last ones of `stack`; `waiting` has the ids of `stack`.
#[derive(Debug)]
pub(crate) struct PrefetchJob {
    order: PrefetchOrder,
    /// At least the credit that the client counts: it waits for directories as long as it counts some.
    credit: i64,
    /// Directories still to send, the next one last.
    stack: Vec<Waiting>,
    waiting: BTreeSet<NodeId>,
    /// Directories in `stack` or `current` that the client has requested: they cost no credit.
    wanted: BTreeSet<NodeId>,
    /// Directories that are being read.
    current: BTreeSet<NodeId>,
    sent: BTreeSet<NodeId>,
    at_once: usize,
}

#[derive(Debug)]
struct Waiting {
    place: NodeRef,
    /// A fid of the directory above, if it was read by this job.
    parent: Option<Arc<Fid>>,
}

/// A directory to read.
#[derive(Debug)]
pub(crate) struct Target {
    pub place: NodeRef,
    pub parent: Option<Arc<Fid>>,
    /// Credit that was taken for it.
    paid: i64,
}

impl PrefetchJob {
    pub fn new(roots: &[NodeRef], order: PrefetchOrder, credit: u32) -> PrefetchJob {
        let mut job = PrefetchJob {
            order,
            credit: i64::from(credit),
            stack: Vec::new(),
            waiting: BTreeSet::new(),
            wanted: BTreeSet::new(),
            current: BTreeSet::new(),
            sent: BTreeSet::new(),
            at_once: FIRST_AT_ONCE,
        };
        for place in roots.iter().rev() {
            if job.waiting.insert(place.node) {
                job.stack.push(Waiting { place: place.clone(), parent: None });
            }
        }
        job
    }

    /// Whether nothing is left to send.
    pub fn is_done(&self) -> bool {
        self.stack.is_empty()
    }

    /// Whether the next directory may be read.
    pub fn may_go_on(&self) -> bool {
        self.is_done() || self.credit > 0 || !self.wanted.is_empty()
    }

    /// Adds credit, and the directory to send next. One that is being read comes with the next reply.
    pub fn steer(&mut self, credit: u32, want: Option<&NodeRef>) {
        self.credit += i64::from(credit);
        let Some(want) = want else { return };
        let waits = self.waiting.contains(&want.node);
        if self.current.contains(&want.node) {
            self.wanted.insert(want.node);
            return;
        }
        if self.sent.contains(&want.node) && !waits {
            return;
        }
        let at = self.stack.iter().rposition(|waiting| waits && waiting.place.node == want.node);
        let parent = at.and_then(|at| self.stack.remove(at).parent);
        self.stack.push(Waiting { place: want.clone(), parent });
        self.waiting.insert(want.node);
        self.wanted.insert(want.node);
    }

    /// Takes the next directories to read: of those that were not requested no more than there is credit.
    pub fn take_next(&mut self) -> Vec<Target> {
        let mut targets = Vec::new();
        let mut left = usize::try_from(self.credit).unwrap_or(0).min(self.at_once);
        while targets.len() < MOST_AT_ONCE
            && let Some(next) = self.stack.last().map(|next| next.place.node)
            && (left > 0 || self.wanted.contains(&next))
            && let Some(Waiting { place, parent }) = self.stack.pop()
        {
            self.waiting.remove(&place.node);
            self.current.insert(place.node);
            left -= usize::from(!self.wanted.contains(&place.node));
            targets.push(Target { place, parent, paid: 0 });
        }
        targets
    }

    /// Whether the client has requested a directory that is not sent yet.
    pub fn is_wanted(&self, dir: NodeId) -> bool {
        self.wanted.contains(&dir)
    }

    /// Takes the credit for a directory with that many names. Returns false if there is none: it comes later.
    pub fn pay(&mut self, target: &mut Target, names: usize) -> bool {
        if self.is_wanted(target.place.node) {
            return true;
        }
        if self.credit <= 0 {
            return false;
        }
        target.paid = cost(names);
        self.credit -= target.paid;
        true
    }

    /// Gives back what was paid for names that are not sent. `sent`: the number of names; `None`: the directory is left out.
    pub fn refund(&mut self, target: &Target, sent: Option<usize>) {
        self.credit += (target.paid - sent.map_or(0, cost)).max(0);
    }

    /// Returns directories that there was no credit for.
    pub fn put_back(&mut self, targets: impl DoubleEndedIterator<Item = Target>) {
        let at = self.first_wanted();
        let requested = self.stack.split_off(at);
        for Target { place, parent, .. } in targets.rev() {
            self.current.remove(&place.node);
            if self.waiting.insert(place.node) {
                self.stack.push(Waiting { place, parent });
            }
        }
        self.stack.extend(requested);
    }

    /// Notes that the directories that are being read are sent.
    pub fn note_sent(&mut self) {
        self.at_once = (2 * self.current.len()).clamp(1, MOST_AT_ONCE);
        for dir in &self.current {
            self.wanted.remove(dir);
        }
        self.sent.append(&mut self.current);
    }

    /// Adds the directories that were found in one, unless they wait already: it may have been moved. `parent`: a fid of
    /// that one.
    pub fn add_found(
        &mut self,
        (dir, parent): (NodeId, Option<&Arc<Fid>>),
        mut found: Vec<(Name, NodeId)>,
        key: CookieKey,
    ) {
        fn place((name, node): &(Name, NodeId), key: CookieKey) -> (Cookie, &[u8], u64) {
            (key.cookie(name.as_bytes()), name.as_bytes(), node.ino)
        }
        found.sort_by(|a, b| self.order.compare(place(a, key), place(b, key)));
        let mut room = MOST_WAITING.saturating_sub(self.stack.len());
        let mut added: Vec<Waiting> = Vec::new();
        for (name, node) in found {
            if room > 0 && !self.current.contains(&node) && self.waiting.insert(node) {
                let place = NodeRef { node, path_hint: Some((dir, name)) };
                added.push(Waiting { place, parent: parent.cloned() });
                room -= 1;
            }
        }
        let at = self.first_wanted();
        self.stack.splice(at..at, added.into_iter().rev());
    }

    /// Index of the first requested directory in `stack`.
    fn first_wanted(&self) -> usize {
        let is_requested = |waiting: &&Waiting| self.wanted.contains(&waiting.place.node);
        self.stack.len() - self.stack.iter().rev().take_while(is_requested).count()
    }
}

/// The credit that a directory costs.
fn cost(names: usize) -> i64 {
    i64::try_from(names).unwrap_or(i64::MAX).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: CookieKey = CookieKey(*b"sixteen bytes ok");

    fn node(ino: u64) -> NodeId {
        NodeId { ino, generation: 2 }
    }

    fn place(ino: u64) -> NodeRef {
        NodeRef::without_hint(node(ino))
    }

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    fn next(job: &mut PrefetchJob) -> Vec<u64> {
        job.take_next().iter().map(|target| target.place.node.ino).collect()
    }

    #[test]
    fn found_directories_precede_those_beside_and_follow_requested_ones() {
        let mut job = PrefetchJob::new(&[place(1), place(2)], PrefetchOrder::Name, 1);
        job.at_once = 1;
        assert_eq!(next(&mut job), [1]);
        job.steer(0, Some(&place(9)));
        job.note_sent();
        job.add_found(
            (node(1), None),
            vec![(name("b"), node(12)), (name("a"), node(11)), (name("c"), node(2))],
            KEY,
        );
        (job.at_once, job.credit) = (9, 9);
        assert_eq!(next(&mut job), [9, 11, 12, 2], "the last one waited already");
        assert!(job.is_done());
    }

    #[test]
    fn without_credit_only_requested_directories_come() {
        let mut job = PrefetchJob::new(&[place(1), place(2), place(3)], PrefetchOrder::Cookie, 2);
        let mut targets = job.take_next();
        assert_eq!(targets.len(), 2);
        assert!(job.pay(&mut targets[0], 1));
        assert!(!job.pay(&mut targets[1], 1), "the credit is used up");
        job.put_back(targets.drain(1..));
        job.note_sent();
        assert!(!job.may_go_on());
        assert!(job.take_next().is_empty());
        for wanted in [3, 1] {
            job.steer(0, Some(&place(wanted)));
        }
        assert!(job.may_go_on());
        assert_eq!(next(&mut job), [3], "the first one was sent");
        job.steer(0, Some(&place(3)));
        assert!(next(&mut job).is_empty(), "it is being read");
        job.steer(1, None);
        assert_eq!(next(&mut job), [2]);
    }

    /// The client requests it once.
    #[test]
    fn directory_that_is_requested_while_it_is_read_is_sent_without_credit() {
        let mut job = PrefetchJob::new(&[place(1), place(2), place(3)], PrefetchOrder::Cookie, 3);
        let mut targets = job.take_next();
        assert_eq!(targets.len(), 3);
        assert!(job.pay(&mut targets[0], 5));
        job.steer(0, Some(&place(2)));
        assert!(job.pay(&mut targets[1], 5), "it was requested");
        assert!(!job.pay(&mut targets[2], 5));
        job.put_back(targets.drain(2..));
        job.note_sent();
        assert!(!job.may_go_on());
        job.steer(9, None);
        assert_eq!(next(&mut job), [3]);
    }

    /// The client counts what it got: it would wait for what it believes to be paid.
    #[test]
    fn credit_for_names_that_are_not_sent_is_given_back() {
        let mut job = PrefetchJob::new(&[place(1), place(2), place(3)], PrefetchOrder::Cookie, 10);
        let mut targets = job.take_next();
        assert!(job.pay(&mut targets[0], 5) && job.pay(&mut targets[1], 5));
        job.refund(&targets[0], None);
        job.refund(&targets[1], Some(3));
        // 10 less 12, and 6 and 2 back.
        assert_eq!(job.credit, 6);
    }

    /// Each costs one at least.
    #[test]
    fn no_more_directories_are_read_than_there_is_credit() {
        let mut job = PrefetchJob::new(&[place(1), place(2), place(3)], PrefetchOrder::Cookie, 1);
        assert_eq!(next(&mut job), [1]);
        job.note_sent();
        job.steer(8, None);
        assert_eq!(next(&mut job), [2, 3], "twice as many as were sent");
    }
}
