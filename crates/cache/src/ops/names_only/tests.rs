use super::*;
use crate::Config;
use crate::cache::Cache;
use crate::op::{Op, Opened, Output};
use crate::test_fixtures::{T0, cache, outputs};
use nigh_types::{
    Attr, Cookie, Dirent, Entries, Entry, Errno, Event, Grant, GrantId, Kind, LeaseScope, Mode, Name, NodeId,
    Reply, Response, Term,
};

/// A reader that wants names only, and one without a history.
const QUIET: u32 = 7;
const ANYBODY: u32 = 8;

struct Rig {
    cache: Cache,
    fh: Fh,
    list: CallId,
    ops: u64,
    who: u32,
    /// Names of the first chunk, and some that come later.
    first: Vec<Name>,
    later: Vec<Name>,
}

fn dirent(name: &Name) -> Dirent {
    Dirent { name: name.clone(), ino: 70, kind: Some(Kind::File) }
}

/// Chunk of directory 1, with attributes; the first one carries a grant.
fn listed(names: &[Name], last: bool, is_first: bool) -> Response {
    let id = |nth: usize| NodeId { ino: 10 + nth as u64 + u64::from(last) * 100, generation: 1 };
    let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
    let entry = |(nth, name): (usize, &Name)| {
        (name.clone(), Entry { id: id(nth), attr, target: None, no_xattrs: true })
    };
    let entries = names.iter().enumerate().map(entry).collect();
    let (node, covers, mode) = (NodeId { ino: 1, generation: 1 }, LeaseScope::Directory, Mode::Read);
    let grant =
        Grant { id: GrantId(1), node, covers, mode, term: Term::Session, recallable: true, shared: false };
    let grants = if is_first { vec![grant] } else { Vec::new() };
    Response { last, grants, ..Response::plain(Ok(Reply::Listed(Entries { entries }))) }
}

impl Rig {
    /// Opens the directory and delivers four names at the beginning of a large one.
    fn new(who: u32, config: Config) -> Rig {
        let mut cache = cache(config);
        cache.state.session.set_features(None, Some(true));
        (0..8).for_each(|_| cache.state.open.readers.probed(QUIET));
        let key = cache.state.store.key();
        let cookie = |name: &Name| key.cookie(name.as_bytes());
        let all = (0..).map(|n: u32| Name::new(n.to_string().as_bytes()).unwrap());
        let early = i64::MAX.unsigned_abs() / (WORTH_ASKING / 2);
        let mut first: Vec<Name> = all.clone().filter(|name| cookie(name).0 < early).take(4).collect();
        let mut later: Vec<Name> = all.filter(|name| cookie(name).0 > early).take(6).collect();
        first.sort_by_key(cookie);
        later.sort_by_key(cookie);
        let mut rig = Rig { cache, fh: Fh(0), list: CallId(0), ops: 0, who, first, later };
        rig.ask(Op::OpenDir { ino: 1 });
        let [(list, Call::List { .. })] = &rig.calls()[..] else { panic!("it is listed") };
        rig.list = *list;
        let part = listed(&rig.first, false, true);
        let opened = rig.hear(rig.list, part);
        let [(_, OpReply::Opened(Opened { fh, .. }))] = opened[..] else { panic!("{opened:?}") };
        rig.fh = fh;
        rig
    }

    fn ask(&mut self, what: Op) -> Option<OpReply> {
        self.ops += 1;
        let caller = Caller { pid: self.who, ..Caller::default() };
        self.cache.handle_op(T0, OpId(self.ops), caller, what)
    }

    fn read(&mut self, offset: Cookie) -> Option<OpReply> {
        // Room for four names.
        self.ask(Op::ReadDir { ino: 1, fh: self.fh, offset, size: 4 * 32, plus: false })
    }

    fn calls(&mut self) -> Vec<(CallId, Call)> {
        let outputs = outputs(&mut self.cache).into_iter();
        outputs
            .filter_map(|o| if let Output::Call { id, call, .. } = o { Some((id, call)) } else { None })
            .collect()
    }

    fn hear(&mut self, call: CallId, response: Response) -> Vec<(OpId, OpReply)> {
        self.cache.handle_event(T0, Event::Response { call, response });
        let outputs = outputs(&mut self.cache).into_iter();
        outputs
            .filter_map(|o| if let Output::Answer { op, answer } = o { Some((op, answer)) } else { None })
            .collect()
    }

    fn tell(&mut self, call: CallId, names: &[Name], last: bool) -> Vec<(OpId, OpReply)> {
        let dirents = names.iter().map(dirent).collect();
        self.hear(call, Response { last, ..Response::plain(Ok(Reply::Dirents(dirents))) })
    }

    fn cookie(&self, name: &Name) -> Cookie {
        self.cache.state.store.key().cookie(name.as_bytes())
    }

    /// Reads the first page, and asks for names only after it.
    fn at_the_next(who: u32, config: Config) -> (Rig, CallId) {
        let mut rig = Rig::new(who, config);
        let behind = rig.cookie(&rig.first[3].clone());
        assert_eq!(rig.read(behind), None);
        let [(call, Call::ListNames { after, .. })] = rig.calls()[..] else { panic!("names are asked for") };
        assert_eq!(after, behind);
        (rig, call)
    }
}

fn page(answer: &OpReply) -> (Vec<u8>, Vec<u64>, Option<Cookie>) {
    let OpReply::Page(page) = answer else { panic!("{answer:?}") };
    assert!(page.entries.iter().all(|entry| entry.node.is_none()));
    let next = page.entries.last().map(|entry| entry.next);
    (page.names.clone(), page.entries.iter().map(|entry| entry.ino).collect(), next)
}

fn text(names: &[Name]) -> Vec<u8> {
    names.iter().flat_map(|name| name.as_bytes().to_vec()).collect()
}

#[test]
fn names_only_reader_of_a_large_directory_gets_names_without_attributes() {
    let (mut rig, call) = Rig::at_the_next(QUIET, Config::default());
    let later = rig.later.clone();
    assert_eq!(rig.tell(call, &later[..2], false), [], "a page is not full");
    let told = rig.tell(call, &later[2..], true);
    let [(OpId(2), answer)] = &told[..] else { panic!("{told:?}") };
    let (names, inos, next) = page(answer);
    assert_eq!((names, inos), (text(&later[..4]), vec![70; 4]));
    let (names, _, next) = page(&rig.read(next.unwrap()).expect("it has come"));
    assert_eq!(names, text(&later[4..]));
    assert_eq!(page(&rig.read(next.unwrap()).expect("it is whole")).0, b"");
    // They are no facts: a lookup asks the remote.
    let name = later[0].clone();
    assert_eq!(rig.ask(Op::Lookup { dir: 1, name }), None);
    assert!(matches!(rig.calls()[..], [(_, Call::Lookup { .. })]));
    assert_eq!(rig.cache.state.open.names.count(), 1);
    rig.ask(Op::ReleaseDir { fh: rig.fh });
    assert_eq!((rig.cache.state.open.names.bytes(), rig.cache.state.open.names.count()), (0, 0));
    assert!(!outputs(&mut rig.cache).iter().any(|output| matches!(output, Output::Cancel(_))));
}

#[test]
fn other_readers_and_readers_of_small_directories_wait_for_attributes() {
    let mut rig = Rig::new(ANYBODY, Config::default());
    let behind = rig.cookie(&rig.first[3].clone());
    assert_eq!((rig.read(behind), rig.calls()), (None, vec![]));
    let mut rig = Rig::new(QUIET, Config::default());
    let (list, later) = (rig.list, rig.later.clone());
    assert_eq!(rig.hear(list, listed(&later[..3], false, false)), []);
    let behind = rig.cookie(&later[2]);
    assert_eq!((rig.read(behind), rig.calls()), (None, vec![]), "few are to come");
}

#[test]
fn listed_entries_are_served_before_names_only_ones() {
    let (mut rig, call) = Rig::at_the_next(QUIET, Config::default());
    let (list, later) = (rig.list, rig.later.clone());
    assert_eq!(rig.tell(call, &later[..2], false), []);
    let told = rig.hear(list, listed(&later, true, false));
    let [(OpId(2), OpReply::Page(page))] = &told[..] else { panic!("{told:?}") };
    assert!(page.entries.iter().all(|entry| entry.ino >= 110), "{page:?}");
    assert_eq!(rig.tell(call, &later[2..4], false), []);
}

/// A waiting reader joins a listing in flight, instead of sending another one.
#[test]
fn aborted_name_stream_leaves_a_listing_in_flight_running() {
    let config = Config { budget_bytes: 1, ..Config::default() };
    let (mut rig, call) = Rig::at_the_next(QUIET, config);
    let (list, later) = (rig.list, rig.later.clone());
    rig.tell(call, &later[..2], false);
    rig.cache.state.open.names.forget_last();
    rig.cache.handle_event(T0, Event::Response { call: list, response: listed(&later[..1], false, false) });
    assert_eq!(rig.calls(), [], "it is on its way");
    assert_eq!(rig.cache.state.open.names.bytes(), 0);
    let told = rig.hear(list, listed(&later[1..], true, false));
    let [(OpId(2), OpReply::Page(page))] = &told[..] else { panic!("{told:?}") };
    assert_eq!(page.names, text(&later[..4]));
}

#[test]
fn refused_names_only_call_makes_the_reader_wait_for_the_listing() {
    for refusal in [Err(Errno::IO), Ok(Reply::Done)] {
        let (mut rig, call) = Rig::at_the_next(QUIET, Config::default());
        let (list, later) = (rig.list, rig.later.clone());
        assert_eq!(rig.hear(call, Response::plain(refusal)), []);
        let told = rig.hear(list, listed(&later, true, false));
        let [(OpId(2), OpReply::Page(page))] = &told[..] else { panic!("{told:?}") };
        assert_eq!(page.names, text(&later[..4]));
        assert_eq!(rig.cache.gauges().pending_operations, 0);
    }
}

#[test]
fn close_or_rewind_cancels_a_name_stream_and_drops_late_chunks() {
    for rewinds in [false, true] {
        let (mut rig, call) = Rig::at_the_next(QUIET, Config::default());
        let later = rig.later.clone();
        rig.tell(call, &later[..2], false);
        if rewinds {
            assert!(rig.read(Cookie(0)).is_some(), "the first page is known");
        } else {
            rig.ask(Op::ReleaseDir { fh: rig.fh });
        }
        let outputs = outputs(&mut rig.cache);
        assert!(outputs.contains(&Output::Cancel(call)), "{outputs:?}");
        rig.tell(call, &later[2..4], false);
        rig.hear(call, Response::plain(Err(Errno::INTR)));
        assert_eq!(rig.cache.state.open.names.bytes(), 0);
        assert!(!rig.cache.state.calls.contains(call));
    }
}

/// The reader has read none of the names, and another directory is read meanwhile.
#[test]
fn name_streams_count_as_memory_and_are_dropped_under_pressure() {
    let (mut rig, call) = Rig::at_the_next(QUIET, Config::default());
    let later = rig.later.clone();
    let before = rig.cache.gauges().bytes;
    rig.tell(call, &later[..2], false);
    let bytes = rig.cache.state.open.names.bytes();
    assert!(bytes >= 2 * 24 && rig.cache.gauges().bytes == before + bytes);
    rig.cache.state.open.names.forget_last();
    rig.cache.handle_pressure(T0);
    assert_eq!(rig.cache.state.open.names.bytes(), 0);
    rig.tell(call, &later[2..4], true);
    assert_eq!((rig.cache.state.open.names.bytes(), rig.calls()), (0, vec![]), "nor is it begun again");
    let (list, later) = (rig.list, later.clone());
    let told = rig.hear(list, listed(&later, true, false));
    assert!(matches!(&told[..], [(OpId(2), OpReply::Page(_))]), "{told:?}");
}

#[test]
fn lost_session_drops_name_streams() {
    let (mut rig, call) = Rig::at_the_next(QUIET, Config::default());
    let later = rig.later.clone();
    rig.tell(call, &later[..2], false);
    rig.cache.handle_event(T0, Event::Lost { why: String::new() });
    assert_eq!((rig.cache.state.open.names.bytes(), rig.cache.gauges().pending_operations), (0, 0));
}

#[test]
fn passed_chunk_is_dropped_and_seeking_back_sends_another_call() {
    let (mut rig, call) = Rig::at_the_next(QUIET, Config::default());
    let later = rig.later.clone();
    rig.tell(call, &later[..4], false);
    let whole = rig.cache.state.open.names.bytes();
    let behind = rig.cookie(&later[3]);
    assert_eq!(rig.read(behind), None);
    assert!(rig.cache.state.open.names.bytes() < whole);
    let behind_first = rig.cookie(&later[0]);
    assert_eq!(rig.read(behind_first), None);
    let calls = rig.calls();
    let [(_, Call::ListNames { after, .. })] = calls[..] else { panic!("{calls:?}") };
    assert_eq!(after, behind_first);
}
