//! Samples of every message, and a session whose both ends run in memory.
#![allow(dead_code, reason = "each test uses a part")]

pub mod cuts;
pub mod ends;
pub mod pair;
pub mod samples;

use nigh_native::{Frame, FrameReader, MAX_BODY, Message, ProtocolError};

/// The message in the one frame that `bytes` are.
pub fn decode(bytes: &[u8]) -> Result<Option<Message>, ProtocolError> {
    let mut reader = FrameReader::new(MAX_BODY);
    let mut input = bytes;
    let frame: Option<Frame<'_>> = reader.next(&mut input)?;
    frame.map(|frame| Message::decode(&frame)).transpose()
}
