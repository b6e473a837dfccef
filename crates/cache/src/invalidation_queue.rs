//! Invalidations and replies that must follow an outstanding GETATTR reply (see `kernel/queue.rs`).

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::kernel::{DeferredReply, QueuedKind};
use crate::op::{InvalidationId, KernelInvalidation, OpReply, Output, Urgency};
use crate::store::UntimedCopy;
use nigh_types::{Attr, Call, CallId, Name, NodeId, OpId, Reply, Response, Span, Time};

impl Cache {
    /// Queues an invalidation until no caller waits for attributes of its files. Dentries and listings are invalidated
    /// at once unless a queued reply may create one, or `acknowledged` requires all of `stale` in one invalidation.
    pub(crate) fn enqueue_invalidation(
        &mut self,
        id: InvalidationId,
        mut stale: Vec<KernelInvalidation>,
        acknowledged: bool,
    ) {
        let asked = self.attr_waiters(&stale);
        let waits = !asked.is_empty() || self.kernel.has_queued();
        if waits && !self.kernel.has_queued_replies() {
            let names = stale.iter().filter(|one| self.is_of_dentries(one)).count();
            if names == stale.len() {
                return self.emit(QueuedKind::Invalidate(id, stale));
            }
            if names > 0 && !acknowledged {
                let names = stale.extract_if(.., |one| self.is_of_dentries(one)).collect();
                let id = self.kernel.new_invalidation();
                self.emit(QueuedKind::Invalidate(id, names));
            }
        }
        self.enqueue(QueuedKind::Invalidate(id, stale), asked);
    }

    fn is_of_dentries(&self, stale: &KernelInvalidation) -> bool {
        match stale {
            KernelInvalidation::Entry { .. }
            | KernelInvalidation::RemovedDentry { .. }
            | KernelInvalidation::AllDentries(_) => true,
            KernelInvalidation::Data { ino, .. } => self.store.is_directory(*ino),
            KernelInvalidation::Attr { .. } => false,
        }
    }

    /// Drops invalidations of attributes that the kernel does not trust and has not received since the last
    /// invalidation. Such an invalidation would only make the kernel discard its next reply.
    pub(crate) fn drop_untrusted(&mut self, stale: &mut Vec<KernelInvalidation>) {
        self.with_targets(stale);
        stale.retain(|one| match one {
            // The kernel keeps the set-user-ID bits of its last reply until the notifier has invalidated the
            // attributes.
            KernelInvalidation::Attr { ino } => self.store.inode_mut(*ino).is_none_or(|inode| {
                std::mem::take(&mut inode.kernel_has_attr) || inode.has_copy(UntimedCopy::Acls)
            }),
            _ => true,
        });
    }

    /// Queues a reply to a local change of `files`, which the kernel treats as newer than any outstanding reply.
    pub(crate) fn enqueue_reply(&mut self, files: &[u64], ops: &[OpId], late: DeferredReply) {
        self.flush_due();
        let follows = self.kernel.inodes_of_queued_replies().any(|ino| files.contains(&ino));
        let files: Vec<KernelInvalidation> =
            files.iter().map(|ino| KernelInvalidation::Attr { ino: *ino }).collect();
        let asked = self.attr_waiters(&files);
        if ops.is_empty() || asked.is_empty() && !follows {
            return self.reply_without_older_attr(ops, late.answer, late.sent);
        }
        self.enqueue(QueuedKind::Answers(ops.to_vec(), late), asked);
    }

    /// Records the attributes of a reply: the caller may read up to their size until it applies a newer reply.
    pub(crate) fn note_getattr_reply(&mut self, ino: u64, attr: Attr) {
        if self.reads_by_size(ino)
            && let Some(inode) = self.store.inode_mut(ino)
        {
            inode.ext_mut().last_getattr = Some(Box::new((self.clock, attr)));
        }
    }

    /// Delivers a reply without ungranted attributes that are older than those of another reply: the caller would read
    /// up to the older size. A caller that needs exact attributes asks again.
    fn reply_without_older_attr(&mut self, ops: &[OpId], mut answer: OpReply, sent: Option<Time>) {
        let (ino, attr, keeps) = match &mut answer {
            OpReply::Node(node) if node.attr_valid == Span::ZERO => (node.id.ino, &mut node.attr, false),
            OpReply::Attr(id, attr, Span::ZERO) => (id.ino, attr, true),
            _ => return self.reply_all(ops, &answer),
        };
        let last = self.store.inode(ino).and_then(|inode| inode.last_getattr.as_deref());
        if let Some((_, last)) = last.filter(|(at, _)| sent.is_some_and(|sent| sent <= *at)) {
            *attr = if keeps { Attr { size: last.size, ..*attr } } else { *last };
        }
        self.reply_all(ops, &answer);
    }

    /// Returns whether a reply may carry attributes older than those of replies in between. A reply that sets the size
    /// does not.
    pub(crate) fn may_predate_replies(flight: &InflightCall) -> bool {
        !matches!(&flight.resend, Some(Call::SetAttr { set, .. }) if set.size.is_some())
    }

    /// Returns the files of a change whose attributes other callers await. This includes files that lose a name, as
    /// seen by the kernel (`fuse_entry_unlinked`) or by the remote, and files that gain one.
    pub(crate) fn changed_files_awaited(&self, purpose: &CallKind, response: &Response) -> Vec<u64> {
        let named = match &response.result {
            Ok(Reply::Created { entry, .. }) => Some(entry.id.ino),
            Ok(Reply::Removed { node, .. }) => Some(node.ino),
            Ok(Reply::Renamed { replaced, .. }) => replaced.map(|node| node.ino),
            _ => None,
        };
        let itself = match purpose {
            CallKind::Write { ino, writeback: false, .. } | CallKind::Change { ino, .. } => Some(*ino),
            _ => None,
        };
        let names = purpose.names();
        if named.is_none() && itself.is_none() && names.is_empty() {
            return Vec::new();
        }
        let is_at = |ino: u64| {
            let inode = self.store.inode(ino);
            inode.is_some_and(|inode| names.iter().any(|(dir, name)| inode.is_at(*dir, name)))
        };
        let asked = self.calls.inodes_with_attr_call();
        let told = self.kernel.inodes_of_queued_replies();
        asked.chain(told).filter(|ino| named == Some(*ino) || itself == Some(*ino) || is_at(*ino)).collect()
    }

    fn enqueue(&mut self, what: QueuedKind, asked: Vec<OpId>) {
        if let Some(what) = self.kernel.enqueue(self.clock, what, asked) {
            self.emit(what);
        }
    }

    fn emit(&mut self, what: QueuedKind) {
        match what {
            QueuedKind::Invalidate(id, stale) => {
                self.out.push_back(Output::Invalidate { id, stale, urgency: Urgency::Ordinary })
            }
            QueuedKind::Answers(ops, late) => self.deliver_late(&ops, late),
        }
    }

    /// Delivers a queued reply with what is left of its entry and attribute timeouts.
    fn deliver_late(&mut self, ops: &[OpId], DeferredReply { mut answer, sent, name }: DeferredReply) {
        match &mut answer {
            OpReply::Node(node) | OpReply::Created(node, _) => {
                node.entry_valid = node.entry_valid.min(self.remaining_entry_timeout(name.as_ref(), node.id));
                node.attr_valid = node.attr_valid.min(self.remaining_attr_timeout(node.id));
            }
            OpReply::Attr(id, _, valid) => *valid = (*valid).min(self.remaining_attr_timeout(*id)),
            _ => {}
        }
        self.reply_without_older_attr(ops, answer, sent);
    }

    /// Returns the entry timeout of a name that still leads to the inode.
    fn remaining_entry_timeout(&self, name: Option<&(u64, Name)>, id: NodeId) -> Span {
        let now = self.clock;
        let named = || {
            let (dir, name) = name?;
            if self.changes_frequently(now, *dir)
                || self.watches.is_reporting(*dir)
                || self.store.suspended.has_name(*dir, name)
            {
                return None;
            }
            let directory = self.store.dir(*dir)?;
            let held = directory.held.filter(|held| held.is_live(now))?;
            let row = directory.rows.find(self.store.cookie(name), name.as_bytes())?;
            row.child.filter(|child| child.id == id)?;
            Some(self.kernel.level().entry_timeout(&held, now))
        };
        named().unwrap_or(Span::ZERO)
    }

    fn remaining_attr_timeout(&mut self, id: NodeId) -> Span {
        let Some((attr, held)) = self.cached_attr(self.clock, id) else { return Span::ZERO };
        self.attr_timeout(self.clock, id.ino, &attr, Some(held))
    }

    /// Returns the requests that wait for attributes of open files in `stale`.
    fn attr_waiters(&self, stale: &[KernelInvalidation]) -> Vec<OpId> {
        if !self.calls.has_attr_calls() {
            return Vec::new();
        }
        let files = stale.iter().filter_map(|one| match one {
            KernelInvalidation::Attr { ino } | KernelInvalidation::Data { ino, .. }
                if self.reads_by_size(*ino) =>
            {
                Some(ino)
            }
            _ => None,
        });
        let flights = files.filter_map(|ino| self.calls.get(self.calls.attr_call(*ino)?));
        flights.flat_map(|flight| flight.waiters.iter().copied()).collect()
    }

    /// Returns whether a caller waits for attributes and will read up to the size in the reply.
    #[must_use]
    pub fn has_size_waiter(&self, ino: u64) -> bool {
        !self.attr_waiters(&[KernelInvalidation::Attr { ino }]).is_empty()
    }

    /// Returns whether a caller may read up to the size in a GETATTR reply for this inode.
    #[must_use]
    pub fn reads_by_size(&self, ino: u64) -> bool {
        self.is_open(ino) && !self.store.is_directory(ino)
    }

    /// Moves the waiters of an older call to a newer call.
    pub(crate) fn wait_for_newer(&mut self, older: CallId, newer: CallId) {
        if older == newer || !self.calls.contains(newer) {
            return;
        }
        let Some(flight) = self.calls.get_mut(older) else { return };
        let waiters = std::mem::take(&mut flight.waiters);
        self.calls.move_waiters(waiters, newer);
    }

    /// Delivers the reply to a finished change that waits in the queue for a GETATTR reply, because no later
    /// invalidation would cover it. If the kernel is about to drop everything, the request gets no reply and the result
    /// is false.
    pub(crate) fn deliver_now(&mut self, op: OpId) -> bool {
        let Some(late) = self.kernel.take_queued_reply(op) else { return false };
        if self.waits_for_kernel() {
            self.undo_reply(late.answer);
            return false;
        }
        self.deliver_late(&[op], late);
        true
    }

    /// Undoes the effects of a reply that no caller receives: the open file and the lookup count.
    fn undo_reply(&mut self, answer: OpReply) {
        if let OpReply::Created(_, opened) = &answer {
            self.release(self.clock, opened.fh, None);
        }
        if let OpReply::Node(node) | OpReply::Created(node, _) = answer {
            self.handle_forget(node.number, 1);
        }
    }

    /// Delivers the queued items that need not wait any longer.
    pub(crate) fn flush_due(&mut self) {
        while self.queue_due().is_some_and(|due| due <= self.clock)
            && let Some(what) = self.kernel.dequeue()
        {
            self.emit(what);
        }
    }

    /// Returns whether an invalidation or a reply is queued.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        self.kernel.has_queued()
    }

    /// Returns when the first queued item is due. No reply is delivered while the kernel still drops what it held when
    /// the session was lost.
    pub(crate) fn queue_due(&self) -> Option<Time> {
        self.kernel.queue_due(self.waits_for_kernel(), |op| self.calls.is_waiting(op))
    }

    /// Delivers all queued invalidations at once: all grants have ended, so no reply will come.
    pub(crate) fn flush_invalidations(&mut self) {
        self.kernel.dequeue_invalidations().into_iter().for_each(|item| self.emit(item));
    }
}

#[cfg(test)]
mod tests;
