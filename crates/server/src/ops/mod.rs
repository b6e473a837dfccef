//! Execution of calls. Every function takes the call's arguments and returns an [`Outcome`]. None chooses an errno
//! that the kernel can choose.
//!
//! A read registers its grants before it reads the covered facts. A mutation has passed [`crate::ops::conflicts`], so its
//! change is open. It applies its effects, calls [`CallLeases::done`], registers grants, and only then reads the facts for
//! its reply.

pub(crate) mod attributes;
pub(crate) mod conflicts;
pub(crate) mod data;
pub(crate) mod execute;
pub(crate) mod list;
pub(crate) mod locks;
pub(crate) mod lookup;
pub(crate) mod make;
pub(crate) mod open;
pub(crate) mod prefetch;
pub(crate) mod prefetch_control;
pub(crate) mod remove;
pub(crate) mod rename;
mod space;
mod write_back;
mod write_tracking;

use crate::export::Export;
use crate::export::entry::entry_with;
use crate::export::node::Node;
use crate::export::node_resolver::NodeResolver;
use crate::export::open_files::OpenRef;
use crate::lease::call_leases::CallLeases;
use crate::lease::inode_locks::LockMode;
use crate::lease::session_files::SessionFiles;
use crate::os::error::Result;
use crate::os::impersonate::{Impersonation, SetIdBits};
use crate::os::privileged;
use crate::os::stat;
use nigh_lease::Object;
use nigh_types::{Attr, Credentials, Entry, Grant, Kind, LeaseScope, Mode, NodeId, Reply, Response, SetAttr};
use rustix::fs::OFlags;
use rustix::thread::CapabilitySet;
use std::os::fd::{AsFd, OwnedFd};

/// A call in execution.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) export: &'a Export,
    pub(crate) files: &'a SessionFiles,
    pub(crate) who: &'a Credentials,
    pub(crate) call_leases: &'a CallLeases<'a>,
}

/// Result of a successful call.
pub(crate) struct Outcome {
    pub(crate) reply: Reply,
    pub(crate) after: Vec<(NodeId, Attr)>,
    pub(crate) grants: Vec<Grant>,
}

impl Outcome {
    pub(crate) fn plain(reply: Reply) -> Outcome {
        Outcome { reply, after: Vec::new(), grants: Vec::new() }
    }

    pub(crate) fn into_response(self) -> Response {
        Response { result: Ok(self.reply), after: self.after, grants: self.grants, last: true }
    }
}

impl<'a> Context<'a> {
    pub(crate) fn resolver(&self) -> &'a NodeResolver {
        self.export.resolver()
    }

    /// Impersonates the caller for an operation on one inode, until the guard is dropped.
    pub(crate) fn act_on(&self, node: &Node) -> Result<Impersonation> {
        self.act(privileged::over_inode(self.who, &node.stat.attr), SetIdBits::AsForCaller)
    }

    /// Impersonates the caller for an operation on extended attributes.
    pub(crate) fn act_on_xattrs(&self, node: &Node) -> Result<Impersonation> {
        self.act(privileged::over_xattrs(self.who, &node.stat.attr), SetIdBits::AsForCaller)
    }

    /// Impersonates the caller for a change of attributes. `bits` decides whether setuid and setgid bits are cleared.
    pub(crate) fn act_changing(&self, node: &Node, set: &SetAttr, bits: SetIdBits) -> Result<Impersonation> {
        self.act(privileged::over_change(self.who, &node.stat.attr, set), bits)
    }

    /// Impersonates the caller for an operation on the data of an open file.
    pub(crate) fn act_on_data(&self, bits: SetIdBits) -> Result<Impersonation> {
        self.act(privileged::over_data(self.who), bits)
    }

    /// Impersonates the caller for an operation on names of existing inodes.
    pub(crate) fn act_in<'b>(&self, dirs: &'b [&'b Node], named: &'b [&'b Node]) -> Result<Impersonation> {
        let attrs = |nodes: &'b [&'b Node]| nodes.iter().map(|node| &node.stat.attr);
        self.act(privileged::over_names(self.who, attrs(dirs), attrs(named)), SetIdBits::AsForCaller)
    }

    fn act(&self, held: CapabilitySet, bits: SetIdBits) -> Result<Impersonation> {
        Impersonation::begin(self.export.impersonates(), self.who, held, bits)
    }

    /// Whether the server may use its own rights for an operation that the client's kernel has checked.
    pub(crate) fn is_vouched(&self) -> bool {
        !self.export.impersonates() || self.files.is_vouched()
    }

    /// Notes the directory of an inode before it is returned under a name in it. Only vouched peers resolve by inode
    /// number; others would only fill the table.
    pub(crate) fn note_parent(&self, id: NodeId, stat: &stat::Stat, dir: &Node) {
        if self.files.is_vouched() {
            self.resolver().note_parent(id, stat, &dir.stat);
        }
    }

    /// Impersonates the caller unless the client's kernel vouches for the caller's rights.
    pub(crate) fn act_unless_vouched(&self) -> Result<Impersonation> {
        Impersonation::begin(!self.is_vouched(), self.who, CapabilitySet::empty(), SetIdBits::AsForCaller)
    }

    /// Fails if a caller without a vouching kernel may not search a directory. To be called while impersonating the
    /// caller.
    pub(crate) fn search_unless_vouched(&self, dir: impl AsFd) -> Result<()> {
        if !self.is_vouched() {
            open_itself(dir, OFlags::PATH)?;
        }
        Ok(())
    }

    /// Whether the caller may list and search a directory.
    fn may_list(&self, dir: impl AsFd) -> bool {
        self.act_unless_vouched().and_then(|_acting| open_itself(dir, OFlags::RDONLY)).is_ok()
    }

    /// Registers a grant on a directory's names. The second value: whether its recall may carry names.
    fn request_dir_grant(&self, (dir, object): (NodeId, Object), fd: &OwnedFd) -> Option<(Grant, bool)> {
        self.call_leases.request_dir_grant(dir, object, || self.may_list(fd))
    }

    /// Notes that the caller has changed, or tried to change, the rights on a directory: whether updates carry its
    /// names is decided anew.
    pub(crate) fn rights_changed(&self, node: &Node) {
        if node.stat.attr.is_dir() {
            let leases = self.files.leases();
            leases.with_table(|table, now| table.handle_rights_changed(now, node.object));
        }
    }

    /// Starts watching an object for other processes' changes, before the granted facts are read or written.
    pub(crate) fn watch(&self, object: Object, fd: &OwnedFd) {
        self.export.watch(self.files, object, fd);
    }

    /// Registers a grant. The caller reads the covered facts only afterwards.
    pub(crate) fn grant(&self, grants: &mut Vec<Grant>, node: &Node, covers: LeaseScope) -> bool {
        if covers == LeaseScope::Directory
            && !self.resolver().case_folding.is_case_sensitive(node.directory())
        {
            return false;
        }
        self.watch(node.object, &node.fd);
        let grant = if covers == LeaseScope::Directory {
            self.export.note_directory(self.files, node.object, &node.fd);
            self.request_dir_grant((node.id, node.object), &node.fd).map(|(grant, _)| grant)
        } else {
            self.call_leases.request_grant(node.id, node.object, covers, Mode::Read)
        };
        grants.extend(grant);
        grant.is_some()
    }

    /// Registers the grant that covers a child's attributes beside a directory lease, then reads the attributes.
    pub(crate) fn grant_child(&self, grants: &mut Vec<Grant>, child: Node) -> Result<Node> {
        let again = if child.stat.attr.covered_by_parent() {
            child.resolved_by.as_ref().is_some_and(|under| self.note_shown(child.object, under.object))
        } else {
            self.grant(grants, &child, LeaseScope::Attributes)
        };
        if again { Ok(Node { stat: stat::of_fd(&child.fd)?, ..child }) } else { Ok(child) }
    }

    /// Registers the grant under which a node's attributes may be cached; they are to be read afterwards. Returns
    /// false if the name by which the node was resolved leads to another inode by now.
    pub(crate) fn grant_attr(&self, grants: &mut Vec<Grant>, node: &Node) -> bool {
        let Some(under) = &node.resolved_by else {
            self.grant(grants, node, LeaseScope::Attributes);
            return true;
        };
        let covered = node.stat.attr.covered_by_parent();
        if covered {
            self.watch(under.object, under.fd());
        }
        let dir = (under.dir, under.object);
        let by_name = covered && self.resolver().case_folding.is_case_sensitive(under.directory());
        let mut names = if by_name { self.request_dir_grant(dir, under.fd()) } else { None };
        // A caller that may not list a directory gets no directory lease for the sake of attributes.
        if let Some((grant, _)) = names.take_if(|(_, listed)| !*listed) {
            self.call_leases.withdraw(&grant);
        }
        let now = under.current_stat(node);
        match names.filter(|_| now.is_some_and(|stat| stat.attr.covered_by_parent())) {
            Some((grant, _)) => grants.push(grant),
            None => {
                self.watch(node.object, &node.fd);
                grants.extend(self.call_leases.request_grant(
                    node.id,
                    node.object,
                    LeaseScope::Attributes,
                    Mode::Read,
                ));
            }
        }
        now.is_some()
    }

    /// Like [`Context::grant_attr`], for a call that changes nothing.
    pub(crate) fn grant_attr_to_reader(&self, grants: &mut Vec<Grant>, node: &Node) -> bool {
        let there = self.grant_attr(grants, node);
        if let Some(under) = &node.resolved_by {
            self.note_shown(node.object, under.object);
        }
        there
    }

    /// Records the directory in which a reader is shown a file, if a later change through a descriptor could not find
    /// it. Returns true if it was recorded; the attributes are to be read afterwards.
    pub(crate) fn note_shown(&self, object: Object, dir: Object) -> bool {
        let leases = self.files.leases();
        if !leases.homes.is_moved_hardlink(object) {
            return false;
        }
        let mut held = leases.places.empty_set();
        if !held.try_lock(object, LockMode::Exclusive) {
            held.lock_all();
        }
        leases.homes.note_shown_in(object, dir);
        true
    }

    /// Returns the current attributes of a node.
    pub(crate) fn attr_now(&self, node: &Node) -> Result<(NodeId, Attr)> {
        Ok((node.id, self.visible_attr(node.object, &*node.fd)?))
    }

    /// Returns the current attributes for a call that holds no inode lock.
    pub(crate) fn attr_unlocked(&self, node: &Node) -> Result<(NodeId, Attr)> {
        let leases = self.files.leases();
        let before = leases.homes.unlink_events();
        let seen = self.attr_now(node);
        if !leases.homes.may_have_unlinked(node.object, before) {
            return seen;
        }
        let mut held = leases.places.empty_set();
        if !held.try_lock(node.object, LockMode::Shared) {
            held.lock_all();
        }
        self.attr_now(node)
    }

    /// Returns attributes as clients see them: nlink does not count the orphan link.
    pub(crate) fn visible_attr(&self, object: Object, fd: impl AsFd) -> Result<Attr> {
        let look = || stat::of_fd(&fd).map(|stat| stat.attr);
        self.files.leases().homes.visible_attr(&self.resolver().orphans, object, look)
    }

    /// Corrects attributes that were read without regard to the orphan link, for a file reached by a name; `again`
    /// reads them once more.
    pub(crate) fn correct_nlink(
        &self,
        object: Object,
        attr: Attr,
        again: impl Fn() -> Result<Attr>,
    ) -> Result<Attr> {
        // A file with a name and nlink 1 has no orphan link.
        if attr.kind() != Kind::File || attr.nlink < 2 {
            return Ok(attr);
        }
        self.files.leases().homes.visible_attr(&self.resolver().orphans, object, again)
    }

    /// Waits until a removal of the file's name, if one is under way, has completed. The file is counted as open
    /// already.
    pub(crate) fn wait_for_unlink(&self, object: Object) {
        let leases = self.files.leases();
        if leases.homes.is_unlinking(object) {
            let mut held = leases.places.empty_set();
            if !held.try_lock(object, LockMode::Shared) {
                held.lock_all();
            }
        }
    }

    /// Counts a file as open.
    pub(crate) fn count(&self, object: Object) -> OpenRef {
        self.files.leases().homes.count(object, self.files.opened())
    }
}

/// Opens a directory through ".", which requires search permission on it.
fn open_itself(dir: impl AsFd, how: OFlags) -> Result<OwnedFd> {
    let flags = how | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, c".", flags, rustix::fs::Mode::empty())?)
}

/// Builds the entry of a resolved node for a reply.
fn entry_of(cx: Context<'_>, node: &Node) -> Result<Entry> {
    let again = || stat::of_fd(&node.fd).map(|stat| stat.attr);
    entry_with(node, cx.correct_nlink(node.object, node.stat.attr, again)?)
}
