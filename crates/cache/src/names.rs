//! What is known of a directory's names: under its grant, and of single names under grants of their own.

use crate::cache::Cache;
use crate::config::OnDisconnect;
use crate::flight::Flight;
use crate::grants::Held;
use crate::op::Stale;
use crate::rows::Child;
use crate::state::Directory;
use nigh_types::{Bug, Covers, Entry, Grant, Name, NodeId, Time, planted};

impl Cache {
    /// A directory's names, if their grant lives; ends them if it does not.
    pub(crate) fn names(&mut self, now: Time, dir: u64) -> Option<(&mut Directory, Held)> {
        if self.dirs.get(&dir)?.held.is_some_and(|h| !h.lives(now)) {
            if self.config.on_disconnect == OnDisconnect::Stale {
                // They may yet be served (see `drop_expired_names`), and until then to nobody.
                self.leave_listings(dir);
            } else {
                self.end_names(dir);
            }
            return None;
        }
        let directory = self.dirs.get_mut(&dir)?;
        directory.note_use(now);
        let held = directory.held?;
        Some((directory, held))
    }

    /// Puts a name into a directory's facts, if there is a grant for it. `None`: it does not exist.
    pub(crate) fn learn_name(
        &mut self,
        now: Time,
        flight: &Flight,
        dir: NodeId,
        name: &Name,
        entry: Option<&Entry>,
        grants: &[Grant],
    ) -> Option<Held> {
        if flight.seen.is_pushed(dir.ino, name) {
            // The same for what a name leads to.
            if flight.sequence.is_some() {
                self.doubt_order(dir);
            }
            return None;
        }
        let id = entry.map(|entry| entry.id);
        let crossed = match flight.sequence {
            Some(_) => self.is_change_in_doubt(flight, dir.ino, name, id),
            None => flight.crossed(dir.ino, name, id),
        };
        if crossed || flight.recalled(dir, Covers::Names) {
            if crossed || flight.sequence.is_some() {
                self.doubt_order(dir);
            }
            return None;
        }
        if flight.sequence.is_none() {
            self.mark_under_way(dir.ino, name, id);
        }
        let single = self.learn_single(now, flight, dir, (name, id), grants);
        if flight.sequence.is_none() && single.is_some() {
            return single;
        }
        let row = self.learn_row(now, flight, dir, name, entry, grants);
        row.or(single)
    }

    /// The same under a grant for that name alone. What is known of all names of the directory and says otherwise is older, and goes.
    pub(crate) fn learn_single(
        &mut self,
        now: Time,
        flight: &Flight,
        dir: NodeId,
        (name, id): (&Name, Option<NodeId>),
        grants: &[Grant],
    ) -> Option<Held> {
        let covers = if id.is_some() { Covers::Entry } else { Covers::Absence };
        let fresh = flight.granted(grants, dir, covers).map(|grant| Held::begin(grant, flight.sent));
        let Some(held) = fresh.filter(|held| held.lives(now)) else {
            if let Some(directory) = self.dirs.get_mut(&dir.ino) {
                directory.singles.remove(name);
            }
            return None;
        };
        let cookie = self.key.cookie(name.as_bytes());
        if flight.sequence.is_none()
            && let Some((directory, _)) = self.names(now, dir.ino)
        {
            let listed = directory.listed(cookie, name);
            if listed.is_some_and(|child| child.map(|child| child.id) != id) {
                self.end_names(dir.ino);
            }
        }
        if let Some(id) = id.filter(|_| flight.sequence.is_none()) {
            self.doubt_directory(id, (dir.ino, name));
        }
        self.directory(dir).singles.put(now, name, (id, held));
        self.recount(dir.ino);
        Some(held)
    }

    /// A name leads there. Where that is a directory that was known by another name, it was moved by others, or is a new one with
    /// the number of one that is gone, which such a remote does not tell apart: what was believed of names in it goes.
    fn doubt_directory(&mut self, id: NodeId, at: (u64, &Name)) {
        let home = self.inodes.get(&id.ino).and_then(|inode| inode.home.as_ref());
        if home.is_some_and(|(dir, name)| (*dir, name) == at) {
            return;
        }
        let Some(directory) = self.dirs.get(&id.ino) else { return };
        let singles = directory.singles.names().map(|name| Stale::Entry { dir: id.ino, name: name.clone() });
        let singles = singles.collect();
        self.drop_names(id, singles);
    }

    /// The same under the directory's grant.
    fn learn_row(
        &mut self,
        now: Time,
        flight: &Flight,
        dir: NodeId,
        name: &Name,
        entry: Option<&Entry>,
        grants: &[Grant],
    ) -> Option<Held> {
        let made_up = planted(Bug::KeepsUngranted).then(|| crate::grants::made_up(dir));
        let fresh = flight.granted(grants, dir, Covers::Names).or(made_up.as_ref());
        let fresh = fresh.map(|grant| Held::begin(grant, flight.sent));
        let cookie = self.key.cookie(name.as_bytes());
        if self.names(now, dir.ino).is_none() {
            let held = fresh.filter(|h| h.lives(now))?;
            if !self.may_begin(dir, &held) {
                return None;
            }
            if self.directory(dir).held.is_some() {
                self.end_names(dir.ino);
            }
            self.names_begin(dir.ino);
            self.directory(dir).held = Some(held);
        } else if fresh.is_none() && flight.sequence.is_none() {
            // An ungranted answer beside a living grant: not kept, unless it is of an own change, and later than that.
            return None;
        } else if flight.may_precede_names(dir, grants) {
            self.doubt_if_listed(dir, name, entry.map(|entry| entry.id));
            return None;
        }
        let directory = self.dirs.get_mut(&dir.ino)?;
        let held = directory.held?;
        let old = if entry.is_none() && directory.complete {
            directory.rows.remove(cookie, name.as_bytes())
        } else {
            let child = entry.map(Child::new);
            directory.rows.insert(cookie, name.as_bytes(), child)
        };
        self.recount(dir.ino);
        // Of its own changes the kernel knows.
        if let Some(old) = old.filter(|_| flight.sequence.is_none()) {
            let stale = self.displaced((dir.ino, name), old.as_ref(), entry.map(|e| e.id));
            if self.config.level.may_keep_pages() && !stale.is_empty() {
                self.invalidate(stale, None);
            }
        }
        Some(held)
    }

    /// The remote refused a change in a way that says whether a name exists (`None`: that something else
    /// is wrong with it). If the facts foresaw otherwise, all facts about the directory go, here and in
    /// the kernel.
    pub(crate) fn doubt_name(&mut self, dir: u64, name: &Name, exists: Option<bool>) {
        let cookie = self.key.cookie(name.as_bytes());
        if let Some(directory) = self.dirs.get_mut(&dir) {
            directory.singles.remove(name);
        }
        let Some(directory) = self.dirs.get(&dir).filter(|d| d.held.is_some()) else { return };
        let listed = directory.listed(cookie, name).map(|child| child.is_some());
        if listed.is_none() || listed == exists {
            return;
        }
        let id = directory.id;
        self.drop_names(id, Vec::new());
    }

    /// The answer to an own change of a name may be older than the grant under which that is known: then either may be right.
    pub(crate) fn doubt_if_listed(&mut self, dir: NodeId, name: &Name, id: Option<NodeId>) {
        let Some(directory) = self.dirs.get(&dir.ino) else { return };
        let listed = directory.listed(self.key.cookie(name.as_bytes()), name);
        if listed.is_some_and(|child| child.map(|child| child.id) != id) {
            self.doubt_order(dir);
        }
    }

    /// A recall went by while an own change of a directory was under way, and which of the two came first
    /// cannot be told: what was learned since may be older or newer than the change. All of it goes.
    pub(crate) fn doubt_order(&mut self, dir: NodeId) {
        for flight in self.flights.values_mut() {
            flight.seen.recalled.push((dir, Covers::Names));
        }
        self.drop_names(dir, Vec::new());
    }

    /// Nothing is known of a directory's names any more, here and in the kernel, nor `more` there.
    fn drop_names(&mut self, dir: NodeId, more: Vec<Stale>) {
        let mut stale = more;
        stale.extend(self.stale_names(dir));
        self.forget_names(dir.ino);
        if self.config.level.may_keep_pages() && !stale.is_empty() {
            self.invalidate(stale, None);
        }
    }

    /// Nothing is known of a directory's names any more.
    pub(crate) fn forget_names(&mut self, dir: u64) {
        if let Some(directory) = self.dirs.get_mut(&dir) {
            directory.singles.clear();
        }
        self.end_names(dir);
    }

    /// A directory's grant has ended.
    pub(crate) fn end_names(&mut self, dir: u64) {
        self.leave_listings(dir);
        if let Some(directory) = self.dirs.get_mut(&dir) {
            directory.forget();
        }
        self.recount(dir);
    }

    /// With a directory's grant ends the listing that the kernel keeps. What a listing in flight has brought goes on
    /// serving those who wait for it, and nobody else.
    fn leave_listings(&mut self, dir: u64) {
        self.watches.unsettle(self.clock, dir);
        let Some(directory) = self.dirs.get_mut(&dir) else { return };
        let flight = directory.listing.and_then(|call| self.flights.get_mut(&call));
        if let Some(flight) = flight.filter(|f| f.begun && f.aside.is_none()) {
            let listed = directory.progress.unwrap_or_default();
            flight.aside = Some(Box::new(directory.rows.up_to(listed)));
        }
        directory.progress = None;
        let listed = directory.kernel_version.take().is_some();
        if listed && self.inodes.get(&dir).is_some_and(|i| i.opens > 0) {
            self.invalidate(vec![Stale::Data { ino: dir, offset: 0, length: 0 }], None);
        }
    }

    /// Facts whose grant has ended are kept for as long as nobody needs their place, if they may yet be served
    /// ([`OnDisconnect::Stale`]): but not when an own change has made them older than what we did.
    pub(crate) fn drop_expired_names(&mut self, dir: u64) {
        if self.dirs.get(&dir).is_some_and(|d| d.held.is_some_and(|held| !held.lives(self.clock))) {
            self.end_names(dir);
        }
    }
}

#[cfg(test)]
mod tests;
