//! Little-endian fields, length-prefixed byte strings and records.

use crate::ProtocolError;
use nigh_types::{MAX_SHOWN_CHARS, printable};

/// A type with one layout on the wire.
pub(crate) trait Wire: Sized {
    fn put(&self, w: &mut Writer);
    fn parse(r: &mut Reader<'_>) -> Result<Self, ProtocolError>;
}

/// Appends fields to a frame.
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn new(bytes: Vec<u8>) -> Writer {
        Writer { bytes }
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn u8(&mut self, v: u8) {
        self.bytes.push(v);
    }

    pub(crate) fn u16(&mut self, v: u16) {
        self.raw(&v.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, v: u32) {
        self.raw(&v.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, v: u64) {
        self.raw(&v.to_le_bytes());
    }

    /// A byte string: u32 length, bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.u32(length(bytes.len()));
        self.raw(bytes);
    }

    /// A record: u32 length, then fields, to which later versions may append.
    pub(crate) fn record(&mut self, fields: impl FnOnce(&mut Writer)) {
        let at = self.bytes.len();
        self.u32(0);
        fields(self);
        let length = length(self.bytes.len() - at - 4);
        self.bytes[at..at + 4].copy_from_slice(&length.to_le_bytes());
    }

    /// A sequence: u32 count, items.
    pub(crate) fn sequence<T>(&mut self, items: &[T], mut put: impl FnMut(&mut Writer, &T)) {
        self.u32(length(items.len()));
        for item in items {
            put(self, item);
        }
    }
}

/// The length of a message of this side; frames are bounded far below 4 GiB.
pub(crate) fn length(n: usize) -> u32 {
    u32::try_from(n).expect("a message of ours is shorter than 4 GiB")
}

/// Takes fields off a message. No length or count causes an allocation larger than the bytes present justify.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(rest: &'a [u8]) -> Reader<'a> {
        Reader { rest }
    }

    /// Whether no field is left: fields that could follow were added by a later version than the sender's.
    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        let (head, rest) =
            self.rest.split_first_chunk::<N>().ok_or(ProtocolError::Malformed("ends too early"))?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn raw(&mut self, length: u32) -> Result<&'a [u8], ProtocolError> {
        let short = ProtocolError::Malformed("a length points behind the end");
        let length = usize::try_from(length).map_err(|_| short)?;
        let (head, rest) = self.rest.split_at_checked(length).ok_or(short)?;
        self.rest = rest;
        Ok(head)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, ProtocolError> {
        self.array::<1>().map(|[b]| b)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, ProtocolError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, ProtocolError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, ProtocolError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], ProtocolError> {
        let length = self.u32()?;
        self.raw(length)
    }

    /// The fields of a record; fields left over were appended by a later version.
    pub(crate) fn record(&mut self) -> Result<Reader<'a>, ProtocolError> {
        self.bytes().map(Reader::new)
    }

    /// A sequence whose items take at least `least` bytes each.
    pub(crate) fn sequence<T>(
        &mut self,
        least: u32,
        mut take: impl FnMut(&mut Reader<'a>) -> Result<T, ProtocolError>,
    ) -> Result<Vec<T>, ProtocolError> {
        let count = self.u32()?;
        let needed = u64::from(count) * u64::from(least.max(1));
        if needed > self.rest.len() as u64 {
            return Err(ProtocolError::Malformed("a count points behind the end"));
        }
        (0..count).map(|_| take(self)).collect()
    }

    /// A sequence of at most `most` items, which is checked before any is decoded.
    pub(crate) fn bounded<T>(
        &mut self,
        (least, most): (u32, u32),
        take: impl FnMut(&mut Reader<'a>) -> Result<T, ProtocolError>,
    ) -> Result<Vec<T>, ProtocolError> {
        let mut ahead = *self;
        if ahead.u32()? > most {
            return Err(ProtocolError::Malformed("more names, handles, grants or groups than it may have"));
        }
        self.sequence(least, take)
    }
}

impl Wire for bool {
    fn put(&self, w: &mut Writer) {
        w.u8(u8::from(*self));
    }

    fn parse(r: &mut Reader<'_>) -> Result<bool, ProtocolError> {
        match r.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(ProtocolError::Malformed("a flag is neither 0 nor 1")),
        }
    }
}

impl Wire for u32 {
    fn put(&self, w: &mut Writer) {
        w.u32(*self);
    }

    fn parse(r: &mut Reader<'_>) -> Result<u32, ProtocolError> {
        r.u32()
    }
}

impl Wire for u64 {
    fn put(&self, w: &mut Writer) {
        w.u64(*self);
    }

    fn parse(r: &mut Reader<'_>) -> Result<u64, ProtocolError> {
        r.u64()
    }
}

impl Wire for Vec<u8> {
    fn put(&self, w: &mut Writer) {
        w.bytes(self);
    }

    fn parse(r: &mut Reader<'_>) -> Result<Vec<u8>, ProtocolError> {
        r.bytes().map(<[u8]>::to_vec)
    }
}

impl Wire for Box<[u8]> {
    fn put(&self, w: &mut Writer) {
        w.bytes(self);
    }

    fn parse(r: &mut Reader<'_>) -> Result<Box<[u8]>, ProtocolError> {
        r.bytes().map(Box::from)
    }
}

/// Text for people, which may reach a terminal or a log: invalid UTF-8 and unprintable characters are replaced, and
/// long text is cut.
impl Wire for String {
    fn put(&self, w: &mut Writer) {
        w.bytes(self.as_bytes());
    }

    fn parse(r: &mut Reader<'_>) -> Result<String, ProtocolError> {
        // A character has at most 4 bytes.
        let bytes = r.bytes()?;
        let most = bytes.len().min(4 * MAX_SHOWN_CHARS);
        Ok(printable(&String::from_utf8_lossy(&bytes[..most]), MAX_SHOWN_CHARS))
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, w: &mut Writer) {
        self.is_some().put(w);
        if let Some(value) = self {
            value.put(w);
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<Option<T>, ProtocolError> {
        bool::parse(r)?.then(|| T::parse(r)).transpose()
    }
}
