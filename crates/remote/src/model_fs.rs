//! An in-memory filesystem that executes every call.
//!
//! It takes the place of an export: behind the [`crate::fake`], behind the native protocol's tests, and as the simplest
//! implementation that passes the [`crate::conformance`] suite. It acts as root: it does not check permissions. It
//! numbers grants; the server of the tree keeps track of their holders.

mod affected;
mod content;
mod make;
mod mutate;
mod node;
mod plant;
mod query;
mod rename;
mod xattr;

pub use affected::Change;

use nigh_types::{
    Attr, Call, CookieKey, DataVersion, Entry, Errno, Grant, GrantId, Handle, Kind, LeaseScope, Mode, Name,
    NodeId, NodeRef, Reply, Request, Response, SessionParams, Term, Time, Timestamp,
};
use node::{Body, Directory, Node};
use std::collections::{BTreeMap, BTreeSet};

/// Options of a tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelFsConfig {
    pub cookie_key: CookieKey,
    /// Mode of every grant. `Mode::Write` is for one client: the model excludes no other.
    pub mode: Mode,
    /// Term of every grant.
    pub term: Term,
    /// Whether grants are marked recallable.
    pub recallable: bool,
    /// Entries in a chunk of a listing (more only where cookies are equal); at least 1.
    pub chunk_entries: u32,
    /// Whether new inodes reuse the numbers of deleted ones, with another generation.
    pub reuse_inos: bool,
    /// Whether the generation distinguishes inodes that reuse a number, as birth times do.
    pub distinct_generations: bool,
    /// Whether a reference is resolved only by its hint, a handle, or an earlier path, and not by its id alone.
    pub by_hint_only: bool,
}

impl Default for ModelFsConfig {
    fn default() -> ModelFsConfig {
        ModelFsConfig {
            cookie_key: CookieKey(*b"sixteen bytes ok"),
            mode: Mode::Read,
            term: Term::Session,
            recallable: true,
            chunk_entries: 256,
            reuse_inos: false,
            distinct_generations: true,
            by_hint_only: false,
        }
    }
}

/// The filesystem. Its root is inode 1.
#[derive(Clone, Debug)]
pub struct ModelFs {
    config: ModelFsConfig,
    nodes: BTreeMap<u64, Node>,
    root: NodeId,
    next_ino: u64,
    /// Inode numbers free for reuse.
    free_inos: Vec<u64>,
    generation: u64,
    handles: BTreeMap<Handle, u64>,
    next_handle: u64,
    next_grant: u64,
    /// Inodes to which a `Call::ResolvePath` has led.
    resolved: BTreeSet<u64>,
    /// By client and inode: consecutive versions of a file's data that this client's changes alone have made.
    followed: BTreeMap<(u64, u64), Vec<DataVersion>>,
}

/// Result of a call, before attributes are read and grants numbered.
struct Outcome {
    reply: Reply,
    /// Other inodes whose attributes go into the response.
    touched: Vec<u64>,
    granted: Vec<(NodeId, LeaseScope)>,
}

impl Outcome {
    fn plain(reply: Reply) -> Outcome {
        Outcome { reply, touched: Vec::new(), granted: Vec::new() }
    }
}

impl Default for ModelFs {
    fn default() -> ModelFs {
        ModelFs::new(ModelFsConfig::default())
    }
}

impl ModelFs {
    /// An empty export.
    #[must_use]
    pub fn new(config: ModelFsConfig) -> ModelFs {
        let root = NodeId { ino: 1, generation: 1 << 32 };
        let mut tree = ModelFs {
            config,
            nodes: BTreeMap::new(),
            root,
            next_ino: 2,
            free_inos: Vec::new(),
            generation: 1,
            handles: BTreeMap::new(),
            next_handle: 1,
            next_grant: 1,
            resolved: BTreeSet::new(),
            followed: BTreeMap::new(),
        };
        let attr = Attr { mode: 0o040_755, nlink: 2, size: 4096, blocks: 8, ..Attr::default() };
        tree.nodes.insert(root.ino, Node::new(root, attr, Body::Directory(Directory::default())));
        tree
    }

    #[must_use]
    pub fn config(&self) -> &ModelFsConfig {
        &self.config
    }

    #[must_use]
    pub fn root(&self) -> NodeId {
        self.root
    }

    /// The facts that `call` would change if executed now. The tree's server recalls the grants that cover them before
    /// it executes the call.
    #[must_use]
    pub fn affected(&self, call: &Call) -> Vec<Change> {
        affected::of(self, call)
    }

    /// Parameters of a session with a server of this tree that has no optional ability.
    ///
    /// # Panics
    /// Never: the root always exists.
    #[must_use]
    pub fn session(&self, term: Term) -> SessionParams {
        let root_attr = self.nodes[&self.root.ino].attr;
        SessionParams::plain(self.root, root_attr, self.config.cookie_key, term)
    }

    /// Executes one call at `now`; lock calls get `ENOSYS`. A listing has one response for each chunk, in order; a
    /// release or pin has none; every other call has exactly one.
    pub fn execute(&mut self, now: Time, request: &Request) -> Vec<Response> {
        match &request.call {
            Call::Release { handles } => {
                self.release(handles);
                Vec::new()
            }
            Call::PinOpen { node, handle, .. } => {
                self.pin_open(node, *handle);
                Vec::new()
            }
            Call::List { dir } => self.list(dir),
            Call::ListNames { dir, after } => self.dirents(dir, *after),
            _ => vec![self.execute_one(moment(now), request)],
        }
    }

    /// Attributes of an existing inode.
    #[must_use]
    pub fn attr(&self, node: NodeId) -> Option<Attr> {
        self.nodes.get(&node.ino).filter(|found| found.id == node).map(|found| found.attr)
    }

    /// Entry of a name in an existing directory: `Some(None)` if the name is absent.
    #[must_use]
    pub fn entry(&self, dir: NodeId, name: &Name) -> Option<Option<Entry>> {
        self.attr(dir)?;
        Some(self.child(dir.ino, name).map(|ino| self.nodes[&ino].entry()))
    }

    /// Records that the client's kernel has the file's current data, not the version `then` that its write names, or
    /// this data with changes of the client's own. The tree's server knows that no other client has changed it since.
    pub fn record_own_version(&mut self, client: u64, node: NodeId, then: DataVersion) {
        if let Some(attr) = self.attr(node) {
            let present = DataVersion::of(&attr);
            let states = self.followed.entry((client, node.ino)).or_default();
            if states.last() != Some(&present) {
                states.clear();
            }
            states.extend([then, present]);
        }
    }

    /// The inode of an open handle.
    #[must_use]
    pub fn opened(&self, handle: Handle) -> Option<NodeId> {
        self.handles.get(&handle).map(|ino| self.nodes[ino].id)
    }

    /// The regular file of a reference. The tree's server keeps its locks ([`crate::locks::Locks`]).
    ///
    /// # Errors
    /// `ESTALE`, or why it is not a regular file.
    pub fn lockable(&self, place: &NodeRef) -> Result<NodeId, Errno> {
        let ino = self.regular(self.reach(place)?)?;
        Ok(self.nodes[&ino].id)
    }

    /// Opens a file under a handle that the client chose. Does nothing if the file is unreachable.
    fn pin_open(&mut self, place: &NodeRef, handle: Handle) {
        let found = self.reach(place).and_then(|ino| self.regular(ino));
        if let Ok(ino) = found {
            // A handle in use keeps its file.
            let _ = self.open_as(ino, handle);
        }
    }

    /// Closes handles; unknown ones are ignored.
    pub fn release(&mut self, handles: &[Handle]) {
        for handle in handles {
            if let Some(ino) = self.handles.remove(handle) {
                self.node_mut(ino).opens -= 1;
                self.reap(ino);
            }
        }
    }

    fn execute_one(&mut self, now: Timestamp, request: &Request) -> Response {
        let outcome = match self.query(&request.call) {
            Some(outcome) => outcome,
            None => self.mutate(now, request),
        };
        match outcome {
            Err(errno) => Response::plain(Err(errno)),
            Ok(outcome) => self.respond(outcome),
        }
    }

    fn respond(&mut self, outcome: Outcome) -> Response {
        let Outcome { reply, mut touched, granted } = outcome;
        touched.dedup();
        let after = touched.iter().map(|ino| (self.nodes[ino].id, self.nodes[ino].attr)).collect();
        for ino in touched {
            self.reap(ino);
        }
        let grants = self.grants(granted);
        Response { result: Ok(reply), after, grants, last: true }
    }

    fn grants(&mut self, mut facts: Vec<(NodeId, LeaseScope)>) -> Vec<Grant> {
        facts.retain(|(node, _)| self.attr(*node).is_some());
        let mut unique: Vec<(NodeId, LeaseScope)> = Vec::new();
        for fact in facts {
            if !unique.contains(&fact) {
                unique.push(fact);
            }
        }
        unique.into_iter().map(|(node, covers)| self.grant(node, covers)).collect()
    }

    fn grant(&mut self, node: NodeId, covers: LeaseScope) -> Grant {
        let id = GrantId(self.next_grant);
        self.next_grant += 1;
        let ModelFsConfig { mode, term, recallable, .. } = self.config;
        Grant { id, node, covers, mode, term, recallable, shared: false }
    }

    /// The grant that covers a node's attributes: the grant on the names of the directory in which the caller looked,
    /// if the node's link is there, else the node's own grant.
    fn covering(&self, ino: u64, dir: Option<u64>) -> (NodeId, LeaseScope) {
        let node = &self.nodes[&ino];
        match node.links.first() {
            Some((parent, _)) if node.attr.covered_by_parent() && dir == Some(*parent) => {
                (self.nodes[parent].id, LeaseScope::Directory)
            }
            _ => (node.id, LeaseScope::Attributes),
        }
    }

    fn node_mut(&mut self, ino: u64) -> &mut Node {
        self.nodes.get_mut(&ino).expect("an inode of this tree is there while something refers to it")
    }

    /// The inode of a reference; it may have lost its last name while it is open.
    fn reach(&self, place: &NodeRef) -> Result<u64, Errno> {
        let node = self.nodes.get(&place.node.ino).filter(|node| node.id == place.node);
        let node = node.ok_or(Errno::STALE)?;
        let hinted = match &place.path_hint {
            Some((parent, name)) => self.child(parent.ino, name) == Some(node.id.ino),
            None => node.id == self.root,
        };
        let known = hinted || node.opens > 0 || self.resolved.contains(&node.id.ino);
        if self.config.by_hint_only && !known {
            return Err(Errno::STALE);
        }
        Ok(node.id.ino)
    }

    /// The directory in which a reference's hint leads to its node.
    fn reached_in(&self, place: &NodeRef) -> Option<u64> {
        let (dir, name) = place.path_hint.as_ref()?;
        (self.child(dir.ino, name) == Some(place.node.ino)).then_some(dir.ino)
    }

    fn reach_dir(&self, place: &NodeRef) -> Result<u64, Errno> {
        let ino = self.reach(place)?;
        if !self.nodes[&ino].attr.is_dir() {
            return Err(Errno::NOTDIR);
        }
        Ok(ino)
    }

    /// The inode of an open handle, or else of a reference.
    fn reach_open(&self, place: &NodeRef, handle: Option<Handle>) -> Result<u64, Errno> {
        let Some(handle) = handle else { return self.reach(place) };
        let Some(&ino) = self.handles.get(&handle) else {
            return if handle.is_client_assigned() { self.reach(place) } else { Err(Errno::BADF) };
        };
        if self.nodes[&ino].id != place.node {
            return Err(Errno::BADF);
        }
        Ok(ino)
    }

    fn child(&self, dir: u64, name: &Name) -> Option<u64> {
        match &self.nodes.get(&dir)?.body {
            Body::Directory(entries) => entries.find(self.config.cookie_key, name),
            _ => None,
        }
    }

    fn open(&mut self, ino: u64) -> Handle {
        while self.handles.contains_key(&Handle(self.next_handle)) {
            self.next_handle += 1;
        }
        let handle = Handle(self.next_handle);
        self.next_handle += 1;
        self.handles.insert(handle, ino);
        self.node_mut(ino).opens += 1;
        handle
    }

    /// Opens an inode under a given handle.
    fn open_as(&mut self, ino: u64, handle: Handle) -> Result<(), Errno> {
        if self.handles.contains_key(&handle) {
            return Err(Errno::INVAL);
        }
        self.handles.insert(handle, ino);
        self.node_mut(ino).opens += 1;
        Ok(())
    }

    /// Drops all resolved paths, as a restart does.
    pub(crate) fn forget_paths(&mut self) {
        self.resolved.clear();
    }

    /// Reopens an inode under the handle of an earlier reply; false if the inode is deleted or the handle in use.
    pub(crate) fn pin_again(&mut self, node: NodeId, handle: Handle) -> bool {
        self.attr(node).is_some() && self.open_as(node.ino, handle).is_ok()
    }

    /// Deletes an inode without names and handles.
    fn reap(&mut self, ino: u64) {
        let gone = self.nodes.get(&ino).is_some_and(|node| node.attr.nlink == 0 && node.opens == 0);
        if gone {
            self.nodes.remove(&ino);
            self.resolved.remove(&ino);
            self.followed.retain(|(_, of), _| *of != ino);
            if self.config.reuse_inos {
                self.free_inos.push(ino);
            }
        }
    }

    /// A regular file, by reference or handle.
    fn reach_file(&self, place: &NodeRef, handle: Option<Handle>) -> Result<u64, Errno> {
        let ino = self.reach_open(place, handle)?;
        self.regular(ino)
    }

    fn regular(&self, ino: u64) -> Result<u64, Errno> {
        match self.nodes[&ino].attr.kind() {
            Kind::File => Ok(ino),
            Kind::Directory => Err(Errno::ISDIR),
            Kind::Symlink => Err(Errno::LOOP),
            _ => Err(Errno::INVAL),
        }
    }
}

/// A time as the filesystem stores it: this tree's clock started in November 2023.
fn moment(now: Time) -> Timestamp {
    let nanos = u32::try_from(now.0 % 1_000_000_000).unwrap_or(0);
    Timestamp { secs: 1_700_000_000 + (now.0 / 1_000_000_000).cast_signed(), nanos }
}

#[cfg(test)]
mod tests;
