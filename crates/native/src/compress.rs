//! Compression of frame bodies, if both ends agreed on it. Layout: docs/protocol.md, "Packed bodies".

use crate::ProtocolError;
use crate::frame::{self, COMPRESSED_BODY, Frame, FrameType, HEADER_BYTES};
use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};

/// The shortest body that is compressed.
const MIN_COMPRESSED_BYTES: usize = 512;
/// The most bytes that a byte of an LZ4 block can stand for.
const MAX_RATIO: usize = 255;

/// Compresses a frame's body (LZ4, block format). `None`: it saves too little, or frames of this type are not
/// compressed.
///
/// Call it when a frame is written to a connection, not before: the next connection may have another agreement.
#[must_use]
pub fn compress(whole: &[u8]) -> Option<Vec<u8>> {
    let (head, body) = whole.split_at_checked(HEADER_BYTES as usize)?;
    let (frame_type, flags) = (FrameType::of(head[4])?, head[5]);
    if body.len() < MIN_COMPRESSED_BYTES || flags & COMPRESSED_BODY != 0 || !frame_type.is_counted() {
        return None;
    }
    let mut packed = frame::start(4 + get_maximum_output_size(body.len()));
    packed.extend_from_slice(&crate::wire::length(body.len()).to_le_bytes());
    let begin = packed.len();
    packed.resize(begin + get_maximum_output_size(body.len()), 0);
    let length = compress_into(body, &mut packed[begin..]).ok()?;
    packed.truncate(begin + length);
    if packed.len() > whole.len() - whole.len() / 8 {
        return None;
    }
    let id = u64::from_le_bytes(head[8..16].try_into().ok()?);
    frame::seal(&mut packed, frame_type, flags | COMPRESSED_BODY, id);
    Some(packed)
}

/// Decompresses a frame's body into `space`, which is empty.
pub(crate) fn decompress<'a>(
    packed: Frame<'a>,
    limit: u32,
    space: &'a mut Vec<u8>,
) -> Result<Frame<'a>, ProtocolError> {
    let (length, block) =
        packed.body.split_first_chunk().ok_or(ProtocolError::Malformed("ends too early"))?;
    let length = u32::from_le_bytes(*length);
    if length > limit {
        return Err(ProtocolError::FrameTooLong { length, limit });
    }
    let wrong = ProtocolError::Malformed("a packed body is not what it says");
    let length = usize::try_from(length).map_err(|_| wrong)?;
    // Memory grows with the bytes that arrive.
    if length / MAX_RATIO > block.len() {
        return Err(wrong);
    }
    space.resize(length, 0);
    if decompress_into(block, space).ok() != Some(length) {
        return Err(wrong);
    }
    Ok(Frame { flags: packed.flags & !COMPRESSED_BODY, body: space, ..packed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FrameReader, MAX_BODY, Message};
    use nigh_types::{CallId, Reply, Response};

    fn data(bytes: Vec<u8>) -> Vec<u8> {
        Message::Response(CallId(7), Response::plain(Ok(Reply::Data(bytes)))).encode()
    }

    fn read(limit: u32, agreed: bool, mut bytes: &[u8]) -> Result<Option<Message>, ProtocolError> {
        let mut reader = FrameReader::new(limit);
        reader.allow_compressed(agreed);
        let frame = reader.next(&mut bytes)?;
        frame.map(|frame| Message::decode(&frame)).transpose()
    }

    #[test]
    fn compressed_frame_decodes_alike_for_any_stream_split() {
        let plain = data(b"every file and directory ".repeat(400));
        let packed = compress(&plain).unwrap();
        assert!(packed.len() < plain.len() / 10 && compress(&packed).is_none());
        let message = Message::decode(&FrameReader::new(MAX_BODY).next(&mut &plain[..]).unwrap().unwrap());
        assert_eq!(read(MAX_BODY, true, &packed), message.clone().map(Some));
        let stream = [&packed[..], &plain, &packed].concat();
        for at in 0..stream.len() {
            let mut reader = FrameReader::new(MAX_BODY);
            reader.allow_compressed(true);
            let mut messages = Vec::new();
            for mut chunk in [&stream[..at], &stream[at..]] {
                while let Some(frame) = reader.next(&mut chunk).unwrap() {
                    messages.push(Message::decode(&frame));
                }
            }
            assert_eq!(messages, [message.clone(), message.clone(), message.clone()], "cut at {at}");
        }
    }

    #[test]
    fn incompressible_or_uncounted_frame_is_not_compressed() {
        let mut random = 1_u64;
        let mut noise = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            random.to_le_bytes()[7]
        };
        assert!(compress(&data((0..10_000).map(|_| noise()).collect())).is_none());
        assert!(compress(&data(vec![0; 100])).is_none());
        assert!(compress(&Message::Bye(" ".repeat(5_000)).encode()).is_none());
    }

    #[test]
    fn compressed_frame_not_agreed_on_or_with_false_length_is_refused() {
        let packed = compress(&data(vec![0; 10_000])).unwrap();
        assert!(matches!(read(MAX_BODY, false, &packed), Err(ProtocolError::Malformed(_))));
        assert!(matches!(read(9_000, true, &packed), Err(ProtocolError::FrameTooLong { .. })));
        let at = HEADER_BYTES as usize;
        for (length, right) in [(10_000_u32, false), (0, false), (4 << 20, false), (u32::MAX, false)] {
            let mut lying = packed.clone();
            lying[at..at + 4].copy_from_slice(&length.to_le_bytes());
            assert_eq!(read(MAX_BODY, true, &lying).is_ok(), right, "{length}");
        }
        let mut short = packed[..at + 3].to_vec();
        short[0..4].copy_from_slice(&3_u32.to_le_bytes());
        assert!(matches!(read(MAX_BODY, true, &short), Err(ProtocolError::Malformed(_))));
    }
}
