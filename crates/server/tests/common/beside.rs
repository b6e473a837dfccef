//! A misbehaving client beside honest clients.

use super::client::Client;
use super::world::World;
use super::{me, name};
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::{Output, Remote};
use nigh_types::*;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing_subscriber::fmt::MakeWriter;

/// Limit on the 99th percentile of lookups and of mkdirs; or ten times the latency before the attack, if the machine
/// is busy with other work.
const IN_TIME: Duration = Duration::from_millis(50);
const OTHERS: usize = 20;
const LOOKS: u32 = 100;

/// Writer of the process's log. Tests that read the log or the memory use run one at a time.
#[derive(Clone, Copy)]
struct Log;

static SAID: Mutex<Vec<u8>> = Mutex::new(Vec::new());
static ALONE: LazyLock<Mutex<()>> = LazyLock::new(|| {
    tracing_subscriber::fmt().with_ansi(false).with_writer(Log).init();
    Mutex::default()
});

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        SAID.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Log;

    fn make_writer(&self) -> Log {
        Log
    }
}

pub fn alone() -> MutexGuard<'static, ()> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    SAID.lock().unwrap_or_else(PoisonError::into_inner).clear();
    alone
}

/// Returns the log lines that contain all these words.
pub fn lines(words: &[&str]) -> Vec<String> {
    let said = SAID.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let said = String::from_utf8(said).unwrap();
    said.lines().filter(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned).collect()
}

pub fn eventually(what: &str, within: Duration, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + within;
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}; the log: {:#?}", lines(&[]));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Resident memory of this process, in bytes.
pub fn resident() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Honest clients, which look names up in a common directory and make directories in their own.
struct Others(Vec<Other>);

struct Other {
    client: Client,
    d2: NodeRef,
    own: NodeRef,
    made: u32,
}

impl Others {
    fn of(world: &World) -> Others {
        // Before any client has leases: on a busy machine a recall for the next directory could find a client that does
        // not process its input yet, and the server would take it for silent.
        (0..OTHERS).for_each(|nth| fs::create_dir(world.dir.path().join(format!("own-{nth}"))).unwrap());
        let other = |nth: usize| {
            let mut client = world.client();
            client.obliging = true;
            let (d2, own) = (client.place("d2"), client.place(&format!("own-{nth}")));
            Other { client, d2, own, made: 0 }
        };
        Others((0..OTHERS).map(other).collect())
    }

    /// Returns the 99th percentiles of lookups and of mkdirs, with all clients at once.
    fn look(&mut self) -> (Duration, Duration) {
        let (looked, made) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for other in &mut self.0 {
                scope.spawn(|| {
                    for nth in 0..LOOKS {
                        let call = Call::Lookup { dir: other.d2.clone(), name: name(&format!("n{nth}")) };
                        let begun = Instant::now();
                        assert_eq!(other.client.call(call).result, Ok(Reply::Entry(None)));
                        looked.lock().unwrap().push(begun.elapsed());
                        let took = other.make();
                        made.lock().unwrap().push(took);
                        std::thread::sleep(Duration::from_millis(2));
                    }
                });
            }
        });
        let p99 = |times: Mutex<Vec<Duration>>| {
            let mut times = times.into_inner().unwrap();
            times.sort_unstable();
            times[times.len() * 99 / 100]
        };
        (p99(looked), p99(made))
    }
}

impl Other {
    fn make(&mut self) -> Duration {
        self.made += 1;
        let name = name(&self.made.to_string());
        let call = Call::Mkdir { dir: self.own.clone(), name, mode: 0o700, umask: 0 };
        let begun = Instant::now();
        assert!(self.client.call(call).result.is_ok());
        begun.elapsed()
    }
}

/// Runs `attack` beside honest clients until `stop` is set, and checks their latencies. Memory may grow by at most
/// `most` bytes until the attack has ended.
pub fn beside(world: &World, what: &str, most: u64, attack: impl FnOnce(&AtomicBool) + Send) {
    let mut others = Others::of(world);
    let calm = others.look();
    let (before, stop, over) = (resident(), AtomicBool::new(false), AtomicBool::new(false));
    let (p99, ended, highest) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut highest = 0;
            while !over.load(Ordering::Relaxed) {
                highest = resident().max(highest);
                std::thread::sleep(Duration::from_millis(1));
            }
            highest
        });
        let attacker = scope.spawn(|| attack(&stop));
        std::thread::sleep(Duration::from_millis(200));
        let watched = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let p99 = others.look();
            assert!(others.0.iter_mut().all(|other| other.client.entry(&other.d2, "old").id.ino > 0));
            p99
        }));
        // Before any assertion, or the attack would not end. Idle honest clients would also lose their sessions.
        stop.store(true, Ordering::Relaxed);
        others.0.into_iter().for_each(|other| other.client.leave());
        let ended = attacker.join();
        over.store(true, Ordering::Relaxed);
        (watched, ended, watch.join().unwrap())
    });
    if let Err(panic) = ended {
        std::panic::resume_unwind(panic);
    }
    let (p99, grown) = (p99.expect("others are answered, and stay"), highest.saturating_sub(before));
    println!("{what}: p99 of others {p99:.1?} ({calm:.1?} before), {} KiB more memory", grown >> 10);
    for (p99, calm) in [(p99.0, calm.0), (p99.1, calm.1)] {
        assert!(p99 < IN_TIME.max(calm * 10), "{what}: others wait {p99:?}, before that {calm:?}");
    }
    assert!(grown <= most, "{what}: {grown} bytes more");
}

/// A client that violates the protocol: its raw stream, after the welcome.
pub struct Rogue {
    pub stream: UnixStream,
    pub session: ClientSession,
}

impl Rogue {
    pub fn attached(world: &World) -> Rogue {
        Rogue::wanting(world, 0)
    }

    /// Attaches with optional features of the protocol.
    pub fn wanting(world: &World, features: u64) -> Rogue {
        static LAST: AtomicU64 = AtomicU64::new(1 << 50);
        let incarnation = LAST.fetch_add(1, Ordering::Relaxed);
        let attach = world.dir.path().as_os_str().as_bytes().to_vec();
        let config = ClientConfig { client: 66, incarnation, attach, term: Term::Session, features };
        let stream = world.server.serve_in_process().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut rogue = Rogue { stream, session: ClientSession::new(Time(1), config) };
        let hello = rogue.said();
        rogue.stream.write_all(&hello).unwrap();
        let mut buffer = vec![0; 1 << 16];
        while rogue.session.session_id() == 0 {
            let count = rogue.stream.read(&mut buffer).unwrap();
            assert!(count > 0, "a hello is welcome");
            rogue.session.handle_input(Time(2), &buffer[..count]);
        }
        rogue.said();
        rogue
    }

    /// Drains the session's output.
    fn said(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        loop {
            match self.session.poll_output() {
                Output::Transmit(frame) => bytes.extend_from_slice(&frame),
                Output::Event(_) => {}
                Output::Timeout(..) => return bytes,
            }
        }
    }

    /// Encodes a call as a frame.
    pub fn request(&mut self, id: u64, call: Call) -> Vec<u8> {
        let request = Request { credentials: me(), mutation_id: None, call };
        self.session.handle_call(Time(3), CallId(id), request);
        self.said()
    }

    /// Reads until the server ends the connection, which it must.
    pub fn ended(mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("the connection stands: {error}"),
        }
    }
}
