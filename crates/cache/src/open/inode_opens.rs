//! Opens of one inode: how often it is open, and the pin at the remote for opens without a handle.

use crate::op::Caller;
use crate::open::OpenKind;
use nigh_types::{Attr, Handle, Time};

/// The opens' part of an inode's record.
#[derive(Clone, Debug)]
pub(crate) struct InodeOpens {
    /// Time and attributes of the last GETATTR reply, for an open file.
    last_getattr: Option<Box<(Time, Attr)>>,
    /// Handle at the remote that keeps a file readable which was opened without one.
    pin: Option<Handle>,
    /// Number of open [`crate::Fh`]s.
    count: u32,
    /// Opens without a handle at the remote. The remote must pin the file before its last name goes or its permissions
    /// change.
    unpinned: u32,
    /// Opens for writing.
    writers: u32,
    /// Thread of root that removed the file's capability last: it may be about to write (`ops/privs.rs`).
    uncapped_by: Option<u32>,
    /// A process of this mount has asked for an fcntl(2) lock on the file.
    has_locks: bool,
}

impl InodeOpens {
    pub const fn none() -> InodeOpens {
        InodeOpens {
            last_getattr: None,
            pin: None,
            count: 0,
            unpinned: 0,
            writers: 0,
            uncapped_by: None,
            has_locks: false,
        }
    }

    /// Returns whether nothing is recorded that is of use while the inode is not open.
    pub fn is_none(&self) -> bool {
        let InodeOpens { last_getattr: _, pin, count, unpinned, writers, uncapped_by: _, has_locks } = self;
        pin.is_none() && *count == 0 && *unpinned == 0 && *writers == 0 && !has_locks
    }

    /// Returns the opens that go on when another inode takes the inode number. `None`: the inode is not open.
    pub fn after_reuse(&self) -> Option<InodeOpens> {
        let InodeOpens { count, unpinned, writers, .. } = *self;
        self.is_open().then_some(InodeOpens { count, unpinned, writers, ..InodeOpens::none() })
    }
}

/// Open and close.
impl InodeOpens {
    /// Returns whether the kernel holds the inode open.
    pub fn is_open(&self) -> bool {
        self.count > 0
    }

    /// Returns whether the kernel holds the file open for writing.
    pub fn is_written(&self) -> bool {
        self.writers > 0
    }

    /// Returns how often the kernel holds the file open.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Records an open of a file.
    pub fn note_open(&mut self, kind: OpenKind, writes: bool) {
        self.count += 1;
        self.writers += u32::from(writes);
        self.unpinned += u32::from(kind == OpenKind::Granted);
    }

    /// Records the close of a file.
    pub fn note_close(&mut self, has_handle: bool, writes: bool) {
        self.count -= 1;
        self.writers -= u32::from(writes);
        self.unpinned -= u32::from(!has_handle);
        if !self.is_open() {
            self.last_getattr = None;
        }
    }

    pub fn note_dir_open(&mut self) {
        self.count += 1;
    }

    pub fn note_dir_close(&mut self) {
        self.count -= 1;
    }

    /// Records that an open file has lost its handle at the remote.
    pub fn note_handle_lost(&mut self) {
        self.unpinned += 1;
    }

    /// Drops pin and opens without a handle, because the remote has lost all handles. The caller records each open
    /// file by `note_handle_lost`.
    pub fn note_all_handles_lost(&mut self) {
        (self.unpinned, self.pin) = (0, None);
    }
}

/// Pin at the remote.
impl InodeOpens {
    pub fn pin(&self) -> Option<Handle> {
        self.pin
    }

    pub fn is_pinned(&self) -> bool {
        self.pin.is_some()
    }

    pub fn is_pinned_by(&self, handle: Handle) -> bool {
        self.pin == Some(handle)
    }

    /// Returns whether the file is open without a handle.
    pub fn has_unpinned(&self) -> bool {
        self.unpinned > 0
    }

    /// Returns whether the remote must pin the file before its last name goes.
    pub fn needs_pin(&self) -> bool {
        self.has_unpinned() && !self.is_pinned()
    }

    pub fn note_pin(&mut self, handle: Handle) {
        self.pin = Some(handle);
    }

    /// Drops a pin that the remote has lost. Returns whether it was the file's.
    pub fn lose_pin(&mut self, handle: Handle) -> bool {
        self.pin.take_if(|pin| *pin == handle).is_some()
    }

    /// Takes the pin of a file whose record is dropped.
    pub fn take_pin(&mut self) -> Option<Handle> {
        self.pin.take()
    }

    /// Takes the pin if no open needs it and no call uses it.
    pub fn take_idle_pin(&mut self, is_used: impl FnOnce(Handle) -> bool) -> Option<Handle> {
        if self.has_unpinned() {
            return None;
        }
        self.pin.take_if(|handle| !is_used(*handle))
    }
}

/// What callers of an open file have done.
impl InodeOpens {
    /// Records that a process asks for an fcntl(2) lock.
    pub fn note_lock_request(&mut self) {
        self.has_locks = true;
    }

    /// Returns whether a lock owner may close a descriptor: the close must reach the cache.
    pub fn may_have_locks(&self) -> bool {
        self.has_locks || self.is_open()
    }

    /// Records a removal of the file's capability.
    pub fn note_uncapped(&mut self, caller: Caller) {
        self.uncapped_by = (caller.uid == 0).then_some(caller.pid);
    }

    /// Takes the record of the last removal of the capability. Returns whether this thread of root made it.
    pub fn take_uncapped(&mut self, caller: Caller) -> bool {
        self.uncapped_by.take() == Some(caller.pid)
    }

    /// Records the attributes of a GETATTR reply: the caller may read up to their size until it applies a newer reply.
    pub fn note_getattr_reply(&mut self, at: Time, attr: Attr) {
        self.last_getattr = Some(Box::new((at, attr)));
    }

    /// Returns time and attributes of the last GETATTR reply since the file was opened.
    pub fn last_getattr(&self) -> Option<&(Time, Attr)> {
        self.last_getattr.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_stays_until_the_last_open_without_a_handle_and_the_last_call_that_uses_it() {
        let mut opens = InodeOpens::none();
        opens.note_open(OpenKind::Granted, false);
        assert!(opens.needs_pin());
        opens.note_pin(Handle(3));
        assert!(!opens.needs_pin());
        assert_eq!(opens.take_idle_pin(|_| false), None);
        opens.note_close(false, false);
        assert_eq!(opens.take_idle_pin(|_| true), None);
        assert!(!opens.is_none(), "the remote still has the file open");
        assert_eq!(opens.take_idle_pin(|_| false), Some(Handle(3)));
        assert!(opens.is_none());
    }

    #[test]
    fn opens_go_on_when_another_inode_takes_the_number_and_locks_do_not() {
        let mut opens = InodeOpens::none();
        opens.note_lock_request();
        assert!(opens.after_reuse().is_none());
        opens.note_open(OpenKind::Remote(Handle(1)), true);
        opens.note_pin(Handle(3));
        let mut kept = opens.after_reuse().expect("the file is open");
        assert!(kept.is_written() && !kept.is_pinned());
        kept.note_close(true, true);
        assert!(kept.is_none());
    }
}
