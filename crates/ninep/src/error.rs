//! Protocol violations by a peer.

/// The rule that the peer broke. The session ends with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtocolError {
    #[error("a message of {length} bytes is longer than the {limit} that were agreed")]
    TooLong { length: u32, limit: u32 },
    #[error("a message of {0} bytes is shorter than its header")]
    TooShort(u32),
    #[error("message type {0} is not known, or does not come from this side")]
    UnknownType(u8),
    #[error("malformed message: {0}")]
    Malformed(&'static str),
    #[error("an answer with tag {0}, under which nothing was asked")]
    UnknownTag(u16),
    #[error("R{} is no answer to what was asked", .0.to_lowercase())]
    WrongAnswer(&'static str),
    #[error("R{} speaks of more than was asked for", .0.to_lowercase())]
    TooMuch(&'static str),
    #[error("it does not speak 9P2000.L: its version is {0}")]
    Version(VersionText),
    #[error(
        "it wants messages of {0} bytes at the most, which is less than {LEAST_MSIZE} or more than was asked for"
    )]
    Msize(u32),
}

/// The smallest message size that may be agreed on: it holds the 16 names of a walk, or a symlink's target.
pub const LEAST_MSIZE: u32 = 8_192;

/// The version string of a server, as far as it can be shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct VersionText {
    bytes: [u8; 16],
    length: usize,
}

impl VersionText {
    #[must_use]
    pub fn of(version: &[u8]) -> VersionText {
        let length = version.len().min(16);
        let mut bytes = [0; 16];
        bytes[..length].copy_from_slice(&version[..length]);
        VersionText { bytes, length }
    }
}

impl std::fmt::Display for VersionText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{}\"", self.bytes[..self.length].escape_ascii())
    }
}

impl std::fmt::Debug for VersionText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}
