//! The server under test: a process of its own, and its use of resources.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process;
use crate::wait;

/// Serves one directory on a unix socket; ended when dropped.
pub struct Server {
    child: Child,
    pub socket: PathBuf,
    log: PathBuf,
}

/// A process's use of resources at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResourceUsage {
    /// Resident memory (VmRSS).
    pub bytes: u64,
    pub threads: u64,
    /// CPU time of all its threads, in user and kernel mode.
    pub cpu: Duration,
}

impl Server {
    /// Starts a server; `dir` is empty and stays the caller's.
    pub fn start(nigh: &Path, dir: &Path) -> Result<Server> {
        let (export, socket, log) = (dir.join("export"), dir.join("crowd.sock"), dir.join("log"));
        fs::create_dir_all(&export)?;
        let mut command = Command::new(nigh);
        command.arg("serve").arg("--export").arg(format!("crowd={}", export.display()));
        command.arg("--listen").arg(format!("unix://{}", socket.display()));
        command.env("NIGH_RUNTIME_DIR", dir.join("run")).env("NIGH_STATE_DIR", dir.join("state"));
        let said = fs::File::create(&log)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        let child = command.spawn().with_context(|| nigh.display().to_string())?;
        let mut server = Server { child, socket, log };
        let ready =
            wait::ready(&mut server.child, Duration::from_secs(10), || process::listens(&server.socket));
        ready.with_context(|| format!("the server: {}", server.said()))?;
        Ok(server)
    }

    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn usage(&self) -> Result<ResourceUsage> {
        let of = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", self.child.id()));
        let (status, stat) = (of("status")?, of("stat")?);
        let number = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).context("a line of status")?;
            let digits = line.split_whitespace().next().context("a number")?;
            digits.parse::<u64>().context("a number of status")
        };
        // After the name, which may contain spaces: utime and stime are fields 14 and 15 (proc_pid_stat(5)).
        let fields = stat.rsplit(')').next().context("stat")?.split_whitespace();
        let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        // SAFETY: it looks up a constant.
        let second = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) })?.max(1);
        Ok(ResourceUsage {
            bytes: number("VmRSS:")? << 10,
            threads: number("Threads:")?,
            cpu: Duration::from_millis(ticks * 1_000 / second),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        process::signal(self.child.id(), libc::SIGTERM);
        if !matches!(process::wait(&mut self.child, Duration::from_secs(15)), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
