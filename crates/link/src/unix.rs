//! Connections on this machine, where the kernel reports the peer's ids.

use crate::error::LinkError;
use crate::link::Link;
use nigh_types::Credentials;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Connects to a server's socket.
pub fn connect(path: &Path) -> Result<Link, LinkError> {
    match UnixStream::connect(path) {
        Ok(stream) => Ok(stream.into()),
        Err(error) => Err(LinkError::Unreachable { at: format!("unix://{}", path.display()), error }),
    }
}

/// Returns uid, gid and groups of the peer at the time of connect, as the kernel reports them.
pub fn credentials(stream: &UnixStream) -> io::Result<Credentials> {
    let (uid, gid) = ids(stream)?;
    let groups = groups(std::os::fd::AsFd::as_fd(stream))?;
    Ok(Credentials { uid, gid, groups, privileges: None })
}

/// Returns uid and gid of the peer at the time of connect (`SO_PEERCRED` in unix(7)). Its pid is ignored: it is 0 if
/// the peer is in a pid namespace that this process does not see.
pub fn ids(stream: &UnixStream) -> io::Result<(u32, u32)> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = libc::socklen_t::try_from(size_of::<libc::ucred>()).map_err(io::Error::other)?;
    // SAFETY: `found` is a ucred, of `bytes` bytes; both live until the call returns.
    let done = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut bytes,
        )
    };
    if done == 0 { Ok((found.uid, found.gid)) } else { Err(io::Error::last_os_error()) }
}

fn groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    const GROUP_BYTES: usize = size_of::<libc::gid_t>();
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut bytes = libc::socklen_t::try_from(groups.len() * GROUP_BYTES).map_err(io::Error::other)?;
        // SAFETY: `groups` has room for `bytes` bytes; both live until the call returns.
        let done = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = usize::try_from(bytes).map_err(io::Error::other)? / GROUP_BYTES;
        if done == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_peer_credentials_come_from_the_kernel() {
        let (one, _two) = UnixStream::pair().unwrap();
        let mut found = credentials(&one).unwrap();
        let mut own = crate::own_credentials();
        found.groups.sort_unstable();
        own.groups.sort_unstable();
        assert_eq!(found, own);
    }

    /// The test runs its own program again as the client, in a pid namespace in which the server's pid is 0.
    #[test]
    fn peer_in_another_pid_namespace_has_its_ids() {
        const SOCKET: &str = "NIGH_TEST_SOCKET_OF_ANOTHER_NAMESPACE";
        if let Some(path) = std::env::var_os(SOCKET) {
            let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
            assert_eq!(ids(&UnixStream::connect(path).unwrap()).unwrap(), own);
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let this = "unix::tests::peer_in_another_pid_namespace_has_its_ids";
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--pid", "--fork"]).arg(std::env::current_exe().unwrap());
        let Ok(ran) = unshare.args(["--exact", this]).env(SOCKET, &path).output() else {
            return println!("SKIPPED: needs unshare(1)");
        };
        let said = String::from_utf8_lossy(&ran.stderr);
        if said.contains("unshare failed") {
            return println!("SKIPPED: no pid namespace: {said}");
        }
        assert!(ran.status.success(), "{}{said}", String::from_utf8_lossy(&ran.stdout));
    }

    #[test]
    fn error_for_missing_socket_names_its_path() {
        let error = connect(Path::new("/nonexistent/s.sock")).unwrap_err().to_string();
        assert!(error.contains("unix:///nonexistent/s.sock") && error.lines().count() == 1, "{error}");
    }
}
