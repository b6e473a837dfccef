//! The interface between a cache and its remote.
//!
//! A remote is the client's end of a protocol, without I/O: its inputs are calls, time and bytes, its outputs events
//! and bytes. Differences between protocols are data in the grants; the cache never asks which protocol it uses.

use std::sync::Arc;

use nigh_types::{CallId, GrantId, RecallId, Request, Time};
pub use nigh_types::{Event, SessionParams};
pub use resumable::{Compressor, Counters, ResumableRemote};

pub mod conformance;
pub mod fake;
pub mod locks;
pub mod model_fs;
mod resumable;

/// The client's end of one session with a remote.
///
/// **Contract.** Every method but [`Remote::poll_output`] is an input. After each input call
/// `poll_output` until it says [`Output::Timeout`], then call `handle_timeout` no later than the
/// moment it names (never, for `Time::FAR`). `now` never goes backwards. Nothing here blocks.
///
/// Events come in the order in which the remote sent them: if a recall comes before a response, it was sent before it.
///
/// **While the remote is disconnected** (from [`Event::Expired`] to [`Event::Restored`]) no event comes but
/// [`Event::Lost`]. The remote accepts calls and sends them later. After `Restored { kept: true }` all calls go on unaffected. After `kept: false`:
///
/// 1. The remote sends later `Call::Reopen`, `Call::Lock` with `reclaim` and `Call::ResolvePath` at once, and nothing else.
/// 2. With `handle_reclaimed` the remote sends again every call made before `Restored` and without its last response,
///    in the order in which they were made and with their mutation ids. It drops calls of kinds without a reply, reclaim
///    calls (`Reopen`, `Lock` with `reclaim`), and calls cancelled by then (`EINTR`, though they may have taken effect
///    in the lost session). A listing repeats all its chunks. Calls made since `Restored` follow.
/// 3. If the session has a different cookie key, all ids differ too: then earlier calls get `EIO` instead.
/// 4. Recalls and grants of the old session are void: the client acknowledges and returns none of them.
pub trait Remote {
    /// Sends a call. Its responses come as [`Event::Response`]; `Call::Release` and `Call::PinOpen` have none.
    fn handle_call(&mut self, now: Time, id: CallId, request: Request);

    /// The caller no longer waits for this call. Its response is still put out if it comes, because a mutation may
    /// have taken effect.
    fn handle_cancel(&mut self, now: Time, id: CallId);

    /// Cache and kernel have dropped the facts of this recall.
    fn handle_acknowledge(&mut self, now: Time, id: RecallId);

    /// The cache no longer needs these grants.
    fn handle_return(&mut self, now: Time, grants: Vec<GrantId>);

    /// After [`Event::Restored`] without `kept`: the cache has reclaimed open files and locks, and the kernel keeps no
    /// earlier facts, so other clients may change them. Otherwise ignored.
    fn handle_reclaimed(&mut self, now: Time);

    /// Bytes arrived from the transport.
    fn handle_input(&mut self, now: Time, bytes: &[u8]);

    /// The transport ended; `why` is for people. The protocol decides whether the session ends too.
    fn handle_disconnect(&mut self, now: Time, why: &str);

    /// A time named by `poll_output` was reached.
    fn handle_timeout(&mut self, now: Time);

    /// The next output for the driver that carries this remote's events and bytes.
    fn poll_output(&mut self) -> Output;
}

/// Output of a remote.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(clippy::large_enum_variant, reason = "moved once, and most are events")]
pub enum Output {
    /// For the cache.
    Event(Event),
    /// For the transport, in this order.
    Transmit(Arc<Vec<u8>>),
    /// Nothing until this time, or until the next input.
    Timeout(Time, Reason),
}

/// Reason of a timeout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Nothing is due; the moment is `Time::FAR`.
    Idle,
    /// The session must be renewed.
    Renewal,
    /// The session's term ends unless the remote responds.
    SessionEnd,
    /// From a fake: the time to which a reply was delayed.
    Delay,
}
