//! Unsent grants: registered grants whose replies are not yet in the stream.
//!
//! A holder has one grant on a key, and a later grant replaces the earlier one. Several calls of one session that work
//! on one directory all read under a grant on it, though only the latest grant id is live. So a reply may carry a grant
//! if the grants on that key have followed each other without a gap since it was registered. A grant that was replaced
//! meanwhile gets a new id when its reply is queued in the stream. Then the client's return of another id does not end
//! it.
//!
//! A recall of data waits for the unsent replies that carry a grant on that data, so it stands behind them in the
//! stream. Otherwise the kernel would keep their pages after it was told to drop the data. Reads and writes under a
//! grant wait for no other holder, so this is soon over.

use crate::LeaseTable;
use crate::types::{GrantRequest, Granted, Holder, LeaseKey};
use nigh_types::{Grant, GrantId, LeaseScope, Recall, Time};
use std::collections::{BTreeMap, VecDeque};

#[derive(Clone, Default, Debug)]
pub(super) struct UnsentGrants {
    by_id: BTreeMap<GrantId, UnsentGrant>,
    by_key: BTreeMap<(Holder, LeaseKey), GrantRun>,
    /// Recalls that no unsent reply delays any more.
    due: VecDeque<(Holder, Recall)>,
}

#[derive(Clone, Debug)]
struct UnsentGrant {
    request: GrantRequest,
    /// [`GrantRun::gaps`] when it was registered.
    gaps: u64,
}

/// Whether a reply carries a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CarryOutcome {
    No,
    Live,
    /// Its recall follows in the stream.
    Recalled,
}

/// The unsent grants of one holder on one key.
#[derive(Clone, Debug)]
struct GrantRun {
    count: u64,
    latest: GrantId,
    /// How often the latest grant had ended before the next was registered.
    gaps: u64,
    /// Its recall, which is sent after their replies.
    recall: Option<Recall>,
}

impl UnsentGrants {
    /// Registers a grant.
    pub(super) fn register(
        &mut self,
        table: &mut LeaseTable,
        now: Time,
        request: GrantRequest,
    ) -> Option<Granted> {
        let gap = self.has_gap(table, request.seat());
        let granted = table.handle_grant(now, request)?;
        self.note(request, granted, gap);
        Some(granted)
    }

    /// Whether the latest unsent grant on this key has ended. Asked before the next one is registered.
    pub(super) fn has_gap(&self, table: &LeaseTable, seat: (Holder, LeaseKey)) -> bool {
        self.by_key.get(&seat).is_some_and(|together| !table.is_live(seat.0, together.latest))
    }

    /// Notes a registered grant.
    pub(super) fn note(&mut self, request: GrantRequest, granted: Granted, gap: bool) {
        let new = GrantRun { count: 0, latest: granted.id, gaps: 0, recall: None };
        let together = self.by_key.entry(request.seat()).or_insert(new);
        together.count += 1;
        together.latest = granted.id;
        together.gaps += u64::from(gap);
        self.by_id.insert(granted.id, UnsentGrant { request, gaps: together.gaps });
    }

    /// Takes a recall that the table emitted; returns it if it can be sent at once.
    pub(super) fn recall(&mut self, holder: Holder, key: LeaseKey, recall: Recall) -> Option<Recall> {
        if key.covers == LeaseScope::Data
            && let Some(together) = self.by_key.get_mut(&(holder, key))
        {
            together.recall = Some(recall);
            return None;
        }
        Some(recall)
    }

    /// Returns a delayed recall that may be sent now.
    pub(super) fn take_due(&mut self) -> Option<(Holder, Recall)> {
        self.due.pop_front()
    }

    /// Decides whether a reply carries a grant, and under which id.
    pub(super) fn carry(&mut self, table: &mut LeaseTable, now: Time, grant: &mut Grant) -> CarryOutcome {
        let Some(UnsentGrant { request, gaps }) = self.by_id.remove(&grant.id) else {
            return CarryOutcome::No;
        };
        let seat = request.seat();
        let Some(together) = self.by_key.get_mut(&seat) else { return CarryOutcome::No };
        if together.recall.is_some() {
            self.leave(seat);
            return CarryOutcome::Recalled;
        }
        let stands = gaps == together.gaps && table.is_live(seat.0, together.latest);
        let carried = if stands && together.latest != grant.id {
            let again = table.handle_grant(now, request);
            // Its limit stays the one under which it was read.
            if let Some(Granted { id, shared, .. }) = again {
                together.latest = id;
                (grant.id, grant.shared) = (id, shared);
            }
            again.is_some()
        } else {
            stands
        };
        self.leave(seat);
        if carried { CarryOutcome::Live } else { CarryOutcome::No }
    }

    /// Forgets a grant that no reply will carry.
    pub(super) fn drop(&mut self, grant: GrantId) {
        if let Some(UnsentGrant { request, .. }) = self.by_id.remove(&grant) {
            self.leave(request.seat());
        }
    }

    fn leave(&mut self, seat: (Holder, LeaseKey)) {
        if let Some(together) = self.by_key.get_mut(&seat) {
            together.count -= 1;
            if together.count == 0 {
                let recall = self.by_key.remove(&seat).and_then(|together| together.recall);
                self.due.extend(recall.map(|recall| (seat.0, recall)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Change, LeaseConfig, LeaseOutput, Object};
    use nigh_types::{LeaseScope, Mode, NodeId, Term};

    const ONE: Holder = Holder(1);
    const NODE: NodeId = NodeId { ino: 7, generation: 1 };
    const KEY: LeaseKey =
        LeaseKey { object: Object { filesystem: 1, ino: 7, birth: 1 }, covers: LeaseScope::Directory };

    const REQUEST: GrantRequest = GrantRequest { holder: ONE, key: KEY, node: NODE, mode: Mode::Read };

    fn world_grant() -> Grant {
        let (id, covers, mode, term) = (GrantId(0), LeaseScope::Directory, Mode::Read, Term::Session);
        Grant { id, node: NODE, covers, mode, term, recallable: true, shared: false }
    }

    struct World {
        table: LeaseTable,
        unsent: UnsentGrants,
    }

    impl World {
        fn new() -> World {
            let mut table = LeaseTable::new(LeaseConfig::default());
            table.handle_attach(Time(1), ONE, false);
            World { table, unsent: UnsentGrants::default() }
        }

        fn register(&mut self) -> Grant {
            let granted = self.unsent.register(&mut self.table, Time(1), REQUEST).unwrap();
            Grant { id: granted.id, shared: granted.shared, ..world_grant() }
        }

        fn carry(&mut self, grant: &mut Grant) -> bool {
            self.unsent.carry(&mut self.table, Time(1), grant) != CarryOutcome::No
        }

        fn is_empty(&self) -> bool {
            self.unsent.by_id.is_empty() && self.unsent.by_key.is_empty()
        }
    }

    #[test]
    fn overlapping_replies_of_one_session_all_carry_live_grants() {
        let mut world = World::new();
        let [mut first, mut second, mut third] = [world.register(), world.register(), world.register()];
        assert!(world.carry(&mut second));
        assert!(world.carry(&mut third));
        // The client returns the grant that the third reply brought; that does not end the one that the first reply
        // brings.
        assert!(world.carry(&mut first));
        world.table.handle_return(Time(1), ONE, &[second.id, third.id]);
        assert!(world.table.is_live(ONE, first.id));
        assert!(world.is_empty());
    }

    #[test]
    fn grant_returned_or_recalled_before_its_reply_is_not_carried() {
        let mut world = World::new();
        let [mut first, mut second] = [world.register(), world.register()];
        assert!(world.carry(&mut second));
        world.table.handle_return(Time(1), ONE, &[second.id]);
        let mut third = world.register();
        assert!(!world.carry(&mut first), "it was registered before the gap");
        assert!(world.carry(&mut third) && world.is_empty());
        let mut fourth = world.register();
        let change = world.table.handle_change(
            Time(1),
            None,
            &[Change { key: KEY, names: vec![], writes: false, can_update: false }],
        );
        assert!(!world.carry(&mut fourth));
        world.table.handle_done(Time(1), change);
        assert!(world.is_empty());
    }

    #[test]
    fn data_recall_is_sent_after_unsent_replies_with_grants() {
        let mut world = World::new();
        let key = LeaseKey { covers: LeaseScope::Data, ..KEY };
        let (mut table, mut unsent) = (world.table, world.unsent);
        let mut grants = [(); 2].map(|()| {
            let granted = unsent.register(&mut table, Time(1), GrantRequest { key, ..REQUEST }).unwrap();
            Grant { id: granted.id, covers: LeaseScope::Data, ..world_grant() }
        });
        let change = table.handle_change(
            Time(1),
            None,
            &[Change { key, names: vec![], writes: true, can_update: false }],
        );
        let LeaseOutput::Recall { recall, .. } = table.poll_output() else { panic!() };
        assert_eq!(unsent.recall(ONE, key, recall.clone()), None, "not yet");
        assert_eq!(unsent.carry(&mut table, Time(1), &mut grants[0]), CarryOutcome::Recalled);
        assert_eq!(unsent.take_due(), None);
        unsent.drop(grants[1].id);
        assert_eq!(unsent.take_due(), Some((ONE, recall.clone())));
        assert_eq!(unsent.recall(ONE, key, recall.clone()), Some(recall), "nothing is in its way");
        table.handle_done(Time(1), change);
        (world.table, world.unsent) = (table, unsent);
        assert!(world.is_empty());
    }

    #[test]
    fn dropped_unsent_grants_leave_no_state() {
        let mut world = World::new();
        let [first, second] = [world.register(), world.register()];
        world.unsent.drop(first.id);
        world.unsent.drop(first.id);
        world.unsent.drop(second.id);
        assert!(world.is_empty());
    }
}
