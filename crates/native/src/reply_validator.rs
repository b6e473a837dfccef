//! Validation of replies at the client; a server cannot mislead it (invariant 9).

use crate::ProtocolError;
use crate::call::CallType;
use crate::listing_order::ListingOrder;
use crate::prefetch::PrefetchValidator;
use nigh_types::{
    Call, CallId, Cookie, CookieKey, Entry, Handle, Kind, Mode, NodeId, NodeRef, Reply, Response, Time,
};

/// What the reply to an outstanding call may be.
#[derive(Clone, Debug)]
pub(crate) struct ReplyValidator {
    pub(crate) sent: Time,
    /// It waits for a lock.
    pub(crate) lock_wait: bool,
    /// Its reply shows that the server renews the session. Write-back of mmap stores does not: a suspect's is answered
    /// too.
    pub(crate) renews: bool,
    call_type: CallType,
    /// The node that the reply must be about.
    node: Option<NodeId>,
    /// The number of the node that the reply must be about.
    number: Option<u64>,
    /// The handle that the reply must carry.
    handle: Option<Handle>,
    /// Bytes that a read or write may report at the most.
    count: u64,
    /// Type of the inode that the call creates.
    kind: Option<Kind>,
    /// Whether the reply may carry the handle of a file that is kept open.
    pin: bool,
    /// Whether it may name a whiteout.
    whiteout: bool,
    /// Position of a listing.
    behind: ListingOrder,
    /// Of a listing that restarted: the cookie up to which entries were passed on before.
    seen: Option<Cookie>,
    /// Of a prefetch.
    prefetch: Option<Box<PrefetchValidator>>,
}

impl ReplyValidator {
    pub(crate) fn of(call: &Call, sent: Time) -> ReplyValidator {
        let node = match call {
            Call::GetAttr { node }
            | Call::SetAttr { node, .. }
            | Call::Fallocate { node, .. }
            | Call::SetXattr { node, .. }
            | Call::RemoveXattr { node, .. }
            | Call::Link { node, .. } => Some(node.node),
            _ => None,
        };
        let count = match call {
            Call::Read { length, .. } => u64::from(*length),
            Call::Write { data, .. } => data.len() as u64,
            Call::CopyRange { length, .. } => *length,
            _ => 0,
        };
        let kind = match call {
            Call::Create { .. } | Call::Tmpfile { .. } => Some(Kind::File),
            Call::Mknod { kind, .. } => Some(*kind),
            Call::Mkdir { .. } => Some(Kind::Directory),
            Call::Symlink { .. } => Some(Kind::Symlink),
            _ => None,
        };
        let pin = match call {
            Call::Unlink { keep, .. } | Call::Rename { keep, .. } => keep.is_some(),
            _ => false,
        };
        let whiteout = matches!(call, Call::Rename { whiteout: true, .. });
        let handle = match call {
            Call::Reopen { handle, .. } => Some(*handle),
            _ => None,
        };
        let number = match call {
            Call::LookupNumber { ino } => Some(*ino),
            _ => None,
        };
        let (lock_wait, call_type) = (call.waits_for_lock(), CallType::of(call));
        let renews = !call.is_write_back();
        let prefetch = match call {
            Call::Prefetch { roots, credit, .. } => Some(Box::new(PrefetchValidator::new(roots, *credit))),
            _ => None,
        };
        let behind = match call {
            Call::ListNames { after, .. } => ListingOrder::from(*after),
            _ => ListingOrder::default(),
        };
        let seen = None;
        ReplyValidator {
            sent,
            lock_wait,
            renews,
            call_type,
            node,
            number,
            handle,
            count,
            kind,
            pin,
            whiteout,
            behind,
            seen,
            prefetch,
        }
    }

    /// Extends a prefetch.
    pub(crate) fn add_credit(&mut self, credit: u32, want: Option<&NodeRef>) {
        if let Some(walk) = &mut self.prefetch {
            walk.add_credit(credit, want);
        }
    }

    /// Whether the call ends with its session: a prefetch, or a names-only listing.
    pub(crate) fn ends_with_session(&self) -> bool {
        self.prefetch.is_some() || self.call_type == CallType::ListNames
    }

    /// Whether it looks up an inode by its number, which not every server supports.
    pub(crate) fn looks_up_number(&self) -> bool {
        self.number.is_some()
    }

    /// Restarts the call, which is sent again and answered from the beginning.
    pub(crate) fn restart(&mut self, sent: Time) {
        self.sent = sent;
        self.seen = self.behind.restart().max(self.seen);
    }

    /// Removes entries that were passed on before from a chunk of a listing: a scan goes on where it was (S7).
    pub(crate) fn drop_seen(&self, response: &mut Response, key: CookieKey) {
        if let (Some(seen), Ok(Reply::Listed(listed))) = (self.seen, &mut response.result) {
            listed.entries.retain(|(name, _)| key.cookie(name.as_bytes()) > seen);
        }
    }

    /// Checks a response that came to this call.
    pub(crate) fn check(
        &mut self,
        call: CallId,
        response: &Response,
        key: CookieKey,
    ) -> Result<(), ProtocolError> {
        let wrong = |what| Err(ProtocolError::WrongReply { call, what });
        let parted = matches!(self.call_type, CallType::List | CallType::ListNames | CallType::Prefetch);
        if !response.last && (!parted || response.result.is_err()) {
            return wrong("more is to follow");
        }
        // No call asks for a write grant.
        if response.grants.iter().any(|grant| grant.mode == Mode::Write) {
            return wrong("a write grant that was not asked for");
        }
        match &response.result {
            Err(_) => Ok(()),
            Ok(Reply::Listed(listed)) if self.call_type == CallType::List => {
                self.behind.take(call, listed.entries.iter().map(|(name, _)| name), key)
            }
            Ok(Reply::Dirents(dirents)) if self.call_type == CallType::ListNames => {
                self.behind.take(call, dirents.iter().map(|dirent| &dirent.name), key)
            }
            Ok(Reply::Prefetched(steps)) => match &mut self.prefetch {
                Some(walk) => walk.check(call, steps, key),
                None => wrong("another kind of reply"),
            },
            Ok(reply) if self.fits(reply) => self.check_fields(reply).or_else(wrong),
            Ok(_) => wrong("another kind of reply"),
        }
    }

    fn fits(&self, reply: &Reply) -> bool {
        use CallType as C;
        match reply {
            Reply::Entry(_) => self.call_type == C::Lookup,
            Reply::Attr(..) => matches!(
                self.call_type,
                C::GetAttr | C::SetAttr | C::Fallocate | C::SetXattr | C::RemoveXattr
            ),
            Reply::Found { .. } => self.call_type == C::LookupNumber,
            Reply::Listed(_) => self.call_type == C::List,
            Reply::Names(_) | Reply::Dirents(_) | Reply::Prefetched(_) => false,
            Reply::Target(_) => self.call_type == C::ReadLink,
            Reply::Xattrs(_) => self.call_type == C::Xattrs,
            Reply::Value(_) => self.call_type == C::Xattr,
            Reply::Space(_) => self.call_type == C::StatFs,
            Reply::Opened { .. } => matches!(self.call_type, C::Open | C::Reopen),
            Reply::Data(_) => self.call_type == C::Read,
            Reply::Offset(_) => self.call_type == C::Seek,
            Reply::Flags(_) => self.call_type == C::GetFlags,
            Reply::Created { .. } => {
                matches!(self.call_type, C::Create | C::Tmpfile | C::Mknod | C::Mkdir | C::Symlink | C::Link)
            }
            Reply::Removed { .. } => matches!(self.call_type, C::Unlink | C::Rmdir),
            Reply::Renamed { .. } => self.call_type == C::Rename,
            Reply::Written { .. } => matches!(self.call_type, C::Write | C::CopyRange),
            Reply::Done => matches!(self.call_type, C::ResolvePath | C::Fsync | C::Lock | C::Unlock),
            Reply::LockConflict(_) => self.call_type == C::GetLock,
        }
    }

    fn check_fields(&self, reply: &Reply) -> Result<(), &'static str> {
        let counted = |count: u64| if count > self.count { Err("more bytes than asked") } else { Ok(()) };
        match reply {
            Reply::Opened { handle, .. } if self.handle.is_some_and(|asked| asked != *handle) => {
                Err("another handle than the one claimed")
            }
            Reply::Attr(node, _) if self.node != Some(*node) => Err("attributes of another node"),
            Reply::Found { node, .. } if self.number != Some(node.ino) => Err("a node of another number"),
            Reply::Data(data) => counted(data.len() as u64),
            Reply::Written { count, .. } => counted(*count),
            Reply::Created { entry, handle, .. } => self.check_made(entry, handle.is_some()),
            Reply::Removed { pinned: kept, .. } | Reply::Renamed { pinned: kept, .. }
                if kept.is_some() && !self.pin =>
            {
                Err("a handle that was not asked for")
            }
            Reply::Renamed { whiteout: Some(_), .. } if !self.whiteout => {
                Err("a whiteout that was not asked for")
            }
            _ => Ok(()),
        }
    }

    fn check_made(&self, entry: &Entry, opened: bool) -> Result<(), &'static str> {
        if opened != matches!(self.call_type, CallType::Create | CallType::Tmpfile) {
            return Err("a handle is missing or too many");
        }
        if self.call_type == CallType::Link && self.node != Some(entry.id) {
            return Err("a link to another node");
        }
        match self.kind {
            Some(kind) if entry.attr.kind() != kind => Err("an inode of another type"),
            _ => Ok(()),
        }
    }
}
