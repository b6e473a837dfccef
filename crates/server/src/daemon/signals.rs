//! Termination signals.

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Exit code of a process that was ended by a second signal.
const CUT_SHORT: i32 = 1;

/// Signal descriptor. The first SIGTERM or SIGINT makes it readable, whichever thread receives the signal. A second
/// one ends the process at once, whatever its threads are doing.
pub(super) struct Signals {
    stream: UnixStream,
    registered: Vec<SigId>,
}

impl Signals {
    pub fn register() -> io::Result<Signals> {
        let (stream, writer) = UnixStream::pair()?;
        let told = Arc::new(AtomicBool::new(false));
        let mut signals = Signals { stream, registered: Vec::new() };
        for signal in [SIGTERM, SIGINT] {
            // Registered in this order, so that the first signal does not see the flag that it sets.
            let again = flag::register_conditional_shutdown(signal, CUT_SHORT, Arc::clone(&told))?;
            signals.registered.push(again);
            signals.registered.push(flag::register(signal, Arc::clone(&told))?);
            signals.registered.push(low_level::pipe::register(signal, writer.try_clone()?)?);
        }
        Ok(signals)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
