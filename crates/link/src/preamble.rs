//! The handshake at the start of a TCP connection: both ends agree on a version and prove that they have the token.
//! docs/protocol.md has the layout ("The preamble of a TCP link").

use crate::error::{LinkError, make_printable};
use crate::link::Link;
use crate::token::{Role, Token};
use ring::rand::{SecureRandom, SystemRandom};
use std::io;

const MAGIC: &[u8; 8] = b"nighlink";
pub(crate) const VERSION: u16 = 1;
/// Largest message, without its length field.
const MOST_BYTES: usize = 512;
const NONCE_BYTES: usize = 32;
const HELLO_BYTES: usize = MAGIC.len() + 4 + NONCE_BYTES;
/// The first two bytes of a TLS record; read as a length, they exceed the largest message.
const TLS_HANDSHAKE: [u8; 2] = [0x16, 0x03];
const TLS_ALERT: [u8; 2] = [0x15, 0x03];

const CHALLENGE: u8 = 1;
const REFUSED: u8 = 2;
const ACCEPTED: u8 = 3;

/// Why a message of the peer cannot be read.
#[derive(Debug)]
pub(crate) enum MessageError {
    Io(io::Error),
    /// The bytes are the start of a TLS record.
    Tls,
    Garbage,
}

impl MessageError {
    fn at(self, at: &str) -> LinkError {
        match self {
            MessageError::Io(error) if error.kind() == io::ErrorKind::InvalidData => {
                LinkError::NotNigh { at: at.to_owned() }
            }
            MessageError::Io(error) => LinkError::from_stream_error(at, error),
            MessageError::Tls => LinkError::SpeaksTls { at: at.to_owned() },
            MessageError::Garbage => LinkError::NotNigh { at: at.to_owned() },
        }
    }
}

/// Performs the client's part of the handshake.
pub(crate) fn client_handshake(link: &Link, token: Option<&Token>, at: &str) -> Result<(), LinkError> {
    let here = || at.to_owned();
    let exporter = link.exporter().map_err(|error| LinkError::Tls { at: here(), error })?;
    let mut said = hello(nonce().map_err(|error| LinkError::Io { at: here(), error })?);
    send_message(link, &said).map_err(|error| LinkError::from_stream_error(at, error))?;
    let challenge = receive_message(link).map_err(|bad| bad.at(at))?;
    let wants_proof = match challenge.as_slice() {
        [CHALLENGE, version @ .., wants] if version.len() == 2 + NONCE_BYTES && *wants <= 1 => {
            if u16::from_le_bytes([version[0], version[1]]) != VERSION {
                return Err(LinkError::Version { at: here(), side: "this or the server" });
            }
            *wants == 1
        }
        [REFUSED, message @ ..] => return Err(refusal(at, message)),
        _ => return Err(LinkError::NotNigh { at: here() }),
    };
    said.extend_from_slice(&challenge);
    let proof = match token {
        Some(token) => token.proof(Role::Client, exporter, &said).to_vec(),
        None if wants_proof => return Err(LinkError::TokenWanted { at: here() }),
        None => Vec::new(),
    };
    send_message(link, &proof).map_err(|error| LinkError::from_stream_error(at, error))?;
    match receive_message(link).map_err(|bad| bad.at(at))?.as_slice() {
        [ACCEPTED, theirs @ ..] => match token {
            Some(token) if !token.accepts(theirs, Role::Server, exporter, &said) => {
                Err(LinkError::TokenUnknown { at: here() })
            }
            _ => Ok(()),
        },
        [REFUSED, message @ ..] => Err(refusal(at, message)),
        _ => Err(LinkError::NotNigh { at: here() }),
    }
}

/// Performs the server's part of the handshake. A refused client gets the reason, if it still reads.
pub(crate) fn server_handshake(link: &Link, token: Option<&Token>, at: &str) -> Result<(), LinkError> {
    let here = || at.to_owned();
    let refuse = |error: LinkError, message: &str| {
        let mut bytes = vec![REFUSED];
        bytes.extend_from_slice(message.as_bytes());
        // The send may fail: the client may have stopped reading.
        let _ = send_message(link, &bytes);
        Err(error)
    };
    let exporter = link.exporter().map_err(|error| LinkError::Tls { at: here(), error })?;
    let mut said = match receive_message(link) {
        Err(MessageError::Tls) => {
            return refuse(
                LinkError::SpeaksTls { at: here() },
                "the server serves with --plaintext: say so too",
            );
        }
        other => other.map_err(|bad| bad.at(at))?,
    };
    let versions = match hello_versions(&said) {
        Some(versions) => versions,
        None => return Err(LinkError::NotNigh { at: here() }),
    };
    if !(versions.0..=versions.1).contains(&VERSION) {
        let side = if versions.1 < VERSION { "the client" } else { "the server" };
        let message = format!("update nigh on {side}'s machine: the link's preamble has another version");
        return refuse(LinkError::Version { at: here(), side }, &message);
    }
    let mut challenge = vec![CHALLENGE];
    challenge.extend_from_slice(&VERSION.to_le_bytes());
    challenge.extend_from_slice(&nonce().map_err(|error| LinkError::Io { at: here(), error })?);
    challenge.push(u8::from(token.is_some()));
    send_message(link, &challenge).map_err(|error| LinkError::from_stream_error(at, error))?;
    said.extend_from_slice(&challenge);
    let proof = receive_message(link).map_err(|bad| bad.at(at))?;
    let mut accepted = vec![ACCEPTED];
    if let Some(token) = token {
        if !token.accepts(&proof, Role::Client, exporter, &said) {
            let message = "the token is another than the server's: copy the server's token file again";
            return refuse(LinkError::TokenUnknown { at: here() }, message);
        }
        accepted.extend_from_slice(&token.proof(Role::Server, exporter, &said));
    }
    send_message(link, &accepted).map_err(|error| LinkError::from_stream_error(at, error))
}

fn hello(nonce: [u8; NONCE_BYTES]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&nonce);
    bytes
}

/// Returns the lowest and the highest version that the client speaks. Later versions may append to a hello.
fn hello_versions(bytes: &[u8]) -> Option<(u16, u16)> {
    let rest = bytes.strip_prefix(MAGIC)?;
    if bytes.len() < HELLO_BYTES {
        return None;
    }
    let [l0, l1, h0, h1, ..] = *rest else { return None };
    let (lowest, highest) = (u16::from_le_bytes([l0, l1]), u16::from_le_bytes([h0, h1]));
    (lowest <= highest).then_some((lowest, highest))
}

fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    SystemRandom::new().fill(&mut nonce).map_err(|_| io::Error::other("no randomness"))?;
    Ok(nonce)
}

fn refusal(at: &str, message: &[u8]) -> LinkError {
    LinkError::Refused { at: at.to_owned(), message: make_printable(&String::from_utf8_lossy(message)) }
}

fn send_message(link: &Link, body: &[u8]) -> io::Result<()> {
    let length = u16::try_from(body.len()).ok().filter(|_| body.len() <= MOST_BYTES);
    let length = length.ok_or_else(|| io::Error::other("a message of the preamble is too long"))?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend_from_slice(body);
    link.write_all(&bytes)
}

fn receive_message(link: &Link) -> Result<Vec<u8>, MessageError> {
    let mut length = [0; 2];
    link.read_exact(&mut length).map_err(MessageError::Io)?;
    if length == TLS_HANDSHAKE || length == TLS_ALERT {
        return Err(MessageError::Tls);
    }
    let length = usize::from(u16::from_le_bytes(length));
    if length > MOST_BYTES {
        return Err(MessageError::Garbage);
    }
    let mut body = vec![0; length];
    link.read_exact(&mut body).map_err(MessageError::Io)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn lengths_never_look_like_tls() {
        for first in [TLS_HANDSHAKE, TLS_ALERT] {
            assert!(usize::from(u16::from_le_bytes(first)) > MOST_BYTES);
        }
        assert!(usize::from(u16::from_le_bytes([b'G', b'E'])) > MOST_BYTES, "nor like HTTP");
        assert!(usize::from(u16::from_le_bytes([b'S', b'S'])) > MOST_BYTES, "nor like ssh");
    }

    #[test]
    fn a_hello_of_a_later_version_is_understood() {
        let mut bytes = hello([7; NONCE_BYTES]);
        bytes.extend_from_slice(b"more");
        bytes[10..12].copy_from_slice(&9_u16.to_le_bytes());
        assert_eq!(hello_versions(&bytes), Some((1, 9)));
        assert_eq!(hello_versions(&bytes[..HELLO_BYTES - 1]), None);
    }

    proptest! {
        #[test]
        fn garbage_ends_in_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..700), client: bool) {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let theirs = Link::from(theirs);
            theirs.write_all(&bytes).unwrap();
            drop(theirs);
            let ours = Link::from(ours);
            let said = if client { client_handshake(&ours, None, "x") } else { server_handshake(&ours, None, "x") };
            prop_assert!(said.is_err());
        }
    }
}
