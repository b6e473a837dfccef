//! Queue of invalidations that wait to be sent to the kernel.
//!
//! A notifier takes the next job, sends what it can, and puts back what is left. Urgent jobs go first. What an urgent job
//! leaves over goes behind all others, which need not wait for it, because its facts are no longer relied upon. What an
//! ordinary job leaves over goes first among the ordinary ones.

use crate::op::{InvalidationId, KernelInvalidation, Urgency};
use std::collections::VecDeque;

/// A set of invalidations with one cause.
#[derive(Clone, Debug)]
pub struct NotifierJob {
    pub id: InvalidationId,
    /// Not sent yet.
    pub stale: VecDeque<KernelInvalidation>,
    /// Dentries of other jobs, which keep them too. They are not copied again.
    pub copies: VecDeque<KernelInvalidation>,
    urgency: Urgency,
    is_leftover_of_urgent: bool,
}

impl NotifierJob {
    fn ordinary(id: InvalidationId, stale: VecDeque<KernelInvalidation>) -> NotifierJob {
        let (urgency, copies) = (Urgency::Ordinary, VecDeque::new());
        NotifierJob { id, stale, copies, urgency, is_leftover_of_urgent: false }
    }

    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.urgency != Urgency::Ordinary
    }

    /// Whether it is what is left of an urgent job.
    #[must_use]
    pub fn is_leftover_of_urgent(&self) -> bool {
        self.is_leftover_of_urgent
    }
}

/// Invalidations that wait to be sent.
#[derive(Clone, Default, Debug)]
pub struct NotifierQueue {
    urgent: VecDeque<NotifierJob>,
    ordinary: VecDeque<NotifierJob>,
}

impl NotifierQueue {
    /// Queues what [`Output::Invalidate`](crate::Output::Invalidate) says.
    pub fn push(&mut self, id: InvalidationId, stale: Vec<KernelInvalidation>, urgency: Urgency) {
        let job = NotifierJob { urgency, ..NotifierJob::ordinary(id, stale.into()) };
        if job.is_urgent() {
            self.urgent.push_back(job);
        } else {
            self.ordinary.push_back(job);
        }
    }

    /// Queues an ordinary job before all other ordinary ones.
    pub fn push_first(&mut self, id: InvalidationId, stale: VecDeque<KernelInvalidation>) {
        self.ordinary.push_front(NotifierJob::ordinary(id, stale));
    }

    /// Whether an ordinary job in progress has to give way.
    #[must_use]
    pub fn has_urgent(&self) -> bool {
        !self.urgent.is_empty()
    }

    /// The jobs in the queue, in their order.
    pub fn jobs(&self) -> impl Iterator<Item = &NotifierJob> {
        self.urgent.iter().chain(&self.ordinary)
    }

    /// Takes the next job. If it is for the end of all grants, `can_use_epoch` says whether the kernel can invalidate all
    /// dentries at once. Otherwise the job gets copies of the dentries of the other jobs, since those may block.
    pub fn take_next(&mut self, can_use_epoch: impl FnOnce() -> bool) -> Option<NotifierJob> {
        let Some(mut first) = self.urgent.pop_front() else { return self.ordinary.pop_front() };
        if first.urgency == Urgency::AllGrantsEnded && !can_use_epoch() {
            let others = self.ordinary.iter().flat_map(|job| &job.stale);
            first.copies = others.filter(|one| names_dentries(one)).cloned().collect();
        }
        Some(first)
    }

    /// Puts back what is left of a job. Returns the job's id if nothing is: the invalidation is to be acknowledged.
    #[must_use]
    pub fn finish(&mut self, job: NotifierJob) -> Option<InvalidationId> {
        if job.stale.is_empty() && job.copies.is_empty() {
            return Some(job.id);
        }
        let is_behind = job.is_urgent() || job.is_leftover_of_urgent;
        let left = NotifierJob { urgency: Urgency::Ordinary, is_leftover_of_urgent: is_behind, ..job };
        if is_behind {
            self.ordinary.push_back(left);
        } else {
            self.ordinary.push_front(left);
        }
        None
    }
}

fn names_dentries(stale: &KernelInvalidation) -> bool {
    matches!(stale, KernelInvalidation::Entry { .. } | KernelInvalidation::AllDentries(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::Name;

    fn entry(name: &str) -> KernelInvalidation {
        KernelInvalidation::Entry { dir: 1, name: Name::new(name.as_bytes()).unwrap() }
    }

    fn next(queue: &mut NotifierQueue) -> NotifierJob {
        queue.take_next(|| false).unwrap()
    }

    #[test]
    fn leftover_of_urgent_job_goes_behind_and_interrupted_job_goes_on_first() {
        let mut queue = NotifierQueue::default();
        queue.push(InvalidationId(1), vec![entry("a")], Urgency::Ordinary);
        queue.push(InvalidationId(2), vec![entry("b")], Urgency::Ordinary);
        let first = next(&mut queue);
        queue.push(InvalidationId(3), vec![entry("c")], Urgency::First);
        assert!(queue.has_urgent());
        assert_eq!(queue.finish(first), None);
        let urgent = next(&mut queue);
        assert_eq!((urgent.id, queue.finish(urgent)), (InvalidationId(3), None));
        let ids: Vec<u64> = queue.jobs().map(|job| job.id.0).collect();
        assert_eq!(ids, [1, 2, 3]);
        let done = NotifierJob { stale: VecDeque::new(), ..next(&mut queue) };
        assert_eq!(queue.finish(done), Some(InvalidationId(1)));
    }

    #[test]
    fn end_of_all_grants_copies_dentries_once_if_there_is_no_epoch() {
        let mut queue = NotifierQueue::default();
        queue.push(
            InvalidationId(1),
            vec![entry("a"), KernelInvalidation::Attr { ino: 2 }],
            Urgency::Ordinary,
        );
        queue.push(InvalidationId(2), vec![], Urgency::AllGrantsEnded);
        let first = queue.clone().take_next(|| true).unwrap();
        assert!(first.copies.is_empty());
        let first = next(&mut queue);
        assert_eq!(first.copies, [entry("a")]);
        // Copies that are put back are not copied once more.
        assert_eq!(queue.finish(first), None);
        queue.push(InvalidationId(3), vec![], Urgency::AllGrantsEnded);
        assert_eq!(next(&mut queue).copies, [entry("a")]);
    }
}
