//! What tests of several modules share: a session, its cache, requests, replies and listings.

use crate::op::{Caller, Fh, Op, OpReply, Opened, Output};
use crate::{Cache, Config};
use nigh_types::*;

pub(crate) const T0: Time = Time(1_000_000_000);

/// Session of an export of which nothing is known.
pub(crate) fn session() -> SessionParams {
    let root_attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
    SessionParams::plain(NodeId { ino: 1, generation: 1 }, root_attr, CookieKey::default(), Term::Session)
}

/// Cache of that session.
pub(crate) fn cache(config: Config) -> Cache {
    let mut cache = Cache::new(config);
    cache.handle_event(T0, Event::Attached(session()));
    cache
}

pub(crate) fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// All outputs up to the next timeout; invalidations are left open.
pub(crate) fn outputs(cache: &mut Cache) -> Vec<Output> {
    std::iter::from_fn(|| Some(cache.poll_output()).filter(|o| !matches!(o, Output::Timeout(..)))).collect()
}

pub(crate) fn calls(cache: &mut Cache) -> Vec<CallId> {
    let outputs = outputs(cache).into_iter();
    outputs.filter_map(|o| if let Output::Call { id, .. } = o { Some(id) } else { None }).collect()
}

/// Handles a request without a reply from memory; returns the last call that it causes.
pub(crate) fn asked(cache: &mut Cache, op: Op) -> (CallId, Call) {
    assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), op), None);
    let outputs = outputs(cache).into_iter();
    let mut calls =
        outputs.filter_map(|o| if let Output::Call { id, call, .. } = o { Some((id, call)) } else { None });
    calls.next_back().expect("the remote is asked")
}

/// As [`asked`], with the number of the call alone.
pub(crate) fn ask(cache: &mut Cache, op: Op) -> CallId {
    asked(cache, op).0
}

/// Delivers a response; returns the last reply that it causes.
pub(crate) fn replied(cache: &mut Cache, call: CallId, response: Response) -> Option<OpReply> {
    cache.handle_event(T0, Event::Response { call, response });
    let outputs = outputs(cache).into_iter();
    outputs
        .filter_map(|o| if let Output::Answer { answer, .. } = o { Some(answer) } else { None })
        .next_back()
}

/// Chunk of directory 1; the first one carries a grant.
pub(crate) fn part(names: &[&str], last: bool) -> Response {
    let entry = |(nth, text): (usize, &&str)| {
        let id = NodeId { ino: 10 + nth as u64 + u64::from(last) * 100, generation: 1 };
        let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
        (name(text), Entry { id, attr, target: None, no_xattrs: true })
    };
    let mut entries: Vec<(Name, Entry)> = names.iter().enumerate().map(entry).collect();
    entries.sort_by_key(|(name, _)| CookieKey::default().cookie(name.as_bytes()));
    let node = NodeId { ino: 1, generation: 1 };
    let (id, covers, mode, term) = (GrantId(1), LeaseScope::Directory, Mode::Read, Term::Session);
    let grant = Grant { id, node, covers, mode, term, recallable: true, shared: false };
    let grants = if last { Vec::new() } else { vec![grant] };
    Response { last, grants, ..Response::plain(Ok(Reply::Listed(Entries { entries }))) }
}

/// Returns the replies; invalidations are done at once.
pub(crate) fn answers(cache: &mut Cache) -> Vec<(OpId, OpReply)> {
    let mut answers = Vec::new();
    loop {
        match cache.poll_output() {
            Output::Answer { op, answer } => answers.push((op, answer)),
            Output::Invalidate { id, .. } => cache.handle_invalidated(T0, id),
            Output::Timeout(..) => return answers,
            _ => {}
        }
    }
}

/// Opens directory 1 and delivers these of its names.
pub(crate) fn in_part(cache: &mut Cache, names: &[&str]) -> (CallId, Fh) {
    assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), Op::OpenDir { ino: 1 }), None);
    let [call] = calls(cache)[..] else { panic!("it is listed") };
    cache.handle_event(T0, Event::Response { call, response: part(names, false) });
    let opened = answers(cache);
    let [(_, OpReply::Opened(Opened { fh, .. }))] = opened[..] else { panic!("{opened:?}") };
    (call, fh)
}
