//! Penalties: a client or origin that delayed others receives no grants for a while (docs/decisions/0008, rule 6).
//!
//! A client that delays only clients of its own origin is penalised alone, so that one sleeping laptop does not affect
//! a user's other machines. The peer chooses its own client number, so a client that delays another origin brings a
//! penalty on its whole origin.

use crate::state::{HolderState, State};
use crate::types::{ChangeId, ClientOrigin, Holder};
use nigh_types::{RecallId, Time};

/// Until when a holder receives no grants, if it has a penalty now.
pub(crate) fn penalised_until(table: &State, account: &HolderState) -> Option<Time> {
    table.penalties.until(account.client_origin?).filter(|until| table.now < *until)
}

/// Imposes a penalty on a holder that has owed acknowledgements since then, longer than `patience`.
pub(crate) fn penalise(table: &mut State, party: Option<ClientOrigin>, since: Time, delays_others: bool) {
    if let Some(party) = party {
        table.penalties.add((table.now, since), party, delays_others, &table.config);
    }
}

/// Notes whether a client of another origin waits for this holder. `late`: the holder has owed for longer than
/// `patience`.
pub(crate) fn note_delays(table: &mut State, holder: Holder, late: bool) {
    let Some(account) = table.accounts.get(&holder) else { return };
    if account.delays_others || !(late || account.suspect.is_some()) {
        return;
    }
    let delays = account.owed.keys().any(|id| delays_others(table, account, *id));
    table.accounts.get_mut(&holder).expect("just seen").delays_others = delays;
}

/// Notes whether a client of another origin waits for one acknowledgement that a suspect owes.
pub(crate) fn note_delay(table: &mut State, holder: Holder, id: RecallId) {
    let Some(account) = table.accounts.get(&holder) else { return };
    if account.suspect.is_some()
        && !account.delays_others
        && account.owed.contains_key(&id)
        && delays_others(table, account, id)
    {
        table.accounts.get_mut(&holder).expect("just seen").delays_others = true;
    }
}

/// Whether a change of another origin waits for this acknowledgement, or is queued behind a change that does.
fn delays_others(table: &State, account: &HolderState, id: RecallId) -> bool {
    let Some(ClientOrigin { origin, .. }) =
        account.client_origin.filter(|party| !party.origin.is_local_root())
    else {
        return false;
    };
    let is_other = |change: ChangeId| {
        let by = table.changes.get(&change).and_then(|change| change.by);
        let party = by.and_then(|by| table.accounts.get(&by)?.client_origin);
        party.is_some_and(|party| party.origin != origin)
    };
    table.waiting_changes(id).iter().any(|change| {
        let writes = table.changes.get(change).and_then(|change| change.part.writes);
        let mut behind = writes.and_then(|key| table.keys.get(&key)).into_iter().flat_map(|key| key.queued());
        is_other(*change) || behind.any(is_other)
    })
}
