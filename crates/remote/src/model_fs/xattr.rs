//! Extended attributes.

use super::{ModelFs, Outcome};
use nigh_types::{Errno, Kind, NodeRef, Reply, Timestamp, XattrSet};

/// Linux `XATTR_SIZE_MAX`.
const MAX_VALUE: usize = 65_536;
/// A set omits values longer than this.
const INLINE_VALUE: usize = 4096;
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;

/// Follows `xattr_resolve_name` in Linux's fs/xattr.c for a name that ext4 has no handler for.
fn absent(name: &[u8]) -> Errno {
    let mut parts = name.splitn(2, |&byte| byte == b'.');
    let (namespace, rest) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let is_acl = matches!(rest, b"posix_acl_access" | b"posix_acl_default");
    match namespace {
        b"user" | b"trusted" | b"security" if !rest.is_empty() => Errno::NODATA,
        b"system" if is_acl => Errno::NODATA,
        _ => Errno::OPNOTSUPP,
    }
}

pub(super) fn xattrs(tree: &ModelFs, place: &NodeRef) -> Result<Outcome, Errno> {
    let ino = tree.reach(place)?;
    let items = tree.nodes[&ino].xattrs.iter().map(|(name, value)| {
        let value = (value.len() <= INLINE_VALUE).then(|| value.as_slice().into());
        (name.as_slice().into(), value)
    });
    Ok(tree.fact(ino, place, Reply::Xattrs(XattrSet { items: items.collect() })))
}

pub(super) fn xattr(tree: &ModelFs, place: &NodeRef, name: &[u8]) -> Result<Outcome, Errno> {
    let ino = tree.reach(place)?;
    let value = tree.nodes[&ino].xattrs.get(name).ok_or_else(|| absent(name))?;
    Ok(tree.fact(ino, place, Reply::Value(value.clone())))
}

pub(super) fn set_xattr(
    tree: &mut ModelFs,
    now: Timestamp,
    place: &NodeRef,
    name: &[u8],
    value: &[u8],
    flags: u32,
) -> Result<Outcome, Errno> {
    let ino = tree.reach(place)?;
    check_xattr(tree, ino, name)?;
    if value.len() > MAX_VALUE {
        return Err(Errno::TOOBIG);
    }
    let node = tree.node_mut(ino);
    let there = node.xattrs.contains_key(name);
    match flags {
        XATTR_CREATE if there => return Err(Errno::EXIST),
        XATTR_REPLACE if !there => return Err(Errno::NODATA),
        0 | XATTR_CREATE | XATTR_REPLACE => {}
        _ => return Err(Errno::INVAL),
    }
    node.xattrs.insert(name.to_vec(), value.to_vec());
    node.attr.ctime = now;
    Ok(tree.attr_outcome(ino, place))
}

pub(super) fn remove_xattr(
    tree: &mut ModelFs,
    now: Timestamp,
    place: &NodeRef,
    name: &[u8],
) -> Result<Outcome, Errno> {
    let ino = tree.reach(place)?;
    let node = tree.node_mut(ino);
    node.xattrs.remove(name).ok_or(Errno::NODATA)?;
    node.attr.ctime = now;
    Ok(tree.attr_outcome(ino, place))
}

/// Only files and directories can have `user.` xattrs (xattr(7)).
fn check_xattr(tree: &ModelFs, ino: u64, name: &[u8]) -> Result<(), Errno> {
    let plain = matches!(tree.nodes[&ino].attr.kind(), Kind::File | Kind::Directory);
    match name {
        _ if name.len() > 255 => Err(Errno::RANGE),
        _ if name.starts_with(b"user.") && !plain => Err(Errno::PERM),
        _ if [&b"user."[..], b"trusted.", b"security.", b"system."].iter().any(|p| name.starts_with(p)) => {
            Ok(())
        }
        _ => Err(Errno::OPNOTSUPP),
    }
}
