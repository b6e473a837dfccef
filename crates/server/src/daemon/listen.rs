//! Listen addresses of a server and their access rules.

use crate::daemon::listeners::AccessPolicy;
use crate::daemon::server_dirs::ServerDirs;
use crate::daemon::socket_activation::PassedSocket;
use crate::export::exports::Exports;
use crate::os::impersonate::{can_impersonate, use_umask};
use nigh_link::tcp::{Acceptor, PORT};
use nigh_link::{Claims, Squash, Token, credentials_of, own_credentials};
use std::ffi::OsString;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options of `nigh serve`.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// Each `[NAME=]DIR`.
    pub exports: Vec<OsString>,
    /// Addresses besides this user's own socket.
    pub listens: Vec<Listen>,
    /// Token file for TCP connections; made if missing.
    pub token: Option<PathBuf>,
    /// Disables TLS.
    pub plaintext: bool,
    /// Trusts the callers' ids over TCP.
    pub trust_client_ids: bool,
    /// Listening sockets made by the service manager.
    pub passed: Vec<PassedSocket>,
    /// Squashing of trusted ids; by default root is squashed over TCP only.
    pub squash: Option<Squash>,
}

/// A listen address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Listen {
    Unix(PathBuf),
    Tcp { host: String, port: u16 },
}

impl Listen {
    /// Parses `unix:///PATH` or `tcp://ADDRESS[:PORT]`; `None` for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Listen> {
        if let Some(path) = text.strip_prefix("unix://") {
            return path.starts_with('/').then(|| Listen::Unix(path.into()));
        }
        let address = text.strip_prefix("tcp://")?.trim_end_matches('/');
        nigh_link::address::parse(address, PORT).map(|(host, port)| Listen::Tcp { host, port })
    }
}

impl std::fmt::Display for Listen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Listen::Unix(path) => write!(f, "unix://{}", path.display()),
            Listen::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Listen::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
        }
    }
}

impl Serving {
    /// Parses the exports: names and directories.
    ///
    /// # Errors
    /// One line, with its remedy.
    pub fn exports(&self) -> io::Result<Exports> {
        let mut exports = Exports::default();
        for text in &self.exports {
            exports.add(text).map_err(|problem| io::Error::new(io::ErrorKind::InvalidInput, problem))?;
        }
        Ok(exports)
    }

    /// Checks the options by themselves. The error is one line, with its remedy.
    pub fn check(&self) -> Result<(), String> {
        let tcp = self.is_on_tcp();
        if tcp && self.token.is_none() && !self.trust_client_ids {
            return Err("a listener on tcp:// needs --token FILE (made where it is not there), or \
                        --trust-client-ids to accept any client as any user"
                .into());
        }
        let for_others =
            !self.listens.is_empty() || self.passed.iter().any(|passed| !passed.is_called_user());
        if for_others && self.exports.is_empty() {
            return Err("say what is served there: --export [NAME=]DIR".into());
        }
        if !tcp && (self.token.is_some() || self.plaintext || self.trust_client_ids) {
            return Err("--token, --plaintext and --trust-client-ids are for --listen tcp://ADDRESS".into());
        }
        Ok(())
    }

    fn is_on_tcp(&self) -> bool {
        let mut said = self.listens.iter().map(|listen| matches!(listen, Listen::Tcp { .. }));
        said.any(|tcp| tcp) || self.passed.iter().any(PassedSocket::is_tcp)
    }
}

impl Serving {
    /// Returns the access rules for TCP; `None` if there is no TCP listener.
    pub(crate) fn network(&self, places: &ServerDirs) -> io::Result<Option<AccessPolicy>> {
        if !self.is_on_tcp() {
            return Ok(None);
        }
        let token = self.token.as_deref().map(Token::read_or_make).transpose()?;
        let squash = self.squash.unwrap_or(Squash::Root);
        let claims = if self.trust_client_ids {
            tracing::warn!("clients over tcp may claim to be any user (--trust-client-ids)");
            Claims::Any
        } else {
            Claims::Only(user_of(token.as_ref())?)
        };
        let door = if self.plaintext {
            Acceptor::plaintext(token)
        } else {
            Acceptor::with_tls(&places.state, token)?
        };
        if let Some(key) = door.fingerprint() {
            tracing::info!(key, "clients know this server by its key");
        } else {
            tracing::warn!(
                "traffic over tcp is not encrypted (--plaintext): others on its way can read and change it"
            );
        }
        Ok(Some(AccessPolicy::Network(Arc::new(door), claims, squash)))
    }
}

/// Returns the user as which a token's clients act.
fn user_of(token: Option<&Token>) -> io::Result<nigh_types::Credentials> {
    let own = own_credentials();
    match token.and_then(Token::user) {
        Some(user) => {
            let named = credentials_of(user)?;
            if named.uid != own.uid && !can_impersonate() {
                let problem = format!(
                    "the token names {user}, and only root can act as another user: serve as {user}, or take \
                     the line `user {user}` out of the token file"
                );
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
            }
            Ok(named)
        }
        None if own.uid == 0 => {
            tracing::warn!(
                "the token names no user, so its clients act as nobody: write `user NAME` below it"
            );
            let nobody = crate::os::squash::ANONYMOUS;
            Ok(nigh_types::Credentials { uid: nobody, gid: nobody, groups: Vec::new(), privileges: None })
        }
        None => Ok(own),
    }
}

pub(crate) fn bind_tcp(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    let at = |error: io::Error, how: &str| {
        io::Error::new(error.kind(), format!("tcp://{host}:{port}: {error}: {how}"))
    };
    let addresses = (host, port).to_socket_addrs().map_err(|e| at(e, "name an address of this machine"))?;
    let bind = |address| TcpListener::bind(address).map_err(|e| at(e, "choose another address or port"));
    addresses.map(bind).collect()
}

/// Binds a unix socket. In a directory that other users may enter, every local user may connect, and the peer's uid
/// decides. Any other directory is private to this user, and is made private if it is missing.
pub(crate) fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let at = |error: io::Error| io::Error::new(error.kind(), format!("unix://{}: {error}", path.display()));
    let say = |problem: &str| at(io::Error::other(problem.to_owned()));
    let dir = path.parent().ok_or_else(|| say("name a file for the socket"))?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at)?;
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(say("something else is there: choose another path"));
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return Err(say("another server listens there: choose another path"));
        }
        Ok(_) => std::fs::remove_file(path).map_err(at)?,
        Err(_) => {}
    }
    let open = std::fs::metadata(dir).map_err(at)?.mode() & 0o077 != 0;
    bind_with_mode(path, if open { 0o666 } else { 0o600 }).map_err(at)
}

/// Binds a socket that has its mode from the start: a client that connects before a later chmod would be refused. The
/// umask belongs to a short-lived thread.
fn bind_with_mode(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let bind = || {
        use_umask(!mode).map_err(|fault| io::Error::from_raw_os_error(fault.0.raw()))?;
        UnixListener::bind(path)
    };
    std::thread::scope(|threads| threads.spawn(bind).join()).expect("binding does not panic")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn listen_addresses_are_parsed() {
        let tcp = |host: &str, port| Some(Listen::Tcp { host: host.into(), port });
        assert_eq!(Listen::parse("tcp://0.0.0.0"), tcp("0.0.0.0", PORT));
        assert_eq!(Listen::parse("tcp://host:7"), tcp("host", 7));
        assert_eq!(Listen::parse("tcp://[::1]"), tcp("::1", PORT));
        assert_eq!(Listen::parse("tcp://[::1]:9/"), tcp("::1", 9));
        assert_eq!(Listen::parse("unix:///run/s"), Some(Listen::Unix("/run/s".into())));
        for bad in ["tcp://", "tcp://:1", "tcp://h:x", "tcp://h:70000", "tcp://[::1", "unix://rel", "h:1", ""]
        {
            assert_eq!(Listen::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn tcp_listener_without_token_or_export_is_refused() {
        let tcp = Listen::parse("tcp://localhost").unwrap();
        let mut serving = Serving { listens: vec![tcp], ..Serving::default() };
        assert!(serving.check().unwrap_err().contains("--token"));
        serving.token = Some("/t".into());
        assert!(serving.check().unwrap_err().contains("--export"));
        serving.exports.push("/tmp".into());
        assert_eq!(serving.check(), Ok(()));
        serving.listens.clear();
        assert!(serving.check().unwrap_err().contains("--listen tcp://"));
        assert_eq!(Serving::default().check(), Ok(()));
    }

    #[test]
    fn socket_has_its_mode_as_soon_as_it_exists() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = dir.path().join("s.sock");
        let seen = || std::fs::metadata(&path).map(|found| found.mode() & 0o777);
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let other = threads.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(seen().unwrap_or(0o666), 0o666);
                }
            });
            for _ in 0..200 {
                drop(bind_unix(&path).unwrap());
            }
            done.store(true, Ordering::Relaxed);
            other.join().unwrap();
        });
    }

    #[test]
    fn socket_is_open_to_others_only_in_directory_open_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        let own = dir.path().join("new/s.sock");
        let listener = bind_unix(&own).unwrap();
        assert_eq!((mode(&own), mode(own.parent().unwrap())), (0o600, 0o700));
        assert!(bind_unix(&own).unwrap_err().to_string().contains("another server"));
        drop(listener);
        bind_unix(&own).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let open = dir.path().join("s.sock");
        bind_unix(&open).unwrap();
        assert_eq!(mode(&open), 0o666);
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert!(bind_unix(&dir.path().join("file")).is_err());
    }
}
