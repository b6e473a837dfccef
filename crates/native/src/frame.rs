//! Frames: a fixed header, then a body. Layout: docs/protocol.md, "Frames".

use crate::ProtocolError;
use std::sync::Arc;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a frame's header.
pub const HEADER_BYTES: u32 = 16;

/// The longest body that either side takes: file data of [`crate::Limits::max_data`] and what goes
/// with it (a caller can be in 65,536 groups).
pub const MAX_BODY: u32 = (4 << 20) + (512 << 10);

/// Set by the sender: a receiver that does not know the type may skip the frame.
pub(crate) const MAY_IGNORE: u8 = 1;
/// On a response: the last (or only) one to its call.
pub(crate) const LAST: u8 = 2;
/// On a request: it was sent before, in a session that the server has forgotten.
pub(crate) const RESENT: u8 = 4;

/// The body is compressed ([`crate::compress`]).
pub(crate) const COMPRESSED_BODY: u8 = 8;

/// A whole frame, shared by the components that keep and carry it.
pub type FrameBytes = Arc<Vec<u8>>;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    /// Bytes of the body behind this header.
    length: U32,
    frame_type: u8,
    flags: u8,
    reserved: U16,
    /// Of a call, a recall or a ping; else 0.
    id: U64,
}

/// What a frame holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameType {
    Hello = 1,
    Welcome = 2,
    Refused = 3,
    Request = 4,
    Response = 5,
    Cancel = 6,
    Acknowledge = 7,
    Return = 8,
    Recall = 9,
    Ping = 10,
    Pong = 11,
    Bye = 12,
    Received = 13,
    Reclaimed = 14,
    Prepare = 15,
    Commit = 16,
}

impl FrameType {
    pub(crate) fn of(number: u8) -> Option<FrameType> {
        Some(match number {
            1 => FrameType::Hello,
            2 => FrameType::Welcome,
            3 => FrameType::Refused,
            4 => FrameType::Request,
            5 => FrameType::Response,
            6 => FrameType::Cancel,
            7 => FrameType::Acknowledge,
            8 => FrameType::Return,
            9 => FrameType::Recall,
            10 => FrameType::Ping,
            11 => FrameType::Pong,
            12 => FrameType::Bye,
            13 => FrameType::Received,
            14 => FrameType::Reclaimed,
            15 => FrameType::Prepare,
            16 => FrameType::Commit,
            _ => return None,
        })
    }

    /// Whether frames of this type have an effect, so that each must arrive once and in order. They are counted, and
    /// sent again on the next connection if they did not arrive (decisions/0009).
    #[must_use]
    pub fn is_counted(self) -> bool {
        match self {
            FrameType::Request
            | FrameType::Response
            | FrameType::Cancel
            | FrameType::Acknowledge
            | FrameType::Return
            | FrameType::Recall
            | FrameType::Reclaimed
            | FrameType::Prepare
            | FrameType::Commit => true,
            FrameType::Hello
            | FrameType::Welcome
            | FrameType::Refused
            | FrameType::Ping
            | FrameType::Pong
            | FrameType::Bye
            | FrameType::Received => false,
        }
    }

    /// Whether a client may send this type.
    pub(crate) fn is_of_client(self) -> bool {
        match self {
            FrameType::Hello
            | FrameType::Request
            | FrameType::Cancel
            | FrameType::Acknowledge
            | FrameType::Return
            | FrameType::Reclaimed
            | FrameType::Ping
            | FrameType::Pong
            | FrameType::Received
            | FrameType::Bye => true,
            FrameType::Welcome
            | FrameType::Refused
            | FrameType::Response
            | FrameType::Recall
            | FrameType::Prepare
            | FrameType::Commit => false,
        }
    }
}

/// Whether a frame may be sent before others: it shows that its sender is alive, or acknowledges frames. Urgent frames
/// keep their order among themselves, or a count would be smaller than an earlier one.
#[must_use]
pub fn is_urgent(frame: &[u8]) -> bool {
    let Ok((header, _)) = Header::read_from_prefix(frame) else { return false };
    matches!(
        FrameType::of(header.frame_type),
        Some(FrameType::Welcome | FrameType::Ping | FrameType::Pong | FrameType::Received)
    )
}

/// Whether bytes are whole frames of a client that ask for nothing: pings, pongs, and acknowledgements.
pub(crate) fn ask_nothing(mut bytes: &[u8]) -> bool {
    while let Ok((header, _)) = Header::read_from_prefix(bytes) {
        let light = matches!(
            FrameType::of(header.frame_type),
            Some(FrameType::Acknowledge | FrameType::Ping | FrameType::Pong | FrameType::Received)
        );
        let total =
            usize::try_from(header.length.get()).ok().and_then(|n| n.checked_add(HEADER_BYTES as usize));
        match total.and_then(|total| bytes.get(total..)) {
            Some(rest) if light && header.flags & COMPRESSED_BODY == 0 => bytes = rest,
            _ => return false,
        }
    }
    bytes.is_empty()
}

/// One frame, still in the bytes in which it arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame<'a> {
    pub frame_type: FrameType,
    pub flags: u8,
    pub id: u64,
    pub body: &'a [u8],
}

/// Space for a header, to which the body is appended; [`seal`] fills it in.
pub(crate) fn start(body_bytes: usize) -> Vec<u8> {
    let header = HEADER_BYTES as usize;
    let mut frame = Vec::with_capacity(header + body_bytes);
    frame.resize(header, 0);
    frame
}

/// Writes the header of a frame begun by [`start`].
///
/// # Panics
/// If the body is longer than [`MAX_BODY`]: the caller has to bound it.
pub(crate) fn seal(frame: &mut [u8], frame_type: FrameType, flags: u8, id: u64) {
    let (header, body) = frame.split_at_mut(HEADER_BYTES as usize);
    let length = crate::wire::length(body.len());
    assert!(length <= MAX_BODY, "a body of {length} bytes is too long for a frame");
    let fields = Header {
        length: U32::new(length),
        frame_type: frame_type as u8,
        flags,
        reserved: U16::ZERO,
        id: U64::new(id),
    };
    header.copy_from_slice(fields.as_bytes());
}

/// A request's frame, marked as sent before.
pub(crate) fn mark_resent(request: &FrameBytes) -> FrameBytes {
    let mut request = request.to_vec();
    request[5] |= RESENT;
    Arc::new(request)
}

/// Splits a stream of bytes into frames.
///
/// A frame that lies whole in one input is returned in place; one that is spread over several is gathered first. Memory
/// grows with the bytes that arrive, never by an announced length; for compressed bodies by up to 255 times as much,
/// one body at a time.
#[derive(Clone, Debug)]
pub struct FrameReader {
    partial: Vec<u8>,
    /// The frame in `partial` was returned.
    returned: bool,
    limit: u32,
    /// The peers agreed on compressed bodies.
    compressed: bool,
    /// The decompressed body of the returned frame.
    decompressed: Vec<u8>,
}

/// The capacity kept for gathering after a longer frame has gone through.
const KEPT_BYTES: usize = 256 << 10;

impl FrameReader {
    /// A reader that takes bodies of up to `limit` bytes.
    #[must_use]
    pub fn new(limit: u32) -> FrameReader {
        FrameReader {
            partial: Vec::new(),
            returned: false,
            limit,
            compressed: false,
            decompressed: Vec::new(),
        }
    }

    pub fn allow(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// Sets whether bodies may be compressed.
    pub fn allow_compressed(&mut self, packed: bool) {
        self.compressed = packed;
    }

    /// Bytes of a frame that has not fully arrived.
    #[must_use]
    pub fn partial_bytes(&self) -> u64 {
        if self.returned { 0 } else { self.partial.len() as u64 }
    }

    /// Returns the next whole frame, and removes from `input` the bytes that it uses. `None`: more bytes are needed.
    pub fn next<'a, 'i: 'a>(&'a mut self, input: &mut &'i [u8]) -> Result<Option<Frame<'a>>, ProtocolError> {
        self.release_returned();
        while self.partial.is_empty() {
            let Some((header, total)) = self.header(input)? else { break };
            let Some((frame, rest)) = input.split_at_checked(total) else { break };
            *input = rest;
            if let Some(frame_type) = known(&header)? {
                let frame = frame_of(&header, frame_type, frame);
                return open(frame, self.limit, self.compressed, &mut self.decompressed).map(Some);
            }
        }
        self.gather(input)
    }

    /// Releases the memory of the frame that was returned.
    pub(crate) fn release_returned(&mut self) {
        if std::mem::take(&mut self.returned) {
            self.partial.clear();
            self.partial.shrink_to(KEPT_BYTES);
        }
        self.decompressed.clear();
        self.decompressed.shrink_to(KEPT_BYTES);
    }

    fn gather<'a>(&'a mut self, input: &mut &[u8]) -> Result<Option<Frame<'a>>, ProtocolError> {
        loop {
            let Some((header, total)) = self.fill_header(input)? else { return Ok(None) };
            self.fill(input, total);
            if self.partial.len() < total {
                return Ok(None);
            }
            match known(&header)? {
                Some(frame_type) => {
                    self.returned = true;
                    let frame = frame_of(&header, frame_type, &self.partial);
                    return open(frame, self.limit, self.compressed, &mut self.decompressed).map(Some);
                }
                None => self.partial.clear(),
            }
        }
    }

    fn fill_header(&mut self, input: &mut &[u8]) -> Result<Option<(Header, usize)>, ProtocolError> {
        self.fill(input, HEADER_BYTES as usize);
        self.header(&self.partial)
    }

    fn fill(&mut self, input: &mut &[u8], total: usize) {
        let missing = total.saturating_sub(self.partial.len()).min(input.len());
        let (taken, rest) = input.split_at(missing);
        self.partial.extend_from_slice(taken);
        *input = rest;
    }

    /// The header at the start of `bytes`, and how long the frame is with it.
    fn header(&self, bytes: &[u8]) -> Result<Option<(Header, usize)>, ProtocolError> {
        let Ok((header, _)) = Header::read_from_prefix(bytes) else { return Ok(None) };
        let length = header.length.get();
        if length > self.limit {
            return Err(ProtocolError::FrameTooLong { length, limit: self.limit });
        }
        Ok(Some((header, (HEADER_BYTES + length) as usize)))
    }
}

/// Decompresses a frame's body if it is compressed.
fn open<'a>(
    frame: Frame<'a>,
    limit: u32,
    agreed: bool,
    space: &'a mut Vec<u8>,
) -> Result<Frame<'a>, ProtocolError> {
    if frame.flags & COMPRESSED_BODY == 0 {
        return Ok(frame);
    }
    if !agreed {
        return Err(ProtocolError::Malformed("a packed body, which was not negotiated"));
    }
    crate::compress::decompress(frame, limit, space)
}

/// The frame's type; `None` if the frame is to be skipped.
fn known(header: &Header) -> Result<Option<FrameType>, ProtocolError> {
    match FrameType::of(header.frame_type) {
        None if header.flags & MAY_IGNORE == 0 => Err(ProtocolError::UnknownType(header.frame_type)),
        known => Ok(known),
    }
}

fn frame_of<'a>(header: &Header, frame_type: FrameType, bytes: &'a [u8]) -> Frame<'a> {
    Frame { frame_type, flags: header.flags, id: header.id.get(), body: &bytes[HEADER_BYTES as usize..] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(number: u8, flags: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = start(body.len());
        bytes.extend_from_slice(body);
        seal(&mut bytes, FrameType::Ping, flags, 7);
        bytes[4] = number;
        bytes
    }

    fn cut(chunks: &[&[u8]]) -> Result<Vec<(u64, Vec<u8>)>, ProtocolError> {
        let mut reader = FrameReader::new(100);
        let mut frames = Vec::new();
        for chunk in chunks {
            let mut input = *chunk;
            while let Some(frame) = reader.next(&mut input)? {
                frames.push((frame.id, frame.body.to_vec()));
            }
            assert!(input.is_empty());
        }
        Ok(frames)
    }

    #[test]
    fn frames_decode_alike_for_any_stream_split() {
        let stream = [frame(10, 0, b"one"), frame(99, MAY_IGNORE, b"skip"), frame(11, 0, b"")].concat();
        let expected = vec![(7, b"one".to_vec()), (7, Vec::new())];
        for first in 0..=stream.len() {
            for second in first..=stream.len() {
                let chunks = [&stream[..first], &stream[first..second], &stream[second..]];
                assert_eq!(cut(&chunks).unwrap(), expected, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn unknown_frame_is_skipped_only_with_ignore_flag() {
        assert_eq!(cut(&[&frame(99, 0, b"x")]), Err(ProtocolError::UnknownType(99)));
        assert_eq!(cut(&[&frame(99, MAY_IGNORE, b"x")]), Ok(Vec::new()));
    }

    #[test]
    fn overlong_frame_is_refused_by_its_header() {
        let mut bytes = frame(10, 0, b"");
        bytes[..4].copy_from_slice(&101_u32.to_le_bytes());
        assert_eq!(cut(&[&bytes]), Err(ProtocolError::FrameTooLong { length: 101, limit: 100 }));
    }
}
