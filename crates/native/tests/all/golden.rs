//! The bytes of every message, as they were when their version was made.
//!
//! `NIGH_REWRITE_GOLDEN=1` writes the files anew; a change of an existing line needs a new version of
//! the protocol.

use crate::common::{decode, samples};
use nigh_native::{FrameReader, MAX_BODY, Message, compress, encode_response};
use nigh_types::{CallId, Reply, Response};
use std::fmt::Write as _;
use std::path::PathBuf;

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for line in bytes.chunks(32) {
        for byte in line {
            write!(text, "{byte:02x}").unwrap();
        }
        text.push('\n');
    }
    text
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(pair).collect()
}

#[test]
fn message_bytes_match_golden_files() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden");
    for (group, messages) in samples::all() {
        let path = folder.join(format!("{group}.hex"));
        let text: String = messages
            .iter()
            .map(|(name, message)| format!("# {group} {name}\n{}", hex(&message.encode())))
            .collect();
        if std::env::var_os("NIGH_REWRITE_GOLDEN").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap();
        assert!(golden == text, "{group} is not what {} says:\n{text}", path.display());
        let parts = golden.split("# ").skip(1);
        for (part, (name, message)) in parts.zip(&messages) {
            let (_, digits) = part.split_once('\n').unwrap();
            assert_eq!(decode(&bytes(digits)), Ok(Some(message.clone())), "{group} {name}");
        }
    }
}

/// Compressed bodies must be readable for ever, but a later compressor need not produce these bytes: an existing file
/// is only read.
#[test]
fn golden_compressed_frame_still_decodes() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden/packed.hex");
    let response = Response::plain(Ok(Reply::Data(b"every file and directory ".repeat(40))));
    if std::env::var_os("NIGH_REWRITE_GOLDEN").is_some() && !path.exists() {
        let packed = compress(&encode_response(CallId(5), &response)).unwrap();
        std::fs::write(&path, format!("# packed response\n{}", hex(&packed))).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    let bytes = bytes(golden.split_once('\n').unwrap().1);
    assert!(bytes.len() < 200 && bytes[5] & 8 != 0, "its body is packed");
    let mut reader = FrameReader::new(MAX_BODY);
    reader.allow_compressed(true);
    let frame = reader.next(&mut &bytes[..]).unwrap().unwrap();
    assert_eq!(Message::decode(&frame), Ok(Message::Response(CallId(5), response)));
}
