//! Update prepares and commits at the client.

use super::ClientSession;
use crate::ProtocolError;
use nigh_types::{Event, RecallId, UpdateCommit, UpdatePrepare};
use std::collections::BTreeSet;

/// The most uncommitted prepares of one server.
const MOST_HOLDS: u64 = 1 << 16;

/// Prepares whose commits are still to come, by the server's ids.
#[derive(Clone, Default, Debug)]
pub(super) struct Pushes {
    /// The server knows that this client takes updates.
    agreed: bool,
    held: BTreeSet<RecallId>,
}

impl Pushes {
    /// Notes whether the server's welcome agreed to updates.
    pub(super) fn agree(&mut self, agreed: bool) {
        self.agreed = agreed;
    }

    /// Forgets all prepares, because all grants have ended. Their commits may still come.
    pub(super) fn forget(&mut self) {
        self.held.clear();
    }
}

impl ClientSession {
    pub(super) fn take_hold(&mut self, number: u8, mut hold: UpdatePrepare) -> Result<(), ProtocolError> {
        if !self.pushes.agreed {
            return Err(ProtocolError::Unexpected(number));
        }
        if self.pushes.held.len() as u64 >= MOST_HOLDS {
            return Err(ProtocolError::Malformed("too many holds that are not committed"));
        }
        if !self.pushes.held.insert(hold.id) {
            return Err(ProtocolError::Malformed("a hold with the number of another"));
        }
        hold.id = RecallId(self.recalls.take(hold.id.0));
        self.event(Event::UpdatePrepare(hold));
        Ok(())
    }

    pub(super) fn take_commit(&mut self, number: u8, mut commit: UpdateCommit) -> Result<(), ProtocolError> {
        if !self.pushes.agreed {
            return Err(ProtocolError::Unexpected(number));
        }
        if self.pushes.held.remove(&commit.id) {
            commit.id = RecallId(self.recalls.take(commit.id.0));
            self.event(Event::UpdateCommit(commit));
        }
        Ok(())
    }
}
