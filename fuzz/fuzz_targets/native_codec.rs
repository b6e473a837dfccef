//! Arbitrary bytes as a stream of frames: `fuzz/src/native/codec.rs`.

#![no_main]

#[path = "../src/native/mod.rs"]
mod native;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| drop(native::codec(input)));
