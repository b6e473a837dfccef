//! Socket activation: listening sockets passed by a service manager, sd_listen_fds(3).

use crate::daemon::listeners::Socket;
use crate::daemon::server_dirs::ServerDirs;
use crate::os::own_mounts::{self, path_of};
use rustix::net::{AddressFamily, SocketType, sockopt};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Name of the socket for this user's own mounts (`FileDescriptorName=user`).
const USER: &str = "user";

/// A passed socket: a listening unix or TCP socket.
#[derive(Clone, Debug)]
pub struct PassedSocket {
    name: String,
    tcp: bool,
    fd: Arc<OwnedFd>,
}

impl PassedSocket {
    /// `name` is the value of `FileDescriptorName=`, or else the manager's choice.
    ///
    /// # Errors
    /// One line, for any other descriptor.
    pub fn new(name: String, fd: OwnedFd) -> Result<PassedSocket, String> {
        let wrong =
            |what: &str, mend: &str| format!("the socket {name:?} of the service manager is {what}: {mend}");
        let family = match sockopt::socket_domain(&fd) {
            Err(rustix::io::Errno::NOTSOCK) => return Err(wrong("no socket", "pass ListenStream= only")),
            other => other.map_err(|error| wrong("of no use", &error.to_string()))?,
        };
        let tcp = match family {
            AddressFamily::UNIX => false,
            AddressFamily::INET | AddressFamily::INET6 => true,
            _ => return Err(wrong("neither unix nor tcp", "say ListenStream=/PATH or ListenStream=PORT")),
        };
        if sockopt::socket_type(&fd) != Ok(SocketType::STREAM) {
            return Err(wrong("no stream", "say ListenStream="));
        }
        if sockopt::socket_acceptconn(&fd) != Ok(true) {
            return Err(wrong("one connection, or does not listen", "say Accept=no"));
        }
        let passed = PassedSocket { name, tcp, fd: Arc::new(fd) };
        if !tcp {
            own_mounts::note_passed(&passed.fd);
        }
        if passed.is_called_user() && tcp {
            return Err(
                "the socket \"user\" of the service manager is on tcp: what your own mounts connect \
                        to is a unix socket"
                    .into(),
            );
        }
        Ok(passed)
    }

    pub(crate) fn is_called_user(&self) -> bool {
        self.name == USER
    }

    pub(crate) fn is_tcp(&self) -> bool {
        self.tcp
    }

    /// Whether this user's own mounts connect to it.
    ///
    /// # Errors
    /// One line, if it is meant for them but has another path.
    pub(crate) fn is_own(&self, places: &ServerDirs) -> io::Result<bool> {
        if !self.is_called_user() {
            return Ok(false);
        }
        let (wanted, found) = (places.socket(), self.path()?);
        if found.as_deref() == Some(wanted.as_path()) {
            return Ok(true);
        }
        let problem = format!(
            "the socket \"user\" of the service manager is not where your mounts look: say ListenStream={}",
            wanted.display()
        );
        Err(io::Error::new(io::ErrorKind::InvalidInput, problem))
    }

    /// Its address, for display.
    pub(crate) fn display_address(&self) -> String {
        let place = match self.listener() {
            Ok(Socket::Tcp(socket)) => socket.local_addr().map(|address| format!("tcp://{address}")),
            Ok(Socket::Unix(_)) => self.path().map(|path| {
                path.map_or_else(
                    || "unix socket without a path".into(),
                    |p| format!("unix://{}", p.display()),
                )
            }),
            Err(error) => Err(error),
        };
        format!("{} (from the service manager)", place.unwrap_or_else(|error| error.to_string()))
    }

    pub(crate) fn listener(&self) -> io::Result<Socket> {
        let fd = self.fd.try_clone()?;
        Ok(if self.tcp { Socket::Tcp(fd.into()) } else { Socket::Unix(fd.into()) })
    }

    fn path(&self) -> io::Result<Option<PathBuf>> {
        path_of(&self.fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::unix::net::UnixListener;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    fn refused(fd: impl Into<OwnedFd>) -> String {
        let line = PassedSocket::new("s.socket".into(), fd.into()).unwrap_err();
        assert_eq!(line.lines().count(), 1, "{line}");
        line
    }

    #[test]
    fn only_listening_stream_sockets_are_accepted_from_service_manager() {
        let dir = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(dir.path().join("s")).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        assert!(refused(connected).contains("Accept=no"));
        assert!(refused(UnixStream::pair().unwrap().0).contains("Accept=no"));
        assert!(refused(UdpSocket::bind("127.0.0.1:0").unwrap()).contains("ListenStream"));
        assert!(refused(UnixDatagram::pair().unwrap().0).contains("ListenStream"));
        assert!(refused(std::fs::File::open("/dev/null").unwrap()).contains("no socket"));
        assert!(refused(std::io::pipe().unwrap().0).contains("no socket"));
        assert!(!PassedSocket::new("x".into(), unix.into()).unwrap().is_tcp());
        let again = tcp.try_clone().unwrap();
        assert!(PassedSocket::new("x".into(), tcp.into()).unwrap().is_tcp());
        assert!(PassedSocket::new("user".into(), again.into()).unwrap_err().contains("tcp"));
    }

    #[test]
    fn passed_user_socket_must_be_at_the_path_used_by_mounts() {
        let dir = tempfile::tempdir().unwrap();
        let places = ServerDirs { runtime: dir.path().join("run"), state: dir.path().join("state") };
        std::fs::create_dir(&places.runtime).unwrap();
        let at = |path: PathBuf, name: &str| {
            PassedSocket::new(name.into(), UnixListener::bind(path).unwrap().into()).unwrap()
        };
        assert!(at(places.socket(), "user").is_own(&places).unwrap());
        assert!(!at(dir.path().join("a"), "other").is_own(&places).unwrap());
        let wrong = at(dir.path().join("b"), "user").is_own(&places).unwrap_err().to_string();
        assert!(wrong.contains("serve.sock") && wrong.lines().count() == 1, "{wrong}");
    }
}
