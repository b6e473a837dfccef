//! The xattr form of a POSIX ACL (linux/posix_acl_xattr.h): version 2, then entries of tag, permission
//! and id, all little-endian.

pub const ACCESS: &str = "system.posix_acl_access";
pub const DEFAULT: &str = "system.posix_acl_default";

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// `u::…, u:uid:…, g::…, m::…, o::…`, permissions as digits 0–7.
#[must_use]
pub fn with_user(owner: u16, uid: u32, user: u16, group: u16, mask: u16, other: u16) -> Vec<u8> {
    let none = u32::MAX;
    let entries = [
        (USER_OBJ, owner, none),
        (USER, user, uid),
        (GROUP_OBJ, group, none),
        (MASK, mask, none),
        (OTHER, other, none),
    ];
    let mut out = 2_u32.to_le_bytes().to_vec();
    for (tag, permission, id) in entries {
        out.extend(tag.to_le_bytes());
        out.extend(permission.to_le_bytes());
        out.extend(id.to_le_bytes());
    }
    out
}
