//! The tasks of a session.

use crate::schedule::{Schedule, TaskContext, TaskId};
use nigh_types::{CallId, Time};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// What a task executes.
pub type Coroutine = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How long a task may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskKind {
    /// For replies of the server.
    Ordinary,
    /// Without bound, for other clients: a blocking lock call.
    Blocking,
}

/// The most tasks of each kind.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub ordinary: usize,
    pub blocking: usize,
}

struct Task {
    coroutine: Coroutine,
    /// `None`: a task of the session itself.
    call: Option<CallId>,
    kind: TaskKind,
}

/// Executor of a session's calls: an `async fn` for each, polled without runtime, thread or waker.
///
/// A task sends messages and returns `Pending`. It is polled again when
///
/// - the session has woken it by [`Schedule::wake`], because a reply arrived;
/// - its timer is due ([`TaskContext::until_or_after`]);
/// - a round takes place and it waits for a condition ([`TaskContext::until`]).
///
/// For each input, the session calls [`Executor::set_now`] before it does anything else, and at the end
/// [`Executor::poll_tasks`] (a round) until that returns false. A round polls ready tasks, then those that wait for a
/// condition, both in the order of their creation.
pub struct Executor {
    schedule: Schedule,
    tasks: BTreeMap<TaskId, Task>,
    by_call: BTreeMap<CallId, TaskId>,
    /// The number of `tasks` of kind [`TaskKind::Blocking`].
    blocking: usize,
    ended: Vec<CallId>,
    next_task: u64,
    limits: Limits,
}

impl Executor {
    #[must_use]
    pub fn new(now: Time, limits: Limits) -> Executor {
        Executor {
            schedule: Schedule::new(now),
            tasks: BTreeMap::new(),
            by_call: BTreeMap::new(),
            blocking: 0,
            ended: Vec::new(),
            next_task: 0,
            limits,
        }
    }

    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    pub fn set_now(&mut self, now: Time) {
        self.schedule.set_now(now);
    }

    /// Whether the limits permit another task of that kind. [`Executor::spawn`] does not check it.
    #[must_use]
    pub fn has_room(&self, kind: TaskKind) -> bool {
        match kind {
            TaskKind::Ordinary => self.tasks.len() - self.blocking < self.limits.ordinary,
            TaskKind::Blocking => self.blocking < self.limits.blocking,
        }
    }

    /// Adds a task and polls it. `call`: the call that it executes; `None` for a task of the session itself.
    pub fn spawn(
        &mut self,
        call: Option<CallId>,
        kind: TaskKind,
        make: impl FnOnce(TaskContext) -> Coroutine,
    ) {
        self.next_task += 1;
        let id = TaskId(self.next_task);
        let coroutine = make(TaskContext::new(id, self.schedule.clone()));
        self.tasks.insert(id, Task { coroutine, call, kind });
        if let Some(call) = call {
            self.by_call.insert(call, id);
        }
        self.blocking += usize::from(kind == TaskKind::Blocking);
        self.poll(id);
    }

    /// Polls each task that may go on, once. Returns whether another round is needed: a task was ready, or a wait ended.
    pub fn poll_tasks(&mut self) -> bool {
        let (ready, watching) = self.schedule.begin_round();
        let any_ready = !ready.is_empty();
        for task in ready.into_iter().chain(watching) {
            self.poll(task);
        }
        any_ready || self.schedule.needs_round()
    }

    fn poll(&mut self, id: TaskId) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let mut context = Context::from_waker(Waker::noop());
        if task.coroutine.as_mut().poll(&mut context) == Poll::Ready(()) {
            let call = self.remove(id);
            self.ended.extend(call);
        }
    }

    /// Removes a task, and returns its call.
    fn remove(&mut self, id: TaskId) -> Option<CallId> {
        let task = self.tasks.remove(&id)?;
        self.blocking -= usize::from(task.kind == TaskKind::Blocking);
        if let Some(call) = task.call {
            self.by_call.remove(&call);
        }
        task.call
    }

    /// Returns the calls whose tasks have ended by themselves since this was called last.
    #[must_use]
    pub fn take_ended(&mut self) -> Vec<CallId> {
        std::mem::take(&mut self.ended)
    }

    /// Whether a task executes the call.
    #[must_use]
    pub fn executes(&self, call: CallId) -> bool {
        self.by_call.contains_key(&call)
    }

    /// Drops the task of a call at the point that it has reached.
    pub fn cancel(&mut self, call: CallId) {
        if let Some(task) = self.by_call.get(&call) {
            self.remove(*task);
        }
    }

    /// Drops all tasks.
    pub fn clear(&mut self) {
        while let Some((id, _)) = self.tasks.first_key_value() {
            self.remove(*id);
        }
    }

    /// When [`Executor::poll_tasks`] must be called at the latest; [`Time::FAR`] if no task waits for a moment.
    #[must_use]
    pub fn next_due(&self) -> Time {
        self.schedule.next_due()
    }
}
