//! User namespaces of threads, and the ids that they map (user_namespaces(7)).

use nigh_types::{IdRange, Privileges};
use std::os::unix::fs::MetadataExt;

/// Inode number of the machine's initial user namespace (`PROC_USER_INIT_INO`).
pub(crate) const INITIAL_NAMESPACE: u64 = 0xEFFF_FFFD;

/// Device and inode number of a file below `/proc/PID/ns`.
pub(crate) type Namespace = (u64, u64);

pub(crate) fn namespace_of(thread: &str) -> Option<Namespace> {
    let found = std::fs::metadata(format!("/proc/{thread}/ns/user")).ok()?;
    Some((found.dev(), found.ino()))
}

/// The ids of this namespace that a thread's namespace maps. The first column has the thread's own ids.
pub(crate) fn ranges_of(thread: &str, map: &str) -> Vec<IdRange> {
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
