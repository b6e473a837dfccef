//! Status socket of a mount: `nigh status` reads the mount's status from it.

use crate::status::Source;
use rustix::fs::{Mode, OFlags};
use rustix::net::Shutdown;
use serde_json::Value;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(5);
/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(50);
const SUFFIX: &str = ".sock";

fn private_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    drop(rustix::fs::open(path, flags, Mode::empty())?);
    let metadata = std::fs::symlink_metadata(path)?;
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o077 != 0 {
        let what = format!("{} must be yours with mode 0700: remove it and try again", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    Ok(())
}

fn sockets_dir(runtime: &Path) -> io::Result<PathBuf> {
    let dir = runtime.join("mounts");
    private_dir(&dir)?;
    Ok(dir)
}

/// Serves the status of one mount until dropped.
pub(crate) struct Control {
    path: PathBuf,
    listener: Arc<UnixListener>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Opens the socket. Process ids repeat, not only between containers that share a directory, so the name has a
    /// random part; it need not be secret.
    pub fn start(runtime: &Path, source: Arc<Source>) -> io::Result<Control> {
        let dir = sockets_dir(runtime)?;
        let random = RandomState::new().hash_one(std::process::id());
        let name = format!("{}-{random:x}-{:x}", std::process::id(), number());
        let path = dir.join(format!("{name}{SUFFIX}"));
        // A socket that is bound but does not listen yet looks dead, so it gets its final name only afterwards.
        let early = dir.join(format!(".{name}"));
        let listener = UnixListener::bind(&early)?;
        std::fs::rename(&early, &path).inspect_err(|_| drop(std::fs::remove_file(&early)))?;
        let listener = Arc::new(listener);
        let accepting = Arc::clone(&listener);
        let stopped = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&stopped);
        let thread = thread::spawn(move || {
            for stream in accepting.incoming() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else {
                    thread::sleep(PAUSE);
                    continue;
                };
                let _ = stream.set_write_timeout(Some(LIMIT));
                let _ = (&stream).write_all(source.status().to_string().as_bytes());
            }
        });
        Ok(Control { path, listener, stopped, thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        // Ends the accept, even if the path was removed.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Status of every mount of this user that answers within 5 s, by mount point. `runtime` is the directory of this
/// user's sockets. Removes sockets of dead mounts.
pub fn statuses(runtime: &Path) -> io::Result<Vec<Value>> {
    let mut statuses: Vec<Value> = ask_all(runtime)?.into_iter().collect();
    statuses.sort_by_key(|status| status["mountpoint"].as_str().unwrap_or("").to_owned());
    Ok(statuses)
}

/// Status of the mount at this absolute path, without waiting for slower mounts. The device identifies it: the mount
/// may have been moved, and its path need not be UTF-8.
pub fn status_at(runtime: &Path, mountpoint: &Path) -> io::Result<Option<Value>> {
    let device = crate::status::device_at(mountpoint).map(|(major, minor)| format!("{major}:{minor}"));
    let is_it = |status: &Value| match (status["device"].as_str(), &device) {
        (Some(one), Some(wanted)) => one == wanted,
        _ => status["mountpoint"].as_str().map(Path::new) == Some(mountpoint),
    };
    Ok(ask_all(runtime)?.into_iter().find(is_it))
}

/// Queries all mounts at once, because one may be stopped.
fn ask_all(runtime: &Path) -> io::Result<Receiver<Value>> {
    let (told, statuses) = channel();
    for entry in std::fs::read_dir(sockets_dir(runtime)?)? {
        let path = entry?.path();
        if path.extension().is_none_or(|suffix| suffix != &SUFFIX[1..]) {
            continue;
        }
        let told = told.clone();
        thread::Builder::new().spawn(move || match ask(&path) {
            Ok(status) => drop(told.send(status)),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let _ = std::fs::remove_file(&path);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, path = %path.display(), "a mount does not say how it is"),
        })?;
    }
    Ok(statuses)
}

fn ask(path: &Path) -> io::Result<Value> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    serde_json::from_str(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Distinguishes mounts of one process.
fn number() -> u64 {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn status_of_one_mount_does_not_wait_for_a_stopped_mount() {
        let runtime = tempfile::tempdir().unwrap();
        let dir = sockets_dir(runtime.path()).unwrap();
        let _stopped = UnixListener::bind(dir.join("1-stopped.sock")).unwrap();
        let answers = UnixListener::bind(dir.join("2-answers.sock")).unwrap();
        let answering = thread::spawn(move || {
            let (mut stream, _) = answers.accept().unwrap();
            stream.write_all(br#"{"mountpoint":"/mnt"}"#).unwrap();
        });
        let since = Instant::now();
        let status = status_at(runtime.path(), Path::new("/mnt")).unwrap();
        assert_eq!(status.unwrap()["mountpoint"], "/mnt");
        assert!(since.elapsed() < LIMIT);
        answering.join().unwrap();
    }
}
