//! SIGINT, SIGTERM and SIGHUP unmount: a mount without its daemon returns only errors.

use anyhow::Result;
use nigh_client::Mount;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Exit code of a process that a second signal ended.
const SECOND_SIGNAL_EXIT_CODE: i32 = 1;

/// Signals that are held back while a mount is made. A second one ends the process at once. A signal that the process was
/// started to ignore, as by nohup(1), stays ignored.
pub struct HeldSignals(UnixStream);

impl HeldSignals {
    /// Call it before mount(2): without a handler a signal would end the process and leave a mount without a daemon.
    pub fn hold() -> Result<HeldSignals> {
        let (received, writer) = UnixStream::pair()?;
        let again = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if is_ignored(signal) {
                continue;
            }
            // In this order: the first signal must check the flag before it sets it.
            flag::register_conditional_shutdown(signal, SECOND_SIGNAL_EXIT_CODE, Arc::clone(&again))?;
            flag::register(signal, Arc::clone(&again))?;
            low_level::pipe::register(signal, writer.try_clone()?)?;
        }
        Ok(HeldSignals(received))
    }

    /// Makes the first signal unmount `mount`, also one that was held back.
    pub fn unmount(self, mount: &Mount) {
        let stopper = mount.stopper();
        let HeldSignals(mut received) = self;
        std::thread::spawn(move || {
            if received.read_exact(&mut [0]).is_err() {
                return;
            }
            tracing::info!("ending: got a signal, unmounting");
            match stopper.map_or(Err(ErrorKind::Unsupported.into()), |stopper| stopper.stop()) {
                Ok(()) => {}
                Err(error) => {
                    tracing::debug!(%error, "the connection ends with this process");
                    std::process::exit(0);
                }
            }
        });
    }
}

fn is_ignored(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: nothing is set, and what is read was written if the call succeeds.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}
