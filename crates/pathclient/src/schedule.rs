//! Which tasks can go on, and how a task waits.

use nigh_types::{Span, Time};
use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

/// Number of a task; never reused within one executor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TaskId(pub(crate) u64);

/// The tasks that can go on, shared by the executor, its tasks, and the session that receives replies.
///
/// Its lock is the innermost one: conditions of tasks are evaluated without it.
#[derive(Clone, Debug)]
pub struct Schedule(Arc<Mutex<Queues>>);

#[derive(Debug, Default)]
struct Queues {
    now: Time,
    ready: BTreeSet<TaskId>,
    /// Tasks that check their condition again in every round.
    watching: BTreeSet<TaskId>,
    timers: BTreeSet<(Time, TaskId)>,
    /// A wait has ended in this round.
    wait_ended: bool,
}

impl Schedule {
    pub(crate) fn new(now: Time) -> Schedule {
        Schedule(Arc::new(Mutex::new(Queues { now, ..Queues::default() })))
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The moment of the latest input.
    #[must_use]
    pub fn now(&self) -> Time {
        self.queues().now
    }

    pub(crate) fn set_now(&self, now: Time) {
        self.queues().now = now;
    }

    /// Makes a task ready: what it waits for has arrived.
    pub fn wake(&self, task: TaskId) {
        self.queues().ready.insert(task);
    }

    /// Begins a round. Returns the tasks that are ready or whose timer is due, and the other tasks that watch a
    /// condition, each in the order of creation.
    pub(crate) fn begin_round(&self) -> (BTreeSet<TaskId>, Vec<TaskId>) {
        let mut queues = self.queues();
        while let Some(&(due, task)) = queues.timers.first()
            && due <= queues.now
        {
            queues.timers.pop_first();
            queues.ready.insert(task);
        }
        queues.wait_ended = false;
        let ready = std::mem::take(&mut queues.ready);
        let watching = queues.watching.difference(&ready).copied().collect();
        (ready, watching)
    }

    /// Whether another round may poll a task that can go on, besides those that were ready in this one.
    pub(crate) fn needs_round(&self) -> bool {
        let queues = self.queues();
        queues.wait_ended || !queues.ready.is_empty()
    }

    /// The first timer; [`Time::FAR`] without timers.
    pub(crate) fn next_due(&self) -> Time {
        self.queues().timers.first().map_or(Time::FAR, |(due, _)| *due)
    }

    fn watch(&self, task: TaskId, due: Time) {
        let mut queues = self.queues();
        queues.watching.insert(task);
        if due != Time::FAR {
            queues.timers.insert((due, task));
        }
    }

    fn end_watch(&self, task: TaskId, due: Time) {
        let mut queues = self.queues();
        queues.wait_ended |= queues.watching.remove(&task);
        queues.timers.remove(&(due, task));
    }
}

/// A task's own number, and its means to wait. A task has at most one wait at a time.
#[derive(Clone, Debug)]
pub struct TaskContext {
    id: TaskId,
    schedule: Schedule,
}

impl TaskContext {
    pub(crate) fn new(id: TaskId, schedule: Schedule) -> TaskContext {
        TaskContext { id, schedule }
    }

    #[must_use]
    pub fn id(&self) -> TaskId {
        self.id
    }

    /// Waits until a condition is true. The executor evaluates it in every round.
    pub async fn until(&self, is_so: impl Fn() -> bool + Send) {
        Wait { task: self, due: Time::FAR, is_so }.await;
    }

    /// Waits until a condition is true, but at most `span`.
    pub async fn until_or_after(&self, span: Span, is_so: impl Fn() -> bool + Send) {
        let due = self.schedule.now().after(span);
        Wait { task: self, due, is_so }.await;
    }
}

/// A wait for a condition or a moment. Dropping it removes the task from the schedule's watchers.
struct Wait<'a, C> {
    task: &'a TaskContext,
    due: Time,
    is_so: C,
}

impl<C: Fn() -> bool> Future for Wait<'_, C> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        let TaskContext { id, schedule } = self.task;
        if schedule.now() >= self.due || (self.is_so)() {
            return Poll::Ready(());
        }
        schedule.watch(*id, self.due);
        Poll::Pending
    }
}

impl<C> Drop for Wait<'_, C> {
    fn drop(&mut self) {
        self.task.schedule.end_watch(self.task.id, self.due);
    }
}
