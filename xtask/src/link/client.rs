//! Starts a link emulator as a process of its own, and controls it.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process;
use crate::wait;

static STARTED: AtomicU32 = AtomicU32::new(0);

/// A running emulator; ended when dropped.
pub struct Emulator {
    /// Where clients connect.
    pub socket: PathBuf,
    control: PathBuf,
    child: Child,
}

impl Emulator {
    /// Starts an emulator between a new socket below `dir` and the server's socket. `rtt` as `10ms`, `bandwidth` as
    /// `1Gbit`.
    pub fn start(xtask: &Path, dir: &Path, to: &Path, rtt: &str, bandwidth: &str) -> Result<Emulator> {
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let socket = dir.join(format!("link{number}.sock"));
        let _ = fs::remove_file(&socket);
        let ends = [&socket, to].map(|path| format!("unix:{}", path.display()));
        Emulator::between(xtask, dir, socket, ends, rtt, bandwidth, &[])
    }

    /// Starts an emulator between two local ports.
    pub fn on_ports(
        xtask: &Path,
        dir: &Path,
        ports: [u16; 2],
        rtt: &str,
        bandwidth: &str,
    ) -> Result<Emulator> {
        let ends = ports.map(|port| format!("tcp:127.0.0.1:{port}"));
        Emulator::between(xtask, dir, PathBuf::new(), ends, rtt, bandwidth, &[])
    }

    /// Starts an emulator between two local ports that counts the 9P messages to the server.
    pub fn of_ninep(xtask: &Path, dir: &Path, ports: [u16; 2], rtt: &str) -> Result<Emulator> {
        let ends = ports.map(|port| format!("tcp:127.0.0.1:{port}"));
        Emulator::between(xtask, dir, PathBuf::new(), ends, rtt, "1Gbit", &["--messages", "9p"])
    }

    fn between(
        xtask: &Path,
        dir: &Path,
        socket: PathBuf,
        [listen, to]: [String; 2],
        rtt: &str,
        bandwidth: &str,
        more: &[&str],
    ) -> Result<Emulator> {
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let control = dir.join(format!("link{number}.control"));
        let _ = fs::remove_file(&control);
        let mut command = Command::new(xtask);
        command.args(["link-emulator", "--listen", &listen, "--to", &to, "--rtt", rtt]);
        command.args(["--bandwidth", bandwidth, "--control", &format!("unix:{}", control.display())]);
        command.args(more);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        // It listens for clients before it listens on its control socket.
        wait::ready(&mut child, Duration::from_secs(5), || process::listens(&control))
            .context("the link emulator")?;
        Ok(Emulator { socket, control, child })
    }

    /// Returns the 9P messages to the server by type, if they are counted.
    pub fn messages(&self) -> Result<std::collections::BTreeMap<String, u64>> {
        Ok(serde_json::from_value(self.counts()?["messages"].take())?)
    }

    /// Returns `to_server` and `to_client`, each with `bytes` and `flights`.
    pub fn counts(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.ask("counts")?)?)
    }

    pub fn pause(&self) -> Result<()> {
        self.ask("pause").map(drop)
    }

    pub fn resume(&self) -> Result<()> {
        self.ask("resume").map(drop)
    }

    /// Ends all connections; new ones succeed at once.
    pub fn cut(&self) -> Result<()> {
        self.ask("cut").map(drop)
    }

    /// Ends all connections, and refuses new ones until `up`.
    pub fn down(&self) -> Result<()> {
        self.ask("down").map(drop)
    }

    pub fn up(&self) -> Result<()> {
        self.ask("up").map(drop)
    }

    fn ask(&self, command: &str) -> Result<String> {
        let mut stream = UnixStream::connect(&self.control)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        writeln!(stream, "{command}")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(line)
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
