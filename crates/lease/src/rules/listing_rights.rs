//! Names in recalls, for holders whose peer does not act for all users of its machine
//! (docs/decisions/0026-names-in-recalls.md).
//!
//! A lookup needs search permission on a directory, not read permission; yet its directory lease covers all names, and
//! a recall with names would reveal names that the holder never asked for. So a directory lease of a *confined* holder
//! begins without the right to receive names: its recall says only that the directory changes. The server checks the
//! holder's permissions after the grant is registered, and then lifts this restriction for that grant. A change of the
//! directory's permissions recalls all grants of confined holders. So no restriction is lifted by permissions that were
//! read before they changed.

use super::recalls;
use crate::state::State;
use crate::types::{Holder, LeaseKey, Object};
use nigh_types::LeaseScope;

pub(crate) fn recall_confined(table: &mut State, directory: Object) {
    let key = LeaseKey { object: directory, covers: LeaseScope::Directory };
    let seats = table.entries.range((key, Holder(0))..=(key, Holder(u64::MAX)));
    let confined = seats.map(|(seat, _)| *seat).filter(|(_, holder)| table.accounts[holder].confined);
    for seat in confined.collect::<Vec<_>>() {
        recalls::recall(table, seat, Vec::new());
    }
}
