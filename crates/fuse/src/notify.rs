//! Notifications: unsolicited messages from the daemon to the kernel.

use crate::abi::{self, OutHeader, flags};
use std::borrow::Cow;
use zerocopy::IntoBytes;

/// A notification. Some wait in the kernel for requests in flight:
///
/// | | waits for |
/// | --- | --- |
/// | `InvalEntry`, `Delete` | any LOOKUP, CREATE, MKDIR, UNLINK, RENAME, READDIRPLUS, SETATTR in `parent` |
/// | `InvalInode` with `offset` ≥ 0, `Store` | READs and WRITEs of that range |
/// | `InvalInode` with `offset` < 0, `IncEpoch`, `Prune`, `Resend` | nothing |
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notification<'a> {
    /// Invalidates attributes; with `offset` ≥ 0 also pages of `len` bytes from there (0: to the end), and a
    /// directory's cached listing. `Unknown` if the kernel does not have the inode (yet: a LOOKUP reply in flight may
    /// still bring it).
    InvalInode { ino: u64, offset: i64, len: i64 },
    /// Invalidates a dentry, positive or negative. `expire_only`: the kernel looks it up again rather than dropping it.
    InvalEntry { parent: u64, name: Cow<'a, [u8]>, expire_only: bool },
    /// Invalidates the dentry of a removed file, with an inotify event for watches on `child`.
    Delete { parent: u64, child: u64, name: Cow<'a, [u8]> },
    /// Stores data in the page cache.
    Store { ino: u64, offset: u64, data: Cow<'a, [u8]> },
    /// Sets a lower bound of a file's size. Encoded as a store of the file's last byte from unreadable memory, so
    /// that no data is stored. `fuse_notify_store` sets the size first, even while the kernel ignores attributes
    /// (`FUSE_I_SIZE_UNSTABLE`, `attr_version`), and then waits for the byte's page, which a read or write in flight
    /// may have locked.
    Lengthen { ino: u64, size: u64 },
    /// Requests cached pages; they come as `Operation::NotifyReply` with `id` as the header's `unique`.
    Retrieve { id: u64, ino: u64, offset: u64, size: u32 },
    /// Reports that a polled file is ready; `kh` is the handle from the POLL.
    Poll { kh: u64 },
    /// Redelivers requests that were received and not answered (7.40).
    Resend,
    /// Invalidates all dentries of the mount: the kernel looks them up again (7.44).
    IncEpoch,
    /// Asks the kernel to evict inodes (7.45).
    Prune { inos: Cow<'a, [u64]> },
}

const POLL: i32 = 1;
const INVAL_INODE: i32 = 2;
const INVAL_ENTRY: i32 = 3;
const STORE: i32 = 4;
const RETRIEVE: i32 = 5;
const DELETE: i32 = 6;
const RESEND: i32 = 7;
const INC_EPOCH: i32 = 8;
const PRUNE: i32 = 9;

impl Notification<'_> {
    /// Invalidates `name` in `parent`, with all dentries below it.
    #[must_use]
    pub fn entry(parent: u64, name: &[u8]) -> Notification<'_> {
        Notification::InvalEntry { parent, name: name.into(), expire_only: false }
    }

    /// Invalidates attributes only.
    #[must_use]
    pub fn attributes(ino: u64) -> Notification<'static> {
        Notification::InvalInode { ino, offset: -1, len: 0 }
    }

    /// Invalidates attributes and all pages, or a directory's listing.
    #[must_use]
    pub fn contents(ino: u64) -> Notification<'static> {
        Notification::InvalInode { ino, offset: 0, len: 0 }
    }

    /// Copies borrowed data.
    #[must_use]
    pub fn into_owned(self) -> Notification<'static> {
        let own = |name: Cow<'_, [u8]>| Cow::Owned(name.into_owned());
        match self {
            Notification::InvalInode { ino, offset, len } => Notification::InvalInode { ino, offset, len },
            Notification::InvalEntry { parent, name, expire_only } => {
                Notification::InvalEntry { parent, name: own(name), expire_only }
            }
            Notification::Delete { parent, child, name } => {
                Notification::Delete { parent, child, name: own(name) }
            }
            Notification::Store { ino, offset, data } => Notification::Store { ino, offset, data: own(data) },
            Notification::Lengthen { ino, size } => Notification::Lengthen { ino, size },
            Notification::Retrieve { id, ino, offset, size } => {
                Notification::Retrieve { id, ino, offset, size }
            }
            Notification::Poll { kh } => Notification::Poll { kh },
            Notification::Resend => Notification::Resend,
            Notification::IncEpoch => Notification::IncEpoch,
            Notification::Prune { inos } => Notification::Prune { inos: Cow::Owned(inos.into_owned()) },
        }
    }

    /// The inode or directory that the notification invalidates.
    #[must_use]
    pub fn node(&self) -> Option<u64> {
        match self {
            Notification::InvalInode { ino, .. } => Some(*ino),
            Notification::InvalEntry { parent, .. } => Some(*parent),
            _ => None,
        }
    }

    /// As this notification, for another inode.
    #[must_use]
    pub fn of_node(mut self, node: u64) -> Self {
        if let Notification::InvalInode { ino: at, .. } | Notification::InvalEntry { parent: at, .. } =
            &mut self
        {
            *at = node;
        }
        self
    }

    /// The bytes to write to the device at once; for `Lengthen` an unreadable byte must follow.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (code, body) = match self {
            Notification::Poll { kh } => (POLL, abi::NotifyPollOut { kh: *kh }.as_bytes().to_vec()),
            &Notification::InvalInode { ino, offset: off, len } => {
                (INVAL_INODE, abi::NotifyInvalInodeOut { ino, off, len }.as_bytes().to_vec())
            }
            Notification::InvalEntry { parent, name, expire_only } => {
                let flags = if *expire_only { flags::EXPIRE_ONLY } else { 0 };
                let out = abi::NotifyInvalEntryOut { parent: *parent, namelen: count(name.len()), flags };
                (INVAL_ENTRY, [out.as_bytes(), name, &[0]].concat())
            }
            Notification::Store { ino, offset, data } => {
                let size = count(data.len());
                let out = abi::NotifyStoreOut { nodeid: *ino, offset: *offset, size, padding: 0 };
                (STORE, [out.as_bytes(), data].concat())
            }
            &Notification::Lengthen { ino, size } => {
                let (offset, padding) = (size.saturating_sub(1), 0);
                (STORE, abi::NotifyStoreOut { nodeid: ino, offset, size: 1, padding }.as_bytes().to_vec())
            }
            &Notification::Retrieve { id, ino, offset, size } => {
                let (notify_unique, nodeid) = (id, ino);
                let out = abi::NotifyRetrieveOut { notify_unique, nodeid, offset, size, padding: 0 };
                (RETRIEVE, out.as_bytes().to_vec())
            }
            Notification::Delete { parent, child, name } => {
                let (parent, child, namelen) = (*parent, *child, count(name.len()));
                let out = abi::NotifyDeleteOut { parent, child, namelen, padding: 0 };
                (DELETE, [out.as_bytes(), name, &[0]].concat())
            }
            Notification::Resend => (RESEND, Vec::new()),
            Notification::IncEpoch => (INC_EPOCH, Vec::new()),
            Notification::Prune { inos } => {
                let out = abi::NotifyPruneOut { count: count(inos.len()), padding: 0, spare: 0 };
                (PRUNE, [out.as_bytes(), inos.as_bytes()].concat())
            }
        };
        let unreadable = usize::from(matches!(self, Notification::Lengthen { .. }));
        let len = count(size_of::<OutHeader>() + body.len() + unreadable);
        let header = OutHeader { len, error: code, unique: 0 };
        [header.as_bytes(), &body].concat()
    }
}

fn count(len: usize) -> u32 {
    u32::try_from(len).expect("a notification below 4 GiB")
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    #[test]
    fn each_notification_has_its_code_and_size() {
        let name = || Cow::Borrowed(&b"name"[..]);
        for (notification, code, size) in [
            (Notification::Poll { kh: 1 }, 1, 8),
            (Notification::contents(5), 2, 24),
            (Notification::entry(1, b"name"), 3, 16 + 5),
            (Notification::Store { ino: 1, offset: 0, data: name() }, 4, 24 + 4),
            (Notification::Retrieve { id: 1, ino: 2, offset: 3, size: 4 }, 5, 32),
            (Notification::Delete { parent: 1, child: 2, name: name() }, 6, 24 + 5),
            (Notification::Resend, 7, 0),
            (Notification::IncEpoch, 8, 0),
            (Notification::Prune { inos: vec![1, 2].into() }, 9, 16 + 16),
        ] {
            let bytes = notification.encode();
            let (header, rest) = OutHeader::read_from_prefix(&bytes).unwrap();
            assert_eq!((header.unique, header.error, rest.len()), (0, code, size), "{notification:?}");
            assert_eq!(usize::try_from(header.len), Ok(bytes.len()));
            assert_eq!(notification.clone().into_owned(), notification);
        }
    }

    #[test]
    fn size_notification_is_a_store_of_the_last_byte_without_data() {
        let bytes = Notification::Lengthen { ino: 7, size: 9 }.encode();
        let (header, rest) = OutHeader::read_from_prefix(&bytes).unwrap();
        let out = abi::NotifyStoreOut::read_from_bytes(rest).unwrap();
        assert_eq!((header.error, out.nodeid, out.offset, out.size), (STORE, 7, 8, 1));
        assert_eq!(usize::try_from(header.len), Ok(bytes.len() + 1));
    }

    #[test]
    fn notification_encodes_terminated_names_and_flags() {
        let expire = Notification::InvalEntry { parent: 9, name: b"ab".as_slice().into(), expire_only: true };
        let bytes = expire.encode();
        let (out, name) = abi::NotifyInvalEntryOut::read_from_prefix(&bytes[16..]).unwrap();
        assert_eq!((out.parent, out.namelen, out.flags, name), (9, 2, 1, &b"ab\0"[..]));
        let bytes = Notification::attributes(u64::MAX).encode();
        let out = abi::NotifyInvalInodeOut::read_from_bytes(&bytes[16..]).unwrap();
        assert_eq!((out.ino, out.off, out.len), (u64::MAX, -1, 0));
    }
}
