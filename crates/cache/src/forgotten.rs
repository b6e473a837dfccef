//! Inodes that the kernel has forgotten, for file handles that name them by number (open_by_handle_at(2), knfsd).
//!
//! A kernel that is given a file handle of an inode that it has dropped asks for `.` by the number alone (`fuse_get_dentry`), and compares the
//! generation itself. So the latest ones are remembered: their generation, and the name that led there last.

use crate::cache::Cache;
use nigh_types::{Name, NodeId};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// Most of them; and the part of the budget that they may have beside it, at so many bytes each.
const MOST: u64 = 1 << 16;
const PART: u64 = 32;
const BYTES: u64 = 128;

#[derive(Clone, Debug)]
struct Node {
    generation: u64,
    home: (u64, Name),
    turn: u64,
}

/// By number; the one that was forgotten first goes first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Forgotten {
    nodes: FxHashMap<u64, Node>,
    order: VecDeque<(u64, u64)>,
    turn: u64,
}

impl Forgotten {
    fn put(&mut self, id: NodeId, home: (u64, Name), most: u64) {
        self.turn += 1;
        self.nodes.insert(id.ino, Node { generation: id.generation, home, turn: self.turn });
        self.order.push_back((id.ino, self.turn));
        while self.order.len() as u64 > most
            && let Some((ino, turn)) = self.order.pop_front()
        {
            if self.nodes.get(&ino).is_some_and(|node| node.turn == turn) {
                self.nodes.remove(&ino);
            }
        }
    }

    pub fn id(&self, ino: u64) -> Option<NodeId> {
        self.nodes.get(&ino).map(|node| NodeId { ino, generation: node.generation })
    }

    pub fn home(&self, ino: u64) -> Option<&(u64, Name)> {
        self.nodes.get(&ino).map(|node| &node.home)
    }

    /// They are of a server that is no more.
    pub fn clear(&mut self) {
        *self = Forgotten::default();
    }
}

impl Cache {
    /// The record of an inode goes.
    pub(crate) fn remember_forgotten(&mut self, id: NodeId, home: Option<(u64, Name)>) {
        let Some(home) = home.filter(|_| id.generation != 0 && id.ino != self.root) else { return };
        let most = MOST.min(self.config.budget_bytes / PART / BYTES);
        self.forgotten.put(id, home, most);
    }

    /// It is asked for by number: it has a record again, which is dropped if the remote does not find it.
    pub(crate) fn recall_forgotten(&mut self, ino: u64) {
        if self.inodes.contains_key(&ino) {
            return;
        }
        let Some((id, home)) = self.forgotten.id(ino).zip(self.forgotten.home(ino).cloned()) else { return };
        if self.id_of(ino).is_none_or(|known| known == id) {
            self.inode(id).home = Some(home);
        }
    }

    /// The directory and name that last led to an inode.
    pub(crate) fn last_home(&self, ino: u64) -> Option<&(u64, Name)> {
        match self.inodes.get(&ino) {
            Some(inode) => inode.home.as_ref(),
            None => self.forgotten.home(ino),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::lookup::tests::{T0, cache};
    use crate::op::{Answer, Caller, Op, Output};
    use nigh_types::{Attr, Call, CallId, Entry, Errno, Event, OpId, Reply, Response};

    const DIRECTORY: NodeId = NodeId { ino: 6, generation: 16 };
    const FILE: NodeId = NodeId { ino: 7, generation: 17 };

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    fn asks(cache: &mut Cache, op: Op) -> (CallId, Call) {
        assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), op), None);
        let mut asked = None;
        loop {
            match cache.poll_output() {
                Output::Call { id, call, .. } => asked = Some((id, call)),
                Output::Timeout(..) => return asked.expect("the remote is asked"),
                _ => {}
            }
        }
    }

    fn answers(cache: &mut Cache, call: CallId, result: Result<Reply, Errno>) -> Option<Answer> {
        cache.handle_event(T0, Event::Response { call, response: Response::plain(result) });
        let mut said = None;
        loop {
            match cache.poll_output() {
                Output::Answer { answer, .. } => said = Some(answer),
                Output::Timeout(..) => return said,
                _ => {}
            }
        }
    }

    fn attr(id: NodeId) -> Attr {
        let mode = if id == DIRECTORY { 0o040_755 } else { 0o100_644 };
        Attr { mode, nlink: 1, ..Attr::default() }
    }

    fn looks(cache: &mut Cache, dir: u64, at: &str, id: NodeId) {
        let (call, _) = asks(cache, Op::Lookup { dir, name: name(at) });
        let entry = Entry { id, attr: attr(id), target: None, no_xattrs: true };
        assert!(matches!(answers(cache, call, Ok(Reply::Looked(Some(entry)))), Some(Answer::Node(_))));
    }

    fn forgotten() -> Cache {
        let mut cache = cache(Config::default());
        looks(&mut cache, 1, "d", DIRECTORY);
        looks(&mut cache, DIRECTORY.ino, "f", FILE);
        cache.handle_forget(FILE.ino, 1);
        cache.handle_forget(DIRECTORY.ino, 1);
        assert!(!cache.inodes.contains_key(&FILE.ino) && !cache.inodes.contains_key(&DIRECTORY.ino));
        cache
    }

    #[test]
    fn forgotten_inode_is_found_by_its_number_and_last_path() {
        let mut cache = forgotten();
        let (call, asked) = asks(&mut cache, Op::LookupSelf { ino: FILE.ino });
        let Call::GetAttr { node } = asked else { panic!("{asked:?}") };
        assert_eq!((node.node, node.hint), (FILE, Some((DIRECTORY, name("f")))));
        assert_eq!(cache.path_to(FILE), Some(vec![name("d"), name("f")]));
        let found = answers(&mut cache, call, Ok(Reply::Attr(FILE, attr(FILE))));
        assert!(matches!(found, Some(Answer::Node(node)) if node.id == FILE && node.number == FILE.ino));
        let (_, asked) = asks(&mut cache, Op::LookupParent { ino: FILE.ino });
        assert!(matches!(asked, Call::GetAttr { ref node } if node.node == DIRECTORY), "{asked:?}");
    }

    #[test]
    fn forgotten_inode_that_is_gone_is_stale_and_has_no_record() {
        let mut cache = forgotten();
        let (call, _) = asks(&mut cache, Op::LookupSelf { ino: FILE.ino });
        let mut said = answers(&mut cache, call, Err(Errno::STALE));
        // It is led there by names once more.
        while said.is_none() {
            let walk = cache.flights.iter().next_back().map(|(id, _)| *id).expect("it is asked");
            said = answers(&mut cache, walk, Err(Errno::STALE));
        }
        assert_eq!(said, Some(Answer::Failed(Errno::STALE)));
        assert!(!cache.inodes.contains_key(&FILE.ino));
    }

    /// The remote keeps it for calls that are on their way, or since another client has it open.
    #[test]
    fn forgotten_inode_without_a_name_is_stale_though_the_remote_has_it() {
        let mut cache = forgotten();
        let (call, _) = asks(&mut cache, Op::LookupSelf { ino: FILE.ino });
        let removed = Attr { nlink: 0, ..attr(FILE) };
        let said = answers(&mut cache, call, Ok(Reply::Attr(FILE, removed)));
        assert_eq!(said, Some(Answer::Failed(Errno::STALE)));
        assert!(!cache.inodes.contains_key(&FILE.ino));
    }

    #[test]
    fn forgotten_inode_whose_caller_was_killed_has_no_record() {
        let mut cache = forgotten();
        let (killed, _) = asks(&mut cache, Op::LookupSelf { ino: FILE.ino });
        cache.handle_interrupt(OpId(1), true);
        // Another caller waits for a call of its own.
        let (call, _) = asks(&mut cache, Op::LookupSelf { ino: FILE.ino });
        answers(&mut cache, killed, Ok(Reply::Attr(FILE, attr(FILE))));
        assert!(cache.inodes.contains_key(&FILE.ino));
        cache.handle_interrupt(OpId(1), true);
        answers(&mut cache, call, Ok(Reply::Attr(FILE, attr(FILE))));
        assert!(!cache.inodes.contains_key(&FILE.ino));
    }

    #[test]
    fn number_that_was_never_told_is_stale() {
        let mut cache = forgotten();
        let answer = cache.handle_op(T0, OpId(1), Caller::default(), Op::LookupSelf { ino: 99 });
        assert_eq!(answer, Some(Answer::Failed(Errno::STALE)));
    }

    #[test]
    fn no_more_are_remembered_than_so_many() {
        let mut forgotten = Forgotten::default();
        for ino in [1, 2, 1, 3, 4] {
            forgotten.put(NodeId { ino, generation: ino }, (9, name("x")), 3);
        }
        let found: Vec<bool> = (1..=4).map(|ino| forgotten.id(ino).is_some()).collect();
        assert_eq!(found, [true, false, true, true]);
    }
}
