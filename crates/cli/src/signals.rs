//! SIGINT, SIGTERM and SIGHUP unmount: a mount without its daemon returns only errors.

use anyhow::Result;
use nigh_client::Mount;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Exit code of a process that a second signal ended.
const SECOND_SIGNAL_EXIT_CODE: i32 = 1;

/// Makes the first of these signals unmount `mount`, and a second one end the process at once. A signal that the
/// process was started to ignore, as by nohup(1), stays ignored.
pub fn unmount_at_signals(mount: &Mount) -> Result<()> {
    let Some(stopper) = mount.stopper() else { return Ok(()) };
    let (mut told, writer) = UnixStream::pair()?;
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
    std::thread::spawn(move || {
        if told.read_exact(&mut [0]).is_err() {
            return;
        }
        tracing::info!("told to end by a signal: unmounting");
        if let Err(error) = stopper.stop() {
            tracing::debug!(%error, "the connection ends with this process");
            std::process::exit(0);
        }
    });
    Ok(())
}

fn is_ignored(signal: i32) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: nothing is set, and what is read was written if the call succeeds.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}
