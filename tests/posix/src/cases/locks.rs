//! flock(2) and fcntl(2) locks between processes of one mount.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::room::{Room, refuses};
use crate::sys;

pub const CASES: &[super::Case] = &[
    super::Case { name: "flock_exclusive", run: of_flock::exclusive },
    super::Case { name: "flock_shared", run: of_flock::shared },
    super::Case { name: "flock_convert", run: of_flock::convert },
    super::Case { name: "flock_blocks_until_released", run: of_flock::blocks_until_released },
    super::Case { name: "flock_freed_at_exit", run: of_flock::freed_at_exit },
    super::Case { name: "flock_interruptible", run: of_flock::interruptible },
    super::Case { name: "fcntl_exclusive", run: of_fcntl::exclusive },
    super::Case { name: "fcntl_ranges", run: of_fcntl::ranges },
    super::Case { name: "fcntl_read_locks", run: of_fcntl::read_locks },
    super::Case { name: "fcntl_getlk", run: of_fcntl::getlk },
    super::Case { name: "fcntl_blocks_until_released", run: of_fcntl::blocks_until_released },
    super::Case { name: "fcntl_freed_at_close", run: of_fcntl::freed_at_close },
    super::Case { name: "fcntl_interruptible", run: of_fcntl::interruptible },
    super::Case { name: "fcntl_open_file_description", run: of_fcntl::open_file_description },
];

const LONG: Duration = Duration::from_secs(20);

fn opened(path: &Path) -> Result<fs::File> {
    Ok(OpenOptions::new().read(true).write(true).open(path)?)
}

/// Returns whether another process can take the lock without waiting.
fn other_can(path: &Path, take: impl Fn(&fs::File) -> std::io::Result<()>) -> Result<bool> {
    let path = path.to_owned();
    let pid = sys::fork(move || opened(&path).is_ok_and(|file| take(&file).is_ok()))?;
    Ok(sys::joined(pid, LONG))
}

fn try_flock(operation: i32) -> impl Fn(&fs::File) -> std::io::Result<()> {
    move |file| sys::flock(file, operation | libc::LOCK_NB)
}

fn try_lock(kind: i32, start: i64, len: i64) -> impl Fn(&fs::File) -> std::io::Result<()> {
    move |file| sys::lock(file, libc::F_SETLK, kind, start, len).map(drop)
}

mod step {
    use super::{Duration, Instant, LONG, Path, fs};

    /// Signals progress to the other process by a file.
    pub fn reach(path: &Path) -> bool {
        fs::write(path, b"").is_ok()
    }

    pub fn wait(path: &Path) -> bool {
        let end = Instant::now() + LONG;
        while Instant::now() < end {
            if path.exists() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }
}

mod of_flock {
    use super::*;

    pub fn exclusive(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let file = opened(&path)?;
        sys::flock(&file, libc::LOCK_EX)?;
        ensure!(!other_can(&path, try_flock(libc::LOCK_EX))?, "two exclusive locks");
        ensure!(!other_can(&path, try_flock(libc::LOCK_SH))?, "shared beside exclusive");
        let second = opened(&path)?;
        refuses(sys::flock(&second, libc::LOCK_EX | libc::LOCK_NB), libc::EWOULDBLOCK)?;
        sys::flock(&file, libc::LOCK_UN)?;
        ensure!(other_can(&path, try_flock(libc::LOCK_EX))?, "not released");
        Ok(())
    }

    pub fn shared(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let file = opened(&path)?;
        sys::flock(&file, libc::LOCK_SH)?;
        ensure!(other_can(&path, try_flock(libc::LOCK_SH))?);
        ensure!(!other_can(&path, try_flock(libc::LOCK_EX))?);
        Ok(())
    }

    pub fn convert(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let file = opened(&path)?;
        sys::flock(&file, libc::LOCK_EX)?;
        sys::flock(&file, libc::LOCK_SH)?;
        ensure!(other_can(&path, try_flock(libc::LOCK_SH))?, "a converted lock is still exclusive");
        sys::flock(&file, libc::LOCK_EX)?;
        ensure!(!other_can(&path, try_flock(libc::LOCK_SH))?);
        Ok(())
    }

    pub fn blocks_until_released(room: &Room) -> Result<()> {
        super::blocks(room, |file| sys::flock(file, libc::LOCK_EX))
    }

    pub fn freed_at_exit(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let at = path.clone();
        let pid = sys::fork(move || opened(&at).is_ok_and(|file| sys::flock(&file, libc::LOCK_EX).is_ok()))?;
        ensure!(sys::joined(pid, LONG));
        let file = opened(&path)?;
        sys::flock(&file, libc::LOCK_EX | libc::LOCK_NB)?;
        Ok(())
    }

    pub fn interruptible(room: &Room) -> Result<()> {
        super::interrupted(room, |file| sys::flock(file, libc::LOCK_EX))
    }
}

mod of_fcntl {
    use super::*;

    pub fn exclusive(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let file = opened(&path)?;
        sys::lock(&file, libc::F_SETLK, libc::F_WRLCK, 0, 0)?;
        ensure!(!other_can(&path, try_lock(libc::F_WRLCK, 0, 0))?);
        ensure!(!other_can(&path, try_lock(libc::F_RDLCK, 1 << 40, 1))?);
        sys::lock(&file, libc::F_SETLK, libc::F_UNLCK, 0, 0)?;
        ensure!(other_can(&path, try_lock(libc::F_WRLCK, 0, 0))?);
        Ok(())
    }

    pub fn ranges(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let file = opened(&path)?;
        sys::lock(&file, libc::F_SETLK, libc::F_WRLCK, 100, 100)?;
        ensure!(other_can(&path, try_lock(libc::F_WRLCK, 0, 100))?, "before the range");
        ensure!(other_can(&path, try_lock(libc::F_WRLCK, 200, 0))?, "behind the range");
        ensure!(!other_can(&path, try_lock(libc::F_WRLCK, 199, 1))?, "its last byte");
        sys::lock(&file, libc::F_SETLK, libc::F_UNLCK, 140, 20)?;
        ensure!(other_can(&path, try_lock(libc::F_WRLCK, 140, 20))?, "a hole in the middle");
        ensure!(!other_can(&path, try_lock(libc::F_WRLCK, 139, 1))?);
        ensure!(!other_can(&path, try_lock(libc::F_WRLCK, 160, 1))?);
        Ok(())
    }

    pub fn read_locks(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let file = opened(&path)?;
        sys::lock(&file, libc::F_SETLK, libc::F_RDLCK, 0, 10)?;
        ensure!(other_can(&path, try_lock(libc::F_RDLCK, 0, 10))?);
        ensure!(!other_can(&path, try_lock(libc::F_WRLCK, 9, 1))?);
        let reader = fs::File::open(&path)?;
        refuses(sys::lock(&reader, libc::F_SETLK, libc::F_WRLCK, 0, 1), libc::EBADF)
    }

    pub fn getlk(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let file = opened(&path)?;
        sys::lock(&file, libc::F_SETLK, libc::F_WRLCK, 10, 10)?;
        let (at, owner) = (path.clone(), i32::try_from(std::process::id())?);
        let pid = sys::fork(move || {
            let Ok(file) = opened(&at) else { return false };
            let inside = sys::lock(&file, libc::F_GETLK, libc::F_WRLCK, 0, 100);
            let outside = sys::lock(&file, libc::F_GETLK, libc::F_WRLCK, 50, 10);
            inside.is_ok_and(|(kind, pid)| kind == libc::F_WRLCK && pid == owner)
                && outside.is_ok_and(|(kind, _)| kind == libc::F_UNLCK)
        })?;
        ensure!(sys::joined(pid, LONG), "F_GETLK does not name the lock's kind and owner");
        Ok(())
    }

    pub fn blocks_until_released(room: &Room) -> Result<()> {
        super::blocks(room, |file| sys::lock(file, libc::F_SETLKW, libc::F_WRLCK, 0, 0).map(drop))
    }

    pub fn freed_at_close(room: &Room) -> Result<()> {
        let path = room.file("f", b"")?;
        let file = opened(&path)?;
        sys::lock(&file, libc::F_SETLK, libc::F_WRLCK, 0, 0)?;
        drop(opened(&path)?);
        ensure!(
            other_can(&path, try_lock(libc::F_WRLCK, 0, 0))?,
            "closing any descriptor frees a process's locks"
        );
        Ok(())
    }

    pub fn interruptible(room: &Room) -> Result<()> {
        super::interrupted(room, |file| sys::lock(file, libc::F_SETLKW, libc::F_WRLCK, 0, 0).map(drop))
    }

    pub fn open_file_description(room: &Room) -> Result<()> {
        const OFD_SETLK: i32 = 37;
        let path = room.file("f", b"")?;
        let (first, second) = (opened(&path)?, opened(&path)?);
        sys::lock(&first, OFD_SETLK, libc::F_WRLCK, 0, 0)?;
        refuses(sys::lock(&second, OFD_SETLK, libc::F_WRLCK, 0, 0), libc::EAGAIN)?;
        drop(first);
        sys::lock(&second, OFD_SETLK, libc::F_WRLCK, 0, 0)?;
        Ok(())
    }
}

/// Another process holds the lock for a while: this process waits for it, and then gets it.
fn blocks(room: &Room, take: impl Fn(&fs::File) -> std::io::Result<()>) -> Result<()> {
    let path = room.file("f", b"")?;
    let (held, at) = (room.at("held"), path.clone());
    let (tell, take) = (held.clone(), &take);
    let pid = sys::fork(move || {
        let Ok(file) = opened(&at) else { return false };
        let taken = take(&file).is_ok() && step::reach(&tell);
        std::thread::sleep(Duration::from_millis(400));
        taken
    })?;
    ensure!(step::wait(&held), "the other process did not get the lock");
    let file = opened(&path)?;
    let start = Instant::now();
    take(&file)?;
    let waited = start.elapsed();
    ensure!(sys::joined(pid, LONG));
    ensure!(waited > Duration::from_millis(150), "did not wait: {waited:?}");
    ensure!(waited < Duration::from_secs(5), "waited {waited:?}");
    Ok(())
}

/// A signal with a handler ends the wait for a lock with EINTR.
fn interrupted(room: &Room, take: impl Fn(&fs::File) -> std::io::Result<()>) -> Result<()> {
    let path = room.file("f", b"")?;
    let (held, done, at) = (room.at("held"), room.at("done"), path.clone());
    let (tell, until, take) = (held.clone(), done.clone(), &take);
    let pid = sys::fork(move || {
        let Ok(file) = opened(&at) else { return false };
        take(&file).is_ok() && step::reach(&tell) && step::wait(&until)
    })?;
    ensure!(step::wait(&held), "the other process did not get the lock");
    let file = opened(&path)?;
    let start = Instant::now();
    sys::alarm_after(Duration::from_millis(200))?;
    let refused = refuses(take(&file), libc::EINTR);
    let waited = start.elapsed();
    fs::write(&done, b"")?;
    ensure!(sys::joined(pid, LONG));
    refused?;
    ensure!(waited < Duration::from_secs(2), "waited {waited:?} after a signal");
    Ok(())
}
