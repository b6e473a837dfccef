//! Threads lent to hung filesystems.
//!
//! A call into a hung filesystem (NFS without its server, a stopped FUSE daemon) blocks its thread without bound.
//! After [`PATIENCE`] the thread is *lent*: a replacement takes its place in the pool, and the lent thread exits
//! after its call. The number of lent threads is limited per place, filesystem and origin. Further calls wait without
//! a thread. They fail with `EIO`, without effect, if no thread returns within [`LIMIT`]. `fsync` calls do not fail,
//! because their error would report a loss of data.

use nigh_types::{Call, NodeId, Origin};
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// Age of a call at which its thread is lent if other work waits.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);
/// How long a call waits without a thread.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// Limit on threads lent to calls with one place.
const OF_PLACE: usize = 2;
/// Limit on threads lent to one filesystem mounted below an export.
const OF_MOUNT: usize = 4;
/// Limit on threads lent to one other filesystem, such as the export's own, in which some directories may lead to
/// hung ones.
const OF_FILESYSTEM: usize = 24;
const OF_ORIGIN: usize = 16;
/// Limit on all lent threads.
pub(super) const MOST: usize = 256;

/// What a call accesses first, as far as that is known without an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CallTarget {
    /// Memory address of the export; 0 if there is none.
    export: usize,
    node: NodeId,
    /// Hash of the name, and of whether the call lists names. A name may lead to another filesystem.
    names: u64,
}

impl CallTarget {
    pub(super) fn of(export: usize, call: &Call) -> Option<CallTarget> {
        let (node, name) = match call {
            Call::Lookup { dir, name }
            | Call::Create { dir, name, .. }
            | Call::Mknod { dir, name, .. }
            | Call::Mkdir { dir, name, .. }
            | Call::Symlink { dir, name, .. }
            | Call::Link { dir, name, .. }
            | Call::Unlink { dir, name, .. }
            | Call::Rmdir { dir, name }
            | Call::Rename { from: dir, name, .. } => (dir.node, Some(name)),
            Call::ResolvePath { node, names } => (*node, names.first()),
            Call::Tmpfile { dir, .. } => (dir.node, None),
            Call::List { dir } | Call::ListNames { dir, .. } => {
                return Some(CallTarget { export, node: dir.node, names: 1 });
            }
            Call::GetAttr { node }
            | Call::ReadLink { node }
            | Call::Xattrs { node }
            | Call::Xattr { node, .. }
            | Call::StatFs { node }
            | Call::Open { node, .. }
            | Call::Read { node, .. }
            | Call::Seek { node, .. }
            | Call::GetFlags { node }
            | Call::Lock { node, .. }
            | Call::GetLock { node, .. }
            | Call::Reopen { node, .. }
            | Call::SetAttr { node, .. }
            | Call::Write { node, .. }
            | Call::Fallocate { node, .. }
            | Call::CopyRange { to: node, .. }
            | Call::SetXattr { node, .. }
            | Call::RemoveXattr { node, .. }
            | Call::Fsync { node, .. } => (node.node, None),
            Call::LookupNumber { ino } => (NodeId { ino: *ino, generation: 0 }, None),
            Call::Prefetch { .. }
            | Call::PrefetchCredit { .. }
            | Call::Release { .. }
            | Call::PinOpen { .. }
            | Call::Unlock { .. } => {
                return None;
            }
        };
        let names = name.map_or(0, |name| {
            let mut hasher = rustc_hash::FxHasher::default();
            name.hash(&mut hasher);
            hasher.finish() | 2
        });
        Some(CallTarget { export, node, names })
    }

    fn filesystem(&self) -> (usize, u64) {
        (self.export, crate::export::ids::device_of(self.node))
    }

    fn is_below_a_mount(&self) -> bool {
        crate::export::ids::device_of(self.node) != 0
    }
}

/// A lent thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lent {
    pub(super) origin: Origin,
    pub(super) target: Option<CallTarget>,
}

/// The lent threads.
#[derive(Default, Debug)]
pub(super) struct Loans(Vec<Lent>);

impl Loans {
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    pub(super) fn add(&mut self, lent: Lent) {
        self.0.push(lent);
    }

    pub(super) fn end(&mut self, lent: Lent) {
        let is_it = |other: &Lent| other.origin == lent.origin && other.target == lent.target;
        if let Some(at) = self.0.iter().position(is_it) {
            self.0.swap_remove(at);
        }
    }

    /// Whether enough threads already wait for what this call would wait for. A call whose change `has_begun` is
    /// exempt from the limit on its origin.
    pub(super) fn are_enough_for(&self, origin: Origin, place: Option<CallTarget>, has_begun: bool) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let count = |is_such: &dyn Fn(&Lent) -> bool| self.0.iter().filter(|lent| is_such(lent)).count();
        let is_bounded = !has_begun && !origin.is_local_root();
        if is_bounded && count(&|lent| lent.origin == origin) >= OF_ORIGIN {
            return true;
        }
        let Some(place) = place else { return false };
        let of_filesystem = if place.is_below_a_mount() { OF_MOUNT } else { OF_FILESYSTEM };
        count(&|lent| lent.target == Some(place)) >= OF_PLACE
            || count(&|lent| lent.target.is_some_and(|other| other.filesystem() == place.filesystem()))
                >= of_filesystem
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::Name;

    fn lookup(ino: u64, name: &str) -> Option<CallTarget> {
        let dir = nigh_types::NodeRef::without_hint(NodeId { ino, generation: 1 });
        CallTarget::of(1, &Call::Lookup { dir, name: Name::new(name.as_bytes()).unwrap() })
    }

    #[test]
    fn lent_threads_are_limited_by_name_mount_and_origin() {
        let origin = |uid| Origin { uid: Some(uid), host: None };
        let mut loans = Loans::default();
        let lend = |loans: &mut Loans, uid, place| loans.add(Lent { origin: origin(uid), target: place });
        (0..2).for_each(|_| lend(&mut loans, 1, lookup(7, "hung")));
        assert!(loans.are_enough_for(origin(2), lookup(7, "hung"), false));
        assert!(!loans.are_enough_for(origin(2), lookup(7, "other"), false), "it may lead elsewhere");
        let mount = |n: u64| (1 << 63) | (3 << 48) | n;
        (0..4).for_each(|n| lend(&mut loans, 1, lookup(mount(n), "f")));
        assert!(loans.are_enough_for(origin(2), lookup(mount(99), "x"), false));
        assert!(!loans.are_enough_for(origin(2), lookup(99, "x"), false));
        (0..10).for_each(|n| lend(&mut loans, 1, lookup(100 + n, "x")));
        assert!(loans.are_enough_for(origin(1), lookup(99, "x"), false), "sixteen of its origin");
        assert!(!loans.are_enough_for(origin(1), lookup(99, "x"), true), "others wait for its end");
        assert!(!loans.are_enough_for(origin(2), lookup(99, "x"), false));
        loans.end(Lent { origin: origin(1), target: lookup(100, "x") });
        assert!(!loans.are_enough_for(origin(1), lookup(99, "x"), false));
    }
}
