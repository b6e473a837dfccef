//! Capabilities of a caller.

/// Linux capabilities with which the client's kernel checked a call, and the ids of the inodes to which they apply.
///
/// The capabilities of a process in a user namespace apply to an inode only if the namespace maps the inode's owner and
/// group (`privileged_wrt_inode_uidgid`).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Privileges {
    /// A bit for each capability, numbered as in `capability.h`.
    pub capabilities: u64,
    /// At most [`Privileges::MOST_RANGES`].
    pub users: Vec<IdRange>,
    /// At most [`Privileges::MOST_RANGES`].
    pub groups: Vec<IdRange>,
}

/// `count` ids from `first` on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct IdRange {
    pub first: u32,
    pub count: u32,
}

impl IdRange {
    /// All ids.
    pub const ALL: IdRange = IdRange { first: 0, count: u32::MAX };

    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        id.checked_sub(self.first).is_some_and(|offset| offset < self.count)
    }
}

impl Privileges {
    /// As many lines as Linux allows in a `uid_map`.
    pub const MOST_RANGES: usize = 340;

    /// Capabilities that apply to all inodes: those of a process in the machine's initial user namespace.
    #[must_use]
    pub fn over_all(capabilities: u64) -> Privileges {
        Privileges { capabilities, users: vec![IdRange::ALL], groups: vec![IdRange::ALL] }
    }

    #[must_use]
    pub fn hold_over_user(&self, uid: u32) -> bool {
        self.users.iter().any(|range| range.contains(uid))
    }

    #[must_use]
    pub fn hold_over_group(&self, gid: u32) -> bool {
        self.groups.iter().any(|range| range.contains(gid))
    }

    /// Whether they apply to all inodes. Some capabilities count only then (`capable`).
    #[must_use]
    pub fn hold_over_all(&self) -> bool {
        self.users.contains(&IdRange::ALL) && self.groups.contains(&IdRange::ALL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_contains_its_ids_and_no_others() {
        let range = IdRange { first: 100, count: 3 };
        let inside: Vec<u32> = (0..200).chain([u32::MAX]).filter(|id| range.contains(*id)).collect();
        assert_eq!(inside, [100, 101, 102]);
        assert!(!IdRange { first: 5, count: 0 }.contains(5));
        assert!(IdRange::ALL.contains(0) && IdRange::ALL.contains(u32::MAX - 1));
        assert!(!IdRange::ALL.contains(u32::MAX), "no id");
        let last = IdRange { first: u32::MAX - 1, count: u32::MAX };
        assert!(last.contains(u32::MAX - 1) && !last.contains(0));
    }

    #[test]
    fn privileges_over_all_inodes_need_all_users_and_all_groups() {
        assert!(Privileges::over_all(1).hold_over_all());
        assert!(!Privileges { groups: vec![], ..Privileges::over_all(1) }.hold_over_all());
        let half = IdRange { first: 1, count: u32::MAX - 1 };
        assert!(!Privileges { users: vec![half], ..Privileges::over_all(1) }.hold_over_all());
        assert!(!Privileges::default().hold_over_user(0));
    }
}
