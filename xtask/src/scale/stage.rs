//! The setup of the measurements: the server, its directories, one client that makes changes, and many clients with
//! leases.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use nigh_types::{Call, CallId, LeaseScope, Name, NodeId, NodeRef, Reply};

use super::event_loop::SimClients;
use super::server::Server;

/// The member that makes changes; it holds no lease on what it changes.
pub const WRITER: usize = 0;

pub struct Stage {
    pub server: Server,
    pub crowd: SimClients,
    /// All clients but the maker.
    pub clients: Range<usize>,
    root: NodeId,
    places: BTreeMap<String, NodeId>,
}

impl Stage {
    /// Starts a server with these directories, each with one file, and attaches the maker. All clients request these
    /// features.
    pub fn new(
        nigh: &Path,
        dir: &Path,
        directories: impl Iterator<Item = String>,
        features: u64,
    ) -> Result<Stage> {
        for name in directories {
            let path = dir.join("export").join(name);
            fs::create_dir_all(&path)?;
            fs::write(path.join("file"), "")?;
        }
        let server = Server::start(nigh, dir)?;
        let mut crowd = SimClients::new(&server.socket, "crowd", features)?;
        crowd.attach(1)?;
        let root = crowd.clients[WRITER].attached.as_ref().context("the maker is attached")?.root;
        let mut stage = Stage { server, crowd, clients: 1..1, root, places: BTreeMap::new() };
        stage.list()?;
        Ok(stage)
    }

    /// Finds the directories' ids, which are equal for all clients.
    fn list(&mut self) -> Result<()> {
        let id = self.crowd.call(WRITER, Call::List { dir: NodeRef::without_hint(self.root) })?;
        for part in self.crowd.answer(WRITER, id)?.parts {
            let Ok(Reply::Listed(listed)) = part.result else { bail!("the listing: {:?}", part.result) };
            for (name, entry) in listed.entries {
                self.places.insert(String::from_utf8_lossy(name.as_bytes()).into_owned(), entry.id);
            }
        }
        Ok(())
    }

    pub fn attach(&mut self, count: usize) -> Result<()> {
        let first = self.crowd.attach(count)?;
        self.clients = first..first + count;
        Ok(())
    }

    /// Attaches clients with a cache.
    pub fn attach_readers(&mut self, count: usize) -> Result<()> {
        let first = self.crowd.attach_readers(count)?;
        self.clients = first..first + count;
        Ok(())
    }

    pub fn place(&self, directory: &str) -> Result<NodeRef> {
        let node = *self.places.get(directory).with_context(|| format!("no directory {directory}"))?;
        Ok(NodeRef { node, path_hint: Some((self.root, name(directory)?)) })
    }

    /// Acquires directory leases for these clients; returns their number.
    pub fn hold(&mut self, clients: Range<usize>, directories: &[String]) -> Result<u64> {
        // More at a time, up to each client's limit, does not help: the server has eight threads.
        const AT_ONCE: usize = 16;
        let mut granted = 0;
        for some in directories.chunks(AT_ONCE) {
            let mut asked: Vec<(usize, CallId, NodeId)> = Vec::new();
            for number in clients.clone() {
                for directory in some {
                    let dir = self.place(directory)?;
                    let node = dir.node;
                    let id = self.crowd.call(number, Call::Lookup { dir, name: name("absent")? })?;
                    asked.push((number, id, node));
                }
            }
            self.crowd.settle()?;
            for (number, id, node) in asked {
                let answer = self.crowd.answer(number, id)?;
                let mut grants = answer.parts.iter().flat_map(|part| &part.grants);
                let given = grants.any(|grant| (grant.node, grant.covers) == (node, LeaseScope::Directory));
                ensure!(given, "client {number} was not granted the names of inode {}", node.ino);
                granted += 1;
            }
        }
        Ok(granted)
    }

    /// Checks that no client has lost its session.
    pub fn check_all_stand(&self) -> Result<()> {
        for (number, member) in self.crowd.clients.iter().enumerate() {
            if let Some(why) = &member.lost {
                bail!("client {number} lost its session: {why}");
            }
        }
        Ok(())
    }
}

pub fn name(text: &str) -> Result<Name> {
    Name::new(text.as_bytes()).ok().with_context(|| format!("{text} is no name"))
}

pub fn mkdir(dir: NodeRef, text: &str) -> Result<Call> {
    Ok(Call::Mkdir { dir, name: name(text)?, mode: 0o700, umask: 0 })
}
