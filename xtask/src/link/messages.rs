//! Counters of 9P messages to the server, from their headers: size[4] type[1] tag[2].

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Size of a message header.
const HEAD: usize = 7;

/// Counts over all connections.
#[derive(Default)]
pub struct Messages {
    by_type: BTreeMap<u8, u64>,
}

/// The position of a connection in its stream.
#[derive(Default)]
pub struct Cutter {
    head: Vec<u8>,
    /// Remaining bytes of the current message.
    left: u64,
}

impl Messages {
    /// Counts the messages in bytes that passed.
    pub fn passed(&mut self, at: &mut Cutter, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if at.left > 0 {
                let some = usize::try_from(at.left).unwrap_or(usize::MAX).min(bytes.len());
                at.left -= some as u64;
                bytes = &bytes[some..];
                continue;
            }
            let some = (HEAD - at.head.len()).min(bytes.len());
            at.head.extend_from_slice(&bytes[..some]);
            bytes = &bytes[some..];
            if let [a, b, c, d, kind, _, _] = at.head[..] {
                *self.by_type.entry(kind).or_default() += 1;
                at.left = u64::from(u32::from_le_bytes([a, b, c, d])).saturating_sub(HEAD as u64);
                at.head.clear();
            }
        }
    }

    #[must_use]
    pub fn json(&self) -> Value {
        self.by_type.iter().map(|(kind, count)| (name(*kind), json!(count))).collect()
    }
}

/// Returns the name of a message type (`enum p9_msg_t` of Linux).
fn name(kind: u8) -> String {
    let known = match kind {
        8 => "Tstatfs",
        12 => "Tlopen",
        14 => "Tlcreate",
        16 => "Tsymlink",
        18 => "Tmknod",
        20 => "Trename",
        22 => "Treadlink",
        24 => "Tgetattr",
        26 => "Tsetattr",
        30 => "Txattrwalk",
        32 => "Txattrcreate",
        40 => "Treaddir",
        50 => "Tfsync",
        52 => "Tlock",
        54 => "Tgetlock",
        70 => "Tlink",
        72 => "Tmkdir",
        74 => "Trenameat",
        76 => "Tunlinkat",
        100 => "Tversion",
        104 => "Tattach",
        108 => "Tflush",
        110 => "Twalk",
        116 => "Tread",
        118 => "Twrite",
        120 => "Tclunk",
        122 => "Tremove",
        _ => return format!("type {kind}"),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_split_at_any_byte_are_counted_once() {
        let mut stream = Vec::new();
        for (kind, fields) in [(110, 10u32), (24, 0), (110, 300), (120, 4)] {
            stream.extend((7 + fields).to_le_bytes());
            stream.push(kind);
            stream.extend(vec![110; fields as usize + 2]);
        }
        for piece in [1, 2, 6, 7, 8, 100, 1000] {
            let (mut messages, mut at) = (Messages::default(), Cutter::default());
            stream.chunks(piece).for_each(|bytes| messages.passed(&mut at, bytes));
            assert_eq!(messages.json(), json!({ "Twalk": 2, "Tgetattr": 1, "Tclunk": 1 }), "by {piece}");
        }
    }
}
