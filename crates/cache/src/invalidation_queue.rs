//! Queue of kernel invalidations and replies that must follow an outstanding GETATTR reply.
//!
//! A thread that does not know a file's size sends GETATTR and then reads up to the size that its kernel holds for the
//! file. The kernel discards a GETATTR reply if it applied another reply, or an invalidation of the file, after the
//! request was sent (`fi->attr_version` in `fuse_change_attributes`). The thread would then read up to an old size.
//!
//! For an open file, an older GETATTR reply therefore waits for the newer one. Invalidations and replies to local
//! changes wait for every GETATTR that was sent earlier. The notifier waits until the callers have consumed those
//! replies.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::op::{Answer, Invalidation, KernelInvalidation, Output};
use crate::state::Copies;
use nigh_types::{Attr, Call, CallId, Name, NodeId, OpId, Reply, Response, Span, Time};
use std::collections::VecDeque;

/// Upper bound on the wait for GETATTR replies: other clients may wait for a queued invalidation.
const ANSWERS_WAIT: Span = Span::from_millis(1_000);

/// Queued invalidation or reply.
#[derive(Clone, Debug)]
pub(crate) struct QueuedItem {
    what: What,
    /// Requests for attributes: the item waits for their replies,
    asked: Vec<OpId>,
    /// but no longer than until this moment.
    latest: Time,
}

#[derive(Clone, Debug)]
enum What {
    Forget(Invalidation, Vec<KernelInvalidation>),
    /// Replies to a local change; the kernel treats them as newer than any reply to an earlier GETATTR.
    Answers(Vec<OpId>, DeferredReply),
}

/// Reply that may be delivered later.
#[derive(Clone, Debug)]
pub(crate) struct DeferredReply {
    pub answer: Answer,
    /// Send time of the call, if the reply may carry attributes older than those of a later reply.
    pub sent: Option<Time>,
    /// The dentry that the reply is about.
    pub name: Option<(u64, Name)>,
}

/// Returns the inode to which a queued reply binds a name.
fn led_to(what: &What) -> Option<u64> {
    match what {
        What::Answers(_, DeferredReply { answer: Answer::Node(node) | Answer::Created(node, _), .. }) => {
            Some(node.id.ino)
        }
        _ => None,
    }
}

/// Queue in delivery order.
pub(crate) type Behinds = VecDeque<QueuedItem>;

impl Cache {
    /// Queues an invalidation until no caller waits for attributes of its files. Dentries and listings are invalidated
    /// at once unless a queued reply may create one, or `acknowledged` requires all of `stale` in one invalidation.
    pub(crate) fn enqueue_invalidation(
        &mut self,
        id: Invalidation,
        mut stale: Vec<KernelInvalidation>,
        acknowledged: bool,
    ) {
        let asked = self.readers_of(&stale);
        let waits = !(asked.is_empty() && self.behind.is_empty());
        if waits && !self.behind.iter().any(|behind| matches!(behind.what, What::Answers(..))) {
            let names = stale.iter().filter(|one| self.is_of_names(one)).count();
            if names == stale.len() {
                return self.put_out(What::Forget(id, stale));
            }
            if names > 0 && !acknowledged {
                let names = stale.extract_if(.., |one| self.is_of_names(one)).collect();
                let id = self.new_invalidation();
                self.put_out(What::Forget(id, names));
            }
        }
        self.put_behind(What::Forget(id, stale), asked);
    }

    fn is_of_names(&self, stale: &KernelInvalidation) -> bool {
        match stale {
            KernelInvalidation::Entry { .. }
            | KernelInvalidation::Gone { .. }
            | KernelInvalidation::AllDentries(_) => true,
            KernelInvalidation::Data { ino, .. } => self.is_directory(*ino),
            KernelInvalidation::Attr { .. } => false,
        }
    }

    /// Drops invalidations of attributes that the kernel does not trust and has not received since the last
    /// invalidation. Such an invalidation would only make the kernel discard its next reply.
    pub(crate) fn leave_out_unbelieved(&mut self, stale: &mut Vec<KernelInvalidation>) {
        self.with_targets(stale);
        stale.retain(|one| match one {
            // The kernel keeps the set-user-ID bits of its last reply until the notifier has invalidated the
            // attributes.
            KernelInvalidation::Attr { ino } => self.inodes.get_mut(ino).is_none_or(|inode| {
                std::mem::take(&mut inode.kernel_has_attr) || inode.has_copy(Copies::Acls)
            }),
            _ => true,
        });
    }

    /// Queues a reply to a local change of `files`, which the kernel treats as newer than any outstanding reply.
    pub(crate) fn enqueue_reply(&mut self, files: &[u64], ops: &[OpId], late: DeferredReply) {
        self.flush_due();
        let follows = files.iter().any(|ino| self.tells_of(*ino));
        let files: Vec<KernelInvalidation> =
            files.iter().map(|ino| KernelInvalidation::Attr { ino: *ino }).collect();
        let asked = self.readers_of(&files);
        if ops.is_empty() || asked.is_empty() && !follows {
            return self.answer_no_older(ops, late.answer, late.sent);
        }
        self.put_behind(What::Answers(ops.to_vec(), late), asked);
    }

    /// Records the attributes of a reply: the caller may read up to their size until it applies a newer reply.
    pub(crate) fn note_told(&mut self, ino: u64, attr: Attr) {
        if self.reads_by_size(ino)
            && let Some(inode) = self.inodes.get_mut(&ino)
        {
            inode.more().last_told = Some(Box::new((self.clock, attr)));
        }
    }

    /// Delivers a reply without ungranted attributes that are older than those of another reply: the caller would read
    /// up to the older size. A caller that needs exact attributes asks again.
    fn answer_no_older(&mut self, ops: &[OpId], mut answer: Answer, sent: Option<Time>) {
        let (ino, attr, keeps) = match &mut answer {
            Answer::Node(node) if node.attr_valid == Span::ZERO => (node.id.ino, &mut node.attr, false),
            Answer::Attr(id, attr, Span::ZERO) => (id.ino, attr, true),
            _ => return self.answer_all(ops, &answer),
        };
        let last = self.inodes.get(&ino).and_then(|inode| inode.last_told.as_deref());
        if let Some((_, last)) = last.filter(|(at, _)| sent.is_some_and(|sent| sent <= *at)) {
            *attr = if keeps { Attr { size: last.size, ..*attr } } else { *last };
        }
        self.answer_all(ops, &answer);
    }

    /// Returns whether a reply may carry attributes older than those of replies in between. A reply that sets the size
    /// does not.
    pub(crate) fn may_be_older(flight: &InflightCall) -> bool {
        !matches!(&flight.again, Some(Call::SetAttr { set, .. }) if set.size.is_some())
    }

    /// Returns the files of a change whose attributes other callers await. This includes files that lose a name, as
    /// seen by the kernel (`fuse_entry_unlinked`) or by the remote, and files that gain one.
    pub(crate) fn changed_while_asked(&self, purpose: &CallKind, response: &Response) -> Vec<u64> {
        let named = match &response.result {
            Ok(Reply::Created { entry, .. }) => Some(entry.id.ino),
            Ok(Reply::Removed { node, .. }) => Some(node.ino),
            Ok(Reply::Renamed { replaced, .. }) => replaced.map(|node| node.ino),
            _ => None,
        };
        let itself = match purpose {
            CallKind::Write { ino, flush: false, .. } | CallKind::Change { ino, .. } => Some(*ino),
            _ => None,
        };
        let names = purpose.names();
        if named.is_none() && itself.is_none() && names.is_empty() {
            return Vec::new();
        }
        let is_at = |ino: u64| {
            let inode = self.inodes.get(&ino);
            inode.is_some_and(|inode| names.iter().any(|(dir, name)| inode.is_at(*dir, name)))
        };
        let asked = self.attrs.keys().copied();
        let told = self.behind.iter().filter_map(|behind| led_to(&behind.what));
        asked.chain(told).filter(|ino| named == Some(*ino) || itself == Some(*ino) || is_at(*ino)).collect()
    }

    /// Returns whether a queued reply binds a name to that inode: replies to local changes of the inode must follow it.
    fn tells_of(&self, ino: u64) -> bool {
        self.behind.iter().any(|behind| led_to(&behind.what) == Some(ino))
    }

    fn put_behind(&mut self, what: What, asked: Vec<OpId>) {
        if self.behind.is_empty() && asked.is_empty() {
            return self.put_out(what);
        }
        let latest = self.clock.after(ANSWERS_WAIT);
        self.behind.push_back(QueuedItem { what, asked, latest });
    }

    fn put_out(&mut self, what: What) {
        match what {
            What::Forget(id, stale) => self.out.push_back(Output::Invalidate { id, stale, first: false }),
            What::Answers(ops, late) => self.answer_late(&ops, late),
        }
    }

    /// Delivers a queued reply with what is left of its entry and attribute timeouts.
    fn answer_late(&mut self, ops: &[OpId], DeferredReply { mut answer, sent, name }: DeferredReply) {
        match &mut answer {
            Answer::Node(node) | Answer::Created(node, _) => {
                node.entry_valid = node.entry_valid.min(self.still_named(name.as_ref(), node.id));
                node.attr_valid = node.attr_valid.min(self.still_told(node.id));
            }
            Answer::Attr(id, _, valid) => *valid = (*valid).min(self.still_told(*id)),
            _ => {}
        }
        self.answer_no_older(ops, answer, sent);
    }

    /// Returns the entry timeout of a name that still leads to the inode.
    fn still_named(&self, name: Option<&(u64, Name)>, id: NodeId) -> Span {
        let now = self.clock;
        let named = || {
            let (dir, name) = name?;
            if self.is_hot(now, *dir) || self.watches.is_telling(*dir) || self.holds.has_name(*dir, name) {
                return None;
            }
            let directory = self.dirs.get(dir)?;
            let held = directory.held.filter(|held| held.lives(now))?;
            let row = directory.rows.find(self.key.cookie(name.as_bytes()), name.as_bytes())?;
            row.child.filter(|child| child.id == id)?;
            Some(self.config.level.name_validity(&held, now))
        };
        named().unwrap_or(Span::ZERO)
    }

    fn still_told(&mut self, id: NodeId) -> Span {
        let Some((attr, held)) = self.cached_attr(self.clock, id) else { return Span::ZERO };
        self.attr_timeout(self.clock, id.ino, &attr, Some(held))
    }

    /// Returns the requests that wait for attributes of open files in `stale`.
    fn readers_of(&self, stale: &[KernelInvalidation]) -> Vec<OpId> {
        if self.attrs.is_empty() {
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
        let flights = files.filter_map(|ino| self.flights.get(self.attrs.get(ino)?));
        flights.flat_map(|flight| flight.waiters.iter().copied()).collect()
    }

    /// Returns whether a caller waits for attributes and will read up to the size in the reply.
    #[must_use]
    pub fn is_asked_how_long(&self, ino: u64) -> bool {
        !self.readers_of(&[KernelInvalidation::Attr { ino }]).is_empty()
    }

    /// Returns whether a caller may read up to the size in a GETATTR reply for this inode.
    #[must_use]
    pub fn reads_by_size(&self, ino: u64) -> bool {
        self.is_open(ino) && !self.is_directory(ino)
    }

    /// Moves the waiters of an older call to a newer call.
    pub(crate) fn wait_for_newer(&mut self, older: CallId, newer: CallId) {
        if older == newer || !self.flights.contains_key(&newer) {
            return;
        }
        let Some(flight) = self.flights.get_mut(&older) else { return };
        let waiters = std::mem::take(&mut flight.waiters);
        for op in &waiters {
            if let Some(waiting) = self.waiting.get_mut(op) {
                (waiting.call, waiting.late) = (newer, false);
            }
        }
        if let Some(flight) = self.flights.get_mut(&newer) {
            flight.waiters.extend(waiters);
        }
    }

    /// Delivers the reply to a finished change that waits in the queue for a GETATTR reply, because no later
    /// invalidation would cover it. If the kernel is about to drop everything, the request gets no reply and the result
    /// is false.
    pub(crate) fn answer_at_once(&mut self, op: OpId) -> bool {
        let found = self.behind.iter_mut().find_map(|behind| match &mut behind.what {
            What::Answers(ops, late) if ops.contains(&op) => {
                ops.retain(|other| *other != op);
                Some(late.clone())
            }
            _ => None,
        });
        let Some(late) = found else { return false };
        if self.waits_for_kernel() {
            self.take_back(late.answer);
            return false;
        }
        self.answer_late(&[op], late);
        true
    }

    /// Undoes the effects of a reply that no caller receives: the open file and the lookup count.
    fn take_back(&mut self, answer: Answer) {
        if let Answer::Created(_, opened) = &answer {
            self.release(self.clock, opened.fh, None);
        }
        if let Answer::Node(node) | Answer::Created(node, _) = answer {
            self.handle_forget(node.number, 1);
        }
    }

    /// Delivers the queued items that need not wait any longer.
    pub(crate) fn flush_due(&mut self) {
        while self.behind_due().is_some_and(|due| due <= self.clock)
            && let Some(QueuedItem { what, .. }) = self.behind.pop_front()
        {
            self.put_out(what);
        }
    }

    /// Returns whether an invalidation or a reply is queued.
    #[must_use]
    pub fn tells_late(&self) -> bool {
        !self.behind.is_empty()
    }

    /// Returns when the first queued item is due. No reply is delivered while the kernel still drops what it held when
    /// the session was lost.
    pub(crate) fn behind_due(&self) -> Option<Time> {
        let answers = |behind: &&QueuedItem| matches!(behind.what, What::Answers(..));
        let first = self.behind.front().filter(|first| !(answers(first) && self.waits_for_kernel()))?;
        let is_asked = first.asked.iter().any(|op| self.waiting.contains_key(op));
        Some(if is_asked { first.latest } else { Time(0) })
    }

    /// Delivers all queued invalidations at once: all grants have ended, so no reply will come.
    pub(crate) fn tell_all(&mut self) {
        for QueuedItem { what, asked, latest } in std::mem::take(&mut self.behind) {
            match what {
                What::Forget(..) => self.put_out(what),
                What::Answers(..) => self.behind.push_back(QueuedItem { what, asked, latest }),
            }
        }
    }
}

#[cfg(test)]
mod tests;
