//! Arbitrary bytes as a FUSE request: no panic, no read beyond the bytes, and encoding and decoding preserves a
//! decoded request.
//!
//! Input: the negotiated minor version (1 byte), the negotiated flags (8 bytes), then the request. Every second input
//! gets the correct length in its header; otherwise no input would get past that check.

#![no_main]

use libfuzzer_sys::fuzz_target;
use nigh_fuse::{Negotiated, Operation, decode, encode};

fuzz_target!(|input: &[u8]| {
    let Some((&[minor, ref flags @ ..], request)) = input.split_first_chunk::<9>() else { return };
    let agreed = Negotiated {
        minor: 31 + u32::from(minor >> 1) % 15,
        flags: u64::from_le_bytes(flags[..8].try_into().unwrap()),
        ..Negotiated::default()
    };
    let mut request = request.to_vec();
    if minor & 1 == 0 && request.len() >= 4 {
        let len = u32::try_from(request.len()).unwrap();
        request[..4].copy_from_slice(&len.to_ne_bytes());
    }
    let Ok((header, operation)) = decode(&request, &agreed) else { return };
    if let Operation::BatchForget(forgets) = operation {
        assert!(forgets.iter().count() <= request.len() / 16);
    }
    let groups = operation.extensions().groups().count();
    let labels = operation.extensions().security_contexts().count();
    assert!(groups <= request.len() / 4 && labels <= request.len() / 8);
    let again = encode(&header, &operation, &agreed);
    assert_eq!(decode(&again, &agreed), Ok((header, operation)));
});
