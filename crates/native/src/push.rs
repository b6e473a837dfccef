//! Update prepares and commits on the wire. Layout: docs/protocol.md, "Pushes".

use crate::ProtocolError;
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{Attr, Commit, Covers, Entry, Fact, Held, Hold, Name, NodeId, RecallId};

/// The shortest update scope in bytes: a node, its lease scope, and no names.
const HELD_BYTES: u32 = 16 + 1 + 4;

impl Wire for Held {
    fn put(&self, w: &mut Writer) {
        self.node.put(w);
        self.covers.put(w);
        self.names.put(w);
    }

    fn parse(r: &mut Reader<'_>) -> Result<Held, ProtocolError> {
        let held =
            Held { node: NodeId::parse(r)?, covers: Covers::parse(r)?, names: r.sequence(3, Name::parse)? };
        if held.covers == Covers::Data || (held.covers == Covers::Names) == held.names.is_empty() {
            return Err(ProtocolError::Malformed(
                "a hold of data, of all names, or of none that carries some",
            ));
        }
        Ok(held)
    }
}

impl Wire for Fact {
    fn put(&self, w: &mut Writer) {
        match self {
            Fact::Name { dir, name, entry } => {
                w.u8(1);
                w.record(|w| {
                    dir.put(w);
                    name.put(w);
                    entry.put(w);
                });
            }
            Fact::Attr { node, attr } => {
                w.u8(2);
                w.record(|w| {
                    node.put(w);
                    attr.put(w);
                });
            }
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Fact, ProtocolError> {
        let tag = r.u8()?;
        let r = &mut r.record()?;
        match tag {
            1 => Ok(Fact::Name {
                dir: NodeId::parse(r)?,
                name: Name::parse(r)?,
                entry: Option::<Entry>::parse(r)?,
            }),
            2 => Ok(Fact::Attr { node: NodeId::parse(r)?, attr: Attr::parse(r)? }),
            _ => Err(ProtocolError::Malformed("unknown kind of committed fact")),
        }
    }
}

/// Encodes a prepare without its id, which is in the frame's header; a commit likewise.
pub(crate) fn put_hold(w: &mut Writer, hold: &Hold) {
    w.sequence(&hold.facts, |w, held| held.put(w));
}

pub(crate) fn take_hold(id: RecallId, r: &mut Reader<'_>) -> Result<Hold, ProtocolError> {
    let facts = r.sequence(HELD_BYTES, Held::parse)?;
    if facts.is_empty() {
        return Err(ProtocolError::Malformed("a hold of nothing"));
    }
    Ok(Hold { id, facts })
}

pub(crate) fn put_commit(w: &mut Writer, commit: &Commit) {
    w.sequence(&commit.facts, |w, fact| fact.put(w));
}

pub(crate) fn take_commit(id: RecallId, r: &mut Reader<'_>) -> Result<Commit, ProtocolError> {
    Ok(Commit { id, facts: r.sequence(5, Fact::parse)? })
}
