//! Preconditions of write-backs, what remains of a lost session's pages, and what is dropped after requests that
//! failed.

use crate::{
    Cache, Caller, Config, Fh, InvalidationId, KernelInvalidation, OnDisconnect, Op, OpReply, Output,
    test_fixtures,
};
use nigh_types::*;

mod read_after_write;
mod stale_pages;
mod ungranted;

const T0: Time = Time(1_000_000_000);
const FILE: NodeId = NodeId { ino: 7, generation: 7 };
const TERM: Span = Span::from_secs(5);
const FIRST: GrantId = GrantId(11);

/// A file of four bytes that was changed in that second.
fn attr(secs: i64) -> Attr {
    let mtime = Timestamp { secs, nanos: 0 };
    Attr { mode: 0o100_644, nlink: 1, size: 4, mtime, ctime: mtime, ..Attr::default() }
}

fn stamp(secs: i64) -> DataVersion {
    DataVersion::of(&attr(secs))
}

fn session() -> SessionParams {
    SessionParams { term: Term::Limited(TERM), ..test_fixtures::session() }
}

fn data_grant(id: GrantId) -> Grant {
    let (covers, mode, term) = (LeaseScope::Data, Mode::Read, Term::Limited(TERM));
    Grant { id, node: FILE, covers, mode, term, recallable: true, shared: false }
}

/// Cache with one file that is open for writing.
struct Rig {
    cache: Cache,
    now: Time,
    last: u64,
    fh: Fh,
    calls: Vec<(CallId, Call)>,
    cancelled: Vec<CallId>,
    answers: Vec<(OpId, OpReply)>,
    stale: Vec<(InvalidationId, Vec<KernelInvalidation>)>,
}

impl Rig {
    fn with(config: Config) -> Rig {
        let (calls, cancelled, answers, stale) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut rig =
            Rig { cache: Cache::new(config), now: T0, last: 0, fh: Fh(0), calls, cancelled, answers, stale };
        rig.event(Event::Attached(session()));
        rig.ask(Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
        let entry = Entry { id: FILE, attr: attr(1), target: None, no_xattrs: true };
        rig.respond(Ok(Reply::Entry(Some(entry))), 1, None);
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        rig.ask(Op::Open { ino: FILE.ino, access, append: false });
        rig.respond(Ok(Reply::Opened { handle: Handle(3), attr: attr(1) }), 1, None);
        let Some((_, OpReply::Opened(opened))) = rig.answers.pop() else { panic!("not opened") };
        rig.fh = opened.fh;
        rig.told();
        rig
    }

    /// With pages of the file as it was in the first second, under a grant.
    fn with_pages() -> Rig {
        let mut rig = Rig::with(Config::default());
        rig.read(Some(FIRST), 1);
        rig
    }

    fn ask(&mut self, op: Op) -> OpId {
        self.last += 1;
        let id = OpId(self.last);
        if let Some(answer) = self.cache.handle_op(self.now, id, Caller::default(), op) {
            self.answers.push((id, answer));
        }
        self.drain();
        id
    }

    fn read(&mut self, granted: Option<GrantId>, secs: i64) {
        self.ask(Op::Read { ino: FILE.ino, fh: self.fh, offset: 0, size: 4096 });
        self.respond(Ok(Reply::Data(b"text".to_vec())), secs, granted);
    }

    /// Writes back stores; returns the call's precondition.
    fn flush(&mut self) -> Option<WriteBackPrecondition> {
        self.write(true);
        let Some((_, Call::Write { flags, .. })) = self.calls.last() else { panic!("{:?}", self.calls) };
        assert!(flags.write_back);
        flags.since
    }

    fn write(&mut self, flush: bool) -> OpId {
        let (ino, fh, data) = (FILE.ino, self.fh, b"TEXT".to_vec());
        self.ask(Op::Write {
            ino,
            fh,
            offset: 0,
            data,
            flags: WriteFlags { write_back: flush, ..WriteFlags::default() },
        })
    }

    /// Recalls the file's data.
    fn recall(&mut self) {
        let recall = Recall { id: RecallId(1), node: FILE, covers: LeaseScope::Data, names: Vec::new() };
        self.event(Event::Recall(recall));
    }

    /// Answers the last call; the file is then as in that second.
    fn respond(&mut self, result: Result<Reply, Errno>, secs: i64, granted: Option<GrantId>) {
        let (call, _) = self.calls.pop().expect("a call is out");
        let after = if result.is_ok() { vec![(FILE, attr(secs))] } else { Vec::new() };
        let grants = granted.into_iter().map(data_grant).collect();
        self.event(Event::Response { call, response: Response { result, after, grants, last: true } });
    }

    /// Answers that call.
    fn answered(&mut self, call: CallId, reply: Reply, attr: Attr, granted: Option<GrantId>) {
        let grants = granted.into_iter().map(data_grant).collect();
        let response = Response { result: Ok(reply), after: vec![(FILE, attr)], grants, last: true };
        self.event(Event::Response { call, response });
    }

    /// Answers two writes in flight in order.
    fn answered_in_order(&mut self, first: Attr, second: Attr) {
        self.write(false);
        self.write(false);
        let (later, earlier) = (self.calls.pop().unwrap().0, self.calls.pop().unwrap().0);
        let reply = || Reply::Written { offset: 0, count: 4 };
        self.answered(earlier, reply(), first, None);
        self.answered(later, reply(), second, None);
    }

    /// Reads the first page; returns the call.
    fn reads(&mut self) -> CallId {
        self.reads_at(0)
    }

    fn reads_at(&mut self, offset: u64) -> CallId {
        self.ask(Op::Read { ino: FILE.ino, fh: self.fh, offset, size: 4096 });
        self.calls.pop().expect("a call is out").0
    }

    fn is_old(&self) -> bool {
        self.cache.state.store.inode(FILE.ino).is_some_and(|inode| inode.pages().has_stale())
    }

    fn written(&mut self, secs: i64, granted: Option<GrantId>) -> OpReply {
        self.respond(Ok(Reply::Written { offset: 0, count: 4 }), secs, granted);
        self.answers.pop().expect("an answer").1
    }

    fn event(&mut self, event: Event) {
        self.cache.handle_event(self.now, event);
        self.drain();
    }

    fn pass(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.cache.handle_timeout(self.now);
        self.drain();
    }

    fn drain(&mut self) {
        loop {
            match self.cache.poll_output() {
                Output::Timeout(..) => return,
                Output::Answer { op, answer } => self.answers.push((op, answer)),
                Output::Call { id, call, .. } => self.calls.push((id, call)),
                Output::Cancel(call) => self.cancelled.push(call),
                Output::Invalidate { id, stale, .. } => self.stale.push((id, stale)),
                Output::Store { .. } | Output::Prune | Output::Acknowledge(_) => {}
                Output::Return(_) | Output::Reclaimed => {}
            }
        }
    }

    /// Completes all invalidations so far.
    fn told(&mut self) {
        while !self.stale.is_empty() {
            self.tell();
        }
    }

    /// Completes the first invalidation, except for pages that are locked.
    fn tell(&mut self) {
        let (id, stale) = self.stale.remove(0);
        for one in stale {
            if let KernelInvalidation::Data { ino, offset, length } = one {
                self.cache.droppable_ranges(id, ino, (offset, length));
            }
        }
        self.cache.handle_invalidated(self.now, id);
        self.drain();
    }

    /// Returns the ranges of the file that are being invalidated.
    fn dropped(&self) -> Vec<(u64, u64)> {
        let of_file = |one: &KernelInvalidation| match one {
            KernelInvalidation::Data { ino, offset, length } if *ino == FILE.ino => Some((*offset, *length)),
            _ => None,
        };
        self.stale.iter().flat_map(|(_, stale)| stale).filter_map(of_file).collect()
    }
}

fn under(secs: i64, grant: GrantId) -> Option<WriteBackPrecondition> {
    Some(WriteBackPrecondition { stamp: stamp(secs), under: Some((grant, LeaseScope::Data)) })
}

fn ended(secs: i64) -> Option<WriteBackPrecondition> {
    Some(WriteBackPrecondition { stamp: stamp(secs), under: None })
}

#[test]
fn write_back_names_the_grant_until_its_recall_is_acknowledged() {
    let mut rig = Rig::with_pages();
    assert_eq!(rig.flush(), under(1, FIRST));
    assert_eq!(rig.written(2, Some(FIRST)), OpReply::Written(4));
    assert_eq!(rig.flush(), under(2, FIRST), "its own change is what it has");
    rig.written(3, Some(FIRST));
    rig.event(Event::Recall(Recall {
        id: RecallId(1),
        node: FILE,
        covers: LeaseScope::Data,
        names: Vec::new(),
    }));
    assert_eq!(rig.flush(), under(3, FIRST), "the server knows best what is still so");
    rig.written(4, None);
    rig.told();
    assert_eq!(rig.flush(), None, "these are other pages");
}

#[test]
fn latest_of_reordered_replies_sets_the_page_base() {
    let mut rig = Rig::with_pages();
    rig.write(false);
    rig.write(false);
    assert_eq!(rig.written(3, Some(FIRST)), OpReply::Written(4));
    assert_eq!(rig.written(2, Some(FIRST)), OpReply::Written(4));
    rig.answered_in_order(attr(4), attr(5));
    assert_eq!(rig.flush(), under(5, FIRST));
}

#[test]
fn write_back_after_grant_end_carries_the_old_version_until_pages_are_dropped() {
    let mut rig = Rig::with_pages();
    rig.pass(TERM);
    rig.calls.clear();
    assert_eq!(rig.dropped(), [(0, 0)]);
    assert_eq!(rig.flush(), ended(1));
    rig.written(2, Some(GrantId(12)));
    assert_eq!(rig.flush(), ended(1), "a grant on what was written says nothing of the older pages");
    rig.written(3, Some(GrantId(13)));
    rig.read(Some(GrantId(14)), 3);
    assert_eq!(rig.flush(), ended(1), "nor does one on what is read");
    rig.written(4, Some(GrantId(15)));
    rig.told();
    assert_eq!(rig.flush(), under(4, GrantId(12)));
}

#[test]
fn plain_write_carries_no_precondition() {
    let mut rig = Rig::with_pages();
    let since = |rig: &mut Rig| {
        rig.write(false);
        let Some((_, Call::Write { flags, .. })) = rig.calls.last() else { panic!("no write") };
        flags.since
    };
    assert_eq!(since(&mut rig), None);
    rig.written(2, Some(FIRST));
    rig.pass(TERM);
    rig.calls.clear();
    assert_eq!(since(&mut rig), None);
    assert_eq!(rig.flush(), ended(2));
}

#[test]
fn conflicting_write_back_fails_until_stale_pages_are_dropped() {
    let mut rig = Rig::with_pages();
    rig.pass(TERM);
    rig.calls.clear();
    rig.flush();
    rig.respond(Err(Errno::CANCELED), 0, None);
    assert_eq!(rig.answers.pop().unwrap().1, OpReply::Failed(Errno::IO));
    assert_eq!(rig.dropped(), [(0, 0), (0, 4)], "what was not written must not be seen");
    rig.write(true);
    assert_eq!(rig.answers.pop().unwrap().1, OpReply::Failed(Errno::IO));
    assert!(rig.calls.is_empty(), "no second request is sent");
    assert_eq!(rig.dropped(), [(0, 0), (0, 4), (0, 4)]);
    rig.told();
    assert_eq!(rig.flush(), None);
}

/// Another client has changed the file, whose pages the kernel already had.
#[test]
fn reply_without_attributes_sets_no_page_base() {
    let mut rig = Rig::with_pages();
    rig.pass(TERM);
    rig.calls.clear();
    rig.flush();
    let (call, _) = rig.calls.pop().unwrap();
    rig.event(Event::Response {
        call,
        response: Response::plain(Ok(Reply::Written { offset: 0, count: 4 })),
    });
    rig.event(Event::Restored { session: session(), kept: false });
    rig.respond(Ok(Reply::Opened { handle: Handle(3), attr: attr(2) }), 2, Some(GrantId(21)));
    let (forgetting, _) = rig.stale.pop().unwrap();
    rig.stale.clear();
    rig.cache.handle_invalidated(rig.now, forgetting);
    rig.drain();
    assert_eq!(rig.flush(), ended(1));
}

/// A file that is open for reading too, while its session is forgotten; it can be reopened only for reading.
#[test]
fn read_only_reopen_does_not_keep_pages_in_a_new_session() {
    let mut rig = Rig::with_pages();
    let access =
        Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
    rig.ask(Op::Open { ino: FILE.ino, access, append: false });
    rig.respond(Ok(Reply::Opened { handle: Handle(4), attr: attr(1) }), 1, None);
    rig.event(Event::Restored { session: session(), kept: false });
    let claim = |rig: &Rig, wanted: Handle| {
        let claims = |call: &Call| matches!(call, Call::Reopen { handle, .. } if *handle == wanted);
        rig.calls.iter().find(|(_, call)| claims(call)).expect("it is claimed").0
    };
    let (writer, reader) = (claim(&rig, Handle(3)), claim(&rig, Handle(4)));
    rig.event(Event::Response { call: writer, response: Response::plain(Err(Errno::ACCES)) });
    let opened = Reply::Opened { handle: Handle(4), attr: attr(1) };
    rig.answered(reader, opened, attr(1), Some(GrantId(21)));
    assert!(rig.is_old());
}

#[test]
fn pages_are_dropped_after_a_queued_request_fails_at_start() {
    let mut rig = Rig::with(Config::default());
    rig.event(Event::Expired { why: String::new() });
    rig.write(true);
    rig.event(Event::Restored { session: session(), kept: false });
    rig.respond(Err(Errno::ACCES), 0, None);
    rig.answers.clear();
    rig.tell();
    assert_eq!(rig.answers.pop().unwrap().1, OpReply::Failed(Errno::IO));
    assert_eq!(rig.dropped(), [(0, 4)]);
}

#[test]
fn reply_with_a_data_grant_prolongs_the_grant() {
    let mut rig = Rig::with_pages();
    for secs in 2..20 {
        rig.pass(Span::from_secs(1));
        rig.calls.clear();
        rig.read(Some(GrantId(10 + secs)), 1);
        assert!(rig.cache.state.kernel.timers() <= 2, "{}", rig.cache.state.kernel.timers());
    }
    assert_eq!(rig.flush(), under(1, GrantId(29)), "and has not ended");
    rig.calls.clear();
    (0..4).for_each(|_| rig.pass(Span::from_secs(1)));
    assert!(matches!(rig.calls[..], [(_, Call::GetAttr { .. })]), "{:?}", rig.calls);
    assert_eq!(rig.dropped(), []);
    rig.pass(Span::from_secs(1));
    assert_eq!(rig.dropped(), [(0, 0)]);
}

/// The server's own disk may have written too, and a reply to a write does not say.
#[test]
fn write_under_a_limited_grant_does_not_prolong_it() {
    let mut rig = Rig::with_pages();
    for secs in 2..6 {
        rig.pass(Span::from_secs(1));
        rig.calls.clear();
        rig.write(false);
        rig.written(secs, Some(GrantId(10 + secs.unsigned_abs())));
        assert_eq!(rig.dropped(), []);
    }
    rig.pass(Span::from_secs(1));
    assert_eq!(rig.dropped(), [(0, 0)]);
}

#[test]
fn further_open_prolongs_the_data_grant() {
    let mut rig = Rig::with_pages();
    rig.pass(Span::from_secs(1));
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    rig.ask(Op::Open { ino: FILE.ino, access, append: false });
    rig.respond(Ok(Reply::Opened { handle: Handle(4), attr: attr(1) }), 1, Some(GrantId(12)));
    rig.pass(Span::from_secs(4));
    assert_eq!(rig.flush(), under(1, GrantId(12)));
}

#[test]
fn grant_without_recall_is_not_prolonged() {
    let mut rig = Rig::with(Config::default());
    for start in [true, false] {
        let call = rig.reads();
        let grants = vec![Grant { recallable: false, ..data_grant(FIRST) }];
        let result = Ok(Reply::Data(b"text".to_vec()));
        let response = Response { result, after: vec![(FILE, attr(1))], grants, last: true };
        rig.event(Event::Response { call, response });
        rig.pass(Span::from_secs(if start { 3 } else { 2 }));
    }
    assert_eq!(rig.dropped(), [(0, 0)]);
}

#[test]
fn read_concurrent_with_a_local_write_sets_no_page_base() {
    let mut rig = Rig::with_pages();
    rig.pass(Span::from_secs(1));
    let read = rig.reads();
    rig.write(false);
    rig.written(2, None);
    rig.answered(read, Reply::Data(b"text".to_vec()), attr(3), Some(GrantId(12)));
    assert_eq!(rig.flush(), under(2, FIRST));
}

#[test]
fn longer_of_concurrent_writes_in_one_tick_sets_the_page_base() {
    let longer = Attr { size: 8, ..attr(2) };
    for (first, second) in [(attr(2), longer), (longer, attr(2))] {
        let mut rig = Rig::with_pages();
        rig.answered_in_order(first, second);
        assert_eq!(rig.flush().map(|since| since.stamp), Some(DataVersion::of(&longer)));
    }
}

/// A session is forgotten during write-back; `lapsed`: its term had run out. Returns the precondition in the next
/// session, in which the file is reopened as it was in that second.
fn over_a_forgotten_session(
    lapsed: bool,
    secs: i64,
    granted: Option<GrantId>,
) -> Option<WriteBackPrecondition> {
    over_a_forgotten_session_with(Config::default(), lapsed, secs, granted)
}

fn over_a_forgotten_session_with(
    config: Config,
    lapsed: bool,
    secs: i64,
    granted: Option<GrantId>,
) -> Option<WriteBackPrecondition> {
    let mut rig = Rig::with(config);
    rig.read(Some(FIRST), 1);
    let op = rig.write(true);
    let (write, _) = rig.calls.pop().unwrap();
    if lapsed {
        rig.event(Event::Expired { why: String::new() });
    }
    rig.event(Event::Restored { session: session(), kept: false });
    assert_eq!(rig.cancelled, [write]);
    let Some((_, Call::Reopen { handle: Handle(3), .. })) = rig.calls.last() else {
        panic!("{:?}", rig.calls)
    };
    rig.respond(Ok(Reply::Opened { handle: Handle(3), attr: attr(secs) }), secs, granted);
    rig.told();
    let Some((_, Call::Write { flags, .. })) = rig.calls.last() else { panic!("it is written back again") };
    let since = flags.since;
    assert_eq!(rig.written(9, None), OpReply::Written(4));
    assert!(!rig.cache.is_waiting(op));
    since
}

#[test]
fn pages_survive_a_session_lost_before_their_grant_ended() {
    let anew = GrantId(21);
    assert_eq!(over_a_forgotten_session(false, 2, Some(anew)), under(2, anew), "only we can have written");
    assert_eq!(over_a_forgotten_session(false, 2, None), ended(1), "others may, from now on");
    assert_eq!(over_a_forgotten_session(true, 2, Some(anew)), ended(1));
    assert_eq!(over_a_forgotten_session(true, 1, Some(anew)), under(1, anew), "no other client has written");
}

#[test]
fn pages_survive_a_lost_session_in_stale_mode() {
    let (config, anew) = (Config { on_disconnect: OnDisconnect::Stale, ..Config::default() }, GrantId(21));
    assert_eq!(over_a_forgotten_session_with(config, false, 2, Some(anew)), under(2, anew));
    assert_eq!(over_a_forgotten_session_with(config, false, 2, None), ended(1));
}

#[test]
fn handles_closed_while_disconnected_are_released_in_one_call() {
    let mut rig = Rig::with(Config::default());
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    rig.ask(Op::Open { ino: FILE.ino, access, append: false });
    rig.respond(Ok(Reply::Opened { handle: Handle(4), attr: attr(1) }), 1, None);
    let Some((_, OpReply::Opened(second))) = rig.answers.pop() else { panic!("not opened") };
    rig.event(Event::Expired { why: String::new() });
    for fh in [rig.fh, second.fh] {
        rig.ask(Op::Release { fh, flock: None });
    }
    assert!(rig.calls.is_empty());
    rig.event(Event::Restored { session: session(), kept: true });
    let [(_, Call::Release { handles })] = &rig.calls[..] else { panic!("{:?}", rig.calls) };
    assert_eq!(handles[..], [Handle(3), Handle(4)]);
}

#[test]
fn pages_are_dropped_after_a_failed_read() {
    let mut rig = Rig::with_pages();
    rig.ask(Op::Read { ino: FILE.ino, fh: rig.fh, offset: 0, size: 4096 });
    rig.event(Event::Recall(Recall {
        id: RecallId(1),
        node: FILE,
        covers: LeaseScope::Data,
        names: Vec::new(),
    }));
    rig.stale.clear();
    rig.respond(Err(Errno::INTR), 0, None);
    assert_eq!(rig.dropped(), [(0, 4096)]);
}

#[test]
fn pages_are_dropped_after_a_queued_request_is_aborted() {
    let on_disconnect = OnDisconnect::Fail(Span::from_secs(30));
    let mut rig = Rig::with(Config { on_disconnect, ..Config::default() });
    rig.event(Event::Expired { why: String::new() });
    rig.write(true);
    rig.stale.clear();
    rig.pass(Span::from_secs(30));
    assert_eq!(rig.answers.pop().unwrap().1, OpReply::Failed(Errno::IO));
    assert_eq!(rig.dropped(), [(0, 4)]);
}

#[test]
fn pages_of_calls_in_flight_are_dropped_when_an_expired_session_is_lost() {
    let mut rig = Rig::with_pages();
    rig.ask(Op::Read { ino: FILE.ino, fh: rig.fh, offset: 4096, size: 4096 });
    rig.event(Event::Expired { why: String::new() });
    rig.stale.clear();
    rig.event(Event::Lost { why: String::new() });
    assert_eq!(rig.dropped(), [(4096, 4096)]);
}
