//! Arbitrary bytes as messages of 9P2000.L: `fuzz/src/ninep`.

#![no_main]

#[path = "../src/ninep/mod.rs"]
mod ninep;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| drop(ninep::codec(input)));
