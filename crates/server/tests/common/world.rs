//! A served directory for several clients.

use super::client::Client;
use nigh_server::{LeaseConfig, Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A server with one export: `d` with a file `f`, a file `h` that is a hard link to `d2/h2`, and an empty directory
/// `e`; `d2` with a file `old`.
pub struct World {
    pub server: Arc<Server>,
    pub dir: TempDir,
    options: ServerOptions,
    _state: TempDir,
}

impl World {
    pub fn new() -> World {
        World::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut ServerOptions)) -> World {
        let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut options = ServerOptions::new(state.path().to_owned());
        change(&mut options);
        let server = Server::new(options.clone()).unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["d", "d/e", "d2"] {
            fs::create_dir(path(name)).unwrap();
        }
        for name in ["d/f", "d/h", "d2/old"] {
            fs::write(path(name), "12345678").unwrap();
        }
        fs::hard_link(path("d/h"), path("d2/h2")).unwrap();
        World { server, dir, options, _state: state }
    }

    /// Stops the server without a close to its clients, and starts a new one on the same state.
    pub fn restart(&mut self) {
        self.server.end_sessions("the test starts it again");
        let give_up = Instant::now() + Duration::from_secs(10);
        while self.server.session_count() > 0 || Arc::strong_count(&self.server) > 1 {
            assert!(Instant::now() < give_up);
            std::thread::sleep(Duration::from_millis(5));
        }
        // The old server unlocks its state directory first.
        let elsewhere = tempfile::tempdir().unwrap();
        let options = ServerOptions { state_dir: elsewhere.path().to_owned(), ..self.options.clone() };
        self.server = Server::new(options).unwrap();
        self.server = Server::new(self.options.clone()).unwrap();
    }

    /// With a session term of 2 s, and a recall patience of 300 ms.
    pub fn hasty() -> World {
        World::with_patience(Span::from_millis(300))
    }

    /// With a session term of 2 s.
    pub fn with_patience(patience: Span) -> World {
        World::with(|options| {
            options.session_term = Span::from_secs(2);
            options.leases = LeaseConfig { patience, ..options.leases };
        })
    }

    pub fn client(&self) -> Client {
        self.client_of(self.dir.path())
    }

    pub fn client_of(&self, path: &Path) -> Client {
        Client::connect(&self.server, path, Term::Session)
    }

    /// A client that holds every lease, and its nodes by path.
    pub fn warm(&self) -> (Client, Vec<(&'static str, NodeRef)>) {
        let mut client = self.client();
        let names = ["", "d", "d2", "d/e", "d/f", "d/h", "d2/old"];
        let places: Vec<_> = names.iter().map(|name| (*name, client.place(name))).collect();
        for (name, place) in &places {
            if matches!(*name, "d/f" | "d/h" | "d2/old") {
                assert_eq!(client.read(place).1.len(), 1);
            } else {
                client.list(place);
            }
            client.attr(place);
        }
        (client, places)
    }
}

/// Continues the session over a new connection.
pub fn again(world: &World, client: &mut Client) {
    client.go_on_over(world.server.serve_in_process().unwrap());
}
