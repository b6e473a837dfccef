//! Checks of the native protocol with arbitrary bytes. The fuzz targets run them, and so do the tests of
//! `crates/native` on the stored seeds.

#![allow(dead_code, unused_imports, reason = "each target uses a part of this module")]

#[path = "../../../crates/native/tests/common/samples.rs"]
pub mod samples;

mod client;
mod codec;
mod locks;
mod pipe;
mod script;
mod server;
mod stream;

pub use client::client;
pub use codec::codec;
pub use locks::locks;
pub use pipe::pipe;
pub use server::server;

use nigh_native::{FrameReader, MAX_BODY, Message, Welcome};
use nigh_types::{Call, Reply, Time};
use std::collections::BTreeSet;
use std::sync::LazyLock;

/// The events that a script reached, from those that its target names; the stored seeds must reach all of them.
pub type Reached = BTreeSet<&'static str>;

/// The time at which every script begins.
const T0: Time = Time(1_000_000_000);

/// Calls of every kind.
static CALLS: LazyLock<Vec<Call>> = LazyLock::new(samples::calls);
/// Replies of every kind.
static REPLIES: LazyLock<Vec<Reply>> = LazyLock::new(samples::replies);
static WELCOME: LazyLock<Welcome> = LazyLock::new(samples::welcome);
/// Messages of every kind.
static MESSAGES: LazyLock<Vec<Message>> = LazyLock::new(|| {
    samples::all().into_iter().flat_map(|(_, messages)| messages).map(|(_, message)| message).collect()
});

/// Decodes the output of one end of the protocol, which is always complete and valid.
fn said(bytes: &[u8]) -> Vec<Message> {
    let (mut reader, mut input) = (FrameReader::new(MAX_BODY), bytes);
    let mut messages = Vec::new();
    while let Some(frame) = reader.next(&mut input).expect("frames of ours are right") {
        messages.push(Message::decode(&frame).expect("messages of ours are right"));
    }
    assert!(input.is_empty(), "frames of ours are whole");
    messages
}
