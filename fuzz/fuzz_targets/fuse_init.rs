//! Arbitrary FUSE_INIT requests: each negotiated flag was offered, wanted, and known to the negotiated version.
//!
//! Input: the kernel's offer (64 bytes), wanted flags (8), newest minor (4), largest write (4).

#![no_main]

use libfuzzer_sys::fuzz_target;
use nigh_fuse::abi::{InitIn, InitOut};
use nigh_fuse::{Wanted, negotiate};
use zerocopy::FromBytes;

fuzz_target!(|input: &[u8]| {
    let Ok((kernel, rest)) = InitIn::read_from_prefix(input) else { return };
    let Ok((flags, rest)) = u64::read_from_prefix(rest) else { return };
    let Ok(([max_minor, max_write], _)) = <[u32; 2]>::read_from_prefix(rest) else { return };
    let wanted = Wanted { flags, max_minor, max_write, ..Wanted::default() };
    let Ok((agreed, reply)) = negotiate(1, &kernel, &wanted) else {
        assert!(kernel.major != 7 || kernel.minor < 31);
        return;
    };
    let offered = u64::from(kernel.flags) | u64::from(kernel.flags2) << 32;
    assert_eq!(agreed.flags & !(offered & flags & wanted.flags_for(agreed.minor)), 0);
    assert!((31..=45).contains(&agreed.minor) && agreed.minor <= kernel.minor);
    assert!(agreed.max_write >= 4096 && agreed.max_write <= u32::from(agreed.max_pages) * 4096);
    assert!(agreed.buffer_len() > usize::try_from(agreed.max_write).unwrap() + 80);
    let out = InitOut::read_from_bytes(&reply.to_vec()[16..]).unwrap();
    assert_eq!(u64::from(out.flags) | u64::from(out.flags2) << 32, agreed.flags);
    assert_eq!((out.minor, out.max_write), (agreed.minor, agreed.max_write));
});
