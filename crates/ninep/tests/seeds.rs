//! Replays the fuzzing seeds (`fuzz/corpus-hex`) with the checks of the fuzzers, and checks that the seeds reach the
//! code that is to be fuzzed.
//!
//! `NIGH_REWRITE_GOLDEN=1` regenerates them.

#[path = "../../../fuzz/src/ninep/mod.rs"]
mod ninep;

use nigh_ninep::{Attributes, Data, Qid, Rmessage, ShortSequence, Tmessage, VERSION};
use ninep::Reached;
use std::path::{Path, PathBuf};

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus-hex").join(target)
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn entries() -> Data {
    let mut bytes = vec![0x80, 1, 0, 0, 0];
    bytes.extend(9u64.to_le_bytes());
    bytes.extend(77u64.to_le_bytes());
    bytes.extend([4, 3, 0, b'd', b'i', b'r']);
    Data(bytes)
}

fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let answers = [
        Rmessage::Version { msize: 65_536, version: VERSION.to_vec() },
        Rmessage::Attach { qid: Qid { bits: 0x80, version: 1, path: 1 } },
        Rmessage::Getattr { attributes: Box::new(Attributes { mode: 0o040_755, ..Attributes::default() }) },
        Rmessage::Walk { qids: ShortSequence(vec![Qid::default(); 3]) },
        Rmessage::Readdir { entries: entries() },
        Rmessage::Lerror { errno: 2 },
    ];
    let requests = [
        Tmessage::Walk { fid: 1, new: 2, names: ShortSequence(vec![b"a".to_vec(), b"bc".to_vec()]) },
        Tmessage::Write { fid: 3, offset: 9, data: Data(vec![7; 40]) },
        Tmessage::Clunk { fid: 3 },
    ];
    let stream = |cut: u8, messages: Vec<Vec<u8>>| [vec![cut], messages.concat()].concat();
    let answers = answers.iter().map(|message| message.encode(1)).collect();
    let requests = requests.iter().map(|message| message.encode(1)).collect();
    // Attached; then a call of each kind, each of them answered.
    let each: Vec<u8> = (0..24).flat_map(|kind| [6, kind, 0, 5, 6, kind, 0x41, 5]).collect();
    vec![
        ("ninep_codec", "answers", stream(7, answers)),
        ("ninep_codec", "requests", stream(255, requests)),
        ("ninep_codec", "too-long", stream(1, vec![vec![255; 8]])),
        ("ninep_session", "each-call", [vec![5], each.clone()].concat()),
        ("ninep_session", "cut", [vec![5, 6, 9, 0, 6, 0, 1, 15, 5], each].concat()),
        ("ninep_session", "changed", vec![5, 6, 0, 1, 10, 4, 99, 6, 2, 0, 5]),
        ("ninep_session", "errors", vec![5, 6, 8, 0, 11, 5, 6, 2, 0, 11, 116, 13, 2, 14, 90, 5]),
    ]
}

/// The seeds of a target together reach all of this.
fn come_to(target: &str, act: fn(&[u8]) -> Reached, all: &[&str]) {
    let mut reached = Reached::new();
    for file in std::fs::read_dir(folder(target)).unwrap() {
        let path = file.unwrap().path();
        println!("{}", path.display());
        reached.extend(act(&bytes(&std::fs::read_to_string(path).unwrap())));
    }
    let missing: Vec<_> = all.iter().filter(|place| !reached.contains(*place)).collect();
    assert!(missing.is_empty(), "no seed of {target} comes to {missing:?}, only to {reached:?}");
}

#[test]
fn ninep_seeds_match_their_source() {
    for (target, name, seed) in seeds() {
        let path = folder(target).join(format!("{name}.hex"));
        let hex: String = seed.iter().map(|byte| format!("{byte:02x}")).collect();
        if std::env::var_os("NIGH_REWRITE_GOLDEN").is_some() {
            std::fs::write(&path, &hex).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap_or_default().trim(), hex, "{}", path.display());
    }
}

#[test]
fn ninep_codec_seeds_reach_all_message_kinds() {
    come_to("ninep_codec", ninep::codec, &["an answer", "a request", "entries", "refused"]);
}

#[test]
fn ninep_session_survives_any_server() {
    come_to("ninep_session", ninep::session, &["attached", "done", "failed", "restored", "lost"]);
}
