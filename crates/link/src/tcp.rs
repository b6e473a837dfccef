//! Connections over TCP: TLS and a token, or plaintext if both sides ask for it.

use crate::error::LinkError;
use crate::identity::{Identity, NAME, fingerprint, shown};
use crate::known_servers::KnownServers;
use crate::link::{Kind, Link};
use crate::preamble;
use crate::socket::{Bounds, Socket};
use crate::tls::Tls;
use crate::token::Token;
use parking_lot::Mutex;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring::default_provider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, ServerConfig, ServerConnection,
    SignatureScheme,
};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Default port of servers.
pub const PORT: u16 = 21644;
/// Time limit for the handshake, on each side.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes that one side reads during the handshake.
const MOST_BYTES: usize = 64 << 10;
/// ALPN protocol name.
const ALPN: &[u8] = b"nigh-link/1";
/// Idle time before keep-alive probes; a peer that answers none of the probes is treated as gone after 25 s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const KEEP_ALIVE_EACH: Duration = Duration::from_secs(5);
const KEEP_ALIVE_TIMES: u32 = 3;
const USER_TIMEOUT_MS: u32 = 25_000;

/// A server to connect to.
#[derive(Clone, Debug)]
pub struct Target {
    pub host: String,
    pub port: u16,
    pub trust: Trust,
    /// File with the token, read again for each connection.
    pub token: Option<PathBuf>,
}

/// How the client authenticates the server, besides by the token.
#[derive(Clone, Debug)]
pub enum Trust {
    /// No authentication and no encryption.
    Plaintext,
    /// By its key, which the client records in this file at the first connection.
    Known(PathBuf),
    /// By a certificate for its name, signed by an authority in this PEM file.
    Authority(PathBuf),
}

impl Target {
    /// Connects and authenticates both sides. Takes at most [`HANDSHAKE_TIMEOUT`] after name resolution.
    pub fn connect(&self) -> Result<Link, LinkError> {
        let at = self.name();
        let token = self.token.as_deref().map(Token::read).transpose()?;
        let addresses: Vec<SocketAddr> = (self.host.as_str(), self.port)
            .to_socket_addrs()
            .map_err(|error| LinkError::Host { host: self.host.clone(), error })?
            .collect();
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        let stream = connect_any(&addresses, until)
            .map_err(|error| LinkError::Unreachable { at: at.clone(), error })?;
        set_socket_options(&stream).map_err(|error| LinkError::Io { at: at.clone(), error })?;
        let socket = bounded(stream, until).map_err(|error| LinkError::Io { at: at.clone(), error })?;
        let (link, seen) = match &self.trust {
            Trust::Plaintext => (Link::new(Kind::Tcp, socket), None),
            Trust::Known(file) => handshake_by_key(socket, &at, KnownServers::new(file))?,
            Trust::Authority(file) => {
                let name = ServerName::try_from(self.host.clone()).map_err(|_| {
                    LinkError::file(file, format!("{} is no name that --ca can check", self.host))
                })?;
                (tls_handshake(socket, &at, authority_config(file)?, name)?, None)
            }
        };
        preamble::client_handshake(&link, token.as_ref(), &at)?;
        link.bound(None).map_err(|error| LinkError::from_stream_error(&at, error))?;
        // Only now: the client records no key of a server that failed to prove the token.
        match seen {
            Some((known, key)) => {
                known.add(&at, key)?;
                let note = format!("{at} is known from now on by its key {}", shown(&key));
                Ok(link.with_note(note))
            }
            None => Ok(link),
        }
    }

    /// Host and port, as in `known_servers` and in messages.
    #[must_use]
    pub fn name(&self) -> String {
        let host = self.host.to_ascii_lowercase();
        if host.contains(':') { format!("[{host}]:{}", self.port) } else { format!("{host}:{}", self.port) }
    }
}

/// Connects to a server of another protocol, without encryption or authentication.
pub fn connect_plaintext(host: &str, port: u16) -> Result<Link, LinkError> {
    let target = Target { host: host.to_owned(), port, trust: Trust::Plaintext, token: None };
    let at = target.name();
    let no_server = |error| LinkError::NotThere { at: at.clone(), error };
    let addresses = (host, port).to_socket_addrs();
    let addresses: Vec<SocketAddr> =
        addresses.map_err(|error| LinkError::Host { host: host.to_owned(), error })?.collect();
    let stream = connect_any(&addresses, Instant::now() + HANDSHAKE_TIMEOUT).map_err(no_server)?;
    set_socket_options(&stream).map_err(no_server)?;
    Ok(Link::new(Kind::Tcp, Socket::new(OwnedFd::from(stream))))
}

/// Server side of TCP connections.
pub struct Acceptor {
    tls: Option<Arc<ServerConfig>>,
    fingerprint: Option<String>,
    token: Option<Token>,
}

impl Acceptor {
    /// With TLS. Loads the key from the state directory, and creates it there if it is missing.
    pub fn with_tls(state: &Path, token: Option<Token>) -> Result<Acceptor, LinkError> {
        let Identity { chain, key } = Identity::of_server(state)?;
        let bad = |error| LinkError::Tls { at: "the server's own key".into(), error };
        let fingerprint = chain.first().map(|certificate| shown(&fingerprint(certificate)));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(bad)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(bad)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.send_tls13_tickets = 0;
        config.max_early_data_size = 0;
        Ok(Acceptor { tls: Some(Arc::new(config)), fingerprint, token })
    }

    /// Without encryption.
    #[must_use]
    pub fn plaintext(token: Option<Token>) -> Acceptor {
        Acceptor { tls: None, fingerprint: None, token }
    }

    /// Fingerprint of the key by which clients recognise this server.
    #[must_use]
    pub fn fingerprint(&self) -> Option<&str> {
        self.fingerprint.as_deref()
    }

    /// Performs the handshake with a client, which must prove the token if there is one. Takes at most
    /// [`HANDSHAKE_TIMEOUT`] and reads a bounded number of bytes.
    pub fn accept(&self, stream: TcpStream) -> Result<Link, LinkError> {
        let at = stream.peer_addr().map_or_else(|_| "a client".to_owned(), |address| address.to_string());
        let io = |error| LinkError::Io { at: at.clone(), error };
        set_socket_options(&stream).map_err(io)?;
        let socket = bounded(stream, Instant::now() + HANDSHAKE_TIMEOUT).map_err(io)?;
        let link = match &self.tls {
            None => Link::new(Kind::Tcp, socket),
            Some(config) => {
                let tls = |error| LinkError::Tls { at: at.clone(), error };
                let connection = ServerConnection::new(Arc::clone(config)).map_err(tls)?;
                let agreed = Tls::handshake(connection.into(), &socket);
                let agreed =
                    agreed.map_err(|error| LinkError::from_stream_error(&at, error))?.map_err(tls)?;
                Link::tls(socket, agreed)
            }
        };
        preamble::server_handshake(&link, self.token.as_ref(), &at)?;
        link.bound(None).map_err(io)?;
        Ok(link)
    }
}

fn connect_any(addresses: &[SocketAddr], until: Instant) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::other("it has no address");
    for (tried, address) in addresses.iter().enumerate() {
        // Each address gets its share, so an address that does not answer cannot use up the whole time.
        let left = until.saturating_duration_since(Instant::now());
        let others = u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
        match TcpStream::connect_timeout(address, (left / others).max(Duration::from_millis(100))) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn bounded(stream: TcpStream, until: Instant) -> std::io::Result<Socket> {
    let socket = Socket::new(OwnedFd::from(stream));
    socket.bound(Some(Bounds { until, bytes: MOST_BYTES }))?;
    Ok(socket)
}

fn set_socket_options(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_EACH)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_TIMES)?;
    Ok(sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT_MS)?)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(default_provider())
}

/// A server key to record after the rest of the handshake has succeeded.
type NewServerKey = Option<(KnownServers, [u8; 32])>;

fn handshake_by_key(
    socket: Socket,
    at: &str,
    known: KnownServers,
) -> Result<(Link, NewServerKey), LinkError> {
    let expected = known.find(at)?;
    let verifier = Arc::new(KeyVerifier {
        provider: provider(),
        expected: expected.map(|known| known.fingerprint),
        presented: Mutex::new(None),
    });
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| LinkError::Tls { at: at.to_owned(), error })?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&verifier) as Arc<dyn ServerCertVerifier>)
        .with_no_client_auth();
    // All servers share one name: only the key counts, and SNI reveals nothing to eavesdroppers.
    let name = ServerName::try_from(NAME).map_err(|_| LinkError::NotTls { at: at.to_owned() })?;
    let agreed = tls_handshake(socket, at, config, name);
    let seen = *verifier.presented.lock();
    match (agreed, expected, seen) {
        (_, Some(expected), Some(seen)) if expected.fingerprint != seen => Err(LinkError::KeyChanged {
            at: at.to_owned(),
            found: shown(&seen),
            file: known.path().to_owned(),
            line: expected.line,
        }),
        (Err(error), ..) => Err(error),
        (Ok(link), None, Some(seen)) => Ok((link, Some((known, seen)))),
        (Ok(link), ..) => Ok((link, None)),
    }
}

fn tls_handshake(
    socket: Socket,
    at: &str,
    mut config: ClientConfig,
    name: ServerName<'static>,
) -> Result<Link, LinkError> {
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    let here = || at.to_owned();
    let connection = ClientConnection::new(Arc::new(config), name)
        .map_err(|error| LinkError::Tls { at: here(), error })?;
    match Tls::handshake(connection.into(), &socket)
        .map_err(|error| LinkError::from_stream_error(at, error))?
    {
        Ok(tls) => Ok(Link::tls(socket, tls)),
        Err(rustls::Error::InvalidMessage(_)) => Err(LinkError::NotTls { at: here() }),
        Err(error) => Err(LinkError::Tls { at: here(), error }),
    }
}

fn authority_config(file: &Path) -> Result<ClientConfig, LinkError> {
    let mut roots = RootCertStore::empty();
    let bad = |error: &dyn std::fmt::Display| {
        LinkError::file(file, format!("no certificates of an authority ({error}): name a PEM file with --ca"))
    };
    let certificates = CertificateDer::pem_file_iter(file).map_err(|error| bad(&error))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| bad(&error))?;
        roots.add(certificate).map_err(|error| bad(&error))?;
    }
    if roots.is_empty() {
        return Err(bad(&"it has none"));
    }
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
    let builder = builder.map_err(|error| LinkError::Tls { at: file.display().to_string(), error })?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Verifier that checks the key alone and ignores names, dates and authorities.
#[derive(Debug)]
struct KeyVerifier {
    provider: Arc<CryptoProvider>,
    expected: Option<[u8; 32]>,
    presented: Mutex<Option<[u8; 32]>>,
}

impl ServerCertVerifier for KeyVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let seen = fingerprint(end_entity);
        *self.presented.lock() = Some(seen);
        if self.expected.is_some_and(|expected| expected != seen) {
            return Err(rustls::CertificateError::ApplicationVerificationFailure.into());
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
