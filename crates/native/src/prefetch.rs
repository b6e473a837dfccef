//! Prefetch: layouts, and validation of the directories that a server sends ahead (docs/decisions/0019-walks-ahead.md).

use crate::ProtocolError;
use crate::listing_order::ListingOrder;
use crate::reply::{put_listed, take_listed};
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{Call, CallId, CookieKey, Entries, NodeId, NodeRef, PrefetchOrder, PrefetchedDir};
use std::collections::BTreeSet;

impl Wire for PrefetchOrder {
    fn put(&self, w: &mut Writer) {
        w.u8(match self {
            PrefetchOrder::Cookie => 0,
            PrefetchOrder::Name => 1,
            PrefetchOrder::InodeNumber => 2,
            PrefetchOrder::CookieReversed => 3,
            PrefetchOrder::NameReversed => 4,
            PrefetchOrder::InodeNumberReversed => 5,
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<PrefetchOrder, ProtocolError> {
        Ok(match r.u8()? {
            0 => PrefetchOrder::Cookie,
            1 => PrefetchOrder::Name,
            2 => PrefetchOrder::InodeNumber,
            3 => PrefetchOrder::CookieReversed,
            4 => PrefetchOrder::NameReversed,
            5 => PrefetchOrder::InodeNumberReversed,
            _ => return Err(ProtocolError::Malformed("an unknown order")),
        })
    }
}

impl Wire for CallId {
    fn put(&self, w: &mut Writer) {
        w.u64(self.0);
    }

    fn parse(r: &mut Reader<'_>) -> Result<CallId, ProtocolError> {
        r.u64().map(CallId)
    }
}

/// The directories at which a prefetch begins.
impl Wire for Vec<NodeRef> {
    fn put(&self, w: &mut Writer) {
        w.sequence(self, |w, place| place.put(w));
    }

    fn parse(r: &mut Reader<'_>) -> Result<Vec<NodeRef>, ProtocolError> {
        r.bounded((21, Call::MOST_ROOTS), NodeRef::parse)
    }
}

impl Wire for PrefetchedDir {
    fn put(&self, w: &mut Writer) {
        self.dir.put(w);
        w.u8(u8::from(self.last) | u8::from(self.listed.is_some()) << 1);
        if let Some(listed) = &self.listed {
            put_listed(w, listed);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<PrefetchedDir, ProtocolError> {
        let (dir, flags) = (NodeId::parse(r)?, r.u8()?);
        let listed = match flags {
            1 => None,
            2 | 3 => Some(take_listed(r)?),
            _ => return Err(ProtocolError::Malformed("a step of a walk is neither told nor left out")),
        };
        Ok(PrefetchedDir { dir, listed, last: flags & 1 == 1 })
    }
}

/// A prefetch in progress, at the client: which directories the server may send.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefetchValidator {
    /// Entries that the server may still send.
    credit: i64,
    /// Directories whose entries arrived in an earlier listing and that were not begun.
    known: BTreeSet<NodeId>,
    /// Directories that the client asked for: they cost no credit and may come twice.
    wanted: BTreeSet<NodeId>,
    /// The directory that was begun and not ended.
    open: Option<OpenListing>,
}

#[derive(Clone, Debug)]
struct OpenListing {
    dir: NodeId,
    names: u64,
    costs: bool,
    behind: ListingOrder,
}

impl PrefetchValidator {
    pub(crate) fn new(roots: &[NodeRef], credit: u32) -> PrefetchValidator {
        let known = roots.iter().map(|place| place.node).collect();
        PrefetchValidator { credit: i64::from(credit), known, ..PrefetchValidator::default() }
    }

    pub(crate) fn add_credit(&mut self, credit: u32, want: Option<&NodeRef>) {
        self.credit = self.credit.saturating_add(i64::from(credit));
        self.wanted.extend(want.map(|place| place.node));
    }

    /// Checks the directories of one response.
    pub(crate) fn check(
        &mut self,
        call: CallId,
        steps: &[PrefetchedDir],
        key: CookieKey,
    ) -> Result<(), ProtocolError> {
        steps.iter().try_for_each(|step| self.step(call, step, key))
    }

    fn step(&mut self, call: CallId, step: &PrefetchedDir, key: CookieKey) -> Result<(), ProtocolError> {
        let wrong = |what| Err(ProtocolError::WrongReply { call, what });
        let mut open = match self.open.take() {
            Some(open) if open.dir == step.dir => open,
            Some(_) => return wrong("names of two directories among each other"),
            None => {
                let wanted = self.wanted.remove(&step.dir);
                if !self.known.remove(&step.dir) && !wanted {
                    return wrong("a directory that was not asked for");
                }
                let costs = !wanted && step.listed.is_some();
                if costs && self.credit <= 0 {
                    return wrong("more than was asked for");
                }
                OpenListing { dir: step.dir, names: 0, costs, behind: ListingOrder::default() }
            }
        };
        let Some(listed) = &step.listed else {
            return if step.last { Ok(()) } else { wrong("more is to follow") };
        };
        open.behind.take(call, listed.entries.iter().map(|(name, _)| name), key)?;
        open.names += listed.entries.len() as u64;
        if open.costs && open.names > u64::from(Call::MOST_PREFETCHED_NAMES) {
            return wrong("a larger directory than may come unasked");
        }
        self.note(listed);
        if step.last {
            let cost = i64::try_from(open.names).unwrap_or(i64::MAX).saturating_add(1);
            self.credit -= if open.costs { cost } else { 0 };
        } else {
            self.open = Some(open);
        }
        Ok(())
    }

    fn note(&mut self, listed: &Entries) {
        let dirs = listed.entries.iter().filter(|(_, entry)| entry.attr.is_dir());
        self.known.extend(dirs.map(|(_, entry)| entry.id));
    }
}

#[cfg(test)]
mod tests;
