//! Names and attributes.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, ReplyKind};
use crate::grants::LiveGrant;
use crate::kernel::DeferredReply;
use crate::op::{Caller, OpReply};
use crate::store::CachedEntry;
use nigh_types::{Attr, Call, Errno, Kind, Name, OpId, Reply, Response, Span, Time};

impl Cache {
    pub(crate) fn lookup(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        dir: u64,
        name: Name,
    ) -> Option<OpReply> {
        self.use_prefetched(now, dir);
        if let Some((child, held)) = self.cached_dentry(now, dir, &name) {
            let Some(child) = child else { return Some(self.negative_reply(now, dir, &name, Some(held))) };
            self.note_file_lookup(caller, dir, &child);
            if let Some((attr, attr_held)) = self.child_attr(now, &child, held) {
                let (at, attr_held) = (Some((dir, &name)), Some(attr_held));
                return Some(OpReply::Node(self.entry_reply(now, at, child.id, attr, Some(held), attr_held)));
            }
        }
        self.lookup_remote(now, op, caller, dir, name)
    }

    /// Records the lookup of a file that the caller, or the directory's last reader, may have got without attributes.
    fn note_file_lookup(&mut self, caller: Caller, dir: u64, child: &CachedEntry) {
        if child.attr().mode & 0o170_000 != 0o040_000 {
            self.open.readers.looked_up(caller.pid);
            let reader = self.store.dir(dir).map_or(0, |directory| directory.last_reader);
            if reader != caller.pid {
                self.open.readers.looked_up(reader);
            }
        }
    }

    /// Returns the cached inode of a name, if it is of that kind; counts as a lookup.
    pub fn cached_lookup(&mut self, now: Time, dir: u64, name: &Name, kind: Kind) -> Option<OpReply> {
        let (child, held) = self.cached_dentry(now, dir, name)?;
        let child = child?;
        let (attr, attr_held) = self.child_attr(now, &child, held).filter(|(attr, _)| attr.kind() == kind)?;
        Some(OpReply::Node(self.entry_reply(
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
        &mut self,
        now: Time,
        dir: u64,
        name: &Name,
    ) -> Option<(Option<CachedEntry>, LiveGrant)> {
        if self.store.suspended.has_name(dir, name) {
            return None;
        }
        let cookie = self.store.cookie(name);
        if let Some((directory, held)) = self.live_directory(now, dir)
            && let Some(child) = directory.find(cookie, name)
        {
            return Some((child.cloned(), held));
        }
        let directory = self.store.dir_mut(dir)?;
        let (id, held) = directory.dentry_leases.get(now, name)?;
        directory.note_use(now);
        Some((id.map(|id| CachedEntry::bare(id, None)), held))
    }

    fn lookup_remote(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        dir: u64,
        name: Name,
    ) -> Option<OpReply> {
        let Some(place) = self.node_ref(dir) else { return Some(OpReply::Failed(Errno::STALE)) };
        let key = (dir, name);
        if let Some(call) = self.calls.lookup_call(&key)
            && self.calls.is_joinable(call)
        {
            return self.wait(op, caller, call, ReplyKind::Reply, true);
        }
        let purpose = CallKind::Lookup { dir, name: key.1.clone() };
        let id = self.send(now, None, purpose.clone(), Call::Lookup { dir: place, name: key.1 });
        self.calls.enter_joins(id, purpose);
        let answer = self.wait(op, caller, id, ReplyKind::Reply, false);
        self.list_after_absent_names(now, dir);
        self.prefetch_by_lookups(now, dir);
        answer
    }

    /// Lists a directory of which some names are known absent, so that it answers the next lookups itself.
    fn list_after_absent_names(&mut self, now: Time, dir: u64) {
        let least = u64::from(self.config.names_before_listing);
        let missing = self.store.dir(dir).map_or(0, |d| d.rows.absent());
        if missing + 1 >= least {
            // The listing is for later requests: if the directory cannot be reached, these find out themselves.
            let _ = self.list(now, dir);
        }
    }

    pub(crate) fn attributes(&mut self, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
        let Some(id) = self.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        if let Some((attr, held)) = self.cached_attr(now, id) {
            self.note_getattr_reply(ino, attr);
            return Some(OpReply::Attr(id, attr, self.attr_timeout(now, ino, &attr, Some(held))));
        }
        if let Some(attr) = self.store.inode(ino).and_then(|i| i.unlinked_attr) {
            return Some(OpReply::Attr(id, attr, Span::ZERO));
        }
        match self.fetch_attr(now, ino) {
            Ok((call, joined)) => self.wait(op, caller, call, ReplyKind::Reply, joined),
            Err(errno) => Some(OpReply::Failed(errno)),
        }
    }

    /// Fetches attributes, or joins a call in flight (then `true`).
    pub(crate) fn fetch_attr(&mut self, now: Time, ino: u64) -> Result<(nigh_types::CallId, bool), Errno> {
        // A lookup by number may not find an inode that has a name here.
        let by_number = |flight: &InflightCall| matches!(flight.resend, Some(Call::LookupNumber { .. }));
        if let Some(call) = self.calls.attr_call(ino)
            && self.calls.is_joinable(call)
            && !self.calls.get(call).is_some_and(by_number)
        {
            return Ok((call, true));
        }
        let node = self.node_ref(ino).ok_or(Errno::STALE)?;
        let older = self.calls.attr_call(ino);
        let id = self.send(now, None, CallKind::Attr { ino }, Call::GetAttr { node });
        self.calls.enter_joins(id, CallKind::Attr { ino });
        if let Some(older) = older.filter(|_| self.reads_by_size(ino)) {
            self.wait_for_newer(older, id);
        }
        Ok((id, false))
    }

    /// Looks up `.` by inode number, as an NFS server that re-exports the mount does after a cache drop.
    pub(crate) fn lookup_self(&mut self, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
        self.restore_forgotten(ino);
        let Some(id) = self.store.id_of(ino) else { return self.lookup_number(now, op, caller, ino) };
        if let Some((attr, held)) = self.cached_attr(now, id) {
            if self.is_removed_unused(ino, &attr) {
                return Some(OpReply::Failed(Errno::STALE));
            }
            return Some(OpReply::Node(self.entry_reply(now, None, id, attr, None, Some(held))));
        }
        match self.fetch_attr(now, ino) {
            Ok((call, joined)) => self.wait(op, caller, call, ReplyKind::SelfLookup, joined),
            Err(errno) => Some(OpReply::Failed(errno)),
        }
    }

    pub(crate) fn lookup_parent(&mut self, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
        let parent = match self.store.last_parent_entry(ino) {
            Some((dir, _)) => *dir,
            None if ino == self.store.root() => ino,
            None => return Some(OpReply::Failed(Errno::STALE)),
        };
        self.lookup_self(now, op, caller, parent)
    }

    pub(crate) fn on_lookup_reply(
        &mut self,
        now: Time,
        flight: InflightCall,
        dir: u64,
        name: &Name,
        response: Response,
    ) {
        let kept = self.apply_lookup_reply(now, flight, dir, name, response);
        self.on_suspended_lookup(now, dir, name, kept);
    }

    /// Handles the reply to a lookup. Returns whether a fact was made of it.
    fn apply_lookup_reply(
        &mut self,
        now: Time,
        flight: InflightCall,
        dir: u64,
        name: &Name,
        response: Response,
    ) -> bool {
        let mut waiters = flight.waiters.clone();
        let looked = match (response.result, self.store.id_of(dir)) {
            (Ok(Reply::Entry(entry)), Some(dir_id)) => Ok((entry, dir_id)),
            (Ok(Reply::Entry(_)), None) => Err(Errno::STALE),
            (Ok(_), _) => Err(Errno::PROTO),
            (Err(errno), _) => Err(errno),
        };
        let (entry, dir_id) = match looked {
            Ok(looked) => looked,
            Err(errno) => {
                self.reply_all(&waiters, &OpReply::Failed(errno));
                return false;
            }
        };
        let held = self.apply_dentry(now, &flight, dir_id, name, entry.as_ref(), &response.grants);
        if held.is_none()
            && let Some(place) = self.node_ref(dir)
        {
            let late = self.calls.late_joiners(&waiters);
            waiters.retain(|op| !late.contains(op));
            let call = Call::Lookup { dir: place, name: name.clone() };
            self.resend_for_joiners(now, late, CallKind::Lookup { dir, name: name.clone() }, call);
        }
        let Some(entry) = entry else {
            for op in waiters {
                let answer = self.negative_reply(now, dir, name, held);
                self.reply_to(op, answer);
            }
            return held.is_some();
        };
        // The record must exist before its attributes are applied: they may live in its parent entry.
        let node = self.entry_reply(now, Some((dir, name)), entry.id, entry.attr, held, None);
        let own = self.apply_attr(now, &flight, entry.id, entry.attr, &response.grants);
        self.keep_target_in_reply(now, &entry);
        self.learn_no_xattrs(now, &flight, &entry);
        let attr_held = if entry.attr.covered_by_parent() { own.and(held).or(own) } else { own };
        let attr_valid = self.attr_timeout(now, entry.id.ino, &entry.attr, attr_held);
        let node = crate::op::Node { attr_valid, ..node };
        match waiters.len() as u64 {
            0 => self.handle_forget(node.number, 1),
            more => self.inode(entry.id).nlookup += more - 1,
        }
        // A granted reply is as new as any reply to a later request.
        let older = if attr_held.is_none() { vec![entry.id.ino] } else { Vec::new() };
        let name = Some((dir, name.clone()));
        self.enqueue_reply(
            &older,
            &waiters,
            DeferredReply { answer: OpReply::Node(node), sent: Some(flight.sent), name },
        );
        held.is_some()
    }

    pub(crate) fn on_getattr_reply(&mut self, now: Time, flight: InflightCall, response: Response) {
        let mut waiters = flight.waiters.clone();
        let answer = match self.attr_in_reply(&flight, response.result) {
            Ok((id, attr)) => {
                let held = self.apply_attr(now, &flight, id, attr, &response.grants);
                if held.is_none()
                    && let Some(node) = self.node_ref(id.ino)
                {
                    let mut late = self.calls.late_joiners(&waiters);
                    if !late.is_empty() && self.reads_by_size(id.ino) {
                        // If the kernel applies an older reply, it discards the late waiters' newer one.
                        late.clone_from(&waiters);
                    }
                    waiters.retain(|op| !late.contains(op));
                    self.resend_for_joiners(
                        now,
                        late,
                        CallKind::Attr { ino: id.ino },
                        Call::GetAttr { node },
                    );
                }
                if !waiters.is_empty() {
                    self.note_getattr_reply(id.ino, attr);
                }
                OpReply::Attr(id, attr, self.attr_timeout(now, id.ino, &attr, held))
            }
            Err(errno) => OpReply::Failed(errno),
        };
        for op in waiters {
            self.reply_with_attr(now, op, &answer);
        }
        if let CallKind::Attr { ino } = &flight.purpose
            && self.calls.attr_call(*ino).is_none()
        {
            // It may have been asked for by number alone, or by a caller that was killed meanwhile.
            self.drop_if_idle(*ino);
        }
    }

    /// Returns whether an inode has lost its last name and is not open here. No file handle leads to it, though the
    /// remote keeps such a file for calls in flight.
    fn is_removed_unused(&self, ino: u64, attr: &Attr) -> bool {
        attr.nlink == 0 && !self.is_open(ino)
    }

    /// Answers a request that waits for attributes, which may need them for another reply.
    fn reply_with_attr(&mut self, now: Time, op: OpId, answer: &OpReply) {
        match (self.calls.waiter(op).map(|waiting| &waiting.want), answer) {
            (Some(ReplyKind::SelfLookup), OpReply::Attr(id, attr, _))
                if self.is_removed_unused(id.ino, attr) =>
            {
                self.drop_if_idle(id.ino);
                self.reply_to(op, OpReply::Failed(Errno::STALE));
            }
            (Some(ReplyKind::SelfLookup), OpReply::Attr(id, attr, valid)) => {
                let node = self.entry_reply(now, None, *id, *attr, None, None);
                self.reply_to(op, OpReply::Node(crate::op::Node { attr_valid: *valid, ..node }));
            }
            _ => self.reply_to(op, answer.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        cache.evict(T0, node);
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
        assert!(!cache.calls.has_joins());
        assert_eq!((cache.counters().hits, cache.counters().misses), (3, 0));
    }
}
