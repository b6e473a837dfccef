//! Start of the daemon in the background, and its report to the parent.
//!
//! `nigh mount` starts itself again with a pipe: the child writes one line when the mount is ready or has failed, and
//! the parent prints the result. (The alternative would be a fork by a process that already has threads.) The child
//! leaves the terminal once it is connected: until then ssh may prompt there for a password, and an interrupt from
//! the keyboard ends all three processes.

use crate::options::Usage;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const MOUNTED: &str = "stands\n";
/// Followed by a one-line notice for the user.
const MOUNTED_WITH_NOTE: &str = "stands ";

/// Starts this program again in the background with the same command line, and waits for its report.
pub fn start(log: &Path, words: &[OsString]) -> Result<()> {
    let (read, write) = std::io::pipe()?;
    let write = OwnedFd::from(write);
    let fd = write.as_raw_fd();
    let exe = std::env::current_exe().context("finding this program")?;
    let output = File::options().create(true).append(true).open(log);
    let output = output.with_context(|| format!("opening {}", log.display()))?;
    let mut command = Command::new(exe);
    // Directly after the subcommand: words at the end may follow `--`.
    let mut words = words.iter();
    command.arg0("nigh").args(words.next()).arg(format!("--ready-fd={fd}")).args(words);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
    // SAFETY: fcntl is safe between fork and exec, and the descriptor is open there.
    unsafe {
        command.pre_exec(move || {
            let pipe = std::os::fd::BorrowedFd::borrow_raw(fd);
            rustix::io::fcntl_setfd(pipe, rustix::io::FdFlags::empty())?;
            Ok(())
        });
    }
    let mut child = command.spawn().context("starting the daemon")?;
    drop(write);
    let mut said = String::new();
    { read }.read_to_string(&mut said)?;
    if said == MOUNTED {
        return Ok(());
    }
    if let Some(note) = said.strip_prefix(MOUNTED_WITH_NOTE) {
        eprintln!("nigh: {}", note.trim_end());
        return Ok(());
    }
    let _ = child.wait();
    match said.trim_end().split_once(' ') {
        Some(("usage", message)) => Err(Usage(message.to_owned()).into()),
        Some((_, message)) => bail!("{message}"),
        None => bail!("the daemon ended before the mount stood; see {}", log.display()),
    }
}

/// The child's end of the pipe.
pub struct Ready(Option<File>);

impl Ready {
    /// `fd`: the descriptor from the parent; `None` in the foreground.
    pub fn new(fd: Option<i32>) -> Ready {
        // SAFETY: the parent left this descriptor open for this purpose and nothing else uses it.
        let pipe = fd.map(|fd| unsafe { File::from_raw_fd(fd) });
        // A server that this daemon starts must not keep the parent waiting.
        if let Some(pipe) = &pipe {
            let _ = rustix::io::fcntl_setfd(pipe, rustix::io::FdFlags::CLOEXEC);
        }
        Ready(pipe)
    }

    /// Leaves the terminal; does nothing in the foreground.
    pub fn detach(&self) -> Result<()> {
        if self.0.is_some() {
            // A process group leader cannot; such a process was started by hand, and stays.
            match rustix::process::setsid() {
                Err(rustix::io::Errno::PERM) => {}
                other => drop(other.context("leaving the terminal")?),
            }
        }
        Ok(())
    }

    /// Reports a successful mount. `note`: a one-line notice for the user.
    pub fn report_mounted(&mut self, note: Option<&str>) {
        match note {
            Some(note) if self.0.is_some() => self.send_report(&format!("{MOUNTED_WITH_NOTE}{note}\n")),
            Some(note) => eprintln!("nigh: {note}"),
            None => self.send_report(MOUNTED),
        }
    }

    pub fn report_failed(&mut self, error: &anyhow::Error) {
        let kind = if error.downcast_ref::<Usage>().is_some() { "usage" } else { "failed" };
        self.send_report(&format!("{kind} {error:#}"));
    }

    fn send_report(&mut self, text: &str) {
        if let Some(mut pipe) = self.0.take() {
            // If the parent was killed the write fails; the mount works regardless.
            let _ = pipe.write_all(text.as_bytes());
        }
    }
}
