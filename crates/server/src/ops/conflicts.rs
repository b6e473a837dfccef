//! Lease conflicts of a call: the facts under lease that a mutation will change, found from the current state of the
//! export. See docs/decisions/0008-leases.md, rules 2 to 4.
//!
//! A directory lease also covers the attributes of its non-directory children with one link. So a change of such a
//! file needs the directory that the file lies in. The inode locks taken here keep that answer true until the call is
//! answered.

use crate::export::fd_location::{Location, locate_by_path, locate_on_mount};
use crate::export::node::{Found, LookupOutcome, Node};
use crate::lease::change_result::{ChangeProbe, ProbeTarget};
use crate::lease::inode_locks::{InodeLockSet, LockMode};
use crate::ops::Context;
use crate::ops::open::for_reading;
use crate::ops::rename::Names;
use crate::os::error::Fault;
use crate::os::stat::{self, Stat};
use nigh_lease::{Change, LeaseKey, Object};
use nigh_types::{Call, Errno, Handle, Kind, LeaseScope, Name, NodeRef, SetAttr};
use rustix::fs::{Access, AtFlags};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Determines the facts that a call changes and begins the change; a read waits for its data grant here, an fsync for
/// acknowledgements. Returns true if the call may go on now. Returns false if it waits for acknowledgements; it then
/// holds no inode lock.
pub(crate) fn prepare(cx: Context<'_>, call: &Call, places: &mut InodeLockSet<'_>) -> Result<bool, Fault> {
    if let Call::Read { node, handle, .. } = call {
        // A read that waited already has its grant, even if the open file or the path is gone by now.
        let file = for_reading(cx, node, *handle)?;
        cx.watch(file.object(), file.fd());
        return Ok(cx.call_leases.begin_read(node.node, file.object()));
    }
    if let Call::Fsync { node, handle, .. } = call {
        return wait_for_acknowledgements(cx, node, *handle);
    }
    if !call.is_mutation() {
        return Ok(true);
    }
    let flush = call.is_write_back();
    loop {
        let mut look =
            ConflictScan { cx, places, changes: Vec::new(), tells: Vec::new(), unlinking: Vec::new() };
        match look.scan(call) {
            Ok(()) => {
                let ready = cx.call_leases.begin(&look.changes, flush);
                if ready {
                    cx.call_leases.set_probes(look.tells);
                    look.unlinking.into_iter().for_each(|node| cx.resolver().recently_unlinked.keep(node));
                } else {
                    places.release();
                }
                return Ok(ready);
            }
            Err(Halt::Again) => places.lock_all(),
            Err(Halt::Fault(fault)) => return Err(fault),
        }
    }
}

/// Waits until other holders have dropped the data leases recalled for this file. Write-back of a shared mapping may
/// be applied before those holders drop their pages; fsync waits for them.
fn wait_for_acknowledgements(
    cx: Context<'_>,
    place: &NodeRef,
    handle: Option<Handle>,
) -> Result<bool, Fault> {
    let object = match handle {
        Some(handle) => cx.files.find(handle, place.node)?.object,
        None => cx.resolver().node(place, cx.files)?.object,
    };
    Ok(cx.call_leases.wait_for_acknowledgements(object))
}

/// Reason to stop a scan early.
enum Halt {
    /// An inode lock was not free. The scan waits for the lock and starts again.
    Again,
    Fault(Fault),
}

impl From<Fault> for Halt {
    fn from(fault: Fault) -> Halt {
        Halt::Fault(fault)
    }
}

type ScanResult<T> = Result<T, Halt>;

struct ConflictScan<'c, 'p, 'l> {
    cx: Context<'c>,
    places: &'p mut InodeLockSet<'l>,
    changes: Vec<Change>,
    /// Probes that read the changed facts after the change.
    tells: Vec<ChangeProbe>,
    /// Files about to lose a name, kept open for calls that other clients have just resolved to them.
    unlinking: Vec<Node>,
}

impl ConflictScan<'_, '_, '_> {
    fn scan(&mut self, call: &Call) -> ScanResult<()> {
        match call {
            Call::Create { dir, name, exclusive, access, .. } => self.create(dir, name, *exclusive, *access),
            Call::Mknod { dir, name, .. }
            | Call::Mkdir { dir, name, .. }
            | Call::Symlink { dir, name, .. } => {
                let dir = self.directory(dir)?;
                // An existing name makes the call fail, so the call changes nothing.
                if self.find_victim(&dir, name, Errno::EXIST)?.is_none() {
                    self.name(&dir, name);
                }
                Ok(())
            }
            Call::Link { node, dir, name } => self.link(node, dir, name),
            Call::Unlink { dir, name, .. } | Call::Rmdir { dir, name } => {
                let dir = self.directory(dir)?;
                if let Some(victim) = self.find_victim(&dir, name, Errno::BUSY)? {
                    self.lock(victim.object, LockMode::Exclusive)?;
                    self.name(&dir, name);
                    if self.cx.files.leases().has_several_sessions() {
                        self.keep_unlinked(&dir, name, &victim);
                    }
                    self.removed(&dir, name, victim);
                }
                Ok(())
            }
            Call::Rename { from, name, to, new_name, no_replace, exchange, .. } => {
                self.rename(&Names { from, name, to, new_name }, *no_replace, *exchange)
            }
            // chown(2) to the same owner and group may take set-user-ID bits and capabilities away.
            Call::SetAttr { set, .. } if set.is_empty() && *set != SetAttr::chown_to_same() => Ok(()),
            Call::SetAttr { node, handle, set } => {
                self.inode(node, *handle, (set.size.is_some(), LockMode::Shared))
            }
            Call::SetXattr { node, .. } | Call::RemoveXattr { node, .. } => {
                self.inode(node, None, (false, LockMode::Shared))
            }
            Call::Open { node, .. } => self.inode(node, None, (true, LockMode::Shared)),
            Call::Write { node, handle, flags, .. } => {
                // The exclusive lock keeps other changes out between the comparison with the file's state and the
                // write (rule 12).
                let grip = if flags.write_back { LockMode::Exclusive } else { LockMode::Shared };
                self.inode(node, *handle, (true, grip))
            }
            Call::Fallocate { node, handle, .. } | Call::CopyRange { to: node, to_handle: handle, .. } => {
                self.inode(node, *handle, (true, LockMode::Shared))
            }
            // An unnamed file changes no leased fact, and a sync call changes no file.
            _ => Ok(()),
        }
    }

    fn create(
        &mut self,
        dir: &NodeRef,
        name: &Name,
        exclusive: bool,
        access: nigh_types::Access,
    ) -> ScanResult<()> {
        let dir = self.directory(dir)?;
        // The client believes that the name is absent. On `ESTALE` its kernel looks the name up again and opens what
        // is mounted there.
        let mounted = if exclusive { Errno::EXIST } else { Errno::STALE };
        let Some(there) = self.find_victim(&dir, name, mounted)? else {
            self.name(&dir, name);
            return Ok(());
        };
        if exclusive || there.stat.attr.kind() != Kind::File {
            return Ok(());
        }
        let homes = &self.cx.files.leases().homes;
        self.lock_file(there.object, LockMode::Shared)?;
        if homes.is_moved_hardlink(there.object) {
            homes.note_shown_in(there.object, dir.object);
        }
        if access.truncate {
            self.push_probed(
                there.object,
                LeaseScope::Attributes,
                None,
                ProbeTarget::OldName(Arc::clone(&dir.fd), name.clone()),
            );
            self.push_written(there.object);
            self.push_probed(
                dir.object,
                LeaseScope::Directory,
                Some(name),
                ProbeTarget::Node(Arc::clone(&dir.fd)),
            );
        }
        Ok(())
    }

    fn link(&mut self, place: &NodeRef, dir: &NodeRef, name: &Name) -> ScanResult<()> {
        let dir = self.directory(dir)?;
        let node = self.cx.resolver().node(place, self.cx.files)?;
        if node.stat.attr.is_dir() || self.find_victim(&dir, name, Errno::EXIST)?.is_some() {
            return Ok(());
        }
        self.lock(node.object, LockMode::Exclusive)?;
        self.name(&dir, name);
        self.attributes(place, ProbeTarget::Node(node.fd), node.object)
    }

    fn rename(&mut self, names: &Names<'_>, no_replace: bool, exchange: bool) -> ScanResult<()> {
        let from = self.directory(names.from)?;
        let to = self.directory(names.to)?;
        let Some(moved) = self.find_victim(&from, names.name, Errno::BUSY)? else { return Ok(()) };
        let mounted = if no_replace { Errno::EXIST } else { Errno::BUSY };
        let there = self.find_victim(&to, names.new_name, mounted)?;
        match there {
            Some(_) if no_replace => return Ok(()),
            // rename(2) of two names of one inode does nothing.
            Some(there) if there.object == moved.object => return Ok(()),
            None if exchange => return Ok(()),
            _ => {}
        }
        self.lock(moved.object, LockMode::Exclusive)?;
        self.name(&from, names.name);
        self.name(&to, names.new_name);
        let at = |dir: &Node, name: &Name| ProbeTarget::OldName(Arc::clone(&dir.fd), name.clone());
        self.push_probed(moved.object, LeaseScope::Attributes, None, at(&from, names.name));
        self.keep_moved(&from, names.name, &moved);
        if let Some(there) = there {
            self.lock(there.object, LockMode::Exclusive)?;
            if exchange {
                self.push_probed(there.object, LeaseScope::Attributes, None, at(&to, names.new_name));
                self.keep_moved(&to, names.new_name, &there);
            } else {
                self.keep_unlinked(&to, names.new_name, &there);
                self.removed(&to, names.new_name, there);
            }
        }
        Ok(())
    }

    /// Collects a change of an inode itself: its attributes, and with `data` its contents.
    fn inode(
        &mut self,
        place: &NodeRef,
        handle: Option<Handle>,
        (data, grip): (bool, LockMode),
    ) -> ScanResult<()> {
        let open = self.cx.files.find_optional(handle, place.node)?;
        let object = match open {
            Some(file) => {
                self.lock_file(file.object, grip)?;
                if data {
                    self.cx.watch(file.object, &file.fd);
                }
                let object = file.object;
                self.attributes(place, ProbeTarget::File(file), object)?;
                object
            }
            None => {
                let node = self.cx.resolver().node(place, self.cx.files)?;
                self.lock_file(node.object, grip)?;
                if data {
                    self.cx.watch(node.object, &node.fd);
                }
                self.attributes(place, ProbeTarget::Node(node.fd), node.object)?;
                node.object
            }
        };
        if data {
            self.push_written(object);
        }
        Ok(())
    }

    /// Collects a change of the attributes of an inode that is locked here.
    fn attributes(&mut self, place: &NodeRef, at: ProbeTarget, object: Object) -> ScanResult<()> {
        let fd = at.fd().ok_or(Fault(Errno::IO))?;
        let stat = stat::of_fd(fd)?;
        let covered = stat.attr.covered_by_parent();
        let hinted = if covered { self.dir_from_hint(place, &stat) } else { None };
        let told = if covered && hinted.is_none() { self.dir_from_kernel(fd, &stat) } else { None };
        self.push_probed(object, LeaseScope::Attributes, None, at);
        if !covered {
            return Ok(());
        }
        let homes = &self.cx.files.leases().homes;
        if let Some((dir, name, fd)) = hinted {
            if homes.is_moved_hardlink(object) {
                homes.note_shown_in(object, dir);
            }
            self.push_probed(dir, LeaseScope::Directory, Some(&name), ProbeTarget::Node(fd));
        } else if let Some((dir, name, fd)) = told {
            self.push_probed(dir, LeaseScope::Directory, Some(&name), ProbeTarget::Node(fd));
        } else {
            for dir in homes.directories_of(object) {
                self.push(dir, LeaseScope::Directory, None);
            }
        }
        Ok(())
    }

    /// Returns the directory in the client's path hint, if the file is there.
    fn dir_from_hint(&self, place: &NodeRef, stat: &Stat) -> Option<(Object, Name, Arc<OwnedFd>)> {
        let (parent, name) = place.path_hint.as_ref()?;
        let dir = self.cx.resolver().resolve_hint(*parent).ok()?;
        let there = self.cx.resolver().lookup(&dir, name).ok()??;
        there.stat.is_same(stat).then(|| (dir.object, name.clone(), dir.fd))
    }

    /// Returns the directory in which the kernel finds a file with one name. The name by which the descriptor was
    /// opened may have been removed while another link remains; then the kernel's path leads nowhere.
    fn dir_from_kernel(&self, fd: BorrowedFd<'_>, stat: &Stat) -> Option<(Object, Name, Arc<OwnedFd>)> {
        let (dir, name) = match self.cx.resolver().mount_root(stat) {
            Some(root) => match locate_on_mount(root, fd, stat).ok()? {
                Location::There(dir, name) => (dir, name),
                Location::Elsewhere => return None,
            },
            None => locate_by_path(fd, stat)?,
        };
        let object = self.cx.resolver().ids.object(&stat::of_fd(&dir).ok()?);
        // The file is at this path and has no other name, so this is its only directory, whichever path led to it.
        Some((object, name, Arc::new(dir)))
    }

    /// Collects the creation or removal of a name, which also changes the directory's times.
    fn name(&mut self, dir: &Node, name: &Name) {
        self.push_probed(
            dir.object,
            LeaseScope::Directory,
            Some(name),
            ProbeTarget::Node(Arc::clone(&dir.fd)),
        );
        self.push_probed(dir.object, LeaseScope::Attributes, None, ProbeTarget::Node(Arc::clone(&dir.fd)));
    }

    /// Collects the loss of a name of an inode that is locked here. If it was the last name, a new inode may get the
    /// inode number; without birth times the two would be confused.
    fn removed(&mut self, dir: &Node, name: &Name, victim: Found) {
        if victim.stat.attr.nlink > 1 && !victim.stat.attr.is_dir() {
            let at = ProbeTarget::OldName(Arc::clone(&dir.fd), name.clone());
            self.push_probed(victim.object, LeaseScope::Attributes, None, at);
        } else {
            self.push(victim.object, LeaseScope::Attributes, None);
        }
        let rest = if victim.stat.attr.is_dir() { LeaseScope::Directory } else { LeaseScope::Data };
        self.push(victim.object, rest, None);
        let last = victim.stat.attr.kind() == Kind::File && victim.stat.attr.nlink == 1;
        if last
            && self.cx.files.leases().homes.is_open(victim.object)
            && let Some(top) = self.cx.resolver().orphans.needs_folder(self.cx.resolver(), dir)
        {
            self.push(top.object, LeaseScope::Attributes, None);
            self.cx.call_leases.allow_orphan_folder();
        }
    }

    /// Keeps a file that loses its last name reachable for a moment. A file with other names is not kept: the path of
    /// its descriptor would not show where the file lies.
    fn keep_unlinked(&mut self, dir: &Node, name: &Name, victim: &Found) {
        if victim.stat.attr.nlink == 1 {
            self.keep_reachable(dir, name, victim);
        }
    }

    /// Keeps a moved file reachable for a moment by clients that know it by its old name.
    fn keep_moved(&mut self, dir: &Node, name: &Name, moved: &Found) {
        if self.cx.files.leases().has_several_sessions() {
            self.keep_reachable(dir, name, moved);
        }
    }

    /// Keeps a descriptor of the file. Where that fails, the client has to look the name up again.
    fn keep_reachable(&mut self, dir: &Node, name: &Name, there: &Found) {
        if there.stat.attr.is_dir() {
            return;
        }
        let held = self.cx.resolver().open_child(dir, name).and_then(|fd| self.cx.resolver().identify(fd));
        self.unlinking.extend(held.ok().filter(|node| node.object == there.object));
    }

    /// Resolves and locks the directory in which a name is to be changed.
    fn directory(&mut self, place: &NodeRef) -> ScanResult<Node> {
        let dir = self.cx.resolver().directory(place, self.cx.files)?;
        self.lock(dir.object, LockMode::Exclusive)?;
        Ok(dir)
    }

    /// Returns the file or directory behind a name that is to be changed. `mounted` is the kernel's errno for a mount
    /// point. The mounted filesystem is not accessed: it may hang, and other calls wait for the directory lock.
    fn find_victim(&self, dir: &Node, name: &Name, mounted: Errno) -> Result<Option<Found>, Fault> {
        match self.cx.resolver().lookup_for_change(dir, name)? {
            LookupOutcome::Nothing => Ok(None),
            LookupOutcome::Found(found) => Ok(Some(found)),
            LookupOutcome::MountPoint => {
                let write = if mounted == Errno::BUSY { Access::WRITE_OK } else { Access::empty() };
                let _acting = self.cx.act_in(&[dir], &[])?;
                rustix::fs::accessat(&dir.fd, c".", write | Access::EXEC_OK, AtFlags::EACCESS)?;
                Err(Fault(mounted))
            }
        }
    }

    /// Locks a file. With a shared lock other calls may change the file too; a moved hard link needs the exclusive
    /// lock, because its directories are recorded.
    fn lock_file(&mut self, object: Object, grip: LockMode) -> ScanResult<()> {
        self.lock(object, grip)?;
        if self.cx.files.leases().homes.is_moved_hardlink(object) {
            self.lock(object, LockMode::Exclusive)?;
        }
        Ok(())
    }

    fn lock(&mut self, object: Object, grip: LockMode) -> ScanResult<()> {
        if self.places.try_lock(object, grip) { Ok(()) } else { Err(Halt::Again) }
    }

    fn push(&mut self, object: Object, covers: LeaseScope, name: Option<&Name>) {
        let key = LeaseKey { object, covers };
        let names = name.into_iter().cloned().collect();
        self.changes.push(Change { key, names, writes: false, can_update: false });
    }

    /// Adds a change whose result is probed at `at` and sent to the other holders.
    fn push_probed(&mut self, object: Object, covers: LeaseScope, name: Option<&Name>, at: ProbeTarget) {
        let key = LeaseKey { object, covers };
        let names = name.into_iter().cloned().collect();
        self.changes.push(Change { key, names, writes: false, can_update: true });
        if !self.tells.iter().any(|tell| tell.is_of(key, name)) {
            self.tells.push(ChangeProbe::new(key, name, at));
        }
    }

    fn push_written(&mut self, object: Object) {
        let key = LeaseKey { object, covers: LeaseScope::Data };
        self.changes.push(Change { key, names: Vec::new(), writes: true, can_update: false });
    }
}
