//! What an errno of a change says about the names in the change.

use nigh_types::Errno;

/// Returns whether an error says nothing about a name: permissions, type of filesystem, space.
pub(crate) fn says_nothing_of_names(errno: Errno) -> bool {
    [
        Errno::PERM,
        Errno::ACCES,
        Errno::ROFS,
        Errno::XDEV,
        Errno::INVAL,
        Errno::NOSPC,
        Errno::DQUOT,
        Errno::MLINK,
        Errno::BUSY,
        Errno::INTR,
        Errno::IO,
        Errno::OPNOTSUPP,
        Errno::NFILE,
    ]
    .contains(&errno)
}

/// Returns whether an error says that the name exists.
pub(crate) fn says_exists(errno: Errno) -> Option<bool> {
    match errno {
        Errno::NOENT => Some(false),
        Errno::EXIST | Errno::NOTEMPTY => Some(true),
        _ => None,
    }
}
