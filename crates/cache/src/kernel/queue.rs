//! Queue of invalidations and replies that must follow an outstanding GETATTR reply.
//!
//! A thread that does not know a file's size sends GETATTR and then reads up to the size that its kernel holds for the
//! file. The kernel discards a GETATTR reply if it applied another reply, or an invalidation of the file, after the
//! request was sent (`fi->attr_version` in `fuse_change_attributes`). The thread would then read up to an old size.
//!
//! For an open file, an older GETATTR reply therefore waits for the newer one. Invalidations and replies to local
//! changes wait for every GETATTR that was sent earlier. The notifier waits until the callers have consumed those
//! replies.

use super::Kernel;
use crate::op::{InvalidationId, KernelInvalidation, OpReply};
use nigh_types::{Name, OpId, Span, Time};

/// Upper bound on the wait for GETATTR replies: other clients may wait for a queued invalidation.
pub(crate) const MAX_REPLY_WAIT: Span = Span::from_millis(1_000);

/// Queued invalidation or reply.
#[derive(Clone, Debug)]
pub(crate) struct QueuedItem {
    item: QueuedKind,
    /// Requests for attributes: the item waits for their replies,
    waits_for: Vec<OpId>,
    /// but no longer than until this moment.
    deadline: Time,
}

#[derive(Clone, Debug)]
pub(crate) enum QueuedKind {
    Invalidate(InvalidationId, Vec<KernelInvalidation>),
    /// Replies to a local change; the kernel treats them as newer than any reply to an earlier GETATTR.
    Answers(Vec<OpId>, DeferredReply),
}

/// Reply that may be delivered later.
#[derive(Clone, Debug)]
pub(crate) struct DeferredReply {
    pub answer: OpReply,
    /// Send time of the call, if the reply may carry attributes older than those of a later reply.
    pub sent: Option<Time>,
    /// The dentry that the reply is about.
    pub name: Option<(u64, Name)>,
}

impl QueuedKind {
    fn is_answers(&self) -> bool {
        matches!(self, QueuedKind::Answers(..))
    }

    /// Returns the inode to which a queued reply binds a name.
    fn bound_inode(&self) -> Option<u64> {
        match self {
            QueuedKind::Answers(
                _,
                DeferredReply { answer: OpReply::Node(node) | OpReply::Created(node, _), .. },
            ) => Some(node.id.ino),
            _ => None,
        }
    }
}

impl Kernel {
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    pub fn has_queued_replies(&self) -> bool {
        self.queue.iter().any(|queued| queued.item.is_answers())
    }

    /// Returns the inodes to which queued replies bind names: replies to local changes of these must follow.
    pub fn inodes_of_queued_replies(&self) -> impl Iterator<Item = u64> {
        self.queue.iter().filter_map(|queued| queued.item.bound_inode())
    }

    /// Queues an item behind the requests in `waits_for`, unless it need not wait: then it is returned.
    #[must_use]
    pub fn enqueue(&mut self, now: Time, item: QueuedKind, waits_for: Vec<OpId>) -> Option<QueuedKind> {
        if self.queue.is_empty() && waits_for.is_empty() {
            return Some(item);
        }
        self.queue.push_back(QueuedItem { item, waits_for, deadline: now.after(MAX_REPLY_WAIT) });
        None
    }

    /// Returns when the first item is due. `holds_replies`: no reply is delivered now.
    pub fn queue_due(&self, holds_replies: bool, is_waiting: impl Fn(OpId) -> bool) -> Option<Time> {
        let first = self.queue.front().filter(|first| !(first.item.is_answers() && holds_replies))?;
        let is_asked = first.waits_for.iter().any(|op| is_waiting(*op));
        Some(if is_asked { first.deadline } else { Time(0) })
    }

    pub fn dequeue(&mut self) -> Option<QueuedKind> {
        self.queue.pop_front().map(|queued| queued.item)
    }

    /// Takes all queued invalidations; replies stay.
    pub fn dequeue_invalidations(&mut self) -> Vec<QueuedKind> {
        let (replies, invalidations) =
            std::mem::take(&mut self.queue).into_iter().partition(|queued| queued.item.is_answers());
        self.queue = replies;
        invalidations.into_iter().map(|queued: QueuedItem| queued.item).collect()
    }

    /// Takes the queued reply to one request.
    pub fn take_queued_reply(&mut self, op: OpId) -> Option<DeferredReply> {
        self.queue.iter_mut().find_map(|queued| match &mut queued.item {
            QueuedKind::Answers(ops, late) if ops.contains(&op) => {
                ops.retain(|other| *other != op);
                Some(late.clone())
            }
            _ => None,
        })
    }
}
