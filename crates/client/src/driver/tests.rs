use super::*;
use crate::adapter;
use crate::interrupts::Interrupts;
use crate::stage::Server;
use nigh_cache::Config;
use nigh_fuse::{Header, Level, MemoryTransport, Negotiated, Operation, encode};
use nigh_native::ClientConfig;
use nigh_remote::{Event, Output as RemoteOutput};
use nigh_types::{Span, Term};
use std::sync::Arc;
use std::time::Duration;

/// A driver between a kernel, a server and a clock that stand still.
pub(crate) struct Stage {
    pub driver: Arc<Driver>,
    pub kernel: Arc<MemoryTransport>,
    server: Server,
    now: Arc<AtomicU64>,
    unique: u64,
}

impl Stage {
    pub fn new() -> Stage {
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
        let kernel = Arc::new(MemoryTransport::new(Level::All));
        let clock = Arc::clone(&now);
        let clock = Box::new(move || Time(clock.load(Ordering::SeqCst)));
        let cache = Cache::new(Config::default());
        let transport = Box::new(Arc::clone(&kernel));
        let driver = Driver::new(cache, session, transport, IdMap::default(), clock).unwrap();
        driver.with(|core, now| core.cache.handle_event(now, attached.expect("a welcome")));
        Stage { driver: Arc::new(driver), kernel, server, now, unique: 0 }
    }

    fn pass(&self, span: Span) {
        self.now.fetch_add(span.0, Ordering::SeqCst);
    }

    /// The kernel asks for the root's attributes; whether it was answered at once.
    fn is_answered(&mut self) -> bool {
        self.unique += 2;
        let header = Header { unique: self.unique, nodeid: 1, uid: 0, gid: 0, pid: 0, resent: false };
        let agreed = Negotiated::default();
        let request = encode(&header, &Operation::GetAttr { fh: None }, &agreed);
        adapter::receive(&self.driver, &Interrupts::default(), &agreed, &request);
        self.kernel.take_reply(self.unique, Duration::ZERO).is_some()
    }

    /// The server answers what was sent to it.
    fn serve(&mut self) {
        let (_, bytes) = self.driver.next_outgoing().expect("bytes for the server");
        let now = Time(self.now.load(Ordering::SeqCst));
        let answer = self.server.handle(now, &bytes);
        self.driver.with(|core, now| core.remote.handle_input(now, &answer));
    }

    fn is_attached(&self) -> bool {
        self.driver.core.lock().cache.is_attached()
    }
}

/// Of a process that was stopped any thread may go on first: not only the timer's knows what has expired.
#[test]
fn nothing_is_answered_from_facts_whose_lease_ran_out_while_the_process_was_stopped() {
    let mut stage = Stage::new();
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

/// What the server said before the process was stopped is no sign of life.
#[test]
fn an_answer_that_lay_in_the_socket_while_the_lease_ran_out_revives_nothing() {
    let mut stage = Stage::new();
    assert!(!stage.is_answered());
    let (_, bytes) = stage.driver.next_outgoing().unwrap();
    let answer = stage.server.handle(Time(stage.now.load(Ordering::SeqCst)), &bytes);
    stage.pass(Span::from_secs(17));
    stage.driver.with(|core, now| core.remote.handle_input(now, &answer));
    assert!(!stage.is_attached());
    assert!(!stage.is_answered());
}

#[test]
fn the_timer_ends_with_the_driver() {
    for _ in 0..200 {
        let stage = Stage::new();
        let driver = Arc::clone(&stage.driver);
        let timer = std::thread::spawn(move || driver.run_timer());
        stage.driver.stop();
        timer.join().unwrap();
    }
}
