//! Replies to the requests of replay children, each while it runs a command.
//!
//! Such a reply names an inode of a reserved range with zero timeouts, so no other process ever sees it. A change
//! succeeds only if the kernel has looked its names up in this replay (docs/decisions/0017-events.md).

use nigh_cache::{Node, OpReply};
use nigh_fuse::{Header, Operation};
use nigh_types::{Attr, Errno, Kind, Name, NodeId, Span};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

/// Most replay children.
pub(crate) const MOST_PROCESSES: usize = 4;
/// Inode numbers reserved for replays: the last ones below those of other filesystems (0001).
const REPLAY_INOS: std::ops::Range<u64> = (1 << 63) - (1 << 48)..1 << 63;

/// The change that a child replays.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ReplayedChange {
    Make {
        dir: u64,
        name: Name,
        kind: Kind,
    },
    Remove {
        dir: u64,
        name: Name,
        kind: Kind,
    },
    Move {
        from: u64,
        name: Name,
        to: u64,
        new_name: Name,
        kind: Kind,
    },
    /// Sets an inode's times.
    Touch {
        ino: u64,
    },
}

impl ReplayedChange {
    fn kind(&self) -> Kind {
        match self {
            ReplayedChange::Make { kind, .. }
            | ReplayedChange::Remove { kind, .. }
            | ReplayedChange::Move { kind, .. } => *kind,
            ReplayedChange::Touch { .. } => Kind::File,
        }
    }
}

/// A running replay and its progress.
#[derive(Debug)]
struct ActiveReplay {
    change: ReplayedChange,
    /// Number of the change.
    number: u64,
    asked_source: bool,
    asked_target: bool,
}

/// Reply to a request of a child.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ReplayReply {
    Answer(OpReply),
    /// Success, unless a later local change of one of these names has overtaken the change.
    Done {
        number: u64,
        names: Vec<(u64, Name)>,
    },
    /// As `Done`, with the existing inode if the cache has it and its type matches (`known`); else with this reply.
    Created {
        number: u64,
        dir: u64,
        name: Name,
        kind: Kind,
        otherwise: OpReply,
    },
    /// The inode's actual attributes, if the cache has them.
    CurrentAttrs {
        ino: u64,
    },
}

/// All running replays.
#[derive(Debug, Default)]
pub(crate) struct ReplayFilter {
    /// Process ids of the children; 0: none.
    processes: [AtomicU32; MOST_PROCESSES],
    active: Mutex<(BTreeMap<u32, ActiveReplay>, u64)>,
}

impl ReplayFilter {
    /// Registers a child that is not reaped yet, so its id cannot be reused; call `leave` before reaping it.
    pub fn register(&self, pid: u32) {
        let free =
            |slot: &&AtomicU32| slot.compare_exchange(0, pid, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        let _ = self.processes.iter().find(free);
    }

    pub fn unregister(&self, pid: u32) {
        self.active.lock().0.remove(&pid);
        for slot in &self.processes {
            let _ = slot.compare_exchange(pid, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    pub fn begin(&self, pid: u32, number: u64, part: ReplayedChange) {
        self.active
            .lock()
            .0
            .insert(pid, ActiveReplay { change: part, number, asked_source: false, asked_target: false });
    }

    pub fn end(&self, pid: u32) {
        self.active.lock().0.remove(&pid);
    }

    /// Whether a request comes from a child; cheap.
    pub fn is_replay_process(&self, pid: u32) -> bool {
        pid != 0 && self.processes.iter().any(|slot| slot.load(Ordering::Relaxed) == pid)
    }

    /// Replies to a request; `None`: handle it as an ordinary request. `real` resolves a nodeid to an inode number.
    pub fn reply_to(
        &self,
        real: impl Fn(u64) -> u64,
        header: &Header,
        operation: &Operation<'_>,
    ) -> Option<ReplayReply> {
        use {ReplayReply as Reply, ReplayedChange as Change};

        let at = real(header.nodeid);
        let mut acts = self.active.lock();
        let (acts, last) = &mut *acts;
        let act = acts.get_mut(&header.pid)?;
        let (number, owner) = (act.number, replay_owner(header));
        if REPLAY_INOS.contains(&at) {
            let attributes = attributes(act.change.kind(), owner);
            return Some(Reply::Answer(reply_for_replay_node(at, attributes, operation)));
        }
        let mut placeholder = |kind: Kind| {
            *last = (*last + 1) % (1 << 48);
            replay_node(REPLAY_INOS.start + *last, attributes(kind, owner))
        };
        let is = |dir: &u64, name: &Name, asked: &[u8]| *dir == at && name.as_bytes() == asked;
        let done = |asked: bool, names: Vec<(u64, Name)>| {
            let refused = Reply::Answer(OpReply::Failed(Errno::CANCELED));
            Some(if asked { Reply::Done { number, names } } else { refused })
        };
        match (&act.change, operation) {
            (Change::Make { dir, name, .. }, Operation::Lookup { name: asked }) if is(dir, name, asked) => {
                act.asked_source = true;
                Some(Reply::Answer(OpReply::Missing(Span::ZERO)))
            }
            (
                Change::Make { dir, name, kind },
                Operation::Mknod { name: asked, .. }
                | Operation::Mkdir { name: asked, .. }
                | Operation::Symlink { name: asked, .. },
            ) if is(dir, name, asked) => {
                let otherwise = placeholder(*kind);
                Some(Reply::Created { number, dir: *dir, name: name.clone(), kind: *kind, otherwise })
            }
            (Change::Remove { dir, name, kind }, Operation::Lookup { name: asked })
                if is(dir, name, asked) =>
            {
                act.asked_source = true;
                Some(Reply::Answer(placeholder(*kind)))
            }
            (
                Change::Remove { dir, name, .. },
                Operation::Unlink { name: asked } | Operation::Rmdir { name: asked },
            ) if is(dir, name, asked) => done(act.asked_source, vec![(*dir, name.clone())]),
            (Change::Move { from, name, kind, .. }, Operation::Lookup { name: asked })
                if is(from, name, asked) =>
            {
                act.asked_source = true;
                Some(Reply::Answer(placeholder(*kind)))
            }
            (Change::Move { to, new_name, .. }, Operation::Lookup { name: asked })
                if is(to, new_name, asked) =>
            {
                act.asked_target = true;
                Some(Reply::Answer(OpReply::Missing(Span::ZERO)))
            }
            (
                Change::Move { from, name, to, new_name, .. },
                Operation::Rename { name: asked, new_dir, new_name: new_asked, .. },
            ) if is(from, name, asked) && real(*new_dir) == *to && new_name.as_bytes() == *new_asked => {
                let names = vec![(*from, name.clone()), (*to, new_name.clone())];
                done(act.asked_source && act.asked_target, names)
            }
            (Change::Touch { ino }, Operation::SetAttr(_)) if *ino == at => {
                Some(Reply::CurrentAttrs { ino: at })
            }
            // All other changes are refused.
            (_, operation) if changes(operation) => Some(Reply::Answer(OpReply::Failed(Errno::CANCELED))),
            _ => None,
        }
    }
}

fn changes(operation: &Operation<'_>) -> bool {
    !matches!(
        operation,
        Operation::Lookup { .. }
            | Operation::GetAttr { .. }
            | Operation::Statx { .. }
            | Operation::ReadLink
            | Operation::GetXattr { .. }
            | Operation::ListXattr { .. }
            | Operation::StatFs
            | Operation::Access { .. }
    )
}

/// Owner and group for replay inodes: those of the child, which runs as this process's user. Idmapped mounts do not
/// send them.
fn replay_owner(header: &Header) -> (u32, u32) {
    match (header.uid, header.gid) {
        (u32::MAX, _) | (_, u32::MAX) => {
            (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
        }
        told => told,
    }
}

fn attributes(kind: Kind, (uid, gid): (u32, u32)) -> Attr {
    let (mode, nlink) = (kind.mode_bits() | 0o700, if kind == Kind::Directory { 2 } else { 1 });
    Attr { mode, nlink, uid, gid, ..Attr::default() }
}

/// Replies for a replay inode. The kernel checks its permissions when it moves a directory to another parent.
fn reply_for_replay_node(ino: u64, attr: Attr, operation: &Operation<'_>) -> OpReply {
    match operation {
        Operation::GetAttr { .. } => OpReply::Attr(NodeId { ino, generation: 1 }, attr, Span::ZERO),
        Operation::GetXattr { .. } => OpReply::Failed(Errno::NODATA),
        _ => OpReply::Failed(Errno::CANCELED),
    }
}

fn replay_node(ino: u64, attr: Attr) -> OpReply {
    let id = NodeId { ino, generation: 1 };
    let (entry_valid, attr_valid) = (Span::ZERO, Span::ZERO);
    OpReply::Node(Node { id, number: ino, known: false, attr, entry_valid, attr_valid })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: u64 = nigh_fuse::abi::ROOT_ID;
    const CHILD: u32 = 77;

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    fn ask(filter: &ReplayFilter, nodeid: u64, pid: u32, operation: &Operation<'_>) -> Option<ReplayReply> {
        let header = Header { unique: 2, nodeid, uid: 0, gid: 0, pid, resent: false };
        filter.reply_to(|node| if node == ROOT { 500 } else { node }, &header, operation)
    }

    fn moving() -> ReplayFilter {
        let filter = ReplayFilter::default();
        filter.register(CHILD);
        let (name, new_name) = (name("a"), name("b"));
        filter.begin(CHILD, 7, ReplayedChange::Move { from: 500, name, to: 9, new_name, kind: Kind::File });
        filter
    }

    const REFUSED: Option<ReplayReply> = Some(ReplayReply::Answer(OpReply::Failed(Errno::CANCELED)));

    #[test]
    fn replayed_change_succeeds_only_after_lookups_of_its_names() {
        let filter = moving();
        let rename = Operation::Rename { name: b"a", new_dir: 9, new_name: b"b", flags: 0 };
        assert_eq!(ask(&filter, ROOT, CHILD, &rename), REFUSED);
        let Some(ReplayReply::Answer(OpReply::Node(node))) =
            ask(&filter, ROOT, CHILD, &Operation::Lookup { name: b"a" })
        else {
            panic!("a is there")
        };
        assert!(
            REPLAY_INOS.contains(&node.id.ino)
                && node.entry_valid == Span::ZERO
                && node.attr_valid == Span::ZERO
        );
        assert_eq!(ask(&filter, ROOT, CHILD, &rename), REFUSED);
        let absent = ask(&filter, 9, CHILD, &Operation::Lookup { name: b"b" });
        assert_eq!(absent, Some(ReplayReply::Answer(OpReply::Missing(Span::ZERO))));
        let names = vec![(500, name("a")), (9, name("b"))];
        assert_eq!(ask(&filter, ROOT, CHILD, &rename), Some(ReplayReply::Done { number: 7, names }));
    }

    #[test]
    fn replay_process_can_make_only_the_commanded_change() {
        let filter = moving();
        for operation in [
            Operation::Unlink { name: b"a" },
            Operation::Mkdir { name: b"b", mode: 0, umask: 0, extensions: nigh_fuse::Extensions::default() },
            Operation::Rename { name: b"a", new_dir: 9, new_name: b"c", flags: 0 },
            Operation::SetAttr(nigh_fuse::SetAttr::default()),
        ] {
            assert_eq!(ask(&filter, ROOT, CHILD, &operation), REFUSED, "{operation:?}");
        }
        assert_eq!(ask(&filter, ROOT, CHILD, &Operation::Lookup { name: b"z" }), None);
        assert_eq!(ask(&filter, ROOT, CHILD, &Operation::GetAttr { fh: None }), None);
    }

    #[test]
    fn only_the_replay_process_gets_replay_replies() {
        let filter = moving();
        let look = Operation::Lookup { name: b"a" };
        assert!(
            filter.is_replay_process(CHILD)
                && !filter.is_replay_process(0)
                && !filter.is_replay_process(CHILD + 1)
        );
        assert_eq!(ask(&filter, ROOT, CHILD + 1, &look), None);
        filter.end(CHILD);
        assert_eq!(ask(&filter, ROOT, CHILD, &look), None);
        filter.unregister(CHILD);
        assert!(!filter.is_replay_process(CHILD));
    }
}
