//! Round-robin queue over origins, and over the sessions of an origin.

use nigh_types::Origin;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::hash::Hash;

/// Queue key of an item: the origin, and the session number (0 for the server itself).
pub(crate) type QueueKey = (Origin, u64);

/// Fair queue of items of many sessions. Before an item of one origin, at most one item of each other origin is
/// served, however many are queued. Sessions within an origin are treated alike.
pub(crate) struct FairQueue<T> {
    /// The only item. With one client that waits for each reply, the queue needs nothing else.
    only: Option<(QueueKey, T)>,
    origins: RoundRobin<Origin, RoundRobin<u64, VecDeque<T>>>,
    len: usize,
}

/// Non-empty queues that are served in turn.
struct RoundRobin<K, Q> {
    queues: FxHashMap<K, Q>,
    order: VecDeque<K>,
}

impl<K, Q> Default for RoundRobin<K, Q> {
    fn default() -> RoundRobin<K, Q> {
        RoundRobin { queues: FxHashMap::default(), order: VecDeque::new() }
    }
}

impl<K: Copy + Eq + Hash, Q: Default> RoundRobin<K, Q> {
    fn queue(&mut self, key: K) -> &mut Q {
        let order = &mut self.order;
        self.queues.entry(key).or_insert_with(|| {
            order.push_back(key);
            Q::default()
        })
    }

    /// Takes from the queue whose turn it is. `take` also returns whether the queue is empty afterwards.
    fn next<T>(&mut self, take: impl FnOnce(&mut Q) -> (Option<T>, bool)) -> Option<T> {
        let key = self.order.pop_front()?;
        let (item, is_empty) = take(self.queues.get_mut(&key)?);
        if is_empty {
            self.queues.remove(&key);
        } else {
            self.order.push_back(key);
        }
        item
    }

    /// Removes a queue that became empty out of turn.
    fn remove(&mut self, key: K) {
        self.queues.remove(&key);
        self.order.retain(|other| *other != key);
    }
}

impl<T> Default for FairQueue<T> {
    fn default() -> FairQueue<T> {
        FairQueue { only: None, origins: RoundRobin::default(), len: 0 }
    }
}

impl<T> FairQueue<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn push(&mut self, share: QueueKey, item: T) {
        self.len += 1;
        if self.len == 1 {
            self.only = Some((share, item));
            return;
        }
        if let Some((share, only)) = self.only.take() {
            self.put(share, only);
        }
        self.put(share, item);
    }

    fn put(&mut self, (origin, session): QueueKey, item: T) {
        self.origins.queue(origin).queue(session).push_back(item);
    }

    pub(crate) fn pop(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        if let Some((_, item)) = self.only.take() {
            return Some(item);
        }
        self.origins.next(|sessions| {
            let item = sessions.next(|queue| {
                let item = queue.pop_front();
                (item, queue.is_empty())
            });
            (item, sessions.queues.is_empty())
        })
    }

    /// Takes the next item whose origin satisfies `is_such`.
    pub(crate) fn pop_of(&mut self, is_such: impl Fn(&Origin) -> bool) -> Option<T> {
        match &self.only {
            Some(((origin, _), _)) => is_such(origin).then(|| self.pop()).flatten(),
            None => {
                let at = self.origins.order.iter().position(is_such)?;
                let origin = self.origins.order.remove(at)?;
                self.origins.order.push_front(origin);
                self.pop()
            }
        }
    }

    /// Counts a session's items that satisfy `is_such`.
    pub(crate) fn count(&self, share: QueueKey, is_such: impl Fn(&T) -> bool) -> usize {
        let only = self.only.iter().filter(|(of, _)| *of == share).map(|(_, item)| item);
        let queue = self.origins.queues.get(&share.0).and_then(|sessions| sessions.queues.get(&share.1));
        only.chain(queue.into_iter().flatten()).filter(|item| is_such(item)).count()
    }

    /// Removes and returns a session's items that satisfy `is_such`.
    pub(crate) fn take(&mut self, share: QueueKey, is_such: impl Fn(&T) -> bool) -> VecDeque<T> {
        let mut taken = VecDeque::new();
        if self.only.as_ref().is_some_and(|(of, item)| *of == share && is_such(item)) {
            taken.extend(self.only.take().map(|(_, item)| item));
        }
        if let Some(sessions) = self.origins.queues.get_mut(&share.0)
            && let Some(queue) = sessions.queues.get_mut(&share.1)
        {
            let (such, left): (VecDeque<T>, VecDeque<T>) = queue.drain(..).partition(is_such);
            taken.extend(such);
            *queue = left;
            if queue.is_empty() {
                sessions.remove(share.1);
            }
            if sessions.queues.is_empty() {
                self.origins.remove(share.0);
            }
        }
        self.len -= taken.len();
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(uid: u32) -> Origin {
        Origin { uid: Some(uid), host: None }
    }

    fn all(queue: &mut FairQueue<&'static str>) -> String {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn queue_with_several_origins_serves_them_and_their_sessions_in_turn() {
        let mut queue = FairQueue::default();
        for (uid, session, item) in
            [(1, 1, "a"), (1, 1, "b"), (1, 2, "c"), (1, 1, "d"), (2, 3, "x"), (2, 3, "y")]
        {
            queue.push((origin(uid), session), item);
        }
        assert_eq!(all(&mut queue), "axcybd");
        assert!(queue.is_empty() && queue.pop().is_none());
    }

    #[test]
    fn late_origin_waits_for_at_most_one_item_of_each_other_origin() {
        let mut queue = FairQueue::default();
        (0..1_000).for_each(|_| queue.push((origin(1), 1), "a"));
        (0..1_000).for_each(|n| queue.push((origin(2), n), "b"));
        queue.push((origin(3), 1), "x");
        assert!([queue.pop(), queue.pop(), queue.pop()].contains(&Some("x")));
    }

    #[test]
    fn items_taken_out_of_turn_leave_the_others_in_order() {
        let mut queue = FairQueue::default();
        let share = (origin(1), 1);
        queue.push(share, "a");
        assert!(queue.take((origin(1), 2), |_| true).is_empty());
        assert_eq!(queue.take(share, |_| true), ["a"], "the only one");
        assert!(queue.is_empty());
        for item in ["a", "b", "c"] {
            queue.push(share, item);
            queue.push((origin(2), 2), "z");
        }
        assert_eq!(queue.count(share, |item| *item != "b"), 2);
        assert_eq!(queue.take(share, |item| *item == "b"), ["b"]);
        assert_eq!(queue.take((origin(2), 2), |_| true).len(), 3);
        assert_eq!(all(&mut queue), "ac");
        assert!(queue.origins.queues.is_empty() && queue.origins.order.is_empty());
    }
}
