use super::*;
use crate::adapter;
use crate::host::test_host::{absent, local};
use crate::interrupts::Interrupts;
use crate::test_server::Server;
use nigh_cache::Config;
use nigh_fuse::{Header, Level, MemoryTransport, Negotiated, Notification, NotifyOutcome, Operation, encode};
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::Remote;
use nigh_remote::{Event, Output as RemoteOutput};
use nigh_types::{Access, NodeId, Span, Term, WriteFlags};
use std::sync::Arc;
use std::time::Duration;

/// A driver between a memory kernel, a test server and a manual clock.
pub(crate) struct DriverHarness {
    pub driver: Arc<Driver>,
    pub kernel: Arc<MemoryTransport>,
    server: Server,
    now: Arc<AtomicU64>,
    unique: u64,
}

impl DriverHarness {
    pub fn new() -> DriverHarness {
        DriverHarness::on(local())
    }

    /// With callers on this host.
    pub fn on(host: Arc<dyn Host>) -> DriverHarness {
        DriverHarness::with(MemoryTransport::new(Level::All), host)
    }

    /// With a kernel that returns `judge`'s outcome for notifications.
    pub fn judging(
        judge: impl Fn(&Notification<'_>) -> io::Result<NotifyOutcome> + Send + Sync + 'static,
    ) -> DriverHarness {
        DriverHarness::with(MemoryTransport::new(Level::All).judging(judge), local())
    }

    fn with(kernel: MemoryTransport, host: Arc<dyn Host>) -> DriverHarness {
        let now = Arc::new(AtomicU64::new(Span::from_secs(100).0));
        let start = Time(now.load(Ordering::SeqCst));
        let config =
            ClientConfig { client: 1, incarnation: 2, attach: Vec::new(), term: Term::Session, features: 0 };
        let mut server = Server::new(start);
        let mut session = ClientSession::new(start, config);
        let mut attached = None;
        while attached.is_none() {
            match session.poll_output() {
                RemoteOutput::Transmit(hello) => {
                    let welcome = server.handle(start, &hello);
                    session.handle_input(start, &welcome);
                }
                RemoteOutput::Event(event @ Event::Attached(_)) => attached = Some(event),
                other => panic!("{other:?} before the welcome"),
            }
        }
        let kernel = Arc::new(kernel);
        let clock = Arc::clone(&now);
        let clock = Box::new(move || Time(clock.load(Ordering::SeqCst)));
        let cache = Cache::new(Config::default());
        let transport = Box::new(Arc::clone(&kernel));
        let callers = (IdMap::default(), Callers::new(Arc::clone(&host), false));
        let (link, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let remote: (Box<dyn ResumableRemote>, _) = (Box::new(session), link.into());
        let driver = Driver::new(cache, remote, (transport, host), callers, clock).unwrap();
        driver.with(|core, now| core.cache.handle_event(now, attached.expect("a welcome")));
        DriverHarness { driver: Arc::new(driver), kernel, server, now, unique: 0 }
    }

    pub fn pass(&self, span: Span) {
        self.now.fetch_add(span.0, Ordering::SeqCst);
    }

    /// Sends GETATTR for the root; whether the reply came at once.
    fn is_answered(&mut self) -> bool {
        self.unique += 2;
        let header = Header { unique: self.unique, nodeid: 1, uid: 0, gid: 0, pid: 0, resent: false };
        let agreed = Negotiated::default();
        let request = encode(&header, &Operation::GetAttr { fh: None }, &agreed);
        adapter::receive(&self.driver, &Interrupts::default(), &agreed, &request);
        self.kernel.take_reply(self.unique, Duration::ZERO).is_some()
    }

    /// Creates a file (which stays open) or a directory below the root; its id.
    pub fn make(&mut self, path: &str, directory: bool) -> NodeId {
        let (dir, name) = (self.driver.root(), Name::new(path.as_bytes()).unwrap());
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        let op = match directory {
            true => Op::Mkdir { dir, name, mode: 0o755, umask: 0 },
            false => Op::Create { dir, name, mode: 0o644, umask: 0, exclusive: true, access, append: false },
        };
        self.unique += 2;
        let caller = Caller { pid: std::process::id(), ..Caller::default() };
        self.driver.operate(self.unique, OpId(self.unique), caller, ReplyFormat::Natural, op);
        self.serve();
        self.server.tree.find(path).expect("it was made")
    }

    /// Opens a file for reading and writing.
    pub fn open(&mut self, ino: u64) {
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        self.unique += 2;
        let caller = Caller { pid: std::process::id(), ..Caller::default() };
        let op = Op::Open { ino, access, append: false };
        self.driver.operate(self.unique, OpId(self.unique), caller, ReplyFormat::Natural, op);
        self.serve();
    }

    /// The server answers the sent calls.
    pub fn serve(&mut self) {
        let sent = self.sent();
        self.serve_sent(&sent);
    }

    /// Bytes in transit to the server.
    pub fn sent(&self) -> Vec<u8> {
        joined(&self.driver.next_outgoing().expect("frames for the server").frames)
    }

    pub fn serve_sent(&mut self, sent: &[u8]) {
        let answer = self.server.handle(Time(self.now.load(Ordering::SeqCst)), sent);
        self.driver.with(|core, now| core.remote.handle_input(now, &answer));
    }

    fn is_attached(&self) -> bool {
        self.driver.core.lock().cache.is_attached()
    }
}

fn joined(frames: &[Arc<Vec<u8>>]) -> Vec<u8> {
    frames.iter().flat_map(|frame| frame.iter().copied()).collect()
}

/// After a process was stopped, any thread may run first: not only the timer thread must notice expiry.
#[test]
fn expired_facts_are_not_served_after_the_process_was_stopped() {
    let mut stage = DriverHarness::new();
    assert!(!stage.is_answered());
    stage.serve();
    assert!(stage.is_answered(), "granted facts are answered from memory");
    stage.pass(Span::from_secs(13));
    assert!(stage.is_answered(), "within the term as well");
    // The server waits for 1.1 of the term of 15 s, and then others may have changed anything.
    stage.pass(Span::from_secs(4));
    assert!(!stage.is_answered());
    assert!(!stage.is_attached());
    assert!(!stage.driver.notifier.is_idle(), "the kernel is to be told");
}

/// A message that the server sent before the stop does not renew the lease.
#[test]
fn reply_read_after_lease_expiry_does_not_renew_the_lease() {
    let mut stage = DriverHarness::new();
    assert!(!stage.is_answered());
    let Outgoing { frames, .. } = stage.driver.next_outgoing().unwrap();
    let answer = stage.server.handle(Time(stage.now.load(Ordering::SeqCst)), &joined(&frames));
    stage.pass(Span::from_secs(17));
    stage.driver.with(|core, now| core.remote.handle_input(now, &answer));
    assert!(!stage.is_attached());
    assert!(!stage.is_answered());
}

#[test]
fn timer_thread_ends_with_the_driver() {
    for _ in 0..200 {
        let stage = DriverHarness::new();
        let driver = Arc::clone(&stage.driver);
        let timer = std::thread::spawn(move || driver.run_timer());
        stage.driver.stop();
        timer.join().unwrap();
    }
}

/// Otherwise two threads could queue outputs in reverse order.
#[test]
fn cache_outputs_are_queued_before_another_thread_can_add_later_ones() {
    let stage = DriverHarness::new();
    let (driver, root) = (&stage.driver, stage.driver.root());
    assert!(driver.notifier.is_idle());
    let mut core = driver.core.lock();
    let (now, mut batch) = driver.catch_up(&mut core);
    core.cache.invalidate_name(root, &Name::new(b"a").unwrap());
    core.cache.handle_unreportable(root);
    driver.drive(&mut core, now, &mut batch);
    assert!(!driver.notifier.is_idle(), "and no other thread had the lock meanwhile");
    assert_eq!(driver.events.queued(), 1);
}

/// The kernel locks the inode while it sets times: the reply must not wait for the server.
#[test]
fn setattr_of_a_replay_is_answered_from_memory() {
    let mut stage = DriverHarness::new();
    let driver = Arc::clone(&stage.driver);
    driver.events.replay_filter.register(77);
    let touch = |stage: &mut DriverHarness| {
        driver.events.replay_filter.begin(77, 1, crate::events::ReplayedChange::Touch { ino: driver.root() });
        stage.unique += 2;
        let header = Header { unique: stage.unique, nodeid: 1, uid: 0, gid: 0, pid: 77, resent: false };
        assert!(driver.answer_replay(&header, &Operation::SetAttr(nigh_fuse::SetAttr::default())));
        stage.kernel.take_reply(stage.unique, Duration::ZERO).expect("an answer at once")
    };
    assert_eq!(touch(&mut stage), (libc::ECANCELED, Vec::new()));
    stage.serve();
    let (errno, attributes) = touch(&mut stage);
    assert_eq!(errno, 0);
    assert_eq!(attributes[..12], [0; 12], "valid for no time");
}

/// Otherwise the kernel would cache a mix of two states as one listing.
#[test]
fn kernel_listing_begun_before_a_change_is_invalidated_before_it_continues() {
    let mut stage = DriverHarness::new();
    let dir = stage.driver.root();
    for name in ["a", "b", "c"] {
        stage.make(name, false);
    }
    let caller = Caller { pid: std::process::id(), ..Caller::default() };
    let ask = |stage: &mut DriverHarness, op: Op, shape: ReplyFormat| {
        stage.unique += 2;
        stage.driver.operate(stage.unique, OpId(stage.unique), caller, shape, op);
        if stage.driver.core.lock().pending.contains_key(&OpId(stage.unique)) {
            stage.serve();
        }
        stage.kernel.take_reply(stage.unique, Duration::ZERO).expect("an answer")
    };
    let (_, opened) = ask(&mut stage, Op::OpenDir { ino: dir }, ReplyFormat::Natural);
    let fh = nigh_cache::Fh(u64::from_le_bytes(opened[..8].try_into().unwrap()));
    let read = |offset| Op::ReadDir { ino: dir, fh, offset, size: 80, plus: false };
    let page = ReplyFormat::Page { size: 80, plus: false };
    let (errno, begun) = ask(&mut stage, read(nigh_types::Cookie(0)), page);
    assert_eq!((errno, begun.is_empty()), (0, false));
    let dropped = |stage: &DriverHarness| {
        stage.kernel.notifications().iter().filter(|told| **told == Notification::contents(1)).count()
    };
    let before = dropped(&stage);
    ask(&mut stage, Op::Unlink { dir, name: Name::new(b"a").unwrap() }, ReplyFormat::Natural);
    ask(&mut stage, read(nigh_types::Cookie(2)), page);
    assert_eq!(dropped(&stage), before + 1);
}

/// Otherwise `stat` of the mode alone would show set-user-ID bits for ever, and the kernel would run the changed
/// program with them.
#[test]
fn write_that_clears_set_id_bits_invalidates_the_mode_before_its_reply() {
    for (mode, forgets) in [(0o6777, true), (0o777, false)] {
        let kernel: Arc<OnceLock<Arc<MemoryTransport>>> = Arc::default();
        let (theirs, early) = (Arc::clone(&kernel), Arc::new(AtomicBool::new(true)));
        let is_early = Arc::clone(&early);
        let mut stage = DriverHarness::judging(move |_| {
            let answered = theirs.get().is_some_and(|k| k.take_reply(1002, Duration::ZERO).is_some());
            is_early.fetch_and(!answered, Ordering::SeqCst);
            Ok(NotifyOutcome::Done)
        });
        kernel.set(Arc::clone(&stage.kernel)).ok().unwrap();
        let ino = stage.make("f", false).ino;
        let ask = |stage: &DriverHarness, unique, op| {
            let caller = Caller { pid: std::process::id(), ..Caller::default() };
            stage.driver.operate(unique, OpId(unique), caller, ReplyFormat::Natural, op);
        };
        let set = nigh_types::SetAttr { mode: Some(mode), ..nigh_types::SetAttr::default() };
        ask(&stage, 1000, Op::SetAttr { ino, fh: None, set });
        stage.serve();
        let told = |stage: &DriverHarness| {
            let is_one = |told: &&Notification<'_>| **told == Notification::attributes(ino);
            stage.kernel.notifications().iter().filter(is_one).count()
        };
        let before = told(&stage);
        let flags = WriteFlags { kill_suidgid: true, ..WriteFlags::default() };
        let data = b"other".to_vec();
        ask(&stage, 1002, Op::Write { ino, fh: nigh_cache::Fh(1), offset: 0, data, flags });
        stage.serve();
        assert_eq!(told(&stage) - before, usize::from(forgets), "{mode:o}");
        assert!(early.load(Ordering::SeqCst), "{mode:o}: it was answered first");
        assert!(stage.kernel.take_reply(1002, Duration::ZERO).is_some(), "{mode:o}");
    }
}

/// The path of the mount on another machine may be any path of this one.
#[test]
fn driver_without_a_host_has_no_submounts() {
    for (host, is_empty) in [(local(), false), (absent(), true)] {
        let driver = DriverHarness::on(host).driver;
        assert!(driver.submounts().is_empty(), "nothing is mounted");
        driver.mountpoint.set("/".into()).unwrap();
        assert_eq!(driver.submounts().is_empty(), is_empty);
    }
}
