//! Connections by the user's own ssh: its configuration, agent and keys.
//!
//! The program at the other end is a relay, `nigh serve --listen stdio`. The relay sends [`READY`] first. So the
//! client can skip what login scripts print, and it sends nothing before the relay can read it.

use crate::error::{LinkError, last_line};
use crate::link::Link;
use crate::process::Process;
use crate::socket::{Bounds, Socket};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The first bytes that the relay writes to its standard output.
pub const READY: &[u8] = b"\0nigh stdio 1\n";
/// Most bytes that login scripts may print before [`READY`].
const MOST_BYTES: usize = 64 << 10;
/// Time limit for a login without a prompt.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a login in which a user may type a password.
const INTERACTIVE_LOGIN_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// What [`START`] prints when it finds no nigh.
const NOT_FOUND: &str = "no nigh here";
/// Finds nigh in the usual places, in this order, and starts the relay.
const START: &str = "sh -c 'for nigh in nigh \"$HOME/.cargo/bin/nigh\" \"$HOME/.cache/nigh/bin/nigh\"; do \
                     if command -v \"$nigh\" >/dev/null 2>&1; then exec \"$nigh\" serve --listen stdio; fi; done; echo no nigh here >&2; exit 127'";
const START_INSTALLED: &str = "sh -c 'exec \"$HOME/.cache/nigh/bin/nigh\" serve --listen stdio'";
const INSTALL: &str = "sh -c 'umask 077 && mkdir -p \"$HOME/.cache/nigh/bin\" && cd \"$HOME/.cache/nigh/bin\" && \
                       cat > nigh.new && chmod 700 nigh.new && mv nigh.new nigh && ./nigh --version'";

/// A machine reached by ssh.
#[derive(Clone, Debug)]
pub struct Target {
    /// `[user@]host`, or a host alias of the user's ssh configuration.
    pub destination: String,
    /// Command run instead of `ssh`, with ssh's arguments appended; a shell splits it.
    pub command: Option<String>,
    /// Run the server that [`Target::install`] copied there.
    pub installed: bool,
}

/// Whether ssh may prompt the user at the terminal for a password.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prompting {
    Allowed,
    Never,
}

impl Target {
    /// Logs in and starts the relay. With [`Prompting::Allowed`] ssh receives SIGTERM when the calling thread ends.
    pub fn connect(&self, asking: Prompting) -> Result<Link, LinkError> {
        let start = if self.installed { START_INSTALLED } else { START };
        let mut command = self.ssh(asking, start);
        let failed = |error: std::io::Error| self.failed(error.to_string());
        let (ours, process) = Process::start(&mut command).map_err(failed)?;
        let socket = Socket::new(ours);
        let patience = if asking == Prompting::Allowed { INTERACTIVE_LOGIN_TIMEOUT } else { LOGIN_TIMEOUT };
        let bounds = Bounds { until: Instant::now() + patience, bytes: MOST_BYTES };
        let ready = socket.bound(Some(bounds)).and_then(|()| await_ready(&socket));
        match ready.and_then(|()| socket.bound(None)) {
            Ok(()) => Ok(Link::process(socket, process)),
            Err(error) => {
                socket.shutdown();
                Err(self.explain(&process, &error))
            }
        }
    }

    /// Copies `program` to `~/.cache/nigh/bin/nigh` on the machine, if system and architecture are equal.
    pub fn install(&self, program: &Path) -> Result<(), LinkError> {
        let ours = rustix::system::uname();
        let ours = format!("{} {}", ours.sysname().to_string_lossy(), ours.machine().to_string_lossy());
        let theirs = self.run_remote("uname -sm", Stdio::null())?;
        if theirs != ours {
            let problem =
                format!("it is {theirs}, and this program is for {ours}: install nigh there by hand");
            return Err(self.failed(problem));
        }
        let file = File::open(program)
            .map_err(|error| LinkError::file(program, format!("cannot read this program: {error}")))?;
        self.run_remote(INSTALL, file.into()).map(drop).map_err(|error| match error {
            LinkError::Ssh { host, problem } => LinkError::Ssh {
                host,
                problem: format!("this program does not run there ({problem}): build nigh there"),
            },
            other => other,
        })
    }

    /// Runs a command on the machine and returns the last line of its output.
    fn run_remote(&self, what: &str, input: Stdio) -> Result<String, LinkError> {
        let mut command = self.ssh(Prompting::Allowed, what);
        let output = command.stdin(input).output().map_err(|error| self.failed(error.to_string()))?;
        let last = |bytes: &[u8]| last_line(&String::from_utf8_lossy(bytes)).unwrap_or_default();
        if output.status.success() {
            return Ok(last(&output.stdout));
        }
        let said = last(&output.stderr);
        Err(self.failed(if said.is_empty() { describe_exit(output.status) } else { said }))
    }

    fn ssh(&self, asking: Prompting, remote: &str) -> Command {
        let mut command = match &self.command {
            Some(words) => {
                let mut command = Command::new("sh");
                command.args(["-c", &format!("exec {words} \"$@\""), "sh"]);
                command
            }
            None => Command::new("ssh"),
        };
        // No terminal, no forwarding, and an exit when the peer is gone.
        command.args(["-T", "-a", "-x", "-oClearAllForwardings=yes", "-oConnectTimeout=10"]);
        command.args(["-oServerAliveInterval=5", "-oServerAliveCountMax=3"]);
        if asking == Prompting::Never {
            command.arg("-oBatchMode=yes").env("SSH_ASKPASS_REQUIRE", "never");
        }
        command.args(["--", &self.destination, remote]);
        ignore_terminal_signals(&mut command, asking);
        command
    }

    fn explain(&self, process: &Process, error: &std::io::Error) -> LinkError {
        let status = process.finish();
        // Its last output may still be on the way.
        std::thread::sleep(Duration::from_millis(50));
        let said = process.last_stderr_line();
        match status {
            Ok(_) if said.as_deref() == Some(NOT_FOUND) => {
                LinkError::NoServer { host: self.destination.clone() }
            }
            Ok(status) => {
                let slow =
                    matches!(error.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock);
                let ended =
                    || if slow { "no answer in time: try again".to_owned() } else { describe_exit(status) };
                self.failed(said.unwrap_or_else(ended))
            }
            Err(error) => self.failed(said.unwrap_or_else(|| error.to_string())),
        }
    }

    fn failed(&self, problem: String) -> LinkError {
        LinkError::Ssh { host: self.destination.clone(), problem }
    }
}

/// Makes ssh ignore signals from the terminal. ssh stays in the process group of the mounting process, as it must to
/// prompt at the terminal; so a signal that the terminal sends later, to a script that continues there, reaches ssh
/// too. ssh must exit only when its streams are closed. (ssh keeps signals ignored that it finds ignored:
/// `client_loop` in OpenSSH.) During a prompt an interrupt ends the mounting process, and the parent-death signal
/// then ends ssh.
fn ignore_terminal_signals(command: &mut Command, asking: Prompting) {
    let parent = std::process::id();
    // SAFETY: signal(2), prctl(2) and getppid(2) are safe between fork and exec.
    unsafe {
        command.pre_exec(move || {
            for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP] {
                libc::signal(signal, libc::SIG_IGN);
            }
            if asking == Prompting::Allowed {
                set_parent_process_death_signal(Some(Signal::TERM))?;
                if libc::getppid().cast_unsigned() != parent {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
            }
            Ok(())
        });
    }
}

fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("it ended with status {code} and said nothing: try it by hand"),
        (None, signal) => format!("it was ended by signal {}", signal.unwrap_or(0)),
    }
}

/// Reads up to and including [`READY`], discarding the output of login scripts.
pub(crate) fn await_ready(socket: &Socket) -> std::io::Result<()> {
    let mut printed = Vec::new();
    let mut byte = [0];
    while !printed.ends_with(READY) {
        if socket.recv(&mut byte, true)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        printed.push(byte[0]);
    }
    Ok(())
}
