//! Connections over TCP on this machine: who is let in, who is noticed, and what strangers cost.

use nigh_link::tcp::{Door, PATIENCE, Target, Trust};
use nigh_link::{Kind, Link, LinkError, Lobby, Token};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A door on a port of this machine, with all who came through it.
struct House {
    dir: TempDir,
    address: SocketAddr,
    admitted: Receiver<Result<Link, LinkError>>,
}

impl House {
    fn new(token: bool, tls: bool) -> House {
        let dir = tempfile::tempdir().unwrap();
        let token = token.then(|| Token::read_or_make(&dir.path().join("token")).unwrap());
        let door = if tls {
            Door::with_tls(&dir.path().join("server"), token).unwrap()
        } else {
            Door::plaintext(token)
        };
        House::behind(dir, door, TcpListener::bind("127.0.0.1:0").unwrap())
    }

    fn behind(dir: TempDir, door: Door, listener: TcpListener) -> House {
        let address = listener.local_addr().unwrap();
        let (sender, admitted) = channel();
        let (door, lobby) = (Arc::new(door), Lobby::new(64));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(ticket) = lobby.enter(&stream) else { continue };
                let (door, sender) = (Arc::clone(&door), sender.clone());
                thread::spawn(move || {
                    let admitted = door.admit(stream);
                    drop(ticket);
                    let _ = sender.send(admitted);
                });
            }
        });
        House { dir, address, admitted }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn target(&self) -> Target {
        let token = self.path("token");
        Target {
            host: "127.0.0.1".into(),
            port: self.address.port(),
            trust: Trust::Known(self.path("known_servers")),
            token: token.exists().then_some(token),
        }
    }

    fn plain(&self) -> Target {
        Target { trust: Trust::Plaintext, ..self.target() }
    }

    fn other_token(&self) -> PathBuf {
        let path = self.path("other-token");
        Token::read_or_make(&path).unwrap();
        path
    }

    fn next(&self) -> Result<Link, LinkError> {
        self.admitted.recv_timeout(Duration::from_secs(20)).unwrap()
    }
}

fn one_line(error: &LinkError) -> String {
    let text = error.to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

/// Both directions at once, more than any buffer holds.
fn exchange(one: &Link, two: &Link) {
    fn bytes(seed: usize) -> Vec<u8> {
        (0..3_000_000_usize).map(|n| u8::try_from((n * 31 + n / 977 + seed) % 251).unwrap()).collect()
    }
    fn read(link: &Link, expected: &[u8]) {
        let mut all = Vec::new();
        let mut buffer = vec![0; 100_000];
        while all.len() < expected.len() {
            let count = link.read(&mut buffer).unwrap();
            assert_ne!(count, 0);
            all.extend_from_slice(&buffer[..count]);
        }
        assert!(all == expected);
    }
    thread::scope(|scope| {
        scope.spawn(|| one.write_all(&bytes(1)).unwrap());
        scope.spawn(|| two.write_all(&bytes(2)).unwrap());
        scope.spawn(|| read(one, &bytes(2)));
        scope.spawn(|| read(two, &bytes(1)));
    });
}

#[test]
fn tls_carries_both_directions_at_once_and_the_key_is_known_again() {
    let house = House::new(true, true);
    let client = house.target().connect().unwrap();
    assert!(client.note().unwrap().contains("sha256:"));
    let server = house.next().unwrap();
    assert_eq!((client.kind(), server.kind()), (Kind::Tls, Kind::Tls));
    exchange(&client, &server);
    client.shutdown();
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);
    let again = house.target().connect().unwrap();
    assert_eq!(again.note(), None);
    assert_eq!(fs::read_to_string(house.path("known_servers")).unwrap().lines().count(), 1);
}

/// What there is, and no more is waited for.
fn read_all_now(link: &Link, size: usize) -> Vec<u8> {
    let (mut all, mut buffer) = (Vec::new(), vec![0; size]);
    loop {
        match link.read_now(&mut buffer) {
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
                return all;
            }
        }
    }
}

fn is_readable(link: &Link, within: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let within = Timespec::try_from(within).unwrap();
    poll(&mut [PollFd::new(link, PollFlags::IN)], Some(&within)).unwrap() > 0
}

#[test]
fn what_is_read_without_waiting_is_all_there_is_and_more_makes_the_descriptor_readable() {
    for tls in [true, false] {
        let house = House::new(true, tls);
        let target = if tls { house.target() } else { house.plain() };
        let client = target.connect().unwrap();
        let server = house.next().unwrap();
        let sent: Vec<u8> = (0..200_u8).cycle().take(9_000).collect();
        for size in [7, 4096, 1 << 16] {
            assert_eq!(read_all_now(&server, size), b"");
            assert!(
                !is_readable(&server, Duration::from_millis(20)),
                "nothing was left by {kind}",
                kind = server.kind()
            );
            // Several records, and less is asked for at a time than is in one.
            sent.chunks(3_000).for_each(|part| client.write_all(part).unwrap());
            let mut got = Vec::new();
            while got.len() < sent.len() {
                assert!(is_readable(&server, Duration::from_secs(10)), "{} of {}", got.len(), sent.len());
                got.extend(read_all_now(&server, size));
            }
            assert!(got == sent);
        }
        client.shutdown();
        assert!(is_readable(&server, Duration::from_secs(10)));
        assert_eq!(server.read_now(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn plaintext_needs_both_sides_and_a_token_all_the_same() {
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
fn a_server_without_the_token_is_not_believed() {
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
fn a_changed_key_is_refused_in_one_line_that_says_where_it_stands() {
    let house = House::new(true, true);
    fs::write(house.path("known_servers"), "# mine\n").unwrap();
    drop(house.target().connect().unwrap());
    drop(house.next());
    let (dir, target) = (tempfile::tempdir().unwrap(), house.target());
    let door = Door::with_tls(&dir.path().join("new"), None).unwrap();
    let other = House::behind(dir, door, TcpListener::bind("127.0.0.1:0").unwrap());
    // The same name leads to another key.
    let text = fs::read_to_string(house.path("known_servers")).unwrap();
    let moved = text.replace(&target.port.to_string(), &other.address.port().to_string());
    fs::write(house.path("known_servers"), moved).unwrap();
    let error = Target { port: other.address.port(), token: None, ..target }.connect().unwrap_err();
    let said = one_line(&error);
    assert!(matches!(error, LinkError::KeyChanged { line: 2, .. }), "{said}");
    assert!(said.contains("remove line 2 of") && said.contains("known_servers"), "{said}");
    assert!(other.next().is_err());
}

/// What passes is read and sealed anew, as somebody does who sits on the way with a key of his own.
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

/// TLS to both sides, without any proof: the bytes of the preamble are passed on.
fn middle(near: TcpStream, to: &Target, key: &Path) {
    use rustls::pki_types::ServerName;
    use rustls::{ClientConnection, ServerConnection, StreamOwned};
    let far = TcpStream::connect((to.host.as_str(), to.port)).unwrap();
    let (server, client) = configs::of(key);
    let mut near = StreamOwned::new(ServerConnection::new(server).unwrap(), near);
    let name = ServerName::try_from("nigh").unwrap();
    let mut far = StreamOwned::new(ClientConnection::new(client, name).unwrap(), far);
    // hello, challenge, proof, answer; each with its length in front.
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
fn a_man_in_the_middle_is_noticed_at_first_use_and_later() {
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
fn a_recorded_proof_is_worth_nothing() {
    let house = House::new(true, false);
    // What a client says on the wire, recorded.
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
fn half_a_preamble_and_then_silence_costs_a_bounded_time() {
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
                assert!(matches!(error, LinkError::Slow { .. }), "{error}");
            });
        }
    });
    assert!(begun.elapsed() < PATIENCE + Duration::from_secs(3), "{:?}", begun.elapsed());
}

#[test]
fn whoever_drips_bytes_is_not_listened_to_for_longer() {
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
    assert!(begun.elapsed() < PATIENCE + Duration::from_secs(2), "{:?}", begun.elapsed());
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
fn a_thousand_half_open_connections_keep_nobody_out() {
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
    // One that comes while they are being told to go may be dropped; it comes again.
    let client = (0..20).find_map(|_| {
        thread::sleep(Duration::from_millis(50));
        house.target().connect().ok()
    });
    assert!(client.is_some() && begun.elapsed() < PATIENCE / 2);
    // Two lobbies full, those of the other tests of this program, and their clients.
    assert!(most < 600, "{most} threads");
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn what_waits_in_either_direction_is_woken_by_shutdown() {
    let house = House::new(true, true);
    let client = house.target().connect().unwrap();
    let server = house.next().unwrap();
    let reader = client.clone();
    let reader = thread::spawn(move || reader.read(&mut [0; 64]));
    let writer = client.clone();
    let writer = thread::spawn(move || while writer.write_all(&[7; 100_000]).is_ok() {});
    thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    client.shutdown();
    assert!(matches!(reader.join().unwrap(), Ok(0) | Err(_)));
    writer.join().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1));
    drop(server);
}

#[test]
fn what_does_not_fit_is_written_by_whoever_waits_and_nothing_twice() {
    let house = House::new(true, true);
    let client = house.target().connect().unwrap();
    let server = house.next().unwrap();
    let bytes: Vec<u8> = (0..20_000_000_u32).map(|n| (n % 253) as u8).collect();
    let mut written = 0;
    while let Ok(count) = client.write(&bytes[written..], false) {
        written += count;
    }
    assert!(written > 0 && written < bytes.len());
    let rest = bytes[written..].to_vec();
    let writer = thread::spawn(move || client.write_all(&rest).map(|()| client));
    let mut all = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    while all.len() < bytes.len() {
        let count = server.read(&mut buffer).unwrap();
        assert_ne!(count, 0);
        all.extend_from_slice(&buffer[..count]);
    }
    assert!(all == bytes);
    drop(writer.join().unwrap().unwrap());
}

#[test]
fn silence_is_told_from_the_end() {
    let house = House::new(true, true);
    let client = house.target().connect().unwrap();
    let server = house.next().unwrap();
    server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(server.read(&mut [0; 8]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    drop(client);
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);
}

/// A house whose server shows a certificate for these names, signed by the authority in `ca.pem`.
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
    let door = Door::with_tls(&state, None).unwrap();
    House::behind(dir, door, TcpListener::bind("127.0.0.1:0").unwrap())
}

/// What a connection takes of a handshake at once is less than that.
#[test]
fn a_certificate_of_many_kilobytes_is_taken() {
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
fn who_is_not_there_is_named() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let house = House::new(true, true);
    let nobody = Target { port, ..house.target() };
    assert!(one_line(&nobody.connect().unwrap_err()).contains(&format!("127.0.0.1:{port}")));
    let nowhere = Target { host: "no-such-host.invalid".into(), ..house.target() };
    assert!(one_line(&nowhere.connect().unwrap_err()).contains("no-such-host.invalid"));
    let readable = house.path("token");
    fs::set_permissions(&readable, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    assert!(one_line(&house.target().connect().unwrap_err()).contains("others may read"));
}
