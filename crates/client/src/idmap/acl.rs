//! POSIX ACLs as xattrs carry them: u32 version 2, then entries of u16 tag, u16 permissions, u32 id, all
//! little-endian (linux/posix_acl_xattr.h).

use nigh_types::IdKind;

const VERSION: [u8; 4] = 2_u32.to_le_bytes();
const ENTRY_BYTES: usize = 8;
const ACL_USER: u16 = 0x02;
const ACL_GROUP: u16 = 0x08;

pub(super) const NAMES: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];

pub(super) fn is_acl(name: &[u8]) -> bool {
    NAMES.iter().any(|acl| acl.as_bytes() == name)
}

/// Maps the ids of all entries that have one; false if any has no counterpart. Leaves a value that is not an ACL
/// unchanged: its receiver rejects it.
pub(super) fn map(value: &mut [u8], to: impl Fn(IdKind, u32) -> Option<u32>) -> bool {
    let entries = match value.split_first_chunk_mut() {
        Some((version, entries)) if *version == VERSION => entries,
        _ => return true,
    };
    let mut whole = true;
    for entry in entries.chunks_exact_mut(ENTRY_BYTES) {
        let [tag_low, tag_high, _, _, a, b, c, d] = *entry else { continue };
        let kind = match u16::from_le_bytes([tag_low, tag_high]) {
            ACL_USER => IdKind::User,
            ACL_GROUP => IdKind::Group,
            _ => continue,
        };
        match to(kind, u32::from_le_bytes([a, b, c, d])) {
            Some(id) => entry[4..].copy_from_slice(&id.to_le_bytes()),
            None => whole = false,
        }
    }
    whole
}

/// Checks on any bytes as an xattr value that only ids of named users and groups change, and that mapping them back
/// restores the value. For the fuzzers (`fuzz`) and the test that replays their seeds.
#[cfg(any(test, fuzzing))]
pub(super) fn any(value: &[u8]) {
    let mut mapped = value.to_vec();
    assert!(map(&mut mapped, |_, id| Some(!id)));
    for (at, (before, after)) in value.iter().zip(&mapped).enumerate() {
        let in_an_id = at >= 4 && at % ENTRY_BYTES < 4;
        assert!(before == after || in_an_id, "byte {at} is of no id");
    }
    assert!(map(&mut mapped, |_, id| Some(!id)));
    assert_eq!(mapped, value, "mapped there and back");
    let whole = map(&mut mapped, |_, _| None);
    assert_eq!(mapped, value, "ids without a counterpart stay");
    assert!(whole || value.len() >= 4 + ENTRY_BYTES, "a stranger where no id is");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xattr_value_that_is_not_an_acl_stays_unchanged() {
        let never = |_, _| -> Option<u32> { panic!("there is no id here") };
        let mut odd = [
            &b""[..],
            b"\x02",
            b"\x02\0\0\0",
            b"\x03\0\0\0\x02\0\x07\0\x01\0\0\0",
            b"\x02\0\0\0\x02\0\x07\0\x01\0\0",
        ];
        for value in &mut odd {
            let mut mapped = value.to_vec();
            assert!(map(&mut mapped, never));
            assert_eq!(mapped, *value);
        }
    }

    #[test]
    fn acl_fuzzing_seeds_are_mapped_and_mapped_back() {
        let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus-hex/client_acl");
        for file in std::fs::read_dir(seeds).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            any(&digits.chunks(2).map(byte).collect::<Vec<u8>>());
        }
    }

    #[test]
    fn acl_mapping_changes_only_ids_of_named_users_and_groups() {
        let mut value =
            b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x07\0\x05\0\0\0\x08\0\x06\0\x05\0\0\0".to_vec();
        let to = |kind, id| Some(if kind == IdKind::User { id + 0x100 } else { id + 0x200 });
        assert!(map(&mut value, to));
        assert_eq!(
            value,
            b"\x02\0\0\0\x01\0\x07\0\xff\xff\xff\xff\x02\0\x07\0\x05\x01\0\0\x08\0\x06\0\x05\x02\0\0"
        );
        assert!(!map(&mut value, |kind, id| (kind == IdKind::Group).then_some(id)));
    }
}
