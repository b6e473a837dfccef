//! Tasks in virtual time: replies, conditions, timers, limits, and tasks that are dropped.

use nigh_pathclient::{Coroutine, DropQueue, Executor, Limits, TaskContext, TaskId, TaskKind};
use nigh_types::{CallId, Span, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;

/// What the tasks of a test share.
#[derive(Default)]
struct State {
    log: Vec<String>,
    /// Tasks that wait for a reply, by the name of their message.
    requests: BTreeMap<&'static str, TaskId>,
    replies: BTreeSet<&'static str>,
    is_open: bool,
    count: u32,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<State>>);

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn say(&self, text: &str) {
        self.state().log.push(text.to_owned());
    }

    async fn request(&self, task: &TaskContext, message: &'static str) {
        self.say(&format!("send {message}"));
        self.state().requests.insert(message, task.id());
        poll_fn(|_| if self.state().replies.remove(message) { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}

/// An executor, and the moment and log of a test.
struct Stage {
    executor: Executor,
    shared: Shared,
    now: Time,
    calls: u64,
}

impl Stage {
    fn new() -> Stage {
        let executor = Executor::new(Time(0), Limits { ordinary: 2, blocking: 1 });
        Stage { executor, shared: Shared::default(), now: Time(0), calls: 0 }
    }

    /// Begins a call, and executes it as far as it goes.
    fn begin(&mut self, make: impl FnOnce(Shared, TaskContext) -> Coroutine) -> CallId {
        self.calls += 1;
        let (call, shared) = (CallId(self.calls), self.shared.clone());
        self.executor.spawn(Some(call), TaskKind::Ordinary, |task| make(shared, task));
        self.run();
        call
    }

    /// Begins a call that says its name once the shared state is open.
    fn begin_watching(&mut self, name: &'static str) -> CallId {
        self.begin(|shared, task| {
            Box::pin(async move {
                task.until(|| shared.state().is_open).await;
                shared.say(name);
            })
        })
    }

    fn reply(&mut self, message: &'static str) {
        let task = self.shared.state().requests.remove(message).expect("it was sent");
        self.shared.state().replies.insert(message);
        self.executor.schedule().wake(task);
        self.run();
    }

    fn advance(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.executor.set_now(self.now);
        self.run();
    }

    /// Polls until no task can go on; returns the number of rounds.
    fn run(&mut self) -> u32 {
        for round in 1..100 {
            if !self.executor.poll_tasks() {
                return round;
            }
        }
        panic!("the tasks never rest");
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.state().log)
    }
}

#[test]
fn task_goes_on_when_its_reply_arrives() {
    let mut stage = Stage::new();
    let call = stage.begin(|shared, task| {
        Box::pin(async move {
            shared.request(&task, "walk").await;
            shared.request(&task, "open").await;
            shared.say("done");
        })
    });
    assert_eq!(stage.log(), ["send walk"]);
    stage.advance(Span::from_secs(5));
    assert_eq!(stage.log(), [""; 0], "time alone changes nothing");
    stage.reply("walk");
    assert_eq!(stage.log(), ["send open"]);
    assert!(stage.executor.executes(call));
    assert_eq!(stage.executor.take_ended(), []);
    stage.reply("open");
    assert_eq!(stage.log(), ["done"]);
    assert!(!stage.executor.executes(call));
    assert_eq!(stage.executor.take_ended(), [call]);
    assert_eq!(stage.executor.take_ended(), [], "each is returned once");
}

#[test]
fn two_replies_may_be_outstanding_for_one_task() {
    let mut stage = Stage::new();
    stage.begin(|shared, task| {
        Box::pin(async move {
            let mut first = Box::pin(shared.request(&task, "first"));
            let mut second = Box::pin(shared.request(&task, "second"));
            poll_fn(|context| {
                let _ = first.as_mut().poll(context);
                second.as_mut().poll(context)
            })
            .await;
            shared.say("second arrived");
        })
    });
    assert_eq!(stage.log(), ["send first", "send second"]);
    stage.reply("second");
    assert_eq!(stage.log(), ["second arrived"]);
}

#[test]
fn call_that_needs_no_reply_ends_at_once() {
    let mut stage = Stage::new();
    let call = stage.begin(|shared, _| Box::pin(async move { shared.say("here") }));
    assert_eq!(stage.log(), ["here"]);
    assert_eq!(stage.executor.take_ended(), [call]);
}

#[test]
fn watcher_goes_on_when_another_task_made_its_condition_true() {
    let mut stage = Stage::new();
    let watcher = stage.begin_watching("seen");
    stage.begin(|shared, task| {
        Box::pin(async move {
            shared.request(&task, "open").await;
            shared.state().is_open = true;
        })
    });
    assert_eq!(stage.log(), ["send open"]);
    stage.reply("open");
    assert_eq!(stage.log(), ["seen"]);
    assert!(stage.executor.take_ended().contains(&watcher));
}

/// The later watcher makes the condition of the earlier one true, which was polled before it in this round.
#[test]
fn watcher_is_polled_again_after_a_later_watcher_went_on() {
    let mut stage = Stage::new();
    stage.begin(|shared, task| {
        Box::pin(async move {
            task.until(|| shared.state().count > 0).await;
            shared.say("earlier");
        })
    });
    stage.begin(|shared, task| {
        Box::pin(async move {
            task.until(|| shared.state().is_open).await;
            shared.state().count += 1;
            shared.say("later");
            task.until(|| shared.state().count > 1).await;
        })
    });
    stage.shared.state().is_open = true;
    stage.run();
    assert_eq!(stage.log(), ["later", "earlier"]);
}

#[test]
fn tasks_are_polled_in_order_and_ready_ones_first() {
    let mut stage = Stage::new();
    stage.begin_watching("watcher");
    for message in ["b", "a"] {
        stage.begin(move |shared, task| {
            Box::pin(async move {
                shared.request(&task, message).await;
                shared.say(message);
                shared.state().is_open = true;
            })
        });
    }
    stage.log();
    for message in ["a", "b"] {
        let task = stage.shared.state().requests[message];
        stage.shared.state().replies.insert(message);
        stage.executor.schedule().wake(task);
    }
    stage.run();
    assert_eq!(stage.log(), ["b", "a", "watcher"]);
}

fn pause(shared: Shared, task: TaskContext) -> Coroutine {
    Box::pin(async move {
        task.until_or_after(Span::from_millis(100), || shared.state().is_open).await;
        shared.say("on");
        task.until_or_after(Span::from_millis(100), || false).await;
        shared.say("end");
    })
}

#[test]
fn pause_ends_at_its_moment() {
    let mut stage = Stage::new();
    stage.advance(Span::from_secs(1));
    let start = stage.now;
    stage.begin(pause);
    let due = start.after(Span::from_millis(100));
    assert_eq!(stage.executor.next_due(), due);
    stage.advance(Span::from_millis(99));
    assert_eq!(stage.log(), [""; 0]);
    stage.advance(Span::from_millis(1));
    assert_eq!(stage.log(), ["on"]);
    assert_eq!(stage.executor.next_due(), due.after(Span::from_millis(100)));
    stage.advance(Span::from_secs(9));
    assert_eq!(stage.log(), ["end"]);
    assert_eq!(stage.executor.next_due(), Time::FAR);
}

/// The timer of the pause that ended early does not remain.
#[test]
fn pause_ends_early_when_its_condition_is_true() {
    let mut stage = Stage::new();
    stage.begin(pause);
    stage.advance(Span::from_millis(30));
    stage.shared.state().is_open = true;
    stage.run();
    assert_eq!(stage.log(), ["on"]);
    assert_eq!(stage.executor.next_due(), Time(0).after(Span::from_millis(130)));
}

#[test]
fn dropped_task_releases_what_it_holds_and_is_never_polled_again() {
    let mut stage = Stage::new();
    let dropped = DropQueue::default();
    let held = Held { number: 7, dropped: dropped.clone() };
    let call = stage.begin(move |shared, task| {
        Box::pin(async move {
            let _held = held;
            task.until_or_after(Span::from_millis(100), || shared.state().is_open).await;
            shared.say("went on");
        })
    });
    let other = stage.begin(|shared, task| Box::pin(async move { shared.request(&task, "read").await }));
    assert!(dropped.is_empty());
    stage.executor.cancel(call);
    assert_eq!(dropped.take(), [7]);
    assert!(dropped.is_empty());
    assert!(!stage.executor.executes(call));
    assert_eq!(stage.executor.next_due(), Time::FAR, "its timer is gone");
    stage.shared.state().is_open = true;
    stage.advance(Span::from_secs(1));
    assert_eq!(stage.log(), ["send read"]);
    assert_eq!(stage.executor.take_ended(), [], "a cancelled call has not ended by itself");
    stage.executor.cancel(call);
    assert!(stage.executor.executes(other));
}

/// A file id that is dropped while the lock of the shared state is held.
struct Held {
    number: u32,
    dropped: DropQueue<u32>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.dropped.push(self.number);
    }
}

#[test]
fn reply_to_a_dropped_task_wakes_no_other_task() {
    let mut stage = Stage::new();
    let call = stage.begin(|shared, task| Box::pin(async move { shared.request(&task, "read").await }));
    stage.executor.cancel(call);
    stage.begin_watching("watcher");
    stage.reply("read");
    assert_eq!(stage.log(), ["send read"]);
    assert_eq!(stage.executor.take_ended(), []);
}

#[test]
fn clear_drops_all_tasks_in_their_order() {
    let mut stage = Stage::new();
    let dropped = DropQueue::default();
    for number in 1..=3 {
        let held = Held { number, dropped: dropped.clone() };
        stage.begin(move |_, task| {
            Box::pin(async move {
                let _held = held;
                task.until_or_after(Span::from_secs(1), || false).await;
            })
        });
    }
    stage.executor.clear();
    assert_eq!(dropped.take(), [1, 2, 3]);
    assert_eq!(stage.executor.next_due(), Time::FAR);
    assert!(stage.executor.has_room(TaskKind::Ordinary));
    assert_eq!(stage.run(), 1, "nothing can go on");
}

#[test]
fn limits_of_ordinary_and_blocking_tasks_are_apart() {
    let mut stage = Stage::new();
    let wait = |_, task: TaskContext| -> Coroutine { Box::pin(async move { task.until(|| false).await }) };
    assert!(stage.executor.has_room(TaskKind::Blocking));
    stage.executor.spawn(Some(CallId(100)), TaskKind::Blocking, |task| wait((), task));
    assert!(!stage.executor.has_room(TaskKind::Blocking));
    for number in 1..=2 {
        assert!(stage.executor.has_room(TaskKind::Ordinary), "{number}");
        stage.executor.spawn(None, TaskKind::Ordinary, |task| wait((), task));
    }
    assert!(!stage.executor.has_room(TaskKind::Ordinary));
    stage.executor.cancel(CallId(100));
    assert!(stage.executor.has_room(TaskKind::Blocking));
    assert!(!stage.executor.has_room(TaskKind::Ordinary));
}

#[test]
fn session_task_is_not_among_ended_calls() {
    let mut stage = Stage::new();
    stage.executor.spawn(None, TaskKind::Ordinary, |_| Box::pin(async {}));
    assert_eq!(stage.executor.take_ended(), []);
}
