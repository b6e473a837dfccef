//! What has become of what a call changed, for those who hold it back meanwhile. See docs/decisions/0014-pushes.md.

use crate::error::{Fault, Result};
use crate::export::Export;
use crate::files::OpenFile;
use crate::homes::Homes;
use crate::ops::entry;
use crate::reach::{Node, hides, open_beneath};
use crate::stat;
use nigh_native::lease::{LeaseKey, Looked, Told};
use nigh_types::{Attr, Commit, Covers, Entry, Errno, Fact, Name, RecallId};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// One fact that a call changes, and where it is looked for afterwards.
pub(crate) struct Tell {
    key: LeaseKey,
    name: Option<Name>,
    at: At,
}

/// Where a fact is looked for.
pub(crate) enum At {
    /// At the inode, or in the directory, that this descriptor stands for.
    Node(Arc<OwnedFd>),
    File(Arc<OpenFile>),
    /// At the inode to which that name leads before the change.
    Before(Arc<OwnedFd>, Name),
}

/// What a fact has become, in the numbers of one export.
enum Became {
    Name(Option<Entry>),
    Attr(Attr),
}

/// By key, and name of those that have some.
type Facts = Vec<(LeaseKey, Option<Name>, Became)>;

/// What was seen at one moment, for each export that asked.
pub(crate) struct Seen {
    pub(crate) looked: Looked,
    exports: Vec<(Arc<Export>, Facts)>,
}

impl At {
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            At::Node(fd) => Some(fd.as_fd()),
            At::File(file) => Some(file.fd.as_fd()),
            At::Before(..) => None,
        }
    }
}

impl Tell {
    pub(crate) fn new(key: LeaseKey, name: Option<&Name>, at: At) -> Tell {
        Tell { key, name: name.cloned(), at }
    }

    pub(crate) fn is_of(&self, key: LeaseKey, name: Option<&Name>) -> bool {
        (self.key, self.name.as_ref()) == (key, name)
    }

    /// Somebody is to be told: what is to be found by a name of before is opened.
    pub(crate) fn hold(&mut self) {
        if let At::Before(dir, name) = &self.at
            && let Ok(fd) = open_beneath(dir, name.as_bytes())
        {
            self.at = At::Node(Arc::new(fd));
        }
    }

    fn look(&self, export: &Export, homes: &Homes) -> Option<Became> {
        let fd = self.at.fd()?;
        match (self.key.covers, &self.name) {
            // One that was moved out is nobody's any more.
            (Covers::Names, Some(_)) if !export.reach().contains(fd) => None,
            (Covers::Names, Some(name)) => look_up(export, homes, fd, name).ok().map(Became::Name),
            (Covers::Inode, None) => {
                let stat = stat::of_fd(fd).ok()?;
                let object = export.reach().ids.object(&stat);
                let look = || stat::of_fd(fd).map(|stat| stat.attr);
                let attr = homes.seen(&export.reach().orphans, object, look).ok()?;
                (object == self.key.object).then_some(Became::Attr(attr))
            }
            _ => None,
        }
    }
}

/// What a name leads to, as a lookup through that export would say.
fn look_up(export: &Export, homes: &Homes, dir: BorrowedFd<'_>, name: &Name) -> Result<Option<Entry>> {
    if hides(name.as_bytes()) {
        return Ok(None);
    }
    let fd = match open_beneath(dir, name.as_bytes()) {
        Err(Fault(Errno::NOENT)) => return Ok(None),
        other => other?,
    };
    let node = export.reach().opened(fd)?;
    let look = || stat::of_fd(&node.fd).map(|stat| stat.attr);
    let attr = homes.seen(&export.reach().orphans, node.object, look)?;
    let stat = stat::Stat { attr, ..node.stat };
    entry(&Node { stat, ..node }).map(Some)
}

impl Seen {
    /// Looks at all of it, once for each export.
    pub(crate) fn look(looked: Looked, exports: Vec<Arc<Export>>, tells: &[Tell], homes: &Homes) -> Seen {
        let look = |export: Arc<Export>| {
            let became = tells
                .iter()
                .filter_map(|tell| Some((tell.key, tell.name.clone(), tell.look(&export, homes)?)))
                .collect();
            (export, became)
        };
        Seen { looked, exports: exports.into_iter().map(look).collect() }
    }

    /// The end of a hold, for a session of that export.
    pub(crate) fn commit(&self, export: &Arc<Export>, id: RecallId, told: Vec<Told>) -> Commit {
        let of = self.exports.iter().find(|(of, _)| Arc::ptr_eq(of, export));
        let seen = of.map_or(&[][..], |(_, seen)| seen);
        let facts = told.into_iter().filter_map(|Told { key, node, name }| {
            let (_, _, became) = seen.iter().find(|(of, called, _)| (*of, called) == (key, &name))?;
            match (became, name) {
                (Became::Name(entry), Some(name)) => {
                    Some(Fact::Name { dir: node, name, entry: entry.clone() })
                }
                (Became::Attr(attr), None) => Some(Fact::Attr { node, attr: *attr }),
                _ => None,
            }
        });
        Commit { id, facts: facts.collect() }
    }
}
