//! The user database: names of users and groups, and the groups of a user.

use nigh_native::{MAX_ID_NAME_BYTES, MAX_ID_NAMES};
use nigh_types::{Credentials, IdKind, IdName};
use parking_lot::Mutex;
use std::ffi::{CStr, CString};
use std::io;

/// Serialises getpwent(3) and getgrent(3), whose position is shared by all threads.
static WALK: Mutex<()> = Mutex::new(());

/// Returns users, then groups; each id once, with its first name; at most [`MAX_ID_NAMES`].
pub(crate) fn names() -> Vec<IdName> {
    let _walk = WALK.lock();
    let mut names = Vec::new();
    // SAFETY: `WALK` keeps other threads from walking the databases; an entry is copied before the next call.
    unsafe {
        libc::setpwent();
        while let Some(entry) = libc::getpwent().as_ref() {
            note(&mut names, IdKind::User, entry.pw_uid, CStr::from_ptr(entry.pw_name));
        }
        libc::endpwent();
        libc::setgrent();
        while let Some(entry) = libc::getgrent().as_ref() {
            note(&mut names, IdKind::Group, entry.gr_gid, CStr::from_ptr(entry.gr_name));
        }
        libc::endgrent();
    }
    names
}

fn note(names: &mut Vec<IdName>, kind: IdKind, id: u32, name: &CStr) {
    let Ok(name) = name.to_str() else { return };
    let has_room = (names.len() as u64) < MAX_ID_NAMES;
    let usable = !name.is_empty() && name.len() as u64 <= MAX_ID_NAME_BYTES && has_room;
    // Databases are nearly sorted and small; a second name of one id is rare.
    if usable && !names.iter().any(|known| known.kind == kind && known.id == id) {
        names.push(IdName { kind, id, name: name.to_owned() });
    }
}

/// Returns ids and groups of a user as after a login.
///
/// # Errors
/// `NotFound` if there is no such user; otherwise the error of getpwuid_r(3).
pub fn credentials_of(uid: u32) -> io::Result<Credentials> {
    let (name, gid) = user(uid)?;
    let mut groups = vec![0; 64];
    loop {
        let mut count = libc::c_int::try_from(groups.len()).map_err(io::Error::other)?;
        // SAFETY: the name ends with NUL; at most `count` groups are written.
        let found = unsafe { libc::getgrouplist(name.as_ptr(), gid, groups.as_mut_ptr(), &raw mut count) };
        let count = usize::try_from(count).unwrap_or(0);
        if found >= 0 {
            groups.truncate(count);
            groups.retain(|group| *group != gid);
            return Ok(Credentials { uid, gid, groups, privileges: None });
        }
        // Some libcs do not return the number of groups.
        groups.resize(count.max(groups.len() * 2), 0);
        if groups.len() > 1 << 16 {
            return Err(io::Error::other("a user is in more groups than Linux allows"));
        }
    }
}

/// Returns name and primary group.
fn user(uid: u32) -> io::Result<(CString, u32)> {
    let mut buffer = vec![0; 1 << 12];
    loop {
        let mut found = std::ptr::null_mut();
        // SAFETY: `entry` is plain data, whose pointers lead into `buffer` and are used while it lives.
        unsafe {
            let mut entry: libc::passwd = std::mem::zeroed();
            let errno =
                libc::getpwuid_r(uid, &raw mut entry, buffer.as_mut_ptr(), buffer.len(), &raw mut found);
            match errno {
                libc::ERANGE if buffer.len() < 1 << 20 => buffer.resize(buffer.len() * 4, 0),
                0 if found.is_null() => {
                    return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no user {uid}")));
                }
                0 => return Ok((CStr::from_ptr(entry.pw_name).to_owned(), entry.pw_gid)),
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_database_maps_each_id_to_one_name() {
        let names = names();
        let name = |kind, id| names.iter().filter(move |n| n.kind == kind && n.id == id).collect::<Vec<_>>();
        assert_eq!(name(IdKind::User, 0)[0].name, "root");
        assert_eq!(name(IdKind::Group, 0)[0].name, "root");
        assert!(names.iter().all(|n| name(n.kind, n.id).len() == 1));
        assert_eq!(self::names(), names, "walked from the beginning each time");
    }

    #[test]
    fn a_user_has_the_groups_of_a_login() {
        let root = credentials_of(0).unwrap();
        assert_eq!((root.uid, root.gid), (0, 0));
        assert!(!root.groups.contains(&0));
        assert_eq!(credentials_of(4_000_000_000).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
