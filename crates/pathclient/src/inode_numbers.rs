//! Inode numbers for what a server calls its files.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Numbers from here on have another meaning to a kernel or to nigh, and are no inode numbers
/// (docs/decisions/0001-node-ids.md).
const FIRST_RESERVED: u64 = 1 << 62;
const FIRST_MAPPED: u64 = 1 << 63;

/// Inode numbers of one mount. A server's own number of a file is its inode number, unless it is 0, 1 or at least 2^62.
/// Such a number is replaced by another one, which stays the same for the life of the mount: clones share the mapping.
#[derive(Clone, Debug, Default)]
pub struct InodeNumbers(Arc<Mutex<BTreeMap<u64, u64>>>);

impl InodeNumbers {
    /// The inode number for a server's number of a file.
    #[must_use]
    pub fn inode_number(&self, number: u64) -> u64 {
        if (2..FIRST_RESERVED).contains(&number) {
            return number;
        }
        let mut mapped = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = FIRST_MAPPED + mapped.len() as u64;
        *mapped.entry(number).or_insert(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usable_number_is_kept() {
        let numbers = InodeNumbers::default();
        assert_eq!([2, 77, (1 << 62) - 1].map(|n| numbers.inode_number(n)), [2, 77, (1 << 62) - 1]);
    }

    #[test]
    fn reserved_number_is_replaced_once_for_all_sessions_of_a_mount() {
        let numbers = InodeNumbers::default();
        let next_session = numbers.clone();
        let reserved = [0, 1, 1 << 62, u64::MAX];
        let first = reserved.map(|n| numbers.inode_number(n));
        assert_eq!(first, [0, 1, 2, 3].map(|n| (1 << 63) + n));
        assert_eq!(reserved.map(|n| next_session.inode_number(n)), first);
    }
}
