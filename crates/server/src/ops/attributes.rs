//! Changes of attributes.

use super::write_tracking::TrackedWrite;
use super::{Context, Outcome};
use crate::export::node::{Node, proc_path};
use crate::os::error::{Fault, Result};
use crate::os::impersonate::SetIdBits;
use nigh_types::{Errno, Handle, Kind, NodeRef, Reply, SetAttr, SetTime};
use rustix::fs::{AtFlags, CWD, Gid, Mode, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, XattrFlags};

const CAPABILITY: &[u8] = b"security.capability";
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";

/// Sets owner, then mode, then size, then times: a change of the owner clears setuid bits that the mode may set
/// again, and a change of the size sets times.
pub(crate) fn setattr(
    cx: Context<'_>,
    place: &NodeRef,
    handle: Option<Handle>,
    set: &SetAttr,
) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    let set_so_far = apply(cx, &node, (place, handle), set);
    if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() {
        cx.rights_changed(&node);
    }
    set_so_far?;
    attr_reply(cx, &node)
}

fn apply(
    cx: Context<'_>,
    node: &Node,
    (place, handle): (&NodeRef, Option<Handle>),
    set: &SetAttr,
) -> Result<()> {
    let open = cx.files.find_optional(handle, place.node)?;
    {
        let data = set.size.is_some() || set.mtime.is_some();
        let _change = data.then(|| TrackedWrite::begin(cx, place.node, &node.fd)).transpose()?;
        let killed = set.size.is_some() && set.kill_suidgid;
        let bits = if killed { SetIdBits::Dropped } else { SetIdBits::AsForCaller };
        let _acting = cx.act_changing(node, set, bits)?;
        if set.uid.is_some() || set.gid.is_some() || *set == SetAttr::chown_to_same() {
            let owner = set.uid.map(uid).transpose()?;
            let group = set.gid.map(gid).transpose()?;
            rustix::fs::chownat(&node.fd, c"", owner, group, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = set.mode {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            rustix::fs::chmodat(CWD, proc_path(&node.fd), mode, AtFlags::empty())?;
        }
        if let Some(size) = set.size {
            match open.as_ref().filter(|file| file.writable) {
                Some(file) => rustix::fs::ftruncate(&file.fd, size)?,
                None => truncate(node, size)?,
            }
            cx.call_leases.changed((size, u64::MAX));
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let times =
                Timestamps { last_access: timespec(set.atime)?, last_modification: timespec(set.mtime)? };
            rustix::fs::utimensat(&node.fd, c"", &times, AtFlags::EMPTY_PATH)?;
        }
    }
    Ok(())
}

pub(crate) fn setxattr(
    cx: Context<'_>,
    place: &NodeRef,
    (name, value): (&[u8], &[u8]),
    flags: u32,
    kill_sgid: bool,
) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    let set_so_far = apply_xattr(cx, &node, (name, value), flags, kill_sgid);
    if name == ACCESS_ACL {
        cx.rights_changed(&node);
    }
    set_so_far?;
    attr_reply(cx, &node)
}

fn apply_xattr(
    cx: Context<'_>,
    node: &Node,
    (name, value): (&[u8], &[u8]),
    flags: u32,
    kill_sgid: bool,
) -> Result<()> {
    let path = proc_path(&node.fd);
    let _acting = cx.act_on_xattrs(node)?;
    rustix::fs::setxattr(&path, name, value, XattrFlags::from_bits_retain(flags))?;
    if kill_sgid {
        let (_, attr) = cx.attr_now(node)?;
        if attr.mode & 0o2000 != 0 {
            let mode = Mode::from_raw_mode(attr.mode & 0o5777);
            rustix::fs::chmodat(CWD, &path, mode, AtFlags::empty())?;
        }
    }
    Ok(())
}

pub(crate) fn removexattr(cx: Context<'_>, place: &NodeRef, name: &[u8]) -> Result<Outcome> {
    let node = cx.resolver().node(place, cx.files)?;
    if name == CAPABILITY {
        remove_capability(cx, &node)?;
    } else {
        let _acting = cx.act_on_xattrs(&node)?;
        rustix::fs::removexattr(proc_path(&node.fd), name)?;
    }
    if name == ACCESS_ACL {
        cx.rights_changed(&node);
    }
    attr_reply(cx, &node)
}

/// Removes file capabilities. The client's kernel requests this on behalf of a caller that may write to the file or
/// change its owner (`cap_inode_killpriv`), and has checked that. It rejects a removexattr(2) of a caller without
/// `CAP_SETFCAP` itself. So the server uses its own rights if the kernel is vouched for. Otherwise it uses the
/// caller's rights: chown(2) to the present owner and group clears capabilities, together with setuid and setgid
/// bits.
fn remove_capability(cx: Context<'_>, node: &Node) -> Result<()> {
    let _acting = cx.act_unless_vouched()?;
    match rustix::fs::removexattr(proc_path(&node.fd), CAPABILITY) {
        Err(rustix::io::Errno::PERM) => {
            Ok(rustix::fs::chownat(&node.fd, c"", None, None, AtFlags::EMPTY_PATH)?)
        }
        // Another client has removed the capabilities already.
        Err(rustix::io::Errno::NODATA) if cx.who.uid != 0 => Ok(()),
        removed => Ok(removed?),
    }
}

fn attr_reply(cx: Context<'_>, node: &Node) -> Result<Outcome> {
    cx.call_leases.done();
    let mut grants = Vec::new();
    cx.grant_attr(&mut grants, node);
    let (id, attr) = cx.attr_now(node)?;
    Ok(Outcome { reply: Reply::Attr(id, attr), after: Vec::new(), grants })
}

fn truncate(node: &Node, size: u64) -> Result<()> {
    match node.stat.attr.kind() {
        Kind::File => {}
        Kind::Directory => return Err(Fault(Errno::ISDIR)),
        _ => return Err(Fault(Errno::INVAL)),
    }
    let size = libc::off64_t::try_from(size).map_err(|_| Fault(Errno::FBIG))?;
    let path = std::ffi::CString::new(proc_path(&node.fd)).map_err(|_| Fault(Errno::INVAL))?;
    // SAFETY: the path ends with NUL. (Opening for writing instead would fail on a running program
    // and check other rights.)
    if unsafe { libc::truncate64(path.as_ptr(), size) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(())
}

/// chown(2) takes an id of all ones as "unchanged", so no file can have it.
fn uid(id: u32) -> Result<Uid> {
    if id == u32::MAX { Err(Fault(Errno::INVAL)) } else { Ok(Uid::from_raw(id)) }
}

fn gid(id: u32) -> Result<Gid> {
    if id == u32::MAX { Err(Fault(Errno::INVAL)) } else { Ok(Gid::from_raw(id)) }
}

fn timespec(time: Option<SetTime>) -> Result<Timespec> {
    let (tv_sec, tv_nsec) = match time {
        None => (0, UTIME_OMIT),
        Some(SetTime::Now) => (0, UTIME_NOW),
        Some(SetTime::At(at)) => {
            let (secs, nanos) = at.pair();
            if nanos >= 1_000_000_000 {
                return Err(Fault(Errno::INVAL));
            }
            (secs, nanos.into())
        }
    };
    Ok(Timespec { tv_sec, tv_nsec })
}
