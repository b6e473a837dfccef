//! Fields of messages: little-endian numbers, strings with two bytes of length, data with four (intro(5) of Plan 9).

use crate::ProtocolError;

/// A type with one layout on the wire.
pub(crate) trait Wire: Sized {
    fn put(&self, to: &mut Vec<u8>);
    fn parse(from: &mut Reader<'_>) -> Result<Self, ProtocolError>;
}

/// Takes fields off a message. No length or count causes an allocation larger than the bytes present justify.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(rest: &'a [u8]) -> Reader<'a> {
        Reader { rest }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        let ends = ProtocolError::Malformed("it ends too early");
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(ends)?;
        self.rest = rest;
        Ok(*head)
    }

    pub fn raw(&mut self, length: u32) -> Result<&'a [u8], ProtocolError> {
        let short = ProtocolError::Malformed("a length points behind the end");
        let length = usize::try_from(length).map_err(|_| short)?;
        let (head, rest) = self.rest.split_at_checked(length).ok_or(short)?;
        self.rest = rest;
        Ok(head)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => { $(
        impl Wire for $number {
            fn put(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }

            fn parse(from: &mut Reader<'_>) -> Result<$number, ProtocolError> {
                from.array().map(<$number>::from_le_bytes)
            }
        }
    )* };
}

numbers!(u8, u16, u32, u64);

/// A string: a name, a path, a user's name. It may hold any bytes; names are checked where they are used.
pub(crate) type Text = Vec<u8>;

impl Wire for Text {
    /// Callers make sure that it is no longer than the protocol allows.
    fn put(&self, to: &mut Vec<u8>) {
        u16::try_from(self.len()).expect("a string of ours is shorter than 64 KiB").put(to);
        to.extend_from_slice(self);
    }

    fn parse(from: &mut Reader<'_>) -> Result<Text, ProtocolError> {
        let length = u16::parse(from)?;
        from.raw(u32::from(length)).map(<[u8]>::to_vec)
    }
}

/// File contents and other data, with four bytes of length.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Data(pub Vec<u8>);

impl Wire for Data {
    fn put(&self, to: &mut Vec<u8>) {
        u32::try_from(self.0.len()).expect("a message of ours is shorter than 4 GiB").put(to);
        to.extend_from_slice(&self.0);
    }

    fn parse(from: &mut Reader<'_>) -> Result<Data, ProtocolError> {
        let length = u32::parse(from)?;
        from.raw(length).map(|bytes| Data(bytes.to_vec()))
    }
}

/// A sequence with a two-byte count, no longer than a walk may be.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ShortSequence<T>(pub Vec<T>);

impl<T: Wire> Wire for ShortSequence<T> {
    fn put(&self, to: &mut Vec<u8>) {
        u16::try_from(self.0.len()).expect("a walk of ours has few names").put(to);
        self.0.iter().for_each(|one| one.put(to));
    }

    fn parse(from: &mut Reader<'_>) -> Result<ShortSequence<T>, ProtocolError> {
        let count = u16::parse(from)?;
        if usize::from(count) > crate::MOST_NAMES {
            return Err(ProtocolError::Malformed("a walk has more than 16 names"));
        }
        (0..count).map(|_| T::parse(from)).collect::<Result<_, _>>().map(ShortSequence)
    }
}
