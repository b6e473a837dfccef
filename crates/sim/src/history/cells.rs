//! Checker for bytes stored into shared maps.
//!
//! A store is in its own mount's page at once. It reaches the server by write-back, and other mounts when they have
//! dropped their pages, by the end of msync at the latest. So during a store each mount may show the old or the new
//! byte, in any order (docs/semantics.md, S1). A load must have found a byte that was not certainly replaced before
//! the load began: no other store began after the end of that byte's store and ended before the load began.

use super::{CELLS, Call, CallResult, History, Record, Violation};

/// A stored byte, or the initial byte.
struct StoredByte {
    begin: u64,
    /// `u64::MAX`: the store's outcome is unknown.
    end: u64,
    byte: u8,
}

/// # Errors
/// A load that no store explains.
pub fn judge(history: &History) -> Result<(), Violation> {
    // A store in flight at a kill may be applied again after it.
    let doubt = |end: u64, begin: u64| {
        let met = history.kills.iter().filter(|(from, to)| begin <= *to && end >= *from);
        met.map(|(_, to)| *to).max().map_or(end, |to| to.max(end))
    };
    for cell in 0..CELLS {
        let stores = history.records.iter().filter_map(|record| match (&record.call, &record.response) {
            (Call::Store { cell: of, byte }, answer) if *of == cell => {
                let end = match answer {
                    Some((end, CallResult::Done)) => doubt(*end, record.begin),
                    _ => u64::MAX,
                };
                Some(StoredByte { begin: record.begin, end, byte: *byte })
            }
            _ => None,
        });
        let stores: Vec<StoredByte> =
            [StoredByte { begin: 0, end: 0, byte: 0 }].into_iter().chain(stores).collect();
        for (number, load) in history.records.iter().enumerate() {
            let (Call::Load { cell: of }, Some((end, CallResult::Value(value)))) =
                (&load.call, &load.response)
            else {
                continue;
            };
            let may_be = |store: &&StoredByte| {
                let replaced = |other: &StoredByte| other.begin > store.end && other.end < load.begin;
                u64::from(store.byte) == value.unwrap_or(0)
                    && store.begin <= *end
                    && !stores.iter().any(replaced)
            };
            if *of == cell && !stores.iter().any(|store| may_be(&store)) {
                return Err(refused(history, cell, number));
            }
        }
    }
    Ok(())
}

fn refused(history: &History, cell: u8, number: usize) -> Violation {
    let load = &history.records[number];
    let end = load.response.as_ref().map_or(u64::MAX, |(end, _)| *end);
    let of_it = |record: &&Record| matches!(record.call, Call::Store { cell: of, .. } if of == cell);
    let mut around: Vec<Record> =
        history.records.iter().filter(of_it).filter(|store| store.begin <= end).cloned().collect();
    around.sort_by_key(|record| record.begin);
    around.push(load.clone());
    let why = "no store explains the last of these calls".to_owned();
    Violation { object: format!("cell {cell} of the map"), record: number, reason: why, context: around }
}
