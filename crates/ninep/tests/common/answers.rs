//! The test server's reply to each message.

use super::{Answered, Opened, Stands, TreeServer};
use nigh_ninep::{Attributes, Data, Lock, LockStatus, Rmessage, Space, Tmessage, flags, mask};
use nigh_types::{
    Call, CallId, Errno, Kind, LockKind, Name, NodeId, NodeRef, Reply, SetAttr, SetTime, Timestamp,
    WriteFlags,
};

impl TreeServer {
    pub(super) fn carry_out(&mut self, message: &Tmessage) -> Answered {
        match message {
            Tmessage::Version { msize, version } => {
                self.fids.clear();
                Ok(Rmessage::Version { msize: (*msize).min(self.most), version: version.clone() })
            }
            Tmessage::Attach { fid, .. } => {
                let node = self.tree.root();
                self.put(*fid, Stands { node, home: None, open: None })?;
                Ok(Rmessage::Attach { qid: self.qid(node) })
            }
            Tmessage::Walk { fid, new, names } => self.walk(*fid, *new, names),
            Tmessage::Getattr { fid, .. } => self.attributes(*fid),
            Tmessage::Setattr { .. } => self.set(message),
            Tmessage::Lopen { fid, flags } => self.open(*fid, *flags),
            Tmessage::Lcreate { fid, name, flags, mode, .. } => self.create(*fid, name, *flags, *mode),
            Tmessage::Read { fid, offset, count } => self.read(*fid, *offset, *count),
            Tmessage::Write { fid, offset, data } => self.write(*fid, *offset, data),
            Tmessage::Readdir { fid, offset, count } => self.list(*fid, *offset, *count),
            Tmessage::Clunk { fid } => self.let_go(*fid).map(|_| Rmessage::Clunk {}),
            Tmessage::Remove { fid } => self.remove(*fid),
            Tmessage::Flush { .. } => Ok(Rmessage::Flush {}),
            Tmessage::Readlink { fid } => {
                let (Reply::Target(target), _) = self.call(Call::ReadLink { node: self.place(*fid)? })?
                else {
                    return Err(Errno::IO);
                };
                Ok(Rmessage::Readlink { target: target.into() })
            }
            Tmessage::Statfs { fid } => {
                let (Reply::Space(space), _) = self.call(Call::StatFs { node: self.place(*fid)? })? else {
                    return Err(Errno::IO);
                };
                let (block_bytes, longest_name) = (space.block_size, space.name_max);
                let space = Space { block_bytes, blocks: space.blocks, longest_name, ..Space::default() };
                Ok(Rmessage::Statfs { space })
            }
            Tmessage::Fsync { fid, .. } => self.stands(*fid).map(|_| Rmessage::Fsync {}),
            Tmessage::Xattrwalk { fid, new, name } => self.read_xattr(*fid, *new, name),
            Tmessage::Xattrcreate { fid, name, size, flags } => {
                let (name, size, flags, value) = (name.clone(), *size, *flags, Vec::new());
                let stands = self.fids.get_mut(fid).ok_or(Errno::BADF)?;
                stands.open = Some(Opened::NewXattr { name, size, flags, value });
                Ok(Rmessage::Xattrcreate {})
            }
            Tmessage::Lock { fid, kind, .. } => self.lock(*fid, *kind),
            Tmessage::Getlock { lock, .. } => {
                Ok(Rmessage::Getlock { lock: Lock { kind: 2, ..lock.clone() } })
            }
            Tmessage::Auth { .. } => Err(Errno::OPNOTSUPP),
            making => self.make(making),
        }
    }

    fn make(&mut self, message: &Tmessage) -> Answered {
        let name = |text: &[u8]| Name::new(text).map_err(|_| Errno::INVAL);
        match message {
            Tmessage::Symlink { dir, name: text, target, .. } => {
                let (dir, target) = (self.place(*dir)?, target.clone());
                let node = self.made(Call::Symlink { dir, name: name(text)?, target })?;
                Ok(Rmessage::Symlink { qid: self.qid(node) })
            }
            Tmessage::Mknod { dir, name: text, mode, .. } => {
                let (dir, kind) = (self.place(*dir)?, Kind::of_mode(*mode)?);
                let mode = mode & 0o7777;
                let node =
                    self.made(Call::Mknod { dir, name: name(text)?, kind, mode, umask: 0, rdev: 0 })?;
                Ok(Rmessage::Mknod { qid: self.qid(node) })
            }
            Tmessage::Mkdir { dir, name: text, mode, .. } => {
                let dir = self.place(*dir)?;
                let node = self.made(Call::Mkdir { dir, name: name(text)?, mode: *mode, umask: 0 })?;
                Ok(Rmessage::Mkdir { qid: self.qid(node) })
            }
            Tmessage::Link { dir, fid, name: text } => {
                let (node, dir) = (self.place(*fid)?, self.place(*dir)?);
                self.made(Call::Link { node, dir, name: name(text)? })?;
                Ok(Rmessage::Link {})
            }
            Tmessage::Renameat { .. } | Tmessage::Unlinkat { .. } if self.is_old => Err(Errno::OPNOTSUPP),
            Tmessage::Renameat { from, name: text, to, new_name } => {
                let (from, to) = (self.stands(*from)?.node, self.stands(*to)?.node);
                self.rename((from, name(text)?), to, new_name).map(|()| Rmessage::Renameat {})
            }
            Tmessage::Rename { fid, dir, name: text } => {
                let home = self.stands(*fid)?.home.clone().ok_or(Errno::BUSY)?;
                let to = self.stands(*dir)?.node;
                self.rename(home, to, text).map(|()| Rmessage::Rename {})
            }
            Tmessage::Unlinkat { dir, name: text, flags: how } => {
                let dir = self.stands(*dir)?.node;
                let is_dir = how & flags::REMOVE_DIRECTORY != 0;
                self.unlink(dir, name(text)?, is_dir).map(|()| Rmessage::Unlinkat {})
            }
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    fn made(&mut self, call: Call) -> Result<NodeId, Errno> {
        match self.call(call)?.0 {
            Reply::Created { entry, .. } => Ok(entry.id),
            _ => Err(Errno::IO),
        }
    }

    fn attributes(&self, fid: u32) -> Answered {
        let node = self.stands(fid)?.node;
        let attr = self.tree.attr(node).ok_or(Errno::NOENT)?;
        let moment = |time: Timestamp| (time.pair().0.cast_unsigned(), u64::from(time.pair().1));
        let attributes = Attributes {
            valid: mask::BASIC,
            qid: self.qid(node),
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            nlink: u64::from(attr.nlink),
            rdev: u64::from(attr.rdev),
            size: attr.size,
            block_bytes: 4096,
            blocks: attr.blocks,
            atime: moment(attr.atime),
            mtime: moment(attr.mtime),
            ctime: moment(attr.ctime),
            ..Attributes::default()
        };
        Ok(Rmessage::Getattr { attributes: Box::new(attributes) })
    }

    fn set(&mut self, message: &Tmessage) -> Answered {
        let Tmessage::Setattr { fid, valid, mode, uid, gid, size, atime, mtime } = message else {
            return Err(Errno::IO);
        };
        let is = |bit: u32| valid & bit != 0;
        let time = |set: u32, at: u32, (secs, nanos): (u64, u64)| {
            let moment = Timestamp { secs: secs.cast_signed(), nanos: u32::try_from(nanos).unwrap_or(0) };
            is(set).then_some(if is(at) { SetTime::At(moment) } else { SetTime::Now })
        };
        let set = SetAttr {
            mode: is(mask::SET_MODE).then_some(*mode),
            uid: is(mask::SET_UID).then_some(*uid),
            gid: is(mask::SET_GID).then_some(*gid),
            size: is(mask::SET_SIZE).then_some(*size),
            atime: time(mask::SET_ATIME, mask::ATIME_SET, *atime),
            mtime: time(mask::SET_MTIME, mask::MTIME_SET, *mtime),
            kill_suidgid: false,
        };
        self.call(Call::SetAttr { node: self.place(*fid)?, handle: None, set })?;
        Ok(Rmessage::Setattr {})
    }

    fn read(&mut self, fid: u32, offset: u64, count: u32) -> Answered {
        let node = self.place(fid)?;
        let data = match &self.stands(fid)?.open {
            Some(Opened::Xattr(value)) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX).min(value.len());
                value[from..value.len().min(from + count as usize)].to_vec()
            }
            Some(Opened::File { handle, .. }) => {
                let call = Call::Read { node, handle: Some(*handle), offset, length: count };
                let (Reply::Data(data), _) = self.call(call)? else { return Err(Errno::IO) };
                data
            }
            _ => return Err(Errno::BADF),
        };
        Ok(Rmessage::Read { data: Data(data) })
    }

    fn write(&mut self, fid: u32, offset: u64, data: &Data) -> Answered {
        let node = self.place(fid)?;
        let count = u32::try_from(data.0.len()).map_err(|_| Errno::INVAL)?;
        match &mut self.fids.get_mut(&fid).ok_or(Errno::BADF)?.open {
            Some(Opened::NewXattr { value, .. }) => value.extend_from_slice(&data.0),
            Some(Opened::File { handle, append }) => {
                let flags = WriteFlags { append: *append, ..WriteFlags::default() };
                let handle = Some(*handle);
                self.call(Call::Write { node, handle, offset, data: data.0.clone(), flags })?;
            }
            _ => return Err(Errno::BADF),
        }
        Ok(Rmessage::Write { count })
    }

    /// The server's offsets are opaque, so that a client cannot compute with them.
    fn list(&mut self, fid: u32, offset: u64, count: u32) -> Answered {
        const SECRET: u64 = 0x5bd1_e995_1b87_3593;
        self.check(matches!(self.stands(fid)?.open, Some(Opened::Directory)), "it is open")?;
        let (Reply::Listed(listed), _) = self.call_list(self.place(fid)?)? else { return Err(Errno::IO) };
        let skip =
            if offset == 0 { 0 } else { usize::try_from(offset ^ SECRET).map_err(|_| Errno::INVAL)? };
        let mut bytes = Vec::new();
        for (at, (name, entry)) in listed.entries.iter().enumerate().skip(skip) {
            let qid = self.qid(entry.id);
            let mut one = vec![qid.bits];
            one.extend(qid.version.to_le_bytes());
            one.extend(qid.path.to_le_bytes());
            one.extend(((at as u64 + 1) ^ SECRET).to_le_bytes());
            one.push(u8::try_from(entry.attr.mode >> 12).unwrap_or(0));
            one.extend(u16::try_from(name.as_bytes().len()).unwrap_or(0).to_le_bytes());
            one.extend(name.as_bytes());
            if bytes.len() + one.len() > count as usize {
                break;
            }
            bytes.extend(one);
        }
        Ok(Rmessage::Readdir { entries: Data(bytes) })
    }

    fn call_list(&mut self, dir: NodeRef) -> Result<(Reply, ()), Errno> {
        let request = nigh_types::Request {
            credentials: nigh_types::Credentials::default(),
            mutation_id: None,
            call: Call::List { dir },
        };
        let mut all = nigh_types::Entries::default();
        for response in self.tree.execute(self.now, &request) {
            let Reply::Listed(part) = response.result? else { return Err(Errno::IO) };
            all.entries.extend(part.entries);
        }
        Ok((Reply::Listed(all), ()))
    }

    fn read_xattr(&mut self, fid: u32, new: u32, name: &[u8]) -> Answered {
        let stands = self.stands(fid)?.clone();
        let node = NodeRef::without_hint(stands.node);
        let value = if name.is_empty() {
            let (Reply::Xattrs(set), _) = self.call(Call::Xattrs { node })? else { return Err(Errno::IO) };
            set.items.iter().flat_map(|(name, _)| name.iter().copied().chain([0])).collect()
        } else {
            let name = name.to_vec();
            let (Reply::Value(value), _) = self.call(Call::Xattr { node, name })? else {
                return Err(Errno::IO);
            };
            value
        };
        let size = value.len() as u64;
        self.put(new, Stands { open: Some(Opened::Xattr(value)), ..stands })?;
        Ok(Rmessage::Xattrwalk { size })
    }

    fn lock(&mut self, fid: u32, kind: u8) -> Answered {
        let node = self.stands(fid)?.node;
        let (place, owner, flock, start, end) =
            (NodeRef::without_hint(node), u64::from(fid), true, 0, u64::MAX);
        let call = match kind {
            2 => Call::Unlock { node: place, owner, flock, start, end },
            _ => {
                let kind = if kind == 0 { LockKind::Read } else { LockKind::Write };
                let (pid, wait, reclaim) = (1, false, false);
                Call::Lock { node: place, owner, flock, kind, start, end, wait, pid, reclaim }
            }
        };
        let mut answered = self.locks.execute(1, CallId(1), node, &call);
        let granted = answered.pop().is_some_and(|(_, _, result)| result.is_ok());
        let status = if granted { LockStatus::Granted } else { LockStatus::Blocked };
        Ok(Rmessage::Lock { status })
    }
}
