//! The lease table of one server: which session holds which grant, which grants must be recalled before a change, and
//! how long the server waits for a holder. Rule numbers refer to docs/decisions/0008.
//!
//! A **key** is an object and the lease scope on it. A **grant** is one holder's permission to serve facts of one key
//! from its cache:
//!
//! ```text
//!            handle_grant                     acknowledgement
//!   (none) ───────────────▶ live ── recall ▶ recalled ─────────────▶ (none)
//!                             │                 │ return, end of its limit
//!                             │                 ▼
//!                             │               ended, acknowledgement owed ── acknowledgement ─▶ (none)
//!                             └── return, end of its limit ─▶ (none)
//!                from each state: goodbye, or fenced ─▶ (none)
//! ```
//!
//! A **holder** is one session:
//!
//! ```text
//!               owes for `patience`               1.1 terms since its latest message
//!   trusted ──────────────────────▶ suspect ─────────────────────────────────────▶ fenced (forgotten)
//!      ▲                               │                                              ▲
//!      └───── owes nothing any more ───┘                                              │
//!   trusted ── 1.1 terms since its latest message ────────────────────────────────────┘
//! ```
//!
//! A message from a suspect or disconnected holder does not renew its lease. So every recall ends at most `patience`
//! and 1.1 terms after it was emitted, whatever its holder does. When a suspect is trusted again or its session ends,
//! its client receives no grants for a penalty period, in any session. Each further occasion doubles the penalty, so a
//! client does not delay others again and again. If a client of another origin waited, the penalty is on the suspect's
//! whole origin.
//!
//! A **change** is in progress from `handle_change` until `handle_done`. It is *ready* once every other
//! holder of its keys has acknowledged its recall or update prepare, or was fenced. (A holder that acknowledged a
//! prepare keeps its grant, with the changing facts suspended; write-back may go before an acknowledgement.) From its beginning to its end, and until the last recall of a
//! key is acknowledged, the table refuses new grants on that key to every holder. (A holder's own change of file data
//! does not refuse its own grants on that data.)
//!
//! # What the server must do for the table
//!
//! - The server registers a grant before it reads the covered facts (`handle_grant`, then read).
//! - A reply carries a grant only if the holder's grants on that key have followed each other without a gap since the
//!   grant was registered, and the latest is live when the reply is queued in the holder's stream. Recalls are queued
//!   there in the order in which the table emitted them, but a recall of data follows unsent replies with a grant on
//!   that data (`unsent_grants.rs`). One lock is held for both ([`LeaseSequencer`]). A grant that was registered and not sent is withdrawn (`handle_withdraw`), not returned.
//! - A change that is not ready occupies no resource that an acknowledgement could need. If the keys of a ready change
//!   have become others, `handle_extend` names them; `handle_done` follows the change's effect.
//!
//! A holder has one grant on a key. A later grant replaces the earlier one, and a return of the earlier one does
//! nothing: the client may have sent it before it received the later one. While it has a write grant, no other holder
//! has a grant on that key.

mod discarded;
mod grace;
mod locks;
mod merge_base;
mod replies;
mod report;
mod rules;
mod sequencer;
mod state;
mod table;
mod types;
mod unsent_grants;
mod write_history;

pub use discarded::DiscardedLeases;
pub use grace::Grace;
pub use locks::{LockOwner, LockRequest, LockResult, LockTable};
pub use merge_base::{MergeBase, WroteBack};
pub use replies::{Replies, StoredReply};
pub use report::{ChangeReport, HolderReport, LeaseReport};
pub use sequencer::{LeaseSequencer, ParkResult, ReadGrant, SequencerOutput};
pub use state::MissedCursor;
pub use table::LeaseTable;
pub use types::{
    Change, ChangeId, Client, ClientOrigin, GrantRequest, Granted, Holder, LeaseConfig, LeaseCounters,
    LeaseKey, LeaseOutput, LeaseReason, LeaseTerms, Object, ObservedAt, Refusal, UpdatedKey,
};
pub use write_history::WriteHistory;

#[cfg(test)]
mod tests;
