//! A session with a 9P server that sends anything at any time: `fuzz/src/ninep`.

#![no_main]

#[path = "../src/ninep/mod.rs"]
mod ninep;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| drop(ninep::session(input)));
