//! One user against the others: the server divides scarce resources by origin, the user and machine that the
//! transport proved, whatever client ids a peer invents (docs/attacks.md, "One user against the others").

use crate::common::client::Client;
use crate::common::raw::{Raw, hello};
use crate::common::world::World;
use crate::common::*;
use nigh_link::{Claims, Peer, Squash};
use nigh_native::Hello;
use nigh_types::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ROGUE: u32 = 7001;
const HONEST: u32 = 7002;

fn user(uid: u32) -> Credentials {
    Credentials { uid, gid: uid, groups: vec![], privileges: None }
}

fn peer(uid: u32) -> Peer {
    Peer::new(format!("uid {uid}"), Claims::Only(user(uid)), Squash::None).with_any_path()
}

/// Makes the directories accessible and writable for every user.
fn open_to_all(world: &World) {
    for (path, mode) in [("", 0o755), ("d", 0o1777), ("d/e", 0o777)] {
        fs::set_permissions(world.dir.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// A client of that user, with a fresh incarnation.
fn client(world: &World, uid: u32) -> Client {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let (server, incarnation) = (world.server.clone(), u64::from(rand()));
    std::thread::spawn(move || server.serve_link(ours.into(), peer(uid)));
    let mut client = Client::over(theirs, world.dir.path(), Term::Session, incarnation);
    client.obliging = true;
    client.session();
    client
}

/// Returns a different number each time.
fn rand() -> u32 {
    use std::sync::atomic::AtomicU32;
    static LAST: AtomicU32 = AtomicU32::new(1 << 20);
    LAST.fetch_add(1, Ordering::Relaxed)
}

#[test]
fn new_client_ids_of_one_user_delay_others_only_once() {
    if !needs_root("new_client_ids_of_one_user_delay_others_only_once") {
        return;
    }
    let world = World::hasty();
    open_to_all(&world);
    let stop = AtomicBool::new(false);
    let waits = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let number = u64::from(rand());
                let mut raw = Raw::hello(
                    &world,
                    Some(peer(ROGUE)),
                    Hello { client: number, ..hello(&world, number, None) },
                );
                let welcome = raw.welcome();
                let at = |entry: &Entry, of: NodeId, text: &str| NodeRef {
                    node: entry.id,
                    path_hint: Some((of, name(text))),
                };
                let root = welcome.session.root;
                raw.ask(1, Call::Lookup { dir: NodeRef::without_hint(root), name: name("d") });
                let Ok(Reply::Entry(Some(d))) = raw.answer().unwrap().result else { panic!() };
                raw.ask(2, Call::Lookup { dir: at(&d, root, "d"), name: name(&format!("none{number}")) });
                assert!(raw.answer().unwrap().result.is_ok());
                held.push(raw);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let mut victim = client(&world, HONEST);
        let d = victim.place("d");
        let (begun, mut waits) = (Instant::now(), Vec::new());
        std::thread::sleep(Duration::from_millis(300));
        for nth in 0.. {
            if begun.elapsed() > Duration::from_secs(9) {
                break;
            }
            let asked = Instant::now();
            let call = victim.send_as(&user(HONEST), mkdir(&d, &format!("new{nth}")));
            while !victim.is_answered(call) {
                victim.tick();
                assert!(asked.elapsed() < Duration::from_secs(15), "it waits for ever");
            }
            assert!(victim.answer(call).result.is_ok());
            waits.push(asked.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
        waits
    });
    let long: Vec<_> = waits.iter().filter(|wait| **wait > Duration::from_secs(1)).collect();
    println!("{} changes, of which {long:.1?} waited", waits.len());
    assert_eq!(long.len(), 1, "of {} changes these waited: {long:.1?}", waits.len());
}

#[test]
fn calls_of_one_user_in_many_sessions_do_not_delay_other_users() {
    const SESSIONS: u64 = 20;
    const CALLS: u64 = 1_000;
    if !needs_root("calls_of_one_user_in_many_sessions_do_not_delay_other_users") {
        return;
    }
    let world = World::new();
    open_to_all(&world);
    for nth in 0..SESSIONS {
        let dir = world.dir.path().join(format!("d/own{nth}"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("f"), "x").unwrap();
        fs::set_permissions(dir.join("f"), fs::Permissions::from_mode(0o666)).unwrap();
    }
    let mut honest = client(&world, HONEST);
    let d = honest.place("d");
    let mut rogues: Vec<(Client, NodeRef, Handle)> = (0..SESSIONS)
        .map(|nth| {
            let mut rogue = client(&world, ROGUE);
            let node = rogue.place(&format!("d/own{nth}/f"));
            let handle = rogue.open(&node, BOTH);
            (rogue, node, handle)
        })
        .collect();
    for (rogue, node, handle) in &mut rogues {
        for offset in 0..CALLS {
            let (node, handle) = (node.clone(), Some(*handle));
            let flags = WriteFlags { sync: true, ..WriteFlags::default() };
            rogue.send(Call::Write { node, handle, offset, data: vec![b'x'], flags });
        }
    }
    let queued = || {
        let status = world.server.status();
        let sessions = status["sessions"].as_array().unwrap().iter();
        sessions.map(|session| session["calls"]["queued"].as_u64().unwrap()).sum::<u64>()
    };
    let before = queued();
    let mut times: Vec<Duration> = (0..20)
        .map(|_| {
            let begun = Instant::now();
            honest.attr(&d);
            begun.elapsed()
        })
        .collect();
    let after = queued();
    times.sort();
    println!("{before} calls were queued, {after} afterwards; another user waited {times:.1?}");
    assert!(after > 1_000, "the queue was long all the time: {before}, {after}");
    assert!(times[18] < Duration::from_millis(100), "{times:.1?}");
}

/// A filesystem that never replies.
struct Hung {
    fuse: Option<fs::File>,
    at: std::path::PathBuf,
}

impl Hung {
    fn mount(at: std::path::PathBuf) -> Option<Hung> {
        use std::os::fd::AsRawFd;
        let fuse = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").ok()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other\0", fuse.as_raw_fd());
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).ok()?;
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("hung", &at, "fuse", flags, Some(options)).ok()?;
        Some(Hung { fuse: Some(fuse), at })
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // All waiting requests end with an error.
        self.fuse = None;
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn hung_filesystem_below_an_export_delays_no_other_client() {
    if !needs_root("hung_filesystem_below_an_export_delays_no_other_client") {
        return;
    }
    let world = World::new();
    open_to_all(&world);
    let at = world.dir.path().join("d2");
    let mut rogue = client(&world, ROGUE);
    let mut honest = client(&world, HONEST);
    let (root, d) = (rogue.root(), honest.place("d"));
    // The hanging listings may already have leases on their directory, so the honest client changes another one.
    let e = honest.place("d/e");
    let Some(hung) = Hung::mount(at) else {
        return println!("SKIPPED: cannot mount a FUSE filesystem");
    };
    let mut calls: Vec<CallId> =
        (0..12).map(|_| rogue.send(Call::Lookup { dir: root.clone(), name: name("d2") })).collect();
    // A listing stats every entry, so listings hang too; they count as long calls.
    calls.extend((0..12).map(|_| rogue.send(Call::List { dir: root.clone() })));
    std::thread::sleep(Duration::from_millis(300));
    let asked = |what: &str, ask: &mut dyn FnMut() -> bool| {
        let begun = Instant::now();
        assert!(ask());
        assert!(begun.elapsed() < Duration::from_secs(6), "{what}: {:?}", begun.elapsed());
        println!("{what}: {:?}", begun.elapsed());
    };
    asked("attributes", &mut || !honest.attr(&d).1.is_empty());
    asked("a listing", &mut || !honest.list(&d).0.is_empty());
    asked("a directory made", &mut || honest.call(mkdir(&e, "new")).result.is_ok());
    let mut late = client(&world, HONEST);
    asked("a client that comes later", &mut || {
        late.call(Call::Lookup { dir: d.clone(), name: name("f") }).result.is_ok()
    });
    let begun = Instant::now();
    assert!(!honest.attr(&d).1.is_empty());
    assert!(begun.elapsed() < Duration::from_millis(300), "spares are there: {:?}", begun.elapsed());
    drop(hung);
    for call in calls {
        rogue.answer(call);
        while !rogue.events.is_empty()
            && rogue
                .events
                .iter()
                .any(|event| matches!(event, nigh_remote::Event::Response { call: of, .. } if *of == call))
        {
            rogue.answer(call);
        }
    }
    // The host watch recalls what the unmounted filesystem covered, and grants nothing on it meanwhile.
    eventually("what waited has come back", || !rogue.attr(&root).1.is_empty());
}

#[test]
fn change_of_an_entry_where_a_hung_filesystem_is_mounted_is_refused_at_once() {
    if !needs_root("change_of_an_entry_where_a_hung_filesystem_is_mounted_is_refused_at_once") {
        return;
    }
    let world = World::new();
    open_to_all(&world);
    fs::set_permissions(world.dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let mut rogue = client(&world, ROGUE);
    let mut honest = world.client();
    let (root, d) = (rogue.root(), rogue.place("d"));
    let Some(hung) = Hung::mount(world.dir.path().join("d2")) else {
        return println!("SKIPPED: cannot mount a FUSE filesystem");
    };
    let rename = |from: (&NodeRef, &str), to: (&NodeRef, &str), no_replace, exchange| Call::Rename {
        from: from.0.clone(),
        name: name(from.1),
        to: to.0.clone(),
        new_name: name(to.1),
        no_replace,
        exchange,
        whiteout: false,
        keep: None,
    };
    let create = |exclusive| Call::Create {
        dir: root.clone(),
        name: name("d2"),
        mode: 0o600,
        umask: 0,
        exclusive,
        access: BOTH,
    };
    let refused = [
        (Call::Rmdir { dir: root.clone(), name: name("d2") }, Errno::BUSY),
        (Call::Unlink { dir: root.clone(), name: name("d2"), keep: None }, Errno::BUSY),
        (rename((&root, "d2"), (&root, "new"), false, false), Errno::BUSY),
        (rename((&d, "e"), (&root, "d2"), false, false), Errno::BUSY),
        (rename((&d, "e"), (&root, "d2"), false, true), Errno::BUSY),
        (rename((&d, "e"), (&root, "d2"), true, false), Errno::EXIST),
        (mkdir(&root, "d2"), Errno::EXIST),
        (create(true), Errno::EXIST),
        // The client's kernel repeats the lookup, and opens the result.
        (create(false), Errno::STALE),
    ];
    for (call, errno) in refused {
        let begun = Instant::now();
        let call = rogue.send_as(&user(ROGUE), call);
        while !rogue.is_answered(call) && begun.elapsed() < Duration::from_secs(3) {}
        assert!(rogue.is_answered(call), "{errno:?}: it waits");
        assert_eq!(rogue.answer(call).result, Err(errno));
    }
    let begun = Instant::now();
    let there = honest.root();
    assert!(honest.call(mkdir(&there, "new")).result.is_ok());
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    // The kernel checks permissions first, so a caller without them gets EACCES instead.
    fs::set_permissions(world.dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let rmdir = Call::Rmdir { dir: root.clone(), name: name("d2") };
    let call = rogue.send_as(&user(ROGUE), rmdir);
    assert_eq!(rogue.answer(call).result, Err(Errno::ACCES));
    drop(hung);
}

fn open_until_refused(client: &mut Client, node: &NodeRef) -> usize {
    let mut opened = 0;
    loop {
        match client.call(Call::Open { node: node.clone(), access: READ }).result {
            Ok(_) => opened += 1,
            Err(errno) => {
                assert_eq!(errno, Errno::NFILE);
                return opened;
            }
        }
    }
}

#[test]
fn open_files_of_one_user_are_limited_and_dormant_sessions_make_room() {
    if !needs_root("open_files_of_one_user_are_limited_and_dormant_sessions_make_room") {
        return;
    }
    let world = World::with(|options| {
        options.session_term = Span::from_secs(2);
        options.descriptors = Some(256 + 1_024);
    });
    open_to_all(&world);
    let mut first = client(&world, ROGUE);
    let node = first.place("d/f");
    assert_eq!(open_until_refused(&mut first, &node), 256, "half of what files may have");
    let mut second = client(&world, ROGUE);
    let node = second.place("d/f");
    assert_eq!(open_until_refused(&mut second, &node), 0, "whatever the session");
    let mut honest = client(&world, HONEST);
    let theirs = honest.place("d/f");
    for _ in 0..100 {
        honest.open(&theirs, READ);
    }
    let root = honest.root();
    assert!(!honest.list(&root).0.is_empty());
    drop(first);
    eventually("the dormant session makes room", || {
        std::thread::sleep(Duration::from_millis(200));
        honest.tick();
        second.tick();
        second.call(Call::Open { node: node.clone(), access: READ }).result.is_ok()
    });
    assert_eq!(honest.attr(&theirs).0.size, 8);
    honest.open(&theirs, READ);
}

#[test]
fn cached_directory_descriptors_of_all_exports_have_one_limit() {
    let world = World::with(|options| options.descriptors = Some(256 + 1_024));
    let mut path = world.dir.path().join("d");
    let mut clients = Vec::new();
    for level in 0..8 {
        path = path.join(format!("n{level}"));
        fs::create_dir(&path).unwrap();
        (0..100).for_each(|n| fs::create_dir(path.join(format!("x{n}"))).unwrap());
    }
    let mut path = world.dir.path().join("d");
    for level in 0..8 {
        path = path.join(format!("n{level}"));
        let mut client = world.client_of(&path);
        let root = client.root();
        (0..100).for_each(|n| drop(client.entry(&root, &format!("x{n}"))));
        clients.push(client);
    }
    let cached = world.server.status()["totals"]["descriptors"]["cached"].as_u64().unwrap();
    assert!((64..=128 + 8 * 10).contains(&cached), "{cached} directories are held open");
}

#[test]
fn state_of_removed_attached_directories_is_deleted() {
    if !needs_root("state_of_removed_attached_directories_is_deleted") {
        return;
    }
    let (dir, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut options = nigh_server::ServerOptions::new(state.path().to_owned());
    options.exports.add(format!("a={}", dir.path().display()).as_ref()).unwrap();
    let server = nigh_server::Server::new(options).unwrap();
    let attach = |name: &str| Client::connect(&server, std::path::Path::new(name), Term::Session);
    let states = || {
        fs::read_dir(state.path()).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir()).count()
    };
    fs::create_dir(dir.path().join("stays")).unwrap();
    let (mut whole, mut stays) = (attach("a"), attach("a/stays"));
    whole.session();
    stays.session();
    for n in 0..40 {
        let text = format!("x{n}");
        fs::create_dir(dir.path().join(&text)).unwrap();
        let mut client = attach(&format!("a/{text}"));
        client.session();
        assert!(states() >= 3, "each has a state");
        client.leave();
        fs::remove_dir(dir.path().join(&text)).unwrap();
    }
    stays.leave();
    eventually("those that are gone have none", || {
        whole.tick();
        states() == 2
    });
}
