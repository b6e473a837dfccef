//! Users of this machine's user database.

use crate::error::LinkError;
use nigh_types::Credentials;
use std::ffi::CString;
use std::io;

/// Longer entries of the user database are refused.
const MOST_BYTES: usize = 1 << 20;

/// Returns ids and groups of a user, by name or number. A number that the database does not know gets the group with
/// the same number and no others.
pub fn credentials_of(user: &str) -> Result<Credentials, LinkError> {
    let unknown = || LinkError::User(user.to_owned());
    let number = user.parse::<u32>().ok();
    match number
        .map_or_else(|| look_up(Key::Name(user)), |uid| look_up(Key::Uid(uid)))
        .map_err(|_| unknown())?
    {
        Some(found) => Ok(found),
        None => match number {
            Some(uid) if uid != u32::MAX => {
                Ok(Credentials { uid, gid: uid, groups: Vec::new(), privileges: None })
            }
            _ => Err(unknown()),
        },
    }
}

/// Returns the credentials of this process.
#[must_use]
pub fn own_credentials() -> Credentials {
    let groups = rustix::process::getgroups().unwrap_or_default();
    Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: groups.into_iter().map(rustix::process::Gid::as_raw).collect(),
        privileges: None,
    }
}

#[derive(Clone, Copy)]
enum Key<'a> {
    Name(&'a str),
    Uid(u32),
}

fn look_up(key: Key<'_>) -> io::Result<Option<Credentials>> {
    let name = match key {
        Key::Name(name) => Some(CString::new(name)?),
        Key::Uid(_) => None,
    };
    let mut buffer: Vec<libc::c_char> = vec![0; 1024];
    loop {
        // SAFETY: an all-zero passwd is one with null pointers, which is filled in before it is read.
        let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        let (space, length) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: all pointers are to live memory of the length given, until `entry` is read below.
        let error = unsafe {
            match (key, &name) {
                (Key::Uid(uid), _) => libc::getpwuid_r(uid, &raw mut entry, space, length, &raw mut found),
                (_, Some(name)) => {
                    libc::getpwnam_r(name.as_ptr(), &raw mut entry, space, length, &raw mut found)
                }
                (_, None) => return Ok(None),
            }
        };
        match error {
            0 if found.is_null() => return Ok(None),
            0 => return groups_of(&entry).map(Some),
            libc::EINTR => {}
            libc::ERANGE if buffer.len() < MOST_BYTES => buffer.resize(buffer.len() * 2, 0),
            // Errors by which some databases report an unknown name.
            libc::ENOENT | libc::ESRCH => return Ok(None),
            other => return Err(io::Error::from_raw_os_error(other)),
        }
    }
}

fn groups_of(entry: &libc::passwd) -> io::Result<Credentials> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut count = libc::c_int::try_from(groups.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: `pw_name` is a string of the entry; `groups` has room for `count` groups.
        let done =
            unsafe { libc::getgrouplist(entry.pw_name, entry.pw_gid, groups.as_mut_ptr(), &raw mut count) };
        let count = usize::try_from(count).unwrap_or(0);
        if done >= 0 {
            groups.truncate(count);
            groups.retain(|gid| *gid != entry.pw_gid);
            return Ok(Credentials { uid: entry.pw_uid, gid: entry.pw_gid, groups, privileges: None });
        }
        if groups.len() > 1 << 16 {
            return Err(io::Error::other("too many groups"));
        }
        let more = count.max(groups.len() * 2);
        groups.resize(more, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_name_and_number() {
        let root = credentials_of("root").unwrap();
        assert_eq!((root.uid, root.gid), (0, 0));
        assert_eq!(credentials_of("0").unwrap(), root);
        let unknown = credentials_of("4000123").unwrap();
        assert_eq!(unknown, Credentials { uid: 4_000_123, gid: 4_000_123, groups: vec![], privileges: None });
        for bad in ["no such user", "", "4294967295", "a\0b"] {
            assert!(credentials_of(bad).is_err(), "{bad:?}");
        }
    }
}
