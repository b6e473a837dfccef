//! Errors of connecting. Each message is one line and says how to fix the problem.

use std::io;
use std::path::PathBuf;

/// Why a connection attempt failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("{host}: no such host ({error}): check its name")]
    Host { host: String, error: io::Error },
    #[error("cannot reach {at}: {error}; check that `nigh serve` listens there")]
    Unreachable { at: String, error: io::Error },
    #[error("cannot reach {at}: {error}; check that the server listens there")]
    NotThere { at: String, error: io::Error },
    #[error("{at}: {error}")]
    Io { at: String, error: io::Error },
    #[error("{at} took longer than {} s to let us in: try again", secs)]
    TimedOut { at: String, secs: u64 },
    #[error("{at} closed the connection before it let us in: check that a nigh server listens there")]
    Closed { at: String },
    #[error("{at} does not speak as a nigh server: check host and port")]
    NotNigh { at: String },
    #[error("{at} does not speak TLS: if it serves with --plaintext, mount with --plaintext too")]
    NotTls { at: String },
    #[error("{at} speaks TLS: leave --plaintext away")]
    SpeaksTls { at: String },
    #[error("{at}: TLS failed: {error}")]
    Tls { at: String, error: rustls::Error },
    #[error(
        "the key of {at} is not the one known (now {found}): if the server's key was made anew, remove line {line} \
         of {}; otherwise another machine is in between", file.display()
    )]
    KeyChanged { at: String, found: String, file: PathBuf, line: u64 },
    #[error("{at} refused: {message}")]
    Refused { at: String, message: String },
    #[error("{at} wants a token: mount with --token FILE, a copy of the server's token file")]
    TokenWanted { at: String },
    #[error(
        "{at} does not know our token: copy the server's token file again, or leave --token away if it has none"
    )]
    TokenUnknown { at: String },
    #[error("{at} speaks another version of the link's preamble: update nigh on {side}'s machine")]
    Version { at: String, side: &'static str },
    /// A local file cannot be used; the message says why and what to do.
    #[error("{}: {problem}", path.display())]
    File { path: PathBuf, problem: String },
    #[error("{0}: no such user on this machine: write another `user` line into the token file")]
    User(String),
    #[error(
        "{host} has no nigh: install it there, or add --install-server, which copies this program to ~/.cache/nigh/bin of {host}"
    )]
    NoServer { host: String },
    #[error("ssh {host}: {problem}")]
    Ssh { host: String, problem: String },
}

impl LinkError {
    pub(crate) fn file(path: &std::path::Path, problem: impl Into<String>) -> LinkError {
        LinkError::File { path: path.to_owned(), problem: problem.into() }
    }

    /// Maps an I/O error of the stream to the peer at `at` to a timeout, a closed connection or a plain I/O error.
    pub(crate) fn from_stream_error(at: &str, error: io::Error) -> LinkError {
        let at = at.to_owned();
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                LinkError::TimedOut { at, secs: crate::tcp::HANDSHAKE_TIMEOUT.as_secs() }
            }
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted => LinkError::Closed { at },
            _ => LinkError::Io { at, error },
        }
    }
}

impl From<LinkError> for io::Error {
    fn from(error: LinkError) -> io::Error {
        io::Error::other(error)
    }
}

/// Makes text from a peer printable and short enough for one line of a message.
pub(crate) fn make_printable(text: &str) -> String {
    nigh_types::printable(text, nigh_types::MAX_SHOWN_CHARS)
}

/// Returns the last non-empty line of `text`, made printable.
pub(crate) fn last_line(text: &str) -> Option<String> {
    text.lines().rev().map(make_printable).find(|line| !line.is_empty())
}
