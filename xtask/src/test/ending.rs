//! Who is ended by a signal leaves nothing behind: what the tests started is ended first.

use std::io::{self, Read};
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use super::clean;
use crate::process;

const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Where the handler writes which signal came.
static PIPE: AtomicI32 = AtomicI32::new(-1);

static CAME: AtomicBool = AtomicBool::new(false);

/// A process group that ends with this process; 0: none.
static GROUP: AtomicU32 = AtomicU32::new(0);

/// The process group of a child, which a signal that ends this process ends too.
pub fn end_with_us(group: u32) {
    GROUP.store(group, Ordering::SeqCst);
}

extern "C" fn on_signal(signal: libc::c_int) {
    CAME.store(true, Ordering::SeqCst);
    let byte = u8::try_from(signal).unwrap_or(0);
    // SAFETY: one byte of ours; write(2) may be called in a handler.
    unsafe { libc::write(PIPE.load(Ordering::SeqCst), (&raw const byte).cast(), 1) };
}

/// From now on a signal that ends us first ends all that belongs to this directory of tests. Programs that we start
/// do not inherit that. There is one such directory in a process: another call changes nothing.
pub fn clean_up_at_signals(root: &Path) -> io::Result<()> {
    if PIPE.load(Ordering::SeqCst) != -1 {
        return Ok(());
    }
    let (mut reader, writer) = io::pipe()?;
    PIPE.store(writer.into_raw_fd(), Ordering::SeqCst);
    for signal in SIGNALS {
        // SAFETY: the handler does nothing but write(2).
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
        // A test that goes on meanwhile may start something more.
        for _ in 0..2 {
            clean::below(&root);
        }
        std::process::exit(128 + i32::from(byte));
    });
    Ok(())
}

/// To be called before the process ends: where a signal came, that ends it when everything else has ended. For a
/// while, should it not.
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
    fn tests_that_could_not_begin_may_try_again() {
        // No process has such a number.
        let root = std::env::temp_dir().join(format!("{}{}", crate::test::world::PREFIX, u32::MAX - 2));
        clean_up_at_signals(&root).unwrap();
        clean_up_at_signals(&root).unwrap();
    }
}
