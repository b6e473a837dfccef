//! Arbitrary bytes as a stream of frames.

use nigh_native::{FrameReader, MAX_BODY, Message, ProtocolError};

/// Input: the chunk size (1 byte), then the stream. The decoded messages do not depend on the chunk size, and encoding
/// and decoding preserves them. Returns the decoded messages. Bodies may be compressed.
pub fn codec(input: &[u8]) -> Vec<Message> {
    let Some((&cut, stream)) = input.split_first() else { return vec![] };
    let whole = read(stream, stream.len().max(1));
    assert_eq!(read(stream, usize::from(cut).max(1)), whole, "a cut stream says something else");
    for message in &whole.0 {
        assert_eq!(super::said(&message.encode()), std::slice::from_ref(message));
    }
    whole.0
}

/// Returns the messages up to the first protocol error.
fn read(stream: &[u8], at_a_time: usize) -> (Vec<Message>, Option<ProtocolError>) {
    let mut reader = FrameReader::new(MAX_BODY);
    reader.allow_compressed(true);
    let mut messages = Vec::new();
    for mut piece in stream.chunks(at_a_time) {
        loop {
            let message = match reader.next(&mut piece) {
                Ok(Some(frame)) => Message::decode(&frame),
                Ok(None) => break,
                Err(error) => return (messages, Some(error)),
            };
            match message {
                Ok(message) => messages.push(message),
                Err(error) => return (messages, Some(error)),
            }
        }
    }
    (messages, None)
}
