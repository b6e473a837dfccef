//! Layouts of ids, names, node references, credentials and grants.

use crate::ProtocolError;
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{
    Access, Call, Credentials, DataVersion, Grant, GrantId, Handle, IdRange, LeaseScope, LockKind, Mode,
    MutationId, Name, NodeId, NodeRef, Privileges, Recall, RecallId, Span, Term, Timestamp,
    WriteBackPrecondition, WriteFlags,
};

/// The most groups that a process can be in (Linux `NGROUPS_MAX`).
const MAX_GROUPS: u32 = 65_536;
const MAX_RANGES: u32 = Privileges::MOST_RANGES as u32;

impl Wire for NodeId {
    fn put(&self, w: &mut Writer) {
        w.u64(self.ino);
        w.u64(self.generation);
    }

    fn parse(r: &mut Reader<'_>) -> Result<NodeId, ProtocolError> {
        let id = NodeId { ino: r.u64()?, generation: r.u64()? };
        if id.ino == 0 {
            return Err(ProtocolError::Malformed("an inode number is 0"));
        }
        Ok(id)
    }
}

impl Wire for Handle {
    fn put(&self, w: &mut Writer) {
        w.u64(self.0);
    }

    fn parse(r: &mut Reader<'_>) -> Result<Handle, ProtocolError> {
        r.u64().map(Handle)
    }
}

impl Wire for Vec<Handle> {
    fn put(&self, w: &mut Writer) {
        w.sequence(self, |w, handle| handle.put(w));
    }

    fn parse(r: &mut Reader<'_>) -> Result<Vec<Handle>, ProtocolError> {
        r.bounded((8, Call::MOST_HANDLES), Handle::parse)
    }
}

/// u16 length, bytes.
impl Wire for Name {
    fn put(&self, w: &mut Writer) {
        let bytes = self.as_bytes();
        w.u16(u16::try_from(bytes.len()).expect("a name has at most 255 bytes"));
        w.raw(bytes);
    }

    fn parse(r: &mut Reader<'_>) -> Result<Name, ProtocolError> {
        let length = r.u16()?;
        let bytes = r.raw(u32::from(length))?;
        Name::new(bytes).map_err(|_| ProtocolError::Malformed("a name is empty, too long or forbidden"))
    }
}

/// Path from the root to an inode.
impl Wire for Vec<Name> {
    fn put(&self, w: &mut Writer) {
        w.sequence(self, |w, name| name.put(w));
    }

    fn parse(r: &mut Reader<'_>) -> Result<Vec<Name>, ProtocolError> {
        r.bounded((3, Call::MOST_NAMES), Name::parse)
    }
}

impl Wire for NodeRef {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            self.node.put(w);
            self.path_hint.is_some().put(w);
            if let Some((parent, name)) = &self.path_hint {
                parent.put(w);
                name.put(w);
            }
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<NodeRef, ProtocolError> {
        let mut r = r.record()?;
        let node = NodeId::parse(&mut r)?;
        let hint = match bool::parse(&mut r)? {
            true => Some((NodeId::parse(&mut r)?, Name::parse(&mut r)?)),
            false => None,
        };
        Ok(NodeRef { node, path_hint: hint })
    }
}

impl Wire for Credentials {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            w.u32(self.uid);
            w.u32(self.gid);
            w.sequence(&self.groups, |w, group| w.u32(*group));
            if let Some(privileges) = &self.privileges {
                privileges.put(w);
            }
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<Credentials, ProtocolError> {
        let mut r = r.record()?;
        let (uid, gid) = (r.u32()?, r.u32()?);
        let groups = r.bounded((4, MAX_GROUPS), Reader::u32)?;
        let privileges = if r.is_empty() { None } else { Some(Box::new(Privileges::parse(&mut r)?)) };
        Ok(Credentials { uid, gid, groups, privileges })
    }
}

impl Wire for Privileges {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            w.u64(self.capabilities);
            for ranges in [&self.users, &self.groups] {
                w.sequence(ranges, |w, range| {
                    w.u32(range.first);
                    w.u32(range.count);
                });
            }
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<Privileges, ProtocolError> {
        let mut r = r.record()?;
        let capabilities = r.u64()?;
        let range = |r: &mut Reader<'_>| Ok(IdRange { first: r.u32()?, count: r.u32()? });
        let (users, groups) = (r.bounded((8, MAX_RANGES), range)?, r.bounded((8, MAX_RANGES), range)?);
        Ok(Privileges { capabilities, users, groups })
    }
}

impl Wire for MutationId {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            w.u64(self.client);
            w.u64(self.incarnation);
            w.u64(self.sequence);
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<MutationId, ProtocolError> {
        let mut r = r.record()?;
        Ok(MutationId { client: r.u64()?, incarnation: r.u64()?, sequence: r.u64()? })
    }
}

fn bits(flags: &[bool]) -> u8 {
    flags.iter().rev().fold(0, |bits, &flag| bits << 1 | u8::from(flag))
}

fn flags<const N: usize>(bits: u8) -> Result<[bool; N], ProtocolError> {
    if u32::from(bits) >> N != 0 {
        return Err(ProtocolError::Malformed("unknown flag bits"));
    }
    Ok(std::array::from_fn(|i| bits >> i & 1 == 1))
}

impl Wire for Access {
    fn put(&self, w: &mut Writer) {
        w.u8(bits(&[self.read, self.write, self.truncate, self.direct, self.sync]));
        // The last field of each call that has it: a server that does not know it ignores it.
        if self.append {
            w.u8(1);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Access, ProtocolError> {
        let [read, write, truncate, direct, sync] = flags(r.u8()?)?;
        let append = if r.is_empty() { false } else { bool::parse(r)? };
        Ok(Access { read, write, truncate, direct, sync, append })
    }
}

impl Wire for WriteFlags {
    fn put(&self, w: &mut Writer) {
        w.u8(bits(&[self.append, self.kill_suidgid, self.sync, self.write_back, self.since.is_some()]));
        if let Some(since) = &self.since {
            since.put(w);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<WriteFlags, ProtocolError> {
        let [append, kill_suidgid, sync, flush, conditional] = flags(r.u8()?)?;
        let since = if conditional { Some(WriteBackPrecondition::parse(r)?) } else { None };
        Ok(WriteFlags { append, kill_suidgid, sync, write_back: flush, since })
    }
}

impl Wire for WriteBackPrecondition {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            w.u64(self.stamp.size);
            self.stamp.mtime.put(w);
            self.under.is_some().put(w);
            if let Some((grant, covers)) = &self.under {
                w.u64(grant.0);
                covers.put(w);
            }
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<WriteBackPrecondition, ProtocolError> {
        let r = &mut r.record()?;
        let stamp = DataVersion { size: r.u64()?, mtime: Timestamp::parse(r)? };
        let under = match bool::parse(r)? {
            true => Some((GrantId(r.u64()?), LeaseScope::parse(r)?)),
            false => None,
        };
        Ok(WriteBackPrecondition { stamp, under })
    }
}

impl Wire for LeaseScope {
    fn put(&self, w: &mut Writer) {
        w.u8(match self {
            LeaseScope::Directory => 1,
            LeaseScope::Attributes => 2,
            LeaseScope::Data => 3,
            // Native servers grant whole directories.
            LeaseScope::Dentry | LeaseScope::NegativeDentry => 0,
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<LeaseScope, ProtocolError> {
        match r.u8()? {
            1 => Ok(LeaseScope::Directory),
            2 => Ok(LeaseScope::Attributes),
            3 => Ok(LeaseScope::Data),
            _ => Err(ProtocolError::Malformed("unknown facts under a grant")),
        }
    }
}

impl Wire for Mode {
    fn put(&self, w: &mut Writer) {
        w.u8(match self {
            Mode::Read => 1,
            Mode::Write => 2,
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<Mode, ProtocolError> {
        match r.u8()? {
            1 => Ok(Mode::Read),
            2 => Ok(Mode::Write),
            _ => Err(ProtocolError::Malformed("unknown mode of a grant")),
        }
    }
}

impl Wire for LockKind {
    fn put(&self, w: &mut Writer) {
        w.u8(match self {
            LockKind::Read => 1,
            LockKind::Write => 2,
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<LockKind, ProtocolError> {
        match r.u8()? {
            1 => Ok(LockKind::Read),
            2 => Ok(LockKind::Write),
            _ => Err(ProtocolError::Malformed("unknown kind of lock")),
        }
    }
}

/// Nanoseconds; all ones: as long as the session.
impl Wire for Term {
    fn put(&self, w: &mut Writer) {
        w.u64(match self {
            Term::Session => u64::MAX,
            Term::Limited(span) => span.0.min(u64::MAX - 1),
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<Term, ProtocolError> {
        Ok(match r.u64()? {
            u64::MAX => Term::Session,
            nanos => Term::Limited(Span(nanos)),
        })
    }
}

impl Wire for Grant {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            w.u64(self.id.0);
            self.node.put(w);
            self.covers.put(w);
            self.mode.put(w);
            self.term.put(w);
            self.recallable.put(w);
            self.shared.put(w);
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<Grant, ProtocolError> {
        let r = &mut r.record()?;
        Ok(Grant {
            id: GrantId(r.u64()?),
            node: NodeId::parse(r)?,
            covers: LeaseScope::parse(r)?,
            mode: Mode::parse(r)?,
            term: Term::parse(r)?,
            recallable: bool::parse(r)?,
            shared: bool::parse(r)?,
        })
    }
}

/// Encodes a recall without its id, which is in the frame's header.
pub(crate) fn put_recall(w: &mut Writer, recall: &Recall) {
    recall.node.put(w);
    recall.covers.put(w);
    recall.names.put(w);
}

pub(crate) fn take_recall(id: RecallId, r: &mut Reader<'_>) -> Result<Recall, ProtocolError> {
    let (node, covers, names) = (NodeId::parse(r)?, LeaseScope::parse(r)?, r.sequence(3, Name::parse)?);
    if covers != LeaseScope::Directory && !names.is_empty() {
        return Err(ProtocolError::Malformed("a recall that is not of names carries some"));
    }
    Ok(Recall { id, node, covers, names })
}
