//! On whose behalf a call is made. See docs/decisions/0005-credentials.md.

use nigh_cache::Caller;
use nigh_types::Credentials;

/// Linux allows 65,536 groups; more than this many are not told.
const MOST_GROUPS: usize = 1_024;

/// The caller with the supplementary groups of its thread; if that is not visible (any more), with the one that
/// came with the request.
pub(crate) fn of_caller(caller: Caller) -> Credentials {
    let mut groups = groups_of(caller.pid);
    groups.extend(caller.group.filter(|group| !groups.contains(group)));
    Credentials { uid: caller.uid, gid: caller.gid, groups }
}

/// The mount's own.
pub(crate) fn own() -> Credentials {
    Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: groups_of(std::process::id()),
    }
}

fn groups_of(pid: u32) -> Vec<u32> {
    if pid == 0 {
        return Vec::new();
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or("");
    line.split_ascii_whitespace().filter_map(|word| word.parse().ok()).take(MOST_GROUPS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_cannot_be_seen_has_no_groups() {
        assert_eq!(groups_of(0), Vec::<u32>::new());
        assert_eq!(groups_of(u32::MAX), Vec::<u32>::new());
    }

    #[test]
    fn a_group_that_came_with_the_request_is_one_of_the_callers() {
        let groups = |pid, group| of_caller(Caller { pid, group, ..Caller::default() }).groups;
        assert_eq!(groups(0, Some(33)), [33]);
        let own = groups(std::process::id(), None);
        let stranger = own.iter().max().map_or(7, |most| most + 1);
        assert_eq!(groups(std::process::id(), Some(stranger)).len(), own.len() + 1);
        for known in &own {
            assert_eq!(groups(std::process::id(), Some(*known)), own);
        }
    }

    #[test]
    fn own_groups_are_those_of_the_process() {
        let wanted: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        let mut seen = own().groups;
        let mut wanted = wanted;
        seen.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(seen, wanted);
    }
}
