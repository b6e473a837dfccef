//! A call in flight, and a request that waits for one.

use super::{CallKind, RaceLog, ReplyKind};
use crate::op::{Caller, Fh, Op};
use nigh_types::{Attr, Call, CallId, Grant, Handle, LeaseScope, Name, NodeId, OpId, Response, Time};

/// Request that waits for a call.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub call: CallId,
    pub caller: Caller,
    pub want: ReplyKind,
    pub joined: bool,
    /// The request came after the call was sent. The reply may predate the request, so it answers the request only if a
    /// grant says that nothing has changed since.
    pub reply_may_predate: bool,
    /// Open files that the request uses.
    pub open_files: [Option<Fh>; 2],
}

#[derive(Clone, Debug)]
pub(crate) struct InflightCall {
    pub purpose: CallKind,
    /// [`Call::type_name`].
    pub call_name: &'static str,
    /// Handles that the call uses.
    pub handles: [Option<Handle>; 2],
    pub sent: Time,
    pub caller: Option<Caller>,
    /// Kept to resend the call after a `ResolvePath`; `None` if the call is never resent.
    pub resend: Option<Call>,
    /// Number of `ResolvePath` calls sent for this call.
    pub resolve_attempts: usize,
    /// The number of the mutation id; `None`: the call is no mutation.
    pub sequence: Option<u64>,
    pub waiters: Vec<OpId>,
    pub race_log: RaceLog,
    /// A chunk of the reply has arrived.
    pub has_chunk: bool,
    /// For a listing: the grants of its chunks.
    pub grants: Vec<Grant>,
    /// For a listing that no grant covers: its entries.
    pub detached_entries: Option<Box<crate::store::DirEntries>>,
    /// For a listing over the memory bound: later chunks are dropped.
    pub abandoned: bool,
    /// The pages of this call are invalidated right after its reply, for example because a data recall has passed it.
    pub drop_data: bool,
    /// For a removal: the directory that the kernel takes for the victim.
    pub victim_dir: Option<NodeId>,
    /// For a read: a local write of its pages was sent after it.
    pub read_before_write: bool,
    /// For a write: its bytes in pages that it fills in part, with their offsets.
    pub written: Vec<(u64, Vec<u8>)>,
    /// For a write-back of mmap stores: the request, to start it again.
    pub writeback_op: Option<Box<Op>>,
}

impl InflightCall {
    pub fn new(purpose: CallKind, call_name: &'static str, sent: Time) -> InflightCall {
        InflightCall {
            purpose,
            call_name,
            handles: [None; 2],
            sent,
            caller: None,
            resend: None,
            resolve_attempts: 0,
            sequence: None,
            waiters: Vec::new(),
            race_log: RaceLog::default(),
            has_chunk: false,
            grants: Vec::new(),
            detached_entries: None,
            abandoned: false,
            drop_data: false,
            victim_dir: None,
            read_before_write: false,
            written: Vec::new(),
            writeback_op: None,
        }
    }

    /// Returns whether these facts were recalled after the call was sent: the reply may be older than the cache.
    pub fn recalled(&self, node: NodeId, covers: LeaseScope) -> bool {
        self.race_log.has_recall_of(node, covers)
    }

    pub fn is_mutation(&self) -> bool {
        self.sequence.is_some()
    }

    /// Returns whether this is a lock call without a waiter.
    pub fn is_unwanted_lock(&self) -> bool {
        matches!(self.purpose, CallKind::Lock { cancelled, .. } if cancelled || self.waiters.is_empty())
    }

    /// Returns whether this is a change without a waiter.
    pub fn is_abandoned(&self) -> bool {
        self.is_mutation() && self.waiters.is_empty()
    }

    /// Returns whether a later reply bound the name to something else than `id`.
    pub fn is_contradicted(&self, dir: u64, name: &Name, id: Option<NodeId>) -> bool {
        self.race_log.name(dir, name).is_some_and(|learned| learned.id != id)
    }

    /// Returns whether the reply to a change may be older than the directory lease: the lease came after the call was
    /// sent, and the reply carries none.
    pub fn may_predate_lease(&self, dir: NodeId, grants: &[Grant]) -> bool {
        self.race_log.granted_dirs.contains(&dir.ino)
            && self.granted(grants, dir, LeaseScope::Directory).is_none()
    }

    /// Returns the reply's grant on these facts, unless a recall overtook the reply.
    pub fn granted<'a>(&self, grants: &'a [Grant], node: NodeId, covers: LeaseScope) -> Option<&'a Grant> {
        if self.recalled(node, covers) { None } else { crate::grants::on(grants, node, covers) }
    }
}

/// Returns the attributes of an inode that a reply carried.
pub(crate) fn attr_after(response: &Response, ino: u64) -> Option<Attr> {
    response.after.iter().find(|(node, _)| node.ino == ino).map(|(_, attr)| *attr)
}
