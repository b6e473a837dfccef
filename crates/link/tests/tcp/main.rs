//! TCP connections on this machine: authentication of both sides, and the cost of unauthenticated peers.

mod stream;
mod test_server;

use nigh_link::tcp::{Acceptor, HANDSHAKE_TIMEOUT, Target, Trust};
use nigh_link::{Kind, LinkError};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use stream::exchange;
use test_server::House;

fn one_line(error: &LinkError) -> String {
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn plaintext_needs_option_on_both_sides_and_still_a_token() {
    let house = House::new(true, false);
    let client = house.plain().connect().unwrap();
    exchange(&client, &house.next().unwrap());
    let without = Target { token: None, ..house.plain() };
    assert!(matches!(without.connect(), Err(LinkError::TokenWanted { .. })));
    assert!(house.next().is_err());
    let error = house.target().connect().unwrap_err();
    assert!(matches!(error, LinkError::NotTls { .. }), "{error}");
    assert!(house.next().is_err());
    let secret = House::new(true, true);
    let error = secret.plain().connect().unwrap_err();
    assert!(matches!(error, LinkError::SpeaksTls { .. }), "{error}");
    assert!(secret.next().is_err());
}

#[test]
fn another_token_is_refused_on_both_sides() {
    for tls in [true, false] {
        let house = House::new(true, tls);
        let target = if tls { house.target() } else { house.plain() };
        let wrong = Target { token: Some(house.other_token()), ..target };
        let error = wrong.connect().unwrap_err();
        assert!(one_line(&error).contains("copy the server's token"), "{error}");
        assert!(matches!(house.next(), Err(LinkError::TokenUnknown { .. })));
        assert!(!house.path("known_servers").exists(), "a server that did not prove itself is not known");
    }
}

#[test]
fn server_without_the_token_is_refused_and_not_recorded() {
    let house = House::new(false, true);
    let trusting = house.target();
    assert!(trusting.token.is_none());
    drop(trusting.connect().unwrap());
    fs::remove_file(house.path("known_servers")).unwrap();
    let wary = Target { token: Some(house.other_token()), ..house.target() };
    assert!(matches!(wary.connect(), Err(LinkError::TokenUnknown { .. })));
    assert!(!house.path("known_servers").exists());
}

#[test]
fn changed_server_key_is_refused_and_error_names_file_and_line() {
    let house = House::new(true, true);
    fs::write(house.path("known_servers"), "# mine\n").unwrap();
    drop(house.target().connect().unwrap());
    drop(house.next());
    let (dir, target) = (tempfile::tempdir().unwrap(), house.target());
    let door = Acceptor::with_tls(&dir.path().join("new"), None).unwrap();
    let other = House::with_acceptor(dir, door, TcpListener::bind("127.0.0.1:0").unwrap());
    // The known name now leads to another key.
    let text = fs::read_to_string(house.path("known_servers")).unwrap();
    let moved = text.replace(&target.port.to_string(), &other.address.port().to_string());
    fs::write(house.path("known_servers"), moved).unwrap();
    let error = Target { port: other.address.port(), token: None, ..target }.connect().unwrap_err();
    let said = one_line(&error);
    assert!(matches!(error, LinkError::KeyChanged { line: 2, .. }), "{said}");
    assert!(said.contains("remove line 2 of") && said.contains("known_servers"), "{said}");
    assert!(other.next().is_err());
}

/// A proxy that decrypts and encrypts again, with a key of its own.
fn man_in_the_middle(to: Target, dir: &Path) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let key = dir.join("middle");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            middle(stream, &to, &key);
        }
    });
    address
}

/// TLS to both sides without authentication: the bytes of the preamble pass through.
fn middle(near: TcpStream, to: &Target, key: &Path) {
    use rustls::pki_types::ServerName;
    use rustls::{ClientConnection, ServerConnection, StreamOwned};
    let far = TcpStream::connect((to.host.as_str(), to.port)).unwrap();
    let (server, client) = configs::of(key);
    let mut near = StreamOwned::new(ServerConnection::new(server).unwrap(), near);
    let name = ServerName::try_from("nigh").unwrap();
    let mut far = StreamOwned::new(ClientConnection::new(client, name).unwrap(), far);
    // hello, challenge, proof, reply; each with its length in front.
    for turn in 0..4 {
        let (from, to): (&mut dyn Read, &mut dyn Write) =
            if turn % 2 == 0 { (&mut near, &mut far) } else { (&mut far, &mut near) };
        let mut length = [0; 2];
        if from.read_exact(&mut length).is_err() {
            return;
        }
        let mut body = vec![0; usize::from(u16::from_le_bytes(length))];
        if from.read_exact(&mut body).is_err() {
            return;
        }
        let _ = to.write_all(&[&length[..], &body].concat()).and_then(|()| to.flush());
    }
}

mod configs {
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::crypto::ring::default_provider;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
    use rustls::{ClientConfig, DigitallySignedStruct, Error, ServerConfig, SignatureScheme};
    use std::path::Path;
    use std::sync::Arc;

    #[derive(Debug)]
    struct Anything;

    impl ServerCertVerifier for Anything {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            default_provider().signature_verification_algorithms.supported_schemes()
        }
    }

    pub fn of(_key: &Path) -> (Arc<ServerConfig>, Arc<ClientConfig>) {
        let made = rcgen::generate_simple_self_signed(vec!["nigh".to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(default_provider());
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        server.alpn_protocols = vec![b"nigh-link/1".to_vec()];
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anything))
            .with_no_client_auth();
        client.alpn_protocols = vec![b"nigh-link/1".to_vec()];
        (Arc::new(server), Arc::new(client))
    }
}

#[test]
fn man_in_the_middle_is_refused_at_first_use_and_later() {
    let house = House::new(true, true);
    let middle = man_in_the_middle(house.target(), house.dir.path());
    let through = Target { port: middle.port(), ..house.target() };
    let error = through.connect().unwrap_err();
    assert!(matches!(error, LinkError::Refused { .. } | LinkError::TokenUnknown { .. }), "{error}");
    assert!(matches!(house.next(), Err(LinkError::TokenUnknown { .. })));
    assert!(!house.path("known_servers").exists(), "his key is not kept");
    drop(house.target().connect().unwrap());
    let known = fs::read_to_string(house.path("known_servers")).unwrap();
    let known = known.replace(&house.address.port().to_string(), &middle.port().to_string());
    fs::write(house.path("known_servers"), known).unwrap();
    assert!(matches!(through.connect(), Err(LinkError::KeyChanged { .. })));
}

#[test]
fn replayed_proof_is_refused() {
    let house = House::new(true, false);
    // The client's bytes on the wire, recorded.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let recorder = listener.local_addr().unwrap();
    let real = house.address;
    let recording = thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(real).unwrap();
        let mut said = Vec::new();
        let mut buffer = [0; 4096];
        for turn in 0..4 {
            let (from, to) = if turn % 2 == 0 { (&mut near, &mut far) } else { (&mut far, &mut near) };
            let count = from.read(&mut buffer).unwrap();
            to.write_all(&buffer[..count]).unwrap();
            if turn % 2 == 0 {
                said.push(buffer[..count].to_vec());
            }
        }
        said
    });
    let through = Target { port: recorder.port(), ..house.plain() };
    drop(through.connect().unwrap());
    assert!(house.next().is_ok());
    let said = recording.join().unwrap();
    assert_eq!(said.len(), 2);
    let mut replay = TcpStream::connect(house.address).unwrap();
    let mut buffer = [0; 4096];
    replay.write_all(&said[0]).unwrap();
    assert!(replay.read(&mut buffer).unwrap() > 0);
    replay.write_all(&said[1]).unwrap();
    assert!(matches!(house.next(), Err(LinkError::TokenUnknown { .. })));
}

#[test]
fn incomplete_preamble_times_out() {
    let begun = Instant::now();
    thread::scope(|scope| {
        for (tls, bytes) in [
            (false, &b""[..]),
            (false, &b"\x2c\0nighli"[..]),
            (true, &b"\x16\x03\x01\x02\x00\x01\x00\x01"[..]),
        ] {
            scope.spawn(move || {
                let house = House::new(true, tls);
                let mut stream = TcpStream::connect(house.address).unwrap();
                stream.write_all(bytes).unwrap();
                let error = house.next().unwrap_err();
                assert!(matches!(error, LinkError::TimedOut { .. }), "{error}");
            });
        }
    });
    assert!(begun.elapsed() < HANDSHAKE_TIMEOUT + Duration::from_secs(3), "{:?}", begun.elapsed());
}

#[test]
fn dripping_bytes_does_not_extend_the_handshake_timeout() {
    let house = House::new(true, true);
    let mut stream = TcpStream::connect(house.address).unwrap();
    let begun = Instant::now();
    thread::spawn(move || {
        // A record that never ends.
        let _ = stream.write_all(&[0x16, 3, 1, 0x3f, 0xff]);
        while stream.write_all(&[1]).is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    assert!(house.next().is_err());
    assert!(begun.elapsed() < HANDSHAKE_TIMEOUT + Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[test]
fn garbage_is_refused_at_once() {
    for tls in [true, false] {
        let house = House::new(true, tls);
        for garbage in [
            &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
            b"SSH-2.0-OpenSSH_9.2\r\n",
            &[0xff; 5000],
            &[0; 5000],
            b"\x2c\0NIGHLINK\x01\0\x01\0aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        ] {
            let mut stream = TcpStream::connect(house.address).unwrap();
            let begun = Instant::now();
            let _ = stream.write_all(garbage);
            assert!(house.next().is_err());
            assert!(begun.elapsed() < Duration::from_secs(5));
        }
        drop(if tls { house.target() } else { house.plain() }.connect().unwrap());
    }
}

#[test]
fn thousand_half_open_connections_do_not_block_a_client() {
    let house = House::new(true, true);
    let mut open = Vec::new();
    let mut most = 0;
    for n in 0..1_000 {
        open.push(TcpStream::connect(house.address).unwrap());
        if n % 50 == 0 {
            most = most.max(threads());
        }
    }
    let begun = Instant::now();
    // A connection that arrives while old ones are being shut down may be dropped; the client retries.
    let client = (0..20).find_map(|_| {
        thread::sleep(Duration::from_millis(50));
        house.target().connect().ok()
    });
    assert!(client.is_some() && begun.elapsed() < HANDSHAKE_TIMEOUT / 2);
    // Two full limits, the threads of this program's other tests, and their clients.
    assert!(most < 600, "{most} threads");
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

/// A server with a certificate for `names`, signed by the authority in `ca.pem`.
fn certified(names: Vec<String>) -> House {
    let dir = tempfile::tempdir().unwrap();
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = params.self_signed(&ca_key).unwrap();
    let issuer = rcgen::Issuer::new(params, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
    let state = dir.path().join("server");
    fs::create_dir(&state).unwrap();
    fs::write(state.join("server.pem"), key.serialize_pem() + &certificate.pem()).unwrap();
    fs::set_permissions(state.join("server.pem"), std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .unwrap();
    fs::write(dir.path().join("ca.pem"), ca.pem()).unwrap();
    let door = Acceptor::with_tls(&state, None).unwrap();
    House::with_acceptor(dir, door, TcpListener::bind("127.0.0.1:0").unwrap())
}

/// The certificate is larger than what a connection takes of a handshake at once.
#[test]
fn certificate_of_many_kilobytes_is_accepted() {
    let mut names: Vec<String> = (0..600).map(|n| format!("name-{n}.of.a.large.cluster.example")).collect();
    names.push("localhost".into());
    let house = certified(names);
    assert!(fs::metadata(house.path("server/server.pem")).unwrap().len() > 24_000);
    let trust = Trust::Authority(house.path("ca.pem"));
    let target = Target { host: "localhost".into(), trust, ..house.target() };
    let client = target.connect().unwrap();
    exchange(&client, &house.next().unwrap());
}

#[test]
fn an_authority_takes_the_place_of_known_keys() {
    let house = certified(vec!["localhost".to_owned()]);
    let trust = Trust::Authority(house.path("ca.pem"));
    let target = Target { host: "localhost".into(), trust: trust.clone(), ..house.target() };
    assert_eq!(target.connect().unwrap().kind(), Kind::Tls);
    let wrong_name = Target { trust, ..house.target() };
    assert!(matches!(wrong_name.connect(), Err(LinkError::Tls { .. })));
    let stranger = House::new(false, true);
    let trust = Trust::Authority(house.path("ca.pem"));
    let unsigned = Target { host: "localhost".into(), trust, ..stranger.target() };
    assert!(one_line(&unsigned.connect().unwrap_err()).contains("TLS failed"));
    fs::write(house.path("ca.pem"), "nothing").unwrap();
    assert!(one_line(&target.connect().unwrap_err()).contains("--ca"));
}

#[test]
fn error_for_unreachable_server_names_it() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let house = House::new(true, true);
    let unused = Target { port, ..house.target() };
    assert!(one_line(&unused.connect().unwrap_err()).contains(&format!("127.0.0.1:{port}")));
    let nowhere = Target { host: "no-such-host.invalid".into(), ..house.target() };
    assert!(one_line(&nowhere.connect().unwrap_err()).contains("no-such-host.invalid"));
    let readable = house.path("token");
    fs::set_permissions(&readable, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    assert!(one_line(&house.target().connect().unwrap_err()).contains("others may read"));
}
