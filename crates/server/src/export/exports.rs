//! Exports by name, and resolution of a client's attach request.

use crate::export::open_root;
use crate::os::error::Fault;
use crate::os::impersonate::{Impersonation, SetIdBits, can_impersonate};
use crate::os::squash::CredentialPolicy;
use nigh_link::Peer;
use nigh_types::Errno;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::thread::CapabilitySet;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Directories by name; names are as users write them, without `/`.
#[derive(Clone, Debug, Default)]
pub struct Exports {
    by_name: BTreeMap<String, PathBuf>,
}

impl Exports {
    /// Splits `[NAME=]DIR`.
    pub(crate) fn split(text: &OsStr) -> (Option<&[u8]>, &OsStr) {
        let bytes = text.as_bytes();
        let equals = bytes.iter().position(|&b| b == b'=').filter(|&at| !bytes[..at].contains(&b'/'));
        match equals {
            Some(at) => (Some(&bytes[..at]), OsStr::from_bytes(&bytes[at + 1..])),
            None => (None, text),
        }
    }

    /// Adds an export `[NAME=]DIR`; the default name is the directory's own.
    ///
    /// # Errors
    /// One line, with its remedy.
    pub fn add(&mut self, text: &OsStr) -> Result<(), String> {
        let shown = text.to_string_lossy().into_owned();
        let (name, dir) = Exports::split(text);
        let dir = Path::new(dir);
        let real = dir
            .canonicalize()
            .map_err(|error| format!("--export {shown}: {error}: name a directory of this machine"))?;
        if !real.is_dir() {
            return Err(format!("--export {shown}: not a directory; only directories can be exported"));
        }
        let name = name.or_else(|| real.file_name().map(OsStrExt::as_bytes));
        let name = name.ok_or_else(|| format!("--export {shown}: give it a name: NAME={shown}"))?;
        let name = std::str::from_utf8(name).ok().filter(|name| is_name(name));
        let name = name.ok_or_else(|| {
            format!("--export {shown}: give it a name of letters, digits, `-`, `_` and `.`: NAME=DIR")
        })?;
        let name = name.to_owned();
        if let Some(other) = self.by_name.get(&name) {
            return Err(format!(
                "--export {shown}: {} is called {name} already; say NAME=DIR",
                other.display()
            ));
        }
        self.by_name.insert(name, real);
        Ok(())
    }

    /// Returns names and directories.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.by_name.iter().map(|(name, path)| (name.as_str(), path.as_path()))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Opens the directory of an attach request: `NAME`, `NAME/sub`, the empty string if there is one export, or an
    /// absolute path for peers that may name one. A subdirectory is opened with the peer's rights and cannot lie
    /// outside the export. Returns the directory with its path.
    pub(crate) fn open(&self, asked: &[u8], peer: &Peer) -> Result<(OwnedFd, PathBuf), (Errno, String)> {
        let shown = String::from_utf8_lossy(asked).into_owned();
        if asked.first() == Some(&b'/') {
            if !peer.may_name_any_path() {
                return Err((
                    Errno::ACCES,
                    format!("{shown}: only exports can be mounted from here{}", self.hint()),
                ));
            }
            let path = PathBuf::from(OsStr::from_bytes(asked));
            let root = open_root(&path).map_err(|error| (error.errno(), error.to_string()))?;
            return Ok((root, path));
        }
        let mut parts = asked.splitn(2, |&b| b == b'/');
        let name = parts.next().and_then(|name| std::str::from_utf8(name).ok()).unwrap_or_default();
        let below = parts.next().unwrap_or_default();
        let path = match (self.by_name.get(name), self.by_name.first_key_value()) {
            (Some(path), _) => path,
            (None, Some((_, only))) if asked.is_empty() && self.by_name.len() == 1 => only,
            _ if self.is_empty() => return Err((Errno::INVAL, format!("{shown} is no absolute path"))),
            _ if asked.is_empty() => return Err((Errno::NOENT, format!("say which export{}", self.hint()))),
            _ => return Err((Errno::NOENT, format!("no export is called {name}{}", self.hint()))),
        };
        let root = open_root(path).map_err(|error| {
            let mend = "bring it back on the server, or serve another directory under that name";
            (error.errno(), format!("{error}: {mend}"))
        })?;
        if below.is_empty() {
            return Ok((root, path.clone()));
        }
        open_below(&root, below, peer).map_err(|fault| {
            let errno = Errno::from(fault);
            (errno, format!("{shown}: {errno}: name a directory of the export"))
        })
    }

    fn hint(&self) -> String {
        let names: Vec<&str> = self.by_name.keys().map(String::as_str).collect();
        if names.is_empty() {
            ", and there are none".into()
        } else {
            format!("; there are {}", names.join(", "))
        }
    }
}

fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name != "." && name != ".." && name.chars().all(plain)
}

fn open_below(root: &OwnedFd, below: &[u8], peer: &Peer) -> Result<(OwnedFd, PathBuf), Fault> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let opened = {
        let policy = CredentialPolicy::of(peer);
        let (acts, held) = (can_impersonate() && !policy.vouches(), CapabilitySet::empty());
        let _acting = Impersonation::begin(acts, &policy.peer(), held, SetIdBits::AsForCaller)?;
        rustix::fs::openat2(root, below, flags, Mode::empty(), resolve)?
    };
    let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
    let path = std::fs::read_link(link)?;
    Ok((opened, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_link::{Claims, Squash};
    use nigh_types::Credentials;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn exports(of: &[String]) -> Exports {
        let mut exports = Exports::default();
        of.iter().for_each(|text| exports.add(OsStr::new(text)).unwrap());
        exports
    }

    fn stranger() -> Peer {
        Peer::new("test", Claims::Any, Squash::None)
    }

    #[test]
    fn export_request_resolves_below_export_and_cannot_escape() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/sub/deep")).unwrap();
        fs::write(dir.path().join("a/file"), "").unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        symlink("../b", dir.path().join("a/out")).unwrap();
        symlink("sub/deep", dir.path().join("a/in")).unwrap();
        symlink("/", dir.path().join("a/root")).unwrap();
        let one = exports(&[format!("x={}/a", dir.path().display())]);
        let path = |asked: &str| one.open(asked.as_bytes(), &stranger()).map(|(_, path)| path);
        let real = dir.path().canonicalize().unwrap();
        assert_eq!(path("x").unwrap(), real.join("a"));
        assert_eq!(path("").unwrap(), real.join("a"));
        assert_eq!(path("x/").unwrap(), real.join("a"));
        assert_eq!(path("x/sub").unwrap(), real.join("a/sub"));
        assert_eq!(path("x/in").unwrap(), real.join("a/sub/deep"));
        for bad in ["y", "x/..", "x/../b", "x/out", "x/root", "x/gone", "x/file", "a", "/", "x\0", ".."] {
            let (_, message) = path(bad).unwrap_err();
            assert_eq!(message.lines().count(), 1, "{bad}");
        }
        assert!(path("/etc").unwrap_err().1.contains("there are x"));
        assert!(path("y").unwrap_err().1.contains("there are x"));
    }

    #[test]
    fn export_subdirectory_is_opened_with_rights_of_peer() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir_all(dir.path().join("closed/open")).unwrap();
        fs::set_permissions(dir.path().join("closed"), fs::Permissions::from_mode(0o700)).unwrap();
        let one = exports(&[format!("x={}", dir.path().display())]);
        let user =
            Claims::Only(Credentials { uid: 4_000_123, gid: 4_000_123, groups: vec![], privileges: None });
        let user = Peer::new("test", user, Squash::None);
        let squashed = |claims, squash| Peer::new("test", claims, squash);
        let root = Claims::Only(Credentials::default());
        for peer in [user, squashed(Claims::Any, Squash::Root), squashed(root, Squash::All)] {
            assert_eq!(one.open(b"x/closed/open", &peer).unwrap_err().0, Errno::ACCES);
        }
        assert!(one.open(b"x/closed/open", &stranger()).is_ok());
    }

    #[test]
    fn export_name_is_given_or_taken_from_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path.display().to_string()
        };
        let two = exports(&[path("src"), format!("other={}", path("x=y"))]);
        assert!(two.open(b"src", &stranger()).is_ok() && two.open(b"other", &stranger()).is_ok());
        assert!(two.open(b"", &stranger()).unwrap_err().1.contains("other, src"));
        let mut more = two.clone();
        for bad in [path("src"), "/".into(), path("y") + "/missing", "=/tmp".into(), "..=/tmp".into()] {
            let error = more.add(OsStr::new(&bad)).unwrap_err();
            assert!(error.contains("--export") && error.lines().count() == 1, "{error}");
        }
        assert!(Exports::default().open(b"", &stranger()).is_err());
    }

    #[test]
    fn absolute_path_is_accepted_only_from_permitted_peers() {
        let dir = tempfile::tempdir().unwrap();
        let asked = dir.path().as_os_str().as_bytes();
        assert!(Exports::default().open(asked, &stranger()).is_err());
        assert!(Exports::default().open(asked, &Peer::in_process()).is_ok());
        assert_eq!(Exports::default().open(b"relative", &Peer::in_process()).unwrap_err().0, Errno::INVAL);
    }
}
