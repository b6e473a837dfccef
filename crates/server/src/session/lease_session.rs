//! The session as the lease table and the reply cache see it.

use crate::export::Export;
use crate::lease::holder::{LeaseMessage, LeaseSession};
use crate::session::reply_cache::ReplyClient;
use crate::session::{Attached, Session, log};
use nigh_lease::{ClientOrigin, Holder, LeaseTerms};
use nigh_link::Peer;
use nigh_native::{EXCLUSIVE_DIR_LEASES, TRUSTS_WATCH, UPDATES};
use nigh_types::Origin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl LeaseSession for Session {
    fn holder(&self) -> Holder {
        Holder(self.id)
    }

    fn peer(&self) -> &Peer {
        &self.peer
    }

    fn export(&self) -> Option<&Arc<Export>> {
        self.attached().map(|attached| &attached.export)
    }

    fn begin_lease(&self) {
        self.lease.fetch_add(1, Ordering::SeqCst);
    }

    fn lease(&self) -> u64 {
        self.lease.load(Ordering::SeqCst)
    }

    fn queue(&self, message: LeaseMessage) {
        let mut wire = self.wire.lock();
        match message {
            LeaseMessage::Recall(recall) => wire.connection.recall(recall),
            LeaseMessage::Prepare(hold) => wire.connection.prepare(hold),
            LeaseMessage::Commit(commit) => wire.connection.commit(commit),
        }
        self.flush(&mut wire);
    }

    fn send(&self) {
        self.outbox.send();
    }

    fn fence(&self, lease: u64) {
        log::fenced(self);
        self.lapse(lease);
    }

    fn log_suspect(&self, suspect: bool) {
        if suspect {
            log::suspect(self);
        } else {
            log::acknowledged(self);
        }
    }
}

impl Attached {
    /// The client whose earlier sessions may have replies for it.
    pub(crate) fn reply_client(&self, peer: &Peer) -> ReplyClient {
        ReplyClient { peer: peer.clone(), who: self.who, export: self.name.clone() }
    }

    /// The terms of the leases of a session of this origin.
    pub(crate) fn lease_terms(&self, origin: Origin) -> LeaseTerms {
        let has = |feature: u64| self.features & feature != 0;
        LeaseTerms {
            client: Some(ClientOrigin { client: self.who, origin }),
            term: self.term,
            needs_exclusive_dir_lease: has(EXCLUSIVE_DIR_LEASES),
            confined: self.export.impersonates() && !self.files.is_vouched(),
            takes_updates: has(UPDATES),
            trusts_watch: has(TRUSTS_WATCH),
        }
    }
}
