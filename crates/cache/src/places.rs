//! Hints: where the remote finds an inode.

use crate::cache::Cache;
use crate::flight::Purpose;
use crate::op::Op;
use nigh_types::{Call, Errno, Name, NodeId, OpId, Place};

impl Cache {
    /// The id of a number that the kernel uses.
    pub(crate) fn id_of(&self, ino: u64) -> Option<NodeId> {
        let id = self.inodes.get(&ino).map(|i| i.id).or_else(|| self.dirs.get(&ino).map(|d| d.id));
        id.filter(|id| id.generation != 0)
    }

    /// A request with the inodes that its numbers mean. What goes by an open file is of that, whoever has its number now.
    ///
    /// # Errors
    ///
    /// `ESTALE`: it means one that is gone. The kernel looks again.
    pub fn meant(&self, mut op: Op) -> Result<Op, Errno> {
        if self.numbers.are_their_own() {
            return Ok(op);
        }
        let is_former = |number: u64| self.numbers.meant(number).is_err();
        if op.nodes().into_iter().flatten().any(is_former) {
            return Err(Errno::STALE);
        }
        for number in op.numbers().into_iter().flatten() {
            *number = self.inode_of(*number);
        }
        Ok(op)
    }

    /// The inode that a number means, or had that is gone.
    #[must_use]
    pub fn inode_of(&self, number: u64) -> u64 {
        self.numbers.meant(number).unwrap_or_else(|former| former.id.ino)
    }

    /// The number by which the kernel knows an inode; and all, with those of the inodes that had its number before and that it
    /// remembers.
    #[must_use]
    pub fn number_of(&self, ino: u64) -> u64 {
        self.numbers.of(ino)
    }

    #[must_use]
    pub fn numbers_of(&self, ino: u64) -> Vec<u64> {
        self.numbers.all_of(ino)
    }

    /// Under which the kernel is told of an inode.
    pub(crate) fn number(&mut self, id: NodeId) -> u64 {
        match self.inode(id).lookups {
            0 => self.numbers.begin(id.ino),
            _ => self.numbers.of(id.ino),
        }
    }

    /// Where another inode has taken the number of one that the kernel knows, it goes on meaning that.
    pub(crate) fn pass_number(&mut self, id: NodeId) {
        let old = self.inodes.get_mut(&id.ino).filter(|old| old.id != id && old.lookups > 0);
        let Some(old) = old.filter(|_| id.ino != self.root) else { return };
        self.numbers.pass(old.id, std::mem::take(&mut old.lookups));
        // So do requests that have yet to begin.
        let means_it = |op: &Op| op.nodes().into_iter().flatten().any(|ino| ino == id.ino);
        let parked = self.parked.iter().filter(|(_, (_, op))| means_it(op)).map(|(op, _)| *op);
        let waiting: Vec<OpId> = parked.chain(self.holds.waiting_for(id.ino)).collect();
        waiting.into_iter().for_each(|op| self.give_up(op, Errno::STALE));
    }

    /// Whether all inodes are known by their own numbers.
    #[must_use]
    pub fn numbers_are_their_own(&self) -> bool {
        self.numbers.are_their_own()
    }

    /// The kernel was told of a node `count` times that it does not remember now.
    pub fn handle_forget(&mut self, number: u64, count: u64) {
        let ino = match self.numbers.forget(number, count) {
            Ok(ino) => ino,
            // What has its number now may have been kept for it alone.
            Err(former) => return self.drop_if_idle(former.id.ino),
        };
        let Some(inode) = self.inodes.get_mut(&ino) else { return };
        inode.lookups = inode.lookups.saturating_sub(count);
        if inode.lookups == 0 {
            self.numbers.leave(ino);
        }
        self.drop_if_idle(ino);
    }

    /// Whether that is known of what has a number.
    pub(crate) fn is_directory(&self, ino: u64) -> bool {
        self.dirs.get(&ino).is_some_and(|directory| directory.is_one)
    }

    /// All ids known so far are of nobody: whatever has one of their numbers is another inode.
    pub(crate) fn disown_ids(&mut self) {
        self.inodes.values_mut().for_each(|inode| inode.renew(NodeId { generation: 0, ..inode.id }));
        self.dirs.values_mut().for_each(|directory| directory.id.generation = 0);
    }

    /// The inode with its hint; `None` if the kernel uses a number that it was never given, or was given by
    /// another server.
    pub(crate) fn place(&self, ino: u64) -> Option<Place> {
        let node = self.id_of(ino)?;
        let home = self.inodes.get(&ino).and_then(|i| i.home.as_ref());
        let hint = home.and_then(|(dir, name)| Some((self.id_of(*dir)?, name.clone())));
        Some(Place { node, hint })
    }

    /// The directory and name under which the kernel last looked an inode up, if it still knows it.
    #[must_use]
    pub fn home_of(&self, ino: u64) -> Option<(u64, Name)> {
        self.inodes.get(&ino).filter(|i| i.lookups > 0).and_then(|i| i.home.clone())
    }

    /// Names from the root to `name` in a directory, as far as they are known.
    #[must_use]
    pub fn path_of(&self, dir: u64, name: &Name) -> Option<Vec<Name>> {
        let mut names = self.path_to(self.id_of(dir)?)?;
        names.push(name.clone());
        Some(names)
    }

    /// The same to a directory.
    #[must_use]
    pub fn path_of_directory(&self, dir: u64) -> Option<Vec<Name>> {
        self.path_to(self.id_of(dir)?)
    }

    /// Names from the root to an inode, as far as the cache knows them.
    pub(crate) fn path_to(&self, node: NodeId) -> Option<Vec<Name>> {
        self.path_by(node, |cache, at| cache.inodes.get(&at)?.home.clone())
    }

    /// Where an inode stands if the renames that are under way have been done.
    pub(crate) fn moved_home(&self, ino: u64) -> Option<(u64, Name)> {
        let home = self.inodes.get(&ino)?.home.clone()?;
        let moved = self.flights.values().find_map(|flight| match &flight.purpose {
            Purpose::Rename { from, name, to, new_name, .. } if (*from, name) == (home.0, &home.1) => {
                Some((*to, new_name.clone()))
            }
            Purpose::Rename { from, name, to, new_name, exchange: true }
                if (*to, new_name) == (home.0, &home.1) =>
            {
                Some((*from, name.clone()))
            }
            _ => None,
        });
        moved.or(Some(home))
    }

    pub(crate) fn path_by(
        &self,
        node: NodeId,
        home: impl Fn(&Cache, u64) -> Option<(u64, Name)>,
    ) -> Option<Vec<Name>> {
        let mut names = Vec::new();
        let mut at = node.ino;
        for _ in 0..=Call::MOST_NAMES {
            if at == self.root {
                names.reverse();
                return Some(names);
            }
            let (dir, name) = home(self, at)?;
            names.push(name);
            at = dir;
        }
        None
    }
}

/// The inodes that a call must reach, in the order in which the remote is led to them; none for
/// calls that are not repeated after a walk.
pub(crate) fn anchors(call: &Call) -> [Option<NodeId>; 2] {
    let one = match call {
        Call::Lookup { dir, .. }
        | Call::List { dir }
        | Call::Create { dir, .. }
        | Call::Tmpfile { dir, .. }
        | Call::Mknod { dir, .. }
        | Call::Mkdir { dir, .. }
        | Call::Symlink { dir, .. }
        | Call::Unlink { dir, .. }
        | Call::Rmdir { dir, .. } => dir.node,
        Call::GetAttr { node }
        | Call::ReadLink { node }
        | Call::Xattrs { node }
        | Call::Xattr { node, .. }
        | Call::StatFs { node }
        | Call::Open { node, .. }
        | Call::Read { node, .. }
        | Call::Seek { node, .. }
        | Call::GetFlags { node }
        | Call::Lock { node, .. }
        | Call::GetLock { node, .. }
        | Call::Reopen { node, .. }
        | Call::SetAttr { node, .. }
        | Call::Fallocate { node, .. }
        | Call::SetXattr { node, .. }
        | Call::RemoveXattr { node, .. }
        | Call::Fsync { node, .. } => node.node,
        Call::Link { node, dir, .. } => return [Some(dir.node), Some(node.node)],
        Call::Rename { from, to, .. } => return [Some(to.node), Some(from.node)],
        Call::Walk { .. }
        | Call::Release { .. }
        | Call::Keep { .. }
        | Call::Unlock { .. }
        | Call::Write { .. }
        | Call::CopyRange { .. } => return [None, None],
    };
    [Some(one), None]
}

#[cfg(test)]
mod numbers {
    use super::*;
    use crate::Config;
    use crate::lookup::tests::{T0, cache, calls};
    use crate::op::{Answer, Caller, Op};
    use nigh_types::{Attr, Entry, Errno, Event, OpId, Reply, Response};

    const FIRST: NodeId = NodeId { ino: 7, generation: 7 };
    const NEXT: NodeId = NodeId { ino: 7, generation: 8 };

    fn name(bytes: &[u8]) -> Name {
        Name::new(bytes).unwrap()
    }

    fn finds(cache: &mut Cache, id: NodeId) -> Option<crate::op::Node> {
        let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
        let entry = Entry { id, attr, target: None, no_xattrs: true };
        let result = Ok(Reply::Looked(Some(entry)));
        let response = Response { result, after: Vec::new(), grants: Vec::new(), last: true };
        let call = calls(cache).pop().expect("it is asked");
        cache.handle_event(T0, Event::Response { call, response });
        let mut told = None;
        loop {
            match cache.poll_output() {
                crate::Output::Timeout(..) => return told,
                crate::Output::Answer { answer: Answer::Node(node), .. } => told = Some(node),
                _ => {}
            }
        }
    }

    /// A file is removed, and another one gets its number, while a link(2) of the first one is on its way here: the kernel says the number
    /// alone, and cannot mean what it was not told of.
    #[test]
    fn who_means_an_inode_whose_number_another_has_taken_is_not_taken_to_mean_that() {
        let mut cache = cache(Config::default());
        let mut op = 0;
        let mut ask = |cache: &mut Cache, what: Op| {
            op += 1;
            cache.handle_op(T0, OpId(op), Caller::default(), what)
        };
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"first") }), None);
        finds(&mut cache, FIRST);
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"next") }), None);
        // Who has asked is killed, so the kernel is told of nothing.
        cache.give_up(OpId(2), Errno::INTR);
        let link = |ino: u64| Op::Link { ino, dir: 1, name: name(b"link") };
        finds(&mut cache, NEXT);
        let gone = Err(Errno::STALE);
        assert_eq!(cache.meant(link(7)), gone);
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"next") }), None);
        let told = finds(&mut cache, NEXT).expect("it is answered").number;
        assert_ne!(told, 7);
        assert_eq!(cache.meant(link(7)), gone);
        assert_eq!(cache.meant(Op::GetAttr { ino: 7 }), gone);
        let read = Op::Read { ino: 7, fh: crate::Fh(1), offset: 0, size: 1 };
        assert_eq!(cache.meant(read.clone()), Ok(read), "by what it opened");
        assert_eq!(cache.meant(link(told)), Ok(link(7)));
        cache.handle_forget(7, 1);
        assert_eq!(
            (cache.meant(link(7)), cache.number_of(7)),
            (Ok(link(7)), told),
            "nobody has the first one"
        );
        assert_eq!(ask(&mut cache, link(7)), None);
        assert_eq!(calls(&mut cache).len(), 1, "it is asked for");
        // An answer that was late is no harm to who has the second one.
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"late") }), None);
        assert_eq!(finds(&mut cache, FIRST).expect("it is answered").number, 7);
        assert_eq!(cache.meant(link(told)), gone);
        assert_eq!(ask(&mut cache, Op::Lookup { dir: 1, name: name(b"next") }), None);
        assert_eq!(finds(&mut cache, NEXT).expect("it is answered").number, told);
        assert_eq!((cache.meant(link(told)), cache.meant(link(7))), (Ok(link(7)), gone));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Answer, Caller, Config, Fh, Op, Output};
    use nigh_types::{
        Access, Attr, CallId, CookieKey, Entry, Errno, Event, Handle, OpId, Reply, Response, Session,
        SetAttr, Span, Term, Time,
    };

    fn attach(cache: &mut Cache, key: u8, generation: u64) {
        cache.handle_event(
            Time(1),
            Event::Attached(Session {
                root: NodeId { ino: 1, generation },
                root_attr: Attr::default(),
                cookie_key: CookieKey([key; 16]),
                term: Term::Limited(Span::ZERO),
                has_acls: false,
                host_bound: String::new(),
                not_given: Vec::new(),
                acts_as: (0, 0),
                names: Vec::new(),
            }),
        );
    }

    fn call(cache: &mut Cache) -> Option<(CallId, Call)> {
        loop {
            match cache.poll_output() {
                Output::Call { id, call, .. } => return Some((id, call)),
                Output::Timeout(..) => return None,
                Output::Invalidate { id, .. } => cache.handle_invalidated(Time(5), id),
                _ => {}
            }
        }
    }

    #[test]
    fn ids_of_a_server_that_lost_its_state_are_never_sent_to_it() {
        let mut cache = Cache::new(Config::default());
        attach(&mut cache, 1, 5 << 32);
        let lookup = || Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() };
        let ask = |cache: &mut Cache, id, op| cache.handle_op(Time(2), OpId(id), Caller::default(), op);
        assert_eq!(ask(&mut cache, 1, lookup()), None);
        let (id, _) = call(&mut cache).unwrap();
        let node = NodeId { ino: 7, generation: 6 << 32 };
        let attr = Attr { mode: 0o100_644, nlink: 1, ..Attr::default() };
        let entry = Entry { id: node, attr, target: None, no_xattrs: true };
        let response = Response::plain(Ok(Reply::Looked(Some(entry))));
        cache.handle_event(Time(3), Event::Response { call: id, response });
        let getattr = Op::GetAttr { ino: 7 };
        assert_eq!(ask(&mut cache, 2, getattr.clone()), None);
        assert!(matches!(call(&mut cache), Some((_, Call::GetAttr { node: place })) if place.node == node));
        // The same server again: ids go on.
        cache.handle_event(Time(4), Event::Lost { why: String::new() });
        attach(&mut cache, 1, 5 << 32);
        assert_eq!(ask(&mut cache, 3, getattr.clone()), None);
        assert!(matches!(call(&mut cache), Some((_, Call::GetAttr { node: place })) if place.node == node));
        let access = Access { read: true, write: false, truncate: false, direct: false, sync: false };
        assert_eq!(ask(&mut cache, 6, Op::Open { ino: 7, access, append: false }), None);
        let (id, _) = call(&mut cache).unwrap();
        let response = Response::plain(Ok(Reply::Opened { handle: Handle(1), attr }));
        cache.handle_event(Time(4), Event::Response { call: id, response });
        // One that makes them of other secrets.
        cache.handle_event(Time(5), Event::Lost { why: String::new() });
        attach(&mut cache, 2, 8 << 32);
        assert_eq!(call(&mut cache), None, "the kernel forgets");
        assert_eq!(ask(&mut cache, 4, getattr), Some(Answer::Failed(Errno::STALE)));
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        let change = Op::SetAttr { ino: 7, fh: Some(Fh(1)), set };
        assert_eq!(ask(&mut cache, 7, change), Some(Answer::Failed(Errno::IO)), "what is open is no other");
        assert_eq!(ask(&mut cache, 5, lookup()), None);
        let Some((_, Call::Lookup { dir, .. })) = call(&mut cache) else { panic!("not asked") };
        assert_eq!(dir.node, NodeId { ino: 1, generation: 8 << 32 });
    }
}
