//! Names-only listings on the wire (docs/decisions/0023-names-before-attributes.md).

use crate::ProtocolError;
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{Cookie, Dirent, Kind, Name};

/// Bytes of an entry beyond its name.
const DIRENT_BYTES: usize = 11;

/// Bytes of an entry in a chunk, as a server counts them to fill one.
#[must_use]
pub fn dirent_bytes(name: &[u8]) -> usize {
    DIRENT_BYTES + name.len()
}

impl Wire for Cookie {
    fn put(&self, w: &mut Writer) {
        w.u64(self.0);
    }

    fn parse(r: &mut Reader<'_>) -> Result<Cookie, ProtocolError> {
        r.u64().map(Cookie)
    }
}

/// Name, u64 inode number, u8 type: bits 12–15 of `st_mode` (as `d_type`), 0 if it is unknown.
impl Wire for Dirent {
    fn put(&self, w: &mut Writer) {
        self.name.put(w);
        w.u64(self.ino);
        w.u8(self.kind.map_or(0, |kind| (kind.mode_bits() >> 12) as u8));
    }

    fn parse(r: &mut Reader<'_>) -> Result<Dirent, ProtocolError> {
        let (name, ino) = (Name::parse(r)?, r.u64()?);
        let kind = match r.u8()? {
            0 => None,
            bits => Some(
                Kind::of_mode(u32::from(bits) << 12)
                    .map_err(|_| ProtocolError::Malformed("unknown file type"))?,
            ),
        };
        Ok(Dirent { name, ino, kind })
    }
}

pub(crate) fn put_dirents(w: &mut Writer, dirents: &[Dirent]) {
    w.sequence(dirents, |w, dirent| dirent.put(w));
}

pub(crate) fn take_dirents(r: &mut Reader<'_>) -> Result<Vec<Dirent>, ProtocolError> {
    r.sequence(12, Dirent::parse)
}
