//! A server for tests: 9P2000.L over the in-memory tree, whose fids are inodes.

#![allow(dead_code, reason = "each test uses a part")]

mod answers;

use nigh_ninep::{Qid, Rmessage, ShortSequence, Tmessage, flags};
use nigh_remote::locks::Locks;
use nigh_remote::model_fs::ModelFs;
use nigh_types::{
    Access, Call, Credentials, Errno, Handle, MutationId, Name, NodeId, NodeRef, Reply, Request, Response,
    Time,
};
use std::collections::BTreeMap;

/// The node of a fid.
#[derive(Clone, Debug)]
pub struct Stands {
    pub node: NodeId,
    pub home: Option<(NodeId, Name)>,
    pub open: Option<Opened>,
}

#[derive(Clone, Debug)]
pub enum Opened {
    Directory,
    File { handle: Handle, append: bool },
    Xattr(Vec<u8>),
    NewXattr { name: Vec<u8>, size: u64, flags: u32, value: Vec<u8> },
}

/// The server, and its statistics.
pub struct TreeServer {
    pub tree: ModelFs,
    pub fids: BTreeMap<u32, Stands>,
    /// Messages by their type.
    pub seen: BTreeMap<&'static str, u64>,
    /// Whether a message that no client may send is a panic; else it is an error.
    pub is_strict: bool,
    /// Trenameat and Tunlinkat are not supported.
    pub is_old: bool,
    pub most: u32,
    locks: Locks,
    now: Time,
    sequence: u64,
}

pub type Answered = Result<Rmessage, Errno>;

impl TreeServer {
    pub fn new(tree: ModelFs) -> TreeServer {
        TreeServer {
            tree,
            fids: BTreeMap::new(),
            seen: BTreeMap::new(),
            is_strict: true,
            is_old: false,
            most: 65_536,
            locks: Locks::default(),
            now: Time(1),
            sequence: 0,
        }
    }

    /// Executes one message.
    pub fn answer(&mut self, now: Time, message: &Tmessage) -> Rmessage {
        self.now = now;
        *self.seen.entry(message.name()).or_default() += 1;
        self.carry_out(message)
            .unwrap_or_else(|errno| Rmessage::Lerror { errno: errno.raw().cast_unsigned() })
    }

    /// How many messages of that type arrived.
    pub fn count(&self, name: &str) -> u64 {
        self.seen.get(name).copied().unwrap_or(0)
    }

    fn call(&mut self, call: Call) -> Result<(Reply, Response), Errno> {
        self.sequence += 1;
        let name = MutationId { client: 1, incarnation: 1, sequence: self.sequence };
        let name = call.is_mutation().then_some(name);
        let request = Request { credentials: Credentials::default(), mutation_id: name, call };
        let response = self.tree.execute(self.now, &request).pop().ok_or(Errno::IO)?;
        response.result.clone().map(|reply| (reply, response))
    }

    fn stands(&self, fid: u32) -> Result<&Stands, Errno> {
        self.fids.get(&fid).ok_or(Errno::BADF)
    }

    fn place(&self, fid: u32) -> Result<NodeRef, Errno> {
        Ok(NodeRef::without_hint(self.stands(fid)?.node))
    }

    fn qid(&self, node: NodeId) -> Qid {
        let mode = self.tree.attr(node).map_or(0, |attr| attr.mode);
        let bits = match mode & 0o170_000 {
            0o040_000 => 0x80,
            0o120_000 => 0x02,
            _ => 0,
        };
        Qid { bits, version: 1, path: node.ino }
    }

    fn check(&self, is_so: bool, rule: &str) -> Result<(), Errno> {
        assert!(is_so || !self.is_strict, "{rule}");
        if is_so { Ok(()) } else { Err(Errno::BADF) }
    }

    /// Adds a fid, which must be unused.
    fn put(&mut self, fid: u32, stands: Stands) -> Result<(), Errno> {
        match self.fids.insert(fid, stands) {
            None => Ok(()),
            Some(_) if self.is_strict => panic!("fid {fid} is in use"),
            Some(_) => Err(Errno::BADF),
        }
    }

    fn walk(&mut self, fid: u32, new: u32, names: &ShortSequence<Vec<u8>>) -> Answered {
        let from = self.stands(fid)?.clone();
        self.check(from.open.is_none(), "nothing is walked from an open fid")?;
        let (mut at, mut home, mut qids) = (from.node, from.home, Vec::new());
        for text in &names.0 {
            let name = Name::new(text).map_err(|_| Errno::INVAL)?;
            let found = self.tree.entry(at, &name).flatten();
            let Some(entry) = found else { break };
            (home, at) = (Some((at, name)), entry.id);
            qids.push(self.qid(at));
        }
        if qids.is_empty() && !names.0.is_empty() {
            let is_dir = self.tree.attr(from.node).is_some_and(|attr| attr.is_dir());
            return Err(if is_dir { Errno::NOENT } else { Errno::NOTDIR });
        }
        if qids.len() == names.0.len() {
            if self.tree.attr(at).is_none() {
                return Err(Errno::NOENT);
            }
            self.put(new, Stands { node: at, home, open: None })?;
        }
        Ok(Rmessage::Walk { qids: ShortSequence(qids) })
    }

    fn open(&mut self, fid: u32, how: u32) -> Answered {
        let node = self.stands(fid)?.node;
        let attr = self.tree.attr(node).ok_or(Errno::NOENT)?;
        let open = if attr.is_dir() {
            Opened::Directory
        } else {
            let (reply, _) =
                self.call(Call::Open { node: NodeRef::without_hint(node), access: access(how) })?;
            let Reply::Opened { handle, .. } = reply else { return Err(Errno::IO) };
            Opened::File { handle, append: how & flags::APPEND != 0 }
        };
        self.check(self.stands(fid)?.open.is_none(), "a fid is opened once")?;
        self.fids.get_mut(&fid).ok_or(Errno::BADF)?.open = Some(open);
        Ok(Rmessage::Lopen { qid: self.qid(node), iounit: 0 })
    }

    fn create(&mut self, fid: u32, name: &[u8], how: u32, mode: u32) -> Answered {
        let name = Name::new(name).map_err(|_| Errno::INVAL)?;
        let dir = self.place(fid)?;
        let call = Call::Create {
            dir: dir.clone(),
            name: name.clone(),
            mode,
            umask: 0,
            exclusive: how & flags::EXCL != 0,
            access: access(how),
        };
        let (Reply::Created { entry, handle: Some(handle), .. }, _) = self.call(call)? else {
            return Err(Errno::IO);
        };
        let open = Some(Opened::File { handle, append: how & flags::APPEND != 0 });
        self.fids.insert(fid, Stands { node: entry.id, home: Some((dir.node, name)), open });
        Ok(Rmessage::Lcreate { qid: self.qid(entry.id), iounit: 0 })
    }

    /// Removes a fid; a write to an xattr takes effect here.
    fn let_go(&mut self, fid: u32) -> Result<Stands, Errno> {
        let stands = self.fids.remove(&fid).ok_or(Errno::BADF)?;
        match stands.open.clone() {
            Some(Opened::File { handle, .. }) => self.tree.release(&[handle]),
            Some(Opened::NewXattr { name, size, flags, value }) => {
                let node = NodeRef::without_hint(stands.node);
                let call = match size {
                    0 => Call::RemoveXattr { node, name },
                    _ if size != value.len() as u64 => return Err(Errno::INVAL),
                    _ => Call::SetXattr { node, name, value, flags, kill_sgid: false },
                };
                self.call(call)?;
            }
            _ => {}
        }
        Ok(stands)
    }

    fn remove(&mut self, fid: u32) -> Answered {
        let stands = self.let_go(fid)?;
        let (dir, name) = stands.home.ok_or(Errno::BUSY)?;
        self.unlink(dir, name, self.tree.attr(stands.node).is_some_and(|attr| attr.is_dir()))?;
        Ok(Rmessage::Remove {})
    }

    fn unlink(&mut self, dir: NodeId, name: Name, is_dir: bool) -> Result<(), Errno> {
        let dir = NodeRef::without_hint(dir);
        let call = if is_dir { Call::Rmdir { dir, name } } else { Call::Unlink { dir, name, keep: None } };
        self.call(call).map(drop)
    }

    fn rename(&mut self, (from, name): (NodeId, Name), to: NodeId, new_name: &[u8]) -> Result<(), Errno> {
        let new_name = Name::new(new_name).map_err(|_| Errno::INVAL)?;
        let (from, to) = (NodeRef::without_hint(from), NodeRef::without_hint(to));
        let call = Call::Rename {
            from,
            name,
            to,
            new_name,
            no_replace: false,
            exchange: false,
            whiteout: false,
            keep: None,
        };
        self.call(call).map(drop)
    }
}

fn access(how: u32) -> Access {
    let way = how & 3;
    Access {
        read: way != flags::WRONLY,
        write: way != flags::RDONLY,
        truncate: how & flags::TRUNC != 0,
        direct: false,
        sync: false,
        append: how & flags::APPEND != 0,
    }
}
