//! Facts that later ones take the place of, and what the kernel was told under the earlier ones.

use crate::cache::Cache;
use crate::flight::Flight;
use crate::grants::Held;
use crate::listing::Told;
use crate::op::Stale;
use crate::rows::Child;
use nigh_types::{Cookie, Covers, Grant, GrantId, Name, NodeId, Time};
use rustc_hash::FxHashSet;

/// Directories of which it is known that a grant was given back.
const MOST_RETURNED: usize = 1 << 16;

impl Cache {
    /// A listing brings another grant on a directory's names. What is known under a living one that will be
    /// recalled stays known, since the kernel may have been told of it; so all of it ends at the earlier
    /// deadline (page 0004, rule 1). Under one that only ends by itself the kernel's time does too, and older
    /// facts go.
    pub(crate) fn names_begin_again(&mut self, now: Time, dir: NodeId, fresh: Held) {
        let old = self.names(now, dir.ino).map(|(_, old)| old);
        let mut held = fresh;
        match old.filter(|old| old.recallable && fresh.recallable) {
            Some(old) => {
                held.deadline = held.deadline.min(old.deadline);
                held.id = held.id.max(old.id);
            }
            None => {
                self.end_names(dir.ino);
                self.names_begin(dir.ino);
            }
        }
        self.directory(dir).held = Some(held);
    }

    /// A grant on a directory's names is given back, or about to be.
    pub(crate) fn note_returned(&mut self, dir: NodeId, id: GrantId) {
        if self.flights.is_empty() {
            self.returned.clear();
        }
        if self.returned.len() >= MOST_RETURNED {
            self.returned.pop_first();
        }
        let latest = self.returned.entry(dir).or_insert(id);
        *latest = (*latest).max(id);
    }

    /// Whether a grant on a directory's names may begin where there is none.
    pub(crate) fn may_begin(&self, dir: NodeId, fresh: &Held) -> bool {
        self.returned.get(&dir).is_none_or(|returned| fresh.id > *returned)
    }

    /// A grant on a directory's names begins where there was none: own changes of it that are out may have been made before.
    pub(crate) fn names_begin(&mut self, dir: u64) {
        for flight in self.flights.values_mut().filter(|flight| flight.sequence.is_some()) {
            if flight.purpose.binds_in(dir) {
                flight.seen.granted.insert(dir);
            }
        }
    }

    /// Whoever serves a tree numbers a grant anew with every answer, and ends it by its latest number.
    pub(crate) fn number_anew(&mut self, flight: &Flight, grants: &[Grant]) {
        for grant in grants.iter().filter(|g| g.covers == Covers::Names) {
            let directory = self.dirs.get_mut(&grant.node.ino).filter(|d| d.id == grant.node);
            let held = directory.and_then(|d| d.held.as_mut());
            if let Some(held) = held.filter(|_| !flight.recalled(grant.node, Covers::Names)) {
                held.id = held.id.max(grant.id);
            }
        }
    }

    /// A row has gone, or leads to `id` now: no recall speaks of what the kernel was told under it any more.
    pub(crate) fn displaced(
        &mut self,
        (dir, name): (u64, &Name),
        old: Option<&Child>,
        id: Option<NodeId>,
    ) -> Vec<Stale> {
        if id == old.map(|c| c.id) {
            return Vec::new();
        }
        let held = self.dirs.get(&dir).and_then(|d| d.held);
        let drops = held.is_none_or(|held| self.config.level.drops_names(&held));
        let entry = drops.then_some(Stale::Entry { dir, name: name.clone() });
        let Some(child) = old else { return entry.into_iter().collect() };
        let Some(inode) = self.inodes.get_mut(&child.id.ino).filter(|i| i.id == child.id) else {
            return Vec::new();
        };
        inode.forget_xattrs();
        inode.told_until = Time(0);
        if inode.lookups == 0 {
            return Vec::new();
        }
        entry.into_iter().chain([Stale::Attr { ino: child.id.ino }]).collect()
    }

    /// Names between two cookies that a part of a listing does not name do not exist, unless an own change
    /// made them meanwhile.
    pub(crate) fn remove_unlisted(
        &mut self,
        dir: u64,
        flight: &Flight,
        entries: &[(Name, Told)],
        (from, to): (Cookie, Cookie),
        (under_way, all_taken): (&[Name], bool),
    ) -> Vec<Stale> {
        let Some(directory) = self.dirs.get(&dir) else { return Vec::new() };
        let rows = || directory.rows.after(from).take_while(|row| row.cookie <= to);
        if all_taken && rows().filter(|row| row.child.is_some()).count() == entries.len() {
            return Vec::new();
        }
        let listed: FxHashSet<&[u8]> = entries.iter().map(|(name, _)| name.as_bytes()).collect();
        let is_own = |name: &Name| {
            let seen = &flight.seen;
            under_way.contains(name)
                || seen.name(dir, name).is_some()
                || self.is_known_better(seen, dir, name)
        };
        let gone = rows().filter(|row| row.child.is_some() && !listed.contains(row.name));
        let gone = gone.map(|row| (row.cookie, row.to_name())).filter(|(_, name)| !is_own(name));
        let gone: Vec<(Cookie, Name)> = gone.collect();
        let mut stale = Vec::new();
        for (cookie, name) in gone {
            let row = self.dirs.get_mut(&dir).and_then(|d| d.rows.remove(cookie, name.as_bytes()));
            stale.extend(row.into_iter().flat_map(|old| self.displaced((dir, &name), old.as_ref(), None)));
        }
        stale
    }
}
