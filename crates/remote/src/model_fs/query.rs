//! Calls without effects.

use super::node::Body;
use super::xattr;
use super::{ModelFs, Outcome};
use nigh_types::{
    Access, Call, Cookie, Dirent, Entries, Errno, Handle, Kind, LeaseScope, Name, NodeId, NodeRef, Reply,
    Response, Space,
};

impl ModelFs {
    /// Executes a call without effects; `None`: the call is a mutation.
    pub(super) fn query(&mut self, call: &Call) -> Option<Result<Outcome, Errno>> {
        Some(match call {
            Call::Lookup { dir, name } => self.lookup(dir, name),
            Call::ResolvePath { node, names } => self.walk(*node, names),
            Call::GetAttr { node } => self.getattr(node),
            Call::LookupNumber { ino } => self.by_number(*ino),
            Call::ReadLink { node } => self.readlink(node),
            Call::Xattrs { node } => xattr::xattrs(self, node),
            Call::Xattr { node, name } => xattr::xattr(self, node, name),
            Call::StatFs { node } => self.statfs(node),
            Call::Open { node, access: access @ Access { truncate: false, .. } } => {
                self.open_file(node, *access)
            }
            Call::Reopen { node, handle, .. } => self.open_again(node, *handle),
            Call::Read { node, handle, offset, length } => self.read(node, *handle, *offset, *length),
            Call::Seek { node, handle, offset, data } => self.seek(node, *handle, *offset, *data),
            Call::GetFlags { node } => self.getflags(node),
            _ => return None,
        })
    }

    fn lookup(&self, dir: &NodeRef, name: &Name) -> Result<Outcome, Errno> {
        let dir = self.reach_dir(dir)?;
        let mut granted = vec![(self.nodes[&dir].id, LeaseScope::Directory)];
        let found = self.child(dir, name);
        granted.extend(found.map(|ino| self.covering(ino, Some(dir))));
        let reply = Reply::Entry(found.map(|ino| self.nodes[&ino].entry()));
        Ok(Outcome { reply, touched: Vec::new(), granted })
    }

    fn walk(&mut self, node: NodeId, names: &[Name]) -> Result<Outcome, Errno> {
        let mut at = self.root.ino;
        for name in names {
            at = self.child(at, name).ok_or(Errno::STALE)?;
        }
        if self.nodes[&at].id != node {
            return Err(Errno::STALE);
        }
        self.resolved.insert(at);
        Ok(Outcome::plain(Reply::Done))
    }

    fn getattr(&self, place: &NodeRef) -> Result<Outcome, Errno> {
        let ino = self.reach(place)?;
        Ok(self.attr_outcome(ino, place))
    }

    fn by_number(&self, ino: u64) -> Result<Outcome, Errno> {
        let node = self.nodes.get(&ino).filter(|node| node.attr.nlink > 0).ok_or(Errno::STALE)?;
        let home = node.links.first().map(|(dir, name)| (self.nodes[dir].id, name.clone()));
        if home.is_none() && node.id != self.root {
            return Err(Errno::STALE);
        }
        let granted = vec![self.covering(ino, home.as_ref().map(|(dir, _)| dir.ino))];
        Ok(Outcome {
            reply: Reply::Found { node: node.id, attr: node.attr, parent_entry: home },
            touched: Vec::new(),
            granted,
        })
    }

    pub(super) fn attr_outcome(&self, ino: u64, place: &NodeRef) -> Outcome {
        let node = &self.nodes[&ino];
        let granted = vec![self.covering(ino, self.reached_in(place))];
        Outcome { reply: Reply::Attr(node.id, node.attr), touched: Vec::new(), granted }
    }

    /// A reply with a fact under the grant that covers the node's attributes.
    pub(super) fn fact(&self, ino: u64, place: &NodeRef, reply: Reply) -> Outcome {
        Outcome { reply, touched: Vec::new(), granted: vec![self.covering(ino, self.reached_in(place))] }
    }

    fn readlink(&self, place: &NodeRef) -> Result<Outcome, Errno> {
        let ino = self.reach(place)?;
        match &self.nodes[&ino].body {
            Body::Symlink(target) => Ok(self.fact(ino, place, Reply::Target(target.clone()))),
            _ => Err(Errno::INVAL),
        }
    }

    fn statfs(&self, place: &NodeRef) -> Result<Outcome, Errno> {
        self.reach(place)?;
        let files = self.nodes.len() as u64;
        Ok(Outcome::plain(Reply::Space(Space {
            blocks: 1 << 28,
            blocks_free: 1 << 27,
            blocks_available: 1 << 27,
            files: files + (1 << 20),
            files_free: 1 << 20,
            block_size: 4096,
            fragment_size: 4096,
            name_max: 255,
        })))
    }

    pub(super) fn open_file(&mut self, place: &NodeRef, _access: Access) -> Result<Outcome, Errno> {
        let ino = self.openable(place)?;
        let handle = self.open(ino);
        Ok(self.opened_outcome(ino, handle))
    }

    fn open_again(&mut self, place: &NodeRef, handle: Handle) -> Result<Outcome, Errno> {
        let ino = self.openable(place)?;
        self.open_as(ino, handle)?;
        Ok(self.opened_outcome(ino, handle))
    }

    fn openable(&self, place: &NodeRef) -> Result<u64, Errno> {
        let ino = self.reach(place)?;
        match self.nodes[&ino].attr.kind() {
            Kind::File => Ok(ino),
            Kind::Directory => Err(Errno::ISDIR),
            Kind::Symlink => Err(Errno::LOOP),
            _ => Err(Errno::NXIO),
        }
    }

    fn opened_outcome(&self, ino: u64, handle: Handle) -> Outcome {
        let node = &self.nodes[&ino];
        let granted = vec![(node.id, LeaseScope::Data), (node.id, LeaseScope::Attributes)];
        Outcome { reply: Reply::Opened { handle, attr: node.attr }, touched: Vec::new(), granted }
    }

    fn read(
        &self,
        place: &NodeRef,
        handle: Option<Handle>,
        offset: u64,
        length: u32,
    ) -> Result<Outcome, Errno> {
        let ino = self.reach_file(place, handle)?;
        let node = &self.nodes[&ino];
        let length = u64::from(length).min(node.attr.size.saturating_sub(offset));
        match &node.body {
            Body::File(content) => Ok(Outcome {
                reply: Reply::Data(content.read(offset, length)),
                touched: vec![ino],
                granted: vec![(node.id, LeaseScope::Data)],
            }),
            _ => Err(Errno::INVAL),
        }
    }

    fn seek(
        &self,
        place: &NodeRef,
        handle: Option<Handle>,
        offset: u64,
        data: bool,
    ) -> Result<Outcome, Errno> {
        let ino = self.reach_file(place, handle)?;
        let node = &self.nodes[&ino];
        let Body::File(content) = &node.body else { return Err(Errno::INVAL) };
        let size = node.attr.size;
        if offset >= size {
            return Err(Errno::NXIO);
        }
        let found = match data {
            true => content.next_data(offset, size).ok_or(Errno::NXIO)?,
            false => content.next_hole(offset, size),
        };
        Ok(Outcome::plain(Reply::Offset(found)))
    }

    fn getflags(&self, place: &NodeRef) -> Result<Outcome, Errno> {
        let ino = self.reach(place)?;
        match self.nodes[&ino].attr.kind() {
            Kind::File | Kind::Directory => Ok(Outcome::plain(Reply::Flags(0))),
            _ => Err(Errno::NOTTY),
        }
    }

    /// All chunks of a listing, as of now.
    pub(crate) fn list(&mut self, place: &NodeRef) -> Vec<Response> {
        let dir = match self.reach_dir(place) {
            Ok(dir) => dir,
            Err(errno) => return vec![Response::plain(Err(errno))],
        };
        let id = self.nodes[&dir].id;
        let parts = self.parts(dir);
        let count = parts.len();
        let mut responses = Vec::new();
        for (i, inos) in parts.into_iter().enumerate() {
            let mut facts = if i == 0 {
                vec![(id, LeaseScope::Directory), (id, LeaseScope::Attributes)]
            } else {
                Vec::new()
            };
            let uncovered = inos.iter().filter(|(_, ino)| !self.nodes[ino].attr.covered_by_parent());
            facts.extend(uncovered.map(|(_, ino)| (self.nodes[ino].id, LeaseScope::Attributes)));
            let grants = self.grants(facts);
            let entries = inos.into_iter().map(|(name, ino)| (name, self.nodes[&ino].entry())).collect();
            let last = i + 1 == count;
            let after = if last { vec![(id, self.nodes[&dir].attr)] } else { Vec::new() };
            responses.push(Response { result: Ok(Reply::Listed(Entries { entries })), after, grants, last });
        }
        responses
    }

    /// The names after a cookie, as of now, in the chunks of a listing.
    pub(crate) fn dirents(&mut self, place: &NodeRef, after: Cookie) -> Vec<Response> {
        let dir = match self.reach_dir(place) {
            Ok(dir) => dir,
            Err(errno) => return vec![Response::plain(Err(errno))],
        };
        let parts = self.parts(dir);
        let count = parts.len();
        let dirent = |(name, ino): (Name, u64)| {
            let kind = Some(self.nodes[&ino].attr.kind());
            Dirent { name, ino, kind }
        };
        let key = self.config.cookie_key;
        let part = |(i, inos): (usize, Vec<(Name, u64)>)| {
            let behind = inos.into_iter().filter(|(name, _)| key.cookie(name.as_bytes()) > after);
            let result = Ok(Reply::Dirents(behind.map(dirent).collect()));
            Response { last: i + 1 == count, ..Response::plain(result) }
        };
        parts.into_iter().enumerate().map(part).collect()
    }

    /// Names and inodes in chunks, split between different cookies. An empty directory has one chunk.
    fn parts(&self, dir: u64) -> Vec<Vec<(Name, u64)>> {
        let Body::Directory(directory) = &self.nodes[&dir].body else { return vec![Vec::new()] };
        let mut parts: Vec<Vec<(Name, u64)>> = vec![Vec::new()];
        let mut last: Option<Cookie> = None;
        let mut room = self.config.chunk_entries.max(1);
        for ((cookie, name), ino) in &directory.entries {
            if room == 0 && last != Some(*cookie) {
                parts.push(Vec::new());
                room = self.config.chunk_entries.max(1);
            }
            parts.last_mut().expect("there is a part").push((name.clone(), *ino));
            room = room.saturating_sub(1);
            last = Some(*cookie);
        }
        parts
    }
}
