//! Names and attributes.

use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::facts::{forgetting, inodes, learn, leases};
use crate::grants::LiveGrant;
use crate::kernel::DeferredReply;
use crate::op::{Caller, OpReply};
use crate::ops::{by_number, listings, prefetch_policy, prefetch_use};
use crate::out::{queue, replies, sending};
use crate::state::State;
use crate::store::CachedEntry;
use crate::view::{self, paths};
use nigh_types::{Call, Errno, Kind, Name, OpId, Reply, Response, Span, Time};

pub(crate) fn lookup(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    dir: u64,
    name: Name,
) -> Option<OpReply> {
    prefetch_use::use_prefetched(state, now, dir);
    if let Some((child, held)) = cached_dentry(state, now, dir, &name) {
        let Some(child) = child else {
            return Some(inodes::negative_reply(state, now, dir, &name, Some(held)));
        };
        note_file_lookup(state, caller, dir, &child);
        if let Some((attr, attr_held)) = view::child_attr(state, now, &child, held) {
            let (at, attr_held) = (Some((dir, &name)), Some(attr_held));
            return Some(OpReply::Node(inodes::entry_reply(
                state,
                now,
                at,
                child.id,
                attr,
                Some(held),
                attr_held,
            )));
        }
    }
    lookup_remote(state, now, op, caller, dir, name)
}

/// Records the lookup of a file that the caller, or the directory's last reader, may have got without attributes.
fn note_file_lookup(state: &mut State, caller: Caller, dir: u64, child: &CachedEntry) {
    if child.attr().mode & 0o170_000 != 0o040_000 {
        state.open.readers.looked_up(caller.pid);
        let reader = state.store.dir(dir).map_or(0, |directory| directory.last_reader);
        if reader != caller.pid {
            state.open.readers.looked_up(reader);
        }
    }
}

/// Returns the cached inode of a name, if it is of that kind; counts as a lookup.
pub(crate) fn cached_lookup(
    state: &mut State,
    now: Time,
    dir: u64,
    name: &Name,
    kind: Kind,
) -> Option<OpReply> {
    let (child, held) = cached_dentry(state, now, dir, name)?;
    let child = child?;
    let (attr, attr_held) =
        view::child_attr(state, now, &child, held).filter(|(attr, _)| attr.kind() == kind)?;
    Some(OpReply::Node(inodes::entry_reply(
        state,
        now,
        Some((dir, name)),
        child.id,
        attr,
        Some(held),
        Some(attr_held),
    )))
}

/// Returns what a name leads to (`None`: it does not exist), unless it is suspended or unknown.
fn cached_dentry(
    state: &mut State,
    now: Time,
    dir: u64,
    name: &Name,
) -> Option<(Option<CachedEntry>, LiveGrant)> {
    if state.store.suspended.has_name(dir, name) {
        return None;
    }
    let cookie = state.store.cookie(name);
    if let Some((directory, held)) = leases::live_directory(state, now, dir)
        && let Some(child) = directory.find(cookie, name)
    {
        return Some((child.cloned(), held));
    }
    let directory = state.store.dir_mut(dir)?;
    let (id, held) = directory.dentry_leases.get(now, name)?;
    directory.note_use(now);
    Some((id.map(|id| CachedEntry::bare(id, None)), held))
}

fn lookup_remote(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    dir: u64,
    name: Name,
) -> Option<OpReply> {
    let Some(place) = paths::node_ref(state, dir) else { return Some(OpReply::Failed(Errno::STALE)) };
    let key = (dir, name);
    if let Some(call) = state.calls.lookup_call(&key)
        && state.calls.is_joinable(call)
    {
        return replies::wait(state, op, caller, call, ReplyKind::Reply, true);
    }
    let is_dir = state.store.child(dir, &key.1).is_some_and(|child| child.attr().is_dir());
    let purpose = CallKind::Lookup { dir, name: key.1.clone() };
    let id = sending::send(state, now, None, purpose.clone(), Call::Lookup { dir: place, name: key.1 });
    state.calls.enter_joins(id, purpose);
    let answer = replies::wait(state, op, caller, id, ReplyKind::Reply, false);
    list_after_absent_names(state, now, dir);
    prefetch_policy::prefetch_by_lookups(state, now, dir, is_dir);
    answer
}

/// Lists a directory of which some names are known absent, so that it answers the next lookups itself.
fn list_after_absent_names(state: &mut State, now: Time, dir: u64) {
    let least = u64::from(state.config.names_before_listing);
    let missing = state.store.dir(dir).map_or(0, |d| d.rows.absent());
    if missing + 1 >= least {
        // The listing is for later requests: if the directory cannot be reached, these find out themselves.
        let _ = listings::list(state, now, dir);
    }
}

pub(crate) fn attributes(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
) -> Option<OpReply> {
    let Some(id) = state.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
    if let Some((attr, held)) = view::cached_attr(state, now, id) {
        queue::note_getattr_reply(state, ino, attr);
        return Some(OpReply::Attr(id, attr, queue::attr_timeout(state, now, ino, &attr, Some(held))));
    }
    if let Some(attr) = state.store.inode(ino).and_then(|i| i.unlinked_attr()) {
        return Some(OpReply::Attr(id, *attr, Span::ZERO));
    }
    match sending::fetch_attr(state, now, ino) {
        Ok((call, joined)) => replies::wait(state, op, caller, call, ReplyKind::Reply, joined),
        Err(errno) => Some(OpReply::Failed(errno)),
    }
}

/// Looks up `.` by inode number, as an NFS server that re-exports the mount does after a cache drop.
pub(crate) fn lookup_self(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
) -> Option<OpReply> {
    by_number::restore_forgotten(state, ino);
    let Some(id) = state.store.id_of(ino) else {
        return by_number::lookup_number(state, now, op, caller, ino);
    };
    if let Some((attr, held)) = view::cached_attr(state, now, id) {
        if view::is_removed_unused(state, ino, &attr) {
            return Some(OpReply::Failed(Errno::STALE));
        }
        return Some(OpReply::Node(inodes::entry_reply(state, now, None, id, attr, None, Some(held))));
    }
    match sending::fetch_attr(state, now, ino) {
        Ok((call, joined)) => replies::wait(state, op, caller, call, ReplyKind::SelfLookup, joined),
        Err(errno) => Some(OpReply::Failed(errno)),
    }
}

pub(crate) fn lookup_parent(
    state: &mut State,
    now: Time,
    op: OpId,
    caller: Caller,
    ino: u64,
) -> Option<OpReply> {
    let parent = match state.store.last_parent_entry(ino) {
        Some((dir, _)) => *dir,
        None if ino == state.store.root() => ino,
        None => return Some(OpReply::Failed(Errno::STALE)),
    };
    lookup_self(state, now, op, caller, parent)
}

/// Handles the reply to a lookup. Returns whether a fact was made of it.
pub(crate) fn apply_lookup_reply(
    state: &mut State,
    now: Time,
    flight: InflightCall,
    dir: u64,
    name: &Name,
    response: Response,
) -> bool {
    let mut waiters = flight.waiters.clone();
    let looked = match (response.result, state.store.id_of(dir)) {
        (Ok(Reply::Entry(entry)), Some(dir_id)) => Ok((entry, dir_id)),
        (Ok(Reply::Entry(_)), None) => Err(Errno::STALE),
        (Ok(_), _) => Err(Errno::PROTO),
        (Err(errno), _) => Err(errno),
    };
    let (entry, dir_id) = match looked {
        Ok(looked) => looked,
        Err(errno) => {
            replies::reply_all(state, &waiters, &OpReply::Failed(errno));
            return false;
        }
    };
    let held = learn::apply_dentry(state, now, &flight, dir_id, name, entry.as_ref(), &response.grants);
    if held.is_none()
        && let Some(place) = paths::node_ref(state, dir)
    {
        let late = state.calls.late_joiners(&waiters);
        waiters.retain(|op| !late.contains(op));
        let call = Call::Lookup { dir: place, name: name.clone() };
        sending::resend_for_joiners(state, now, late, CallKind::Lookup { dir, name: name.clone() }, call);
    }
    let Some(entry) = entry else {
        for op in waiters {
            let answer = inodes::negative_reply(state, now, dir, name, held);
            replies::reply_to(state, op, answer);
        }
        return held.is_some();
    };
    // The record must exist before its attributes are applied: they may live in its parent entry.
    let node = inodes::entry_reply(state, now, Some((dir, name)), entry.id, entry.attr, held, None);
    let own = learn::apply_attr(state, now, &flight, entry.id, entry.attr, &response.grants);
    learn::keep_target_in_reply(state, now, &entry);
    learn::learn_no_xattrs(state, now, &flight, &entry);
    let attr_held = if entry.attr.covered_by_parent() { own.and(held).or(own) } else { own };
    let attr_valid = queue::attr_timeout(state, now, entry.id.ino, &entry.attr, attr_held);
    let node = crate::op::Node { attr_valid, ..node };
    match waiters.len() as u64 {
        0 => forgetting::handle_forget(state, node.number, 1),
        more => inodes::record(state, entry.id).kernel.add_lookups(more - 1),
    }
    // A granted reply is as new as any reply to a later request.
    let older = if attr_held.is_none() { vec![entry.id.ino] } else { Vec::new() };
    let name = Some((dir, name.clone()));
    queue::enqueue_reply(
        state,
        &older,
        &waiters,
        DeferredReply { answer: OpReply::Node(node), sent: Some(flight.sent), name },
    );
    held.is_some()
}

pub(crate) fn on_getattr_reply(state: &mut State, now: Time, flight: InflightCall, response: Response) {
    let mut waiters = flight.waiters.clone();
    let answer = match by_number::attr_in_reply(state, &flight, response.result) {
        Ok((id, attr)) => {
            let held = learn::apply_attr(state, now, &flight, id, attr, &response.grants);
            if held.is_none()
                && let Some(node) = paths::node_ref(state, id.ino)
            {
                let mut late = state.calls.late_joiners(&waiters);
                if !late.is_empty() && view::reads_by_size(state, id.ino) {
                    // If the kernel applies an older reply, it discards the late waiters' newer one.
                    late.clone_from(&waiters);
                }
                waiters.retain(|op| !late.contains(op));
                sending::resend_for_joiners(
                    state,
                    now,
                    late,
                    CallKind::Attr { ino: id.ino },
                    Call::GetAttr { node },
                );
            }
            if !waiters.is_empty() {
                queue::note_getattr_reply(state, id.ino, attr);
            }
            OpReply::Attr(id, attr, queue::attr_timeout(state, now, id.ino, &attr, held))
        }
        Err(errno) => OpReply::Failed(errno),
    };
    for op in waiters {
        reply_with_attr(state, now, op, &answer);
    }
    if let CallKind::Attr { ino } = &flight.purpose
        && state.calls.attr_call(*ino).is_none()
    {
        // It may have been asked for by number alone, or by a caller that was killed meanwhile.
        forgetting::drop_if_idle(state, *ino);
    }
}

/// Answers a request that waits for attributes, which may need them for another reply.
fn reply_with_attr(state: &mut State, now: Time, op: OpId, answer: &OpReply) {
    match (state.calls.waiter(op).map(|waiting| &waiting.want), answer) {
        (Some(ReplyKind::SelfLookup), OpReply::Attr(id, attr, _))
            if view::is_removed_unused(state, id.ino, attr) =>
        {
            forgetting::drop_if_idle(state, id.ino);
            replies::reply_to(state, op, OpReply::Failed(Errno::STALE));
        }
        (Some(ReplyKind::SelfLookup), OpReply::Attr(id, attr, valid)) => {
            let node = inodes::entry_reply(state, now, None, *id, *attr, None, None);
            replies::reply_to(state, op, OpReply::Node(crate::op::Node { attr_valid: *valid, ..node }));
        }
        _ => replies::reply_to(state, op, answer.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::test_fixtures::{T0, cache, calls};
    use crate::{Config, OnDisconnect, Op};
    use nigh_types::{Event, Grant, GrantId, LeaseScope, Mode, NodeId, Term};

    #[test]
    fn request_after_an_interrupted_one_is_not_answered_eintr() {
        let name = || Name::new(b"x").unwrap();
        let asked: [fn(Name) -> Op; 3] = [
            |name| Op::Lookup { dir: 1, name },
            |_| Op::GetAttr { ino: 1 },
            |_| Op::ListXattr { ino: 1, size: 0 },
        ];
        for op in asked {
            let mut cache = cache(Config::default());
            let mut ask = |id| cache.handle_op(T0, OpId(id), Caller::default(), op(name()));
            assert_eq!((ask(1), ask(2)), (None, None));
            let [call] = calls(&mut cache)[..] else { panic!("one joins the other") };
            cache.handle_interrupt(OpId(1), true);
            cache.handle_interrupt(OpId(2), true);
            assert_eq!(cache.handle_op(T0, OpId(3), Caller::default(), op(name())), None);
            assert_eq!(calls(&mut cache).len(), 1, "it is asked anew");
            let response = Response::plain(Err(Errno::INTR));
            cache.handle_event(T0, Event::Response { call, response });
            assert!(cache.is_waiting(OpId(3)));
        }
    }

    /// The server knows its grant by its latest id, under which it was returned.
    #[test]
    fn late_reply_does_not_begin_a_returned_grant() {
        let mut cache = cache(Config::default());
        let node = NodeId { ino: 1, generation: 1 };
        let look = |cache: &mut Cache, id, name: &str| {
            let name = Name::new(name.as_bytes()).unwrap();
            cache.handle_op(T0, OpId(id), Caller::default(), Op::Lookup { dir: 1, name })
        };
        let missing = |number| {
            let (id, covers, mode) = (GrantId(number), LeaseScope::Directory, Mode::Read);
            let grant =
                Grant { id, node, covers, mode, term: Term::Session, recallable: true, shared: false };
            Response { grants: vec![grant], ..Response::plain(Ok(Reply::Entry(None))) }
        };
        assert_eq!((look(&mut cache, 1, "x"), look(&mut cache, 2, "y")), (None, None));
        let [late, first] = calls(&mut cache)[..] else { panic!("both are asked") };
        cache.handle_event(T0, Event::Response { call: first, response: missing(31) });
        assert!(matches!(look(&mut cache, 3, "y"), Some(OpReply::Missing(_))));
        crate::memory::evict::evict(&mut cache.state, T0, node);
        cache.handle_event(T0, Event::Response { call: late, response: missing(27) });
        assert_eq!(look(&mut cache, 4, "x"), None, "it is asked");
    }

    #[test]
    fn unsent_call_counts_no_miss_and_cannot_be_joined() {
        let mut cache = cache(Config { on_disconnect: OnDisconnect::Stale, ..Config::default() });
        cache.handle_event(T0, Event::Expired { why: String::new() });
        let name = Name::new(b"x").unwrap();
        let asked = [Op::Lookup { dir: 1, name }, Op::GetAttr { ino: 1 }, Op::ListXattr { ino: 1, size: 0 }];
        for op in asked {
            let answer = cache.handle_op(T0, OpId(1), Caller::default(), op);
            assert_eq!(answer, Some(OpReply::Failed(Errno::IO)));
        }
        assert!(!cache.state.calls.has_joins());
        assert_eq!((cache.counters().hits, cache.counters().misses), (3, 0));
    }
}
