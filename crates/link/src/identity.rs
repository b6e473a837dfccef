//! The server's key pair, by which clients recognise the server.

use crate::error::LinkError;
use crate::token::{hex, write_private};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

const FILE: &str = "server.pem";
/// Subject name in a generated certificate; clients check the key and ignore the name.
pub(crate) const NAME: &str = "nigh";

pub(crate) struct Identity {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl Identity {
    /// Loads `server.pem` from the state directory. If the file is missing, creates it (mode 0600) with a new key and
    /// a self-signed certificate. An administrator may install a certificate signed by an authority there, with its
    /// chain.
    pub fn of_server(state: &Path) -> Result<Identity, LinkError> {
        let path = state.join(FILE);
        let not = |problem: String| LinkError::file(&path, problem);
        if matches!(std::fs::symlink_metadata(&path), Err(e) if e.kind() == std::io::ErrorKind::NotFound) {
            let made = rcgen::generate_simple_self_signed(vec![NAME.to_owned()])
                .map_err(|error| not(format!("cannot make a key: {error}")))?;
            let text = made.signing_key.serialize_pem() + &made.cert.pem();
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(state)
                .and_then(|()| write_private(&path, text.as_bytes()))
                .map_err(|error| not(format!("cannot keep the server's key there: {error}")))?;
        }
        let found = std::fs::metadata(&path).map_err(|error| not(error.to_string()))?;
        if found.mode() & 0o077 != 0 {
            return Err(not(
                "others may read the server's key: remove it and a new one is made, which clients must be told".into(),
            ));
        }
        let text =
            std::fs::read(&path).map_err(|error| not(format!("cannot read the server's key: {error}")))?;
        let damaged = |error: &dyn std::fmt::Display| {
            not(format!(
                "not a key and its certificate ({error}): put back what was there, or remove it and a new one is made, which clients must be told"
            ))
        };
        let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| damaged(&error))?;
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&text)
            .collect::<Result<_, _>>()
            .map_err(|error| damaged(&error))?;
        if chain.is_empty() {
            return Err(damaged(&"no certificate"));
        }
        Ok(Identity { chain, key })
    }
}

/// Returns the SHA-256 of a server's certificate.
pub(crate) fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, certificate).as_ref());
    hash
}

/// Formats a fingerprint for display.
pub(crate) fn shown(fingerprint: &[u8; 32]) -> String {
    format!("sha256:{}", hex(fingerprint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn server_key_is_created_once_and_unreadable_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let first = Identity::of_server(&state).unwrap();
        let second = Identity::of_server(&state).unwrap();
        assert_eq!(fingerprint(&first.chain[0]), fingerprint(&second.chain[0]));
        assert_eq!(fs::metadata(state.join(FILE)).unwrap().mode() & 0o777, 0o600);
        fs::set_permissions(state.join(FILE), fs::Permissions::from_mode(0o640)).unwrap();
        assert!(Identity::of_server(&state).is_err_and(|e| e.to_string().contains("others may read")));
    }

    #[test]
    fn a_damaged_key_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        write_private(&dir.path().join(FILE), b"-----BEGIN NONSENSE-----\n").unwrap();
        let error = Identity::of_server(dir.path()).err().unwrap().to_string();
        assert!(error.contains("server.pem") && error.lines().count() == 1, "{error}");
    }
}
