//! Flow limits: how much a session may have unanswered.

use crate::ProtocolError;

/// Bytes of requests, with their headers, that a session may have unanswered; and as many again of calls that
/// wait for locks.
pub const MAX_UNANSWERED_BYTES: u64 = 64 << 20;
/// Calls of one session that may wait for locks.
pub const MAX_LOCK_WAITS: u32 = 16_384;

/// Requests that are not answered yet. Both ends count alike: the client keeps to the limits, and the
/// server enforces them.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutstandingLoad {
    calls: u32,
    bytes: u64,
}

impl OutstandingLoad {
    pub(crate) fn calls(&self) -> u32 {
        self.calls
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn add(&mut self, bytes: u64) {
        self.calls += 1;
        self.bytes += bytes;
    }

    pub(crate) fn remove(&mut self, bytes: u64) {
        self.calls -= 1;
        self.bytes -= bytes;
    }

    /// # Errors
    /// One more, of so many bytes, would be too much.
    pub(crate) fn check(&self, bytes: u64, most_calls: u32) -> Result<(), ProtocolError> {
        if self.calls >= most_calls {
            Err(ProtocolError::TooManyCalls(most_calls))
        } else if self.bytes + bytes > MAX_UNANSWERED_BYTES {
            Err(ProtocolError::TooManyBytes(MAX_UNANSWERED_BYTES))
        } else {
            Ok(())
        }
    }
}
