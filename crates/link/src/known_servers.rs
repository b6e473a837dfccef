//! Server keys that this client has accepted (trust on first use). The file `known_servers` in the state directory
//! has a line `HOST:PORT sha256:HASH` for each server.

use crate::error::LinkError;
use crate::identity::shown;
use crate::token::unhex;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Largest part of the file that is read; a longer file is not a plausible list of servers.
const MOST_BYTES: u64 = 16 << 20;

pub(crate) struct KnownServers {
    path: PathBuf,
}

/// The entry of one server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct KnownServer {
    pub fingerprint: [u8; 32],
    /// Counted from 1.
    pub line: u64,
}

impl KnownServers {
    pub fn new(path: &Path) -> KnownServers {
        KnownServers { path: path.to_owned() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Looks up `server`, written as `HOST:PORT` as in the file.
    pub fn find(&self, server: &str) -> Result<Option<KnownServer>, LinkError> {
        match File::open(&self.path) {
            Ok(file) => self.find_in(&file, server),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.problem(format!("cannot read the known servers: {error}"))),
        }
    }

    /// Records the key of a server that has no entry yet.
    ///
    /// # Errors
    /// Fails also if another process has meanwhile recorded a different key for the server.
    pub fn add(&self, server: &str, fingerprint: [u8; 32]) -> Result<(), LinkError> {
        let not =
            |error: std::io::Error| self.problem(format!("cannot keep the server's key there: {error}"));
        if let Some(parent) = self.path.parent() {
            std::fs::create_dir_all(parent).map_err(not)?;
        }
        let mut file =
            File::options().read(true).append(true).create(true).mode(0o600).open(&self.path).map_err(not)?;
        flock(&file, FlockOperation::LockExclusive).map_err(|errno| not(errno.into()))?;
        match self.find_in(&file, server)? {
            Some(known) if known.fingerprint == fingerprint => return Ok(()),
            Some(known) => {
                return Err(LinkError::KeyChanged {
                    at: server.to_owned(),
                    found: shown(&fingerprint),
                    file: self.path.clone(),
                    line: known.line,
                });
            }
            None => {}
        }
        file.seek(std::io::SeekFrom::End(-1)).ok();
        let mut last = [b'\n'];
        let whole = file.read(&mut last).is_ok() && last == [b'\n'];
        let line = format!("{}{server} {}\n", if whole { "" } else { "\n" }, shown(&fingerprint));
        file.write_all(line.as_bytes()).and_then(|()| file.sync_all()).map_err(not)
    }

    fn find_in(&self, file: &File, server: &str) -> Result<Option<KnownServer>, LinkError> {
        let mut text = String::new();
        file.take(MOST_BYTES)
            .read_to_string(&mut text)
            .map_err(|error| self.problem(format!("cannot read the known servers: {error}")))?;
        for (line, words) in
            (1_u64..).zip(text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()))
        {
            if words.first() != Some(&server) {
                continue;
            }
            let hash = words.get(1).and_then(|word| word.strip_prefix("sha256:")).and_then(unhex);
            return match hash {
                Some(fingerprint) => Ok(Some(KnownServer { fingerprint, line })),
                None => Err(self.problem(format!("line {line} is damaged: remove it"))),
            };
        }
        Ok(None)
    }

    fn problem(&self, problem: String) -> LinkError {
        LinkError::file(&self.path, problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_kept_and_changes_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let known = KnownServers::new(&dir.path().join("state/known_servers"));
        assert_eq!(known.find("a:1").unwrap(), None);
        known.add("a:1", [1; 32]).unwrap();
        known.add("a:1", [1; 32]).unwrap();
        known.add("b:1", [2; 32]).unwrap();
        assert_eq!(known.find("a:1").unwrap(), Some(KnownServer { fingerprint: [1; 32], line: 1 }));
        assert_eq!(known.find("b:1").unwrap(), Some(KnownServer { fingerprint: [2; 32], line: 2 }));
        let error = known.add("b:1", [3; 32]).unwrap_err().to_string();
        assert!(error.contains("line 2 of") && error.contains("known_servers"), "{error}");
        assert_eq!(std::fs::read_to_string(known.path()).unwrap().lines().count(), 2);
    }

    #[test]
    fn known_servers_without_final_newline_is_appended_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("known");
        std::fs::write(&path, format!("# ours\na:1 {}", shown(&[1; 32]))).unwrap();
        let known = KnownServers::new(&path);
        known.add("b:1", [2; 32]).unwrap();
        assert_eq!(known.find("a:1").unwrap().unwrap().line, 2);
        assert_eq!(known.find("b:1").unwrap().unwrap().line, 3);
    }

    #[test]
    fn damaged_line_is_reported_only_for_its_server() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("known");
        std::fs::write(&path, "a:1 sha256:12\n\u{1}\n").unwrap();
        let known = KnownServers::new(&path);
        assert!(known.find("a:1").unwrap_err().to_string().contains("line 1"));
        assert_eq!(known.find("b:1").unwrap(), None);
    }
}
