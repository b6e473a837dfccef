use super::*;
use crate::config::Prefetch;
use crate::op::{Caller, Fh, Op, OpReply, Opened};
use crate::store::NOT_LISTED_FOR;
use crate::test_fixtures::{T0, cache, calls, outputs};
use crate::{Cache, Config};
use nigh_types::{
    Attr, Call, Cookie, CookieKey, Dirent, Entries, Entry, Errno, Event, Grant, GrantId, Kind, LeaseScope,
    Mode, Name, NodeId, OpId, PrefetchedDir, Reply, Response, Term,
};

const BUDGET: u64 = 4 << 20;
/// Symlinks of a chunk, each with a target of 4,095 bytes: about a quarter of [`BUDGET`].
const PART: usize = 256;

/// A server whose listing of directory 1 does not end, and an application that reads it.
struct Rig {
    cache: Cache,
    /// A prefetch job brings the listing.
    walks: bool,
    fh: Fh,
    list: CallId,
    names: Vec<Name>,
    told: usize,
    ops: u64,
    answers: Vec<(OpId, OpReply)>,
    cancelled: Vec<CallId>,
    calls: Vec<(CallId, Call)>,
}

impl Rig {
    fn new(tells_dirents: bool) -> Rig {
        Rig::with(tells_dirents, false)
    }

    fn with(tells_dirents: bool, walks: bool) -> Rig {
        let prefetch = if walks { Prefetch::All } else { Prefetch::Off };
        let mut cache = cache(Config { budget_bytes: BUDGET, prefetch, ..Config::default() });
        cache.state.session.set_features(None, Some(tells_dirents));
        cache.state.prefetch.set_possible(walks);
        let mut names: Vec<Name> =
            (0..20_000).map(|n| Name::new(format!("n{n}").as_bytes()).unwrap()).collect();
        names.sort_by_key(|name| CookieKey::default().cookie(name.as_bytes()));
        assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), Op::OpenDir { ino: 1 }), None);
        let [list] = calls(&mut cache)[..] else { panic!("it is listed") };
        let (answers, cancelled, calls) = (Vec::new(), Vec::new(), Vec::new());
        let mut rig =
            Rig { cache, walks, fh: Fh(0), list, names, told: 0, ops: 1, answers, cancelled, calls };
        rig.part();
        let Some((_, OpReply::Opened(Opened { fh, .. }))) = rig.answers.pop() else { panic!("not opened") };
        rig.fh = fh;
        rig
    }

    fn drain(&mut self) {
        loop {
            match self.cache.poll_output() {
                Output::Answer { op, answer } => self.answers.push((op, answer)),
                Output::Cancel(call) => self.cancelled.push(call),
                Output::Call { id, call, .. } => self.calls.push((id, call)),
                Output::Invalidate { id, .. } => self.cache.handle_invalidated(T0, id),
                Output::Timeout(..) => return,
                _ => {}
            }
        }
    }

    /// Delivers the next chunk.
    fn part(&mut self) {
        let attr = Attr { mode: 0o120_777, nlink: 1, ..Attr::default() };
        let names = &self.names[self.told..self.told + PART];
        let entry = |(nth, name): (usize, &Name)| {
            let id = NodeId { ino: 100 + (self.told + nth) as u64, generation: 1 };
            (name.clone(), Entry { id, attr, target: Some(vec![b'x'; 4095].into()), no_xattrs: true })
        };
        let entries = names.iter().enumerate().map(entry).collect();
        let grant = Grant {
            id: GrantId(1),
            node: NodeId { ino: 1, generation: 1 },
            covers: LeaseScope::Directory,
            mode: Mode::Read,
            term: Term::Session,
            recallable: true,
            shared: false,
        };
        let grants = if self.told == 0 { vec![grant] } else { Vec::new() };
        self.told += PART;
        self.reply(vec![Entries { entries }], grants);
    }

    /// Delivers chunks of the listing, or of the job, in one reply.
    fn reply(&mut self, parts: Vec<Entries>, grants: Vec<Grant>) {
        let dir = NodeId { ino: 1, generation: 1 };
        let step = |listed| PrefetchedDir { dir, listed: Some(listed), last: false };
        let reply = match self.walks {
            true => Reply::Prefetched(parts.into_iter().map(step).collect()),
            false => Reply::Listed(parts.into_iter().next().unwrap()),
        };
        let response = Response { last: false, grants, ..Response::plain(Ok(reply)) };
        self.cache.handle_event(T0, Event::Response { call: self.list, response });
        self.drain();
    }

    fn read(&mut self, offset: Cookie) -> Option<OpReply> {
        self.ops += 1;
        let read = Op::ReadDir { ino: 1, fh: self.fh, offset, size: 4096, plus: false };
        let answer = self.cache.handle_op(T0, OpId(self.ops), Caller::default(), read);
        self.drain();
        answer
    }

    fn cookie(&self, nth: usize) -> Cookie {
        CookieKey::default().cookie(self.names[nth].as_bytes())
    }

    /// Delivers chunks until the listing is cancelled.
    fn until_cancelled(&mut self) {
        while self.cancelled.is_empty() {
            self.part();
            assert!(self.cache.gauges().bytes <= 2 * BUDGET + BUDGET / 2, "{} parts", self.told / PART);
        }
    }
}

#[test]
fn endless_listing_is_cancelled_and_its_memory_given_back() {
    let mut rig = Rig::new(false);
    let behind = rig.cookie(rig.names.len() - 1);
    assert_eq!(rig.read(behind), None, "the application waits for a name that has not come");
    rig.until_cancelled();
    assert_eq!(rig.cancelled, [rig.list]);
    assert!(matches!(rig.answers[..], [(OpId(2), OpReply::Failed(Errno::NOMEM))]), "{:?}", rig.answers);
    for _ in 0..20 {
        rig.part();
        assert!(rig.cache.gauges().bytes < BUDGET / 16, "parts of a cancelled listing are kept");
    }
    assert_eq!(rig.read(Cookie(0)), Some(OpReply::Failed(Errno::NOMEM)));
    assert_eq!(rig.calls, [], "the directory is listed again");
}

#[test]
fn listing_without_readers_is_cancelled_at_the_budget() {
    let mut rig = Rig::new(true);
    rig.cache.handle_op(T0, OpId(9), Caller::default(), Op::ReleaseDir { fh: rig.fh });
    while rig.cancelled.is_empty() {
        rig.part();
        assert!(rig.cache.gauges().bytes <= BUDGET + BUDGET / 2);
    }
    assert!(rig.cache.gauges().bytes < BUDGET / 16);
}

#[test]
fn reader_of_a_directory_beyond_the_budget_continues_names_only_from_its_offset() {
    let mut rig = Rig::new(true);
    let behind = rig.cookie(rig.names.len() - 100);
    assert_eq!(rig.read(behind), None);
    rig.until_cancelled();
    let [(call, Call::ListNames { after, .. })] = rig.calls[..] else { panic!("{:?}", rig.calls) };
    assert_eq!(after, behind);
    let last = rig.names[rig.names.len() - 99..].iter().map(|name| Dirent {
        name: name.clone(),
        ino: 7,
        kind: Some(Kind::File),
    });
    let response = Response::plain(Ok(Reply::Dirents(last.collect())));
    rig.cache.handle_event(T0, Event::Response { call, response });
    rig.drain();
    let Some((OpId(2), OpReply::Page(page))) = rig.answers.pop() else { panic!("{:?}", rig.answers) };
    assert!(page.names.starts_with(rig.names[rig.names.len() - 99].as_bytes()));
    assert_eq!(rig.cache.counters().waits, 2, "opening and one read waited");
}

#[test]
fn directory_that_was_too_large_is_listed_again_after_a_while() {
    let mut rig = Rig::new(false);
    rig.until_cancelled();
    let open = |rig: &mut Rig, now: Time| {
        rig.calls.clear();
        let answer = rig.cache.handle_op(now, OpId(50), Caller::default(), Op::OpenDir { ino: 1 });
        rig.drain();
        (answer.is_some(), rig.calls.len())
    };
    assert_eq!(open(&mut rig, T0), (true, 0));
    assert_eq!(open(&mut rig, T0.after(NOT_LISTED_FOR)), (false, 1));
}

#[test]
fn endless_name_stream_is_truncated_at_the_budget_and_resumed_at_its_end() {
    let mut rig = Rig::new(true);
    rig.until_cancelled();
    let mut offset = rig.cookie(rig.told - 1);
    assert_eq!(rig.read(offset), None);
    let [(mut call, Call::ListNames { .. })] = rig.calls[..] else { panic!("{:?}", rig.calls) };
    rig.cancelled.clear();
    rig.names = (0..200_000).map(|n| Name::new(format!("{n:0240}").as_bytes()).unwrap()).collect();
    rig.names.sort_by_key(|name| CookieKey::default().cookie(name.as_bytes()));
    let mut at = rig.names.partition_point(|name| CookieKey::default().cookie(name.as_bytes()) <= offset);
    while rig.cancelled.is_empty() {
        let names = rig.names[at..at + 1000].iter();
        let dirents = names.map(|name| Dirent { name: name.clone(), ino: 7, kind: None }).collect();
        at += 1000;
        let response = Response { last: false, ..Response::plain(Ok(Reply::Dirents(dirents))) };
        rig.cache.handle_event(T0, Event::Response { call, response });
        rig.drain();
        assert!(rig.cache.gauges().bytes < BUDGET + BUDGET / 4);
    }
    assert_eq!(rig.cancelled, [call]);
    rig.calls.clear();
    let mut pages = 0;
    while let Some(answer) = rig.read(offset) {
        let OpReply::Page(page) = answer else { panic!("{answer:?}") };
        offset = page.entries.last().expect("names are left").next;
        pages += 1;
    }
    let [(next, Call::ListNames { after, .. })] = rig.calls[..] else { panic!("{:?}", rig.calls) };
    assert_eq!((after, after), (offset, rig.cookie(at - 1)), "no name is left out");
    assert!(pages > 100 && next != call);
    call = next;
    rig.cache.handle_event(
        T0,
        Event::Response { call, response: Response::plain(Ok(Reply::Dirents(Vec::new()))) },
    );
    rig.drain();
    assert!(matches!(&rig.answers[..], [.., (_, OpReply::Page(page))] if page.entries.is_empty()));
}

#[test]
fn reader_beyond_the_budget_restarts_its_name_stream_under_memory_pressure() {
    let mut rig = Rig::new(true);
    rig.until_cancelled();
    let offset = rig.cookie(rig.told - 1);
    assert_eq!(rig.read(offset), None);
    let [(first, Call::ListNames { .. })] = rig.calls[..] else { panic!("{:?}", rig.calls) };
    rig.cancelled.clear();
    // Another directory was read last.
    rig.cache.state.open.names.forget_last();
    rig.cache.handle_pressure(T0);
    rig.drain();
    assert_eq!(rig.cancelled, [first]);
    let [_, (second, Call::ListNames { after, .. })] = rig.calls[..] else { panic!("{:?}", rig.calls) };
    assert_eq!(after, offset);
    let response = Response::plain(Ok(Reply::Dirents(Vec::new())));
    rig.cache.handle_event(T0, Event::Response { call: second, response });
    rig.drain();
    assert!(matches!(&rig.answers[..], [.., (_, OpReply::Page(_))]), "{:?}", rig.answers);
}

#[test]
fn prefetch_job_that_lists_a_directory_beyond_the_budget_is_cancelled() {
    let mut rig = Rig::with(false, true);
    rig.until_cancelled();
    assert_eq!(rig.cancelled, [rig.list], "the remote knows the walk and not its listings");
    for _ in 0..20 {
        rig.part();
        assert!(rig.cache.gauges().bytes < BUDGET / 16, "parts of a cancelled walk are kept");
    }
    assert_eq!(rig.read(Cookie(0)), Some(OpReply::Failed(Errno::NOMEM)));
    assert_eq!((&rig.calls[..], rig.cancelled.len()), (&[][..], 1), "the directory is listed again");
}

#[test]
fn grants_of_a_cancelled_prefetch_job_are_returned() {
    let mut rig = Rig::with(false, true);
    let (below, entry) = (NodeId { ino: 7, generation: 1 }, |n| Entry {
        id: NodeId { ino: n, generation: 1 },
        attr: Attr { mode: 0o120_777, nlink: 1, ..Attr::default() },
        target: Some(vec![b'x'; 4095].into()),
        no_xattrs: true,
    });
    let many = rig.names[rig.told..rig.told + 9 * PART].iter().zip(1_000..);
    let many = many.map(|(name, n)| (name.clone(), entry(n))).collect();
    let step = |dir, entries| PrefetchedDir { dir, listed: Some(Entries { entries }), last: false };
    let steps = vec![step(NodeId { ino: 1, generation: 1 }, many), step(below, Vec::new())];
    let grant = Grant {
        id: GrantId(5),
        node: below,
        covers: LeaseScope::Directory,
        mode: Mode::Read,
        term: Term::Session,
        recallable: true,
        shared: false,
    };
    let response =
        Response { last: false, grants: vec![grant], ..Response::plain(Ok(Reply::Prefetched(steps))) };
    rig.cache.handle_event(T0, Event::Response { call: rig.list, response });
    let outputs = outputs(&mut rig.cache);
    assert!(outputs.contains(&Output::Cancel(rig.list)), "{outputs:?}");
    assert!(outputs.contains(&Output::Return(vec![GrantId(5)])), "{outputs:?}");
    assert!(rig.cache.state.calls.contains(rig.list), "its end is waited for");
}
