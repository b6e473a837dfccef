//! Validation of the order of a listing's names, at the receiving end.

use crate::ProtocolError;
use nigh_types::{CallId, Cookie, CookieKey, Name};

/// The most names that one directory may have: an endless listing is rejected.
pub const MAX_LISTED: u64 = 1 << 25;

/// Position in a listing up to which names have arrived.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ListingOrder {
    /// The last cookie of the chunks so far.
    pub(crate) cookie: Option<Cookie>,
    names: u64,
}

impl ListingOrder {
    /// Takes a chunk of names, which must be in strict order by cookie; chunks end only between different cookies.
    pub(crate) fn take<'a>(
        &mut self,
        call: CallId,
        told: impl Iterator<Item = &'a Name>,
        key: CookieKey,
    ) -> Result<(), ProtocolError> {
        let before = self.cookie;
        let mut same_cookie: Vec<&Name> = Vec::new();
        let mut last: Option<Cookie> = None;
        for name in told {
            self.names += 1;
            let cookie = key.cookie(name.as_bytes());
            if last != Some(cookie) {
                same_cookie.clear();
            }
            let backwards = last.is_some_and(|last| cookie < last);
            let split = before.is_some_and(|before| cookie <= before);
            if backwards || split || same_cookie.contains(&name) {
                return Err(ProtocolError::Order(call));
            }
            same_cookie.push(name);
            last = Some(cookie);
        }
        self.cookie = last.or(before);
        match self.names > MAX_LISTED {
            true => Err(ProtocolError::WrongReply { call, what: "more names than a directory may have" }),
            false => Ok(()),
        }
    }

    /// A listing that begins after a cookie.
    pub(crate) fn from(after: Cookie) -> ListingOrder {
        ListingOrder { cookie: Some(after), names: 0 }
    }

    /// Restarts the listing from its beginning.
    pub(crate) fn restart(&mut self) -> Option<Cookie> {
        self.names = 0;
        self.cookie.take()
    }
}
