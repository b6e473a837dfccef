//! Replies of a discarded session to named operations, for clients that may not have received them.

use nigh_types::{Errno, Handle, Response};
use std::collections::BTreeMap;

/// Maximum number of replies of one session. A client has fewer calls outstanding.
const MOST_REPLIES: usize = 4_096;

/// Replies by the sequence number of their operation. `F` keeps the file open that a reply names.
#[derive(Clone, Debug)]
pub struct Replies<F> {
    by_sequence: BTreeMap<u64, (Response, Option<F>)>,
}

impl<F> Default for Replies<F> {
    fn default() -> Replies<F> {
        Replies { by_sequence: BTreeMap::new() }
    }
}

impl<F> Replies<F> {
    /// Stores a reply. `keep` keeps the file open that it names.
    pub fn note(&mut self, sequence: u64, mut response: Response, keep: impl FnOnce(Handle) -> Option<F>) {
        // On ESTALE the client resolves the path again and sends a new call.
        if !response.last || response.result == Err(Errno::STALE) {
            return;
        }
        response.grants.clear();
        let file = response.opened_handle().copied().and_then(keep);
        if self.by_sequence.len() < MOST_REPLIES {
            self.by_sequence.insert(sequence, (response, file));
        }
    }

    /// Takes the reply to a resent operation. `adopt` returns the handle of its file in the new session.
    pub fn take(
        &mut self,
        sequence: u64,
        adopt: impl FnOnce(F) -> Result<Handle, Errno>,
    ) -> Option<Response> {
        let (mut response, file) = self.by_sequence.remove(&sequence)?;
        if let Some(handle) = response.opened_handle() {
            match file.map(adopt) {
                Some(Ok(adopted)) => *handle = adopted,
                Some(Err(errno)) => response.result = Err(errno),
                None => response.result = Err(Errno::IO),
            }
        }
        Some(response)
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.by_sequence.len()
    }

    /// The files that are kept open.
    pub fn files(&self) -> impl Iterator<Item = &F> {
        self.by_sequence.values().filter_map(|(_, file)| file.as_ref())
    }
}
