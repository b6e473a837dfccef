//! What is watched: changes by other processes are reported to the server.

use crate::types::Object;
use std::collections::BTreeSet;

/// Filesystems and objects whose changes by other processes are reported to the server.
#[derive(Clone, Default, Debug)]
pub(crate) struct WatchSet {
    filesystems: BTreeSet<u64>,
    objects: BTreeSet<Object>,
}

impl WatchSet {
    pub(crate) fn has(&self, object: Object) -> bool {
        self.filesystems.contains(&object.filesystem) || self.objects.contains(&object)
    }

    pub(crate) fn add_filesystem(&mut self, filesystem: u64) {
        self.filesystems.insert(filesystem);
    }

    pub(crate) fn add_object(&mut self, object: Object) {
        self.objects.insert(object);
    }

    /// Whether this object has a watch of its own.
    pub(crate) fn has_object(&self, object: Object) -> bool {
        self.objects.contains(&object)
    }

    /// Removes a filesystem and its objects.
    pub(crate) fn remove_filesystem(&mut self, filesystem: u64) {
        self.filesystems.remove(&filesystem);
        let first = Object { filesystem, ino: 0, birth: 0 };
        let mut objects = self.objects.split_off(&first);
        let last = Object { filesystem, ino: u64::MAX, birth: u64::MAX };
        let mut others = objects.split_off(&last);
        others.remove(&last);
        self.objects.append(&mut others);
    }

    /// Removes an object. Returns whether it had a watch of its own.
    pub(crate) fn remove_object(&mut self, object: Object) -> bool {
        self.objects.remove(&object)
    }
}
