//! Watchdog that aborts the FUSE connection if the daemon died while a thread of it is blocked in the kernel.
//!
//! A thread that sends a notification may wait for a directory's lock, held by a program that waits for a reply of
//! the daemon. If the daemon is killed then, this thread stays blocked and keeps `/dev/fuse` open. So the kernel does
//! not abort the connection, and the program becomes unkillable. A child process without `/dev/fuse` aborts the
//! connection instead.
//!
//! The death of the daemon's thread that started the child wakes it (`PR_SET_PDEATHSIG`). pidfd_open(2) and pipes
//! signal the end of the whole process, which does not come while one of its threads is blocked.

use crate::events::Program;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Polling interval without a signal: a daemon that dumps core first waits for its blocked thread.
const LOOK: Duration = Duration::from_secs(5);
/// Polling interval after a signal.
const LOOK_SOON: Duration = Duration::from_millis(10);
const SOON: Duration = Duration::from_secs(1);

/// The watchdog of one mount; dropping it ends the child.
pub(crate) struct Watchdog(Child);

impl Watchdog {
    /// Call it on a thread that lives as long as the daemon. `program`: with the daemon's process id behind its
    /// arguments it must call [`watch`].
    pub fn start(program: &Program, connection: u32) -> io::Result<Watchdog> {
        let abort = nigh_fuse::mount::open_abort(connection)?;
        let mut command = std::process::Command::new(&program.path);
        command.arg0("nigh").args(&program.arguments).arg(std::process::id().to_string()).current_dir("/");
        command.stdin(Stdio::null()).stdout(abort).stderr(Stdio::null());
        // Terminal signals for the mount must not reach the child.
        command.process_group(0);
        Ok(Watchdog(command.spawn()?))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The child: waits until its parent, the process `daemon`, has died. Then it writes to standard output, which is the
/// file that aborts the connection. Signals that end the daemon do not end the child.
pub fn watch(daemon: u32) -> io::Result<()> {
    let signals = block_signals();
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::USR1))?;
    let mut soon: Option<Instant> = None;
    while !is_dead(daemon) {
        let now = Instant::now();
        soon = soon.filter(|until| *until > now);
        if wait(&signals, if soon.is_some() { LOOK_SOON } else { LOOK }) == Some(libc::SIGUSR1) {
            soon = Some(Instant::now() + SOON);
        }
    }
    io::stdout().write_all(b"1\n")
}

/// Blocked threads may outlive the process, which stays the child's parent until they end.
fn is_dead(daemon: u32) -> bool {
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned());
    if parent != Some(daemon) {
        return true;
    }
    match std::fs::read_to_string(format!("/proc/{daemon}/status")) {
        Ok(status) => is_dying(&status),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Whether the main thread has ended, or the process dumps core.
fn is_dying(status: &str) -> bool {
    let has = |key: &str, values: &[&str]| {
        let value = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("").trim_start();
        values.iter().any(|wanted| value.starts_with(wanted))
    };
    has("State:", &["Z", "X"]) || has("CoreDumping:", &["1"])
}

fn block_signals() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initializes the set, and the other calls take one that is.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in [libc::SIGUSR1, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE]
        {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        let set = set.assume_init();
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        set
    }
}

/// Waits for a signal, at most for `time`.
fn wait(signals: &libc::sigset_t, time: Duration) -> Option<i32> {
    let time =
        libc::timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: i64::from(time.subsec_nanos()) };
    // SAFETY: both pointers are valid for the call, and the null pointer means that no siginfo is written.
    let signal = unsafe { libc::sigtimedwait(signals, std::ptr::null_mut(), &raw const time) };
    (signal > 0).then_some(signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_counts_as_dead_when_its_first_thread_has_ended_or_it_dumps_core() {
        for (status, dead) in [
            ("Name:\tnigh\nState:\tS (sleeping)\nCoreDumping:\t0\n", false),
            ("Name:\tnigh\nState:\tT (stopped)\n", false),
            ("Name:\tnigh\nState:\tD (disk sleep)\nCoreDumping:\t0\n", false),
            ("Name:\tnigh\nState:\tZ (zombie)\n", true),
            ("Name:\tState:\tZ\nState:\tS (sleeping)\nCoreDumping:\t1\n", true),
            ("", false),
        ] {
            assert_eq!(is_dying(status), dead, "{status}");
        }
        assert!(is_dead(u32::MAX), "that is not our parent");
    }
}
