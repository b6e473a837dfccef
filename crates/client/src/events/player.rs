//! A child, as its parent sees it.

use super::command::Command;
use super::pretence::{Part, Pretence};
use nigh_cache::Change;
use rustix::event::{PollFd, PollFlags};
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

/// One that waits in the mount for so long is left to that.
const LATE: Duration = Duration::from_millis(100);
/// At the end.
const FAREWELL: Duration = Duration::from_millis(200);

/// How to start one: a program with its arguments.
#[derive(Clone, Debug)]
pub struct Program {
    pub path: std::path::PathBuf,
    pub arguments: Vec<std::ffi::OsString>,
}

/// A change that watchers are to be told.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub change: Change,
    /// By which the cache knows what was before it.
    pub number: u64,
    pub tries: u32,
    pub not_before: Option<Instant>,
}

pub(super) struct Player {
    child: Child,
    commands: ChildStdin,
    answers: ChildStdout,
    task: Option<(Task, Instant)>,
}

impl Player {
    pub fn start(program: &Program, pretence: &Pretence) -> io::Result<Player> {
        let mut command = std::process::Command::new(&program.path);
        command
            .arg0("nigh")
            .args(&program.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .current_dir("/");
        // What interrupts the mount from a terminal is the mount's.
        command.process_group(0);
        let mut child = command.spawn()?;
        pretence.enter(child.id());
        match (child.stdin.take(), child.stdout.take()) {
            (Some(commands), Some(answers)) => Ok(Player { child, commands, answers, task: None }),
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    pub fn is_idle(&self) -> bool {
        self.task.is_none()
    }

    /// Whether it waits for something in the mount.
    pub fn is_late(&self, now: Instant) -> bool {
        self.late_at().is_some_and(|late| late <= now)
    }

    /// When it will count as late.
    pub fn late_at(&self) -> Option<Instant> {
        self.task.as_ref().map(|(_, since)| *since + LATE)
    }

    pub fn task(&self) -> Option<&Task> {
        self.task.as_ref().map(|(task, _)| task)
    }

    /// Fails where it has ended.
    pub fn give(&mut self, pretence: &Pretence, task: Task, part: Part, command: &Command) -> io::Result<()> {
        pretence.begin(self.child.id(), task.number, part);
        self.task = Some((task, Instant::now()));
        self.commands.write_all(&command.encode())
    }

    pub fn polled(&self) -> PollFd<'_> {
        PollFd::new(&self.answers, PollFlags::IN)
    }

    /// The answer that can be read, and to what; an error where it has ended.
    pub fn take(&mut self, pretence: &Pretence) -> io::Result<(Option<Task>, i32)> {
        let mut errno = [0; 4];
        let read = self.answers.read_exact(&mut errno);
        pretence.end(self.child.id());
        read?;
        Ok((self.task.take().map(|(task, _)| task), i32::from_le_bytes(errno)))
    }

    /// Ends it. One that cannot end is left: it does when the connection ends.
    pub fn end(mut self, pretence: &Pretence) -> Option<Task> {
        let _ = self.child.kill();
        // Before its number can be another's.
        pretence.leave(self.child.id());
        let give_up = Instant::now() + FAREWELL;
        while !matches!(self.child.try_wait(), Ok(Some(_))) && Instant::now() < give_up {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.task.take().map(|(task, _)| task)
    }
}
