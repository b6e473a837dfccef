//! The context of a case: a directory of its own, and helpers that state expectations.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};

/// A case's own directory.
pub struct Room {
    pub path: PathBuf,
    /// Another path to the same directory, for the tables `shared` and `two`.
    pub beside: PathBuf,
    /// More paths to the same directory, which the table `two` only reads.
    pub others: Vec<PathBuf>,
    /// The bound within which a change on the other path must be visible here.
    pub within: Duration,
    /// How many entries the largest directory of a case gets.
    pub entries: u32,
}

impl Room {
    #[must_use]
    pub fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// Returns the path of a name through the other mount.
    #[must_use]
    pub fn over(&self, name: impl AsRef<Path>) -> PathBuf {
        self.beside.join(name)
    }

    /// Creates a regular file with these contents.
    pub fn file(&self, name: &str, contents: &[u8]) -> io::Result<PathBuf> {
        let path = self.at(name);
        std::fs::write(&path, contents)?;
        Ok(path)
    }

    pub fn dir(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.at(name);
        std::fs::create_dir(&path)?;
        Ok(path)
    }

    /// Polls until the condition holds, within the bound for a change's visibility.
    pub fn comes(&self, what: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            if is_so() {
                return Ok(());
            }
            if start.elapsed() > self.within {
                bail!("{what}: not seen within {:?}", self.within);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The reason why a case does not apply here.
#[derive(Debug)]
pub struct Skip(pub String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// Ends a case as not applicable.
pub fn skip<T>(why: &str) -> Result<T> {
    Err(anyhow!(Skip(why.to_owned())))
}

/// A case that only root can run.
pub fn needs_root() -> Result<()> {
    if crate::sys::uid() == 0 { Ok(()) } else { skip("needs root") }
}

/// The call must fail with exactly this errno.
pub fn refuses<T>(result: io::Result<T>, errno: i32) -> Result<()> {
    match result {
        Ok(_) => bail!("succeeded, expected {}", io::Error::from_raw_os_error(errno)),
        Err(e) if e.raw_os_error() == Some(errno) => Ok(()),
        Err(e) => bail!("{e}, expected {}", io::Error::from_raw_os_error(errno)),
    }
}

/// Skips if the underlying filesystem does not support the operation.
pub fn or_skip<T>(result: io::Result<T>, what: &str) -> Result<T> {
    match result {
        Ok(value) => Ok(value),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY)) => {
            skip(&format!("no {what} here"))
        }
        Err(e) => Err(anyhow!("{what}: {e}")),
    }
}

/// As [`or_skip`], if an unsupported operation may also fail with `EINVAL` (flags, `O_DIRECT`).
pub fn or_skip_invalid<T>(result: io::Result<T>, what: &str) -> Result<T> {
    match result {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => skip(&format!("no {what} here")),
        other => or_skip(other, what),
    }
}
