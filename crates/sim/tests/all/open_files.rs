//! Open files: reads are opened without a server call, open files stay readable, and pages are cached under grants.

use nigh_cache::{Config, Fh, InvalidationId, NotifyLevel, Op, OpReply, Opened};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_sim::world::World;
use nigh_types::{
    Access, Call, Errno, LeaseScope, Name, NodeId, NodeRef, SetAttr, Span, Term, Timestamp, WriteFlags,
};

const APPEND: WriteFlags =
    WriteFlags { append: true, kill_suidgid: false, sync: false, write_back: false, since: None };

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn accessing(read: bool, write: bool, truncate: bool) -> Access {
    Access { read, write, truncate, direct: false, sync: false, append: false }
}

fn limited() -> ModelFsConfig {
    ModelFsConfig { term: Term::Limited(Span::from_secs(5)), recallable: false, ..ModelFsConfig::default() }
}

/// A client that has looked `f` up.
fn world(config: ModelFsConfig) -> (World, NodeId) {
    let mut world = World::new(config);
    let now = world.now;
    let file = world.server.edit(|tree| tree.plant_file(now, "f", b"content"));
    world.connect(NotifyLevel::All);
    world.request(0, Op::Lookup { dir: 1, name: name("f") });
    (world, file)
}

fn open(world: &mut World, ino: u64, write: bool, append: bool) -> Opened {
    match world.request(0, Op::Open { ino, access: accessing(true, write, false), append }) {
        OpReply::Opened(opened) => opened,
        other => panic!("{other:?}"),
    }
}

fn read(world: &mut World, ino: u64, fh: Fh) -> OpReply {
    world.request(0, Op::Read { ino, fh, offset: 0, size: 100 })
}

fn write(ino: u64, fh: Fh, offset: u64, data: &[u8]) -> Op {
    Op::Write { ino, fh, offset, data: data.to_vec(), flags: WriteFlags::default() }
}

fn content(text: &str) -> OpReply {
    OpReply::Data(text.as_bytes().to_vec())
}

/// Writes on the host, without the server.
fn beside(world: &World, file: NodeId, offset: u64, data: &[u8]) {
    let (node, data, flags) = (NodeRef::without_hint(file), data.to_vec(), Default::default());
    let call = Call::Write { node, handle: None, offset, data, flags };
    world.server.edit(|tree| tree.execute_as_host(world.now, call)).unwrap();
}

fn rename(from: &str, to: &str) -> Op {
    Op::rename((1, name(from)), (1, name(to)))
}

/// Returns how often the kernel invalidated data of a file.
fn forgets(world: &World, file: NodeId) -> usize {
    let line = format!("A's kernel forgets data of {}", file.ino);
    world.trace.iter().filter(|told| told.starts_with(&line)).count()
}

#[test]
fn read_only_open_and_close_send_no_request() {
    let (mut world, file) = world(ModelFsConfig::default());
    let opened = open(&mut world, file.ino, false, false);
    assert!(opened.no_flush && !opened.keep_cache);
    assert_eq!(read(&mut world, file.ino, opened.fh), content("content"));
    let refused = world.request(0, write(file.ino, opened.fh, 0, b"x"));
    assert_eq!(refused, OpReply::Failed(Errno::BADF));
    assert_eq!(world.request(0, Op::Flush { ino: file.ino, owner: 0 }), OpReply::Done);
    assert_eq!(world.request(0, Op::Release { fh: opened.fh, flock: None }), OpReply::Done);
    let again = open(&mut world, file.ino, false, false);
    assert!(again.keep_cache, "its pages are still true");
    assert_eq!((world.clients[0].control.calls("open"), world.clients[0].control.calls("release")), (0, 0));
}

/// The client asks the server to pin the file before its last name goes, or its permissions change.
#[test]
fn file_opened_without_handle_stays_readable_after_unlink_or_chmod() {
    let chmod = SetAttr { mode: Some(0), ..SetAttr::default() };
    for what in ["unlink", "replace", "chmod"] {
        let (mut world, file) = world(ModelFsConfig { by_hint_only: true, ..ModelFsConfig::default() });
        let now = world.now;
        world.server.edit(|tree| tree.plant_file(now, "other", b"another"));
        world.request(0, Op::Lookup { dir: 1, name: name("other") });
        let first = open(&mut world, file.ino, false, false);
        let second = open(&mut world, file.ino, false, false);
        let op = match what {
            "unlink" => Op::Unlink { dir: 1, name: name("f") },
            "replace" => rename("other", "f"),
            _ => Op::SetAttr { ino: file.ino, fh: None, set: chmod },
        };
        let answer = world.request(0, op);
        assert!(!matches!(answer, OpReply::Failed(_)), "{what}: {answer:?}");
        let control = world.clients[0].control.clone();
        assert_eq!(control.open_handles(), 1, "{what}");
        for opened in [first, second] {
            assert_eq!(read(&mut world, file.ino, opened.fh), content("content"), "{what}");
            world.request(0, Op::Release { fh: opened.fh, flock: None });
        }
        world.clients[0].cache.handle_forget(file.ino, 1);
        world.settle();
        assert_eq!(control.open_handles(), 0, "{what}");
    }
}

#[test]
fn rename_between_two_names_of_one_file_changes_nothing_and_pins_no_handle() {
    let (mut world, file) = world(ModelFsConfig::default());
    world.request(0, Op::Link { ino: file.ino, dir: 1, name: name("g") });
    assert_eq!(world.request(0, rename("f", "g")), OpReply::Done);
    for leaf in ["f", "g"] {
        assert!(matches!(world.request(0, Op::Lookup { dir: 1, name: name(leaf) }), OpReply::Node(_)));
    }
    assert_eq!(world.clients[0].control.open_handles(), 0);
}

#[test]
fn the_server_chooses_where_to_append() {
    let (mut world, file) = world(ModelFsConfig::default());
    // Each write uses the descriptor's flags at that time, however it was opened.
    let fh = open(&mut world, file.ino, true, false).fh;
    let appended =
        |offset, data: &[u8]| Op::Write { ino: file.ino, fh, offset, data: data.to_vec(), flags: APPEND };
    assert_eq!(world.request(0, appended(7, b" more")), OpReply::Written(5));
    assert_eq!(forgets(&world, file), 0);
    beside(&world, file, 12, b" beside");
    assert_eq!(world.request(0, appended(12, b" end")), OpReply::Written(4));
    assert_eq!(forgets(&world, file), 1, "it went elsewhere than the kernel thinks");
    assert_eq!(read(&mut world, file.ino, fh), content("content more beside end"));
    let fh = open(&mut world, file.ino, true, true).fh;
    assert_eq!(world.request(0, write(file.ino, fh, 0, b"C")), OpReply::Written(1));
    assert_eq!(read(&mut world, file.ino, fh), content("Content more beside end"));
}

fn opened_to_append(world: &mut World, file: NodeId, direct_appends: bool, read: bool) -> (usize, Opened) {
    let at = world.connect_with(Config { direct_appends, ..Config::default() });
    world.request(at, Op::Lookup { dir: 1, name: name("f") });
    let answer =
        world.request(at, Op::Open { ino: file.ino, access: accessing(read, true, false), append: true });
    let OpReply::Opened(opened) = answer else { panic!("{answer:?}") };
    (at, opened)
}

/// Otherwise the kernel would put the appended data where it believes the end of the file to be.
#[test]
fn file_opened_for_append_is_not_kept_in_page_cache() {
    for (direct_appends, read, direct) in [(false, false, false), (true, true, false), (true, false, true)] {
        let (mut world, file) = world(ModelFsConfig::default());
        assert_eq!(opened_to_append(&mut world, file, direct_appends, read).1.direct, direct);
    }
}

/// A process may read the page again after the kernel dropped it for the append, and before the write request arrives:
/// that page lacks the appended data.
#[test]
fn append_drops_cached_page_at_old_end() {
    let (mut world, file) = world(ModelFsConfig::default());
    let (at, Opened { fh, .. }) = opened_to_append(&mut world, file, true, false);
    world.request(at, Op::Open { ino: file.ino, access: accessing(true, false, false), append: false });
    let OpReply::Opened(reader) = world.replies.last().unwrap().3.clone() else { panic!("it is opened") };
    let look = Op::Read { ino: file.ino, fh: reader.fh, offset: 0, size: 100 };
    assert_eq!(world.request(at, look.clone()), content("content"));
    assert!(world.clients[at].kernel.page_cache.has_pages(file.ino));
    world.clients[at]
        .control
        .plan(CallFilter::Type("write"), CallPlan { hold_call: true, ..CallPlan::default() });
    let append = Op::Write { ino: file.ino, fh, offset: 7, data: b" more".to_vec(), flags: APPEND };
    let append = world.send_request(at, append);
    assert!(world.is_pending(at, append));
    assert!(!world.clients[at].kernel.page_cache.has_pages(file.ino), "though the write is out");
    let again = world.send_request(at, look);
    assert!(world.is_pending(at, again), "reads wait for it");
}

/// After a failed append the kernel truncates to its own idea of the end, but other clients have appended since.
#[test]
fn truncation_after_failed_append_keeps_appends_of_other_clients() {
    let (mut world, file) = world(ModelFsConfig::default());
    let (at, Opened { fh, .. }) = opened_to_append(&mut world, file, true, false);
    let append = Op::Write { ino: file.ino, fh, offset: 7, data: b" more".to_vec(), flags: APPEND };
    world.clients[at]
        .control
        .plan(CallFilter::Type("write"), CallPlan { hold_call: true, ..CallPlan::default() });
    let killed = world.send_request(at, append.clone());
    world.interrupt(at, killed);
    world.clients[at].control.plan_nothing();
    beside(&world, file, 7, b" beside");
    let truncate = |size| {
        let set = SetAttr { size: Some(size), kill_suidgid: true, ..SetAttr::default() };
        Op::SetAttr { ino: file.ino, fh: Some(fh), set }
    };
    world.request(at, truncate(7));
    let fh0 = open(&mut world, file.ino, false, false).fh;
    assert_eq!(read(&mut world, file.ino, fh0), content("content beside"));
    // A truncation by the application itself does count.
    world.request(at, truncate(3));
    assert_eq!(world.request(at, append), OpReply::Written(5));
    world.request(at, truncate(7));
    assert_eq!(read(&mut world, file.ino, fh0), content("con mor"));
}

/// A grant with a deadline: while the file is open, the client renews it before, once.
#[test]
fn pages_of_unchanged_open_file_survive_grant_renewal() {
    for further_name in [false, true] {
        let (mut world, file) = world(limited());
        if further_name {
            world.request(0, Op::Link { ino: file.ino, dir: 1, name: name("g") });
        }
        let fh = open(&mut world, file.ino, false, false).fh;
        read(&mut world, file.ino, fh);
        let before = world.clients[0].control.requests();
        for _ in 0..60 {
            world.advance(Span::from_millis(500));
        }
        let asked = world.clients[0].control.requests() - before;
        assert!((6..=8).contains(&asked), "{asked} requests in 30 s");
        assert_eq!(forgets(&world, file), 0);
        beside(&world, file, 0, b"CONTENT");
        world.advance(Span::from_secs(5));
        assert_eq!(forgets(&world, file), 1);
        assert_eq!(read(&mut world, file.ino, fh), content("CONTENT"));
        world.request(0, Op::Release { fh, flock: None });
        let before = world.clients[0].control.requests();
        world.advance(Span::from_secs(30));
        assert_eq!(world.clients[0].control.requests(), before, "no process has it open");
    }
}

/// Another client opens `f` and writes.
fn written_by_another(world: &mut World, at: usize, file: NodeId, data: &[u8]) {
    let access = accessing(true, true, false);
    world.request(at, Op::Lookup { dir: 1, name: name("f") });
    let OpReply::Opened(opened) = world.request(at, Op::Open { ino: file.ino, access, append: false }) else {
        panic!("not opened")
    };
    assert_eq!(world.request(at, write(file.ino, opened.fh, 0, data)), OpReply::Written(data.len() as u64));
}

/// The renewed grant has another id than the directory's grant, or outlives it. Any recall of that directory ends it,
/// and so does any prepared update of the name, whether the name is known or not.
#[test]
fn pages_under_renewed_grant_are_dropped_at_recall() {
    let ways =
        |known| [(false, false), (true, false), (true, true)].map(|(pushed, own)| (known, pushed, own));
    for (known, pushed, own) in ["lapsed", "listed", "begun anew"].into_iter().flat_map(ways) {
        let way = format!("names: {known}, pushed: {pushed}, own write: {own}");
        let (mut world, file) = world(ModelFsConfig { recallable: true, ..limited() });
        if pushed {
            world.take_pushes(0);
        }
        let b = world.connect(NotifyLevel::All);
        let fh = open(&mut world, file.ino, own, false).fh;
        assert_eq!(read(&mut world, file.ino, fh), content("content"));
        world.advance(Span::from_millis(5_500));
        match known {
            "listed" => drop(world.request(0, Op::OpenDir { ino: 1 })),
            "begun anew" => drop(world.request(0, Op::Lookup { dir: 1, name: name("other") })),
            _ => {}
        }
        world.advance(Span::from_millis(500));
        assert_eq!(forgets(&world, file), 0, "its data is granted anew");
        if own {
            assert_eq!(world.request(0, write(file.ino, fh, 6, b"T")), OpReply::Written(1));
        }
        if pushed && known == "listed" {
            world.request(b, Op::Mkdir { dir: 1, name: name("g"), mode: 0o755, umask: 0 });
            assert_eq!(forgets(&world, file), 0, "it is known to lie elsewhere");
        }
        written_by_another(&mut world, b, file, b"CONTEN");
        assert_eq!(forgets(&world, file), 1, "{way}");
        let told = |what: &str| world.trace.iter().rposition(|told| told.starts_with(what));
        assert!(told("A's kernel forgets data") < told("A acknowledges"), "{way}");
        assert!(!open(&mut world, file.ino, false, false).keep_cache);
        assert_eq!(read(&mut world, file.ino, fh), content(if own { "CONTENT" } else { "CONTENt" }));
    }
}

/// The pages of its closed file are validated by size and times, not by a grant on something else.
#[test]
fn pages_of_closed_file_are_reused_only_if_file_is_unchanged() {
    let (mut world, file) = world(ModelFsConfig { recallable: true, ..limited() });
    let b = world.connect(NotifyLevel::All);
    let fh = open(&mut world, file.ino, false, false).fh;
    read(&mut world, file.ino, fh);
    world.advance(Span::from_millis(4_500));
    world.request(0, Op::Release { fh, flock: None });
    let again = open(&mut world, file.ino, false, false);
    assert!(again.keep_cache, "nothing changed");
    world.request(0, Op::Release { fh: again.fh, flock: None });
    world.advance(Span::from_millis(1_500));
    written_by_another(&mut world, b, file, b"CONTENT");
    world.request(0, Op::Lookup { dir: 1, name: name("f") });
    assert!(!open(&mut world, file.ino, false, false).keep_cache);
}

/// A directory's grant no longer covers a file after the file has moved elsewhere.
#[test]
fn pages_under_directory_grant_are_dropped_when_file_leaves_directory() {
    for what in ["move", "link", "unlink", "replace"] {
        let (mut world, file) = world(ModelFsConfig { recallable: true, ..limited() });
        let now = world.now;
        let elsewhere = world.server.edit(|tree| tree.plant_dir(now, "e")).ino;
        world.server.edit(|tree| tree.plant_file(now, "other", b"another"));
        for leaf in ["e", "other"] {
            world.request(0, Op::Lookup { dir: 1, name: name(leaf) });
        }
        let fh = open(&mut world, file.ino, false, false).fh;
        read(&mut world, file.ino, fh);
        world.advance(Span::from_millis(5_500));
        for leaf in ["e", "f", "other"] {
            world.request(0, Op::Lookup { dir: 1, name: name(leaf) });
        }
        assert_eq!(forgets(&world, file), 0);
        let op = match what {
            "move" => Op::rename((1, name("f")), (elsewhere, name("f"))),
            "link" => Op::Link { ino: file.ino, dir: elsewhere, name: name("g") },
            "unlink" => Op::Unlink { dir: 1, name: name("f") },
            _ => rename("other", "f"),
        };
        let answer = world.request(0, op);
        assert!(!matches!(answer, OpReply::Failed(_)), "{what}: {answer:?}");
        assert_eq!(forgets(&world, file), 1, "{what}");
        assert_eq!(read(&mut world, file.ino, fh), content("content"), "{what}");
    }
}

#[test]
fn pages_are_dropped_at_grant_deadline_when_server_is_silent() {
    let (mut world, file) = world(limited());
    let fh = open(&mut world, file.ino, false, false).fh;
    read(&mut world, file.ino, fh);
    let fate = CallPlan { hold_call: true, ..CallPlan::default() };
    world.clients[0].control.plan(CallFilter::Type("getattr"), fate);
    world.advance(Span::from_millis(4_999));
    assert_eq!(forgets(&world, file), 0);
    world.advance(Span::from_millis(1));
    assert_eq!(forgets(&world, file), 1);
}

/// Before the notifier drops pages, it learns of reads and writes since it looked. Write-backs of stores into maps are
/// excluded like these, except for a recall that is to be acknowledged.
#[test]
fn requests_since_page_check_block_invalidation_of_their_pages() {
    let (mut world, file) = world(ModelFsConfig::default());
    let fh = open(&mut world, file.ino, true, false).fh;
    let control = world.clients[0].control.clone();
    control.plan(CallFilter::Every, CallPlan { hold_reply: true, ..CallPlan::default() });
    let none = InvalidationId(u64::MAX);
    let ranges = world.clients[0].cache.droppable_ranges(none, file.ino, (0, 0));
    assert_eq!(ranges, [(0, 0)]);
    assert!(!world.clients[0].cache.blocks_drop(none, file.ino, &ranges));
    world.send_request(0, Op::Read { ino: file.ino, fh, offset: 0, size: 4 });
    assert!(world.clients[0].cache.blocks_drop(none, file.ino, &ranges));
    assert!(!world.clients[0].cache.blocks_drop(none, file.ino + 1, &ranges));
    let ranges = world.clients[0].cache.droppable_ranges(none, file.ino, (0, 0));
    assert_eq!(ranges, [(4096, 0)]);
    assert!(!world.clients[0].cache.blocks_drop(none, file.ino, &ranges));
    let data = b"CONT".to_vec();
    let flags = WriteFlags { write_back: true, ..WriteFlags::default() };
    let flush = Op::Write { ino: file.ino, fh, offset: 4096, data, flags };
    world.send_request(0, flush);
    assert_eq!(world.clients[0].cache.droppable_ranges(none, file.ino, (0, 0)), [(8192, 0)]);
    // Also those that arrived while the session was expired.
    control.lapse("silence");
    world.settle();
    let ranges = world.clients[0].cache.droppable_ranges(none, file.ino, (0, 0));
    world.send_request(0, Op::Read { ino: file.ino, fh, offset: 3 * 4096 + 1, size: 4 });
    assert!(world.clients[0].cache.blocks_drop(none, file.ino, &ranges));
    assert!(!world.clients[0].cache.blocks_drop(none, file.ino, &[(2 * 4096, 4096), (4 * 4096, 0)]));
    let ranges = world.clients[0].cache.droppable_ranges(none, file.ino, (0, 0));
    assert_eq!(ranges, [(8192, 4096), (4 * 4096, 0)]);
}

/// Pages that a read or write in flight has locked are dropped after its reply.
#[test]
fn data_recall_is_acknowledged_without_waiting_for_local_reads_or_writes() {
    for writes in [false, true] {
        let (mut world, file) = world(ModelFsConfig::default());
        let fh = open(&mut world, file.ino, true, false).fh;
        let control = world.clients[0].control.clone();
        control.plan(CallFilter::Every, CallPlan { hold_reply: true, ..CallPlan::default() });
        let read = Op::Read { ino: file.ino, fh, offset: 0, size: 4 };
        let op = if writes { write(file.ino, fh, 0, b"CONT") } else { read };
        let id = world.send_request(0, op);
        world.trace.clear();
        let recall = control.recall(file, LeaseScope::Data, &[]);
        world.settle();
        assert!(control.acknowledged(recall) && world.is_pending(0, id));
        let behind = format!("A's kernel forgets data of {} from 4096, 0 bytes", file.ino);
        assert!(world.trace.contains(&behind), "{:?}", world.trace);
        world.trace.clear();
        control.release(control.held()[0]);
        world.settle();
        assert!(!world.is_pending(0, id));
        let rest = format!("A's kernel forgets data of {} from 0, 4 bytes", file.ino);
        assert!(world.trace.contains(&rest), "{:?}", world.trace);
    }
}

#[test]
fn write_of_another_client_is_read() {
    let (mut world, file) = world(ModelFsConfig::default());
    world.connect(NotifyLevel::All);
    let fh = open(&mut world, file.ino, true, false).fh;
    read(&mut world, file.ino, fh);
    world.request(1, Op::Lookup { dir: 1, name: name("f") });
    let opened =
        world.request(1, Op::Open { ino: file.ino, access: accessing(true, true, true), append: false });
    assert!(matches!(opened, OpReply::Opened(_)));
    assert_eq!(forgets(&world, file), 1);
    assert_eq!(read(&mut world, file.ino, fh), content(""));
    match world.request(0, Op::GetAttr { ino: file.ino }) {
        OpReply::Attr(_, attr, _) => assert_eq!(attr.size, 0),
        other => panic!("{other:?}"),
    }
}

/// The session's handles are lost with it. The next session reopens them, except files without a name.
#[test]
fn open_file_is_reopened_after_lost_session_unless_nameless() {
    let (mut world, file) = world(ModelFsConfig::default());
    let access = accessing(true, true, false);
    let nameless = match world.request(0, Op::Tmpfile { dir: 1, mode: 0o600, umask: 0, access }) {
        OpReply::Created(node, opened) => (node.id.ino, opened.fh),
        other => panic!("{other:?}"),
    };
    let reader = open(&mut world, file.ino, false, false).fh;
    let writer = open(&mut world, file.ino, true, false).fh;
    world.clients[0].control.lose("cable");
    world.settle();
    let parked = world.send_request(0, Op::Read { ino: file.ino, fh: reader, offset: 0, size: 7 });
    assert!(world.is_pending(0, parked));
    world.reconnect(0);
    assert!(!world.is_pending(0, parked));
    assert_eq!(read(&mut world, file.ino, reader), content("content"));
    assert_eq!(world.request(0, write(file.ino, writer, 0, b"x")), OpReply::Written(1));
    assert_eq!(world.request(0, write(nameless.0, nameless.1, 0, b"x")), OpReply::Failed(Errno::IO));
    assert_eq!(world.clients[0].control.open_handles(), 2, "what was opened under a grant has one now");
    for fh in [reader, writer, nameless.1] {
        assert_eq!(world.request(0, Op::Release { fh, flock: None }), OpReply::Done);
    }
    assert_eq!(world.clients[0].control.open_handles(), 0);
    assert_eq!(world.clients[0].cache.gauges().open_files, 0);
}

/// The caller was killed during an open or create: the handle is released.
#[test]
fn handle_of_open_with_killed_caller_is_released() {
    let (mut world, file) = world(ModelFsConfig::default());
    let control = world.clients[0].control.clone();
    let (access, mode, umask) = (accessing(true, true, false), 0o644, 0);
    let (exclusive, append) = (true, false);
    for op in [
        Op::Open { ino: file.ino, access, append },
        Op::Create { dir: 1, name: name("new"), mode, umask, exclusive, access, append },
        Op::Tmpfile { dir: 1, mode, umask, access },
    ] {
        control.plan(CallFilter::Every, CallPlan { hold_reply: true, ..CallPlan::default() });
        let id = world.send_request(0, op.clone());
        world.interrupt(0, id);
        assert!(!world.is_pending(0, id));
        assert_eq!(control.open_handles(), 1, "{op:?}");
        control.plan_nothing();
        control.held().into_iter().for_each(|call| control.release(call));
        world.settle();
        assert_eq!(control.open_handles(), 0, "{op:?}");
        assert_eq!(world.clients[0].cache.gauges().open_files, 0);
        world.check_kernels().unwrap();
    }
    let time = Timestamp { secs: 5, nanos: 0 };
    let set = SetAttr { mtime: Some(nigh_types::SetTime::At(time)), ..SetAttr::default() };
    match world.request(0, Op::SetAttr { ino: file.ino, fh: None, set }) {
        OpReply::Attr(_, attr, _) => assert_eq!(attr.mtime, time),
        other => panic!("{other:?}"),
    }
}

/// A second client removes the file's last name, or moves or links it first.
fn change(world: &mut World, what: &str, ino: u64) {
    let (access, mode, umask, exclusive, append) = (accessing(true, true, false), 0o644, 0, true, false);
    let other = Op::Create { dir: 1, name: name("other"), mode, umask, exclusive, access, append };
    let steps = match what {
        "unlink" => vec![Op::Unlink { dir: 1, name: name("f") }],
        "replace" => vec![other, rename("other", "f")],
        "move" => vec![rename("f", "g"), Op::Unlink { dir: 1, name: name("g") }],
        _ => vec![
            Op::Link { ino, dir: 1, name: name("h") },
            Op::Unlink { dir: 1, name: name("f") },
            Op::Unlink { dir: 1, name: name("h") },
        ],
    };
    for step in steps {
        if let Op::Rename { name, .. } | Op::Unlink { name, .. } = &step {
            world.request(1, Op::Lookup { dir: 1, name: name.clone() });
        }
        let answer = world.request(1, step.clone());
        assert!(!matches!(answer, OpReply::Failed(_)), "{what}: {step:?} {answer:?}");
    }
}

/// The file was opened under a grant: before the grant ends, the client asks the server to pin the file.
#[test]
fn file_opened_without_handle_stays_readable_after_another_client_removes_its_name() {
    for what in ["unlink", "replace", "move", "link"] {
        for level in [NotifyLevel::All, NotifyLevel::NoEpoch, NotifyLevel::None] {
            let mut world = World::new(ModelFsConfig { by_hint_only: true, ..ModelFsConfig::default() });
            let now = world.now;
            let file = world.server.edit(|tree| tree.plant_file(now, "f", b"content"));
            world.connect(level);
            world.connect(NotifyLevel::All);
            world.request(0, Op::Lookup { dir: 1, name: name("f") });
            world.request(1, Op::Lookup { dir: 1, name: name("f") });
            let first = open(&mut world, file.ino, false, false);
            let second = open(&mut world, file.ino, false, false);
            assert_eq!(world.clients[0].control.calls("open"), 0, "{what}");
            change(&mut world, what, file.ino);
            let control = world.clients[0].control.clone();
            assert_eq!((control.calls("keep"), control.open_handles()), (1, 1), "{what} {level:?}");
            for opened in [first, second] {
                assert_eq!(read(&mut world, file.ino, opened.fh), content("content"), "{what} {level:?}");
                world.request(0, Op::Release { fh: opened.fh, flock: None });
            }
            world.settle();
            assert_eq!(control.open_handles(), 0, "{what} {level:?}");
        }
    }
}

/// For every end of the grant: its deadline, a recall without a reason, a local change.
#[test]
fn file_opened_without_handle_is_pinned_before_its_grant_ends() {
    for what in ["time", "recall", "rename", "link"] {
        let config = if what == "time" { limited() } else { ModelFsConfig::default() };
        let (mut world, file) = world(ModelFsConfig { by_hint_only: true, ..config });
        let now = world.now;
        let dir = world.server.edit(|tree| tree.plant_dir(now, "d"));
        world.request(0, Op::Lookup { dir: 1, name: name("d") });
        let opened = open(&mut world, file.ino, false, false);
        let control = world.clients[0].control.clone();
        assert_eq!((control.calls("open"), control.calls("keep")), (0, 0), "{what}");
        match what {
            "time" => world.advance(Span::from_millis(4_500)),
            "recall" => {
                control.recall(world.server.edit(|tree| tree.root()), LeaseScope::Directory, &[]);
                world.settle();
            }
            "rename" => {
                let op = Op::rename((1, name("f")), (dir.ino, name("g")));
                assert_eq!(world.request(0, op), OpReply::Done);
            }
            _ => drop(world.request(0, Op::Link { ino: file.ino, dir: dir.ino, name: name("g") })),
        }
        assert_eq!((control.calls("keep"), control.open_handles()), (1, 1), "{what}");
        assert_eq!(read(&mut world, file.ino, opened.fh), content("content"), "{what}");
        world.request(0, Op::Release { fh: opened.fh, flock: None });
        assert_eq!(control.open_handles(), 0, "{what}");
    }
}

/// The file is closed and opened again between request and reply: the pin of the first open has ended.
#[test]
fn file_reopened_during_rename_over_it_stays_readable() {
    let (mut world, file) = world(ModelFsConfig { by_hint_only: true, ..ModelFsConfig::default() });
    let now = world.now;
    world.server.edit(|tree| tree.plant_file(now, "other", b"another"));
    world.request(0, Op::Lookup { dir: 1, name: name("other") });
    let first = open(&mut world, file.ino, false, false);
    let control = world.clients[0].control.clone();
    control.plan(CallFilter::Type("rename"), CallPlan { hold_reply: true, ..CallPlan::default() });
    let renaming = world.send_request(0, rename("other", "f"));
    assert!(world.is_pending(0, renaming));
    world.request(0, Op::Release { fh: first.fh, flock: None });
    let second = open(&mut world, file.ino, false, false);
    control.release(control.held()[0]);
    world.settle();
    assert!(!world.is_pending(0, renaming));
    assert_eq!(read(&mut world, file.ino, second.fh), content("content"));
    world.request(0, Op::Release { fh: second.fh, flock: None });
    world.clients[0].cache.handle_forget(file.ino, 1);
    world.settle();
    assert_eq!(control.open_handles(), 0);
}
