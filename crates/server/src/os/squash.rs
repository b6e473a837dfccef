//! Credential policy: the ids that a peer may claim. See docs/decisions/0010-transports-and-identity.md.

use crate::os::impersonate::can_impersonate;
use nigh_link::{Claims, Peer, Squash};
use nigh_types::Credentials;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// User and group id of unknown or squashed callers.
pub const ANONYMOUS: u32 = 65_534;

/// Credential policy of one session: maps requested credentials to those with which a call is executed. A claim that
/// the peer may not make is replaced, not refused, and counted.
#[derive(Debug)]
pub struct CredentialPolicy {
    claims: Claims,
    squash: Squash,
    replaced: AtomicU64,
    /// A replaced claim was uid 0.
    was_root: AtomicBool,
}

impl CredentialPolicy {
    #[must_use]
    pub fn new(claims: Claims, squash: Squash) -> CredentialPolicy {
        CredentialPolicy { claims, squash, replaced: AtomicU64::new(0), was_root: AtomicBool::new(false) }
    }

    pub(crate) fn of(peer: &Peer) -> CredentialPolicy {
        CredentialPolicy::new(peer.claims().clone(), peer.squash())
    }

    /// Returns the credentials with which a call asked for by `asked` is executed.
    #[must_use]
    pub fn admit(&self, asked: Credentials) -> Credentials {
        self.admit_noting_root(asked).0
    }

    /// Like [`CredentialPolicy::admit`]; also returns whether uid 0 was replaced for the first time.
    pub(crate) fn admit_noting_root(&self, asked: Credentials) -> (Credentials, bool) {
        let claims_root = asked.uid == 0;
        let (admitted, honest) = match (&self.claims, self.squash) {
            (Claims::Only(own), Squash::None | Squash::Root) => only(own, &asked),
            (_, Squash::All) => (serving_user(), true),
            (Claims::Any, Squash::None) => return (asked, false),
            (Claims::Any, Squash::Root) => (without_root(asked), true),
        };
        if honest {
            return (admitted, false);
        }
        self.replaced.fetch_add(1, Ordering::Relaxed);
        let first = claims_root && !self.was_root.swap(true, Ordering::Relaxed);
        (admitted, first)
    }

    /// The number of claims that were replaced.
    #[must_use]
    pub fn replaced(&self) -> u64 {
        self.replaced.load(Ordering::Relaxed)
    }

    /// Whether the server trusts the permission checks of the client's kernel. Only then does it open a file with its
    /// own rights for a call without an open file.
    #[must_use]
    pub fn vouches(&self) -> bool {
        self.claims == Claims::Any && self.squash == Squash::None
    }

    /// Whether all calls of the peer are executed as one user.
    #[must_use]
    pub fn is_one_user(&self) -> bool {
        matches!(self.claims, Claims::Only(_)) || self.squash == Squash::All
    }

    /// Credentials of the peer's own requests. A peer that speaks for several users is anonymous.
    pub(crate) fn peer(&self) -> Credentials {
        match (&self.claims, self.squash) {
            (Claims::Only(user), Squash::None | Squash::Root) => user.clone(),
            (_, Squash::All) => serving_user(),
            _ => Credentials { uid: ANONYMOUS, gid: ANONYMOUS, groups: Vec::new(), privileges: None },
        }
    }

    /// Returns (uid, gid) of calls that the peer makes for itself. `own` is the server's, for peers that speak for
    /// several users.
    pub(crate) fn acts_as(&self, own: (u32, u32)) -> (u32, u32) {
        match (&self.claims, self.squash) {
            (Claims::Only(user), Squash::None | Squash::Root) => (user.uid, user.gid),
            (_, Squash::All | Squash::Root) if own.0 == 0 => (ANONYMOUS, ANONYMOUS),
            _ => own,
        }
    }
}

/// Returns the proven ids, with a proven group of the caller as the primary one, and whether all requested ids are
/// proven.
fn only(own: &Credentials, asked: &Credentials) -> (Credentials, bool) {
    let proven = |gid: u32| gid == own.gid || own.groups.contains(&gid);
    let honest = asked.uid == own.uid && proven(asked.gid) && asked.groups.iter().all(|gid| proven(*gid));
    let mut admitted = own.clone();
    if asked.uid == own.uid && asked.gid != own.gid && proven(asked.gid) {
        admitted.gid = asked.gid;
        admitted.groups.push(own.gid);
    }
    (admitted, honest)
}

fn without_root(asked: Credentials) -> Credentials {
    let mend = |id: u32| if id == 0 { ANONYMOUS } else { id };
    Credentials {
        uid: mend(asked.uid),
        gid: mend(asked.gid),
        groups: asked.groups.into_iter().filter(|gid| *gid != 0).collect(),
        privileges: None,
    }
}

fn serving_user() -> Credentials {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    match uid {
        0 => Credentials { uid: ANONYMOUS, gid: ANONYMOUS, groups: Vec::new(), privileges: None },
        _ => Credentials { uid, gid, groups: Vec::new(), privileges: None },
    }
}

/// Whether this uid is root or the user of this process.
pub(crate) fn is_own(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Builds the peer of a unix socket from kernel-proven credentials: root may claim any id, other users only their
/// own. Returns `None` for another user if this process cannot impersonate that user and would use its own rights
/// instead.
#[must_use]
pub fn unix_peer(who: Credentials, squash: Squash) -> Option<Peer> {
    let uid = who.uid;
    if !is_own(uid) && !can_impersonate() {
        return None;
    }
    let claims = if uid == 0 { Claims::Any } else { Claims::Only(who) };
    Some(Peer::new(format!("unix socket, uid {uid}"), claims, squash))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(uid: u32, gid: u32, groups: &[u32]) -> Credentials {
        Credentials { uid, gid, groups: groups.to_vec(), privileges: None }
    }

    #[test]
    fn peer_confined_to_its_own_ids_always_gets_them() {
        let own = who(1000, 100, &[4, 24]);
        let policy = CredentialPolicy::new(Claims::Only(own.clone()), Squash::None);
        for honest in [who(1000, 100, &[4, 24]), who(1000, 100, &[]), who(1000, 100, &[24])] {
            assert_eq!(policy.admit(honest), own);
        }
        assert_eq!(policy.admit(who(1000, 24, &[])), who(1000, 24, &[4, 24, 100]));
        assert_eq!(policy.replaced(), 0);
        let forged =
            [who(0, 0, &[]), who(1001, 100, &[]), who(1000, 0, &[]), who(1000, 100, &[0]), who(0, 100, &[4])];
        for (at, asked) in forged.into_iter().enumerate() {
            assert_eq!(policy.admit_noting_root(asked), (own.clone(), at == 0), "uid 0 is reported once");
            assert_eq!(policy.replaced(), at as u64 + 1);
        }
        assert!(!policy.vouches());
        assert_eq!(policy.acts_as((0, 0)), (1000, 100));
    }

    #[test]
    fn peer_is_one_user_if_it_may_claim_only_itself_or_all_are_squashed() {
        let only = || Claims::Only(who(5, 6, &[]));
        for (claims, squash, is_one) in [
            (Claims::Any, Squash::None, false),
            (Claims::Any, Squash::Root, false),
            (Claims::Any, Squash::All, true),
            (only(), Squash::None, true),
            (only(), Squash::Root, true),
            (only(), Squash::All, true),
        ] {
            let policy = CredentialPolicy::new(claims, squash);
            assert_eq!(policy.is_one_user(), is_one, "{policy:?}");
        }
    }

    #[test]
    fn squash_maps_root_or_all_users_to_anonymous() {
        let any = CredentialPolicy::new(Claims::Any, Squash::None);
        assert_eq!(any.admit(who(0, 0, &[0])), who(0, 0, &[0]));
        assert!(any.vouches());
        assert_eq!(any.acts_as((0, 0)), (0, 0));
        let root = CredentialPolicy::new(Claims::Any, Squash::Root);
        assert_eq!(root.admit(who(0, 0, &[0])), who(ANONYMOUS, ANONYMOUS, &[]));
        assert_eq!(root.admit(who(5, 6, &[7])), who(5, 6, &[7]));
        assert_eq!(root.acts_as((0, 0)), (ANONYMOUS, ANONYMOUS));
        assert!(!root.vouches());
        for claims in [Claims::Any, Claims::Only(who(5, 6, &[]))] {
            let all = CredentialPolicy::new(claims, Squash::All);
            let (one, two) = (all.admit(who(0, 0, &[])), all.admit(who(9, 9, &[9])));
            assert!(one == two && one.uid != 0 && one.gid != 0);
            assert!(!all.vouches());
        }
        // A token names its user, root included.
        let token = CredentialPolicy::new(Claims::Only(who(0, 0, &[])), Squash::Root);
        assert_eq!(token.admit(who(1000, 1000, &[])), who(0, 0, &[]));
    }

    #[test]
    fn unix_peer_has_credentials_from_kernel() {
        let (one, _two) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = unix_peer(nigh_link::unix::credentials(&one).unwrap(), Squash::None).unwrap();
        let own = rustix::process::geteuid();
        match peer.claims() {
            Claims::Any => assert!(own.is_root()),
            Claims::Only(who) => {
                assert_eq!(who.uid, own.as_raw());
                let mut groups: Vec<u32> =
                    rustix::process::getgroups().unwrap().iter().map(|gid| gid.as_raw()).collect();
                let mut seen = who.groups.clone();
                groups.sort_unstable();
                seen.sort_unstable();
                assert_eq!(seen, groups);
            }
        }
    }
}
