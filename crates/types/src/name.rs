//! Names within a directory.

use crate::fault_injection::{Bug, planted};
use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};

/// One component of a path: 1 to 255 bytes, none of them `/` or NUL, and neither `.` nor `..`.
///
/// Names are bytes, not text: what is not UTF-8 stays as it is.
#[derive(Clone)]
pub struct Name(Bytes);

/// Bytes of a name; most names need no heap allocation.
#[derive(Clone)]
enum Bytes {
    Short(u8, [u8; SHORT]),
    Long(Box<[u8]>),
}

const SHORT: usize = 22;

impl Bytes {
    fn new(bytes: &[u8]) -> Bytes {
        match u8::try_from(bytes.len()) {
            Ok(length) if bytes.len() <= SHORT => {
                let mut short = [0; SHORT];
                short[..bytes.len()].copy_from_slice(bytes);
                Bytes::Short(length, short)
            }
            _ => Bytes::Long(bytes.into()),
        }
    }
}

/// Why bytes are not a [`Name`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BadName {
    Empty,
    TooLong,
    Forbidden,
}

impl Name {
    /// The longest name, in bytes (Linux `NAME_MAX`).
    pub const MAX: u16 = 255;

    pub fn new(bytes: &[u8]) -> Result<Name, BadName> {
        if bytes.is_empty() {
            return Err(BadName::Empty);
        }
        if bytes.len() > usize::from(Name::MAX) {
            return Err(BadName::TooLong);
        }
        if planted(Bug::TakesAnyName) && !bytes.contains(&0) {
            return Ok(Name(Bytes::new(bytes)));
        }
        if bytes == b"." || bytes == b".." || bytes.iter().any(|&b| b == b'/' || b == 0) {
            return Err(BadName::Forbidden);
        }
        Ok(Name(Bytes::new(bytes)))
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Bytes::Short(length, bytes) => &bytes[..usize::from(*length)],
            Bytes::Long(bytes) => bytes,
        }
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Name) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Name {}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Name) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Name) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

/// Hashes like the bytes, so that lookups by `&[u8]` work.
impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl AsRef<[u8]> for Name {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.as_bytes().escape_ascii())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.as_bytes().escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn name_with_slash_nul_dots_or_invalid_length_is_refused() {
        assert_eq!(Name::new(b""), Err(BadName::Empty));
        assert_eq!(Name::new(b"."), Err(BadName::Forbidden));
        assert_eq!(Name::new(b".."), Err(BadName::Forbidden));
        assert_eq!(Name::new(b"a/b"), Err(BadName::Forbidden));
        assert_eq!(Name::new(b"a\0"), Err(BadName::Forbidden));
        assert_eq!(Name::new(&[b'x'; 256]), Err(BadName::TooLong));
    }

    #[test]
    fn name_that_is_not_utf8_keeps_its_bytes() {
        let name = Name::new(b"\xff\xfe...").unwrap();
        assert_eq!(name.as_bytes(), b"\xff\xfe...");
        assert!(Name::new(&[b'x'; 255]).is_ok());
    }

    #[test]
    fn names_of_all_lengths_are_ordered_and_found_by_their_bytes() {
        let texts: Vec<Vec<u8>> = (1..=255).flat_map(|n| [vec![b'a'; n], vec![b'b'; n]]).collect();
        let mut names: Vec<Name> = texts.iter().map(|text| Name::new(text).unwrap()).collect();
        assert!(
            names.iter().zip(&texts).all(|(name, text)| name.as_bytes() == text && name == &name.clone())
        );
        let set: HashSet<Name> = names.iter().cloned().collect();
        assert!(set.len() == texts.len() && texts.iter().all(|text| set.contains(text.as_slice())));
        names.sort();
        let mut sorted = texts.clone();
        sorted.sort();
        assert!(names.iter().map(Name::as_bytes).eq(sorted.iter().map(Vec::as_slice)));
        assert_eq!(size_of::<Option<(u64, Name)>>(), 32);
    }
}
