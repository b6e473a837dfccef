//! How `nigh status` asks a mount: a socket of the mount's own, from which its status can be read.

use crate::status::Source;
use rustix::fs::{Mode, OFlags};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(5);

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

/// Answers questions about one mount until dropped.
pub(crate) struct Control {
    path: PathBuf,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    pub fn start(runtime: &Path, source: Arc<Source>) -> io::Result<Control> {
        let nonce = nonce();
        let path = sockets_dir(runtime)?.join(format!("{}-{nonce:x}.sock", std::process::id()));
        let listener = UnixListener::bind(&path)?;
        let stopped = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&stopped);
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                if let Ok(stream) = stream {
                    let _ = stream.set_write_timeout(Some(LIMIT));
                    let _ = (&stream).write_all(source.status().to_string().as_bytes());
                }
            }
        });
        Ok(Control { path, stopped, thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The status of every mount of this user that answers, by mount point. `runtime` is the directory of
/// this user's sockets. Sockets of mounts that are gone are removed.
pub fn statuses(runtime: &Path) -> io::Result<Vec<Value>> {
    let mut statuses = Vec::new();
    for entry in std::fs::read_dir(sockets_dir(runtime)?)? {
        let path = entry?.path();
        match ask(&path) {
            Ok(status) => statuses.push(status),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let _ = std::fs::remove_file(&path);
            }
            Err(error) => tracing::warn!(%error, path = %path.display(), "a mount does not say how it is"),
        }
    }
    statuses.sort_by_key(|status| status["mountpoint"].as_str().unwrap_or("").to_owned());
    Ok(statuses)
}

fn ask(path: &Path) -> io::Result<Value> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    serde_json::from_str(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn nonce() -> u64 {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed)
}
