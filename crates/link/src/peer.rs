//! The identity of a connection's peer, and the caller ids that the peer may claim.

use nigh_types::{Credentials, Origin};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Which caller ids the server accepts from a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Claims {
    /// Any ids: the peer is root of this machine, whose kernel supplies the caller's ids, or a client trusted to
    /// assert ids of its users.
    Any,
    /// This user's id, with its group or one of its groups; every other caller acts as this user.
    Only(Credentials),
}

/// ID squashing, as in NFS exports: the mapping of ids that the peer claims and the server accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Squash {
    /// Ids stay unchanged.
    None,
    /// uid and gid 0 become 65534.
    Root,
    /// Every caller acts as the serving user, or as 65534 if the serving user is root.
    All,
}

/// The peer of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    transport: String,
    host: Option<IpAddr>,
    claims: Claims,
    squash: Squash,
    any_path: bool,
    scope: u64,
}

impl Peer {
    /// `came`: the transport, for display. The peer may attach to exports by name only.
    #[must_use]
    pub fn new(came: impl Into<String>, claims: Claims, squash: Squash) -> Peer {
        Peer { transport: came.into(), host: None, claims, squash, any_path: false, scope: 0 }
    }

    /// A peer in this process, which needs no authentication.
    #[must_use]
    pub fn in_process() -> Peer {
        Peer::new("in process", Claims::Any, Squash::None).with_any_path()
    }

    /// Sets the network address that the peer connected from.
    #[must_use]
    pub fn from_host(self, host: IpAddr) -> Peer {
        Peer { host: Some(host), ..self }
    }

    /// Lets the peer attach to any path that the server can reach.
    #[must_use]
    pub fn with_any_path(self) -> Peer {
        Peer { any_path: true, ..self }
    }

    /// Sets the set of exports whose listener the peer used; 0 is the server's own set.
    #[must_use]
    pub fn with_scope(self, scope: u64) -> Peer {
        Peer { scope, ..self }
    }

    #[must_use]
    pub fn scope(&self) -> u64 {
        self.scope
    }

    /// Whether both peers have equal rights, regardless of their transports.
    #[must_use]
    pub fn has_same_rights(&self, other: &Peer) -> bool {
        let rights = |peer: &Peer| (peer.claims.clone(), peer.squash, peer.any_path, peer.scope);
        rights(self) == rights(other)
    }

    /// Returns the origin for the server's fair shares and limits. An IPv6 address counts by its first 64 bits, and
    /// all loopback addresses are one: a peer that has one of them can send from the others too.
    #[must_use]
    pub fn origin(&self) -> Origin {
        let uid = match &self.claims {
            Claims::Any => None,
            Claims::Only(own) => Some(own.uid),
        };
        let host = self.host.map(|host| match host.to_canonical() {
            host if host.is_loopback() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(host) => IpAddr::V6(Ipv6Addr::from_bits(host.to_bits() >> 64 << 64)),
            host @ IpAddr::V4(_) => host,
        });
        Origin { uid, host }
    }

    #[must_use]
    pub fn may_name_any_path(&self) -> bool {
        self.any_path
    }

    #[must_use]
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    #[must_use]
    pub fn squash(&self) -> Squash {
        self.squash
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.claims {
            Claims::Any => write!(f, "{}", self.transport),
            Claims::Only(own) => write!(f, "{} as uid {}", self.transport, own.uid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_network_have_one_origin() {
        let of = |host: &str| {
            let claims = Claims::Only(Credentials { uid: 5, gid: 5, groups: vec![], privileges: None });
            Peer::new("tcp", claims, Squash::Root).from_host(host.parse().unwrap()).origin()
        };
        assert_eq!(of("2001:db8:0:1::7"), of("2001:db8:0:1:ffff::8"));
        assert_ne!(of("2001:db8:0:1::7"), of("2001:db8:0:2::7"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
        assert_eq!(of("127.1.2.3"), of("::1"));
        assert_eq!(of("10.0.0.1").to_string(), "uid 5 from 10.0.0.1");
        assert_ne!(of("10.0.0.1"), Peer::in_process().origin());
    }
}
