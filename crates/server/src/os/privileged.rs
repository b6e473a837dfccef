//! Capabilities of a caller that apply to an operation. See docs/decisions/0005-credentials.md.
//!
//! The client's kernel has checked the operation with the caller's capabilities there. The server applies them as
//! that kernel does: only over inodes whose owner and group are mapped into the caller's user namespace.

use nigh_types::{Attr, Credentials, Privileges, SetAttr};
use rustix::thread::CapabilitySet;

/// Capabilities that a user namespace grants over inodes with mapped ids (`capable_wrt_inode_uidgid`).
const OVER_INODES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETFCAP);
/// The subset that depends on a directory's owner and group when a name in it is looked up, made or removed.
const OVER_DIRECTORIES: CapabilitySet =
    CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::DAC_READ_SEARCH).union(CapabilitySet::FSETID);
/// Capabilities that apply only in the initial user namespace (`capable`): devices, reserved blocks and quotas.
const OVER_MACHINE: CapabilitySet = CapabilitySet::MKNOD.union(CapabilitySet::SYS_RESOURCE);

/// Capabilities for an operation on one inode.
pub(crate) fn over_inode(who: &Credentials, attr: &Attr) -> CapabilitySet {
    let Some((given, privileges)) = given(who) else { return CapabilitySet::empty() };
    let over = if holds(privileges, attr) { OVER_INODES } else { CapabilitySet::empty() };
    given & (over | machine(privileges))
}

/// Capabilities for a change of attributes: ownership cannot pass to an unmapped owner or group.
pub(crate) fn over_change(who: &Credentials, attr: &Attr, set: &SetAttr) -> CapabilitySet {
    let held = over_inode(who, attr);
    let Some((_, privileges)) = given(who) else { return held };
    let mapped = set.uid.is_none_or(|uid| privileges.hold_over_user(uid))
        && set.gid.is_none_or(|gid| privileges.hold_over_group(gid));
    if mapped { held } else { held - CapabilitySet::CHOWN }
}

/// Capabilities for extended attributes of one inode. Those in the `trusted` namespace require the initial user
/// namespace.
pub(crate) fn over_xattrs(who: &Credentials, attr: &Attr) -> CapabilitySet {
    let Some((given, privileges)) = given(who) else { return CapabilitySet::empty() };
    let trusted = if privileges.hold_over_all() { CapabilitySet::SYS_ADMIN } else { CapabilitySet::empty() };
    over_inode(who, attr) | (given & trusted)
}

/// Capabilities for changes of names in directories. `named` are the inodes whose names are removed or added: a
/// sticky directory protects them, and a hard link to another user's file requires a right over the file.
pub(crate) fn over_names<'a>(
    who: &Credentials,
    dirs: impl IntoIterator<Item = &'a Attr>,
    named: impl IntoIterator<Item = &'a Attr>,
) -> CapabilitySet {
    let Some((given, privileges)) = given(who) else { return CapabilitySet::empty() };
    let mut held = machine(privileges);
    if dirs.into_iter().all(|dir| holds(privileges, dir)) {
        held |= OVER_DIRECTORIES;
    }
    if named.into_iter().all(|attr| holds(privileges, attr)) {
        held |= CapabilitySet::FOWNER;
    }
    given & held
}

/// Capabilities for data of an open file: its blocks, and the bits that a write clears
/// (`setattr_should_drop_suidgid`).
pub(crate) fn over_data(who: &Credentials) -> CapabilitySet {
    let Some((given, privileges)) = given(who) else { return CapabilitySet::empty() };
    let bits = if privileges.hold_over_all() { CapabilitySet::FSETID } else { CapabilitySet::empty() };
    given & (machine(privileges) | bits)
}

fn given(who: &Credentials) -> Option<(CapabilitySet, &Privileges)> {
    let privileges = who.privileges.as_deref()?;
    Some((CapabilitySet::from_bits_truncate(privileges.capabilities), privileges))
}

fn holds(privileges: &Privileges, attr: &Attr) -> bool {
    privileges.hold_over_user(attr.uid) && privileges.hold_over_group(attr.gid)
}

fn machine(privileges: &Privileges) -> CapabilitySet {
    if privileges.hold_over_all() { OVER_MACHINE } else { CapabilitySet::empty() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::{IdRange, Timestamp};

    fn owned(uid: u32, gid: u32) -> Attr {
        let at = Timestamp { secs: 0, nanos: 0 };
        let (size, blocks, mode, nlink, rdev, birth_ns) = (0, 0, 0o100_600, 1, 0, 0);
        Attr { size, blocks, mode, nlink, uid, gid, rdev, atime: at, mtime: at, ctime: at, birth_ns }
    }

    fn container(capabilities: u64) -> Credentials {
        let ranges = vec![IdRange { first: 1001, count: 1 }, IdRange { first: 100_000, count: 10 }];
        let privileges = Privileges { capabilities, users: ranges.clone(), groups: ranges };
        Credentials { uid: 1001, gid: 1001, groups: vec![], privileges: Some(Box::new(privileges)) }
    }

    #[test]
    fn container_capabilities_apply_only_to_inodes_with_mapped_ids() {
        let who = container(u64::MAX);
        for (uid, gid) in [(1001, 1001), (100_009, 100_000)] {
            assert_eq!(over_inode(&who, &owned(uid, gid)), OVER_INODES);
        }
        for (uid, gid) in [(0, 1001), (1001, 0), (100_010, 1001), (1002, 1001), (65_534, 65_534)] {
            assert!(over_inode(&who, &owned(uid, gid)).is_empty(), "{uid} {gid}");
            assert!(over_xattrs(&who, &owned(uid, gid)).is_empty());
        }
        assert!(over_data(&who).is_empty());
        assert_eq!(
            over_inode(&container(1), &owned(1001, 1001)),
            CapabilitySet::CHOWN,
            "and no more than it has"
        );
    }

    #[test]
    fn container_cannot_chown_to_unmapped_ids() {
        let (who, file) = (container(u64::MAX), owned(1001, 1001));
        let chown = |uid, gid| over_change(&who, &file, &SetAttr { uid, gid, ..SetAttr::default() });
        assert!(chown(Some(100_000), Some(100_001)).contains(CapabilitySet::CHOWN));
        for (uid, gid) in [(Some(0), None), (None, Some(0)), (Some(100_000), Some(27))] {
            assert!(!chown(uid, gid).contains(CapabilitySet::CHOWN), "{uid:?} {gid:?}");
        }
    }

    #[test]
    fn capabilities_over_directory_and_over_named_inode_are_separate() {
        let who = container(u64::MAX);
        let (own, foreign) = (owned(100_000, 100_000), owned(0, 0));
        assert_eq!(over_names(&who, [&own], [&foreign]), OVER_DIRECTORIES);
        assert_eq!(over_names(&who, [&foreign], [&own]), CapabilitySet::FOWNER);
        assert_eq!(over_names(&who, [&own, &foreign], [&own, &foreign]), CapabilitySet::empty());
    }

    #[test]
    fn host_service_capabilities_apply_to_all_inodes() {
        let privileges = Some(Box::new(Privileges::over_all(u64::MAX)));
        let who = Credentials { privileges, ..container(0) };
        assert_eq!(over_inode(&who, &owned(7, 8)), OVER_INODES | OVER_MACHINE);
        assert!(over_xattrs(&who, &owned(7, 8)).contains(CapabilitySet::SYS_ADMIN));
        assert_eq!(over_data(&who), OVER_MACHINE | CapabilitySet::FSETID);
        let none = Credentials { privileges: None, ..who };
        assert!(over_inode(&none, &owned(1001, 1001)).is_empty() && over_data(&none).is_empty());
    }
}
