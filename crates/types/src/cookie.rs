//! Directory cookies. See docs/decisions/0002-cookies.md.

use siphasher::sip::SipHasher13;
use std::hash::Hasher;

/// Directory cookie: the position of an entry in its directory's order, a keyed 63-bit hash of the name.
///
/// 0 is the start of a directory, 1 the position after `.`, 2 the position after `..`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Cookie(pub u64);

/// The smallest cookie that a name can have.
pub const FIRST_NAME_COOKIE: Cookie = Cookie(16);

/// The durable key of an export from which its cookies are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CookieKey(pub [u8; 16]);

impl CookieKey {
    /// The cookie of `name`, in `FIRST_NAME_COOKIE ..= i64::MAX`.
    #[must_use]
    pub fn cookie(&self, name: &[u8]) -> Cookie {
        let mut hasher = SipHasher13::new_with_key(&self.0);
        hasher.write(name);
        Cookie((hasher.finish() >> 1).max(FIRST_NAME_COOKIE.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookie_depends_only_on_key_and_name_and_is_a_positive_off_t() {
        let (a, b) = (CookieKey([1; 16]), CookieKey([2; 16]));
        assert_eq!(a.cookie(b"x"), a.cookie(b"x"));
        assert_ne!(a.cookie(b"x"), b.cookie(b"x"));
        assert_ne!(a.cookie(b"x"), a.cookie(b"y"));
        assert!(a.cookie(b"x").0 <= i64::MAX.cast_unsigned());
    }
}
