//! The output of a login shell before the relay starts: `crates/link/src/fuzzing.rs`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| nigh_link::fuzzing::banner(input));
