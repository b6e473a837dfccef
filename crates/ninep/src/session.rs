//! A client's session with a 9P2000.L server.

mod attach;
mod calls;
mod config;
mod executor;
mod fids;
mod file_locks;
mod files;
mod greeting;
mod handshake;
mod node_ids;
mod nodes;
mod reply;
mod requests;
mod resolve;
mod users;

pub use config::{Config, Times};

use crate::frame::FrameReader;
use crate::{ProtocolError, Rmessage};
use executor::{CallContext, TaskId};
use nigh_remote::{Counters, Event, Output, Reason, Remote, ResumableRemote};
use nigh_types::{Call, CallId, Errno, GrantId, RecallId, Request, Response, Span, Time};
use nodes::InodeNumbers;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// The most calls executed at one time, and besides them those that wait for locks.
const MOST_TASKS: usize = 512;
const MOST_LOCK_WAITS: usize = 4_096;
/// How long a server may be silent at the beginning.
const HANDSHAKE_TIMEOUT: Span = Span::from_secs(15);
/// After this silence with a request outstanding, the server is probed,
const PROBE_AFTER: Span = Span::from_secs(20);
/// and after this silence it counts as dead.
const DEAD_AFTER: Span = Span::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Version, attach and the root's attributes are being requested.
    Greeting,
    Connected,
    Disconnected,
    Lost,
}

type Coroutine = Pin<Box<dyn Future<Output = ()> + Send>>;

struct Task {
    coroutine: Coroutine,
    /// `None`: the handshake, or a probe.
    call: Option<CallId>,
}

/// The client's end of a mount's session, by the contracts of [`Remote`] and [`ResumableRemote`]. Each call is a coroutine that
/// sends messages.
///
/// ```text
///            root attached             end of the connection, or silence
///  Greeting ───────────────▶ Linked ─────────────────────────────────────▶ Unlinked
///      ▲                                                                       │
///      └──────────────────────────── handle_connect ───────────────────────────┘
///  Protocol error, or the end of Greeting before the first root ─▶ Lost.
/// ```
pub struct Session {
    cx: CallContext,
    state: State,
    frames: FrameReader,
    tasks: BTreeMap<TaskId, Task>,
    next_task: u64,
    by_call: BTreeMap<CallId, TaskId>,
    /// Calls without a reply, in the order in which they were made.
    unanswered: BTreeMap<CallId, Arc<Request>>,
    waiting: VecDeque<CallId>,
    /// A root was attached before.
    established: bool,
    /// A new connection replaces one that was lost, and the reclaim has not ended.
    reclaiming: bool,
    /// While reclaiming: calls made before the connection existed.
    resend: BTreeSet<CallId>,
    why: String,
    /// The loss of the connection was reported, and its replacement was not.
    lapsed: bool,
    refusal: Option<String>,
    greeted: Time,
    /// The number of `tasks` that may wait for a lock.
    lock_tasks: usize,
}

/// Returns a factory for one mount's sessions; the loss of an earlier session makes no difference to a server.
#[must_use]
pub fn sessions(config: Config) -> Box<dyn Fn(Time, bool) -> Box<dyn ResumableRemote> + Send> {
    let numbers = InodeNumbers::default();
    Box::new(move |now, _| Box::new(Session::with(now, config.clone(), numbers.clone())))
}

impl Session {
    /// Creates a session and sends its first message at once.
    #[must_use]
    pub fn new(now: Time, config: Config) -> Session {
        Session::with(now, config, InodeNumbers::default())
    }

    fn with(now: Time, config: Config, numbers: InodeNumbers) -> Session {
        let msize = config.msize;
        let mut session = Session {
            cx: CallContext::new(config, now, numbers),
            state: State::Disconnected,
            frames: FrameReader::new(msize),
            tasks: BTreeMap::new(),
            next_task: 0,
            by_call: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            waiting: VecDeque::new(),
            established: false,
            reclaiming: false,
            resend: BTreeSet::new(),
            why: String::new(),
            lapsed: false,
            refusal: None,
            greeted: now,
            lock_tasks: 0,
        };
        session.handle_connect(now);
        session
    }

    /// The number of fids that exist at the server or are requested; none may leak (for tests).
    #[must_use]
    pub fn fids_in_use(&self) -> u32 {
        self.cx.shared().fids.in_use()
    }

    fn begin(&mut self, call: Option<CallId>, make: impl FnOnce(CallContext) -> Coroutine) {
        self.next_task += 1;
        let task = TaskId(self.next_task);
        let coroutine = make(self.cx.of(task));
        self.tasks.insert(task, Task { coroutine, call });
        if let Some(call) = call {
            self.by_call.insert(call, task);
        }
        self.poll(task);
    }

    /// Polls a coroutine.
    fn poll(&mut self, id: TaskId) {
        let Some(task) = self.tasks.get_mut(&id) else { return };
        let mut context = Context::from_waker(Waker::noop());
        if task.coroutine.as_mut().poll(&mut context) == Poll::Ready(()) {
            self.end(id);
        }
    }

    fn end(&mut self, id: TaskId) {
        if let Some(Task { call: Some(call), .. }) = self.tasks.remove(&id) {
            self.by_call.remove(&call);
            let request = self.unanswered.remove(&call);
            if request.is_some_and(|request| request.call.waits_for_lock()) {
                self.lock_tasks -= 1;
            }
            self.cx.shared().cancelled.remove(&call);
        }
    }

    /// Polls all coroutines that can go on, until none can.
    fn run(&mut self) {
        loop {
            let gone = self.cx.clunk_queue.take();
            let (ready, watching) = {
                let mut shared = self.cx.shared();
                shared.queue_clunk(gone);
                (shared.take_ready(), shared.watching())
            };
            let before = self.tasks.len();
            ready.iter().for_each(|task| self.poll(*task));
            watching.into_iter().filter(|task| !ready.contains(task)).for_each(|task| self.poll(task));
            self.begin_waiting();
            let idle = ready.is_empty() && before == self.tasks.len();
            if idle && self.cx.clunk_queue.is_empty() && !self.cx.shared().has_ready() {
                break;
            }
        }
        self.take_greeting();
        let broken = self.cx.shared().violation.take();
        if let Some(error) = broken {
            self.abort(&error);
        }
    }

    fn begin_waiting(&mut self) {
        while self.state == State::Connected
            && self.tasks.len() - self.lock_tasks < MOST_TASKS
            && self.cx.shared().has_tags()
            && let Some(at) = self.next_waiting()
        {
            let Some(id) = self.waiting.remove(at) else { return };
            let Some(request) = self.unanswered.get(&id).cloned() else { continue };
            if request.call.waits_for_lock() {
                if self.lock_tasks >= MOST_LOCK_WAITS {
                    self.answer(id, Errno::NOLCK);
                    continue;
                }
                self.lock_tasks += 1;
            }
            self.begin(Some(id), |cx| Box::pin(calls::execute(cx, id, request)));
        }
    }

    /// The next call to start. While reclaiming, only a call that serves the reclaim and was made since the connection
    /// exists.
    fn next_waiting(&self) -> Option<usize> {
        if !self.reclaiming {
            return (!self.waiting.is_empty()).then_some(0);
        }
        self.waiting.iter().position(|id| {
            let request = self.unanswered.get(id);
            !self.resend.contains(id)
                && request.is_none_or(|request| request.call.is_allowed_during_reclaim())
        })
    }

    fn answer(&mut self, call: CallId, errno: Errno) {
        self.unanswered.remove(&call);
        let response = Response::plain(Err(errno));
        let mut shared = self.cx.shared();
        shared.cancelled.remove(&call);
        shared.out.push_back(Output::Event(Event::Response { call, response }));
    }

    fn event(&mut self, event: Event) {
        self.cx.shared().out.push_back(Output::Event(event));
    }

    fn take_messages(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        self.frames.take(bytes);
        while let Some(frame) = self.frames.poll_frame()? {
            let message = Rmessage::decode(frame.code, &frame.body)?;
            self.cx.shared().take_message(frame.tag, message)?;
            self.run();
            if !matches!(self.state, State::Greeting | State::Connected) {
                break;
            }
            let msize = self.cx.shared().msize;
            self.frames.agree(msize);
        }
        Ok(())
    }

    fn due(&self) -> (Time, Reason) {
        let shared = self.cx.shared();
        let timer = (shared.next_timer(), Reason::Delay);
        let silence = match self.state {
            State::Greeting => self.greeted.after(HANDSHAKE_TIMEOUT),
            State::Connected if shared.is_waiting() && shared.probed => shared.last_heard.after(DEAD_AFTER),
            State::Connected if shared.is_waiting() => shared.last_heard.after(PROBE_AFTER),
            _ => Time::FAR,
        };
        let (due, reason) = if silence < timer.0 { (silence, Reason::SessionEnd) } else { timer };
        if due == Time::FAR { (due, Reason::Idle) } else { (due, reason) }
    }
}

impl Remote for Session {
    fn handle_call(&mut self, now: Time, id: CallId, request: Request) {
        if self.state == State::Lost {
            return;
        }
        self.set_now(now);
        if matches!(request.call, Call::Release { .. }) && self.state != State::Connected {
            // The handle that it names was forgotten with the connection.
            return;
        }
        self.unanswered.insert(id, Arc::new(request));
        self.waiting.push_back(id);
        self.begin_waiting();
        self.run();
    }

    /// Cancels a call. A mutation goes on, and gets its reply when it is done. A call that waits for a lock checks
    /// `cancelled` itself. The messages of all other calls are flushed.
    fn handle_cancel(&mut self, now: Time, id: CallId) {
        self.set_now(now);
        let Some(request) = self.unanswered.get(&id) else { return };
        self.cx.shared().cancelled.insert(id);
        if self.lapsed {
            // No reply is emitted while the connection is down.
            return;
        }
        let Some(&task) = self.by_call.get(&id) else {
            if request.call.has_reply() {
                self.waiting.retain(|other| *other != id);
                self.resend.remove(&id);
                self.answer(id, Errno::INTR);
            }
            return;
        };
        if !request.call.is_mutation() && request.call.has_reply() && !changes_session(&request.call) {
            self.end(task);
            self.answer(id, Errno::INTR);
        }
        self.run();
    }

    /// Does nothing: 9P has no recalls.
    fn handle_acknowledge(&mut self, _: Time, _: RecallId) {}

    /// Does nothing: grants end by themselves.
    fn handle_return(&mut self, _: Time, _: Vec<GrantId>) {}

    fn handle_reclaimed(&mut self, now: Time) {
        self.set_now(now);
        if self.reclaiming {
            self.reclaiming = false;
            self.resend.clear();
            self.begin_waiting();
            self.run();
        }
    }

    fn handle_input(&mut self, now: Time, bytes: &[u8]) {
        self.set_now(now);
        if !matches!(self.state, State::Greeting | State::Connected) {
            return;
        }
        {
            let mut shared = self.cx.shared();
            (shared.last_heard, shared.probed) = (now, false);
            shared.counters.bytes_received += bytes.len() as u64;
        }
        if let Err(error) = self.take_messages(bytes) {
            self.abort(&error);
        }
    }

    fn handle_disconnect(&mut self, now: Time, why: &str) {
        self.set_now(now);
        match self.state {
            State::Connected => self.drop_connection(why),
            State::Greeting if self.established => self.drop_connection(why),
            State::Greeting => self.lose(why.to_owned()),
            State::Disconnected | State::Lost => {}
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        self.set_now(now);
        self.check_silence(now);
        self.run();
    }

    fn poll_output(&mut self) -> Output {
        let output = self.cx.shared().out.pop_front();
        output.unwrap_or_else(|| {
            let (due, reason) = self.due();
            Output::Timeout(due, reason)
        })
    }
}

/// Whether a call changes state of this session: its reply is about a file that is open from then on, or about a lock.
fn changes_session(call: &Call) -> bool {
    matches!(call, Call::Open { .. } | Call::Reopen { .. } | Call::Lock { .. } | Call::Unlock { .. })
}

impl ResumableRemote for Session {
    fn handle_connect(&mut self, now: Time) {
        self.connect(now);
    }

    fn handle_close(&mut self, why: &str) {
        if self.state != State::Lost {
            self.lose(format!("closed: {why}"));
        }
    }

    fn wants_connection(&self) -> Option<&str> {
        (self.state == State::Disconnected).then_some(&self.why)
    }

    fn is_lost(&self) -> bool {
        self.state == State::Lost
    }

    fn is_connected(&self) -> bool {
        self.state == State::Connected
    }

    fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    fn counters(&self) -> Counters {
        self.cx.shared().counters.clone()
    }

    fn kind(&self) -> &'static str {
        "9p"
    }
}
