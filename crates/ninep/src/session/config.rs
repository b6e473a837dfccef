//! Settings of a session.

use nigh_types::{CookieKey, Term};

/// How long facts are cached: a 9P server does not notify clients of changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Times {
    /// Names that exist.
    pub names: Term,
    /// Names that do not exist.
    pub absent: Term,
    /// Attributes, symlink targets, xattrs, and file data.
    pub attributes: Term,
}

impl Times {
    /// The time for a listing with attributes: until the first of these facts ends.
    #[must_use]
    pub fn prefetched(&self) -> Term {
        match (self.listing(), self.attributes) {
            (Term::Limited(names), Term::Limited(attributes)) => Term::Limited(names.min(attributes)),
            (Term::Session, term) | (term, Term::Session) => term,
        }
    }

    /// The time for a listing, which says of each name that it exists, and of all others that they do not.
    #[must_use]
    pub fn listing(&self) -> Term {
        match (self.names, self.absent) {
            (Term::Limited(names), Term::Limited(absent)) => Term::Limited(names.min(absent)),
            (Term::Session, term) | (term, Term::Session) => term,
        }
    }
}

/// Settings of a session: what to attach to, and as which user.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The tree's name at the server.
    pub aname: Vec<u8>,
    /// The user's name; most servers use only the number.
    pub uname: Vec<u8>,
    pub uid: u32,
    pub gid: u32,
    /// Whether each calling uid attaches; else all calls are made as `uid`.
    pub all_users: bool,
    /// The longest message that is offered, in bytes; the server may choose a smaller one.
    pub msize: u32,
    pub times: Times,
    /// Cookie key, which must be durable for server and tree.
    pub cookie_key: CookieKey,
    /// The most names of one directory: a listing with more fails with `EOVERFLOW`.
    pub most_names: u64,
}

impl Config {
    /// Attaches as the superuser alone, to the server's default tree, with messages that carry the data of one kernel
    /// request.
    #[must_use]
    pub fn new(times: Times, cookie_key: CookieKey) -> Config {
        Config {
            aname: Vec::new(),
            uname: Vec::new(),
            uid: 0,
            gid: 0,
            all_users: false,
            msize: (1 << 20) + 24,
            times,
            cookie_key,
            most_names: 10_000_000,
        }
    }
}
