//! Remote changes that came as updates in place (docs/decisions/0014-pushes.md). The directory's facts are up to date,
//! so no listing is needed, and no short-lived name is missed.

use crate::inotify::{ComparedAttrs, RemoteUpdate, SnapshotEntry, seen_child};
use crate::state::State;
use nigh_types::Name;
use std::collections::BTreeMap;

/// Reports an update, all of which is in the facts by now.
pub(crate) fn note_remote_update(state: &mut State, pushed: &RemoteUpdate) {
    if state.watches.is_empty() {
        return;
    }
    let mut now = BTreeMap::<u64, Vec<(Name, Option<SnapshotEntry>)>>::new();
    for (dir, name) in &pushed.names {
        now.entry(*dir).or_default().push((name.clone(), state.store.child(*dir, name).map(seen_child)));
    }
    for (node, attr) in &pushed.attributes {
        let parent_entry =
            state.store.inode(node.ino).filter(|i| i.id == *node).and_then(|i| i.parent_entry().cloned());
        let Some((dir, name)) = parent_entry else { continue };
        let told = now.entry(dir).or_default();
        let known = state.watches.seen(dir, &name, *node).is_some();
        if known && !told.iter().any(|(of, _)| *of == name) {
            told.push((name, Some(SnapshotEntry::new(*node, attr.kind(), Some(ComparedAttrs::of(attr))))));
        }
    }
    let busy = state.calls.inodes_in_flight();
    let differences = now.into_iter().filter_map(|(dir, names)| {
        state.watches.compare_names(dir, names, &state.calls.names_in_flight(dir), &busy)
    });
    let differences = differences.collect();
    state.watches.report_differences(differences);
}
