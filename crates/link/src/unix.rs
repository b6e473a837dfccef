//! Connections on this machine: the kernel says who is there.

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

/// Who made the connection: uid, gid and groups at that moment, as the kernel says.
pub fn credentials(stream: &UnixStream) -> io::Result<Credentials> {
    let found = rustix::net::sockopt::socket_peercred(stream)?;
    let groups = groups(std::os::fd::AsFd::as_fd(stream))?;
    Ok(Credentials { uid: found.uid.as_raw(), gid: found.gid.as_raw(), groups })
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
    fn the_kernel_says_who_is_at_the_other_end() {
        let (one, _two) = UnixStream::pair().unwrap();
        let mut found = credentials(&one).unwrap();
        let mut own = crate::own_credentials();
        found.groups.sort_unstable();
        own.groups.sort_unstable();
        assert_eq!(found, own);
    }

    #[test]
    fn a_socket_that_is_not_there_is_named() {
        let error = connect(Path::new("/nonexistent/s.sock")).unwrap_err().to_string();
        assert!(error.contains("unix:///nonexistent/s.sock") && error.lines().count() == 1, "{error}");
    }
}
