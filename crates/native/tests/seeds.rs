//! Replays the fuzzing seeds (`fuzz/corpus-hex`) with the checks of the fuzzers, and checks that the seeds reach the
//! code that is to be fuzzed.
//!
//! `NIGH_REWRITE_GOLDEN=1` regenerates the seeds that consist of messages.

#[path = "../../../fuzz/src/native/mod.rs"]
mod native;

use native::{Reached, samples};
use nigh_native::{Message, encode_response};
use nigh_types::{CallId, Reply, Response};
use std::collections::BTreeSet;
use std::mem::discriminant;
use std::path::{Path, PathBuf};

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus-hex").join(target)
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn replay<T>(target: &str, act: fn(&[u8]) -> T) -> Vec<T> {
    let mut reached = Vec::new();
    for file in std::fs::read_dir(folder(target)).unwrap() {
        let path = file.unwrap().path();
        println!("{}", path.display());
        let text = std::fs::read_to_string(path).unwrap();
        reached.push(act(&bytes(&text)));
    }
    reached
}

/// All seeds together reach all of this, and one of them reaches all of `together`.
fn come_to(target: &str, act: fn(&[u8]) -> Reached, all: &[&str], together: &[&str]) {
    let reached = replay(target, act);
    let whole: Reached = reached.iter().flatten().copied().collect();
    let missing: Vec<_> = all.iter().filter(|place| !whole.contains(*place)).collect();
    assert!(missing.is_empty(), "no seed of {target} comes to {missing:?}, only to {whole:?}");
    let one = reached.iter().any(|seed| together.iter().all(|place| seed.contains(place)));
    assert!(one, "no seed of {target} comes to all of {together:?}: {reached:?}");
}

/// Seeds that consist of messages: a change of the samples changes them.
fn of_messages() -> Vec<(PathBuf, Vec<u8>)> {
    let mut seeds = Vec::new();
    let data = Response::plain(Ok(Reply::Data(b"every file and directory ".repeat(40))));
    let (_, packed) = include_str!("../golden/packed.hex").split_once('\n').unwrap();
    let packed = bytes(packed);
    for (group, messages) in samples::all() {
        let stream: Vec<u8> = messages.iter().flat_map(|(_, message)| message.encode()).collect();
        seeds.push((folder("native_codec").join(group), [vec![7], stream].concat()));
    }
    seeds.push((folder("native_codec").join("packed"), [vec![31], packed.clone(), packed.clone()].concat()));
    // Step 0 of both sessions: so many bytes are received.
    let heard = |bytes: &[u8]| [&[0], &u16::try_from(bytes.len()).unwrap().to_le_bytes()[..], bytes].concat();
    let from = |groups: &[&str]| -> Vec<Vec<u8>> {
        let all = samples::all();
        let named = |group: &&str| all.iter().find(|(name, _)| name == group).unwrap();
        groups.iter().flat_map(|group| &named(group).1).map(|(_, message)| message.encode()).collect()
    };
    let first = |group: &str| heard(&from(&[group])[0]);
    for (name, groups) in
        [("recalls", &["recall", "received"][..]), ("pings", &["ping"]), ("hold", &["hold"])]
    {
        let script = from(groups).iter().flat_map(|frame| heard(frame)).collect();
        let seed = [first("welcome"), script].concat();
        seeds.push((folder("native_client").join(format!("real-welcome-then-{name}")), seed));
    }
    let call = [6, 9];
    let answer = heard(&encode_response(CallId(1), &data));
    let seed = [first("welcome"), call.to_vec(), answer].concat();
    seeds.push((folder("native_client").join("real-welcome-call-answer"), seed));
    // Each gets its reply, as they all have one id.
    let answered = |frame: &Vec<u8>| [heard(frame), vec![10, 0]].concat();
    let script: Vec<u8> = from(&["request"]).iter().flat_map(answered).collect();
    let seed = [first("hello"), vec![9], script].concat();
    seeds.push((folder("native_server").join("real-hello-then-requests"), seed));
    for group in ["return", "reclaimed", "commit", "cancel", "pong"] {
        let script = heard(&from(&[group])[0]);
        let seed = [first("hello"), vec![9], script].concat();
        seeds.push((folder("native_server").join(format!("real-hello-then-{group}")), seed));
    }
    seeds
}

#[test]
fn message_seeds_match_current_protocol_version() {
    for (path, bytes) in of_messages() {
        let path = path.with_extension("hex");
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        if std::env::var_os("NIGH_REWRITE_GOLDEN").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == text, "{} is of another version", path.display());
    }
}

#[test]
fn fuzz_frame_stream_decodes_alike_for_any_split() {
    let understood: Vec<Message> = replay("native_codec", native::codec).concat();
    for (group, messages) in samples::all() {
        for (name, message) in messages {
            assert!(understood.contains(&message), "no seed says {group} {name}");
        }
    }
    let kinds: BTreeSet<String> = understood.iter().map(|m| format!("{:?}", discriminant(m))).collect();
    assert_eq!(kinds.len(), 17, "each kind of message");
}

#[test]
fn fuzz_client_given_any_input_completes_each_call_once() {
    let all = [
        "attached",
        "answered",
        "resumed",
        "restored",
        "forgotten",
        "recalled",
        "lapsed",
        "packed",
        "called again",
    ];
    come_to("native_client", native::client, &all, &["attached", "answered", "resumed", "recalled"]);
}

#[test]
fn fuzz_server_given_any_input_emits_only_valid_events() {
    let all = ["attached", "answered", "resumed", "cancelled", "acknowledged", "called again", "packed"];
    come_to("native_server", native::server, &all, &["attached", "answered", "resumed", "acknowledged"]);
}

#[test]
fn fuzz_client_and_server_agree_over_any_slow_pipe() {
    let all = ["attached", "answered", "resumed", "forgotten", "recalled", "lapsed", "called again"];
    come_to("native_pipe", native::pipe, &all, &["attached", "answered", "resumed", "recalled"]);
}

#[test]
fn fuzz_locks_conflict_correctly_and_waits_end_once() {
    let all = ["granted", "waits", "refused", "waited and granted"];
    come_to("native_locks", native::locks, &all, &["granted"]);
}
