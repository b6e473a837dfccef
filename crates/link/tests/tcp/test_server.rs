//! A server's TCP listener on a local port.

use nigh_link::tcp::{Acceptor, Target, Trust};
use nigh_link::{Link, LinkError, Token, UnauthenticatedLimit};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// A listener on a local port, with the results of all accepted connections.
pub struct House {
    pub dir: TempDir,
    pub address: SocketAddr,
    admitted: Receiver<Result<Link, LinkError>>,
}

impl House {
    pub fn new(token: bool, tls: bool) -> House {
        let dir = tempfile::tempdir().unwrap();
        let token = token.then(|| Token::read_or_make(&dir.path().join("token")).unwrap());
        let door = if tls {
            Acceptor::with_tls(&dir.path().join("server"), token).unwrap()
        } else {
            Acceptor::plaintext(token)
        };
        House::with_acceptor(dir, door, TcpListener::bind("127.0.0.1:0").unwrap())
    }

    pub fn with_acceptor(dir: TempDir, door: Acceptor, listener: TcpListener) -> House {
        let address = listener.local_addr().unwrap();
        let (sender, admitted) = channel();
        let (door, lobby) = (Arc::new(door), UnauthenticatedLimit::new(64));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(ticket) = lobby.enter(&stream) else { continue };
                let (door, sender) = (Arc::clone(&door), sender.clone());
                thread::spawn(move || {
                    let admitted = door.accept(stream);
                    drop(ticket);
                    let _ = sender.send(admitted);
                });
            }
        });
        House { dir, address, admitted }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn target(&self) -> Target {
        let token = self.path("token");
        Target {
            host: "127.0.0.1".into(),
            port: self.address.port(),
            trust: Trust::Known(self.path("known_servers")),
            token: token.exists().then_some(token),
        }
    }

    pub fn plain(&self) -> Target {
        Target { trust: Trust::Plaintext, ..self.target() }
    }

    pub fn other_token(&self) -> PathBuf {
        let path = self.path("other-token");
        Token::read_or_make(&path).unwrap();
        path
    }

    pub fn next(&self) -> Result<Link, LinkError> {
        self.admitted.recv_timeout(Duration::from_secs(20)).unwrap()
    }
}
