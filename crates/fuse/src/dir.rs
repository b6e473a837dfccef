//! Directory listings for READDIR and READDIRPLUS.

use crate::Entry;
use crate::abi::{EntryOut, RawDirent, record_align};
use crate::reply::entry_out;
use zerocopy::IntoBytes;

/// A directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dirent<'a> {
    /// `d_ino`.
    pub ino: u64,
    /// `d_off`: offset at which the listing continues after this entry. At most `i64::MAX`, never 0.
    pub cookie: u64,
    /// `d_type`: DT_REG and the like; 0 if unknown.
    pub kind: u32,
    /// 1 to 1024 bytes, no `/` and no NUL: the kernel fails the whole listing on others.
    pub name: &'a [u8],
}

/// Bytes of an entry in a listing, with its padding.
#[must_use]
pub const fn dirent_len(name_len: usize, plus: bool) -> usize {
    let head = if plus { size_of::<EntryOut>() } else { 0 } + size_of::<RawDirent>();
    record_align(head + name_len)
}

/// Packs entries for one reply. The buffer can be reused with [`DirBuffer::restart`].
#[derive(Debug)]
pub struct DirBuffer {
    bytes: Vec<u8>,
    size: usize,
    plus: bool,
}

impl DirBuffer {
    /// For a request of `size` bytes.
    #[must_use]
    pub fn new(size: u32, plus: bool) -> DirBuffer {
        let mut buffer = DirBuffer { bytes: Vec::new(), size: 0, plus };
        buffer.restart(size, plus);
        buffer
    }

    /// Empties it for another request.
    pub fn restart(&mut self, size: u32, plus: bool) {
        self.bytes.clear();
        self.size = usize::try_from(size).unwrap_or(usize::MAX);
        self.plus = plus;
    }

    /// Adds an entry; returns false and adds nothing if it no longer fits.
    ///
    /// `entry` is the inode for READDIRPLUS, and counts as one lookup of it; `None` (always for `.` and `..`) gives
    /// only the name. READDIR ignores it.
    #[must_use]
    pub fn push(&mut self, dirent: &Dirent<'_>, entry: Option<&Entry>) -> bool {
        debug_assert!(!dirent.name.is_empty() && !dirent.name.contains(&b'/'), "{dirent:?}");
        let len = dirent_len(dirent.name.len(), self.plus);
        if self.size.saturating_sub(self.bytes.len()) < len {
            return false;
        }
        let end = self.bytes.len() + len;
        if self.plus {
            self.bytes.extend_from_slice(entry.map(entry_out).unwrap_or_default().as_bytes());
        }
        let raw = RawDirent {
            ino: dirent.ino,
            off: dirent.cookie,
            namelen: u32::try_from(dirent.name.len()).expect("a name that fits the answer"),
            kind: dirent.kind,
        };
        self.bytes.extend_from_slice(raw.as_bytes());
        self.bytes.extend_from_slice(dirent.name);
        self.bytes.resize(end, 0);
        true
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn walk(bytes: &[u8], plus: bool) -> Vec<(u64, u64, u32, Vec<u8>, u64)> {
        let mut rest = bytes;
        let mut seen = Vec::new();
        while !rest.is_empty() {
            let mut record = rest;
            let mut nodeid = 0;
            if plus {
                let (entry, tail) = EntryOut::read_from_prefix(record).unwrap();
                (nodeid, record) = (entry.nodeid, tail);
            }
            let (raw, name) = RawDirent::read_from_prefix(record).unwrap();
            let name = &name[..usize::try_from(raw.namelen).unwrap()];
            seen.push((raw.ino, raw.off, raw.kind, name.to_vec(), nodeid));
            rest = &rest[dirent_len(name.len(), plus)..];
        }
        seen
    }

    #[test]
    fn entries_come_back_at_every_length_of_name() {
        for plus in [false, true] {
            let mut buffer = DirBuffer::new(1 << 20, plus);
            let names: Vec<Vec<u8>> = (1..=255).map(|len| vec![b'n'; len]).collect();
            for (index, name) in (1u64..).zip(&names) {
                let entry = Entry { nodeid: index, ..Entry::default() };
                let dirent = Dirent { ino: index << 40, cookie: index, kind: 8, name };
                assert!(buffer.push(&dirent, (index % 2 == 0).then_some(&entry)));
                assert_eq!(buffer.as_bytes().len() % 8, 0);
            }
            let seen = walk(buffer.as_bytes(), plus);
            for (index, (name, seen)) in (1u64..).zip(names.iter().zip(&seen)) {
                let nodeid = if plus && index % 2 == 0 { index } else { 0 };
                assert_eq!(*seen, (index << 40, index, 8, name.clone(), nodeid));
            }
        }
    }

    #[test]
    fn directory_buffer_never_exceeds_the_requested_size() {
        for plus in [false, true] {
            let (one, dirent) = (dirent_len(3, plus), Dirent { ino: 1, cookie: 1, kind: 0, name: b"abc" });
            assert_eq!(one, if plus { 160 } else { 32 });
            for size in 0..3 * one {
                let mut buffer = DirBuffer::new(u32::try_from(size).unwrap(), plus);
                let mut fitted = 0;
                while buffer.push(&dirent, None) {
                    fitted += 1;
                }
                assert_eq!((fitted, buffer.as_bytes().len()), (size / one, size / one * one));
            }
        }
    }

    #[test]
    fn a_buffer_can_be_used_again() {
        let mut buffer = DirBuffer::new(64, false);
        assert!(buffer.push(&Dirent { ino: 1, cookie: 1, kind: 0, name: b"a" }, None));
        buffer.restart(8, true);
        assert!(buffer.is_empty());
        assert!(!buffer.push(&Dirent { ino: 1, cookie: 1, kind: 0, name: b"a" }, None));
    }
}
