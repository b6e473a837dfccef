//! Listings, chunk by chunk as they arrive.

use crate::calls::{ConcurrentDentry, InflightCall, ReplyKind};
use crate::facts::{inodes, learn, leases, order};
use crate::grants::LiveGrant;
use crate::op::{Fh, KernelInvalidation, OpReply};
use crate::ops::{dir_pages, listings};
use crate::out::{invalidate, replies};
use crate::state::State;
use crate::store::CachedEntry;
use crate::view;
use crate::watching::looks;
use nigh_types::{
    CallId, Cookie, Entry, Errno, Grant, Kind, LeaseScope, Name, NodeId, OpId, Reply, Response, Time,
};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeSet;

/// Listed name in a chunk.
pub(crate) struct ListedEntry {
    child: CachedEntry,
    /// The entry with attributes, if the chunk carries them.
    entry: Option<Entry>,
}

/// Chunk of a listing, in cookie order.
pub(crate) type ListingChunk = Vec<(Name, ListedEntry)>;

fn chunk_of(reply: &Reply) -> Option<ListingChunk> {
    let with_attributes = |(name, entry): &(Name, Entry)| {
        (name.clone(), ListedEntry { child: CachedEntry::new(entry), entry: Some(entry.clone()) })
    };
    let bare = |(name, id, kind): &(Name, NodeId, Option<Kind>)| {
        (name.clone(), ListedEntry { child: CachedEntry::bare(*id, *kind), entry: None })
    };
    match reply {
        Reply::Listed(listed) => Some(listed.entries.iter().map(with_attributes).collect()),
        Reply::Names(names) => Some(names.iter().map(bare).collect()),
        _ => None,
    }
}

/// Removes entries between two cookies that a chunk does not list: the names do not exist, unless a local change
/// made them meanwhile.
fn remove_unlisted(
    state: &mut State,
    dir: u64,
    flight: &InflightCall,
    entries: &[(Name, ListedEntry)],
    (from, to): (Cookie, Cookie),
    (under_way, all_taken): (&[Name], bool),
) -> Vec<KernelInvalidation> {
    let Some(directory) = state.store.dir(dir) else { return Vec::new() };
    let rows = || directory.rows.after(from).take_while(|row| row.cookie <= to);
    if all_taken && rows().filter(|row| row.child.is_some()).count() == entries.len() {
        return Vec::new();
    }
    let listed: FxHashSet<&[u8]> = entries.iter().map(|(name, _)| name.as_bytes()).collect();
    let is_own = |name: &Name| {
        let seen = &flight.race_log;
        under_way.contains(name)
            || seen.name(dir, name).is_some()
            || order::is_newer_than_listing(state, seen, dir, name)
    };
    let gone = rows().filter(|row| row.child.is_some() && !listed.contains(row.name));
    let gone = gone.map(|row| (row.cookie, row.to_name())).filter(|(_, name)| !is_own(name));
    let gone: Vec<(Cookie, Name)> = gone.collect();
    let mut stale = Vec::new();
    for (cookie, name) in gone {
        let row = state.store.dir_mut(dir).and_then(|d| d.rows.remove(cookie, name.as_bytes()));
        stale.extend(
            row.into_iter()
                .flat_map(|old| leases::invalidations_for_replaced(state, (dir, &name), old.as_ref(), None)),
        );
    }
    stale
}

/// Handles a chunk of a listing. Returns the call if more chunks are to come; once it is stored again, other
/// requests go on (`after_listing_chunk`).
pub(crate) fn on_listing_chunk(
    state: &mut State,
    now: Time,
    call: CallId,
    dir: u64,
    mut flight: InflightCall,
    response: Response,
) -> Option<InflightCall> {
    if flight.abandoned {
        return (!response.last && response.result.is_ok()).then_some(flight);
    }
    let told = response.result.as_ref().map(chunk_of);
    let (entries, last) = match (told, state.store.id_of(dir)) {
        (Ok(Some(part)), Some(_)) => (part, response.last),
        (Err(errno), _) => {
            listings::end_listing(state, call, dir);
            state.watches.note_listing_failed(now, dir);
            replies::reply_all(state, &flight.waiters, &OpReply::Failed(*errno));
            return None;
        }
        _ => {
            listings::end_listing(state, call, dir);
            replies::reply_all(state, &flight.waiters, &OpReply::Failed(Errno::PROTO));
            return None;
        }
    };
    flight.grants.extend(&response.grants);
    order::refresh_grant_ids(state, &flight, &response.grants);
    if !flight.has_chunk {
        on_first_chunk(state, now, call, dir, &mut flight, &response.grants);
    }
    let crosses = conflicts_with_local_change(state, dir, &flight, &entries, last)
        || order::is_outdated(state, &flight.race_log, dir);
    if flight.detached_entries.is_none() && crosses {
        restart_listing(state, now, dir, &mut flight);
    }
    if flight.detached_entries.is_none() {
        apply_chunk(state, now, dir, &flight, &entries, &response.grants, last);
    } else if let Some(rows) = &mut flight.detached_entries {
        let key = state.store.key();
        for (name, told) in &entries {
            let cookie = key.cookie(name.as_bytes());
            rows.insert(cookie, name.as_bytes(), Some(told.child.clone()));
        }
    }
    if last {
        on_last_chunk(state, now, call, dir, &mut flight, &response);
    }
    if last {
        looks::on_watched_listing(state, now, dir, &flight);
        serve_from_snapshot(state, now, (call, dir), &mut flight);
    }
    serve_waiters(state, now, dir, &mut flight);
    if !last {
        return Some(flight);
    }
    listings::requeue_on_commit(state, now, dir, &flight.waiters);
    replies::reply_all(state, &flight.waiters, &OpReply::Failed(Errno::IO));
    None
}

/// Handles the first chunk: begins its grant, or detaches the listing for its waiters.
fn on_first_chunk(
    state: &mut State,
    now: Time,
    call: CallId,
    dir: u64,
    flight: &mut InflightCall,
    grants: &[Grant],
) {
    flight.has_chunk = true;
    let Some(id) = state.store.id_of(dir) else { return };
    let granted = flight.granted(grants, id, LeaseScope::Directory).map(|g| LiveGrant::begin(g, flight.sent));
    let current = state.store.dir(dir).is_some_and(|directory| directory.listing == Some(call));
    let granted = granted.filter(|h| current && h.is_live(now));
    match granted.filter(|h| {
        leases::live_directory(state, now, dir).is_some() || state.store.may_begin_lease(id, h.id)
    }) {
        Some(held) => {
            leases::renew_lease(state, now, id, held);
            let directory = leases::dir_record(state, id);
            directory.progress = Some(Cookie(0));
        }
        None => {
            flight.detached_entries = Some(Box::default());
            // A reply without a grant does not answer requests that came after the call was sent.
            let late = state.calls.late_joiners(&flight.waiters);
            flight.waiters.retain(|op| !late.contains(op));
            listings::relist_for_late_joiners(state, now, dir, late);
        }
    }
}

/// Returns the cookies that a chunk covers: after the last one so far, up to its own last entry.
fn chunk_range(state: &State, dir: u64, entries: &[(Name, ListedEntry)], last: bool) -> (Cookie, Cookie) {
    let from = state.store.dir(dir).and_then(|d| d.progress).unwrap_or_default();
    let to = entries.last().map_or(from, |(name, _)| state.store.cookie(name));
    (from, if last { Cookie(u64::MAX) } else { to })
}

/// Returns whether a chunk contradicts a local change with a reply since the listing was sent, without a known
/// order.
fn conflicts_with_local_change(
    state: &State,
    dir: u64,
    flight: &InflightCall,
    entries: &[(Name, ListedEntry)],
    last: bool,
) -> bool {
    let (from, to) = chunk_range(state, dir, entries, last);
    let mut here =
        flight.race_log.local_dentries(dir).filter(|(_, own)| from < own.cookie && own.cookie <= to);
    here.any(|(name, own)| {
        let listed = entries.iter().find(|(n, _)| n == name).map(|(_, told)| told.child.id);
        listed != own.id && !is_newer(state, own, (dir, name))
    })
}

/// Returns whether a local change is newer than a listing that contradicts it: no other client has changed the name
/// under the grant, and the name's entry is as the change made it.
fn is_newer(state: &State, own: &ConcurrentDentry, (dir, name): (u64, &Name)) -> bool {
    let Some(directory) = state.store.dir(dir) else { return false };
    let lives = directory.held.is_some_and(|held| held.recallable && held.is_live(state.clock));
    let listed = directory.find(own.cookie, name).map(|listed| listed.map(|child| child.id));
    lives && own.lease_generation == Some(directory.lease_generation) && listed == Some(own.id)
}

/// Replaces a listing that may be older or newer than a local change: its waiters get another listing.
fn restart_listing(state: &mut State, now: Time, dir: u64, flight: &mut InflightCall) {
    let Some(id) = state.store.id_of(dir) else { return };
    flight.detached_entries = Some(Box::default());
    leases::discard_uncertain_dir(state, id);
    let waiters = std::mem::take(&mut flight.waiters);
    listings::relist_for_late_joiners(state, now, dir, waiters);
}

fn apply_chunk(
    state: &mut State,
    now: Time,
    dir: u64,
    flight: &InflightCall,
    entries: &[(Name, ListedEntry)],
    grants: &[Grant],
    last: bool,
) {
    let own: FxHashMap<NodeId, &Grant> =
        grants.iter().filter(|g| g.covers == LeaseScope::Attributes).map(|g| (g.node, g)).collect();
    let (from, to) = chunk_range(state, dir, entries, last);
    let under_way = state.calls.names_in_flight(dir);
    let (mut stale, mut all_taken) = (Vec::new(), true);
    for (name, told) in entries {
        let id = told.child.id;
        let cookie = state.store.cookie(name);
        let own_change = flight.race_log.name(dir, name);
        let row = || state.store.dir(dir).and_then(|d| d.rows.find(cookie, name.as_bytes()));
        if own_change.is_some() && row().and_then(|r| r.child).is_some_and(|c| c.id == id) {
            continue;
        }
        let later = own_change.filter(|own| own.id != Some(id));
        if later.is_some_and(|own| is_newer(state, own, (dir, name)))
            || order::is_newer_than_listing(state, &flight.race_log, dir, name)
        {
            all_taken = false;
            continue;
        }
        let mut child = told.child.clone();
        let changed = own_change.is_some()
            || flight.race_log.local_inodes.contains(&id.ino)
            || flight.race_log.remote_inodes.contains(&id.ino);
        if changed {
            child.no_xattrs = false;
            // Changes of an inode do not reach an entry that is not its parent entry.
            let is_home = state.store.inode(id.ino).is_some_and(|inode| inode.is_at(dir, name));
            match view::cached_attr(state, now, id).filter(|(attr, _)| is_home || !attr.covered_by_parent()) {
                Some((attr, _)) => child.packed = attr.into(),
                None => child.attr_known = false,
            }
        } else if let Some(entry) = &told.entry {
            apply_listed_attr(state, now, flight, entry, (dir, name), own.get(&id).copied());
            learn::learn_no_xattrs(state, now, flight, entry);
        }
        if let Some(old) =
            state.store.dir_mut(dir).and_then(|d| d.rows.insert(cookie, name.as_bytes(), Some(child)))
        {
            stale.extend(leases::invalidations_for_replaced(state, (dir, name), old.as_ref(), Some(id)));
        }
    }
    stale.extend(remove_unlisted(state, dir, flight, entries, (from, to), (&under_way, all_taken)));
    if state.kernel.can_notify() && !stale.is_empty() {
        invalidate::invalidate(state, stale, None);
    }
    for name in under_way {
        let cookie = state.store.cookie(&name);
        if from < cookie && cookie <= to {
            let listed = entries.iter().find(|(n, _)| *n == name).map(|(_, told)| told.child.id);
            order::mark_name_in_flight(state, dir, &name, listed);
        }
    }
    if let Some(directory) = state.store.dir_mut(dir) {
        directory.progress = Some(to);
    }
    state.store.recount(dir);
}

/// Applies a listed inode's attributes: under its own grant if it needs one. Otherwise those in the directory's
/// entry replace attributes under an older grant of its own.
fn apply_listed_attr(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    entry: &Entry,
    parent_entry: (u64, &Name),
    grant: Option<&Grant>,
) {
    let recalled = flight.recalled(entry.id, LeaseScope::Attributes);
    state.calls.mark_attr_learned(entry.id.ino);
    leases::drop_other_version(state, now, entry.id, &entry.attr);
    if entry.attr.covered_by_parent() {
        if let Some(inode) = state.store.inode_mut(entry.id.ino) {
            inode.drop_own_attr();
        }
        inodes::note_listed_at(state, entry.id, parent_entry);
        return;
    }
    if entry.attr.is_dir() {
        // A directory has one name.
        inodes::note_listed_at(state, entry.id, parent_entry);
    }
    let held =
        grant.filter(|_| !recalled).map(|g| LiveGrant::begin(g, flight.sent)).filter(|h| h.is_live(now));
    if let Some(held) = held {
        let inode = inodes::record(state, entry.id);
        inode.note_own_attr(entry.attr, held);
        inode.note_listed_at(parent_entry.0, parent_entry.1);
    }
}

/// Handles the end of a listing.
fn on_last_chunk(
    state: &mut State,
    now: Time,
    call: CallId,
    dir: u64,
    flight: &mut InflightCall,
    response: &Response,
) {
    let key = state.store.key();
    if flight.detached_entries.is_none()
        && let Some(directory) = state.store.dir_mut(dir)
    {
        directory.rows.complete();
        if flight.resend.is_some() {
            // Fetched on demand, not prefetched.
            state.prefetch.count_demanded(directory.rows.existing() + 1);
        }
        directory.complete = directory.held.is_some();
        // Dentries that disagree are older.
        let rows = &directory.rows;
        directory.dentry_leases.retain(|name, (id, _)| {
            let row = rows.find(key.cookie(name.as_bytes()), name.as_bytes());
            row.and_then(|row| row.child).map(|child| child.id) == *id
        });
    }
    listings::end_listing(state, call, dir);
    state.store.recount(dir);
    let (after, grants) = (response.after.clone(), std::mem::take(&mut flight.grants));
    let whole = Response { result: Ok(Reply::Done), after, grants, last: true };
    learn::apply_attrs_after(state, now, flight, &whole);
}

/// Serves a complete listing without a grant to the open directories that wait for it. If a name has changed since
/// it was sent, late readers get another listing: the cache knew that change while its grant lived.
fn serve_from_snapshot(state: &mut State, now: Time, (call, dir): (CallId, u64), flight: &mut InflightCall) {
    let Some(rows) = flight.detached_entries.take() else { return };
    let mut late = state.calls.late_joiners(&flight.waiters);
    late.retain(|op| state.calls.waiter(*op).is_some_and(|w| matches!(w.want, ReplyKind::Page { .. })));
    let changed = flight.race_log.remote_names.contains_key(&dir)
        || flight.race_log.local_dentries(dir).next().is_some();
    if changed && !state.answers_stale() {
        flight.waiters.retain(|op| !late.contains(op));
        listings::relist_for_late_joiners(state, now, dir, late);
    }
    let reads = |op: &OpId| match state.calls.waiter(*op).map(|w| &w.want) {
        Some(ReplyKind::Page { fh, .. }) => Some(*fh),
        _ => None,
    };
    let readers: Vec<Fh> =
        flight.waiters.iter().filter_map(reads).collect::<BTreeSet<Fh>>().into_iter().collect();
    state.open.dirs.keep_snapshot(call, *rows, &readers);
}

fn serve_waiters(state: &mut State, now: Time, dir: u64, flight: &mut InflightCall) {
    let waiters = std::mem::take(&mut flight.waiters);
    for op in waiters {
        if !serve_waiter(state, now, dir, flight, op) {
            flight.waiters.push(op);
        }
    }
}

/// Answers a request that waits for a listing, if the listing has come far enough.
fn serve_waiter(state: &mut State, now: Time, dir: u64, flight: &InflightCall, op: OpId) -> bool {
    let Some(waiting) = state.calls.waiter(op) else { return true };
    let reader = waiting.caller.pid;
    match waiting.want.clone() {
        ReplyKind::OpenDir { ino } => {
            let opened = dir_pages::opened_dir(state, now, ino, reader);
            replies::reply_to(state, op, OpReply::Opened(opened));
            true
        }
        ReplyKind::Page { fh, offset, size, plus } => {
            let page = match dir_pages::snapshot_page(state, fh, offset, size, plus) {
                Some(page) => Some(page),
                None if flight.detached_entries.is_some() || state.store.suspended.has_names(dir) => None,
                None => dir_pages::page(state, now, dir, fh, offset, size, plus),
            };
            match page {
                Some(mut page) => {
                    dir_pages::on_page_reply(state, now, fh, &mut page);
                    replies::reply_to(state, op, OpReply::Page(page));
                    true
                }
                None => false,
            }
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    mod races;

    use super::*;
    use crate::Config;
    use crate::op::{Caller, Op, Output};
    use crate::test_fixtures::{T0, answers, cache, calls, in_part, outputs, part, session};
    use nigh_types::{Attr, Call, CookieKey, Event};

    /// The server restarts between two chunks; the session leaves out what has come before.
    #[test]
    fn listing_over_a_server_restart_keeps_earlier_chunks() {
        let mut cache = cache(Config::default());
        let mut names = ["a", "b", "c", "d"];
        names.sort_by_key(|name| CookieKey::default().cookie(name.as_bytes()));
        let (call, fh) = in_part(&mut cache, &names[..2]);
        let read = Op::ReadDir { ino: 1, fh, offset: Cookie(0), size: 4096, plus: false };
        assert_eq!(cache.handle_op(T0, OpId(2), Caller::default(), read), None);
        cache.handle_event(T0, Event::Restored { session: session(), kept: false });
        assert_eq!(answers(&mut cache), []);
        cache.handle_event(T0, Event::Response { call, response: part(&names[2..], true) });
        let told = answers(&mut cache);
        let [(OpId(2), OpReply::Page(page))] = &told[..] else { panic!("{told:?}") };
        assert_eq!(page.names, [b"...".as_slice(), names.concat().as_bytes()].concat());
    }

    /// A local directory is made after the listing was sent and before the reader came; then the directory lease is
    /// recalled.
    #[test]
    fn reader_after_a_local_change_gets_no_listing_from_before_it() {
        let mut cache = cache(Config::default());
        let mut names = ["a", "b", "c"];
        names.sort_by_key(|name| CookieKey::default().cookie(name.as_bytes()));
        let (call, fh) = in_part(&mut cache, &names[..1]);
        // A name that comes last in any order that it may have.
        let key = CookieKey::default();
        let behind = key.cookie(names[2].as_bytes());
        let own = (0..).map(|n| Name::new(format!("own-{n}").as_bytes()).unwrap());
        let own = own.into_iter().find(|name| key.cookie(name.as_bytes()) > behind).unwrap();
        let mkdir = Op::Mkdir { dir: 1, name: own, mode: 0o755, umask: 0 };
        assert_eq!(cache.handle_op(T0, OpId(2), Caller::default(), mkdir), None);
        let [change] = calls(&mut cache)[..] else { panic!("it is made") };
        let attr = Attr { mode: 0o040_755, nlink: 2, ..Attr::default() };
        let entry = Entry { id: NodeId { ino: 50, generation: 1 }, attr, target: None, no_xattrs: true };
        let made = Reply::Created { entry, handle: None, existed: false };
        cache.handle_event(T0, Event::Response { call: change, response: Response::plain(Ok(made)) });
        assert!(matches!(answers(&mut cache)[..], [(OpId(2), OpReply::Node(_))]));
        let read = Op::ReadDir { ino: 1, fh, offset: Cookie(0), size: 4096, plus: false };
        assert_eq!(cache.handle_op(T0, OpId(3), Caller::default(), read), None);
        let (id, node) = (nigh_types::RecallId(5), NodeId { ino: 1, generation: 1 });
        let recall = nigh_types::Recall { id, node, covers: LeaseScope::Directory, names: Vec::new() };
        cache.handle_event(T0, Event::Recall(recall));
        calls(&mut cache);
        cache.handle_event(T0, Event::Response { call, response: part(&names[1..], true) });
        let outputs = outputs(&mut cache);
        assert!(!outputs.iter().any(|output| matches!(output, Output::Answer { .. })), "{outputs:?}");
        assert!(matches!(outputs[..], [Output::Call { call: Call::List { .. }, .. }]), "{outputs:?}");
    }
}
