//! Both ends of a session over pipes that delay and cut: `fuzz/src/native/pipe.rs`.

#![no_main]

#[path = "../src/native/mod.rs"]
mod native;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| drop(native::pipe(input)));
