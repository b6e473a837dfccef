//! Update prepares and commits on the wire. Layout: docs/protocol.md, "Pushes".

use crate::ProtocolError;
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{
    Attr, Entry, LeaseScope, Name, NodeId, RecallId, UpdateCommit, UpdatePrepare, UpdateScope, UpdatedFact,
};

/// The shortest update scope in bytes: a node, its lease scope, and no names.
const SCOPE_BYTES: u32 = 16 + 1 + 4;

impl Wire for UpdateScope {
    fn put(&self, w: &mut Writer) {
        self.node.put(w);
        self.covers.put(w);
        self.names.put(w);
    }

    fn parse(r: &mut Reader<'_>) -> Result<UpdateScope, ProtocolError> {
        let held = UpdateScope {
            node: NodeId::parse(r)?,
            covers: LeaseScope::parse(r)?,
            names: r.sequence(3, Name::parse)?,
        };
        if held.covers == LeaseScope::Data || (held.covers == LeaseScope::Directory) == held.names.is_empty()
        {
            return Err(ProtocolError::Malformed(
                "a hold of data, of all names, or of none that carries some",
            ));
        }
        Ok(held)
    }
}

impl Wire for UpdatedFact {
    fn put(&self, w: &mut Writer) {
        match self {
            UpdatedFact::Name { dir, name, entry } => {
                w.u8(1);
                w.record(|w| {
                    dir.put(w);
                    name.put(w);
                    entry.put(w);
                });
            }
            UpdatedFact::Attr { node, attr } => {
                w.u8(2);
                w.record(|w| {
                    node.put(w);
                    attr.put(w);
                });
            }
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<UpdatedFact, ProtocolError> {
        let tag = r.u8()?;
        let r = &mut r.record()?;
        match tag {
            1 => Ok(UpdatedFact::Name {
                dir: NodeId::parse(r)?,
                name: Name::parse(r)?,
                entry: Option::<Entry>::parse(r)?,
            }),
            2 => Ok(UpdatedFact::Attr { node: NodeId::parse(r)?, attr: Attr::parse(r)? }),
            _ => Err(ProtocolError::Malformed("unknown kind of committed fact")),
        }
    }
}

/// Encodes a prepare without its id, which is in the frame's header; a commit likewise.
pub(crate) fn put_prepare(w: &mut Writer, hold: &UpdatePrepare) {
    w.sequence(&hold.facts, |w, held| held.put(w));
}

pub(crate) fn take_prepare(id: RecallId, r: &mut Reader<'_>) -> Result<UpdatePrepare, ProtocolError> {
    let facts = r.sequence(SCOPE_BYTES, UpdateScope::parse)?;
    if facts.is_empty() {
        return Err(ProtocolError::Malformed("a hold of nothing"));
    }
    Ok(UpdatePrepare { id, facts })
}

pub(crate) fn put_commit(w: &mut Writer, commit: &UpdateCommit) {
    w.sequence(&commit.facts, |w, fact| fact.put(w));
}

pub(crate) fn take_commit(id: RecallId, r: &mut Reader<'_>) -> Result<UpdateCommit, ProtocolError> {
    Ok(UpdateCommit { id, facts: r.sequence(5, UpdatedFact::parse)? })
}
