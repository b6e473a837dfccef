//! Fuzz entry points for bytes that an unauthenticated peer sends (`fuzz`), and for the tests that replay their
//! seeds. Not part of any release build.

use crate::link::Link;
use crate::socket::{Bounds, Socket};
use crate::token::Token;
use crate::{preamble, ssh};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Far longer than any fuzz input needs.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Feeds arbitrary bytes to the preamble as the peer's messages. The first byte chooses the end under test. A client
/// without the token must be refused, and each error must be one line.
pub fn preamble(input: &[u8]) {
    let Some((&choice, said)) = input.split_first() else { return };
    let (ours, _theirs) = scripted_peer(said);
    let link = Link::from(ours);
    let token = Token::parse(&"5".repeat(64)).expect("64 digits are a token");
    let result = match choice % 4 {
        0 => preamble::client_handshake(&link, None, "x"),
        1 => preamble::client_handshake(&link, Some(&token), "x"),
        2 => preamble::server_handshake(&link, None, "x"),
        _ => preamble::server_handshake(&link, Some(&token), "x"),
    };
    match result {
        Ok(()) => assert!(choice.is_multiple_of(2), "a client without a token was accepted"),
        Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
    }
}

/// Feeds arbitrary bytes as the output of a login before the relay starts. Bytes after [`ssh::READY`] must remain
/// unread.
pub fn banner(input: &[u8]) {
    let (ours, _theirs) = scripted_peer(input);
    let socket = Socket::new(OwnedFd::from(ours));
    let most = 4 << 10;
    socket
        .bound(Some(Bounds { until: Instant::now() + TIMEOUT, bytes: most }))
        .expect("a socket has timeouts");
    let ready = input.windows(ssh::READY.len()).position(|bytes| bytes == ssh::READY);
    let begins = ready.map(|at| at + ssh::READY.len()).filter(|begins| *begins <= most);
    match (ssh::await_ready(&socket), begins) {
        (Ok(()), Some(begins)) => {
            socket.bound(None).expect("a socket has timeouts");
            let mut rest = vec![0; input.len() + 1];
            let mut count = 0;
            while let Ok(more @ 1..) = socket.recv(&mut rest[count..], true) {
                count += more;
            }
            assert_eq!(rest[..count], input[begins..], "the stream begins elsewhere");
        }
        (Err(_), None) => {}
        (result, begins) => panic!("ready at {begins:?}, and the end is {result:?}"),
    }
}

/// Returns a stream whose peer has sent `said` and then closed its sending direction; the peer discards replies.
fn scripted_peer(said: &[u8]) -> (UnixStream, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    // Larger inputs add nothing: 64 KiB fit into the socket's buffer.
    let said = &said[..said.len().min(64 << 10)];
    theirs.write_all(said).expect("a socket takes 64 KiB");
    theirs.shutdown(std::net::Shutdown::Write).expect("a socket is shut down");
    (ours, theirs)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    fn replay(target: &str, act: fn(&[u8])) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus-hex").join(target);
        let mut count = 0;
        for file in std::fs::read_dir(dir).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            act(&digits.chunks(2).map(byte).collect::<Vec<u8>>());
            count += 1;
        }
        assert!(count > 0);
    }

    #[test]
    fn fuzz_seeds_of_preamble_and_banner_pass() {
        replay("link_preamble", super::preamble);
        replay("link_banner", super::banner);
    }
}
