//! Update prepares and commits at the client.

use super::ClientSession;
use crate::ProtocolError;
use nigh_types::{Event, RecallId, UpdateCommit, UpdatePrepare};
use std::collections::BTreeSet;

/// The most uncommitted prepares of one server.
const MAX_UNCOMMITTED: u64 = 1 << 16;

/// Prepares whose commits are still to come, by the server's ids.
#[derive(Clone, Default, Debug)]
pub(super) struct UncommittedPrepares {
    /// The server knows that this client takes updates.
    agreed: bool,
    uncommitted: BTreeSet<RecallId>,
}

impl UncommittedPrepares {
    /// Notes whether the server's welcome agreed to updates.
    pub(super) fn agree(&mut self, agreed: bool) {
        self.agreed = agreed;
    }

    /// Forgets all prepares, because all grants have ended. Their commits may still come.
    pub(super) fn forget(&mut self) {
        self.uncommitted.clear();
    }
}

impl ClientSession {
    pub(super) fn take_prepare(&mut self, number: u8, mut hold: UpdatePrepare) -> Result<(), ProtocolError> {
        if !self.updates.agreed {
            return Err(ProtocolError::Unexpected(number));
        }
        if self.updates.uncommitted.len() as u64 >= MAX_UNCOMMITTED {
            return Err(ProtocolError::Malformed("too many holds that are not committed"));
        }
        if !self.updates.uncommitted.insert(hold.id) {
            return Err(ProtocolError::Malformed("a hold with the number of another"));
        }
        hold.id = RecallId(self.recalls.local_id(hold.id.0));
        self.event(Event::UpdatePrepare(hold));
        Ok(())
    }

    pub(super) fn take_commit(&mut self, number: u8, mut commit: UpdateCommit) -> Result<(), ProtocolError> {
        if !self.updates.agreed {
            return Err(ProtocolError::Unexpected(number));
        }
        if self.updates.uncommitted.remove(&commit.id) {
            commit.id = RecallId(self.recalls.local_id(commit.id.0));
            self.event(Event::UpdateCommit(commit));
        }
        Ok(())
    }
}
