//! Prefetch policy: when and where a job begins, and in which order it goes.

use crate::config::Prefetch;
use crate::facts::{inodes, leases};
use crate::ops::{listings, prefetching};
use crate::state::State;
use crate::view::{self, paths};
use nigh_types::{Call, CallId, Cookie, Name, NodeId, NodeRef, PrefetchOrder, Time};
use std::cmp::Ordering;

/// Subdirectory.
struct Subdir {
    cookie: Cookie,
    name: Name,
    id: NodeId,
}

impl Subdir {
    fn compare(&self, other: &Subdir, order: PrefetchOrder) -> Ordering {
        fn place(one: &Subdir) -> (Cookie, &[u8], u64) {
            (one.cookie, one.name.as_bytes(), one.id.ino)
        }
        order.compare(place(self), place(other))
    }
}

/// Most entries of a directory that the policy looks at.
const LOOKED_AT: usize = 16_384;
/// Most entries of a directory whose attributes are prefetched after a few lookups.
const MOST_WITHOUT_ATTRIBUTES: usize = 4_096;

/// Records the opening of a subdirectory in its parent, which must be listed. Returns the input of the policy: the
/// parent, the subdirectory opened before, and whether the parent was opened in this way itself.
pub(crate) fn note_descent(state: &mut State, now: Time, dir: u64) -> Option<(u64, Option<u64>, bool)> {
    if !state.prefetch.is_possible() {
        return None;
    }
    let parent = state.store.inode(dir)?.parent_entry().map(|(parent, _)| *parent)?;
    let above = state.store.dir_mut(parent)?;
    if !above.complete || !above.held.is_some_and(|held| held.is_live(now)) {
        return None;
    }
    let before = above.last_child.replace(dir);
    let via = above.opened_in_walk;
    if let Some(id) = state.store.id_of(dir) {
        leases::dir_record(state, id).opened_in_walk = true;
    }
    Some((parent, before.filter(|before| *before != dir), via))
}

/// Starts a job at an unlisted directory that is being opened, if the policy detects a tree walk. `descent`: see
/// `note_descent`.
pub(crate) fn prefetch_from(
    state: &mut State,
    now: Time,
    dir: u64,
    descent: Option<(u64, Option<u64>, bool)>,
) -> Option<CallId> {
    if !state.prefetch.is_possible() || state.answers_stale() {
        return None;
    }
    match (state.config.prefetch, descent) {
        (Prefetch::Off, _) => None,
        (Prefetch::All, _) => {
            let window = state.largest_window();
            let roots = vec![paths::node_ref(state, dir)?];
            prefetching::start_job(state, now, PrefetchOrder::Cookie, roots, window)
        }
        // The second subdirectory of a parent, or two levels in a row.
        (Prefetch::Auto, Some((parent, before, via))) if before.is_some() || via => {
            let order =
                state.prefetch.may_start(now).then(|| order_of(state, now, parent, before, dir))??;
            let roots = roots(state, now, order, parent, dir);
            for NodeRef { node, path_hint } in &roots {
                // Named by a listing without attributes: what comes for it needs a record.
                if let Some((dir, name)) =
                    path_hint.as_ref().filter(|_| state.store.id_of(node.ino).is_none())
                {
                    inodes::record(state, *node).note_listed_at(dir.ino, name);
                }
            }
            prefetching::start_job(state, now, order, roots, state.first_window())
        }
        (Prefetch::Auto, _) => None,
    }
}

/// Starts a job for lookups in an unlisted directory. Lookups in one directory after the other count as a walk
/// (`git status`). After several lookups in one directory, the rest is prefetched. `is_dir`: the name is known to lead to a
/// directory, which a walk looks up to open it.
pub(crate) fn prefetch_by_lookups(state: &mut State, now: Time, dir: u64, is_dir: bool) {
    let wanted =
        state.prefetch.is_possible() && state.config.prefetch == Prefetch::Auto && !state.answers_stale();
    if !wanted || !listings::is_to_be_listed(state, dir) {
        return;
    }
    if view::is_listed(state, now, dir) {
        if !is_dir {
            prefetch_attributes(state, now, dir);
        }
        return;
    }
    let Some(id) = state.store.id_of(dir) else { return };
    let directory = leases::dir_record(state, id);
    directory.remote_lookups = directory.remote_lookups.saturating_add(1);
    match u32::from(directory.remote_lookups) {
        1 => {
            let descent = note_descent(state, now, dir);
            prefetch_from(state, now, dir, descent);
        }
        // A session that prefetches itself needs messages for each entry.
        count
            if count == state.config.names_before_listing
                && state.prefetch.may_start(now)
                && !state.session.prefetches_itself() =>
        {
            let Some(place) = paths::node_ref(state, dir) else { return };
            prefetching::start_job(state, now, PrefetchOrder::Name, vec![place], state.first_window());
        }
        _ => {}
    }
}

/// Starts a job at a listed directory whose entries came without attributes, after several lookups in it.
fn prefetch_attributes(state: &mut State, now: Time, dir: u64) {
    let may = state.session.prefetches_itself() && state.prefetch.may_start(now);
    let most = state.config.names_before_listing;
    let Some(place) = paths::node_ref(state, dir).filter(|_| may) else { return };
    let Some(directory) = state.store.dir_mut(dir) else { return };
    directory.remote_lookups = directory.remote_lookups.saturating_add(1);
    if u32::from(directory.remote_lookups) != most
        || directory.rows.iter().nth(MOST_WITHOUT_ATTRIBUTES).is_some()
    {
        return;
    }
    directory.remote_lookups = 0;
    prefetching::start_job(state, now, PrefetchOrder::Cookie, vec![place], state.first_window());
}

/// Returns the order in which `dir` comes next after `before`, or first. `None`: no order fits, so this is no walk.
fn order_of(state: &State, now: Time, parent: u64, before: Option<u64>, dir: u64) -> Option<PrefetchOrder> {
    let below = subdirs(state, parent);
    let found = |ino: u64| below.iter().find(|b| b.id.ino == ino);
    let (this, before) = (found(dir)?, before.and_then(found));
    let is_next = |order: &PrefetchOrder| {
        let is_after = |b: &Subdir| before.is_none_or(|before| b.compare(before, *order).is_gt());
        let comes_first = |b: &Subdir| b.compare(this, *order).is_lt() && is_after(b);
        is_after(this) && !below.iter().any(|b| comes_first(b) && !view::is_listed(state, now, b.id.ino))
    };
    let reversed = if state.session.prefetches_reversed() { &PrefetchOrder::REVERSED[..] } else { &[] };
    PrefetchOrder::FORWARD.iter().chain(reversed).copied().find(is_next)
}

/// Returns the start of a job: `dir`, its later siblings, then the later siblings of its parent, as far up as the
/// walk came down.
fn roots(state: &State, now: Time, order: PrefetchOrder, mut parent: u64, mut dir: u64) -> Vec<NodeRef> {
    let mut roots: Vec<NodeRef> = paths::node_ref(state, dir).into_iter().collect();
    loop {
        let mut below = subdirs(state, parent);
        below.sort_by(|a, b| a.compare(b, order));
        let after = below.iter().position(|b| b.id.ino == dir).map_or(below.len(), |at| at + 1);
        let room = (Call::MOST_ROOTS as usize).saturating_sub(roots.len());
        let open = below[after..].iter().filter(|b| {
            !view::is_listed(state, now, b.id.ino) && state.prefetch.expected_by(b.id.ino).is_none()
        });
        let id = state.store.id_of(parent);
        let place = |b: &Subdir| {
            let listed = || NodeRef { node: b.id, path_hint: id.map(|id| (id, b.name.clone())) };
            paths::node_ref(state, b.id.ino).filter(|place| place.node == b.id).unwrap_or_else(listed)
        };
        roots.extend(open.take(room).map(place));
        let above = state.store.dir(parent).filter(|d| d.opened_in_walk);
        let above = above.and_then(|_| state.store.inode(parent)?.parent_entry().map(|(above, _)| *above));
        match above.filter(|above| state.store.dir(*above).is_some_and(|d| d.complete)) {
            Some(above) if roots.len() < Call::MOST_ROOTS as usize => (dir, parent) = (parent, above),
            _ => return roots,
        }
    }
}

fn subdirs(state: &State, parent: u64) -> Vec<Subdir> {
    let Some(directory) = state.store.dir(parent) else { return Vec::new() };
    let rows = directory.rows.iter().take(LOOKED_AT);
    let dirs = rows.filter_map(|row| {
        let child = row.child.filter(|child| child.attr().is_dir())?;
        Some(Subdir { cookie: row.cookie, name: row.to_name(), id: child.id })
    });
    dirs.collect()
}
