//! The daemon's handle of a replay child.

use super::command::Command;
use super::replay_filter::{ReplayFilter, ReplayedChange};
use nigh_cache::RemoteChange;
use rustix::event::{PollFd, PollFlags};
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

/// A child that waits in the mount for this long counts as blocked.
const LATE: Duration = Duration::from_millis(100);
/// How long to wait for its end.
const FAREWELL: Duration = Duration::from_millis(200);

/// A program with its arguments, to start a child.
#[derive(Clone, Debug)]
pub struct Program {
    pub path: std::path::PathBuf,
    pub arguments: Vec<std::ffi::OsString>,
}

/// A change to replay for watchers.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub change: RemoteChange,
    /// Number by which the cache orders changes.
    pub number: u64,
    pub tries: u32,
    pub not_before: Option<Instant>,
}

pub(super) struct ReplayProcess {
    child: Child,
    commands: ChildStdin,
    answers: ChildStdout,
    task: Option<(Task, Instant)>,
}

impl ReplayProcess {
    pub fn start(program: &Program, filter: &ReplayFilter) -> io::Result<ReplayProcess> {
        let mut command = std::process::Command::new(&program.path);
        command
            .arg0("nigh")
            .args(&program.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .current_dir("/");
        // Terminal signals for the mount must not reach the child.
        command.process_group(0);
        let mut child = command.spawn()?;
        filter.register(child.id());
        match (child.stdin.take(), child.stdout.take()) {
            (Some(commands), Some(answers)) => Ok(ReplayProcess { child, commands, answers, task: None }),
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.task.is_none()
    }

    /// Whether it is blocked in the mount.
    pub fn is_blocked(&self, now: Instant) -> bool {
        self.blocked_at().is_some_and(|late| late <= now)
    }

    /// The time at which it will count as blocked.
    pub fn blocked_at(&self) -> Option<Instant> {
        self.task.as_ref().map(|(_, since)| *since + LATE)
    }

    pub fn task(&self) -> Option<&Task> {
        self.task.as_ref().map(|(task, _)| task)
    }

    /// Sends a command. Fails if the child has ended.
    pub fn start_task(
        &mut self,
        filter: &ReplayFilter,
        task: Task,
        part: ReplayedChange,
        command: &Command,
    ) -> io::Result<()> {
        filter.begin(self.child.id(), task.number, part);
        self.task = Some((task, Instant::now()));
        self.commands.write_all(&command.encode())
    }

    pub fn polled(&self) -> PollFd<'_> {
        PollFd::new(&self.answers, PollFlags::IN)
    }

    /// Reads a result, with its task; an error if the child has ended.
    pub fn take_result(&mut self, filter: &ReplayFilter) -> io::Result<(Option<Task>, i32)> {
        let mut errno = [0; 4];
        let read = self.answers.read_exact(&mut errno);
        filter.end(self.child.id());
        read?;
        Ok((self.task.take().map(|(task, _)| task), i32::from_le_bytes(errno)))
    }

    /// Kills the child. If it is blocked, it stays until the connection ends.
    pub fn end(mut self, filter: &ReplayFilter) -> Option<Task> {
        let _ = self.child.kill();
        // Before the process id can be reused.
        filter.unregister(self.child.id());
        let give_up = Instant::now() + FAREWELL;
        while !matches!(self.child.try_wait(), Ok(Some(_))) && Instant::now() < give_up {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.task.take().map(|(task, _)| task)
    }
}
