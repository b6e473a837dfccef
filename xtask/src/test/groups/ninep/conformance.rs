//! The remotes' conformance suite on real servers.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nigh_ninep::{Config, Session, Times};
use nigh_remote::conformance::{Harness, Report, run};
use nigh_remote::{Event, Output, Remote};
use nigh_types::{CookieKey, Credentials, Span, Term, Time};

use super::server::{self, connect};
use crate::test::over::{Serving, diod_on, free_port};
use crate::test::world::{World, in_memory};

/// After this time of silence no more replies are expected.
const SILENCE: Duration = Duration::from_secs(5);

/// Provides a tree for a case: the server, and the tree's name there.
type Stage<'a> = Box<dyn FnMut(u32) -> Result<(Rc<Serving>, PathBuf)> + 'a>;

struct Served<'a> {
    stage: Stage<'a>,
    started: Instant,
    count: u32,
    /// The server of the latest case, and a connection to it.
    current: Option<(Rc<Serving>, TcpStream)>,
    lacks: Vec<&'static str>,
}

impl<'a> Served<'a> {
    fn new(stage: Stage<'a>, lacks: &[&[&'static str]]) -> Served<'a> {
        Served { stage, started: Instant::now(), count: 0, current: None, lacks: lacks.concat() }
    }

    fn moment(&self) -> Time {
        Time(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX) + 1)
    }
}

impl Harness for Served<'_> {
    fn attach(&mut self) -> Box<dyn Remote> {
        self.count += 1;
        let (server, tree) = (self.stage)(self.count).expect("a server");
        let stream = connect(&server).expect("it listens");
        self.current = Some((server, stream));
        let second = Term::Limited(Span::from_secs(1));
        let times = Times { names: second, absent: second, attributes: second };
        let config = Config::new(times, CookieKey(*b"sixteen bytes ok"));
        let aname = tree.as_os_str().as_bytes().to_vec();
        Box::new(Session::new(self.moment(), Config { aname, msize: 1 << 20, ..config }))
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
                        let (_, stream) = self.current.as_mut().expect("attached");
                        stream.write_all(&bytes).expect("it takes what is sent");
                    }
                    Output::Timeout(due, _) => break due,
                }
            };
            if !events.is_empty() || Instant::now() > give_up {
                return events;
            }
            let now = self.moment();
            let left = Duration::from_nanos(due.since(now).0).clamp(Duration::from_millis(1), SILENCE);
            let (_, stream) = self.current.as_mut().expect("attached");
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

/// Operations without a 9P2000.L message; setting an xattr to an empty value removes it.
const NINEP_LACKS: &[&str] = &[
    "fallocate_extends",
    "fallocate_punches_holes",
    "copy_range_copies",
    "tmpfile_has_no_name_until_linked",
    "rename_noreplace",
    "rename_exchange",
    "rename_whiteout",
    "xattrs_may_be_empty",
];

/// diod 1.0.24 identifies files by path, and changes the file that is there now.
const DIOD_LACKS: &[&str] = &["unlinked_files_are_cut_and_changed_while_open"];

pub fn diod(world: &World) -> Result<()> {
    let export = in_memory(&world.root).unwrap_or_else(|| world.root.clone()).join("diod");
    std::fs::create_dir_all(&export)?;
    // One server for each case: diod 1.0.24 may crash after a connection has ended.
    let stage = |count| {
        let tree = export.join(format!("case-{count}"));
        std::fs::create_dir(&tree)?;
        Ok((Rc::new(diod_on(world, &export, free_port()?)?), tree))
    };
    judge(&run(&mut Served::new(Box::new(stage), &[NINEP_LACKS, DIOD_LACKS])))
}

/// unpfs 0.13.0 lacks links, symlinks, devices, xattrs and locks (EOPNOTSUPP). It ignores O_EXCL in Tlcreate and times
/// that the server's clock should set. It closes the connection at names that are not UTF-8, and fails to list entries
/// that are removed meanwhile.
const UNPFS_LACKS: &[&str] = &[
    "create_finds_an_existing_file_unless_exclusive",
    "create_truncates_only_on_request",
    "create_over_a_directory_fails",
    "fifos_and_sockets_are_made_and_not_opened",
    "names_are_bytes",
    "after_is_what_getattr_says",
    "open_of_what_is_no_file_fails",
    "unlinked_files_are_cut_and_changed_while_open",
    "setattr_sets_mode_and_times",
    "fsync_and_statfs_and_flags",
    "links_count_and_share",
    "link_fails_over_names_and_of_directories",
    "a_second_link_goes_and_the_first_stays",
    "symlinks_keep_their_bytes",
    "rename_keeps_nothing_but_files",
    "rename_between_links_of_one_file_does_nothing",
    "entries_are_what_lookup_says",
    "what_stays_is_listed_once_whatever_changes",
    "xattrs_are_set_read_listed_and_removed",
    "xattr_flags_create_and_replace",
    "an_inode_without_xattrs_says_so",
    "locks_exclude_each_other",
    "locks_are_split_joined_and_changed",
    "the_first_lock_in_the_way_is_told",
    "flock_and_fcntl_locks_do_not_meet",
    "a_waiting_lock_is_granted_when_it_can_be",
    "a_waiting_lock_can_be_cancelled",
    "a_lock_that_was_not_held_before_cannot_be_claimed",
    "locks_of_removed_and_of_other_things",
];

pub fn unpfs(world: &World) -> Result<()> {
    let export = in_memory(&world.root).unwrap_or_else(|| world.root.clone()).join("unpfs");
    // It serves one tree, whatever its name.
    let stage = |count| {
        let tree = export.join(format!("case-{count}"));
        Ok((Rc::new(server::unpfs(world, &tree)?), PathBuf::new()))
    };
    judge(&run(&mut Served::new(Box::new(stage), &[NINEP_LACKS, UNPFS_LACKS])))
}
