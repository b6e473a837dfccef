//! Calls that later requests may join.

use super::{CallKind, Calls};
use nigh_types::{CallId, Name};
use rustc_hash::FxHashMap;

/// Calls by what they ask for.
#[derive(Clone, Debug, Default)]
pub(super) struct Joins {
    lookups: FxHashMap<(u64, Name), CallId>,
    attrs: FxHashMap<u64, CallId>,
    xattrs: FxHashMap<u64, CallId>,
}

impl Calls {
    /// Lets requests join a call that was just sent, but not a call that was not put out.
    pub fn enter_joins(&mut self, id: CallId, purpose: CallKind) {
        if !self.inflight.contains_key(&id) {
            return;
        }
        match purpose {
            CallKind::Lookup { dir, name } => drop(self.joins.lookups.insert((dir, name), id)),
            CallKind::Attr { ino } => drop(self.joins.attrs.insert(ino, id)),
            CallKind::Xattrs { ino } => drop(self.joins.xattrs.insert(ino, id)),
            _ => {}
        }
    }

    pub fn leave_joins(&mut self, id: CallId, purpose: &CallKind) {
        let joins = &mut self.joins;
        match purpose {
            CallKind::Lookup { dir, name } => {
                let key = (*dir, name.clone());
                if joins.lookups.get(&key) == Some(&id) {
                    joins.lookups.remove(&key);
                }
            }
            CallKind::Attr { ino } if joins.attrs.get(ino) == Some(&id) => drop(joins.attrs.remove(ino)),
            CallKind::Xattrs { ino } if joins.xattrs.get(ino) == Some(&id) => drop(joins.xattrs.remove(ino)),
            _ => {}
        }
    }

    /// Keeps requests from joining calls for an inode whose number was reused.
    pub fn leave_joins_of_inode(&mut self, ino: u64) {
        self.joins.attrs.remove(&ino);
        self.joins.xattrs.remove(&ino);
        self.joins.lookups.retain(|(dir, _), _| *dir != ino);
    }

    pub fn lookup_call(&self, key: &(u64, Name)) -> Option<CallId> {
        self.joins.lookups.get(key).copied()
    }

    pub fn attr_call(&self, ino: u64) -> Option<CallId> {
        self.joins.attrs.get(&ino).copied()
    }

    pub fn xattr_call(&self, ino: u64) -> Option<CallId> {
        self.joins.xattrs.get(&ino).copied()
    }

    /// Returns the inodes whose attributes are being asked for.
    pub fn inodes_with_attr_call(&self) -> impl Iterator<Item = u64> {
        self.joins.attrs.keys().copied()
    }

    pub fn has_attr_calls(&self) -> bool {
        !self.joins.attrs.is_empty()
    }

    #[cfg(test)]
    pub fn has_joins(&self) -> bool {
        let Joins { lookups, attrs, xattrs } = &self.joins;
        !(lookups.is_empty() && attrs.is_empty() && xattrs.is_empty())
    }

    /// Returns whether requests may join a call in flight: nothing that it may bring has changed since it was sent.
    pub fn is_joinable(&self, id: CallId) -> bool {
        self.inflight.get(&id).is_some_and(|call| call.race_log.is_empty())
    }
}
