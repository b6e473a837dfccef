//! A child process whose standard input and output are the stream.

use parking_lot::Mutex;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the process may run after its streams were closed.
const GRACE: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How much of the end of its standard error is kept.
const STDERR_TAIL_BYTES: usize = 4 << 10;

/// A child process that is ended and reaped on drop.
pub(crate) struct Process {
    child: Mutex<Option<Child>>,
    stderr_tail: Arc<Mutex<Vec<u8>>>,
}

impl Process {
    /// Starts the command; also returns our end of its standard input and output.
    pub fn start(command: &mut Command) -> io::Result<(OwnedFd, Process)> {
        let (ours, theirs) = UnixStream::pair()?;
        let input = OwnedFd::from(theirs);
        let output = input.try_clone()?;
        command.stdin(input).stdout(output).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        // The command keeps copies of the child's end, which would keep the stream open.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let said = Arc::<Mutex<Vec<u8>>>::default();
        if let Some(stderr) = child.stderr.take() {
            let said = Arc::clone(&said);
            std::thread::Builder::new()
                .name("nigh-stderr".into())
                .spawn(move || read_stderr(stderr, &said))?;
        }
        Ok((ours.into(), Process { child: Mutex::new(Some(child)), stderr_tail: said }))
    }

    /// Returns the last non-empty line of its standard error.
    pub fn last_stderr_line(&self) -> Option<String> {
        let said = self.stderr_tail.lock();
        let text = String::from_utf8_lossy(&said);
        crate::error::last_line(&text)
    }

    /// Returns the exit status; kills the process unless it exits within [`GRACE`].
    pub fn finish(&self) -> io::Result<ExitStatus> {
        match self.child.lock().take() {
            Some(child) => reap(child),
            None => Err(io::Error::other("it was ended before")),
        }
    }

    /// Lets the process exit after its streams were closed, and kills it after [`GRACE`]. A separate thread waits for
    /// it.
    pub fn end(&self) {
        let Some(child) = self.child.lock().take() else { return };
        let child = Arc::new(Mutex::new(Some(child)));
        let reaped = Arc::clone(&child);
        let reaper = move || reaped.lock().take().map(reap);
        if std::thread::Builder::new().name("nigh-reap".into()).spawn(reaper).is_err()
            && let Some(mut child) = child.lock().take()
        {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

fn reap(mut child: Child) -> io::Result<ExitStatus> {
    let give_up = Instant::now() + GRACE;
    while Instant::now() < give_up {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let _ = child.kill();
    child.wait()
}

fn read_stderr(mut stderr: ChildStderr, said: &Mutex<Vec<u8>>) {
    let mut buffer = [0; 1024];
    loop {
        match stderr.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                let text = &buffer[..count];
                tracing::debug!(target: "nigh::link", said = %String::from_utf8_lossy(text).trim_end());
                let mut said = said.lock();
                said.extend_from_slice(text);
                let surplus = said.len().saturating_sub(STDERR_TAIL_BYTES);
                said.drain(..surplus);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
