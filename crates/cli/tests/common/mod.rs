//! A client without a mount, and users.
#![allow(dead_code, reason = "each test file uses its own part")]

use nigh_link::Link;
use nigh_native::{ClientConfig, ClientSession};
use nigh_remote::{Event, Output, Reason, Remote, SessionParams};
use nigh_types::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub const NIGH: &str = env!("CARGO_BIN_EXE_nigh");
/// A uid that no machine uses.
pub const UNPRIVILEGED_UID: u32 = 4_000_123;

pub fn needs_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("SKIPPED: {test} needs root");
    }
    root
}

/// Connects as another user: a short-lived thread changes only its own credentials.
pub fn as_user<T: Send + 'static>(uid: u32, connect: impl FnOnce() -> T + Send + 'static) -> T {
    std::thread::spawn(move || {
        // SAFETY: these take integers and an empty list, and change this thread only.
        let changed = unsafe {
            libc::syscall(libc::SYS_setgroups, 0_usize, std::ptr::null::<libc::gid_t>())
                | libc::syscall(libc::SYS_setresgid, uid, uid, uid)
                | libc::syscall(libc::SYS_setresuid, uid, uid, uid)
        };
        assert_eq!(changed, 0);
        connect()
    })
    .join()
    .unwrap()
}

pub struct Client {
    pub link: Link,
    pub session: ClientSession,
    calls: u64,
}

impl Client {
    /// Attaches to an export as a new process; the error is the server's refusal.
    pub fn attach(link: Link, what: &str) -> Result<(Client, SessionParams), String> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Client::attach_as(link, what, LAST.fetch_add(1, Ordering::Relaxed))
    }

    pub fn attach_as(link: Link, what: &str, incarnation: u64) -> Result<(Client, SessionParams), String> {
        let attach = what.as_bytes().to_vec();
        let config = ClientConfig { features: 0, client: 1, incarnation, attach, term: Term::Session };
        let mut client = Client { link, session: ClientSession::new(Time(1), config), calls: 0 };
        match client.next() {
            Event::Attached(session) => Ok((client, session)),
            Event::Lost { why } => Err(why),
            other => panic!("{other:?}"),
        }
    }

    pub fn next(&mut self) -> Event {
        self.heard().expect("the connection has ended")
    }

    /// Returns the next event. `None`: the connection has ended, and the session asks for another.
    pub fn heard(&mut self) -> Option<Event> {
        let mut buffer = vec![0; 1 << 16];
        self.link.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        loop {
            match self.session.poll_output() {
                Output::Event(event) => return Some(event),
                // If the peer no longer reads, the write fails and the next read returns the end.
                Output::Transmit(bytes) => drop(self.link.write_all(&bytes)),
                Output::Timeout(..) if self.session.wants_connection().is_some() => return None,
                Output::Timeout(..) => match self.link.read(&mut buffer).unwrap() {
                    0 => self.session.handle_disconnect(Time(2), "end of stream"),
                    count => self.session.handle_input(Time(2), &buffer[..count]),
                },
            }
        }
    }

    fn begin(&mut self, credentials: Credentials, call: Call) {
        self.calls += 1;
        let name =
            call.is_mutation().then_some(MutationId { client: 1, incarnation: 2, sequence: self.calls });
        self.session.handle_call(
            Time(1),
            CallId(self.calls),
            Request { credentials, mutation_id: name, call },
        );
    }

    pub fn send(&mut self, call: Call) {
        self.begin(Credentials::default(), call);
        self.transmit();
    }

    pub fn call(&mut self, credentials: Credentials, call: Call) -> Result<Reply, Errno> {
        self.begin(credentials, call);
        loop {
            match self.next() {
                Event::Response { response, .. } => return response.result,
                // The server recalls the lease when a mode or owner changes on its disk.
                Event::Recall(recall) => self.session.handle_acknowledge(Time(1), recall.id),
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn make(&mut self, dir: NodeId, name: &str, uid: u32, groups: &[u32]) -> Result<Reply, Errno> {
        let (dir, name) = (NodeRef::without_hint(dir), Name::new(name.as_bytes()).unwrap());
        let credentials = Credentials { uid, gid: uid, groups: groups.to_vec(), privileges: None };
        self.call(credentials, Call::Mkdir { dir, name, mode: 0o755, umask: 0 })
    }

    /// Whether the session expires unless the client renews it.
    pub fn must_renew(&mut self) -> bool {
        !matches!(self.session.poll_output(), Output::Timeout(_, Reason::Idle))
    }

    /// Closes the session, and waits until the server has processed the close.
    pub fn leave(mut self) {
        self.session.handle_close("done");
        self.transmit();
        while self.link.read(&mut [0; 1 << 12]).is_ok_and(|count| count > 0) {}
    }

    fn transmit(&mut self) {
        while let Output::Transmit(bytes) = self.session.poll_output() {
            self.link.write_all(&bytes).unwrap();
        }
    }

    /// Acknowledges every recall until the connection ends.
    pub fn wait_for_the_end(&mut self) {
        while let Some(event) = self.heard() {
            match event {
                Event::Recall(recall) => self.session.handle_acknowledge(Time(1), recall.id),
                Event::Lost { why } => panic!("{why}"),
                _ => {}
            }
        }
    }
}
