//! Probes for the result of a change, sent to the holders that suspended the affected facts. See
//! docs/decisions/0014-pushes.md.

use crate::export::Export;
use crate::export::entry::entry;
use crate::export::node::{Node, open_beneath};
use crate::export::node_resolver::is_reserved;
use crate::export::open_files::OpenFileTable;
use crate::export::open_handles::OpenFile;
use crate::os::error::{Fault, Result};
use crate::os::stat;
use nigh_lease::{LeaseKey, ObservedAt, UpdatedKey};
use nigh_types::{Attr, Entry, Errno, LeaseScope, Name, RecallId, UpdateCommit, UpdatedFact};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// One fact that a call changes, and where to read it after the change.
pub(crate) struct ChangeProbe {
    key: LeaseKey,
    name: Option<Name>,
    at: ProbeTarget,
}

/// Where a changed fact is read.
pub(crate) enum ProbeTarget {
    /// The inode or directory of this descriptor.
    Node(Arc<OwnedFd>),
    File(Arc<OpenFile>),
    /// The inode that this name leads to before the change.
    OldName(Arc<OwnedFd>, Name),
}

/// The new value of a fact, in the node ids of one export.
enum ObservedValue {
    Name(Option<Entry>),
    Attr(Attr),
}

/// Facts by lease key, and by name where the fact is a directory entry.
type Facts = Vec<(LeaseKey, Option<Name>, ObservedValue)>;

/// The facts observed at one moment, in the terms of each export whose sessions are to receive them.
pub(crate) struct ObservedFacts {
    pub(crate) looked: ObservedAt,
    exports: Vec<(Arc<Export>, Facts)>,
}

impl ProbeTarget {
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            ProbeTarget::Node(fd) => Some(fd.as_fd()),
            ProbeTarget::File(file) => Some(file.fd.as_fd()),
            ProbeTarget::OldName(..) => None,
        }
    }
}

impl ChangeProbe {
    pub(crate) fn new(key: LeaseKey, name: Option<&Name>, at: ProbeTarget) -> ChangeProbe {
        ChangeProbe { key, name: name.cloned(), at }
    }

    pub(crate) fn is_of(&self, key: LeaseKey, name: Option<&Name>) -> bool {
        (self.key, self.name.as_ref()) == (key, name)
    }

    /// Opens the inode behind a pre-change name, because a holder needs the result of the change.
    pub(crate) fn open_target(&mut self) {
        if let ProbeTarget::OldName(dir, name) = &self.at
            && let Ok(fd) = open_beneath(dir, name.as_bytes())
        {
            self.at = ProbeTarget::Node(Arc::new(fd));
        }
    }

    fn look(&self, export: &Export, homes: &OpenFileTable) -> Option<ObservedValue> {
        let fd = self.at.fd()?;
        match (self.key.covers, &self.name) {
            // A directory that was moved out of the export has no holders in it any more.
            (LeaseScope::Directory, Some(_)) if !export.resolver().is_confined(fd) => None,
            (LeaseScope::Directory, Some(name)) => {
                observe_name(export, homes, fd, name).ok().map(ObservedValue::Name)
            }
            (LeaseScope::Attributes, None) => {
                let stat = stat::of_fd(fd).ok()?;
                let object = export.resolver().ids.object(&stat);
                let look = || stat::of_fd(fd).map(|stat| stat.attr);
                let attr = homes.visible_attr(&export.resolver().orphans, object, look).ok()?;
                (object == self.key.object).then_some(ObservedValue::Attr(attr))
            }
            _ => None,
        }
    }
}

/// Looks a name up as a LOOKUP through this export would.
fn observe_name(
    export: &Export,
    homes: &OpenFileTable,
    dir: BorrowedFd<'_>,
    name: &Name,
) -> Result<Option<Entry>> {
    if is_reserved(name.as_bytes()) {
        return Ok(None);
    }
    let fd = match open_beneath(dir, name.as_bytes()) {
        Err(Fault(Errno::NOENT)) => return Ok(None),
        other => other?,
    };
    let node = export.resolver().identify(fd)?;
    let look = || stat::of_fd(&node.fd).map(|stat| stat.attr);
    let attr = homes.visible_attr(&export.resolver().orphans, node.object, look)?;
    let stat = stat::Stat { attr, ..node.stat };
    entry(&Node { stat, ..node }).map(Some)
}

impl ObservedFacts {
    /// Reads all probed facts, once for each export.
    pub(crate) fn look(
        looked: ObservedAt,
        exports: Vec<Arc<Export>>,
        tells: &[ChangeProbe],
        homes: &OpenFileTable,
    ) -> ObservedFacts {
        let look = |export: Arc<Export>| {
            let became = tells
                .iter()
                .filter_map(|tell| Some((tell.key, tell.name.clone(), tell.look(&export, homes)?)))
                .collect();
            (export, became)
        };
        ObservedFacts { looked, exports: exports.into_iter().map(look).collect() }
    }

    /// Builds the commit of an update for a session of this export.
    pub(crate) fn commit(&self, export: &Arc<Export>, id: RecallId, told: Vec<UpdatedKey>) -> UpdateCommit {
        let of = self.exports.iter().find(|(of, _)| Arc::ptr_eq(of, export));
        let seen = of.map_or(&[][..], |(_, seen)| seen);
        let facts = told.into_iter().filter_map(|UpdatedKey { key, node, name }| {
            let (_, _, became) = seen.iter().find(|(of, called, _)| (*of, called) == (key, &name))?;
            match (became, name) {
                (ObservedValue::Name(entry), Some(name)) => {
                    Some(UpdatedFact::Name { dir: node, name, entry: entry.clone() })
                }
                (ObservedValue::Attr(attr), None) => Some(UpdatedFact::Attr { node, attr: *attr }),
                _ => None,
            }
        });
        UpdateCommit { id, facts: facts.collect() }
    }
}
