//! Decoding of `Rreaddir`.

use crate::ProtocolError;
use crate::values::Qid;
use crate::wire::{Data, Reader, Text, Wire};

/// One entry of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dirent {
    pub qid: Qid,
    /// The position behind this entry for the next `Treaddir`. Only the server can interpret it.
    pub offset: u64,
    /// As `d_type` of readdir(3); 0 if the server does not know.
    pub kind: u8,
    pub name: Text,
}

/// Decodes all entries of one reply, including `.` and `..`.
///
/// # Errors
/// An entry is cut short, or its name is impossible.
pub fn dirents(entries: &Data) -> Result<Vec<Dirent>, ProtocolError> {
    let mut from = Reader::new(&entries.0);
    let mut all = Vec::new();
    while !from.is_empty() {
        let (qid, offset) = (Wire::parse(&mut from)?, Wire::parse(&mut from)?);
        let (kind, name): (u8, Text) = (Wire::parse(&mut from)?, Wire::parse(&mut from)?);
        if name.is_empty() || name.len() > 255 || name.iter().any(|byte| matches!(byte, b'/' | 0)) {
            return Err(ProtocolError::Malformed("a directory has an entry with no possible name"));
        }
        all.push(Dirent { qid, offset, kind, name });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(entries: &[(&str, u64)]) -> Data {
        let mut bytes = Vec::new();
        for (name, offset) in entries {
            Qid { bits: 0, version: 1, path: *offset }.put(&mut bytes);
            offset.put(&mut bytes);
            8u8.put(&mut bytes);
            name.as_bytes().to_vec().put(&mut bytes);
        }
        Data(bytes)
    }

    #[test]
    fn readdir_entries_decode_in_sequence() {
        let all = dirents(&encoded(&[(".", 1), ("a", 1 << 63), ("bc", 9)])).unwrap();
        let seen: Vec<_> = all.iter().map(|one| (one.name.as_slice(), one.offset, one.kind)).collect();
        assert_eq!(seen, [(&b"."[..], 1, 8), (b"a", 1 << 63, 8), (b"bc", 9, 8)]);
        assert_eq!(dirents(&Data::default()), Ok(Vec::new()));
    }

    #[test]
    fn readdir_names_with_slash_and_truncated_entries_are_refused() {
        for name in ["", "a/b", "/", "a\0"] {
            assert!(dirents(&encoded(&[("x", 1), (name, 2)])).is_err(), "{name:?}");
        }
        assert!(dirents(&encoded(&[(&"x".repeat(256), 1)])).is_err());
        let Data(whole) = encoded(&[("name", 1)]);
        for cut in 1..whole.len() {
            assert!(dirents(&Data(whole[..cut].to_vec())).is_err());
        }
    }
}
