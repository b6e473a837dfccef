//! Mapping of events to lease keys. An event only invalidates: facts are read anew, and no content of an event is
//! trusted.

use nigh_lease::{Change, LeaseKey, Object};
use nigh_types::{LeaseScope, Name};

/// An event with resolved handles; `None` for an object that is gone or was never granted.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Hint {
    pub(crate) mask: u64,
    pub(crate) dir: Option<(Object, Option<Name>)>,
    pub(crate) own: Option<Object>,
    /// The file's current directory and name, if the event has no directory or perhaps a former one.
    pub(crate) located_in: Option<(Object, Name)>,
    /// Size and times equal those at the last recall.
    pub(crate) unchanged: bool,
}

/// Creation and removal of names.
const NAMES: u64 = libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO;
/// Changes of an object's attributes or location.
const INODE: u64 = libc::FAN_ATTRIB | libc::FAN_MODIFY | libc::FAN_MOVE_SELF | libc::FAN_DELETE_SELF;
const DATA: u64 = libc::FAN_MODIFY | libc::FAN_CLOSE_WRITE | libc::FAN_DELETE_SELF;

/// The watched events.
pub(crate) const MASK: u64 = NAMES | INODE | DATA | libc::FAN_ONDIR | libc::FAN_EVENT_ON_CHILD;

/// Private event bit: this process removed the object, and the lease table knows that. Only the mark is dropped;
/// nothing is recalled.
pub(crate) const OWN_DELETE_SELF: u64 = 1 << 63;

/// Whether attributes may have changed. Stores into a mapping cause no event, so the file's times are compared on
/// close.
pub(crate) fn is_of_attributes(mask: u64) -> bool {
    mask & (INODE | libc::FAN_CLOSE_WRITE) != 0
}

/// Returns the directory whose permissions may have changed.
pub(crate) fn directory_of_rights(hint: &Hint) -> Option<Object> {
    let of_rights = libc::FAN_ATTRIB | libc::FAN_ONDIR;
    hint.own.filter(|_| hint.mask & of_rights == of_rights)
}

/// Collects the keys to recall.
pub(crate) fn keys(hint: &Hint, changes: &mut Vec<Change>) {
    let Hint { mask, dir, own, located_in: home, unchanged: same } = hint;
    let mut push = |object: Object, covers: LeaseScope, name: Option<&Name>| {
        let names = name.into_iter().cloned().collect();
        changes.push(Change { key: LeaseKey { object, covers }, names, writes: false, can_update: false });
    };
    let attributes = mask & INODE != 0 || (is_of_attributes(*mask) && !same);
    if let Some((dir, name)) = dir {
        if mask & NAMES != 0 {
            push(*dir, LeaseScope::Attributes, None);
        }
        if mask & NAMES != 0 || attributes {
            push(*dir, LeaseScope::Directory, name.as_ref());
        }
    }
    if let Some(own) = own {
        if attributes {
            push(*own, LeaseScope::Attributes, None);
        }
        if mask & DATA != 0 {
            push(*own, LeaseScope::Data, None);
        }
        if mask & libc::FAN_DELETE_SELF != 0 {
            push(*own, LeaseScope::Directory, None);
        }
    }
    if let Some((dir, name)) = home.as_ref().filter(|_| attributes) {
        push(*dir, LeaseScope::Directory, Some(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LeaseScope::{Attributes, Data, Directory};

    const DIR: Object = Object { filesystem: 1, ino: 2, birth: 3 };
    const FILE: Object = Object { filesystem: 1, ino: 4, birth: 5 };
    const HOME: Object = Object { filesystem: 1, ino: 6, birth: 7 };

    fn name() -> Name {
        Name::new(b"n").unwrap()
    }

    fn told(mask: u64, dir: bool, own: bool, same: bool) -> Vec<(Object, LeaseScope, usize)> {
        let dir = dir.then(|| (DIR, Some(name())));
        let home = (own && dir.is_none()).then(|| (HOME, name()));
        let mut changes = Vec::new();
        keys(&Hint { mask, dir, own: own.then_some(FILE), located_in: home, unchanged: same }, &mut changes);
        assert!(changes.iter().all(|change| !change.writes));
        changes.iter().map(|change| (change.key.object, change.key.covers, change.names.len())).collect()
    }

    #[test]
    fn attribute_event_of_directory_counts_as_change_of_permissions() {
        let hint = |mask, own| Hint { mask, own, ..Hint::default() };
        let rights = libc::FAN_ATTRIB | libc::FAN_ONDIR;
        assert_eq!(directory_of_rights(&hint(rights | libc::FAN_MOVE_SELF, Some(FILE))), Some(FILE));
        assert_eq!(directory_of_rights(&hint(libc::FAN_ATTRIB, Some(FILE))), None, "a file");
        assert_eq!(directory_of_rights(&hint(libc::FAN_CREATE | libc::FAN_ONDIR, Some(FILE))), None);
        assert_eq!(directory_of_rights(&hint(rights, None)), None, "no grant is held");
    }

    #[test]
    fn each_event_maps_to_its_lease_keys() {
        for mask in [libc::FAN_CREATE, libc::FAN_DELETE, libc::FAN_MOVED_FROM, libc::FAN_MOVED_TO] {
            for mask in [mask, mask | libc::FAN_ONDIR] {
                assert_eq!(told(mask, true, false, false), [(DIR, Attributes, 0), (DIR, Directory, 1)]);
            }
        }
        let child = [(DIR, Directory, 1), (FILE, Attributes, 0)];
        assert_eq!(told(libc::FAN_ATTRIB, true, true, false), child);
        assert_eq!(told(libc::FAN_ATTRIB, true, true, true), child, "only what is closed is compared");
        let written = [child[0], child[1], (FILE, Data, 0)];
        for mask in [libc::FAN_MODIFY, libc::FAN_CLOSE_WRITE, libc::FAN_MODIFY | libc::FAN_CLOSE_WRITE] {
            assert_eq!(told(mask, true, true, false), written);
        }
        assert_eq!(told(libc::FAN_MODIFY | libc::FAN_CLOSE_WRITE, true, true, true), written);
        assert_eq!(told(libc::FAN_CLOSE_WRITE, true, true, true), [(FILE, Data, 0)]);
        assert_eq!(told(libc::FAN_ATTRIB, false, true, false), [(FILE, Attributes, 0), (HOME, Directory, 1)]);
        assert_eq!(
            told(libc::FAN_MOVE_SELF, false, true, false),
            [(FILE, Attributes, 0), (HOME, Directory, 1)]
        );
        let gone = [(FILE, Attributes, 0), (FILE, Data, 0), (FILE, Directory, 0), (HOME, Directory, 1)];
        assert_eq!(told(libc::FAN_DELETE_SELF, false, true, false), gone);
        assert_eq!(told(OWN_DELETE_SELF, true, true, false), []);
        assert_eq!(
            told(libc::FAN_MODIFY, true, false, false),
            [(DIR, Directory, 1)],
            "the file has no grant of its own"
        );
    }
}
