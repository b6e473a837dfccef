//! Messages on a stream: size[4], type[1], tag[2], fields; the size counts itself.

use crate::ProtocolError;

pub const HEADER_BYTES: u32 = 7;

/// One message with undecoded fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    pub code: u8,
    pub tag: u16,
    pub body: Vec<u8>,
}

/// Splits a stream into messages.
#[derive(Clone, Debug)]
pub struct FrameReader {
    buffer: Vec<u8>,
    /// The number of consumed bytes in `buffer`.
    taken: usize,
    msize: u32,
}

impl FrameReader {
    /// `msize`: the longest message that may come.
    #[must_use]
    pub fn new(msize: u32) -> FrameReader {
        FrameReader { buffer: Vec::new(), taken: 0, msize }
    }

    /// Changes the longest message, after both sides have agreed on another one.
    pub fn agree(&mut self, msize: u32) {
        self.msize = msize;
    }

    /// Takes bytes that arrived.
    pub fn take(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next message that has fully arrived.
    ///
    /// # Errors
    /// Its announced size is longer than the limit, or shorter than its header.
    pub fn poll_frame(&mut self) -> Result<Option<Frame>, ProtocolError> {
        let rest = &self.buffer[self.taken..];
        let Some((size, _)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*size);
        if length < HEADER_BYTES {
            return Err(ProtocolError::TooShort(length));
        }
        if length > self.msize {
            return Err(ProtocolError::TooLong { length, limit: self.msize });
        }
        let Some(message) = usize::try_from(length).ok().and_then(|length| rest.get(..length)) else {
            return Ok(None);
        };
        let frame = Frame {
            code: message[4],
            tag: u16::from_le_bytes([message[5], message[6]]),
            body: message[7..].to_vec(),
        };
        self.taken += message.len();
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rmessage;

    #[test]
    fn ninep_messages_are_reassembled_from_any_pieces() {
        let stream: Vec<u8> = (0..20)
            .flat_map(|tag| Rmessage::Readlink { target: vec![b'x'; usize::from(tag)] }.encode(tag))
            .collect();
        for piece in 1..30 {
            let mut reader = FrameReader::new(100);
            let mut tags = Vec::new();
            for bytes in stream.chunks(piece) {
                reader.take(bytes);
                while let Some(frame) = reader.poll_frame().unwrap() {
                    tags.push(frame.tag);
                }
            }
            assert_eq!(tags, (0..20).collect::<Vec<u16>>(), "in pieces of {piece}");
        }
    }

    #[test]
    fn ninep_impossible_message_size_is_refused_before_buffering() {
        let mut reader = FrameReader::new(100);
        reader.take(&[6, 0, 0, 0]);
        assert_eq!(reader.poll_frame(), Err(ProtocolError::TooShort(6)));
        let mut reader = FrameReader::new(100);
        reader.take(&[101, 0, 0, 0]);
        assert_eq!(reader.poll_frame(), Err(ProtocolError::TooLong { length: 101, limit: 100 }));
        reader.agree(101);
        assert_eq!(reader.poll_frame(), Ok(None));
    }
}
