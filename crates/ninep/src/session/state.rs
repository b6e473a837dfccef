//! State that the coroutines of a session share.

use super::config::Config;
use super::files::Files;
use super::greeting::Greeting;
use super::messages::Messages;
use super::node_ids::{Nodes, node_id};
use super::prefetch_jobs::PrefetchJob;
use super::users::Users;
use crate::{ProtocolError, Qid};
use nigh_pathclient::{InodeNumbers, Schedule};
use nigh_types::{CallId, GrantId, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// The most fids that are kept for nodes, of all users together.
const MOST_NODE_FIDS: usize = 4_096;

/// State shared by the coroutines of a session.
pub(crate) struct SessionState {
    pub config: Config,
    /// The agreed size of the longest message.
    pub msize: u32,
    pub messages: Messages,
    pub nodes: Nodes,
    pub users: Users,
    pub files: Files,
    /// Number of changes that were replied to.
    pub changes: u64,
    /// Prefetches that are running.
    pub prefetches: BTreeMap<CallId, PrefetchJob>,
    /// Whether the server supports Trenameat and Tunlinkat; they are used until it refuses them.
    pub renameat: bool,
    pub unlinkat: bool,
    /// Calls that were cancelled: they are not made again.
    pub cancelled: BTreeSet<CallId>,
    /// Result of the handshake.
    pub greeting: Option<Greeting>,
    /// The rule that the server broke.
    pub violation: Option<ProtocolError>,
    next_grant: u64,
}

impl SessionState {
    pub fn new(config: Config, schedule: Schedule, numbers: InodeNumbers) -> SessionState {
        SessionState {
            msize: config.msize,
            messages: Messages::new(schedule),
            nodes: Nodes::new(MOST_NODE_FIDS, numbers),
            users: Users::default(),
            files: Files::default(),
            changes: 0,
            prefetches: BTreeMap::new(),
            renameat: true,
            unlinkat: true,
            cancelled: BTreeSet::new(),
            greeting: None,
            violation: None,
            next_grant: 0,
            config,
        }
    }

    /// Forgets the connection with its messages and fids.
    pub fn forget_connection(&mut self) {
        self.messages.forget_connection();
        self.nodes.clear();
        self.users = Users::default();
        self.files.forget_fids();
    }

    /// The node id for a qid.
    pub fn node(&self, qid: Qid) -> NodeId {
        node_id(&self.nodes, qid)
    }

    pub fn new_grant(&mut self) -> GrantId {
        self.next_grant += 1;
        GrantId(self.next_grant)
    }

    /// The most data that one message can carry.
    pub fn most_data(&self) -> u32 {
        // `Twrite` has a header of 23 bytes, and Linux keeps 24 free (`P9_IOHDRSZ`).
        self.msize - 24
    }
}
