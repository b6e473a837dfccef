//! User namespaces of threads, and the ids that they map (user_namespaces(7)).

use nigh_types::{IdRange, Privileges};
use std::os::unix::fs::MetadataExt;

/// Inode number of the machine's initial user namespace (`PROC_USER_INIT_INO`).
const INITIAL: u64 = 0xEFFF_FFFD;

/// A user namespace: device and inode number of its file below `/proc/PID/ns`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UserNamespace {
    device: u64,
    inode: u64,
}

impl UserNamespace {
    /// `thread`: a number, or `self` for this process.
    pub(super) fn of(thread: &str) -> Option<UserNamespace> {
        let found = std::fs::metadata(format!("/proc/{thread}/ns/user")).ok()?;
        Some(UserNamespace { device: found.dev(), inode: found.ino() })
    }

    /// Whether it is the machine's initial user namespace.
    pub fn is_initial(self) -> bool {
        self.inode == INITIAL
    }

    /// A namespace of no thread.
    #[cfg(test)]
    pub(crate) const UNUSED: UserNamespace = UserNamespace { device: 0, inode: 0 };
}

/// The ids of this namespace that a thread's namespace maps. The first column has the thread's own ids.
pub(super) fn ranges_of(thread: u32, map: &str) -> Vec<IdRange> {
    let text = std::fs::read_to_string(format!("/proc/{thread}/{map}")).unwrap_or_default();
    text.lines().filter_map(range_of).take(Privileges::MOST_RANGES).collect()
}

fn range_of(line: &str) -> Option<IdRange> {
    let mut numbers = line.split_ascii_whitespace().skip(1).map(str::parse);
    let (first, count) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    // All ones: ids outside this namespace.
    (first != u32::MAX).then_some(IdRange { first, count })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_of_a_namespace_gives_ranges_of_ids_outside_of_it() {
        let range = |first, count| Some(IdRange { first, count });
        assert_eq!(range_of("         0       1001          1"), range(1001, 1));
        assert_eq!(range_of("         1     100000      65536"), range(100_000, 65_536));
        assert_eq!(range_of("         0          0 4294967295"), Some(IdRange::ALL));
        assert_eq!(range_of("         7 4294967295          1"), None, "not in this namespace");
        assert_eq!(range_of(""), None);
    }
}
