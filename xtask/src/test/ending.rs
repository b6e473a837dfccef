//! Cleanup at a fatal signal: the tests' processes and mounts are ended before this process.

use std::io::{self, Read};
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use super::clean;
use crate::process;

const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// The pipe to which the handler writes the signal's number.
static PIPE: AtomicI32 = AtomicI32::new(-1);

static CAME: AtomicBool = AtomicBool::new(false);

/// A process group that ends with this process; 0: none.
static GROUP: AtomicU32 = AtomicU32::new(0);

/// Registers the process group of a child, which a signal that ends this process also ends.
pub fn end_with_us(group: u32) {
    GROUP.store(group, Ordering::SeqCst);
}

extern "C" fn on_signal(signal: libc::c_int) {
    CAME.store(true, Ordering::SeqCst);
    let byte = u8::try_from(signal).unwrap_or(0);
    // SAFETY: one byte of this function; write(2) may be called in a handler.
    unsafe { libc::write(PIPE.load(Ordering::SeqCst), (&raw const byte).cast(), 1) };
}

/// Makes fatal signals first end everything in this test directory. Child programs do not inherit that. There is one
/// such directory per process: another call changes nothing.
pub fn clean_up_at_signals(root: &Path) -> io::Result<()> {
    if PIPE.load(Ordering::SeqCst) != -1 {
        return Ok(());
    }
    let (mut reader, writer) = io::pipe()?;
    PIPE.store(writer.into_raw_fd(), Ordering::SeqCst);
    for signal in SIGNALS {
        // SAFETY: the handler calls write(2) only.
        unsafe { libc::signal(signal, on_signal as *const () as libc::sighandler_t) };
    }
    let root = root.to_owned();
    std::thread::spawn(move || {
        let mut bytes = [0];
        reader.read_exact(&mut bytes).expect("the other end stays open");
        let [byte] = bytes;
        eprintln!("xtask: ended by signal {byte}; ending what the tests started");
        match GROUP.load(Ordering::SeqCst) {
            0 => {}
            group => process::kill_group(group),
        }
        // A test that is still running may start another process meanwhile.
        for _ in 0..2 {
            clean::below(&root);
        }
        std::process::exit(128 + i32::from(byte));
    });
    Ok(())
}

/// Waits for the cleanup after a signal, which ends the process. Call this before the process ends, and before a test makes
/// anything that the cleanup would miss. Returns at once without a signal, and after ten seconds in any case.
pub fn leave_to_signal() {
    for _ in 0..100 {
        if !CAME.load(Ordering::SeqCst) {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_registration_of_cleanup_at_signals_succeeds() {
        // No process has such an id.
        let root = std::env::temp_dir().join(format!("{}{}", crate::test::world::PREFIX, u32::MAX - 2));
        clean_up_at_signals(&root).unwrap();
        clean_up_at_signals(&root).unwrap();
    }
}
