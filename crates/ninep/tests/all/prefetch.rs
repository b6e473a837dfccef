//! Prefetch by the session itself: round trips, credit, and directories that change meanwhile.

use crate::stage::{Stage, config, name, written};
use nigh_ninep::{Rmessage, Tmessage};
use nigh_remote::{Event, Remote};
use nigh_types::{
    Call, CallId, Errno, LeaseScope, Name, NodeId, NodeRef, PrefetchOrder, PrefetchedDir, Reply, Response,
    Span, Term,
};

/// A tree of `dirs` directories in the root, each with `files` files and one directory.
fn tree(dirs: u32, files: u32) -> (Stage, Vec<NodeRef>) {
    let mut stage = Stage::attached();
    let root = stage.root();
    let mut made = Vec::new();
    for nth in 0..dirs {
        let dir = stage.mkdir(&root, &format!("d{nth:03}"));
        for file in 0..files {
            let (_, handle) = stage.create(&dir, &format!("f{file}"));
            stage.call(Call::Release { handles: vec![handle] });
        }
        stage.mkdir(&dir, "below");
        made.push(dir);
    }
    stage.serve();
    stage.server.seen.clear();
    (stage, made)
}

fn start(stage: &mut Stage, roots: &[NodeRef], credit: u32) -> CallId {
    stage.call(Call::Prefetch { roots: roots.to_vec(), order: PrefetchOrder::Name, credit })
}

/// Replies to all messages that are in flight, which takes one round trip. Returns false if there are none.
fn round_trip(stage: &mut Stage) -> bool {
    let asked: Vec<(u16, Tmessage)> = stage.asked.drain(..).collect();
    for (tag, message) in &asked {
        let answer = stage.server.answer(stage.now, message);
        stage.answer(*tag, &answer);
    }
    !asked.is_empty()
}

fn responses(stage: &mut Stage, call: CallId) -> Vec<Response> {
    std::iter::from_fn(|| stage.response(call)).collect()
}

fn dirs(responses: &[Response]) -> Vec<PrefetchedDir> {
    let steps = |response: &Response| match &response.result {
        Ok(Reply::Prefetched(steps)) => steps.clone(),
        other => panic!("{other:?}"),
    };
    responses.iter().flat_map(steps).collect()
}

fn names(dir: &PrefetchedDir) -> Vec<Name> {
    let entries = dir.listed.iter().flat_map(|listed| &listed.entries);
    let mut names: Vec<Name> = entries.map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}

#[test]
fn round_trips_of_a_prefetch_do_not_depend_on_the_number_of_directories() {
    let (mut stage, roots) = tree(8, 20);
    let call = start(&mut stage, &roots, 10_000);
    let mut rounds = 0;
    let mut first = None;
    while round_trip(&mut stage) {
        rounds += 1;
        let is_whole = |response: &Response| !dirs(std::slice::from_ref(response)).is_empty();
        let came = stage
            .events
            .iter()
            .any(|event| matches!(event, Event::Response { response, .. } if is_whole(response)));
        first = first.or(came.then_some(rounds));
    }
    let responses = responses(&mut stage, call);
    let dirs = dirs(&responses);
    assert_eq!(dirs.len(), 16);
    assert!(dirs.iter().all(|dir| dir.last && dir.listed.is_some()));
    assert_eq!(first, Some(6), "eight directories of 21 entries");
    assert!(rounds <= 13, "{rounds} round trips for both levels, and the fids");
    assert!(responses.last().is_some_and(|response| response.last));
    // Two for each entry and directory: a walk, and attributes.
    assert_eq!(stage.server.count("Walk"), 8 * 21 + 16);
    assert_eq!(stage.server.count("Getattr"), 8 * 21 + 16);
    stage.check_fids();
}

#[test]
fn prefetched_facts_have_the_shortest_term_of_names_and_attributes() {
    let short = Term::Limited(Span::from_millis(300));
    let mut config = config();
    config.times.attributes = short;
    let mut stage = Stage::attached_with(config);
    let root = stage.root();
    let dir = stage.mkdir(&root, "d");
    stage.mkdir(&dir, "below");
    let call = start(&mut stage, std::slice::from_ref(&dir), 10);
    stage.serve();
    let responses = responses(&mut stage, call);
    let mut grants = responses.iter().flat_map(|response| &response.grants);
    let listing = grants.find(|grant| grant.node == dir.node && grant.covers == LeaseScope::Directory);
    assert_eq!(listing.map(|grant| grant.term), Some(short));
}

#[test]
fn attributes_are_requested_only_of_directories_with_credit() {
    let (mut stage, roots) = tree(8, 20);
    let call = start(&mut stage, &roots, 30);
    stage.serve();
    let sent = dirs(&responses(&mut stage, call));
    let sent: Vec<NodeId> = sent.iter().map(|dir| dir.dir).collect();
    assert_eq!(sent, [roots[0].node, roots[1].node], "22 entries each");
    assert_eq!(stage.server.count("Getattr"), 2 * 22);
    let want = Some(roots[5].clone());
    stage.call(Call::PrefetchCredit { walk: call, credit: 0, want });
    stage.serve();
    let sent = dirs(&responses(&mut stage, call));
    assert_eq!(sent.iter().map(|dir| dir.dir).collect::<Vec<_>>(), [roots[5].node]);
    stage.call(Call::PrefetchCredit { walk: call, credit: 10_000, want: None });
    stage.serve();
    let rest = responses(&mut stage, call);
    assert_eq!(dirs(&rest).len(), 5 + 8);
    assert!(rest.last().is_some_and(|response| response.last));
    stage.check_fids();
}

#[test]
fn reply_does_not_wait_for_more_than_a_thousand_entries_besides_one_directory() {
    let (mut stage, roots) = tree(3, 599);
    let call = start(&mut stage, &roots, 10_000);
    stage.serve();
    let responses = responses(&mut stage, call);
    let came = responses.iter().map(|response| dirs(std::slice::from_ref(response)).len());
    let came: Vec<usize> = came.filter(|dirs| *dirs > 0).collect();
    assert_eq!(came[..2], [2, 1 + 2], "the third one, and what was found in the first two");
    assert_eq!(dirs(&responses).len(), 6);
    stage.check_fids();
}

/// What is read after a wait for credit is newer than what the client has learned meanwhile.
#[test]
fn reply_without_directories_precedes_the_first_request_for_names() {
    let (mut stage, roots) = tree(2, 1);
    let call = start(&mut stage, &roots, 1);
    for _ in 0..2 {
        let before = stage.server.count("Readdir");
        // Clone, open.
        for _ in 0..2 {
            assert!(responses(&mut stage, call).is_empty() && round_trip(&mut stage));
        }
        let reply = responses(&mut stage, call);
        assert!(reply.len() == 1 && dirs(&reply).is_empty() && !reply[0].last);
        assert_eq!(stage.server.count("Readdir"), before);
        stage.serve();
        assert_eq!(dirs(&responses(&mut stage, call)).len(), 1);
        stage.call(Call::PrefetchCredit { walk: call, credit: 3, want: None });
    }
}

/// Replies to all messages, with an error to those for which `fails` is true.
fn serve_but(stage: &mut Stage, errno: Errno, fails: impl Fn(&Stage, &Tmessage) -> bool) {
    while let Some((tag, message)) = stage.asked.pop_front() {
        let answer = match fails(stage, &message) {
            true => Rmessage::Lerror { errno: errno.raw().cast_unsigned() },
            false => stage.server.answer(stage.now, &message),
        };
        stage.answer(tag, &answer);
    }
}

fn walks_to(message: &Tmessage, leaves: &[&[u8]]) -> bool {
    match message {
        Tmessage::Walk { names, .. } => names.0.iter().any(|name| leaves.contains(&name.as_slice())),
        _ => false,
    }
}

fn asks_attributes_of(stage: &Stage, message: &Tmessage, leaf: &[u8]) -> bool {
    let Tmessage::Getattr { fid, .. } = message else { return false };
    let home = stage.server.fids.get(fid).and_then(|stands| stands.home.as_ref());
    home.is_some_and(|(_, name)| name.as_bytes() == leaf)
}

/// Names that could not be read would be known to be missing.
#[test]
fn directory_is_left_out_if_one_of_its_entries_cannot_be_read() {
    type Fails<'a> = &'a dyn Fn(&Stage, &Tmessage) -> bool;
    let one: Fails<'_> = &|_, message| walks_to(message, &[b"f2"]);
    let all: Fails<'_> = &|_, message| walks_to(message, &[b"f0", b"f1", b"f2", b"below"]);
    let attributes: Fails<'_> = &|stage, message| asks_attributes_of(stage, message, b"f2");
    for (what, fails) in [("one walk", one), ("all walks", all), ("attributes", attributes)] {
        let (mut stage, roots) = tree(1, 3);
        let root = stage.root();
        let other = stage.mkdir(&root, "other");
        let call = start(&mut stage, &[roots[0].clone(), other.clone()], 5);
        serve_but(&mut stage, Errno::ACCES, fails);
        let came = dirs(&responses(&mut stage, call));
        assert_eq!(came.iter().map(|dir| dir.dir).collect::<Vec<_>>(), [roots[0].node, other.node], "{what}");
        assert!(came[0].listed.is_none(), "{what}: {came:?}");
        assert!(came[1].listed.is_some(), "{what}: what was paid for the first one is given back");
        stage.check_fids();
    }
}

/// Where fids are paths, all names of a directory that was moved are gone.
#[test]
fn directory_that_is_moved_during_a_prefetch_is_left_out() {
    let (mut stage, roots) = tree(1, 3);
    let call = start(&mut stage, &roots, 100);
    // Clone, open, names, their end, walks.
    for _ in 0..5 {
        assert!(round_trip(&mut stage));
    }
    serve_but(&mut stage, Errno::NOENT, |_, message| matches!(message, Tmessage::Getattr { .. }));
    let came = dirs(&responses(&mut stage, call));
    assert!(came[0].listed.is_none(), "{came:?}");
    stage.check_fids();
}

/// The session's record of a file's size must not go back: appended data would overwrite other data.
#[test]
fn attributes_that_an_own_change_overtook_are_not_remembered() {
    let (mut stage, roots) = tree(1, 0);
    let (file, handle) = stage.create(&roots[0], "f");
    stage.done(written(&file, handle, b"old", true)).result.unwrap();
    let call = start(&mut stage, &roots, 100);
    for _ in 0..5 {
        assert!(round_trip(&mut stage));
    }
    let late: Vec<(u16, Tmessage)> = stage.asked.drain(..).collect();
    let answers: Vec<Rmessage> =
        late.iter().map(|(_, message)| stage.server.answer(stage.now, message)).collect();
    stage.done(written(&file, handle, b"second", true)).result.unwrap();
    for ((tag, _), answer) in late.iter().zip(&answers) {
        stage.answer(*tag, answer);
    }
    stage.serve();
    stage.call(written(&file, handle, b"third", true));
    let at =
        |message: &Tmessage| if let Tmessage::Write { offset, .. } = message { Some(*offset) } else { None };
    let mut offset = None;
    while offset.is_none() && !stage.asked.is_empty() {
        offset = stage.asked.iter().find_map(|(_, message)| at(message));
        stage.serve_one();
    }
    assert_eq!(offset, Some(9), "behind \"oldsecond\", for servers without O_APPEND");
    stage.serve();
    assert_eq!(dirs(&responses(&mut stage, call)).len(), 2);
}

#[test]
fn name_that_is_removed_during_a_prefetch_is_left_out() {
    let (mut stage, roots) = tree(1, 3);
    let call = start(&mut stage, &roots, 100);
    // Clone, open, names, their end.
    for _ in 0..4 {
        assert!(round_trip(&mut stage));
    }
    let root = stage.server.tree.root();
    let dir = stage.server.tree.entry(root, &name("d000")).flatten().unwrap().id;
    let unlink = Call::Unlink { dir: NodeRef::without_hint(dir), name: name("f1"), keep: None };
    stage.server.tree.execute_as_host(stage.now, unlink).unwrap();
    stage.serve();
    let dirs = dirs(&responses(&mut stage, call));
    assert_eq!(names(&dirs[0]), ["below", "f0", "f2"].map(name));
    stage.check_fids();
}

#[test]
fn cancelled_prefetch_leaves_no_fid() {
    for rounds in 0..7 {
        let (mut stage, roots) = tree(4, 4);
        let call = start(&mut stage, &roots, 10);
        for _ in 0..rounds {
            round_trip(&mut stage);
        }
        stage.session.handle_cancel(stage.now, call);
        stage.drain();
        stage.serve();
        let last = responses(&mut stage, call).pop().unwrap();
        assert_eq!(last.result, Err(Errno::INTR), "after {rounds} round trips");
        stage.check_fids();
        stage.call(Call::PrefetchCredit { walk: call, credit: 10, want: None });
        assert!(!round_trip(&mut stage), "nothing goes on");
    }
}
