//! A client's session with a 9P2000.L server.

mod attach;
mod calls;
mod config;
mod context;
mod fids;
mod file_locks;
mod files;
mod greeting;
mod handshake;
mod messages;
mod node_ids;
mod prefetch_jobs;
mod reply;
mod requests;
mod resolve;
mod state;
mod users;

pub use config::{Config, Times};

use crate::frame::FrameReader;
use crate::{ProtocolError, Rmessage};
use context::{CallContext, SessionContext};
use nigh_pathclient::{Coroutine, Executor, InodeNumbers, Limits, TaskKind};
use nigh_remote::{Counters, Event, Output, Reason, Remote, ResumableRemote};
use nigh_types::{Call, CallId, Errno, GrantId, RecallId, Request, Response, Span, Time};
use state::SessionState;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// The most calls executed at one time, and besides them those that wait for locks.
const LIMITS: Limits = Limits { ordinary: 512, blocking: 4_096 };
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
    cx: SessionContext,
    state: State,
    frames: FrameReader,
    executor: Executor,
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
        let executor = Executor::new(now, LIMITS);
        let state = SessionState::new(config, executor.schedule().clone(), numbers);
        let mut session = Session {
            cx: SessionContext::new(state),
            executor,
            state: State::Disconnected,
            frames: FrameReader::new(msize),
            unanswered: BTreeMap::new(),
            waiting: VecDeque::new(),
            established: false,
            reclaiming: false,
            resend: BTreeSet::new(),
            why: String::new(),
            lapsed: false,
            refusal: None,
            greeted: now,
        };
        session.handle_connect(now);
        session
    }

    /// The number of fids that exist at the server or are requested; none may leak (for tests).
    #[must_use]
    pub fn fids_in_use(&self) -> u32 {
        self.cx.shared().messages.fids.in_use()
    }

    fn begin(&mut self, call: Option<CallId>, kind: TaskKind, make: impl FnOnce(CallContext) -> Coroutine) {
        let cx = &self.cx;
        self.executor.spawn(call, kind, |task| make(cx.of(task)));
        self.forget_ended();
    }

    /// Forgets the calls that coroutines have ended.
    fn forget_ended(&mut self) {
        for call in self.executor.take_ended() {
            self.unanswered.remove(&call);
            self.cx.shared().cancelled.remove(&call);
        }
    }

    /// Polls all coroutines that can go on, until none can.
    fn run(&mut self) {
        loop {
            let dropped = self.cx.dropped.take();
            self.cx.shared().messages.release(dropped);
            let went_on = self.executor.poll_tasks();
            self.forget_ended();
            let begun = self.begin_waiting();
            if !went_on && !begun && self.cx.dropped.is_empty() {
                break;
            }
        }
        self.take_greeting();
        let broken = self.cx.shared().violation.take();
        if let Some(error) = broken {
            self.abort(&error);
        }
    }

    /// Begins calls for which there is room; returns whether it began any.
    fn begin_waiting(&mut self) -> bool {
        let mut begun = false;
        while self.state == State::Connected
            && self.executor.has_room(TaskKind::Ordinary)
            && self.cx.shared().messages.has_tags()
            && let Some(at) = self.next_waiting()
        {
            let Some(id) = self.waiting.remove(at) else { break };
            let Some(request) = self.unanswered.get(&id).cloned() else { continue };
            let kind = if request.call.waits_for_lock() { TaskKind::Blocking } else { TaskKind::Ordinary };
            if kind == TaskKind::Blocking && !self.executor.has_room(kind) {
                self.answer(id, Errno::NOLCK);
                continue;
            }
            self.begin(Some(id), kind, |cx| Box::pin(calls::execute(cx, id, request)));
            begun = true;
        }
        begun
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
        shared.messages.out.push_back(Output::Event(Event::Response { call, response }));
    }

    fn event(&mut self, event: Event) {
        self.cx.shared().messages.out.push_back(Output::Event(event));
    }

    fn take_messages(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        self.frames.take(bytes);
        while let Some(frame) = self.frames.poll_frame()? {
            let message = Rmessage::decode(frame.code, &frame.body)?;
            self.cx.shared().messages.take_message(frame.tag, message)?;
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
        let messages = &shared.messages;
        let timer = (self.executor.next_due(), Reason::Delay);
        let silence = match self.state {
            State::Greeting => self.greeted.after(HANDSHAKE_TIMEOUT),
            State::Connected if messages.is_waiting() && messages.probed => {
                messages.last_heard.after(DEAD_AFTER)
            }
            State::Connected if messages.is_waiting() => messages.last_heard.after(PROBE_AFTER),
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
        if !self.executor.executes(id) {
            if request.call.has_reply() {
                self.waiting.retain(|other| *other != id);
                self.resend.remove(&id);
                self.answer(id, Errno::INTR);
            }
            return;
        }
        if !request.call.is_mutation() && request.call.has_reply() && !changes_session(&request.call) {
            self.executor.cancel(id);
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
            let messages = &mut self.cx.shared().messages;
            (messages.last_heard, messages.probed) = (now, false);
            messages.counters.bytes_received += bytes.len() as u64;
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
        let output = self.cx.shared().messages.out.pop_front();
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
        self.cx.shared().messages.counters.clone()
    }

    fn kind(&self) -> &'static str {
        "9p"
    }
}
