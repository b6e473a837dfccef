//! Calls on the wire: one table of tags and fields.

use crate::ProtocolError;
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{Access, Call, Credentials, MutationId, Request};

/// The longest target of a symlink, in bytes (Linux `PATH_MAX` without its NUL).
pub(crate) const MAX_TARGET: usize = 4095;
/// The longest name of an xattr, in bytes (Linux `XATTR_NAME_MAX`).
const MAX_XATTR_NAME: usize = 255;
/// The longest value of an xattr, in bytes (Linux `XATTR_SIZE_MAX`).
const MAX_XATTR_VALUE: usize = 65_536;

/// Bytes of a place, at the most.
const ROOT_BYTES: usize = 300;

/// Makes from one table the tag of each call and the order of its fields.
macro_rules! calls {
    ($($tag:literal $variant:ident { $($field:ident),* $(,)? } $(without $absent:ident)?)*) => {
        /// A call's kind, as its tag on the wire.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u8)]
        pub(crate) enum CallType { $($variant = $tag),* }

        impl CallType {
            pub(crate) fn of(call: &Call) -> CallType {
                match call { $(Call::$variant { .. } => CallType::$variant),* }
            }
        }

        fn put_fields(w: &mut Writer, call: &Call) {
            match call { $(Call::$variant { $($field,)* .. } => { $($field.put(w);)* })* }
        }

        fn take_fields(tag: u8, r: &mut Reader<'_>) -> Result<Call, ProtocolError> {
            Ok(match tag {
                $($tag => Call::$variant { $($field: Wire::parse(r)?,)* $($absent: false)? },)*
                _ => return Err(ProtocolError::Malformed("unknown call")),
            })
        }
    };
}

calls! {
    1 Lookup { dir, name }
    2 ResolvePath { node, names }
    3 GetAttr { node }
    4 List { dir }
    5 ReadLink { node }
    6 Xattrs { node }
    7 Xattr { node, name }
    8 StatFs { node }
    9 Open { node, access }
    10 Read { node, handle, offset, length }
    11 Seek { node, handle, offset, data }
    12 GetFlags { node }
    13 Release { handles }
    14 Lock { node, owner, flock, kind, start, end, wait, pid, reclaim }
    15 Unlock { node, owner, flock, start, end }
    16 GetLock { node, owner, flock, kind, start, end }
    17 PinOpen { node, names, handle }
    18 Reopen { node, handle, access }
    19 Prefetch { roots, order, credit }
    20 PrefetchCredit { walk, credit, want }
    21 ListNames { dir, after }
    22 LookupNumber { ino }
    32 Create { dir, name, mode, umask, exclusive, access }
    33 Tmpfile { dir, mode, umask, access }
    34 Mknod { dir, name, kind, mode, umask, rdev }
    35 Mkdir { dir, name, mode, umask }
    36 Symlink { dir, name, target }
    37 Link { node, dir, name }
    38 Unlink { dir, name, keep }
    39 Rmdir { dir, name }
    40 Rename { from, name, to, new_name, no_replace, exchange, keep } without whiteout
    41 SetAttr { node, handle, set }
    42 Write { node, handle, offset, flags, data }
    43 Fallocate { node, handle, mode, offset, length }
    44 CopyRange { from, from_handle, from_offset, to, to_handle, to_offset, length }
    45 SetXattr { node, name, value, flags, kill_sgid }
    46 RemoveXattr { node, name }
    47 Fsync { node, handle, data_only }
}

impl Wire for Request {
    fn put(&self, w: &mut Writer) {
        self.credentials.put(w);
        self.mutation_id.put(w);
        w.u8(CallType::of(&self.call) as u8);
        w.record(|w| put_call(w, &self.call));
    }

    fn parse(r: &mut Reader<'_>) -> Result<Request, ProtocolError> {
        let credentials = Credentials::parse(r)?;
        let name = Option::<MutationId>::parse(r)?;
        let tag = r.u8()?;
        let call = take_call(tag, &mut r.record()?)?;
        check(&call)?;
        if call.is_mutation() != name.is_some() {
            return Err(ProtocolError::OpName);
        }
        Ok(Request { credentials, mutation_id: name, call })
    }
}

/// Encodes a call. A rename that leaves a whiteout has both flags set, and behind its fields the flag `no_replace`. A
/// server without support for whiteouts refuses the combination of both flags (`EINVAL`).
fn put_call(w: &mut Writer, call: &Call) {
    let Call::Rename { whiteout: true, no_replace: says_no_replace, .. } = call else {
        return put_fields(w, call);
    };
    let mut sent = call.clone();
    if let Call::Rename { no_replace, exchange, .. } = &mut sent {
        (*no_replace, *exchange) = (true, true);
    }
    put_fields(w, &sent);
    says_no_replace.put(w);
}

fn take_call(tag: u8, r: &mut Reader<'_>) -> Result<Call, ProtocolError> {
    let mut call = take_fields(tag, r)?;
    if let Call::Rename { no_replace: no_replace @ true, exchange: exchange @ true, whiteout, .. } = &mut call
        && !r.is_empty()
    {
        (*no_replace, *exchange, *whiteout) = (bool::parse(r)?, false, true);
    }
    Ok(call)
}

/// Bytes that a request takes beyond about 2 KiB of fixed fields and names.
pub(crate) fn payload_bytes(call: &Call) -> usize {
    match call {
        Call::Write { data, .. } => data.len(),
        Call::SetXattr { value, .. } => value.len(),
        Call::Symlink { target, .. } => target.len(),
        Call::Release { handles } => handles.len() * 8,
        Call::Prefetch { roots, .. } => roots.len() * ROOT_BYTES,
        Call::ResolvePath { names, .. } | Call::PinOpen { names, .. } => {
            names.iter().map(|name| name.as_bytes().len() + 2).sum()
        }
        _ => 0,
    }
}

/// Checks byte strings and ranges that their field's type does not check.
pub(crate) fn check(call: &Call) -> Result<(), ProtocolError> {
    match call {
        Call::Symlink { target, .. } => check_target(target),
        Call::Xattr { name, .. } | Call::RemoveXattr { name, .. } => check_xattr(name, &[]),
        Call::SetXattr { name, value, .. } => check_xattr(name, value),
        Call::Reopen { access: Access { truncate: true, .. }, .. } => {
            Err(ProtocolError::Malformed("a file is not truncated by opening it again"))
        }
        Call::Lock { start, end, .. }
        | Call::Unlock { start, end, .. }
        | Call::GetLock { start, end, .. } => check_range(*start, *end),
        Call::PinOpen { handle, .. } if !handle.is_client_assigned() => {
            Err(ProtocolError::Malformed("a chosen handle lacks its mark"))
        }
        Call::ResolvePath { names, .. } | Call::PinOpen { names, .. } => {
            check_count(names.len(), Call::MOST_NAMES)
        }
        Call::Prefetch { roots, .. } => check_count(roots.len(), Call::MOST_ROOTS),
        Call::Release { handles } => check_count(handles.len(), Call::MOST_HANDLES),
        _ => Ok(()),
    }
}

/// Checks a count at the sender; the receiver checks it before it decodes the items ([`Reader::bounded`]).
fn check_count(count: usize, most: u32) -> Result<(), ProtocolError> {
    match u32::try_from(count) {
        Ok(count) if count <= most => Ok(()),
        _ => Err(ProtocolError::Malformed("more names or handles than a call may carry")),
    }
}

pub(crate) fn check_range(start: u64, end: u64) -> Result<(), ProtocolError> {
    if start > end {
        return Err(ProtocolError::Malformed("a lock ends before it begins"));
    }
    Ok(())
}

pub(crate) fn check_target(target: &[u8]) -> Result<(), ProtocolError> {
    if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
        return Err(ProtocolError::Malformed("a symlink's target is empty, too long or holds a NUL"));
    }
    Ok(())
}

pub(crate) fn check_xattr(name: &[u8], value: &[u8]) -> Result<(), ProtocolError> {
    if name.is_empty() || name.len() > MAX_XATTR_NAME || name.contains(&0) {
        return Err(ProtocolError::Malformed("an xattr's name is empty, too long or holds a NUL"));
    }
    if value.len() > MAX_XATTR_VALUE {
        return Err(ProtocolError::Malformed("an xattr's value is too long"));
    }
    Ok(())
}
