//! The end of grants: recalls, deadlines of what is open, loss of the session.

use crate::cache::Cache;
use crate::flight::{Flight, Purpose};
use crate::grants::Held;
use crate::kernel::Level;
use crate::op::{Answer, Invalidation, Output, Stale};
use crate::state::{Pages, Stamp};
use nigh_types::{
    Attr, Call, CallId, Covers, Errno, Grant, GrantId, Name, NodeId, Recall, RecallId, Reply, Response, Span,
    Time,
};
use std::collections::BTreeSet;
use std::ops::Bound;

/// Above this many names all are dropped at once.
const NAMES_ONE_BY_ONE: u64 = 200;
/// So long before its end a grant on an open file's data is renewed.
const RENEW_BEFORE: Span = Span::from_millis(1_000);

/// What follows when the kernel has forgotten.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum After {
    Acknowledge(RecallId),
    Return(Vec<GrantId>),
}

impl Cache {
    /// Refuses new hits, has the kernel told, and only then (in `handle_invalidated`) acknowledges.
    pub(crate) fn handle_recall(&mut self, recall: Recall) {
        self.counters.recalled += 1;
        tracing::debug!(target: "nigh::recall", ino = recall.node.ino, covers = ?recall.covers);
        for flight in self.flights.values_mut() {
            flight.seen.recalled.push((recall.node, recall.covers));
        }
        let stale = match recall.covers {
            Covers::Names => {
                self.keep_open_below(recall.node.ino);
                self.recall_names(recall.node)
            }
            Covers::Inode => {
                self.keep_open(recall.node.ino);
                self.recall_inode(recall.node)
            }
            Covers::Data => self.recall_data(recall.node),
        };
        // The kernel may yet be forgetting what an earlier recall or doubt was about: behind that.
        let nothing = stale.is_empty() && self.untold.is_empty();
        if nothing || !self.config.level.may_keep_pages() {
            self.out.push_back(Output::Acknowledge(recall.id));
        } else {
            self.invalidate(stale, Some(After::Acknowledge(recall.id)));
        }
    }

    /// The kernel has forgotten what it was told to.
    pub fn handle_invalidated(&mut self, id: Invalidation) {
        self.untold.remove(&id);
        match self.after_invalidation.remove(&id) {
            Some(After::Acknowledge(recall)) => self.out.push_back(Output::Acknowledge(recall)),
            Some(After::Return(grants)) => self.out.push_back(Output::Return(grants)),
            None => {}
        }
    }

    fn recall_names(&mut self, node: NodeId) -> Vec<Stale> {
        let stale = self.stale_names(node);
        self.forget_names(node.ino);
        stale
    }

    /// What the kernel holds under a directory's grant.
    pub(crate) fn stale_names(&mut self, node: NodeId) -> Vec<Stale> {
        let mut stale = self.stale_rows(node);
        stale.extend(self.stale_pages((node, Covers::Names)));
        stale
    }

    /// The same without pages of files.
    fn stale_rows(&mut self, node: NodeId) -> Vec<Stale> {
        let Some(directory) = self.dirs.get_mut(&node.ino).filter(|d| d.id == node && d.held.is_some())
        else {
            return Vec::new();
        };
        let ino = node.ino;
        let mut stale = vec![Stale::Data { ino, offset: 0, length: 0 }];
        directory.kernel_version = None;
        let mut entries = Vec::new();
        let held = directory.held;
        for row in directory.rows.iter() {
            let Some(child) = &row.child else { continue };
            let Some(inode) = self.inodes.get_mut(&child.id.ino).filter(|i| i.id == child.id) else {
                continue;
            };
            if child.attr().covered_by_parent() {
                inode.xattrs = None;
            }
            if inode.lookups == 0 {
                continue;
            }
            if child.attr().covered_by_parent() {
                stale.push(Stale::Attr { ino: child.id.ino });
            }
            entries.push(Stale::Entry { dir: ino, name: row.name.clone() });
        }
        let missing = directory.missing_given;
        let epoch = self.config.level == Level::All;
        if epoch && (missing || entries.len() as u64 > NAMES_ONE_BY_ONE) {
            self.counters.epoch_planned += 1;
            stale.push(self.epoch(&entries));
        } else if held.is_none_or(|held| self.config.level.drops_names(&held)) {
            stale.extend(entries);
        }
        if let Some(directory) = self.dirs.get_mut(&ino) {
            directory.missing_given = false;
        }
        stale
    }

    /// All names are dropped, so no missing one is believed in any more.
    fn epoch(&mut self, entries: &[Stale]) -> Stale {
        let mut names: Vec<(u64, Name)> = std::mem::take(&mut self.missing_given).into_iter().collect();
        names.extend(entries.iter().filter_map(|stale| match stale {
            Stale::Entry { dir, name } => Some((*dir, name.clone())),
            _ => None,
        }));
        Stale::Epoch(names)
    }

    /// Something is mounted below. Dropping all names at once would detach it, so from now on the kernel holds
    /// no name under a grant that can be recalled ([`Level::NoEpoch`]). Answers the names that it holds by now:
    /// they are to be dropped before anything that was put out and is not yet told, and then
    /// `handle_invalidated` follows. `None`: that was so already.
    pub fn handle_mounted_below(&mut self) -> Option<(Invalidation, Vec<(u64, Name)>)> {
        if self.config.level != Level::All {
            return None;
        }
        self.config.level = Level::NoEpoch;
        let mut names = std::mem::take(&mut self.missing_given);
        for (dir, directory) in &mut self.dirs {
            directory.missing_given = false;
            let known = |ino: u64| self.inodes.get(&ino).is_some_and(|inode| inode.lookups > 0);
            let rows =
                directory.rows.iter().filter(|row| row.child.as_ref().is_some_and(|c| known(c.id.ino)));
            names.extend(rows.map(|row| (*dir, row.name.clone())));
        }
        Some((self.new_invalidation(), names.into_iter().collect()))
    }

    /// What can be taken back from the kernel.
    #[must_use]
    pub fn level(&self) -> Level {
        self.config.level
    }

    /// Pages of open files that are kept as long as that grant on attributes lives; of closed ones none are.
    fn stale_pages(&mut self, on: (NodeId, Covers)) -> Vec<Stale> {
        let open: BTreeSet<u64> = self.files.values().map(|file| file.ino).collect();
        let under = |ino: &u64| {
            let inode = self.inodes.get(ino).filter(|i| i.data.held.is_some_and(|held| held.on == on));
            inode.map(|i| i.id)
        };
        let files: Vec<NodeId> = open.iter().filter_map(under).collect();
        files.into_iter().flat_map(|file| self.recall_data(file)).collect()
    }

    /// The grant on a directory's names covers an inode no more, or another one's does: what was kept under it
    /// goes. `still`: the directory whose grant goes on covering it.
    pub(crate) fn uncover(&mut self, ino: u64, still: Option<u64>) {
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.xattrs = None;
        let id = inode.id;
        let names = inode.data.held.map(|held| held.on).filter(|(_, covers)| *covers == Covers::Names);
        if names.is_some_and(|(dir, _)| Some(dir.ino) != still) {
            let stale = self.recall_data(id);
            if self.config.level.may_keep_pages() && !stale.is_empty() {
                self.invalidate(stale, None);
            }
        }
    }

    fn recall_inode(&mut self, node: NodeId) -> Vec<Stale> {
        let mut stale = self.stale_pages((node, Covers::Inode));
        let Some(inode) = self.inodes.get_mut(&node.ino).filter(|i| i.id == node) else { return Vec::new() };
        inode.own = None;
        inode.xattrs = None;
        let known = inode.lookups > 0;
        self.drop_if_idle(node.ino);
        if known {
            stale.push(Stale::Attr { ino: node.ino });
        }
        stale
    }

    /// Own reads and writes in flight were sent before the recall came, and are answered behind it: what they
    /// bring may be older than what is granted next.
    fn recall_data(&mut self, node: NodeId) -> Vec<Stale> {
        let ino = node.ino;
        let Some(inode) = self.inodes.get_mut(&ino).filter(|i| i.id == node) else { return Vec::new() };
        inode.data.held = None;
        inode.data.pages = Pages::None;
        if inode.lookups == 0 {
            return Vec::new();
        }
        for flight in self.flights.values_mut().filter(|f| f.purpose.locks_pages(ino, false).is_some()) {
            flight.drop_data = true;
        }
        vec![Stale::Data { ino, offset: 0, length: 0 }]
    }

    /// Of a range of a file (length 0: to the end) that the kernel is about to be told to drop: what it can drop
    /// now (offset, length), and the latest call that was looked at. Pages of our own reads and writes in flight are left out, since dropping these would
    /// wait for ourselves; they go right after their replies. Stores into a map are waited for where a recall is
    /// to be acknowledged: they must be with the remote before anybody else's change is.
    pub fn droppable(
        &mut self,
        why: Invalidation,
        ino: u64,
        (offset, length): (u64, u64),
    ) -> (Vec<(u64, u64)>, CallId) {
        let recalled = matches!(self.after_invalidation.get(&why), Some(After::Acknowledge(_)));
        let mut busy = Vec::new();
        for flight in self.flights.values_mut() {
            if let Some(range) = flight.purpose.locks_pages(ino, recalled) {
                flight.drop_data = true;
                busy.push(range);
            }
        }
        (within(gaps(busy), offset, length), CallId(self.next_call))
    }

    /// Whether reads and writes have come since [`Cache::droppable`] looked: dropping may wait for them.
    #[must_use]
    pub fn is_in_the_way(&self, why: Invalidation, ino: u64, looked: CallId) -> bool {
        let recalled = matches!(self.after_invalidation.get(&why), Some(After::Acknowledge(_)));
        let mut later = self.flights.range((Bound::Excluded(looked), Bound::Unbounded));
        later.any(|(_, flight)| flight.purpose.locks_pages(ino, recalled).is_some())
    }

    /// Whether the kernel may be reading or writing that file.
    #[must_use]
    pub fn is_open(&self, ino: u64) -> bool {
        self.inodes.get(&ino).is_some_and(|inode| inode.opens > 0)
    }

    /// Something that the kernel holds open stands under a grant that ends then.
    pub(crate) fn watch(&mut self, deadline: Time, ino: u64) {
        if deadline != Time::FAR {
            self.watched.insert((Time(deadline.0.saturating_sub(RENEW_BEFORE.0)), ino));
            self.watched.insert((deadline, ino));
        }
    }

    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(&(due, ino)) = self.watched.first() {
            if due > now {
                break;
            }
            self.watched.pop_first();
            self.grant_ends(now, ino);
        }
    }

    /// Of an open inode: renews what may still be true, drops what is no longer granted.
    fn grant_ends(&mut self, now: Time, ino: u64) {
        self.keep_open(ino);
        let Some(inode) = self.inodes.get_mut(&ino).filter(|i| i.opens > 0) else { return };
        if let Some(held) = inode.data.held {
            if held.lives(now) {
                // Not where an earlier renewal has moved the end: each would be followed by two others.
                let soon = held.deadline.since(now) <= RENEW_BEFORE;
                if soon
                    && matches!(inode.data.pages, Pages::Of(_))
                    && let Some(node) = self.place(ino)
                {
                    self.send(now, None, Purpose::Renew { ino }, Call::GetAttr { node });
                }
                return;
            }
            inode.data.held = None;
            inode.data.pages = Pages::None;
            self.invalidate(vec![Stale::Data { ino, offset: 0, length: 0 }], None);
        }
        self.names(now, ino);
    }

    /// An open file was looked at again: unchanged, its data stays granted as long as its attributes.
    pub(crate) fn renewed(&mut self, now: Time, flight: &Flight, ino: u64, response: &Response) {
        let Ok(Reply::Attr(id, attr)) = response.result else { return };
        self.learn_attr(now, flight, id, attr, &response.grants);
        let fresh = self.granted_anew(flight, id, &attr, &response.grants);
        let Some(inode) = self.inodes.get_mut(&ino).filter(|i| i.id == id && i.opens > 0) else { return };
        let same = inode.data.pages == Pages::Of(Stamp::of(&attr));
        // One that ends no later than the present one gains nothing: asking again would not end before it.
        let until = inode.data.held.map_or(now, |held| held.deadline);
        let fresh = fresh.filter(|h| h.deadline > until && same && flight.seen.is_empty());
        if let Some(held) = fresh {
            inode.data.held = Some(held);
            self.watch(held.deadline, ino);
        } else if !same {
            inode.data.held = None;
            inode.data.pages = Pages::None;
            self.invalidate(vec![Stale::Data { ino, offset: 0, length: 0 }, Stale::Attr { ino }], None);
        }
    }

    /// The grant on an inode's attributes that a reply brought: its own, or the one on the directory where it
    /// was reached. What was known of that directory before goes on ending when it did.
    fn granted_anew(&self, flight: &Flight, id: NodeId, attr: &Attr, grants: &[Grant]) -> Option<Held> {
        let home = self.inodes.get(&id.ino).and_then(|i| i.home.as_ref());
        let dir = home.and_then(|(dir, _)| self.id_of(*dir)).filter(|_| attr.covered_by_parent());
        let own = flight.granted(grants, id, Covers::Inode);
        let granted = own.or_else(|| flight.granted(grants, dir?, Covers::Names));
        granted.map(|grant| Held::begin(grant, flight.sent))
    }

    /// All grants have ended, and nothing in flight will be answered.
    pub(crate) fn handle_lost(&mut self, why: &str) {
        tracing::warn!(target: "nigh::session", why);
        self.attached = false;
        // The next session knows neither these recalls nor these grants.
        self.after_invalidation.clear();
        let flights = std::mem::take(&mut self.flights);
        for flight in flights.into_values() {
            if let Some(sequence) = flight.sequence {
                self.overlay.finish(sequence);
            }
            let answer = match flight.purpose {
                Purpose::Unlock { closing: true, .. } => Answer::Done,
                _ => Answer::Failed(Errno::IO),
            };
            self.answer_all(&flight.waiters, &answer);
        }
        (self.lookups, self.attrs, self.xattrs) = Default::default();
        self.locks.lose_all();
        self.forget_everything();
    }

    fn forget_everything(&mut self) {
        let all = self.config.level == Level::All;
        let mut stale = Vec::new();
        let mut gone = Vec::new();
        let mut directories: Vec<NodeId> = self.dirs.values().map(|d| d.id).collect();
        directories.sort_unstable();
        for node in directories {
            let names = self.stale_rows(node);
            for one in names {
                match one {
                    Stale::Epoch(names) => gone.extend(names),
                    Stale::Entry { dir, name } if all => gone.push((dir, name)),
                    one => stale.push(one),
                }
            }
            self.forget_names(node.ino);
            if let Some(directory) = self.dirs.get_mut(&node.ino) {
                directory.listing = None;
            }
        }
        let mut inodes: Vec<u64> = self.inodes.keys().copied().collect();
        inodes.sort_unstable();
        for ino in inodes {
            let Some(inode) = self.inodes.get_mut(&ino) else { continue };
            inode.own = None;
            inode.xattrs = None;
            inode.pinned = None;
            inode.data = Default::default();
            if inode.lookups > 0 {
                stale.push(Stale::Attr { ino });
                stale.push(Stale::Data { ino, offset: 0, length: 0 });
            }
            self.drop_if_idle(ino);
        }
        for file in self.files.values_mut() {
            file.handle = None;
        }
        self.unpinned = self.files.len() as u64;
        self.inodes.values_mut().for_each(|inode| inode.opens_unpinned = 0);
        let open: Vec<u64> = self.files.values().map(|f| f.ino).collect();
        for ino in open {
            if let Some(inode) = self.inodes.get_mut(&ino) {
                inode.opens_unpinned += 1;
            }
        }
        if all {
            gone.extend(std::mem::take(&mut self.missing_given));
            stale.insert(0, Stale::Epoch(gone));
        }
        if self.config.level.may_keep_pages() && !stale.is_empty() {
            self.invalidate(stale, None);
        }
    }
}

impl Purpose {
    /// The range of that file whose pages the kernel keeps locked until this is answered.
    fn locks_pages(&self, file: u64, but_flushes: bool) -> Option<(u64, u64)> {
        match *self {
            Purpose::Read { ino, offset, size } if ino == file => Some((offset, u64::from(size))),
            Purpose::Write { ino, offset, size, flush } if ino == file && !(flush && but_flushes) => {
                Some((offset, size))
            }
            _ => None,
        }
    }
}

/// What of `ranges` lies in (offset, length); a length of 0: to the end.
fn within(ranges: Vec<(u64, u64)>, offset: u64, length: u64) -> Vec<(u64, u64)> {
    let end_of =
        |(offset, length): (u64, u64)| if length == 0 { u64::MAX } else { offset.saturating_add(length) };
    let end = end_of((offset, length));
    let cut = ranges.into_iter().map(|range| (range.0.max(offset), end_of(range).min(end)));
    cut.filter(|(from, to)| from < to)
        .map(|(from, to)| (from, if to == u64::MAX { 0 } else { to - from }))
        .collect()
}

/// The kernel locks whole pages.
const PAGE: u64 = 4096;

/// The ranges (offset, length; 0 = to the end) of a file that leave out the pages of `busy`.
fn gaps(mut busy: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    busy.sort_unstable();
    let mut gaps = Vec::new();
    let mut at = 0u64;
    for (offset, length) in busy {
        let end = offset.saturating_add(length).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        let offset = offset / PAGE * PAGE;
        if offset > at {
            gaps.push((at, offset - at));
        }
        at = at.max(end);
    }
    if at < i64::MAX.cast_unsigned() {
        gaps.push((at, 0));
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_leave_out_what_is_in_flight() {
        assert_eq!(gaps(vec![]), [(0, 0)]);
        assert_eq!(gaps(vec![(0, 10)]), [(PAGE, 0)]);
        assert_eq!(gaps(vec![(PAGE - 1, 2)]), [(2 * PAGE, 0)]);
        let busy = vec![(8 * PAGE, 10), (2 * PAGE, PAGE), (2 * PAGE + 7, 2 * PAGE)];
        assert_eq!(gaps(busy), [(0, 2 * PAGE), (5 * PAGE, 3 * PAGE), (9 * PAGE, 0)]);
        assert_eq!(gaps(vec![(0, u64::MAX)]), []);
        assert_eq!(within(gaps(vec![(0, 10)]), 0, 0), [(PAGE, 0)]);
        assert_eq!(within(gaps(vec![(0, 10)]), 0, PAGE), []);
        assert_eq!(within(gaps(vec![(PAGE, 10)]), 10, 3 * PAGE), [(10, PAGE - 10), (2 * PAGE, PAGE + 10)]);
    }
}
