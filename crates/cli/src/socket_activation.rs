//! Socket activation: sockets that the service manager listens on for this process, see sd_listen_fds(3).

use anyhow::{Context, Result};
use nigh_server::PassedSocket;
use std::os::fd::{FromRawFd, OwnedFd};

/// Returns all passed sockets. Call it once, before other code of this process can own one of these descriptors.
///
/// # Errors
/// An error of one line: a passed descriptor is not a listening unix or TCP socket.
pub fn take() -> Result<Vec<PassedSocket>> {
    let passed =
        sd_notify::listen_fds_with_names().context("what the service manager passes (LISTEN_FDS)")?;
    let taken = passed.map(|(fd, name)| {
        // SAFETY: LISTEN_PID names this process, so the descriptor was left open for it, and nothing else uses
        // it: this is called once.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        PassedSocket::new(name, fd).map_err(anyhow::Error::msg)
    });
    taken.collect()
}
