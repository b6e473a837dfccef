//! Who is at the other end of a connection, and what it may claim to be.

use nigh_types::Credentials;
use std::fmt;

/// Which ids of callers are believed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Claims {
    /// Any: root of this machine, whose kernel says on whose behalf it calls, or a client that is trusted to say
    /// who its users are.
    Any,
    /// This user's, with its group or one of its groups; everything else is done as this user.
    Only(Credentials),
}

/// What becomes of ids that are claimed and believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Squash {
    /// They stay.
    None,
    /// uid and gid 0 become 65534.
    Root,
    /// Everybody becomes the serving user, or 65534 where that is root.
    All,
}

/// The other end of a connection.
#[derive(Debug)]
pub struct Peer {
    came: String,
    claims: Claims,
    squash: Squash,
    any_path: bool,
}

impl Peer {
    /// `came`: how, for people. It may attach to exports by name only.
    #[must_use]
    pub fn new(came: impl Into<String>, claims: Claims, squash: Squash) -> Peer {
        Peer { came: came.into(), claims, squash, any_path: false }
    }

    /// Code of this process: nothing needs to be proved.
    #[must_use]
    pub fn in_process() -> Peer {
        Peer::new("in process", Claims::Any, Squash::None).with_any_path()
    }

    /// It may attach to whatever the server can reach, by its path.
    #[must_use]
    pub fn with_any_path(self) -> Peer {
        Peer { any_path: true, ..self }
    }

    #[must_use]
    pub fn may_name_any_path(&self) -> bool {
        self.any_path
    }

    #[must_use]
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    #[must_use]
    pub fn squash(&self) -> Squash {
        self.squash
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.claims {
            Claims::Any => write!(f, "{}", self.came),
            Claims::Only(own) => write!(f, "{} as uid {}", self.came, own.uid),
        }
    }
}
