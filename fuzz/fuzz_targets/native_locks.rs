//! A file lock table with arbitrary requests: `fuzz/src/native/locks.rs`.

#![no_main]

#[path = "../src/native/mod.rs"]
mod native;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| drop(native::locks(input)));
