//! Changes outside every protocol: a test's preparation, and changes by the host on its own disk.

use super::ModelFs;
use nigh_types::{Access, Call, Credentials, Errno, Name, NodeId, NodeRef, Reply, Request, Time, WriteFlags};

impl ModelFs {
    /// The inode number that a name of a directory leads to.
    #[must_use]
    pub fn child_of(&self, dir: u64, name: &Name) -> Option<u64> {
        self.nodes.get(&dir)?;
        self.child(dir, name)
    }

    /// The inode at a path of names separated by `/`; the root for an empty path.
    #[must_use]
    pub fn find(&self, path: &str) -> Option<NodeId> {
        let names = path.split('/').filter(|part| !part.is_empty());
        let ino = names
            .into_iter()
            .try_fold(self.root.ino, |at, part| self.child(at, &Name::new(part.as_bytes()).ok()?))?;
        Some(self.nodes[&ino].id)
    }

    /// Creates a directory, with its missing ancestors.
    ///
    /// # Panics
    /// If an inode of another type has the name.
    pub fn plant_dir(&mut self, now: Time, path: &str) -> NodeId {
        let mut at = self.root;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let name = planted_name(part);
            at = match self.child(at.ino, &name) {
                Some(ino) => self.nodes[&ino].id,
                None => self
                    .plant(now, Call::Mkdir { dir: NodeRef::without_hint(at), name, mode: 0o755, umask: 0 }),
            };
        }
        at
    }

    /// Writes a whole file, new or not.
    ///
    /// # Panics
    /// If an inode of another type has the name.
    pub fn plant_file(&mut self, now: Time, path: &str, data: &[u8]) -> NodeId {
        let (dir, name) = self.plant_parent(now, path);
        let access =
            Access { read: false, write: true, truncate: true, direct: false, sync: false, append: false };
        let call = Call::Create { dir, name, mode: 0o644, umask: 0, exclusive: false, access };
        let node = self.plant(now, call);
        let (place, data, flags) = (NodeRef::without_hint(node), data.to_vec(), WriteFlags::default());
        let write = Call::Write { node: place, handle: None, offset: 0, data, flags };
        self.execute_as_host(now, write).expect("a planted file takes data");
        node
    }

    /// Executes a call as the host's root, without a client.
    ///
    /// # Errors
    /// Those of the call.
    pub fn execute_as_host(&mut self, now: Time, call: Call) -> Result<Reply, Errno> {
        let by_hint_only = std::mem::replace(&mut self.config.by_hint_only, false);
        let request = Request { credentials: Credentials::default(), mutation_id: None, call };
        let response = self.execute(now, &request).into_iter().last();
        self.config.by_hint_only = by_hint_only;
        response.map_or(Ok(Reply::Done), |response| response.result)
    }

    fn plant_parent(&mut self, now: Time, path: &str) -> (NodeRef, Name) {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        (NodeRef::without_hint(self.plant_dir(now, dir)), planted_name(name))
    }

    fn plant(&mut self, now: Time, call: Call) -> NodeId {
        match self.execute_as_host(now, call) {
            Ok(Reply::Created { entry, handle, .. }) => {
                self.release(handle.as_slice());
                entry.id
            }
            other => panic!("could not be planted: {other:?}"),
        }
    }
}

fn planted_name(part: &str) -> Name {
    Name::new(part.as_bytes()).expect("a planted path has proper names")
}
