//! What a mount's driver needs from a remote besides calls and events: reconnection, counters and status texts.

use crate::Remote;
use nigh_types::Time;
use std::collections::BTreeMap;

/// Traffic counters of a session; they only grow.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests sent that expect a reply: calls in the native protocol, messages where a call takes several.
    /// Excluded: the handshake, renewals, acknowledgements, returned grants, cancellations, releases.
    pub requests: u64,
    pub renewals: u64,
    /// Requests by type. It includes types that `requests` excludes, so the sum may be larger.
    pub by_type: BTreeMap<&'static str, u64>,
    /// Bytes of the whole stream, headers and handshakes included; sent bytes count before compression.
    pub bytes_sent: u64,
    pub bytes_received: u64,
}

impl Counters {
    /// Counts a sent request; `counts`: in `requests` too.
    pub fn count(&mut self, type_name: &'static str, counts: bool) {
        *self.by_type.entry(type_name).or_default() += 1;
        self.requests += u64::from(counts);
    }

    /// Adds the counters of another session.
    pub fn add(&mut self, other: &Counters) {
        self.requests += other.requests;
        self.renewals += other.renewals;
        self.bytes_sent += other.bytes_sent;
        self.bytes_received += other.bytes_received;
        for (kind, count) in &other.by_type {
            *self.by_type.entry(kind).or_default() += count;
        }
    }
}

/// Compresses a frame, if that makes it shorter.
pub type Compressor = fn(&[u8]) -> Option<Vec<u8>>;

/// A session that survives its connections.
///
/// The end of a connection (`handle_disconnect`) does not end the session. When [`ResumableRemote::wants_connection`] gives a
/// reason, the driver closes the old connection if it is still open, makes a new one and calls `handle_connect`. Output
/// that was not carried by then is dropped.
pub trait ResumableRemote: Remote + Send {
    /// A new connection is open: puts out the hello. Does nothing unless a connection is wanted.
    fn handle_connect(&mut self, now: Time);

    /// Ends the session from this side, in order: pending output of `poll_output` goes first.
    fn handle_close(&mut self, why: &str);

    /// Why a connection is needed, in place of one that has ended or must end now; for people. `None`: none is needed.
    fn wants_connection(&self) -> Option<&str>;

    /// Whether the session is lost for good.
    fn is_lost(&self) -> bool;

    /// Whether a server has accepted this session on the current connection.
    fn is_connected(&self) -> bool;

    /// Why the server refused this client at its latest hello; for people.
    fn refusal(&self) -> Option<&str>;

    fn counters(&self) -> Counters;

    /// Compression of frames on the current connection.
    fn compressor(&self) -> Option<Compressor> {
        None
    }

    /// Name of this kind of remote, for people.
    fn kind(&self) -> &'static str;
}
