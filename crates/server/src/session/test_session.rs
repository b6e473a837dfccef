//! A session for tests.

use super::Session;
use super::log::SessionLog;
use crate::lease::leases::Leases;
use nigh_lease::LeaseConfig;
use nigh_link::{Kind, Peer};
use nigh_native::{ServerConfig, ServerSession};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};

/// A session on a link without another end.
pub(crate) fn test_session(id: u64, peer: Peer) -> Arc<Session> {
    let (link, _) = UnixStream::pair().unwrap();
    let config = ServerConfig { session_id: id, ..ServerConfig::default() };
    let connection = ServerSession::new(crate::os::clock::now(), config);
    let log = SessionLog::new(&Arc::default(), Kind::Unix);
    let leases = Leases::new(LeaseConfig::default(), None);
    let of = (link.into(), peer, 0);
    Arc::new(Session::new(connection, of, log, (&leases, Weak::new()), &Arc::default()))
}
