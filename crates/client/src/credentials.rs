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

/// `CAP_SYS_ADMIN` in /proc/PID/status (linux/capability.h).
const CAP_SYS_ADMIN: u64 = 1 << 21;
/// What /proc/PID/ns/user of the initial user namespace leads to (`PROC_USER_INIT_INO`).
const INITIAL_NAMESPACE: &str = "user:[4026531837]";

/// Whether the kernel's own filesystems would list the xattrs of the system (`trusted.`) to this thread: it has
/// `CAP_SYS_ADMIN`, and that in the initial user namespace. Of a thread that cannot be looked at: no.
pub(crate) fn sees_privileged_xattrs(pid: u32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return false };
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    effective & CAP_SYS_ADMIN != 0
        && std::fs::read_link(format!("/proc/{pid}/ns/user"))
            .is_ok_and(|ns| ns.as_os_str() == INITIAL_NAMESPACE)
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
    fn thread_without_capability_or_out_of_sight_sees_no_privileged_xattrs() {
        assert!(!sees_privileged_xattrs(0));
        assert!(!sees_privileged_xattrs(u32::MAX));
        let own = std::process::id();
        let initial =
            std::fs::read_link("/proc/self/ns/user").is_ok_and(|ns| ns.as_os_str() == INITIAL_NAMESPACE);
        let capable = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN));
        assert_eq!(sees_privileged_xattrs(own), initial && capable);
        let Ok(mut plain) = std::process::Command::new("setpriv")
            .args(["--inh-caps=-all", "--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "30"])
            .spawn()
        else {
            return println!("SKIPPED: no setpriv");
        };
        // Between fork and exec it is what we are.
        let begun = std::time::Instant::now();
        while sees_privileged_xattrs(plain.id()) && begun.elapsed() < std::time::Duration::from_secs(5) {
            std::thread::yield_now();
        }
        let seen = sees_privileged_xattrs(plain.id());
        let _ = plain.kill();
        plain.wait().unwrap();
        assert!(!seen);
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
