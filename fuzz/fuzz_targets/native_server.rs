//! A server connection with arbitrary input at any time: `fuzz/src/native/server.rs`.

#![no_main]

#[path = "../src/native/mod.rs"]
mod native;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| drop(native::server(input)));
