//! The proven source of a connection, over which a server divides its resources.

use core::net::IpAddr;
use std::fmt;

/// The proven source of a connection: the user that the transport proved, and over a network the machine. A peer
/// cannot choose it, unlike its client number. So the server divides all scarce resources by origin.
///
/// The default is this machine's root, which by ssh may stand for any number of machines and users.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Origin {
    /// `None`: a peer that may claim any user.
    pub uid: Option<u32>,
    pub host: Option<IpAddr>,
}

impl Origin {
    /// Whether this is root of the server's own machine (or the server's own process). It could stop the server
    /// as well, and different clients share this origin, so a limit on it protects no one.
    #[must_use]
    pub fn is_local_root(&self) -> bool {
        self.uid.is_none() && self.host.is_none()
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.uid {
            Some(uid) => write!(f, "uid {uid}")?,
            None => f.write_str("this machine's root or a trusted client")?,
        }
        self.host.map_or(Ok(()), |host| write!(f, " from {host}"))
    }
}
