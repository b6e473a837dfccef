//! Any xattr of a server as an ACL: only ids of named users and groups change, and mapping them back gives what came.

#![no_main]

#[path = "../../crates/client/src/idmap/acl.rs"]
mod acl;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| acl::any(input));
