//! Replies of a discarded session to named operations, for clients that may not have received them.

use nigh_types::{Errno, Handle, Response};
use std::collections::BTreeMap;

/// Maximum number of replies of one session. A client has fewer calls outstanding.
const MOST_REPLIES: usize = 4_096;

/// A stored reply. `F` keeps the file open that it names.
#[derive(Clone, Debug)]
pub struct StoredReply<F> {
    response: Response,
    file: Option<F>,
}

impl<F> StoredReply<F> {
    /// `None`: the reply is not to be stored. `keep` keeps the file open that it names.
    pub fn new(mut response: Response, keep: impl FnOnce(Handle) -> Option<F>) -> Option<StoredReply<F>> {
        // On ESTALE the client resolves the path again and sends a new call.
        if !response.last || response.result == Err(Errno::STALE) {
            return None;
        }
        response.grants.clear();
        let file = response.opened_handle().copied().and_then(keep);
        Some(StoredReply { response, file })
    }

    /// The reply in a new session, in which `adopt` returns the handle of the file.
    pub fn into_response(self, adopt: impl FnOnce(F) -> Result<Handle, Errno>) -> Response {
        let StoredReply { mut response, file } = self;
        if let Some(handle) = response.opened_handle() {
            match file.map(adopt) {
                Some(Ok(adopted)) => *handle = adopted,
                Some(Err(errno)) => response.result = Err(errno),
                None => response.result = Err(Errno::IO),
            }
        }
        response
    }
}

/// Replies by the sequence number of their operation. No file is opened or closed in its methods, so that they can be
/// called under a lock.
#[derive(Clone, Debug)]
pub struct Replies<F> {
    by_sequence: BTreeMap<u64, StoredReply<F>>,
}

impl<F> Default for Replies<F> {
    fn default() -> Replies<F> {
        Replies { by_sequence: BTreeMap::new() }
    }
}

impl<F> Replies<F> {
    /// Stores a reply. Returns the reply that is not stored any more: an earlier one to this operation, or this one if
    /// there are too many.
    #[must_use]
    pub fn insert(&mut self, sequence: u64, reply: StoredReply<F>) -> Option<StoredReply<F>> {
        if self.by_sequence.len() >= MOST_REPLIES {
            return Some(reply);
        }
        self.by_sequence.insert(sequence, reply)
    }

    /// Takes the reply to a resent operation.
    pub fn take(&mut self, sequence: u64) -> Option<StoredReply<F>> {
        self.by_sequence.remove(&sequence)
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.by_sequence.len()
    }

    /// The files that are kept open.
    pub fn files(&self) -> impl Iterator<Item = &F> {
        self.by_sequence.values().filter_map(|reply| reply.file.as_ref())
    }
}
