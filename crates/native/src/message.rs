//! Messages, encoded to frames and decoded.

use crate::ProtocolError;
use crate::call::payload_bytes;
use crate::frame::{self, Frame, FrameType, LAST, RESENT};
use crate::handshake::{Hello, Refused, Welcome};
use crate::reply::{ENTRY_BYTES, put_response, size_hint, take_response};
use crate::update;
use crate::values::{put_recall, take_recall};
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{
    CallId, Entry, GrantId, Name, Recall, RecallId, Request, Response, UpdateCommit, UpdatePrepare,
};

/// The most grants returned in one message.
pub(crate) const MAX_RETURNED: u32 = 65_536;

/// A message of either side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    Hello(Hello),
    Welcome(Welcome),
    Refused(Refused),
    Request(CallId, Request),
    /// A request sent before, in a session that the server has forgotten.
    Resent(CallId, Request),
    Response(CallId, Response),
    Cancel(CallId),
    Acknowledge(RecallId),
    /// At most 65,536.
    Return(Vec<GrantId>),
    Recall(Recall),
    Hold(UpdatePrepare),
    Commit(UpdateCommit),
    /// Renews the session; the first number comes back in the pong. The second number of both is the count of the
    /// peer's counted frames that the sender has received.
    Ping(u64, u64),
    Pong(u64, u64),
    /// The number of the peer's counted frames that the sender has received.
    Received(u64),
    /// The client's reclaim has ended, in a session that replaced a forgotten one.
    Reclaimed,
    /// The end of the session, with a reason for people.
    Bye(String),
}

impl Message {
    /// Encodes the message as a frame.
    ///
    /// # Panics
    /// If it is longer than [`crate::MAX_BODY`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Message::Hello(hello) => encode(FrameType::Hello, 0, |w| hello.put(w)),
            Message::Welcome(welcome) => encode(FrameType::Welcome, 0, |w| welcome.put(w)),
            Message::Refused(refused) => encode(FrameType::Refused, 0, |w| refused.put(w)),
            Message::Request(call, request) => encode_request(*call, request),
            Message::Resent(call, request) => {
                let mut bytes = encode_request(*call, request);
                bytes[5] |= RESENT;
                bytes
            }
            Message::Response(call, response) => encode_response(*call, response),
            Message::Cancel(call) => encode(FrameType::Cancel, call.0, |_| ()),
            Message::Acknowledge(recall) => encode(FrameType::Acknowledge, recall.0, |_| ()),
            Message::Return(grants) => {
                encode(FrameType::Return, 0, |w| w.sequence(grants, |w, grant| w.u64(grant.0)))
            }
            Message::Recall(recall) => encode(FrameType::Recall, recall.id.0, |w| put_recall(w, recall)),
            Message::Hold(hold) => encode(FrameType::Prepare, hold.id.0, |w| update::put_prepare(w, hold)),
            Message::Commit(commit) => {
                encode(FrameType::Commit, commit.id.0, |w| update::put_commit(w, commit))
            }
            Message::Ping(number, count) => encode(FrameType::Ping, *number, |w| w.u64(*count)),
            Message::Pong(number, count) => encode(FrameType::Pong, *number, |w| w.u64(*count)),
            Message::Received(count) => encode(FrameType::Received, 0, |w| w.u64(*count)),
            Message::Reclaimed => encode(FrameType::Reclaimed, 0, |_| ()),
            Message::Bye(why) => encode(FrameType::Bye, 0, |w| why.put(w)),
        }
    }

    /// Decodes the message in a frame.
    ///
    /// # Errors
    /// The rule that the peer broke.
    pub fn decode(frame: &Frame<'_>) -> Result<Message, ProtocolError> {
        let r = &mut Reader::new(frame.body);
        Ok(match frame.frame_type {
            FrameType::Hello => Message::Hello(Hello::parse(r)?),
            FrameType::Welcome => Message::Welcome(Welcome::parse(r)?),
            FrameType::Refused => Message::Refused(Refused::parse(r)?),
            FrameType::Request if frame.flags & RESENT != 0 => {
                Message::Resent(CallId(frame.id), Request::parse(r)?)
            }
            FrameType::Request => Message::Request(CallId(frame.id), Request::parse(r)?),
            FrameType::Response => {
                Message::Response(CallId(frame.id), take_response(frame.flags & LAST != 0, r)?)
            }
            FrameType::Cancel => Message::Cancel(CallId(frame.id)),
            FrameType::Acknowledge => Message::Acknowledge(RecallId(frame.id)),
            FrameType::Return => Message::Return(r.bounded((8, MAX_RETURNED), |r| r.u64().map(GrantId))?),
            FrameType::Recall => Message::Recall(take_recall(RecallId(frame.id), r)?),
            FrameType::Prepare => Message::Hold(update::take_prepare(RecallId(frame.id), r)?),
            FrameType::Commit => Message::Commit(update::take_commit(RecallId(frame.id), r)?),
            FrameType::Ping => Message::Ping(frame.id, r.u64()?),
            FrameType::Pong => Message::Pong(frame.id, r.u64()?),
            FrameType::Received => Message::Received(r.u64()?),
            FrameType::Reclaimed => Message::Reclaimed,
            FrameType::Bye => Message::Bye(String::parse(r)?),
        })
    }
}

fn encode(frame_type: FrameType, id: u64, put: impl FnOnce(&mut Writer)) -> Vec<u8> {
    encode_sized(frame_type, 0, id, 64, put)
}

fn encode_sized(
    frame_type: FrameType,
    flags: u8,
    id: u64,
    size: usize,
    put: impl FnOnce(&mut Writer),
) -> Vec<u8> {
    let mut w = Writer::new(frame::start(size));
    put(&mut w);
    let mut bytes = w.finish();
    frame::seal(&mut bytes, frame_type, flags, id);
    bytes
}

/// Encodes a request as a frame. File data is copied once.
///
/// # Panics
/// If it is longer than [`crate::MAX_BODY`].
#[must_use]
pub fn encode_request(call: CallId, request: &Request) -> Vec<u8> {
    let size = 256 + payload_bytes(&request.call) + request.credentials.groups.len() * 4;
    encode_sized(FrameType::Request, 0, call.0, size, |w| request.put(w))
}

/// Encodes a response as a frame. File data is copied once.
///
/// # Panics
/// If it is longer than [`crate::MAX_BODY`]: the caller bounds data by [`crate::Limits::max_data`] and chunks of
/// listings by [`listed_bytes`].
#[must_use]
pub fn encode_response(call: CallId, response: &Response) -> Vec<u8> {
    let flags = if response.last { LAST } else { 0 };
    encode_sized(FrameType::Response, flags, call.0, size_hint(response), |w| put_response(w, response))
}

/// The most bytes that an entry takes in a chunk of a listing.
#[must_use]
pub fn listed_bytes(name: &Name, entry: &Entry) -> usize {
    ENTRY_BYTES + name.as_bytes().len() + entry.target.as_ref().map_or(0, |target| target.len())
}
