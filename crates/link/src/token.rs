//! A secret that both ends have in a file, and the proofs that they exchange.

use crate::error::LinkError;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// A token file is two short lines.
const MOST_BYTES: u64 = 4 << 10;

/// The side that makes a proof; a proof of one side is not valid for the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Client,
    Server,
}

/// Contents of a token file: 64 hexadecimal digits on a line; lines that begin with `#` are comments. A server's file
/// may have `user NAME` (or `user UID`): the user that its clients act as.
#[derive(Clone)]
pub struct Token {
    key: hmac::Key,
    user: Option<String>,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token(user {:?})", self.user)
    }
}

impl Token {
    /// Reads the file, which this user must own, and which no other user may read.
    pub fn read(path: &Path) -> Result<Token, LinkError> {
        let not = |problem: &str| LinkError::file(path, problem);
        let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(not("there is no token: copy the server's token file there, with mode 600"));
            }
            other => other.map_err(|error| not(&format!("cannot read the token: {error}")))?,
        };
        let found = file.metadata().map_err(|error| not(&error.to_string()))?;
        if !found.is_file() {
            return Err(not("a token must be in an ordinary file"));
        }
        if found.uid() != rustix::process::geteuid().as_raw() {
            return Err(not(
                "the token belongs to another user: copy it to a file of your own, with mode 600",
            ));
        }
        if found.mode() & 0o077 != 0 {
            return Err(not(
                "others may read the token: make a new one, or chmod 600 it if no other user has read it",
            ));
        }
        let mut text = String::new();
        file.take(MOST_BYTES).read_to_string(&mut text).map_err(|error| not(&error.to_string()))?;
        Token::parse(&text).map_err(not)
    }

    /// Reads the file, and creates it (mode 0600) with a new token if it is missing.
    pub fn read_or_make(path: &Path) -> Result<Token, LinkError> {
        if matches!(std::fs::symlink_metadata(path), Err(e) if e.kind() == std::io::ErrorKind::NotFound) {
            let mut secret = [0; 32];
            SystemRandom::new().fill(&mut secret).map_err(|_| LinkError::file(path, "no randomness"))?;
            let text = format!("{}\n", hex(&secret));
            write_private(path, text.as_bytes())
                .map_err(|error| LinkError::file(path, format!("cannot make a token there: {error}")))?;
            tracing::info!(target: "nigh::link", path = %path.display(), "made a token");
        }
        Token::read(path)
    }

    /// The user that clients act as, if the file names one.
    #[must_use]
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Computes the proof. `said`: all that both sides have sent on this connection. `exporter`: TLS key material
    /// that only the two ends know.
    pub(crate) fn proof(&self, role: Role, exporter: Option<[u8; 32]>, said: &[u8]) -> [u8; 32] {
        let mut proof = [0; 32];
        proof.copy_from_slice(hmac::sign(&self.key, &proof_input(role, exporter, said)).as_ref());
        proof
    }

    /// Checks a proof in constant time.
    pub(crate) fn accepts(&self, proof: &[u8], role: Role, exporter: Option<[u8; 32]>, said: &[u8]) -> bool {
        hmac::verify(&self.key, &proof_input(role, exporter, said), proof).is_ok()
    }

    pub(crate) fn parse(text: &str) -> Result<Token, &'static str> {
        let (mut key, mut user) = (None, None);
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(name) = line.strip_prefix("user ") {
                user = Some(name.trim().to_owned());
            } else if let Some(secret) = unhex(line)
                && key.is_none()
            {
                key = Some(hmac::Key::new(hmac::HMAC_SHA256, &secret));
            } else {
                return Err(
                    "not a token: it wants a line of 64 hexadecimal digits; copy it again, or remove the file and let `nigh serve` make a new one",
                );
            }
        }
        let key =
            key.ok_or("there is no token in it: remove the file and let `nigh serve` make a new one")?;
        Ok(Token { key, user })
    }
}

fn proof_input(role: Role, exporter: Option<[u8; 32]>, said: &[u8]) -> Vec<u8> {
    let mut statement = b"nigh link proof 1 ".to_vec();
    statement.push(match role {
        Role::Client => b'c',
        Role::Server => b's',
    });
    match exporter {
        Some(material) => {
            statement.push(1);
            statement.extend_from_slice(&material);
        }
        None => statement.push(0),
    }
    statement.extend_from_slice(said);
    statement
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Parses 32 bytes.
pub(crate) fn unhex(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// Creates a file with mode 0600 atomically (temporary file, rename); an existing file stays.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let fresh = Path::new(&name);
    let written =
        File::options().write(true).create_new(true).mode(0o600).open(fresh).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()?;
            let here = rustix::fs::CWD;
            Ok(rustix::fs::renameat_with(here, fresh, here, path, rustix::fs::RenameFlags::NOREPLACE)?)
        });
    if written.is_err() {
        let _ = std::fs::remove_file(fresh);
    }
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.exists() => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn token(text: &str) -> Token {
        Token::parse(text).unwrap()
    }

    #[test]
    fn a_token_is_made_private_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let first = Token::read_or_make(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let second = Token::read_or_make(&path).unwrap();
        let proof = first.proof(Role::Client, None, b"said");
        assert!(second.accepts(&proof, Role::Client, None, b"said"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_token_that_others_may_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        Token::read_or_make(&path).unwrap();
        for mode in [0o640, 0o604, 0o622, 0o700 | 0o001] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = Token::read(&path).unwrap_err().to_string();
            assert!(error.contains("others may read") && error.lines().count() == 1, "{error}");
        }
        assert!(Token::read(dir.path()).unwrap_err().to_string().contains("ordinary file"));
        assert!(Token::read(&dir.path().join("gone")).unwrap_err().to_string().contains("no token"));
    }

    #[test]
    fn token_owned_by_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        Token::read_or_make(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(1000), None).unwrap();
        assert!(Token::read(&path).unwrap_err().to_string().contains("another user"));
    }

    #[test]
    fn only_a_whole_token_is_one() {
        let digits = "0123456789abcdef".repeat(4);
        assert_eq!(token(&format!("# ours\n{digits}\nuser anna\n")).user(), Some("anna"));
        assert_eq!(token(&digits.to_uppercase()).user(), None);
        for bad in ["", "user anna", &digits[1..], &format!("{digits}\n{digits}"), &digits.replace('0', "g")]
        {
            assert!(Token::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn proof_is_valid_for_one_role_channel_and_transcript_only() {
        let ours = token(&"ab".repeat(32));
        let other = token(&"ac".repeat(32));
        let exporter = Some([3; 32]);
        let proof = ours.proof(Role::Client, exporter, b"said");
        assert!(ours.accepts(&proof, Role::Client, exporter, b"said"));
        assert!(!other.accepts(&proof, Role::Client, exporter, b"said"));
        assert!(!ours.accepts(&proof, Role::Server, exporter, b"said"));
        assert!(!ours.accepts(&proof, Role::Client, Some([4; 32]), b"said"));
        assert!(!ours.accepts(&proof, Role::Client, None, b"said"));
        assert!(!ours.accepts(&proof, Role::Client, exporter, b"sand"));
        assert!(!ours.accepts(&proof[..31], Role::Client, exporter, b"said"));
        assert!(!ours.accepts(&[], Role::Client, exporter, b"said"));
    }
}
