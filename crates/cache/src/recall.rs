//! The end of grants: recalls, deadlines of what is open, loss of the session.

use crate::cache::Cache;
use crate::flight::{Flight, Purpose};
use crate::op::{Answer, Invalidation, Output, Stale};
use crate::state::{Pages, Stamp};
use nigh_types::{Call, Covers, Errno, GrantId, NodeId, Recall, RecallId, Reply, Response, Span, Time};

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
            Covers::Names => self.recall_names(recall.node),
            Covers::Inode => self.recall_inode(recall.node),
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
        let Some(directory) = self.dirs.get(&node.ino).filter(|d| d.id == node && d.held.is_some()) else {
            return Vec::new();
        };
        let ino = node.ino;
        let mut stale = vec![Stale::Data { ino, offset: 0, length: 0 }];
        let mut entries = Vec::new();
        for row in directory.rows.iter() {
            let Some(child) = &row.child else { continue };
            let Some(inode) = self.inodes.get_mut(&child.id.ino).filter(|i| i.id == child.id) else {
                continue;
            };
            if child.attr.covered_by_parent() {
                inode.xattrs = None;
            }
            if inode.lookups == 0 {
                continue;
            }
            if child.attr.covered_by_parent() {
                stale.push(Stale::Attr { ino: child.id.ino });
            }
            entries.push(Stale::Entry { dir: ino, name: row.name.clone() });
        }
        let missing = directory.missing_given;
        let epoch = self.config.level == crate::Level::All;
        if epoch && (missing || entries.len() as u64 > NAMES_ONE_BY_ONE) {
            self.counters.epoch_planned += 1;
            stale.push(Stale::Epoch);
            self.missing_given = 0;
        } else {
            stale.extend(entries);
        }
        if let Some(directory) = self.dirs.get_mut(&ino) {
            directory.missing_given = false;
        }
        stale
    }

    fn recall_inode(&mut self, node: NodeId) -> Vec<Stale> {
        let Some(inode) = self.inodes.get_mut(&node.ino).filter(|i| i.id == node) else { return Vec::new() };
        inode.own = None;
        inode.xattrs = None;
        let known = inode.lookups > 0;
        self.drop_if_idle(node.ino);
        if known { vec![Stale::Attr { ino: node.ino }] } else { Vec::new() }
    }

    /// Drops all pages but those of our own reads and writes in flight: invalidating these would wait
    /// for ourselves. They go right after their replies.
    fn recall_data(&mut self, node: NodeId) -> Vec<Stale> {
        let ino = node.ino;
        let Some(inode) = self.inodes.get_mut(&ino).filter(|i| i.id == node) else { return Vec::new() };
        inode.data.held = None;
        inode.data.pages = Pages::None;
        if inode.lookups == 0 {
            return Vec::new();
        }
        let mut busy = Vec::new();
        for flight in self.flights.values_mut() {
            let range = match flight.purpose {
                Purpose::Read { ino: i, offset, size } if i == ino => Some((offset, u64::from(size))),
                Purpose::Write { ino: i, offset, size } if i == ino => Some((offset, size)),
                _ => None,
            };
            if let Some(range) = range {
                flight.drop_data = true;
                busy.push(range);
            }
        }
        gaps(busy).into_iter().map(|(offset, length)| Stale::Data { ino, offset, length }).collect()
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
        let Some(inode) = self.inodes.get_mut(&ino).filter(|i| i.opens > 0) else { return };
        if let Some(held) = inode.data.held {
            if held.lives(now) {
                if matches!(inode.data.pages, Pages::Of(_))
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
        let open_dir = self.dirs.get(&ino).is_some_and(|d| d.kernel_version == Some(d.version));
        if open_dir && self.names(now, ino).is_none() {
            self.invalidate(vec![Stale::Data { ino, offset: 0, length: 0 }], None);
        }
    }

    /// An open file was looked at again: unchanged, its data stays granted as long as its attributes.
    pub(crate) fn renewed(&mut self, now: Time, flight: &Flight, ino: u64, response: &Response) {
        let Ok(Reply::Attr(id, attr)) = response.result else { return };
        let under = self.learn_attr(now, flight, id, attr, &response.grants);
        let Some(inode) = self.inodes.get_mut(&ino).filter(|i| i.id == id && i.opens > 0) else { return };
        let same = inode.data.pages == Pages::Of(Stamp::of(&attr));
        let fresh = under.filter(|h| h.lives(now) && same && flight.seen.is_empty());
        if let Some(held) = fresh {
            inode.data.held = Some(held);
            self.watch(held.deadline, ino);
        } else if !same {
            inode.data.held = None;
            inode.data.pages = Pages::None;
            self.invalidate(vec![Stale::Data { ino, offset: 0, length: 0 }, Stale::Attr { ino }], None);
        }
    }

    /// All grants have ended, and nothing in flight will be answered.
    pub(crate) fn handle_lost(&mut self, why: &str) {
        tracing::warn!(target: "nigh::session", why);
        self.attached = false;
        let flights = std::mem::take(&mut self.flights);
        for flight in flights.into_values() {
            if let Some(sequence) = flight.sequence {
                self.overlay.finish(sequence);
            }
            self.answer_all(&flight.waiters, &Answer::Failed(Errno::IO));
        }
        (self.lookups, self.attrs, self.xattrs) = Default::default();
        self.forget_everything();
    }

    fn forget_everything(&mut self) {
        let all = self.config.level == crate::Level::All;
        let mut stale = Vec::new();
        let mut directories: Vec<NodeId> = self.dirs.values().map(|d| d.id).collect();
        directories.sort_unstable();
        for node in directories {
            let names = self.stale_names(node).into_iter();
            stale.extend(names.filter(|s| *s != Stale::Epoch && !(all && matches!(s, Stale::Entry { .. }))));
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
        for inode in self.inodes.values_mut() {
            inode.opens_unpinned = 0;
        }
        let open: Vec<u64> = self.files.values().map(|f| f.ino).collect();
        for ino in open {
            if let Some(inode) = self.inodes.get_mut(&ino) {
                inode.opens_unpinned += 1;
            }
        }
        if all {
            stale.insert(0, Stale::Epoch);
        }
        if self.config.level.may_keep_pages() && !stale.is_empty() {
            self.invalidate(stale, None);
        }
    }
}

/// The ranges (offset, length; 0 = to the end) of a file that leave out `busy`.
fn gaps(mut busy: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    busy.sort_unstable();
    let mut gaps = Vec::new();
    let mut at = 0u64;
    for (offset, length) in busy {
        if offset > at {
            gaps.push((at, offset - at));
        }
        at = at.max(offset.saturating_add(length));
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
        assert_eq!(gaps(vec![(0, 10)]), [(10, 0)]);
        assert_eq!(gaps(vec![(20, 10), (5, 5), (7, 8)]), [(0, 5), (15, 5), (30, 0)]);
        assert_eq!(gaps(vec![(0, u64::MAX)]), []);
    }
}
