//! The remotes' common suite over real servers.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nigh_ninep::{Config, Session, Times};
use nigh_remote::conformance::{Harness, Report, run};
use nigh_remote::{Event, Output, Remote};
use nigh_types::{CookieKey, Credentials, Span, Term, Time};

use super::server::Server;
use crate::test::world::{World, in_memory};

/// Nothing more comes when a server was silent for so long.
const SILENCE: Duration = Duration::from_secs(5);

struct Served {
    server: Server,
    started: Instant,
    count: u32,
    stream: Option<TcpStream>,
    lacks: Vec<&'static str>,
}

impl Served {
    fn new(server: Server, lacks: &[&'static str]) -> Served {
        Served { server, started: Instant::now(), count: 0, stream: None, lacks: lacks.to_vec() }
    }

    fn moment(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX) + 1)
    }
}

impl Harness for Served {
    fn attach(&mut self) -> Box<dyn Remote> {
        self.count += 1;
        let dir = self.server.export.join(format!("case-{}", self.count));
        std::fs::create_dir(&dir).expect("an export of its own");
        self.stream = Some(self.server.connect().expect("it listened"));
        let second = Term::Limited(Span::from_secs(1));
        Box::new(Session::new(
            self.moment(),
            Config {
                aname: dir.as_os_str().as_bytes().to_vec(),
                uname: Vec::new(),
                uid: 0,
                gid: 0,
                all_users: false,
                msize: 1 << 20,
                times: Times { names: second, absent: second, attributes: second },
                cookie_key: CookieKey(*b"sixteen bytes ok"),
            },
        ))
    }

    fn now(&self) -> Time {
        self.moment()
    }

    fn pump(&mut self, remote: &mut dyn Remote) -> Vec<Event> {
        let mut events = Vec::new();
        let mut buffer = vec![0; 1 << 20];
        let give_up = Instant::now() + SILENCE;
        loop {
            let due = loop {
                match remote.poll_output() {
                    Output::Event(event) => events.push(event),
                    Output::Transmit(bytes) => {
                        self.stream
                            .as_mut()
                            .expect("attached")
                            .write_all(&bytes)
                            .expect("it takes what is sent");
                    }
                    Output::Timeout(due, _) => break due,
                }
            };
            if !events.is_empty() || Instant::now() > give_up {
                return events;
            }
            let now = self.moment();
            let left = Duration::from_nanos(due.since(now).0).clamp(Duration::from_millis(1), SILENCE);
            let stream = self.stream.as_mut().expect("attached");
            stream.set_read_timeout(Some(left)).expect("a timeout");
            let read = stream.read(&mut buffer);
            let now = self.moment();
            match read {
                Ok(0) => remote.handle_disconnect(now, "end of stream"),
                Ok(count) => remote.handle_input(now, &buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => remote.handle_timeout(now),
                Err(error) => remote.handle_disconnect(now, &error.to_string()),
            }
        }
    }

    fn credentials(&self) -> Credentials {
        Credentials::default()
    }

    fn lacks(&self) -> &[&str] {
        &self.lacks
    }
}

fn judge(report: &Report) -> Result<()> {
    if report.failed.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = report.failed.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    bail!("{} of {} cases failed:\n  {}", lines.len(), lines.len() + report.passed.len(), lines.join("\n  "))
}

/// What 9P2000.L has no message for; an xattr with no value is removed by it.
const NINEP_LACKS: &[&str] = &[
    "fallocate_extends",
    "fallocate_punches_holes",
    "copy_range_copies",
    "tmpfile_has_no_name_until_linked",
    "rename_noreplace",
    "rename_exchange",
    "xattrs_may_be_empty",
];

/// diod 1.0.24 knows files by their paths, and changes what is there.
const DIOD_LACKS: &[&str] = &["unlinked_files_are_cut_and_changed_while_open"];

pub fn diod(world: &World) -> Result<()> {
    let export = in_memory(&world.root).unwrap_or_else(|| world.root.clone()).join("diod");
    let server = Server::diod(world, &export)?;
    judge(&run(&mut Served::new(server, &[NINEP_LACKS, DIOD_LACKS].concat())))
}
