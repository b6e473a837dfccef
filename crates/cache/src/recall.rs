//! End of grants: recalls, deadlines on open inodes, and the end of all grants at once.

use crate::byte_ranges::{clip, complement, pages};
use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall};
use crate::config::OnDisconnect;
use crate::grants::LiveGrant;
use crate::kernel::{MAX_SINGLE_DENTRIES, NotifyLevel, OnInvalidated};
use crate::op::{InvalidationId, KernelInvalidation, Output, Urgency};
use crate::open::OpenFile;
use crate::store::{CachedData, CachedPages, ChangeToken, Inode};
use nigh_types::{
    Attr, Bug, Call, DataVersion, Errno, Grant, LeaseScope, Name, NodeId, Recall, Reply, Response, Span,
    Time, planted,
};
use std::collections::BTreeSet;

/// Time before its end at which a data grant on an open file is renewed.
const RENEW_BEFORE: Span = Span::from_millis(1_000);

impl Cache {
    /// Handles a recall: refuses new hits, invalidates the kernel, and acknowledges in `handle_invalidated`; at once if
    /// the kernel holds nothing and no invalidation is pending.
    pub(crate) fn handle_recall(&mut self, recall: Recall) {
        self.counters.recalled += 1;
        tracing::debug!(target: "nigh::recall", ino = recall.node.ino, covers = ?recall.covers);
        self.calls.mark_recalled((recall.node, recall.covers), false);
        let stale = match recall.covers {
            // No remote recalls single dentries: those of 9P end by their deadlines.
            LeaseScope::Directory | LeaseScope::Dentry | LeaseScope::NegativeDentry => {
                self.pin_open_below(recall.node.ino);
                self.recall_names(recall.node)
            }
            LeaseScope::Attributes => {
                self.pin_open(recall.node.ino);
                self.recall_inode(recall.node)
            }
            LeaseScope::Data => self.recall_data(recall.node),
        };
        if planted(Bug::AcknowledgesFirst) {
            self.complete(OnInvalidated::Acknowledge(recall.id));
            self.invalidate(stale, None);
            return;
        }
        self.invalidate_then(stale, OnInvalidated::Acknowledge(recall.id));
    }

    /// Invalidates the kernel, then acts.
    pub(crate) fn invalidate_then(&mut self, mut stale: Vec<KernelInvalidation>, then: OnInvalidated) {
        self.drop_untrusted(&mut stale);
        // The kernel may still be dropping facts of an earlier recall or discard: the action follows those.
        let nothing = stale.is_empty() && !self.kernel.has_pending();
        if nothing || !self.kernel.can_notify() {
            self.complete(then);
        } else {
            self.send_invalidation(stale, Some(then));
        }
    }

    fn complete(&mut self, then: OnInvalidated) {
        self.out.push_back(match then {
            OnInvalidated::Acknowledge(recall) => Output::Acknowledge(recall),
            OnInvalidated::Return(grants) => Output::Return(grants),
        });
    }

    /// Handles a done invalidation.
    pub fn handle_invalidated(&mut self, now: Time, id: InvalidationId) {
        self.clock = now;
        let (then, dropped) = self.kernel.done(id);
        if let Some(then) = then {
            self.complete(then);
        }
        for (ino, all) in dropped {
            self.store.inode_mut(ino).into_iter().for_each(|inode| inode.ext_mut().whole.note_drop_done(id));
            self.on_pages_dropped(id, ino, all);
        }
        self.finish_reclaim(now);
    }

    fn recall_names(&mut self, node: NodeId) -> Vec<KernelInvalidation> {
        let stale = self.invalidations_under_lease(node);
        self.drop_dir_names(node.ino);
        stale
    }

    /// Returns what the kernel holds under a directory lease.
    pub(crate) fn invalidations_under_lease(&mut self, node: NodeId) -> Vec<KernelInvalidation> {
        let mut stale = self.invalidations_under_lease_without_pages(node);
        stale.extend(self.invalidations_of_pages((node, LeaseScope::Directory)));
        stale
    }

    /// Returns it without pages of files.
    fn invalidations_under_lease_without_pages(&mut self, node: NodeId) -> Vec<KernelInvalidation> {
        let Some((directory, inodes)) = self.store.dir_and_inodes(node) else { return Vec::new() };
        let Some(held) = directory.held else { return Vec::new() };
        let ino = node.ino;
        let mut stale = vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }];
        directory.kernel_version = None;
        let missing = std::mem::take(&mut directory.has_negative_dentries);
        let drops = self.kernel.level().gives_dentries(&held);
        let mut names: Vec<(u64, Name)> = Vec::new();
        for row in directory.rows.iter() {
            let Some(child) = row.child else { continue };
            let Some(inode) = inodes.of_mut(child.id) else { continue };
            if child.attr().covered_by_parent() {
                inode.drop_xattrs();
            }
            if inode.nlookup == 0 {
                continue;
            }
            if child.attr().covered_by_parent() {
                stale.push(KernelInvalidation::Attr { ino: child.id.ino });
            }
            if drops {
                names.push((ino, row.to_name()));
            }
        }
        let count = names.len() as u64;
        let missing = match missing {
            true => self.kernel.take_negative_dentries(ino, count),
            false => (count <= MAX_SINGLE_DENTRIES).then(Vec::new),
        };
        if self.kernel.level() == NotifyLevel::All && missing.is_none() {
            // The epoch drops all negative dentries.
            names.extend(self.kernel.take_all_negative_dentries());
            stale.push(KernelInvalidation::AllDentries(names));
        } else {
            let names = names.into_iter().chain(missing.into_iter().flatten());
            stale.extend(names.map(|(dir, name)| KernelInvalidation::Entry { dir, name }));
        }
        stale
    }

    /// Handles a mount below. An epoch would detach that mount, so from now on the kernel gets no dentry under a grant
    /// that can be recalled ([`NotifyLevel::NoEpoch`]). Returns the dentries that the kernel holds: the caller drops them
    /// before all queued invalidations, then calls `handle_invalidated`. `None`: there was a mount below already.
    pub fn handle_mounted_below(&mut self) -> Option<(InvalidationId, Vec<(u64, Name)>)> {
        if self.kernel.level() != NotifyLevel::All {
            return None;
        }
        self.kernel.give_up_epochs();
        let mut names = self.kernel.take_all_negative_dentries();
        let known = |ino: u64| self.store.inode(ino).is_some_and(|inode| inode.nlookup > 0);
        for (dir, directory) in self.store.dirs() {
            let rows = directory.rows.iter().filter(|row| row.child.is_some_and(|c| known(c.id.ino)));
            names.extend(rows.map(|row| (dir, row.to_name())));
        }
        self.store.dirs_mut().for_each(|directory| directory.has_negative_dentries = false);
        let id = self.kernel.begin_dentry_flush();
        Some((id, names.into_iter().collect()))
    }

    /// Returns which invalidations the kernel supports.
    #[must_use]
    pub fn level(&self) -> NotifyLevel {
        self.kernel.level()
    }

    /// Returns pages of open files that depend on this grant on attributes; closed files have none.
    pub(crate) fn invalidations_of_pages(&mut self, on: (NodeId, LeaseScope)) -> Vec<KernelInvalidation> {
        self.open_files_under(on).into_iter().flat_map(|file| self.recall_data(file)).collect()
    }

    /// Returns open files whose pages depend on this grant.
    pub(crate) fn open_files_under(&self, on: (NodeId, LeaseScope)) -> Vec<NodeId> {
        let under = |file: &OpenFile| {
            let inode = self.store.inode(file.ino)?;
            inode.data.held.is_some_and(|held| held.on == on).then_some(inode.id)
        };
        let found: BTreeSet<NodeId> = self.open.files.values().filter_map(under).collect();
        found.into_iter().collect()
    }

    /// Drops facts of an inode that depended on the directory lease: the inode is covered no more, or by another lease.
    /// `still`: the directory whose lease goes on covering it.
    pub(crate) fn drop_uncovered(&mut self, ino: u64, still: Option<u64>) {
        let Some(inode) = self.store.inode_mut(ino) else { return };
        inode.drop_xattrs();
        let id = inode.id;
        let names =
            inode.data.held.map(|held| held.on).filter(|(_, covers)| *covers == LeaseScope::Directory);
        if names.is_some_and(|(dir, _)| Some(dir.ino) != still) {
            self.mark_pages_stale(ino, false);
            let stale = self.recall_data(id);
            if self.kernel.can_notify() && !stale.is_empty() {
                self.invalidate(stale, None);
            }
        }
    }

    fn recall_inode(&mut self, node: NodeId) -> Vec<KernelInvalidation> {
        let mut stale = self.invalidations_of_pages((node, LeaseScope::Attributes));
        let Some(inode) = self.store.inode_of_mut(node) else { return Vec::new() };
        inode.drop_own_attr();
        inode.drop_xattrs();
        let known = inode.nlookup > 0;
        self.drop_if_idle(node.ino);
        if known {
            stale.push(KernelInvalidation::Attr { ino: node.ino });
        }
        stale
    }

    /// Handles a data recall. Local reads and writes in flight were sent before the recall and get their replies after
    /// it: their pages may be older than the next grant.
    pub(crate) fn recall_data(&mut self, node: NodeId) -> Vec<KernelInvalidation> {
        let ino = node.ino;
        let Some(inode) = self.store.inode_mut(ino).filter(|i| i.id == node) else { return Vec::new() };
        inode.drop_pages();
        if inode.nlookup == 0 {
            return Vec::new();
        }
        self.calls.drop_pages_of(ino, false);
        vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }]
    }

    /// Returns the parts (offset, length) of a range of a file (length 0: to the end) that the kernel can drop now.
    /// Pages of local reads and writes in flight are left out, since dropping them would deadlock; they are dropped
    /// right after the replies. Write-back of mmap stores is waited for if a recall is to be acknowledged: the stores
    /// must reach the remote before any other client's change.
    pub fn droppable_ranges(
        &mut self,
        why: InvalidationId,
        ino: u64,
        (offset, length): (u64, u64),
    ) -> Vec<(u64, u64)> {
        let busy = self.locked_ranges(why, ino);
        let recalled = self.kernel.is_recalled(why);
        self.calls.drop_pages_of(ino, recalled);
        self.leave_out_ungranted(why, ino, (offset, length));
        if (offset, length) == (0, 0) && self.kernel.drops_all_pages(why, ino) {
            self.store
                .inode_mut(ino)
                .into_iter()
                .for_each(|inode| inode.ext_mut().whole.note_drop_started(why));
        }
        clip(complement(busy), offset, length)
    }

    /// Returns whether reads and writes that came after [`Cache::droppable_ranges`] have pages in these ranges locked:
    /// dropping them waits for these.
    #[must_use]
    pub fn blocks_drop(&self, why: InvalidationId, ino: u64, dropping: &[(u64, u64)]) -> bool {
        let meets =
            |&range: &(u64, u64)| dropping.iter().any(|part| !clip(vec![*part], range.0, range.1).is_empty());
        self.locked_ranges(why, ino).iter().map(|range| pages(*range)).any(|range| meets(&range))
    }

    /// Returns the ranges of a file (offset, length) that the kernel has locked for reads and writes: in flight, or
    /// queued while the remote was away.
    fn locked_ranges(&self, why: InvalidationId, ino: u64) -> Vec<(u64, u64)> {
        let recalled = self.kernel.is_recalled(why);
        // A call without a waiter has no page locked.
        let out = self.calls.awaited();
        let out = out.filter_map(|flight| flight.purpose.locks_pages(ino, recalled));
        let parked = self.queued_pages(ino, recalled).map(|(_, range)| range);
        out.chain(parked).filter(|range| range.1 > 0).collect()
    }

    /// Returns whether the kernel may be reading or writing the file.
    #[must_use]
    pub fn is_open(&self, ino: u64) -> bool {
        self.store.inode(ino).is_some_and(|inode| inode.opens > 0)
    }

    /// Sets timers for the end of a grant on something that the kernel holds open.
    pub(crate) fn set_timers(&mut self, deadline: Time, ino: u64) {
        if deadline != Time::FAR {
            // Not at once, or a grant for so short a time would be renewed without end.
            let half = Span(deadline.since(self.clock).0 / 2);
            let soon = Time(deadline.0.saturating_sub(RENEW_BEFORE.0)).max(self.clock.after(half));
            self.kernel.add_timer(soon, ino);
            self.kernel.add_timer(deadline, ino);
        }
    }

    /// Sets timers for the end of a data grant. Replies move that end: it is checked again when it would have come.
    pub(crate) fn set_data_timers(&mut self, ino: u64) {
        let Some(inode) = self.store.inode_mut(ino) else { return };
        let Some(held) = inode.data.held else { return };
        inode.ext_mut().data.timer_at = held.deadline;
        self.set_timers(held.deadline, ino);
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.clock = now;
        for op in self.calls.take_expired(now) {
            match self.config.on_disconnect {
                // The remote replies; a wait for another client's lock goes on.
                OnDisconnect::Fail(span) if self.waits_for_lock(op) => {
                    self.calls.begin_deadline(op, now.after(span))
                }
                _ => self.abort(op, Errno::IO),
            }
        }
        if self.session.give_up_flush(now) {
            tracing::warn!(target: "nigh::kernel", "the kernel is slow to forget what it held when the server went away");
            self.finish_reclaim(now);
        }
        self.give_back_unfinished(now);
        self.evict_idle(now);
        let mut copies = Vec::new();
        while let Some(ino) = self.kernel.take_timer(now) {
            copies.extend(self.ended_copies(ino));
            self.on_grant_end(now, ino);
        }
        if !copies.is_empty() {
            self.invalidate(copies, None);
        }
    }

    /// Handles the end of a grant on an open inode: renews what may still be true, drops the rest.
    fn on_grant_end(&mut self, now: Time, ino: u64) {
        self.pin_open(ino);
        let Some(inode) = self.store.inode_mut(ino).filter(|i| i.opens > 0) else { return };
        if let Some(held) = inode.data.held {
            if held.is_live(now) {
                if inode.data.timer_at <= now {
                    return self.set_data_timers(ino);
                }
                // Not if an earlier renewal has moved the end: each renewal would cause two others.
                let soon = held.deadline.since(now) <= RENEW_BEFORE;
                if soon
                    && matches!(inode.data.pages, CachedPages::Of(_))
                    && let Some(node) = self.node_ref(ino)
                {
                    self.send(now, None, CallKind::Revalidate { ino }, Call::GetAttr { node });
                }
                return;
            }
            inode.drop_pages();
            self.mark_pages_stale(ino, false);
            self.invalidate(vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }], None);
        }
        self.live_directory(now, ino);
    }

    /// Handles the renewal of an open file: if it is unchanged, its data stays granted as long as its attributes.
    pub(crate) fn on_revalidate_reply(
        &mut self,
        now: Time,
        flight: &InflightCall,
        ino: u64,
        response: &Response,
    ) {
        let Ok(Reply::Attr(id, attr)) = response.result else { return };
        self.apply_attr(now, flight, id, attr, &response.grants);
        let fresh = self.grant_in_reply(flight, id, &attr, &response.grants);
        let Some(inode) = self.store.inode_mut(ino).filter(|i| i.id == id && i.opens > 0) else { return };
        let same = inode.data.pages == CachedPages::Of(ChangeToken::of(&attr));
        // A grant that ends no later than the present one gains nothing, and renewals would never end.
        let until = inode.data.held.map_or(now, |held| held.deadline);
        let fresh = fresh.filter(|h| h.deadline > until && same && flight.race_log.is_empty());
        if let Some(held) = fresh {
            inode.ext_mut().data.held = Some(held);
            self.set_data_timers(ino);
            self.note_page_base(now, Some(flight), ino, DataVersion::of(&attr));
        } else if !same {
            inode.drop_pages();
            self.invalidate(
                vec![
                    KernelInvalidation::Data { ino, offset: 0, length: 0 },
                    KernelInvalidation::Attr { ino },
                ],
                None,
            );
        }
    }

    /// Returns the grant on an inode's attributes in a reply: its own grant, or the lease of the directory where it was
    /// found. What was known of that directory before keeps its earlier end.
    fn grant_in_reply(
        &self,
        flight: &InflightCall,
        id: NodeId,
        attr: &Attr,
        grants: &[Grant],
    ) -> Option<LiveGrant> {
        let home = self.store.inode(id.ino).and_then(|i| i.parent_entry.as_ref());
        let dir = home.and_then(|(dir, _)| self.store.id_of(*dir)).filter(|_| attr.covered_by_parent());
        let own = flight.granted(grants, id, LeaseScope::Attributes);
        let granted = own.or_else(|| flight.granted(grants, dir?, LeaseScope::Directory));
        granted.map(|grant| LiveGrant::begin(grant, flight.sent))
    }

    /// Drops all facts, here and in the kernel. Dentries go first, if they can go all at once. Then go facts that need
    /// no lookup, attributes and data of open inodes, then those of the rest. Dentries that can go only one by one come
    /// last: they wait for requests in their directory, which get no reply now. `unbroken`: the grants end before their
    /// time, with a session that is forgotten.
    pub(crate) fn drop_everything(&mut self, unbroken: bool) -> Option<InvalidationId> {
        let mut names = Vec::new();
        let mut directories: Vec<NodeId> = self.store.dirs().map(|(_, d)| d.id).collect();
        directories.sort_unstable();
        for node in directories {
            for one in self.invalidations_under_lease_without_pages(node) {
                match one {
                    KernelInvalidation::AllDentries(more) => names.extend(more),
                    KernelInvalidation::Entry { dir, name } => names.push((dir, name)),
                    // Attributes and data are dropped for every inode below.
                    KernelInvalidation::Attr { .. }
                    | KernelInvalidation::Data { .. }
                    | KernelInvalidation::RemovedDentry { .. } => {}
                }
            }
            if let Some(directory) = self.store.dir(node.ino) {
                names.extend(directory.dentry_leases.names().map(|name| (node.ino, name.clone())));
            }
            self.drop_dir_names(node.ino);
            if let Some(directory) = self.store.dir_mut(node.ino) {
                directory.has_negative_dentries = false;
            }
        }
        self.calls.drop_pages_of_all();
        self.ungranted.end_grants();
        let in_use = |inode: &Inode| inode.opens > 0 || inode.pin_handle.is_some();
        let mut inodes: Vec<(bool, u64)> = self.store.inodes().map(|i| (!in_use(i), i.id.ino)).collect();
        inodes.sort_unstable();
        let mut told: Vec<(bool, bool, u64)> = Vec::new();
        for (idle, ino) in inodes {
            let lived = |held: LiveGrant| held.is_live(self.clock) && !held.stale;
            let lived = self.store.inode(ino).is_some_and(|inode| inode.data.held.is_some_and(lived));
            self.mark_pages_stale(ino, unbroken && lived);
            let Some(inode) = self.store.inode_mut(ino) else { continue };
            if let Some(more) = inode.ext_if_any() {
                (more.own, more.xattrs, more.data) = (None, None, CachedData::none());
                more.target = None;
            }
            if inode.nlookup > 0 {
                told.extend([(idle, false, ino), (idle, true, ino)]);
            }
            self.drop_if_idle(ino);
        }
        // Open inodes before the rest; attributes before data.
        told.sort_unstable();
        let mut stale = Vec::new();
        if self.kernel.level() == NotifyLevel::All {
            names.extend(self.kernel.take_all_negative_dentries());
            stale.push(KernelInvalidation::AllDentries(std::mem::take(&mut names)));
        }
        stale.extend(told.into_iter().map(|(_, data, ino)| match data {
            true => KernelInvalidation::Data { ino, offset: 0, length: 0 },
            false => KernelInvalidation::Attr { ino },
        }));
        stale.extend(names.into_iter().map(|(dir, name)| KernelInvalidation::Entry { dir, name }));
        (self.kernel.can_notify() && !stale.is_empty())
            .then(|| self.invalidate_first(stale, Urgency::AllGrantsEnded))
    }

    /// Keeps serving facts after their grants have ended. The kernel gets them without a timeout.
    pub(crate) fn mark_facts_stale(&mut self) {
        self.store.dirs_mut().for_each(|dir| {
            dir.held = dir.held.map(LiveGrant::into_stale);
            dir.dentry_leases.keep_as_stale();
        });
        self.store.inodes_mut().filter_map(|inode| inode.ext_if_any()).for_each(|more| {
            more.own = more.own.map(|(attr, held)| (attr, held.into_stale()));
            more.data.held = more.data.held.map(LiveGrant::into_stale);
            if let Some(xattrs) = &mut more.xattrs {
                xattrs.1 = Time::FAR;
            }
            if let Some(target) = &mut more.target {
                target.1 = Time::FAR;
            }
        });
    }
}
