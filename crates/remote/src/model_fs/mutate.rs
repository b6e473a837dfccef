//! Mutations of existing inodes.

use super::make::Plan;
use super::node::Body;
use super::rename::{Ends, How};
use super::xattr;
use super::{ModelFs, Outcome};
use nigh_types::{
    Access, Call, DataVersion, Errno, Handle, Kind, LeaseScope, Name, NodeId, NodeRef, Reply, Request,
    SetAttr, SetTime, Timestamp, WriteBackPrecondition, WriteFlags,
};

/// The largest size of a file (Linux `MAX_LFS_FILESIZE`).
const MAX_SIZE: u64 = i64::MAX.cast_unsigned();
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

impl ModelFs {
    /// Executes a mutation, and records a file's new data as the client's change.
    pub(super) fn mutate(&mut self, now: Timestamp, request: &Request) -> Result<Outcome, Errno> {
        let client = request.mutation_id.map_or(0, |name| name.client);
        let of = match &request.call {
            Call::Write { node, .. }
            | Call::Open { node, .. }
            | Call::SetAttr { node, .. }
            | Call::Fallocate { node, .. }
            | Call::CopyRange { to: node, .. } => node.node,
            _ => return self.mutate_any(now, request),
        };
        let before = self.attr(of).map(|attr| DataVersion::of(&attr));
        let outcome = self.mutate_any(now, request);
        let after = self.attr(of).map(|attr| DataVersion::of(&attr));
        if let (Some(before), Some(after)) = (before, after)
            && before != after
        {
            let states = self.followed.entry((client, of.ino)).or_default();
            if states.last() != Some(&before) {
                *states = vec![before];
            }
            states.push(after);
        }
        outcome
    }

    fn mutate_any(&mut self, now: Timestamp, request: &Request) -> Result<Outcome, Errno> {
        let plan = |kind, mode: u32, umask: u32| {
            let credentials = &request.credentials;
            Plan { now, credentials, kind, mode: mode & !umask, rdev: 0, target: &[] }
        };
        match &request.call {
            Call::Create { dir, name, mode, umask, exclusive, access } => {
                self.create(dir, name, *exclusive, *access, &plan(Kind::File, *mode, *umask))
            }
            Call::Tmpfile { dir, mode, umask, .. } => self.tmpfile(dir, &plan(Kind::File, *mode, *umask)),
            Call::Mknod { kind: Kind::Directory | Kind::Symlink, .. } => Err(Errno::INVAL),
            Call::Mknod { dir, name, kind, mode, umask, rdev } => {
                self.make(dir, name, &Plan { rdev: *rdev, ..plan(*kind, *mode, *umask) })
            }
            Call::Mkdir { dir, name, mode, umask } => {
                self.make(dir, name, &plan(Kind::Directory, *mode, *umask))
            }
            Call::Symlink { dir, name, target } => {
                self.make(dir, name, &Plan { target, ..plan(Kind::Symlink, 0o777, 0) })
            }
            Call::Link { node, dir, name } => self.link(now, node, dir, name),
            Call::Unlink { dir, name, keep } => self.unlink(now, dir, name, *keep),
            Call::Rmdir { dir, name } => self.rmdir(now, dir, name),
            Call::Rename { from, name, to, new_name, no_replace, exchange, whiteout, keep } => {
                let how = How { no_replace: *no_replace, exchange: *exchange, whiteout: *whiteout };
                self.rename(&Ends { from, name, to, new_name }, how, *keep, &plan(Kind::CharDevice, 0, 0))
            }
            Call::Write { node, handle, offset, data, flags } => {
                let ino = self.reach_file(node, *handle)?;
                let client = request.mutation_id.map_or(0, |name| name.client);
                self.write_since(now, (client, ino), *offset, data, *flags)
                    .map(|outcome| self.covered(outcome, ino, node))
            }
            other => self.change(now, other),
        }
    }

    /// Mutations of one inode.
    fn change(&mut self, now: Timestamp, call: &Call) -> Result<Outcome, Errno> {
        match call {
            Call::Open { node, access } => self.open_truncated(now, node, *access),
            Call::SetAttr { node, handle, set } => self.set_attr(now, node, *handle, set),
            Call::Fallocate { node, handle, mode, offset, length } => {
                let ino = self.reach_file(node, *handle)?;
                self.fallocate(now, ino, *mode, *offset, *length)?;
                Ok(self.attr_outcome(ino, node))
            }
            Call::CopyRange { from, from_handle, from_offset, to, to_handle, to_offset, length } => {
                let source = self.reach_file(from, *from_handle)?;
                let ino = self.reach_file(to, *to_handle)?;
                let outcome = self.copy(now, (source, *from_offset), (ino, *to_offset), *length)?;
                Ok(self.covered(outcome, ino, to))
            }
            Call::SetXattr { node, name, value, flags, .. } => {
                xattr::set_xattr(self, now, node, name, value, *flags)
            }
            Call::RemoveXattr { node, name } => xattr::remove_xattr(self, now, node, name),
            Call::Fsync { node, handle, .. } => {
                if handle.is_some() {
                    self.reach_open(node, *handle)?
                } else {
                    self.reach(node)?
                };
                Ok(Outcome::plain(Reply::Done))
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn unlink(
        &mut self,
        now: Timestamp,
        dir: &NodeRef,
        name: &Name,
        keep: Option<NodeId>,
    ) -> Result<Outcome, Errno> {
        let dir = self.reach_dir(dir)?;
        let ino = self.child(dir, name).ok_or(Errno::NOENT)?;
        let node = self.nodes[&ino].id;
        if self.nodes[&ino].attr.is_dir() {
            return Err(Errno::ISDIR);
        }
        let kept = self.is_to_pin(ino, keep).then(|| self.open(ino));
        self.remove_name(now, dir, name, ino);
        Ok(self.removed(dir, ino, Reply::Removed { node, pinned: kept }))
    }

    fn rmdir(&mut self, now: Timestamp, dir: &NodeRef, name: &Name) -> Result<Outcome, Errno> {
        let dir = self.reach_dir(dir)?;
        let ino = self.child(dir, name).ok_or(Errno::NOENT)?;
        let victim = &self.nodes[&ino];
        let node = victim.id;
        if !victim.attr.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if !victim.is_empty_dir() {
            return Err(Errno::NOTEMPTY);
        }
        self.remove_name(now, dir, name, ino);
        self.node_mut(ino).attr.nlink = 0;
        Ok(self.removed(dir, ino, Reply::Removed { node, pinned: None }))
    }

    fn removed(&self, dir: u64, ino: u64, reply: Reply) -> Outcome {
        let granted = vec![(self.nodes[&dir].id, LeaseScope::Directory)];
        Outcome { reply, touched: vec![dir, ino], granted }
    }

    fn open_truncated(&mut self, now: Timestamp, place: &NodeRef, access: Access) -> Result<Outcome, Errno> {
        let ino = self.reach(place)?;
        if self.nodes[&ino].attr.kind() == Kind::File {
            self.resize(now, ino, 0)?;
        }
        self.open_file(place, access)
    }

    fn set_attr(
        &mut self,
        now: Timestamp,
        place: &NodeRef,
        handle: Option<Handle>,
        set: &SetAttr,
    ) -> Result<Outcome, Errno> {
        let ino = self.reach_open(place, handle)?;
        if let Some(size) = set.size {
            self.regular(ino)?;
            self.resize(now, ino, size)?;
        }
        let at = |time: SetTime| match time {
            SetTime::Now => now,
            SetTime::At(time) => time,
        };
        let attr = &mut self.node_mut(ino).attr;
        if let Some(mode) = set.mode {
            attr.mode = attr.mode & 0o170_000 | mode & 0o7777;
        }
        let same_owner = *set == SetAttr::chown_to_same();
        if same_owner || set.kill_suidgid && (set.size.is_some() || set.uid.is_some() || set.gid.is_some()) {
            attr.mode = without_suidgid(attr.mode);
        }
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime = set.atime.map_or(attr.atime, at);
        attr.mtime = set.mtime.map_or(attr.mtime, at);
        if !set.is_empty() || same_owner {
            attr.ctime = now;
        }
        Ok(self.attr_outcome(ino, place))
    }

    /// Changes a file's size.
    pub(super) fn resize(&mut self, now: Timestamp, ino: u64, size: u64) -> Result<(), Errno> {
        if size > MAX_SIZE {
            return Err(Errno::FBIG);
        }
        let node = self.node_mut(ino);
        let Body::File(content) = &mut node.body else { return Err(Errno::INVAL) };
        if size < node.attr.size {
            content.punch(size, node.attr.size);
        }
        node.attr.size = size;
        node.attr.blocks = content.blocks();
        let now = later(now, node.attr.mtime);
        (node.attr.mtime, node.attr.ctime) = (now, now);
        Ok(())
    }

    /// A write that may name the version of the data behind its kernel's pages (`WriteFlags::since`).
    fn write_since(
        &mut self,
        now: Timestamp,
        (client, ino): (u64, u64),
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
    ) -> Result<Outcome, Errno> {
        let Some(WriteBackPrecondition { stamp: then, .. }) = flags.since else {
            return self.write(now, ino, offset, data, flags);
        };
        let present = DataVersion::of(&self.nodes[&ino].attr);
        let own = self.followed.get(&(client, ino)).filter(|states| states.last() == Some(&present));
        let as_then = present == then || own.is_some_and(|states| states.contains(&then));
        if flags.write_back && !as_then {
            let Body::File(content) = &self.nodes[&ino].body else { return Err(Errno::INVAL) };
            let count = data.len() as u64;
            let is_within = offset.checked_add(count).is_some_and(|end| end <= present.size);
            if !is_within || content.read(offset, count) != data {
                return Err(Errno::CANCELED);
            }
            // This client's changes alone did not produce the file's data.
            return Ok(Outcome::plain(Reply::Written { offset, count }));
        }
        self.write(now, ino, offset, data, flags)
    }

    fn write(
        &mut self,
        now: Timestamp,
        ino: u64,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
    ) -> Result<Outcome, Errno> {
        let node = self.node_mut(ino);
        let offset = if flags.append { node.attr.size } else { offset };
        let count = data.len() as u64;
        let end = offset.checked_add(count).filter(|end| *end <= MAX_SIZE).ok_or(Errno::FBIG)?;
        let Body::File(content) = &mut node.body else { return Err(Errno::INVAL) };
        if count > 0 {
            content.write(offset, data);
            node.attr.size = node.attr.size.max(end);
            node.attr.blocks = content.blocks();
            let now = later(now, node.attr.mtime);
            (node.attr.mtime, node.attr.ctime) = (now, now);
            if flags.kill_suidgid {
                node.attr.mode = without_suidgid(node.attr.mode);
            }
        }
        let mut outcome = Outcome::plain(Reply::Written { offset, count });
        outcome.touched.push(ino);
        Ok(outcome)
    }

    /// Adds the grant on the attributes of `ino` to an outcome.
    fn covered(&self, mut outcome: Outcome, ino: u64, place: &NodeRef) -> Outcome {
        outcome.granted.push(self.covering(ino, self.reached_in(place)));
        outcome
    }

    fn fallocate(
        &mut self,
        now: Timestamp,
        ino: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> Result<(), Errno> {
        let end = offset.checked_add(length).filter(|end| *end <= MAX_SIZE).ok_or(Errno::FBIG)?;
        if length == 0 {
            return Err(Errno::INVAL);
        }
        let node = self.node_mut(ino);
        let Body::File(content) = &mut node.body else { return Err(Errno::NODEV) };
        match mode {
            0 => node.attr.size = node.attr.size.max(end),
            KEEP_SIZE => {}
            mode if mode == PUNCH_HOLE | KEEP_SIZE => content.punch(offset, end),
            mode if mode & !KEEP_SIZE == ZERO_RANGE => {
                content.punch(offset, end);
                if mode & KEEP_SIZE == 0 {
                    node.attr.size = node.attr.size.max(end);
                }
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        node.attr.blocks = content.blocks();
        let now = later(now, node.attr.mtime);
        (node.attr.mtime, node.attr.ctime) = (now, now);
        Ok(())
    }

    fn copy(
        &mut self,
        now: Timestamp,
        (from, from_offset): (u64, u64),
        (to, to_offset): (u64, u64),
        length: u64,
    ) -> Result<Outcome, Errno> {
        let source = &self.nodes[&from];
        let Body::File(content) = &source.body else { return Err(Errno::INVAL) };
        let count = length.min(source.attr.size.saturating_sub(from_offset));
        let overlap =
            from == to && from_offset < to_offset.saturating_add(count) && to_offset < from_offset + count;
        if overlap && count > 0 {
            return Err(Errno::INVAL);
        }
        let bytes = content.read(from_offset, count);
        self.write(now, to, to_offset, &bytes, WriteFlags::default())
    }
}

/// A ctime as filesystems with distinct change times set it: `now`, or slightly later than the change before.
fn later(now: Timestamp, before: Timestamp) -> Timestamp {
    let is_past = before.pair() < now.pair() || before.secs > now.secs || before.nanos >= 999_999_999;
    if is_past { now } else { Timestamp { nanos: before.nanos + 1, ..before } }
}

/// Drops setuid, and setgid where the group may execute (`should_remove_suid` in the kernel).
fn without_suidgid(mode: u32) -> u32 {
    let mode = mode & !0o4000;
    if mode & 0o010 != 0 { mode & !0o2000 } else { mode }
}
