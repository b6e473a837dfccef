//! What the driver of a mount needs of a remote besides calls and events: connections, and words for people.

use crate::Remote;
use nigh_types::Time;
use std::collections::BTreeMap;

/// What a session has sent and received; only grows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests sent that expect an answer: calls natively, messages where a call is several. Not counted: the handshake,
    /// renewals, acknowledgements, returned grants, cancellations, releases.
    pub requests: u64,
    pub renewals: u64,
    /// Requests by their type; those that are not counted above too, so this may sum to more.
    pub by_type: BTreeMap<&'static str, u64>,
    /// Of the whole stream, headers and handshakes included; what is sent, before it is packed.
    pub bytes_sent: u64,
    pub bytes_received: u64,
}

impl Counters {
    /// A request is sent; `counts`: among `requests` too.
    pub fn count(&mut self, type_name: &'static str, counts: bool) {
        *self.by_type.entry(type_name).or_default() += 1;
        self.requests += u64::from(counts);
    }

    /// What another session has sent and received besides.
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

/// Packs a frame, if that makes it shorter.
pub type Packer = fn(&[u8]) -> Option<Vec<u8>>;

/// A session that goes on over one connection after another.
///
/// The end of a connection, which `handle_disconnect` tells, is not the end of the session: when
/// [`Carried::wants_connection`] says why, whoever carries its bytes ends the old connection if it still stands, makes a
/// new one and says `handle_connect`. What was put out before and not carried is forgotten then.
pub trait Carried: Remote + Send {
    /// There is a connection: says hello. Only where one is wanted; else it does nothing.
    fn handle_connect(&mut self, now: Time);

    /// Ends the session from this side, in order: what is still in `poll_output` goes first.
    fn handle_close(&mut self, why: &str);

    /// Why a connection is wanted, in the place of one that has ended or is to be ended now; for people.
    /// `None`: none is.
    fn wants_connection(&self) -> Option<&str>;

    /// Whether nothing comes of it any more.
    fn is_lost(&self) -> bool;

    /// Whether a server answers for this session on the connection that stands.
    fn is_linked(&self) -> bool;

    /// Why the server did not want this client at its latest hello; for people.
    fn refusal(&self) -> Option<&str>;

    fn counters(&self) -> Counters;

    /// How frames may be packed on the connection that stands.
    fn packer(&self) -> Option<Packer> {
        None
    }

    /// What people call this kind of remote.
    fn kind(&self) -> &'static str;

    /// Whether its protocol is not ours, and what it cannot give is said when it is mounted.
    fn is_foreign(&self) -> bool {
        false
    }
}
