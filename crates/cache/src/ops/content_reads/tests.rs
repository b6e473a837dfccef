//! Rights and races of contents that were read ahead.

use super::*;
use crate::op::{CredentialsId, Opened};
use crate::test_fixtures::{T0, answers, name, session};
use crate::{Cache, Config, Op, Output};
use nigh_types::*;

const FILES: u64 = 8;
const TEXT: &[u8] = b"hello";

fn file(nth: u64) -> NodeId {
    NodeId { ino: 10 + nth, generation: 1 }
}

fn attr() -> Attr {
    Attr { mode: 0o100_644, nlink: 1, size: TEXT.len() as u64, ..Attr::default() }
}

fn grant(node: NodeId, covers: LeaseScope, id: u64) -> Grant {
    let (mode, term) = (Mode::Read, Term::Session);
    Grant { id: GrantId(id), node, covers, mode, term, recallable: true, shared: false }
}

struct Rig {
    cache: Cache,
    op: u64,
    caller: Caller,
    calls: Vec<(CallId, Option<Caller>, Call)>,
    answers: Vec<(OpId, OpReply)>,
    /// Files stored in the kernel's page cache.
    stores: Vec<(u64, Vec<u8>)>,
}

impl Rig {
    /// A session whose root directory is listed.
    fn new(uniform_rights: bool) -> Rig {
        Rig::with(Features { uniform_rights, ..Features::default() })
    }

    fn with(supports: Features) -> Rig {
        let mut cache = Cache::new(Config::default());
        cache.handle_event(T0, Event::Attached(SessionParams { supports, ..session() }));
        let (calls, answers, stores) = (Vec::new(), Vec::new(), Vec::new());
        let mut rig = Rig { cache, op: 0, caller: Caller::default(), calls, answers, stores };
        rig.ask(Op::OpenDir { ino: 1 });
        let (call, ..) = rig.calls.pop().unwrap();
        let entry = |nth: u64| {
            let entry = Entry { id: file(nth), attr: attr(), target: None, no_xattrs: true };
            (name(&format!("f{nth}")), entry)
        };
        let mut entries: Vec<(Name, Entry)> = (0..FILES).map(entry).collect();
        entries.sort_by_key(|(name, _)| CookieKey::default().cookie(name.as_bytes()));
        let grants = vec![grant(session().root, LeaseScope::Directory, 1)];
        let response = Response { grants, ..Response::plain(Ok(Reply::Listed(Entries { entries }))) };
        rig.event(Event::Response { call, response });
        rig
    }

    fn event(&mut self, event: Event) {
        self.cache.handle_event(T0, event);
        self.drain();
    }

    fn drain(&mut self) {
        loop {
            match self.cache.poll_output() {
                Output::Call { id, caller, call, .. } => self.calls.push((id, caller, call)),
                Output::Answer { op, answer } => self.answers.push((op, answer)),
                Output::Store { ino, data } => self.stores.push((ino, data)),
                Output::Invalidate { id, .. } => self.cache.handle_invalidated(T0, id),
                Output::Timeout(..) => return,
                _ => {}
            }
        }
    }

    fn ask(&mut self, op: Op) -> Option<OpReply> {
        self.op += 1;
        let answer = self.cache.handle_op(T0, OpId(self.op), self.caller, op);
        self.drain();
        answer
    }

    fn open(&mut self, nth: u64) -> Fh {
        self.open_as(nth, false)
    }

    fn open_as(&mut self, nth: u64, direct: bool) -> Fh {
        let lookup = self.ask(Op::Lookup { dir: 1, name: name(&format!("f{nth}")) });
        assert!(matches!(lookup, Some(OpReply::Node(_))), "{lookup:?}");
        let access = Access { read: true, write: false, truncate: false, direct, sync: false, append: false };
        match self.ask(Op::Open { ino: file(nth).ino, access, append: false }) {
            Some(OpReply::Opened(Opened { fh, .. })) => fh,
            other => panic!("{other:?}"),
        }
    }

    fn read(&mut self, nth: u64, fh: Fh) -> Option<OpReply> {
        self.ask(Op::Read { ino: file(nth).ino, fh, offset: 0, size: 4_096 })
    }

    /// Answers a READ in flight with the text, under a grant.
    fn bring(&mut self, at: usize) {
        let (call, _, asked) = self.calls.remove(at);
        let Call::Read { node, .. } = asked else { panic!("{asked:?}") };
        let grants = vec![grant(node.node, LeaseScope::Data, 100 + call.0)];
        let after = vec![(node.node, attr())];
        let response = Response { grants, after, ..Response::plain(Ok(Reply::Data(TEXT.to_vec()))) };
        self.event(Event::Response { call, response });
    }

    /// Reads two files to their end. Leaves the reads ahead of the others in flight.
    fn read_two(&mut self) {
        for nth in 0..2 {
            let fh = self.open(nth);
            assert_eq!(self.read(nth, fh), None);
            self.bring(0);
        }
    }

    fn place_of_read(&self, nth: u64) -> usize {
        let is_read = |call: &Call| matches!(call, Call::Read { node, .. } if node.node == file(nth));
        self.calls.iter().position(|(.., call)| is_read(call)).expect("it is read ahead")
    }
}

/// A server that reads as each caller may refuse another caller what it gave to this one.
#[test]
fn nothing_is_read_ahead_for_a_caller_with_unknown_credentials_where_rights_depend_on_them() {
    let mut rig = Rig::new(false);
    rig.read_two();
    assert!(rig.calls.is_empty(), "{:?}", rig.calls);
    let mut rig = Rig::new(true);
    rig.read_two();
    assert!(!rig.calls.is_empty());
}

fn known(uid: u32, credentials: u32) -> Caller {
    Caller { uid, pid: 77, credentials: Some(CredentialsId(credentials)), ..Caller::default() }
}

/// The pid of a caller may be that of another process by the time at which a read ahead is sent.
#[test]
fn contents_read_with_some_credentials_are_not_served_to_others() {
    let mut rig = Rig::new(false);
    rig.caller = known(1000, 3);
    rig.read_two();
    let own = Some(Caller { pid: 0, ..rig.caller });
    assert!(
        !rig.calls.is_empty() && rig.calls.iter().all(|(_, caller, _)| *caller == own),
        "{:?}",
        rig.calls
    );
    let Call::Read { node, .. } = &rig.calls[0].2 else { panic!("{:?}", rig.calls) };
    let next = node.node.ino - file(0).ino;
    rig.bring(0);
    let same_user_with_other_groups = known(1000, 4);
    let unknown = Caller { credentials: None, ..rig.caller };
    for other in [same_user_with_other_groups, unknown, known(1001, 5)] {
        rig.caller = other;
        let fh = rig.open(next);
        let count = rig.calls.len();
        assert_eq!(rig.read(next, fh), None, "{other:?}");
        assert_eq!(rig.calls.len(), count + 1, "{other:?}");
    }
    rig.caller = known(1000, 3);
    let fh = rig.open(next);
    assert_eq!(rig.read(next, fh), Some(OpReply::Data(TEXT.to_vec())));
}

/// The server may have taken the right to read a file from its callers, without a change of its data.
#[test]
fn contents_read_with_some_credentials_are_not_served_without_attributes() {
    for (uniform_rights, is_served) in [(false, false), (true, true)] {
        let mut rig = Rig::new(uniform_rights);
        rig.caller = known(1000, 3);
        rig.read_two();
        let fh = rig.open(5);
        rig.bring(rig.place_of_read(5));
        let (node, covers) = (session().root, LeaseScope::Directory);
        let recall = Recall { id: RecallId(1), node, covers, names: Vec::new() };
        rig.event(Event::Recall(recall));
        assert_eq!(rig.read(5, fh).is_some(), is_served);
    }
}

#[test]
fn contents_that_came_are_served_without_a_call_and_joined_reads_wait_for_them() {
    let mut rig = Rig::new(true);
    rig.read_two();
    let Call::Read { node, .. } = &rig.calls[0].2 else { panic!("{:?}", rig.calls) };
    let next = node.node.ino - file(0).ino;
    let fh = rig.open(next);
    let count = rig.calls.len();
    assert_eq!(rig.read(next, fh), None, "it is on its way");
    let waiting = OpId(rig.op);
    assert_eq!(rig.calls.len(), count, "nothing more is asked");
    rig.bring(rig.place_of_read(next));
    assert!(rig.answers.contains(&(waiting, OpReply::Data(TEXT.to_vec()))));
    let counters = rig.cache.counters();
    assert_eq!((counters.joins, counters.contents_used), (1, TEXT.len() as u64));
    assert_eq!(rig.read(next, fh), Some(OpReply::Data(TEXT.to_vec())));
}

#[test]
fn file_without_a_handle_is_read_with_the_rights_of_its_opener() {
    for (uniform_rights, expected) in [(false, Some(1000)), (true, None)] {
        let mut rig = Rig::new(uniform_rights);
        rig.caller = Caller { uid: 1000, ..Caller::default() };
        let fh = rig.open(0);
        for uid in [1000, 1001] {
            rig.caller.uid = uid;
            assert_eq!(rig.read(0, fh), None);
            let (_, caller, _) = rig.calls.pop().unwrap();
            assert_eq!(caller.map(|caller| caller.uid), expected);
        }
    }
}

/// As over 9P, where the server knows each user.
#[test]
fn contents_read_for_one_uid_are_not_served_to_another() {
    let mut rig = Rig::with(Features { rights_by_uid: true, ..Features::default() });
    rig.read_two();
    assert!(!rig.calls.is_empty() && rig.calls.iter().all(|(_, caller, _)| *caller == Some(rig.caller)));
    let Call::Read { node, .. } = &rig.calls[0].2 else { panic!("{:?}", rig.calls) };
    let next = node.node.ino - file(0).ino;
    rig.bring(0);
    let other = Caller { uid: 1000, gid: 1000, ..Caller::default() };
    let own = std::mem::replace(&mut rig.caller, other);
    let fh = rig.open(next);
    assert_eq!(rig.read(next, fh), None);
    let (_, caller, Call::Read { node, .. }) = rig.calls.last().unwrap() else { panic!("{:?}", rig.calls) };
    assert_eq!((*caller, node.node), (Some(other), file(next)));
    rig.caller = own;
    let fh = rig.open(next);
    assert_eq!(rig.read(next, fh), Some(OpReply::Data(TEXT.to_vec())));
}

/// An invalidation leaves out the pages of reads that wait. A direct read has none locked: older ones would stay.
#[test]
fn direct_read_does_not_wait_for_contents_on_their_way() {
    let mut rig = Rig::new(true);
    rig.read_two();
    let fh = rig.open_as(5, true);
    let count = rig.calls.len();
    assert_eq!(rig.read(5, fh), None);
    assert_eq!(rig.calls.len(), count + 1, "it has a call of its own");
}

#[test]
fn reply_that_a_recall_overtakes_is_not_kept_and_its_reader_asks_again() {
    let mut rig = Rig::new(true);
    rig.read_two();
    let fh = rig.open(5);
    assert_eq!(rig.read(5, fh), None);
    let waiting = OpId(rig.op);
    let recall = Recall { id: RecallId(1), node: file(5), covers: LeaseScope::Data, names: Vec::new() };
    rig.event(Event::Recall(recall));
    rig.bring(rig.place_of_read(5));
    assert!(!rig.answers.iter().any(|(op, _)| *op == waiting));
    rig.bring(rig.place_of_read(5));
    assert!(rig.answers.contains(&(waiting, OpReply::Data(TEXT.to_vec()))));
}

#[test]
fn recall_drops_contents_that_came() {
    let mut rig = Rig::new(true);
    rig.read_two();
    rig.bring(rig.place_of_read(5));
    assert_eq!(rig.cache.gauges().contents_files, 1);
    let recall = Recall { id: RecallId(1), node: file(5), covers: LeaseScope::Data, names: Vec::new() };
    rig.event(Event::Recall(recall));
    assert_eq!(rig.cache.gauges().contents_files, 0);
    let fh = rig.open(5);
    assert_eq!(rig.read(5, fh), None);
}

#[test]
fn memory_pressure_gives_contents_back_first() {
    let mut rig = Rig::new(true);
    rig.read_two();
    rig.bring(rig.place_of_read(5));
    rig.cache.handle_pressure(T0);
    assert_eq!(rig.cache.gauges().contents_bytes, 0);
    let _ = answers(&mut rig.cache);
}

/// The kernel then asks neither for them nor, after that, for the attributes.
#[test]
fn file_that_came_ahead_is_stored_in_the_page_cache_when_it_is_opened_first() {
    let mut rig = Rig::new(true);
    rig.read_two();
    assert_eq!(rig.stores, [], "the kernel has read those itself");
    let early = rig.open(5);
    assert_eq!(rig.stores, [], "it has not come");
    rig.ask(Op::Release { fh: early, flock: None });
    rig.bring(rig.place_of_read(5));
    let fh = rig.open(5);
    assert_eq!(rig.stores, [(file(5).ino, TEXT.to_vec())]);
    rig.open(5);
    rig.ask(Op::Release { fh, flock: None });
    rig.open(5);
    assert_eq!(rig.stores.len(), 1, "the kernel may still have the pages");
    assert_eq!(rig.cache.counters().contents_stored, TEXT.len() as u64);
}

/// A page of an open file may be locked until a request has its reply, and reads that bypass the page cache would not
/// find the file there.
#[test]
fn file_that_is_open_or_opened_for_direct_reads_is_not_stored() {
    for is_open in [false, true] {
        let mut rig = Rig::new(true);
        rig.read_two();
        if is_open {
            rig.open(5);
        }
        rig.bring(rig.place_of_read(5));
        rig.open_as(5, !is_open);
        assert_eq!(rig.stores, []);
    }
}

#[test]
fn file_is_not_stored_after_a_recall_until_it_has_come_again() {
    let mut rig = Rig::new(true);
    rig.read_two();
    rig.bring(rig.place_of_read(5));
    let recall = Recall { id: RecallId(1), node: file(5), covers: LeaseScope::Data, names: Vec::new() };
    rig.event(Event::Recall(recall));
    rig.open(5);
    assert_eq!(rig.stores, []);
}

/// The page cache serves all callers; what another one may not read is not stored for it.
#[test]
fn contents_read_with_some_credentials_are_not_stored_for_others() {
    let mut rig = Rig::new(false);
    rig.caller = known(1000, 3);
    rig.read_two();
    rig.bring(rig.place_of_read(5));
    rig.caller = known(1000, 4);
    let fh = rig.open(5);
    assert_eq!(rig.stores, []);
    rig.ask(Op::Release { fh, flock: None });
    rig.caller = known(1000, 3);
    rig.open(5);
    assert_eq!(rig.stores.len(), 1);
}
