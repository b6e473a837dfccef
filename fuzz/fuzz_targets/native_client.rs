//! A client session with arbitrary input at any time: `fuzz/src/native/client.rs`.

#![no_main]

#[path = "../src/native/mod.rs"]
mod native;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| drop(native::client(input)));
