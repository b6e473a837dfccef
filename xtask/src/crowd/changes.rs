//! What the one writer does to a directory: a name is made, a mode is set, a file grows, a name is changed, a
//! name goes, in turn, each of another file.

use std::collections::VecDeque;

use anyhow::{Context, Result, bail};
use nigh_types::{Access, Call, Handle, Name, NodeId, Place, Reply, SetAttr, WriteFlags};

use super::stage::name;

/// Its place in the turn is what becomes of the number that it was given.
pub const KINDS: [&str; 5] = ["create", "chmod", "write", "rename", "unlink"];

/// One change that is to be made, or under way.
pub struct Change {
    pub kind: &'static str,
    pub call: Call,
    /// Of the directory: what it changes.
    pub names: Vec<Name>,
    node: Option<NodeId>,
}

/// The files of the directory, those that were left alone for longest first.
pub struct Changes {
    dir: Place,
    files: VecDeque<(Name, NodeId)>,
    begun: u64,
}

impl Changes {
    pub fn new(dir: Place, files: impl Iterator<Item = (Name, NodeId)>) -> Changes {
        Changes { dir, files: files.collect(), begun: 0 }
    }

    /// The next one; what it is about is touched by no other before it is [`Changes::done`].
    pub fn begin(&mut self) -> Result<Change> {
        let (number, kinds) = (self.begun, KINDS.len() as u64);
        self.begun += 1;
        let kind = KINDS[usize::try_from(number % kinds)?];
        if kind == "create" {
            return self.create(number);
        }
        let (old, node) = self.files.pop_front().context("the directory is empty")?;
        let place = Place { node, hint: Some((self.dir.node, old.clone())) };
        let (mut names, mut node) = (vec![old.clone()], Some(node));
        let dir = self.dir.clone();
        let call = match kind {
            "chmod" => {
                let mode = Some(0o600 | u32::try_from(number / kinds % 0o100)?);
                let set = SetAttr { mode, ..SetAttr::default() };
                Call::SetAttr { node: place, handle: None, set }
            }
            // Further behind than any before, so that it grows.
            "write" => Call::Write {
                node: place,
                handle: None,
                offset: number,
                data: vec![b'x'],
                flags: WriteFlags::default(),
            },
            "rename" => {
                let new_name = name(&format!("moved-{number}"))?;
                names.push(new_name.clone());
                let (from, to) = (dir.clone(), dir);
                let (no_replace, exchange, keep) = (false, false, None);
                Call::Rename { from, name: old, to, new_name, no_replace, exchange, whiteout: false, keep }
            }
            _ => {
                node = None;
                Call::Unlink { dir, name: old, keep: None }
            }
        };
        Ok(Change { kind, call, names, node })
    }

    fn create(&self, number: u64) -> Result<Change> {
        let new = name(&format!("made-{number}"))?;
        let access =
            Access { read: false, write: true, truncate: false, direct: false, sync: false, append: false };
        let dir = self.dir.clone();
        let call = Call::Create { dir, name: new.clone(), mode: 0o640, umask: 0, exclusive: true, access };
        Ok(Change { kind: "create", call, names: vec![new], node: None })
    }

    /// It was answered. What is to be released after it.
    pub fn done(&mut self, change: &Change, reply: &Reply) -> Result<Option<Handle>> {
        let last = change.names.last().context("a change is of a name")?.clone();
        match (reply, change.node) {
            (Reply::Made { entry, handle, existed: false }, _) => {
                self.files.push_back((last, entry.id));
                Ok(*handle)
            }
            (Reply::Attr(..) | Reply::Written { .. } | Reply::Renamed { .. }, Some(node)) => {
                self.files.push_back((last, node));
                Ok(None)
            }
            (Reply::Removed { .. }, None) => Ok(None),
            _ => bail!("{} of {last} is answered {reply:?}", change.kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::{Attr, Entry};
    use std::collections::BTreeSet;

    fn reply(change: &Change, ino: u64) -> Reply {
        let id = NodeId { ino, generation: 1 };
        match change.kind {
            "create" => {
                let entry = Entry { id, attr: Attr::default(), target: None, no_xattrs: true };
                Reply::Made { entry, handle: Some(Handle(ino)), existed: false }
            }
            "write" => Reply::Written { offset: 0, count: 1 },
            "rename" => Reply::Renamed { moved: id, replaced: None, kept: None, whiteout: None },
            "unlink" => Reply::Removed { node: id, kept: None },
            _ => Reply::Attr(id, Attr::default()),
        }
    }

    #[test]
    fn changes_that_are_under_way_together_share_no_name_and_the_directory_keeps_its_size() {
        let node = |ino| NodeId { ino, generation: 1 };
        let files = (10..60).map(|ino| (name(&format!("file-{ino}")).unwrap(), node(ino)));
        let mut changes = Changes::new(Place::bare(node(1)), files);
        for round in 0..100 {
            let some: Vec<Change> = (0..10).map(|_| changes.begin().unwrap()).collect();
            let names: Vec<&Name> = some.iter().flat_map(|change| &change.names).collect();
            assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
            for (nth, change) in some.iter().enumerate() {
                let ino = 1_000 + round * 10 + nth as u64;
                let handle = changes.done(change, &reply(change, ino)).unwrap();
                assert_eq!(handle.is_some(), change.kind == "create");
            }
            assert_eq!(changes.files.len(), 50);
        }
    }
}
