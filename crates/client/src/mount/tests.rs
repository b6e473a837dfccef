use super::*;
use crate::host::NoHost;
use crate::host::test_host::TestHost;
use crate::test_server::Server;
use nigh_fuse::{Extensions, Header, Level, MemoryTransport, Operation, encode};
use nigh_types::{Call, Errno};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A mount between a memory kernel and a test server.
struct MountHarness {
    kernel: Arc<MemoryTransport>,
    server: Arc<parking_lot::Mutex<Server>>,
    agreed: Negotiated,
    mount: Mount,
    unique: u64,
    dir: tempfile::TempDir,
}

impl MountHarness {
    fn new() -> MountHarness {
        MountHarness::with(None, Arc::new(LocalHost))
    }

    fn with(pressure: Option<Box<dyn Pressure>>, host: Arc<dyn Host>) -> MountHarness {
        MountHarness::start(pressure, host, RequestedFeatures::default()).unwrap()
    }

    fn start(
        pressure: Option<Box<dyn Pressure>>,
        host: Arc<dyn Host>,
        wanted: RequestedFeatures,
    ) -> Result<MountHarness, StartError> {
        let dir = tempfile::tempdir().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = Arc::new(parking_lot::Mutex::new(Server::new(boot_time())));
        let serving = Arc::clone(&server);
        thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(length @ 1..) = io::Read::read(&mut &theirs, &mut buffer) {
                let answer = serving.lock().handle(boot_time(), &buffer[..length]);
                if io::Write::write_all(&mut &theirs, &answer).is_err() {
                    return;
                }
            }
        });
        let kernel = Arc::new(MemoryTransport::new(Level::All));
        let flags = wanted.flags_for(wanted.max_minor);
        let agreed = Negotiated { minor: wanted.max_minor, flags, ..Negotiated::default() };
        let config = MountConfig {
            options: MountOptions::new(Path::new("/nowhere"), "a test"),
            cache: Config::default(),
            wanted,
            level: Level::All,
            begin: nigh_native::sessions(nigh_native::ClientConfig {
                client: 0,
                incarnation: 0,
                attach: Vec::new(),
                term: nigh_types::Term::Session,
                features: nigh_native::UPDATES,
            }),
            idmap: IdMapChoice::None,
            threads: 1,
            reconnect: None,
            events: None,
            watchdog: None,
            pressure,
            runtime: dir.path().to_owned(),
        };
        let mount = Mount::start_on(config, ours.into(), Box::new(Arc::clone(&kernel)), host, agreed)?;
        Ok(MountHarness { kernel, server, agreed, mount, unique: 0, dir })
    }

    /// The errno of an operation on the root; 0: none.
    fn ask(&mut self, operation: &Operation<'_>) -> i32 {
        self.ask_as(0, operation)
    }

    /// The errno of an operation on the root for this thread.
    fn ask_as(&mut self, pid: u32, operation: &Operation<'_>) -> i32 {
        self.unique += 2;
        let header = Header { unique: self.unique, nodeid: 1, uid: 0, gid: 0, pid, resent: false };
        self.kernel.queue(encode(&header, operation, &self.agreed));
        self.kernel.take_reply(self.unique, Duration::from_secs(20)).expect("an answer").0
    }

    /// The groups sent with the call that made this directory.
    fn groups_of_mkdir(&self, name: &str) -> Vec<u32> {
        let server = self.server.lock();
        let made = server.asked.iter().find(
            |request| matches!(&request.call, Call::Mkdir { name: n, .. } if n.as_bytes() == name.as_bytes()),
        );
        made.expect("asked").credentials.groups.clone()
    }

    /// Unmounts; returns how long it took, and the directory of sockets.
    fn end(self) -> (Duration, tempfile::TempDir) {
        let begun = Instant::now();
        self.kernel.close();
        self.mount.wait();
        (begun.elapsed(), self.dir)
    }
}

fn mkdir<'a>(name: &'a [u8], extensions: Extensions<'a>) -> Operation<'a> {
    Operation::Mkdir { name, mode: 0o755, umask: 0, extensions }
}

/// A pressure source controlled by the test.
struct TestPressure(std::fs::File);

impl Pressure for TestPressure {
    fn wait(&mut self, stop: std::os::fd::BorrowedFd<'_>) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut fds = [PollFd::new(&self.0, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
        poll(&mut fds, None)?;
        if !fds[1].revents().is_empty() {
            return Ok(false);
        }
        let mut byte = [0];
        match io::Read::read(&mut self.0, &mut byte)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(true),
        }
    }
}

#[test]
fn every_memory_pressure_event_frees_memory() {
    let (hears, mut says) = io::pipe().unwrap();
    let pressure = TestPressure(std::os::fd::OwnedFd::from(hears).into());
    let mut stage = MountHarness::with(Some(Box::new(pressure)), Arc::new(LocalHost));
    assert_eq!(stage.ask(&Operation::GetAttr { fh: None }), 0);
    for times in 1..=3 {
        io::Write::write_all(&mut says, b"!").unwrap();
        let until = Instant::now() + Duration::from_secs(5);
        let squeezed = || stage.mount.status()["cache"]["squeezed"].as_u64();
        while squeezed() < Some(times) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(squeezed(), Some(times));
    }
    assert_eq!(stage.ask(&Operation::GetAttr { fh: None }), 0);
    // A silent source delays nothing.
    let (took, _dir) = stage.end();
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// ENOSYS means "never send this again" to the kernel.
#[test]
fn enosys_from_the_remote_does_not_disable_the_operation_for_the_mount() {
    let mut stage = MountHarness::new();
    let create = Operation::Create {
        name: b"f",
        flags: 0,
        mode: 0o644,
        umask: 0,
        kill_suidgid: false,
        extensions: Extensions::default(),
    };
    for (said, told) in
        [(Errno::NOSYS, libc::EOPNOTSUPP), (Errno::from_raw(512), libc::EIO), (Errno::NOSPC, libc::ENOSPC)]
    {
        let refuse = move |call: &Call| matches!(call, Call::Create { .. }).then_some(said);
        stage.server.lock().refuse = Some(Box::new(refuse));
        assert_eq!(stage.ask(&create), told, "{said}");
    }
    // For operations that the client does not serve, ENOSYS is right.
    assert_eq!(stage.ask(&Operation::Access { mask: 4 }), libc::ENOSYS);
    stage.server.lock().refuse = None;
    assert_eq!(stage.ask(&create), 0);
    stage.end();
}

/// The thread may be in another pid namespace, where its groups cannot be read.
#[test]
fn group_in_a_create_request_is_sent_with_the_call() {
    let mut stage = MountHarness::new();
    let group = Extensions::encode_groups(&[33]);
    assert_eq!(stage.ask(&mkdir(b"with", Extensions::parse(&group).unwrap())), 0);
    assert_eq!(stage.ask(&mkdir(b"without", Extensions::default())), 0);
    assert_eq!(stage.groups_of_mkdir("with"), [33]);
    assert_eq!(stage.groups_of_mkdir("without"), Vec::<u32>::new());
    stage.end();
}

/// A guest's thread may have the number of any program of this machine.
#[test]
fn mount_without_a_host_sends_no_groups_but_those_of_the_request() {
    let hosts: [(Arc<dyn Host>, &[u32]); 2] =
        [(Arc::new(TestHost::default()), &[5, 6, 33]), (Arc::new(NoHost), &[33])];
    for (host, groups) in hosts {
        let mut stage = MountHarness::with(None, host);
        let group = Extensions::encode_groups(&[33]);
        let make = mkdir(b"d", Extensions::parse(&group).unwrap());
        assert_eq!(stage.ask_as(std::process::id(), &make), 0);
        assert_eq!(stage.groups_of_mkdir("d"), groups);
        stage.end();
    }
}

/// On an idmapped mount a call has capabilities in place of its caller's ids.
#[test]
fn idmapped_mount_without_a_host_is_refused() {
    let mut wanted = RequestedFeatures::default();
    wanted.flags |= init::ALLOW_IDMAP;
    let started = MountHarness::start(None, Arc::new(NoHost), wanted);
    assert!(matches!(started, Err(StartError::Idmapped(_))));
}

/// As at logout, when the user's runtime directory is removed.
#[test]
fn mount_ends_with_a_goodbye_after_its_status_socket_was_removed() {
    let mut stage = MountHarness::new();
    assert_eq!(stage.ask(&Operation::GetAttr { fh: None }), 0);
    let runtime = stage.dir.path().to_owned();
    assert_eq!(crate::control::statuses(&runtime).unwrap().len(), 1);
    std::fs::remove_dir_all(&runtime).unwrap();
    let server = Arc::clone(&stage.server);
    let (took, _dir) = stage.end();
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(server.lock().left, "it has not said goodbye");
}

#[test]
fn status_socket_has_a_unique_name_and_is_removed_with_its_mount() {
    let stage = MountHarness::new();
    let runtime = stage.dir.path().to_owned();
    let names = || {
        let dir = std::fs::read_dir(runtime.join("mounts")).unwrap();
        dir.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    let name = names().pop().unwrap();
    assert!(name.starts_with(&format!("{}-", std::process::id())) && name.ends_with(".sock"), "{name}");
    // One that does not listen yet, and one of a killed mount.
    std::fs::write(runtime.join("mounts/.early"), "").unwrap();
    drop(std::os::unix::net::UnixListener::bind(runtime.join("mounts/1-0.sock")).unwrap());
    assert_eq!(crate::control::statuses(&runtime).unwrap().len(), 1);
    let mut left = names();
    left.sort();
    assert_eq!(left, [".early".to_owned(), name]);
    let (_, _dir) = stage.end();
    assert_eq!(names(), [".early"]);
}
