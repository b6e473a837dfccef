//! What every kind of remote gives a cache.
//!
//! A remote is the client's end of a protocol, without I/O: it takes calls, time and bytes, and puts
//! out events and bytes. Differences between kinds are data in the grants they hand out; the cache
//! never asks which kind stands behind it.

use std::sync::Arc;

pub use carried::{Carried, Counters, Packer};
use nigh_types::{CallId, GrantId, RecallId, Request, Time};
pub use nigh_types::{Event, Session};

mod carried;
pub mod conformance;
pub mod fake;
pub mod locks;
pub mod tree;

/// The client's end of one session with a remote.
///
/// **Contract.** Every method but [`Remote::poll_output`] is an input. After each input call
/// `poll_output` until it says [`Output::Timeout`], then call `handle_timeout` no later than the
/// moment it names (never, for `Time::FAR`). `now` never goes backwards. Nothing here blocks.
///
/// Events stand in the order in which the remote meant them: a recall put out before a response was
/// sent before it.
///
/// **While the remote is away** (from [`Event::Lapsed`] to [`Event::Restored`]) no event comes. Calls are taken and
/// go out later. After `Restored { kept: true }` all go on as if nothing had been. After `kept: false`:
///
/// 1. `Call::Reopen`, `Call::Lock` with `reclaim` and `Call::Walk` that are made from then on go out at once, and
///    nothing else does.
/// 2. With `handle_reclaimed` every call that was made before `Restored` and has no last response goes out again, in
///    the order of making, under its operation name; but for those that are not answered, reclaiming calls (`Reopen`,
///    `Lock` with `reclaim`) and what was cancelled by then (`EINTR`, though it may have taken effect in the forgotten
///    session): these are forgotten. Of a listing all parts come again. Behind them goes what was made since.
/// 3. If the session's cookie key is another one, so are all ids: instead of that, what was made before is answered
///    with `EIO`.
/// 4. Recalls and grants of the old session are of no meaning any more: none is acknowledged or returned.
pub trait Remote {
    /// Sends a call. Its responses come as [`Event::Response`]; `Call::Release` and `Call::Keep` have none.
    fn handle_call(&mut self, now: Time, id: CallId, request: Request);

    /// Nobody waits for this call any more. Its response, if one still comes, is put out all the
    /// same: a mutation may have taken effect.
    fn handle_cancel(&mut self, now: Time, id: CallId);

    /// What the recall named is gone from cache and kernel.
    fn handle_acknowledge(&mut self, now: Time, id: RecallId);

    /// These grants are needed no more.
    fn handle_return(&mut self, now: Time, grants: Vec<GrantId>);

    /// After [`Event::Restored`] without `kept`: open files and locks have been claimed again, and the kernel holds
    /// nothing of before, so others may change things. Else ignored.
    fn handle_reclaimed(&mut self, now: Time);

    /// Bytes arrived from the transport.
    fn handle_input(&mut self, now: Time, bytes: &[u8]);

    /// The transport ended; `why` is for people. Whether that is the end of the session is the protocol's
    /// to say.
    fn handle_disconnect(&mut self, now: Time, why: &str);

    /// A moment named by `poll_output` was reached.
    fn handle_timeout(&mut self, now: Time);

    /// The next thing to do for whoever carries this remote's events and bytes.
    fn poll_output(&mut self) -> Output;
}

/// What a remote wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(clippy::large_enum_variant, reason = "moved once, and most are events")]
pub enum Output {
    /// For the cache.
    Event(Event),
    /// For the transport, in this order.
    Transmit(Arc<Vec<u8>>),
    /// Nothing until then, or until the next input.
    Timeout(Time, Reason),
}

/// Why a timeout was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Nothing is due; the moment is `Time::FAR`.
    Idle,
    /// The session must be renewed.
    Renewal,
    /// The session's term ends unless the remote is heard from.
    SessionEnd,
    /// Of a fake: a reply was delayed until then.
    Delay,
}
