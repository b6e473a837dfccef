//! Entries: what a client learns of an inode under a name.

use crate::export::node::{Node, proc_path};
use crate::os::error::Result;
use nigh_types::{Attr, Entry, Kind};

/// SELinux label, which every file on the server has. Clients neither list nor read nor set it: a label is meaningful
/// only under its machine's policy, and `ls -l` would request it for every file.
pub(crate) const SELINUX: &[u8] = b"security.selinux";

/// Builds the entry of a resolved node.
pub(crate) fn entry(node: &Node) -> Result<Entry> {
    entry_with(node, node.stat.attr)
}

/// Builds the entry of a resolved node, with these attributes.
pub(crate) fn entry_with(node: &Node, attr: Attr) -> Result<Entry> {
    let target = match node.stat.attr.kind() {
        Kind::Symlink => Some(target(node)?),
        _ => None,
    };
    let path = proc_path(&node.fd);
    let no_xattrs = has_no_xattrs(|buffer| rustix::fs::listxattr(&path, buffer));
    Ok(Entry { id: node.id, attr, target, no_xattrs })
}

/// Returns the target of a symlink, unresolved.
pub(crate) fn target(node: &Node) -> Result<Box<[u8]>> {
    let target = rustix::fs::readlinkat(&node.fd, c"", Vec::with_capacity(256))?;
    Ok(target.into_bytes().into())
}

/// Whether an inode has no visible extended attributes, where `list` is its listxattr(2).
pub(crate) fn has_no_xattrs(list: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>) -> bool {
    // Fits the label's name with its NUL.
    let mut buffer = [0; SELINUX.len() + 1];
    match list(&mut buffer) {
        Ok(0) | Err(rustix::io::Errno::OPNOTSUPP) => true,
        Ok(length) => buffer.get(..length).is_some_and(|names| names.strip_suffix(b"\0") == Some(SELINUX)),
        Err(_) => false,
    }
}
