//! Replays the fuzzing seeds (`fuzz/corpus-hex`): requests recorded from a real kernel, and inputs of earlier failures.

use nigh_fuse::abi::InitIn;
use nigh_fuse::{Header, Negotiated, Operation, RequestedFeatures, decode, encode, negotiate, opcode};
use std::collections::BTreeSet;
use std::path::Path;
use zerocopy::FromBytes;

fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus-hex").join(target);
    let mut seeds: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .map(|path| {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            (name, unhex(std::fs::read_to_string(&path).unwrap().trim()))
        })
        .collect();
    seeds.sort();
    assert!(!seeds.is_empty());
    seeds
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes();
    assert_eq!(digits.len() % 2, 0);
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn understand(seed: &[u8]) -> Option<(Header, u32)> {
    let (&[minor, ref flags @ ..], request) = seed.split_first_chunk::<9>()?;
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
    let (header, operation) = decode(&request, &agreed).ok()?;
    let again = encode(&header, &operation, &agreed);
    assert_eq!(decode(&again, &agreed), Ok((header, operation)));
    let unknown = matches!(operation, Operation::Unknown { .. });
    (!unknown).then_some((header, operation.opcode()))
}

#[test]
fn requests_of_a_real_kernel_are_understood() {
    let mut seen = BTreeSet::new();
    for (name, seed) in seeds("fuse_request") {
        let understood = understand(&seed);
        if name.starts_with("kernel-") {
            let (header, opcode) = understood.unwrap_or_else(|| panic!("{name}"));
            assert!(header.unique != 0 && !header.resent, "{name}");
            assert!(name.ends_with(&format!("-{}", nigh_fuse::opcode_name(opcode))), "{name}");
            seen.insert(opcode);
        }
    }
    for wanted in [opcode::LOOKUP, opcode::CREATE, opcode::SETATTR, opcode::SETXATTR, opcode::READDIRPLUS] {
        assert!(seen.contains(&wanted), "{}", nigh_fuse::opcode_name(wanted));
    }
}

#[test]
fn init_requests_of_real_kernels_are_negotiated() {
    for (name, seed) in seeds("fuse_init") {
        let (kernel, rest) = InitIn::read_from_prefix(&seed).unwrap();
        let (flags, rest) = u64::read_from_prefix(rest).unwrap();
        let ([max_minor, max_write], _) = <[u32; 2]>::read_from_prefix(rest).unwrap();
        let wanted = RequestedFeatures { flags, max_minor, max_write, ..RequestedFeatures::default() };
        match negotiate(1, &kernel, &wanted) {
            Ok((agreed, _)) => assert!(agreed.minor <= kernel.minor, "{name}"),
            Err(_) => assert!(kernel.major != 7 || kernel.minor < 31, "{name}"),
        }
    }
}
