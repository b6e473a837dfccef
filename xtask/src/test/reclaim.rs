//! Detects whether this machine reclaims clean pages from its page cache by itself: under a control group's limit that
//! its processes do not see, or under memory pressure. Tests that count repeated reads of files must know.

use anyhow::{Context as _, Result};

/// Counters of /proc/vmstat, since boot.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Reclaim {
    /// File pages that were reclaimed and read again. The kernel does not count pages that a filesystem has
    /// invalidated.
    refaults: u64,
    /// Pages reclaimed with their inodes; the kernel does not count their later reads.
    with_inodes: u64,
    /// Writes to /proc/sys/vm/drop_caches.
    drops: u64,
}

impl Reclaim {
    pub fn now() -> Result<Reclaim> {
        let path = "/proc/vmstat";
        Ok(Reclaim::of(&std::fs::read_to_string(path).context(path)?))
    }

    fn of(vmstat: &str) -> Reclaim {
        let mut counts = Reclaim::default();
        let lines = vmstat.lines().filter_map(|line| line.split_once(' '));
        for (name, count) in lines.filter_map(|(name, count)| Some((name, count.trim().parse::<u64>().ok()?)))
        {
            match name {
                "workingset_refault_file" => counts.refaults += count,
                "pginodesteal" | "kswapd_inodesteal" => counts.with_inodes += count,
                "drop_pagecache" | "drop_slab" => counts.drops += count,
                _ => {}
            }
        }
        counts
    }

    /// Returns the maximum of pages that were read from `from` to `to` because this machine had reclaimed them. They
    /// may have been reclaimed with inodes since `before`, the time of the previous read.
    #[must_use]
    pub fn read_again(before: Reclaim, from: Reclaim, to: Reclaim) -> u64 {
        if to.drops > before.drops {
            return u64::MAX;
        }
        to.refaults.saturating_sub(from.refaults) + to.with_inodes.saturating_sub(before.with_inodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reclaimed_pages_are_counted_from_vmstat() {
        let vmstat = |refaults: u64, stolen: u64, drops: u64| {
            Reclaim::of(&format!(
                "workingset_refault_anon 900\nworkingset_refault_file {refaults}\npginodesteal {stolen}\nkswapd_inodesteal 7\n\
                 drop_pagecache {drops}\ndrop_slab 0\nsomething else\n"
            ))
        };
        let (before, from) = (vmstat(10, 5, 1), vmstat(30, 8, 1));
        assert_eq!(Reclaim::read_again(before, from, from), 3, "what went with inodes before");
        assert_eq!(Reclaim::read_again(before, from, vmstat(34, 9, 1)), 8);
        assert_eq!(Reclaim::read_again(from, from, from), 0);
        assert_eq!(Reclaim::read_again(before, from, vmstat(30, 8, 2)), u64::MAX);
        assert_eq!(Reclaim::of(""), Reclaim::default());
    }
}
