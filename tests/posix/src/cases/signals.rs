//! A build's calls under 1,000 alarms a second: no call may fail with EINTR, since none does on a local disk.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::room::Room;
use crate::sys;

super::cases! { signals:: build_under_alarms, copies_under_alarms; }

static ALARMS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: libc::c_int) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

/// An alarm every millisecond until dropped; without `SA_RESTART`, so that EINTR would show.
struct Alarms;

impl Alarms {
    fn start() -> Alarms {
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = count as *const () as libc::sighandler_t;
        unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
        Alarms::every(1000);
        Alarms
    }

    fn every(tv_usec: i64) {
        let value = libc::timeval { tv_sec: 0, tv_usec };
        let timer = libc::itimerval { it_interval: value, it_value: value };
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    }
}

impl Drop for Alarms {
    fn drop(&mut self) {
        Alarms::every(0);
    }
}

/// std retries reads and writes after EINTR; these do not.
fn write_once(path: &Path, contents: &[u8]) -> io::Result<()> {
    let fd = sys::open(path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, 0o644)?;
    let mut file = fs::File::from(fd);
    ensure_all(file.write(contents)?, contents.len())?;
    if sys::close(file.into()) { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn read_once(path: &Path, length: usize) -> io::Result<Vec<u8>> {
    let mut file = fs::File::from(sys::open(path, libc::O_RDONLY, 0)?);
    let mut buffer = vec![0; length];
    ensure_all(file.read(&mut buffer)?, length)?;
    Ok(buffer)
}

fn ensure_all(got: usize, wanted: usize) -> io::Result<()> {
    if got == wanted { Ok(()) } else { Err(io::Error::other(format!("{got} of {wanted} bytes"))) }
}

fn build_under_alarms(room: &Room) -> Result<()> {
    fs::create_dir(room.at("include"))?;
    fs::create_dir(room.at("build"))?;
    let alarms = Alarms::start();
    let end = Instant::now() + Duration::from_secs(15);
    let mut steps = 0_u32;
    while Instant::now() < end && steps < 60 {
        let unit = steps;
        let source = format!("source of unit {unit}\n").repeat(50);
        write_once(&room.at(format!("{unit}.c")), source.as_bytes())?;
        for place in ["missing", "include", "also missing"] {
            let looked = fs::metadata(room.at(format!("{place}/{unit}.h")));
            ensure!(looked.is_err_and(|e| e.raw_os_error() == Some(libc::ENOENT)), "a missing header");
        }
        ensure!(read_once(&room.at(format!("{unit}.c")), source.len())? == source.as_bytes());
        write_once(&room.at("build/tmp.o"), &[b'o'; 20_000])?;
        fs::rename(room.at("build/tmp.o"), room.at(format!("build/{unit}.o")))?;
        let file = OpenOptions::new().read(true).open(room.at(format!("build/{unit}.o")))?;
        ensure!(file.read_at(&mut [0; 100], 10_000)? == 100);
        fs::hard_link(room.at(format!("build/{unit}.o")), room.at("build/latest"))?;
        fs::remove_file(room.at("build/latest"))?;
        ensure!(fs::read_dir(room.at("build"))?.filter_map(Result::ok).count() >= 1);
        steps += 1;
    }
    drop(alarms);
    ensure!(ALARMS.load(Ordering::Relaxed) > 5, "no alarms came");
    ensure!(steps > 0);
    Ok(())
}

fn copies_under_alarms(room: &Room) -> Result<()> {
    let contents = vec![b'c'; 1 << 20];
    let alarms = Alarms::start();
    for i in 0..5 {
        write_once(&room.at(format!("f{i}")), &contents)?;
        ensure!(read_once(&room.at(format!("f{i}")), contents.len())? == contents);
        fs::File::open(room.at(format!("f{i}")))?.sync_all()?;
    }
    drop(alarms);
    Ok(())
}
