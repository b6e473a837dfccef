//! Messages that several calls send.

use crate::{Tmessage, mask};
use nigh_types::{SetAttr, SetTime};

/// The message that requests attributes.
pub(super) fn getattr(fid: u32) -> Tmessage {
    Tmessage::Getattr { fid, wanted: mask::BASIC }
}

/// The message that changes attributes.
pub(super) fn setattr(fid: u32, set: &SetAttr) -> Tmessage {
    let mut valid = 0;
    let mut flag = |is_set: bool, bits: u32| valid |= if is_set { bits } else { 0 };
    flag(set.mode.is_some(), mask::SET_MODE);
    flag(set.uid.is_some(), mask::SET_UID);
    flag(set.gid.is_some(), mask::SET_GID);
    flag(set.size.is_some(), mask::SET_SIZE);
    flag(set.atime.is_some(), mask::SET_ATIME);
    flag(set.mtime.is_some(), mask::SET_MTIME);
    flag(matches!(set.atime, Some(SetTime::At(_))), mask::ATIME_SET);
    flag(matches!(set.mtime, Some(SetTime::At(_))), mask::MTIME_SET);
    let moment = |time: Option<SetTime>| match time {
        Some(SetTime::At(at)) => {
            let (secs, nanos) = at.pair();
            (secs.cast_unsigned(), u64::from(nanos))
        }
        _ => (0, 0),
    };
    Tmessage::Setattr {
        fid,
        valid,
        mode: set.mode.unwrap_or(0),
        uid: set.uid.unwrap_or(0),
        gid: set.gid.unwrap_or(0),
        size: set.size.unwrap_or(0),
        atime: moment(set.atime),
        mtime: moment(set.mtime),
    }
}
