//! Child processes with a time limit.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::wait;

/// Returns the process at the other end of a unix socket (`SO_PEERCRED` in unix(7)).
pub fn peer_of(stream: &UnixStream) -> Option<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = libc::socklen_t::try_from(size_of_val(&peer)).ok()?;
    // SAFETY: the kernel writes at most `size` bytes into `peer`.
    let got = unsafe {
        let out = (&raw mut peer).cast();
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, out, &raw mut size)
    };
    u32::try_from(peer.pid).ok().filter(|pid| got == 0 && *pid > 1)
}

/// Whether a process listens on a unix socket. The file is there before: bind(2) makes it, and connections are refused
/// until listen(2). `/proc/net/unix` gives `__SO_ACCEPTCON` as flag 10000 (`unix_seq_show` in the kernel).
pub fn listens(socket: &Path) -> anyhow::Result<bool> {
    let sockets = std::fs::read_to_string("/proc/net/unix")?;
    let at = |line: &&str| line.split_whitespace().nth(7).is_some_and(|path| Path::new(path) == socket);
    Ok(sockets.lines().filter(at).any(|line| line.split_whitespace().nth(3) == Some("00010000")))
}

/// How a command ended, with its output (standard output and error together; the end of it, if long).
pub struct CommandResult {
    pub how: ExitKind,
    pub said: String,
    pub took: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExitKind {
    Exited(ExitStatus),
    TimedOut,
}

impl CommandResult {
    #[must_use]
    pub fn ok(&self) -> bool {
        matches!(self.how, ExitKind::Exited(status) if status.success())
    }

    #[must_use]
    pub fn code(&self) -> Option<i32> {
        match self.how {
            ExitKind::Exited(status) => status.code(),
            ExitKind::TimedOut => None,
        }
    }

    /// Returns the JSON of the last line.
    pub fn json(&self) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::from_str(self.said.lines().last().unwrap_or_default())?)
    }

    /// Returns the last lines, for a report.
    #[must_use]
    pub fn tail(&self, lines: usize) -> String {
        let all: Vec<&str> = self.said.lines().collect();
        let mut out = all[all.len().saturating_sub(lines)..].join("\n");
        if self.how == ExitKind::TimedOut {
            out.push_str(&format!("\n(given up after {:.0?})", self.took));
        }
        out
    }
}

/// Runs a command to its end or its limit, in a process group of its own, without standard input, with its output in
/// `log`. A process that does not die of SIGKILL is left behind after five seconds: the caller aborts the mount on
/// which it hangs.
pub fn run(mut command: Command, limit: Duration, log: &Path) -> io::Result<CommandResult> {
    let file = File::create(log)?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
    let start = Instant::now();
    let mut child = command.spawn()?;
    let how = match wait(&mut child, limit)? {
        Some(status) => ExitKind::Exited(status),
        None => {
            kill_group(child.id());
            wait(&mut child, Duration::from_secs(5))?;
            ExitKind::TimedOut
        }
    };
    Ok(CommandResult { how, said: end_of(log)?, took: start.elapsed() })
}

/// Waits for a process; `None`: it still runs at the limit.
pub fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    wait::until(limit, || child.try_wait())
}

/// Waits for a process that has a group of its own and is to end; kills the group at the limit.
pub fn end(child: &mut Child, limit: Duration) {
    if !matches!(wait(child, limit), Ok(Some(_))) {
        kill_group(child.id());
        let _ = wait(child, Duration::from_secs(5));
    }
}

/// A stopped process, continued when dropped: otherwise its mount could not be taken down.
pub struct Stopped(u32);

impl Stopped {
    #[must_use]
    pub fn new(pid: u32) -> Stopped {
        signal(pid, libc::SIGSTOP);
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, libc::SIGCONT);
    }
}

pub fn kill_group(process: u32) {
    if let Ok(pid) = i32::try_from(process) {
        unsafe { libc::kill(-pid, libc::SIGKILL) };
    }
}

pub fn signal(process: u32, signal: i32) {
    if let Ok(pid) = i32::try_from(process) {
        unsafe { libc::kill(pid, signal) };
    }
}

/// Returns the last MiB of a log, as text.
fn end_of(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(1 << 20)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the last lines of a log, in one.
#[must_use]
pub fn last_lines(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(8)..].join(" / ")
}

/// Returns a line of /proc/PID/status such as `VmRSS:`, in KiB.
pub fn memory_kib(process: u32, line: &str) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let found = status.lines().find_map(|one| one.strip_prefix(line));
    let digits = found.and_then(|rest| rest.split_whitespace().next());
    Ok(digits.with_context(|| format!("no {line} of {process}"))?.parse()?)
}

/// Finds a program in `PATH` and the system's directories.
#[must_use]
pub fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    path.split(':').chain(system.split(':')).map(|dir| Path::new(dir).join(program)).find(|p| p.is_file())
}

/// Returns the standard output of a command that must succeed.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let out = command.stdin(Stdio::null()).stderr(Stdio::piped()).output()?;
    anyhow::ensure!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr).trim());
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

    use super::*;

    #[test]
    fn bound_socket_listens_after_listen_alone() {
        let path = std::env::temp_dir().join(format!("nigh-listens-{}.sock", std::process::id()));
        assert!(!listens(&path).unwrap());
        let own = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&own, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(path.exists() && !listens(&path).unwrap());
        listen(&own, 1).unwrap();
        assert!(listens(&path).unwrap());
        drop(UnixListener::from(own));
        assert!(path.exists() && !listens(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
    }
}
