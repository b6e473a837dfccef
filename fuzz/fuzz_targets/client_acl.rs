//! Arbitrary server xattrs as ACLs: only ids of named users and groups change, and mapping them back restores the
//! original.

#![no_main]

#[path = "../../crates/client/src/idmap/acl.rs"]
mod acl;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| acl::any(input));
