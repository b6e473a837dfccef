//! Names within a directory.

use crate::planted::{Bug, planted};
use std::borrow::Borrow;
use std::fmt;

/// One component of a path: 1 to 255 bytes, none of them `/` or NUL, and neither `.` nor `..`.
///
/// Names are bytes, not text: what is not UTF-8 stays as it is.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<[u8]>);

/// Why bytes are no [`Name`].
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
            return Ok(Name(bytes.into()));
        }
        if bytes == b"." || bytes == b".." || bytes.iter().any(|&b| b == b'/' || b == 0) {
            return Err(BadName::Forbidden);
        }
        Ok(Name(bytes.into()))
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for Name {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_could_lead_elsewhere() {
        assert_eq!(Name::new(b""), Err(BadName::Empty));
        assert_eq!(Name::new(b"."), Err(BadName::Forbidden));
        assert_eq!(Name::new(b".."), Err(BadName::Forbidden));
        assert_eq!(Name::new(b"a/b"), Err(BadName::Forbidden));
        assert_eq!(Name::new(b"a\0"), Err(BadName::Forbidden));
        assert_eq!(Name::new(&[b'x'; 256]), Err(BadName::TooLong));
    }

    #[test]
    fn keeps_bytes_that_are_not_text() {
        let name = Name::new(b"\xff\xfe...").unwrap();
        assert_eq!(name.as_bytes(), b"\xff\xfe...");
        assert!(Name::new(&[b'x'; 255]).is_ok());
    }
}
