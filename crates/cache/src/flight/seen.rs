//! What a call that is out has missed, and is told of.

use super::Flight;
use crate::cache::Cache;
use nigh_types::{Cookie, Covers, Name, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// What became of a name, as far as was learned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Learned {
    pub cookie: Cookie,
    /// What it leads to now.
    pub id: Option<NodeId>,
    /// What the latest own change that was answered made of it; else others were asked.
    pub own: Option<Option<NodeId>>,
    /// A grant on its directory's names lived from before that change was sent, and lives until the directory has more
    /// gaps: what others made of it later was told.
    pub until_gap: Option<u64>,
}

/// What happened to facts after a call was sent: its reply may be older (invariant 4).
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// All grants ended: whatever the reply says is not kept.
    pub lapsed: bool,
    pub recalled: Vec<(NodeId, Covers)>,
    /// Inodes that own mutations changed.
    pub inodes: Vec<u64>,
    pub names: BTreeMap<u64, BTreeMap<Name, Learned>>,
    /// Names that others bound or unbound: held (`None`), or known since, unless [`crate::state::Directory::gaps`] has
    /// grown.
    pub pushed: BTreeMap<u64, BTreeMap<Name, Option<u64>>>,
    /// Inodes to which such names led or lead.
    pub told: BTreeSet<u64>,
    /// Of a change: directories whose names it binds or unbinds, and were granted since. Whether its answer is older than that grant
    /// is not known, unless it comes with a grant itself.
    pub granted: BTreeSet<u64>,
}

impl Seen {
    pub fn is_empty(&self) -> bool {
        let own = self.inodes.is_empty() && self.names.is_empty();
        !self.lapsed && self.recalled.is_empty() && own && self.pushed.is_empty() && self.told.is_empty()
    }

    /// Whether others changed that name, or are about to.
    pub fn is_pushed(&self, dir: u64, name: &Name) -> bool {
        self.pushed.get(&dir).is_some_and(|names| names.contains_key(name))
    }

    /// An own change of that name is the later.
    pub(super) fn forget_pushed(&mut self, dir: u64, name: &Name) {
        forget(&mut self.pushed, dir, name);
    }

    /// Whether others changed a name of that directory.
    pub fn was_pushed_in(&self, dir: u64) -> bool {
        self.pushed.contains_key(&dir)
    }

    pub fn name(&self, dir: u64, name: &Name) -> Option<&Learned> {
        self.names.get(&dir)?.get(name)
    }

    /// Names of a directory that own mutations bound or unbound.
    pub fn own_names(&self, dir: u64) -> impl Iterator<Item = (&Name, &Learned)> {
        self.names.get(&dir).into_iter().flatten()
    }

    /// What an own change made of it stays known.
    pub fn put_name(&mut self, dir: u64, name: &Name, learned: Learned) {
        let names = self.names.entry(dir).or_default();
        let own = learned.own.or_else(|| names.get(name)?.own);
        names.insert(name.clone(), Learned { own, ..learned });
    }

    /// Others changed that name later.
    pub fn forget_name(&mut self, dir: u64, name: &Name) {
        forget(&mut self.names, dir, name);
    }
}

fn forget<T>(of: &mut BTreeMap<u64, BTreeMap<Name, T>>, dir: u64, name: &Name) {
    if let Some(names) = of.get_mut(&dir) {
        names.remove(name);
        if names.is_empty() {
            of.remove(&dir);
        }
    }
}

impl Cache {
    /// Names of a directory that own changes under way bind or unbind.
    pub(crate) fn names_under_way(&self, dir: u64) -> Vec<Name> {
        let touched = self.flights.values().flat_map(|f| f.purpose.names());
        touched.filter(|(d, _)| *d == dir).map(|(_, name)| name.clone()).collect()
    }

    /// Whether own changes of that name are.
    pub(crate) fn is_under_way(&self, dir: u64, name: &Name) -> bool {
        self.flights.values().any(|flight| flight.purpose.binds(dir, name))
    }

    /// Whether own changes of names of that directory are.
    pub(crate) fn is_changing(&self, dir: u64) -> bool {
        self.flights.values().any(|flight| flight.purpose.binds_in(dir))
    }

    /// A name was learned while own changes of it are under way: their answers may be older.
    pub(crate) fn mark_under_way(&mut self, dir: u64, name: &Name, id: Option<NodeId>) {
        let learned = Learned { cookie: self.key.cookie(name.as_bytes()), id, own: None, until_gap: None };
        for flight in self.flights.values_mut().filter(|flight| flight.purpose.binds(dir, name)) {
            flight.seen.put_name(dir, name, learned);
        }
    }

    /// The same for attributes.
    pub(crate) fn mark_attr_under_way(&mut self, ino: u64) {
        for flight in self.flights.values_mut().filter(|f| f.sequence.is_some()) {
            flight.seen.inodes.push(ino);
        }
    }

    /// Marks what an own mutation changed in every other call in flight.
    pub(crate) fn mark_inode(&mut self, ino: u64) {
        self.drop_expired(ino);
        self.space = None;
        for flight in self.flights.values_mut().filter(|flight| flight.purpose.minds()) {
            flight.seen.inodes.push(ino);
        }
    }

    /// The gaps of a directory whose names are granted, and were when that change was sent, without a break: what others
    /// made of them meanwhile was told.
    fn held_since_sent(&self, change: &Flight, dir: u64) -> Option<u64> {
        let directory = self.dirs.get(&dir).filter(|_| !change.seen.granted.contains(&dir))?;
        directory.held.filter(|held| held.recallable && held.lives(self.clock)).map(|_| directory.gaps)
    }

    /// Whether what was learned of a name while an own change of it was out says otherwise, and which of the two is the later cannot be
    /// told: another own change made that of it, or others may have.
    pub(crate) fn is_change_in_doubt(
        &self,
        change: &Flight,
        dir: u64,
        name: &Name,
        id: Option<NodeId>,
    ) -> bool {
        let own = change.seen.name(dir, name).and_then(|learned| learned.own);
        let by_others = change.crossed(dir, name, id) && self.held_since_sent(change, dir).is_none();
        by_others || own.is_some_and(|own| own != id)
    }

    /// Not if the directory was recalled since: then calls sent later know better. To be said before anything is learned of that change.
    pub(crate) fn mark_name(&mut self, by: &Flight, (dir, name): (u64, &Name), id: Option<NodeId>) {
        self.drop_expired_names(dir);
        if let Some(directory) = self.dirs.get_mut(&dir) {
            directory.version += 1;
        }
        if self.id_of(dir).is_some_and(|id| by.recalled(id, Covers::Names)) {
            return;
        }
        let (cookie, until_gap) = (self.key.cookie(name.as_bytes()), self.held_since_sent(by, dir));
        let learned = Learned { cookie, id, own: Some(id), until_gap };
        for flight in self.flights.values_mut().filter(|flight| flight.purpose.minds()) {
            if flight.sequence.is_none() {
                flight.seen.forget_pushed(dir, name);
            }
            flight.seen.put_name(dir, name, learned);
        }
    }
}
