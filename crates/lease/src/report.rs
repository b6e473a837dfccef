//! Report on the lease table, for status and logs.

use crate::rules::delays;
use crate::state::State;
use crate::types::{ChangeId, Holder, LeaseCounters, LeaseKey};
use nigh_types::Time;
use std::collections::BTreeMap;

/// State of one holder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HolderReport {
    pub holder: Holder,
    /// Grants not yet ended, recalled ones included.
    pub grants: u64,
    /// Acknowledgements that it owes, and since when.
    pub owed: u64,
    pub owes_since: Option<Time>,
    /// Changes that wait for its acknowledgements, in the order of their beginning.
    pub awaited_by: Vec<ChangeId>,
    pub last_renewed: Time,
    pub suspect: bool,
    /// The end of its penalty for delaying others, if it has one now.
    pub penalised_until: Option<Time>,
    pub disconnected: bool,
}

/// State of one change in progress.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChangeReport {
    pub change: ChangeId,
    /// `None`: a change on the server's own disk.
    pub by: Option<Holder>,
    pub since: Time,
    /// Acknowledgements that it waits for.
    pub owed: u64,
}

/// Snapshot of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseReport {
    pub holders: Vec<HolderReport>,
    pub contended: Vec<LeaseKey>,
    pub changes: Vec<ChangeReport>,
    /// Memory for merging write-back of several holders into one file.
    pub merge_bytes: u64,
    pub counters: LeaseCounters,
}

pub(crate) fn report(table: &State) -> LeaseReport {
    let mut awaited = BTreeMap::<Holder, Vec<ChangeId>>::new();
    for (id, change) in &table.changes {
        for recall in &change.owed {
            let waiters = awaited.entry(table.owing_holder(*recall)).or_default();
            if waiters.last() != Some(id) {
                waiters.push(*id);
            }
        }
    }
    let holders = table.accounts.iter().map(|(holder, account)| HolderReport {
        holder: *holder,
        grants: account.grant_count(),
        owed: account.owed.len() as u64,
        owes_since: account.owes_since(),
        awaited_by: awaited.remove(holder).unwrap_or_default(),
        last_renewed: account.last_renewed,
        suspect: account.suspect.is_some(),
        penalised_until: delays::penalised_until(table, account),
        disconnected: account.disconnected,
    });
    let holders = holders.collect();
    let changes = table.changes.iter().map(|(id, change)| ChangeReport {
        change: *id,
        by: change.by,
        since: change.since,
        owed: change.owed.len() as u64,
    });
    let contended = table.keys.iter().filter(|(_, state)| state.is_contended()).map(|(key, _)| *key);
    LeaseReport {
        holders,
        contended: contended.collect(),
        changes: changes.collect(),
        merge_bytes: table.merging.total(),
        counters: table.counters.clone(),
    }
}
