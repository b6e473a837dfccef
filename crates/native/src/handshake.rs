//! The first message of each side.

use crate::ProtocolError;
use crate::flow_limit::MAX_UNANSWERED_BYTES;
use crate::frame::{HEADER_BYTES, MAX_BODY};
use crate::reply::{checked_errno, put_errno};
use crate::wire::{Reader, Wire, Writer};
use nigh_remote::SessionParams;
use nigh_types::{
    Attr, CookieKey, Errno, Features, Guarantees, IdKind, IdName, NodeId, RemoteIds, Span, Term,
    UnsupportedGuarantee,
};

/// The oldest version of the protocol that this build speaks.
pub const MIN_VERSION: u16 = 3;
/// The newest version of the protocol that this build speaks.
pub const MAX_VERSION: u16 = 3;

/// How long a session lasts without renewal.
pub const SESSION_TERM: Span = Span::from_secs(15);

/// Feature of a client: it cannot drop all its kernel's dentries at once, so its directory leases are exclusive or
/// marked as shared (docs/decisions/0008-leases.md, rule 9).
pub const EXCLUSIVE_DIR_LEASES: u64 = 1;
/// Feature: the client wants the server's names of users and groups.
pub const ID_NAMES: u64 = 2;
/// Feature of a client: it takes update prepares and commits in place of recalls (docs/decisions/0014-pushes.md).
pub const UPDATES: u64 = 4;
/// Feature: frames may have compressed bodies, in both directions ([`crate::compress`]).
pub const COMPRESSED: u64 = 8;
/// Feature: the term of the hello limits only grants on objects that the server does not watch; others live as long as
/// the session (docs/decisions/0015-host-watch.md).
pub const TRUSTS_WATCH: u64 = 32;
/// Feature: the server prefetches ([`nigh_types::Call::Prefetch`]; docs/decisions/0019-walks-ahead.md).
pub const PREFETCH: u64 = 64;
/// Feature: the server lists names without attributes ([`nigh_types::Call::ListNames`];
/// docs/decisions/0023-names-before-attributes.md).
pub const LIST_NAMES: u64 = 128;
/// Feature: the server prefetches in reversed orders, too ([`nigh_types::PrefetchOrder::REVERSED`]).
pub const REVERSED_PREFETCH: u64 = 256;
/// Features known to a server of this build.
pub(crate) const FEATURES: u64 = EXCLUSIVE_DIR_LEASES
    | ID_NAMES
    | UPDATES
    | COMPRESSED
    | TRUSTS_WATCH
    | PREFETCH
    | LIST_NAMES
    | REVERSED_PREFETCH;

/// Most names of users and groups in a welcome.
pub const MAX_ID_NAMES: u64 = 4_096;
/// Most bytes of such a name.
pub const MAX_ID_NAME_BYTES: u64 = 256;

/// Bytes of the longest frame.
pub(crate) const LONGEST_FRAME: u64 = HEADER_BYTES as u64 + MAX_BODY as u64;

const MAGIC: [u8; 4] = *b"nigh";

/// A client's first message. Its layout is fixed for all versions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    pub min_version: u16,
    pub max_version: u16,
    /// Optional parts of the protocol that the client knows and wants ([`EXCLUSIVE_DIR_LEASES`], [`ID_NAMES`],
    /// [`UPDATES`], [`COMPRESSED`]).
    pub features: u64,
    /// The client's durable identity.
    pub client: u64,
    /// Random, new with each start of the client.
    pub incarnation: u64,
    /// Path or name of the export.
    pub attach: Vec<u8>,
    /// How long the client wants grants to live.
    pub term: Term,
    /// When the client sends the hello, in ns of its own clock: of two connections of one incarnation the server keeps
    /// the one that was made later, whichever hello it receives first.
    pub moment: u64,
    /// The session to resume over this connection.
    pub resume: Option<Resume>,
}

/// A session to resume, and the position in its stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resume {
    /// The server's number for it.
    pub session_id: u64,
    /// Counted frames of the server that the client has received.
    pub received: u64,
}

/// The server's answer that the named session is resumed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resumed {
    /// Counted frames of the client that the server has received.
    pub received: u64,
    /// The client's lease had run out: its earlier grants have ended.
    pub lapsed: bool,
}

/// The server's acceptance of a hello.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Welcome {
    pub version: u16,
    /// Those of the client's features that this server knows too.
    pub features: u64,
    /// The server's number for this session.
    pub session_id: u64,
    /// The session ends unless it is renewed within this time; `Span::FOREVER`: it needs no renewal.
    pub session_term: Span,
    pub limits: Limits,
    pub session: SessionParams,
    /// `None`: the session is new, without open files or locks.
    pub resumed: Option<Resumed>,
}

/// A server's limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of file data in one read or write.
    pub max_data: u32,
    /// Calls outstanding at one time.
    pub max_calls: u32,
    /// Bytes of requests outstanding at one time, which a client observes by queueing. A server tolerates
    /// [`MAX_UNANSWERED_BYTES`]; if its memory is short of that for every session, the session that uses more is ended
    /// first.
    pub max_bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { max_data: 4 << 20, max_calls: 1024, max_bytes: MAX_UNANSWERED_BYTES }
    }
}

/// The server's refusal of a hello.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refused {
    pub errno: Errno,
    /// For people: what happened and how to mend it.
    pub message: String,
}

impl Hello {
    /// The version to speak, or a refusal that says which side to update.
    pub(crate) fn choose_version(&self) -> Result<u16, Refused> {
        let side = if self.max_version < MIN_VERSION {
            "the client"
        } else if self.min_version > MAX_VERSION {
            "the server"
        } else {
            return Ok(self.max_version.min(MAX_VERSION));
        };
        let message = format!(
            "the client speaks versions {} to {} of the nigh protocol, the server {MIN_VERSION} to {MAX_VERSION}: \
             update nigh on {side}'s machine",
            self.min_version, self.max_version
        );
        Err(Refused { errno: Errno::PROTO, message })
    }
}

impl Wire for Hello {
    fn put(&self, w: &mut Writer) {
        w.raw(&MAGIC);
        w.u16(self.min_version);
        w.u16(self.max_version);
        w.u64(self.features);
        w.u64(self.client);
        w.u64(self.incarnation);
        self.attach.put(w);
        self.term.put(w);
        w.u64(self.moment);
        self.resume.is_some().put(w);
        if let Some(Resume { session_id, received }) = self.resume {
            w.u64(session_id);
            w.u64(received);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Hello, ProtocolError> {
        if r.array::<4>() != Ok(MAGIC) {
            return Err(ProtocolError::NotNigh);
        }
        let mut hello = Hello {
            min_version: r.u16()?,
            max_version: r.u16()?,
            features: r.u64()?,
            client: r.u64()?,
            incarnation: r.u64()?,
            attach: Vec::parse(r)?,
            term: Term::parse(r)?,
            moment: 0,
            resume: None,
        };
        // Hellos of versions 1 and 2 end here; the refusal says which side to update.
        if !r.is_empty() {
            hello.moment = r.u64()?;
            let resumes = bool::parse(r)?;
            hello.resume =
                resumes.then(|| Ok(Resume { session_id: r.u64()?, received: r.u64()? })).transpose()?;
        }
        if hello.min_version > hello.max_version {
            return Err(ProtocolError::Malformed("the versions offered end before they begin"));
        }
        Ok(hello)
    }
}

impl Wire for Limits {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            w.u32(self.max_data);
            w.u32(self.max_calls);
            if self.max_bytes != MAX_UNANSWERED_BYTES {
                w.u64(self.max_bytes);
            }
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<Limits, ProtocolError> {
        let r = &mut r.record()?;
        let (max_data, max_calls) = (r.u32()?, r.u32()?);
        let max_bytes = if r.is_empty() { MAX_UNANSWERED_BYTES } else { r.u64()? };
        let limits = Limits { max_data, max_calls, max_bytes };
        if limits.max_data == 0 || limits.max_calls == 0 {
            return Err(ProtocolError::Malformed("a limit is 0"));
        }
        if !(LONGEST_FRAME..=MAX_UNANSWERED_BYTES).contains(&limits.max_bytes) {
            return Err(ProtocolError::Malformed("a limit of bytes below a frame's or above the protocol's"));
        }
        Ok(limits)
    }
}

impl Wire for SessionParams {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            self.root.put(w);
            self.root_attr.put(w);
            w.raw(&self.cookie_key.0);
            self.term.put(w);
            self.supports.acls.put(w);
            self.guarantees.put(w);
            self.ids.put(w);
            // Later features follow, up to the last that is there.
            let Features { privileges, lookup_number, uniform_rights, .. } = self.supports;
            let later = [privileges, lookup_number, uniform_rights];
            let count = later.iter().rposition(|is_there| *is_there).map_or(0, |last| last + 1);
            later[..count].iter().for_each(|is_there| is_there.put(w));
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<SessionParams, ProtocolError> {
        let r = &mut r.record()?;
        let (root, root_attr) = (NodeId::parse(r)?, Attr::parse(r)?);
        let (cookie_key, term) = (CookieKey(r.array()?), Term::parse(r)?);
        let acls = bool::parse(r)?;
        let (guarantees, ids) = (Guarantees::parse(r)?, RemoteIds::parse(r)?);
        let supports = Features {
            acls,
            privileges: !r.is_empty() && bool::parse(r)?,
            lookup_number: !r.is_empty() && bool::parse(r)?,
            uniform_rights: !r.is_empty() && bool::parse(r)?,
            // The welcome's features say the others.
            ..Features::default()
        };
        let session = SessionParams { root, root_attr, cookie_key, term, supports, guarantees, ids };
        if session.ids.names.len() as u64 > MAX_ID_NAMES {
            return Err(ProtocolError::Malformed("more than 4,096 names of users and groups"));
        }
        if !session.root_attr.is_dir() {
            return Err(ProtocolError::Malformed("the export's root is no directory"));
        }
        Ok(session)
    }
}

impl Wire for Guarantees {
    fn put(&self, w: &mut Writer) {
        self.staleness_bound.put(w);
        w.sequence(&self.unsupported, |w, UnsupportedGuarantee { name, why, .. }| {
            name.put(w);
            why.put(w);
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<Guarantees, ProtocolError> {
        let staleness_bound = String::parse(r)?;
        let unsupported = r.sequence(
            8,
            |r| // This protocol can give all guarantees; an export may lack some.
            Ok(UnsupportedGuarantee { name: String::parse(r)?, why: String::parse(r)?, by_protocol: false }),
        )?;
        Ok(Guarantees { unsupported, staleness_bound })
    }
}

impl Wire for RemoteIds {
    fn put(&self, w: &mut Writer) {
        w.u32(self.acts_as.0);
        w.u32(self.acts_as.1);
        w.sequence(&self.names, |w, name| name.put(w));
    }

    fn parse(r: &mut Reader<'_>) -> Result<RemoteIds, ProtocolError> {
        Ok(RemoteIds { acts_as: (r.u32()?, r.u32()?), names: r.sequence(9, IdName::parse)? })
    }
}

impl Wire for IdName {
    fn put(&self, w: &mut Writer) {
        w.u8(match self.kind {
            IdKind::User => 1,
            IdKind::Group => 2,
        });
        w.u32(self.id);
        self.name.put(w);
    }

    fn parse(r: &mut Reader<'_>) -> Result<IdName, ProtocolError> {
        let kind = match r.u8()? {
            1 => IdKind::User,
            2 => IdKind::Group,
            _ => return Err(ProtocolError::Malformed("a name of neither a user nor a group")),
        };
        let (id, name) = (r.u32()?, String::parse(r)?);
        if name.is_empty() || name.len() as u64 > MAX_ID_NAME_BYTES {
            return Err(ProtocolError::Malformed("a user's or group's name is empty or too long"));
        }
        Ok(IdName { kind, id, name })
    }
}

impl Wire for Welcome {
    fn put(&self, w: &mut Writer) {
        w.u16(self.version);
        w.u64(self.features);
        w.u64(self.session_id);
        w.u64(self.session_term.0);
        self.limits.put(w);
        self.session.put(w);
        self.resumed.is_some().put(w);
        if let Some(Resumed { received, lapsed }) = self.resumed {
            w.u64(received);
            lapsed.put(w);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Welcome, ProtocolError> {
        let welcome = Welcome {
            version: r.u16()?,
            features: r.u64()?,
            session_id: r.u64()?,
            session_term: Span(r.u64()?),
            limits: Limits::parse(r)?,
            session: SessionParams::parse(r)?,
            resumed: match bool::parse(r)? {
                true => Some(Resumed { received: r.u64()?, lapsed: bool::parse(r)? }),
                false => None,
            },
        };
        if welcome.session_term < Span::from_millis(100) {
            return Err(ProtocolError::Malformed("the session's term is under 100 ms"));
        }
        Ok(welcome)
    }
}

impl Wire for Refused {
    fn put(&self, w: &mut Writer) {
        put_errno(w, self.errno);
        self.message.put(w);
    }

    fn parse(r: &mut Reader<'_>) -> Result<Refused, ProtocolError> {
        Ok(Refused { errno: checked_errno(r.u16()?)?, message: String::parse(r)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offering(min_version: u16, max_version: u16) -> Hello {
        let term = Term::Session;
        let (features, client, incarnation, attach, moment, resume) = (0, 1, 2, vec![], 0, None);
        Hello { min_version, max_version, features, client, incarnation, attach, term, moment, resume }
    }

    #[test]
    fn a_refusal_says_which_side_to_update() {
        assert_eq!(offering(0, 9).choose_version(), Ok(MAX_VERSION));
        assert!(offering(0, 1).choose_version().unwrap_err().message.ends_with("the client's machine"));
        assert!(offering(4, 9).choose_version().unwrap_err().message.ends_with("the server's machine"));
    }
}
