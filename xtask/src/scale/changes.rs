//! The single writer's changes of a directory: create a name, set a mode, extend a file, rename, unlink, in turn, each
//! of another file.

use std::collections::VecDeque;

use anyhow::{Context, Result, bail};
use nigh_types::{Access, Call, Handle, Name, NodeId, NodeRef, Reply, SetAttr, WriteFlags};

use super::stage::name;

/// A kind's index is its number modulo the count of kinds.
pub const KINDS: [&str; 5] = ["create", "chmod", "write", "rename", "unlink"];

/// A change to be made, or in flight.
pub struct Change {
    pub kind: &'static str,
    pub call: Call,
    /// The names in the directory that it changes.
    pub names: Vec<Name>,
    node: Option<NodeId>,
}

/// The files of the directory, least recently changed first.
pub struct Changes {
    dir: NodeRef,
    files: VecDeque<(Name, NodeId)>,
    begun: u64,
}

impl Changes {
    pub fn new(dir: NodeRef, files: impl Iterator<Item = (Name, NodeId)>) -> Changes {
        Changes { dir, files: files.collect(), begun: 0 }
    }

    /// Starts the next change; no other change uses its file before [`Changes::done`].
    pub fn begin(&mut self) -> Result<Change> {
        let (number, kinds) = (self.begun, KINDS.len() as u64);
        self.begun += 1;
        let kind = KINDS[usize::try_from(number % kinds)?];
        if kind == "create" {
            return self.create(number);
        }
        let (old, node) = self.files.pop_front().context("the directory is empty")?;
        let place = NodeRef { node, path_hint: Some((self.dir.node, old.clone())) };
        let (mut names, mut node) = (vec![old.clone()], Some(node));
        let dir = self.dir.clone();
        let call = match kind {
            "chmod" => {
                let mode = Some(0o600 | u32::try_from(number / kinds % 0o100)?);
                let set = SetAttr { mode, ..SetAttr::default() };
                Call::SetAttr { node: place, handle: None, set }
            }
            // At a larger offset than before, so that the file grows.
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

    /// Ends a change; returns the handle to release.
    pub fn done(&mut self, change: &Change, reply: &Reply) -> Result<Option<Handle>> {
        let last = change.names.last().context("a change is of a name")?.clone();
        match (reply, change.node) {
            (Reply::Created { entry, handle, existed: false }, _) => {
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
                Reply::Created { entry, handle: Some(Handle(ino)), existed: false }
            }
            "write" => Reply::Written { offset: 0, count: 1 },
            "rename" => Reply::Renamed { moved: id, replaced: None, pinned: None, whiteout: None },
            "unlink" => Reply::Removed { node: id, pinned: None },
            _ => Reply::Attr(id, Attr::default()),
        }
    }

    #[test]
    fn concurrent_changes_share_no_name_and_keep_directory_size() {
        let node = |ino| NodeId { ino, generation: 1 };
        let files = (10..60).map(|ino| (name(&format!("file-{ino}")).unwrap(), node(ino)));
        let mut changes = Changes::new(NodeRef::without_hint(node(1)), files);
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
