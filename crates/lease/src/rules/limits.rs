//! Grants that end by themselves, and grants that changes on the server's own disk end
//! (docs/decisions/0015-host-watch.md).
//!
//! A holder has a time limit for its grants, and may have declared that the limit is only for unwatched objects: then
//! it gets grants on *watched* objects without a limit. On one key a limited grant never follows an unlimited one
//! without a recall between them. Otherwise the holder may not have received the limited grant, and would believe the
//! unlimited one for ever. So an object that ceases to be watched is recalled in the same step.

use super::{recalls, write_queue};
use crate::state::{GrantKey, MissedCursor, State};
use crate::types::{Holder, LeaseKey, Object};
use nigh_types::{GrantId, LeaseScope};
use std::ops::Bound;

pub(crate) fn unwatch_object(table: &mut State, object: Object) {
    if table.watched.remove_object(object) && !table.watched.has(object) {
        write_queue::note_host_change(table, LeaseKey { object, covers: LeaseScope::Data });
        let seats: Vec<GrantKey> =
            grant_keys_from(table, object, None).take_while(|seat| seat.0.object == object).collect();
        seats.into_iter().for_each(|seat| recalls::recall_missed(table, seat));
    }
}

pub(crate) fn recall_missed_of(
    table: &mut State,
    filesystem: u64,
    until: GrantId,
    (after, most): (Option<MissedCursor>, u64),
) -> Option<MissedCursor> {
    let first = Object { filesystem, ino: 0, birth: 0 };
    let of_it = |seat: &GrantKey| seat.0.object.filesystem == filesystem;
    if after.is_none() {
        note_host_changes(table, first);
    }
    let mut looked = Vec::new();
    for seat in grant_keys_from(table, first, after.map(|MissedCursor(seat)| seat)).take_while(of_it) {
        looked.push(seat);
        if looked.len() as u64 >= most {
            break;
        }
    }
    let goes_on = (looked.len() as u64 >= most).then(|| looked.last().copied().map(MissedCursor)).flatten();
    for seat in looked {
        if table.entries[&seat].may_predate(until) {
            recalls::recall_missed(table, seat);
        }
    }
    goes_on
}

pub(crate) fn has_holder(table: &State, object: Object) -> bool {
    grant_keys_from(table, object, None).next().is_some_and(|seat| seat.0.object == object)
}

fn grant_keys_from(
    table: &State,
    first: Object,
    after: Option<GrantKey>,
) -> impl Iterator<Item = GrantKey> + '_ {
    let key = LeaseKey { object: first, covers: LeaseScope::Directory };
    let from = after.map_or(Bound::Included((key, Holder(0))), Bound::Excluded);
    table.entries.range((from, Bound::Unbounded)).map(|(seat, _)| *seat)
}

/// Marks every key on the filesystem of this object (the first one there) as possibly changed during a write.
fn note_host_changes(table: &mut State, first: Object) {
    let keys =
        table.keys.range(LeaseKey { object: first, covers: LeaseScope::Directory }..).map(|(key, _)| *key);
    let keys: Vec<LeaseKey> = keys.take_while(|key| key.object.filesystem == first.filesystem).collect();
    keys.into_iter().for_each(|key| write_queue::note_host_change(table, key));
}
