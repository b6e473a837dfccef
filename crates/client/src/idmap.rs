//! Mapping of user and group ids between this machine and the server, at the mount's edge only: requests are mapped
//! before they become operations, replies on their way to the kernel. The cache holds the server's ids. See
//! docs/decisions/0005-credentials.md.

mod acl;
mod choice;

use crate::reply::ReplyFormat;
pub use choice::{IdMapChoice, IdMapError};
use nigh_cache::{Op, OpReply};
use nigh_types::{Attr, Credentials, Errno, IdKind};
use std::collections::BTreeMap;

/// Server id for callers without a counterpart: Linux's overflow id.
const OVERFLOW_ID: u32 = 65_534;
/// Local id shown for server ids without a counterpart: the last valid id (all ones is none). No process runs with
/// it. Some run under the overflow id, which would then own all these files.
const STRANGER: u32 = u32::MAX - 1;

/// Pairs of local ids (of this machine) and remote ids (of the server).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct IdMap {
    users: Pairs,
    groups: Pairs,
}

/// Pairs of ids of one kind. Invariant: each local and each remote id is in one pair at most.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Pairs {
    to_remote: BTreeMap<u32, u32>,
    to_local: BTreeMap<u32, u32>,
    /// Whether ids outside all pairs have no counterpart. Otherwise they pass unchanged, unless that would make them
    /// an id of a pair.
    closed: bool,
    /// Local id shown for remote ids without a counterpart. As a new owner, or in a new ACL, it is invalid, since its
    /// remote id is ambiguous.
    stranger: u32,
}

impl Default for Pairs {
    fn default() -> Pairs {
        Pairs { to_remote: BTreeMap::new(), to_local: BTreeMap::new(), closed: false, stranger: STRANGER }
    }
}

impl Pairs {
    /// Adds a pair; false if one of the two ids is in a pair already.
    fn pair(&mut self, local: u32, remote: u32) -> bool {
        let fresh = !self.to_remote.contains_key(&local) && !self.to_local.contains_key(&remote);
        if fresh {
            self.to_remote.insert(local, remote);
            self.to_local.insert(remote, local);
        }
        fresh
    }

    fn local(&self, remote: u32) -> Option<u32> {
        let passes = !self.closed && !self.to_remote.contains_key(&remote);
        self.to_local.get(&remote).copied().or(passes.then_some(remote))
    }

    /// The local id, or the stranger id if there is none.
    fn local_or_stranger(&self, remote: u32) -> u32 {
        self.local(remote).unwrap_or(self.stranger)
    }

    fn remote(&self, local: u32) -> Option<u32> {
        if local == self.stranger {
            return None;
        }
        let passes = !self.closed && !self.to_local.contains_key(&local);
        self.to_remote.get(&local).copied().or(passes.then_some(local))
    }

    fn is_empty(&self) -> bool {
        self.to_remote.is_empty() && !self.closed
    }
}

impl IdMap {
    fn pairs(&self, kind: IdKind) -> &Pairs {
        match kind {
            IdKind::User => &self.users,
            IdKind::Group => &self.groups,
        }
    }

    fn pairs_mut(&mut self, kind: IdKind) -> &mut Pairs {
        match kind {
            IdKind::User => &mut self.users,
            IdKind::Group => &mut self.groups,
        }
    }

    /// Whether all ids pass unchanged.
    pub(crate) fn is_empty(&self) -> bool {
        self.users.is_empty() && self.groups.is_empty()
    }

    /// Maps a caller's credentials. Ids outside a closed map become the overflow id.
    pub(crate) fn map_caller(&self, local: Credentials) -> Credentials {
        if self.is_empty() {
            return local;
        }
        Credentials {
            uid: self.users.remote(local.uid).unwrap_or(OVERFLOW_ID),
            gid: self.groups.remote(local.gid).unwrap_or(OVERFLOW_ID),
            groups: local.groups.into_iter().filter_map(|gid| self.groups.remote(gid)).collect(),
            // Capabilities apply to inodes with this machine's ids.
            privileges: None,
        }
    }

    /// Maps a request to the server's ids; `EINVAL` for an owner or an ACL entry without a counterpart, or with the
    /// stranger id.
    pub(crate) fn map_request(&self, (shape, mut op): (ReplyFormat, Op)) -> Result<(ReplyFormat, Op), Errno> {
        if self.is_empty() {
            return Ok((shape, op));
        }
        let shape = match &mut op {
            Op::SetAttr { set, .. } => {
                for (id, pairs) in [(&mut set.uid, &self.users), (&mut set.gid, &self.groups)] {
                    if let Some(local) = *id {
                        *id = Some(pairs.remote(local).ok_or(Errno::INVAL)?);
                    }
                }
                shape
            }
            Op::SetXattr { name, value, .. } if acl::is_acl(name) => {
                let mapped = acl::map(value, |kind, local| self.pairs(kind).remote(local));
                mapped.then_some(shape).ok_or(Errno::INVAL)?
            }
            Op::GetXattr { name, .. } if acl::is_acl(name) => ReplyFormat::Acl,
            _ => shape,
        };
        Ok((shape, op))
    }

    /// Maps a reply to this machine's ids.
    pub(crate) fn shown(&self, shape: ReplyFormat, mut answer: OpReply) -> OpReply {
        if self.is_empty() {
            return answer;
        }
        match &mut answer {
            OpReply::Node(node) | OpReply::Created(node, _) => self.map_attr(&mut node.attr),
            OpReply::Attr(_, attr, _) => self.map_attr(attr),
            OpReply::Page(page) => {
                page.entries
                    .iter_mut()
                    .filter_map(|e| e.node.as_mut())
                    .for_each(|n| self.map_attr(&mut n.attr));
            }
            OpReply::Value(value) if shape == ReplyFormat::Acl => {
                acl::map(value, |kind, remote| Some(self.pairs(kind).local_or_stranger(remote)));
            }
            _ => {}
        }
        answer
    }

    fn map_attr(&self, attr: &mut Attr) {
        attr.uid = self.users.local_or_stranger(attr.uid);
        attr.gid = self.groups.local_or_stranger(attr.gid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::{NodeId, SetAttr, Span};

    fn map(pairs: &[(IdKind, u32, u32)], closed: bool) -> IdMap {
        let mut map = IdMap::default();
        for (kind, local, remote) in pairs {
            assert!(map.pairs_mut(*kind).pair(*local, *remote));
        }
        (map.users.closed, map.groups.closed) = (closed, closed);
        map
    }

    const PAIRS: &[(IdKind, u32, u32)] = &[(IdKind::User, 1000, 2000), (IdKind::Group, 100, 200)];

    fn chown(uid: Option<u32>, gid: Option<u32>) -> Op {
        Op::SetAttr { ino: 1, fh: None, set: SetAttr { uid, gid, ..SetAttr::default() } }
    }

    fn shown(map: &IdMap, uid: u32, gid: u32) -> (u32, u32) {
        let attr = Attr { uid, gid, ..Attr::default() };
        let answer = OpReply::Attr(NodeId::default(), attr, Span::ZERO);
        match map.shown(ReplyFormat::Natural, answer) {
            OpReply::Attr(_, attr, _) => (attr.uid, attr.gid),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn paired_ids_are_mapped_both_ways_and_other_ids_pass_unchanged() {
        let map = map(PAIRS, false);
        assert_eq!(shown(&map, 2000, 200), (1000, 100));
        assert_eq!(shown(&map, 5, 6), (5, 6));
        assert_eq!(
            map.map_request((ReplyFormat::Natural, chown(Some(1000), None))).unwrap().1,
            chown(Some(2000), None)
        );
        assert_eq!(
            map.map_request((ReplyFormat::Natural, chown(Some(5), Some(100)))).unwrap().1,
            chown(Some(5), Some(200))
        );
        let caller =
            map.map_caller(Credentials { uid: 1000, gid: 100, groups: vec![100, 7], privileges: None });
        assert_eq!(caller, Credentials { uid: 2000, gid: 200, groups: vec![200, 7], privileges: None });
    }

    /// An unpaired id must not be taken for an equal id of a pair.
    #[test]
    fn unpaired_id_equal_to_a_paired_id_is_not_mapped_to_it() {
        let map = map(PAIRS, false);
        assert_eq!(shown(&map, 1000, 100), (STRANGER, STRANGER));
        assert_eq!(map.map_request((ReplyFormat::Natural, chown(Some(2000), None))), Err(Errno::INVAL));
        let caller =
            map.map_caller(Credentials { uid: 2000, gid: 200, groups: vec![200, 100], privileges: None });
        assert_eq!(
            caller,
            Credentials { uid: OVERFLOW_ID, gid: OVERFLOW_ID, groups: vec![200], privileges: None }
        );
        let same = self::map(&[(IdKind::User, 1000, 1000)], false);
        assert_eq!(shown(&same, 1000, 1000), (1000, 1000));
        assert_eq!(same.map_caller(Credentials { uid: 1000, ..Credentials::default() }).uid, 1000);
    }

    #[test]
    fn closed_map_maps_only_its_pairs() {
        let map = map(PAIRS, true);
        assert_eq!(shown(&map, 2000, 5), (1000, STRANGER));
        assert_eq!(map.map_request((ReplyFormat::Natural, chown(Some(5), None))), Err(Errno::INVAL));
        assert_eq!(map.map_request((ReplyFormat::Natural, chown(None, Some(5)))), Err(Errno::INVAL));
        assert!(map.map_request((ReplyFormat::Natural, chown(None, Some(100)))).is_ok());
        let caller = map.map_caller(Credentials { uid: 5, gid: 100, groups: vec![5, 100], privileges: None });
        assert_eq!(caller, Credentials { uid: OVERFLOW_ID, gid: 200, groups: vec![200], privileges: None });
    }

    #[test]
    fn empty_map_leaves_requests_and_replies_unchanged() {
        let map = IdMap::default();
        assert_eq!(shown(&map, 0, OVERFLOW_ID), (0, OVERFLOW_ID));
        let get = Op::GetXattr { ino: 1, name: b"system.posix_acl_access".to_vec(), size: 0 };
        assert_eq!(map.map_request((ReplyFormat::Natural, get.clone())), Ok((ReplyFormat::Natural, get)));
        let who = Credentials { uid: 3, gid: 4, groups: vec![5], privileges: None };
        assert_eq!(map.map_caller(who.clone()), who);
    }

    fn acl(user: u32, group: u32) -> Vec<u8> {
        let entry =
            |tag: u16, id: u32| [&tag.to_le_bytes()[..], &7_u16.to_le_bytes(), &id.to_le_bytes()].concat();
        let parts =
            [entry(1, u32::MAX), entry(2, user), entry(4, u32::MAX), entry(8, group), entry(0x10, u32::MAX)];
        [2_u32.to_le_bytes().to_vec(), parts.concat()].concat()
    }

    /// An editor writes back the ids that it shows: a stranger must not become another user.
    #[test]
    fn acl_or_owner_with_the_stranger_id_is_refused_when_set() {
        for map in [map(PAIRS, true), map(PAIRS, false)] {
            // In an open map, the two whose ids belong to others here.
            for (user, group) in [(1000, 200), (2000, 100), (1000, 100)] {
                let name = acl::NAMES[0].as_bytes().to_vec();
                let get = Op::GetXattr { ino: 1, name: name.clone(), size: 100 };
                let (shape, _) = map.map_request((ReplyFormat::Natural, get)).unwrap();
                let OpReply::Value(value) = map.shown(shape, OpReply::Value(acl(user, group))) else {
                    panic!("no value")
                };
                let set = Op::SetXattr { ino: 1, name, value, flags: 0, kill_sgid: false };
                assert_eq!(map.map_request((ReplyFormat::Empty, set)), Err(Errno::INVAL), "{user} {group}");
                let (uid, gid) = shown(&map, user, group);
                assert_eq!(
                    map.map_request((ReplyFormat::Natural, chown(Some(uid), Some(gid)))),
                    Err(Errno::INVAL)
                );
            }
            // Not the stranger id, but the overflow id, under which daemons run here.
            let nobody = map.map_caller(Credentials { uid: OVERFLOW_ID, ..Credentials::default() });
            assert_eq!(nobody.uid, OVERFLOW_ID);
            assert_ne!(shown(&map, 1000, 100), (OVERFLOW_ID, OVERFLOW_ID));
        }
    }

    #[test]
    fn acl_xattrs_are_mapped_in_requests_and_replies_and_other_xattrs_are_not() {
        let map = map(PAIRS, false);
        for name in acl::NAMES {
            let name = name.as_bytes().to_vec();
            let get = Op::GetXattr { ino: 1, name: name.clone(), size: 100 };
            let (shape, _) = map.map_request((ReplyFormat::Natural, get)).unwrap();
            assert_eq!(map.shown(shape, OpReply::Value(acl(2000, 200))), OpReply::Value(acl(1000, 100)));
            let set = |value| Op::SetXattr { ino: 1, name: name.clone(), value, flags: 0, kill_sgid: false };
            let (_, asked) = map.map_request((ReplyFormat::Empty, set(acl(1000, 100)))).unwrap();
            assert_eq!(asked, set(acl(2000, 200)));
            let closed = self::map(PAIRS, true);
            assert_eq!(closed.map_request((ReplyFormat::Empty, set(acl(1000, 5)))), Err(Errno::INVAL));
            assert_eq!(
                closed.shown(shape, OpReply::Value(acl(2000, 5))),
                OpReply::Value(acl(1000, STRANGER))
            );
        }
        let user = Op::GetXattr { ino: 1, name: b"user.acl".to_vec(), size: 100 };
        let (shape, _) = map.map_request((ReplyFormat::Natural, user)).unwrap();
        assert_eq!(map.shown(shape, OpReply::Value(acl(2000, 200))), OpReply::Value(acl(2000, 200)));
    }
}
