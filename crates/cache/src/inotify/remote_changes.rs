//! Remote changes that came as updates in place (docs/decisions/0014-pushes.md). The directory's facts are up to date,
//! so no listing is needed, and no short-lived name is missed.

use super::{Change, Seen, Stat, seen, snapshot};
use crate::cache::Cache;
use nigh_types::{Attr, Name, NodeId};
use std::collections::BTreeMap;

/// Names and attributes of one update.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pushed {
    names: Vec<(u64, Name)>,
    attributes: Vec<(NodeId, Attr)>,
}

impl Pushed {
    pub fn name(&mut self, dir: u64, name: &Name) {
        self.names.push((dir, name.clone()));
    }

    pub fn attr(&mut self, node: NodeId, attr: Attr) {
        self.attributes.push((node, attr));
    }
}

impl Cache {
    /// Reports an update, all of which is in the facts by now.
    pub(crate) fn others_changed(&mut self, pushed: &Pushed) {
        if self.watches.is_empty() {
            return;
        }
        let mut now = BTreeMap::<u64, Vec<(Name, Option<Seen>)>>::new();
        for (dir, name) in &pushed.names {
            let cookie = self.key.cookie(name.as_bytes());
            let row = self.dirs.get(dir).and_then(|d| d.rows.find(cookie, name.as_bytes()));
            now.entry(*dir).or_default().push((name.clone(), row.and_then(seen).map(|(_, seen)| seen)));
        }
        for (node, attr) in &pushed.attributes {
            let home =
                self.inodes.get(&node.ino).filter(|i| i.id == *node).and_then(|i| i.parent_entry.clone());
            let Some((dir, name)) = home else { continue };
            let told = now.entry(dir).or_default();
            let pictured = self.watches.dirs.get(&dir).and_then(|watched| watched.picture.as_ref());
            let known = pictured.and_then(|picture| picture.seen(&name)).is_some_and(|seen| seen.id == *node);
            if known && !told.iter().any(|(of, _)| *of == name) {
                told.push((name, Some(Seen::new(*node, attr.kind(), Some(Stat::of(attr))))));
            }
        }
        let differences = now.into_iter().filter_map(|(dir, names)| self.differs(dir, names)).collect();
        self.watches.tell(snapshot::happened(differences));
    }

    fn differs(&mut self, dir: u64, mut names: Vec<(Name, Option<Seen>)>) -> Option<snapshot::Difference> {
        let busy = self.inodes_under_way();
        let own = self.names_under_way(dir);
        // Unsettled directories are compared as a whole.
        let watched = self.watches.dirs.get_mut(&dir).filter(|watched| !watched.unsettled)?;
        if watched.too_large && watched.untold == 0 {
            self.watches.tell(vec![Change::Gap { dir }]);
            return None;
        }
        names.retain(|(name, _)| {
            let skips = own.contains(name);
            if skips {
                watched.skipped.insert(name.clone());
            }
            !skips
        });
        for (_, seen) in &mut names {
            if let Some(seen) = seen.as_mut().filter(|seen| busy.contains(&seen.id.ino)) {
                seen.stat = None;
            }
        }
        self.watches.paint(dir, |picture| picture.take(dir, names))
    }
}
