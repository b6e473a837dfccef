//! Credentials of a thread (proc_pid_status(5)).

/// Linux allows 65,536 groups; at most this many are sent.
const MOST_GROUPS: usize = 1_024;

/// What a request does not carry of its caller's credentials, parsed when it is asked for. Empty for a thread that is
/// not visible.
#[derive(Debug, Default)]
pub struct ThreadCredentials(String);

impl ThreadCredentials {
    /// From the contents of `/proc/PID/status`.
    pub(super) fn from_status(status: String) -> ThreadCredentials {
        ThreadCredentials(status)
    }

    fn line(&self, name: &str) -> &str {
        self.0.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim()
    }

    /// Supplementary groups.
    pub fn groups(&self) -> Vec<u32> {
        let words = self.line("Groups:").split_ascii_whitespace();
        words.filter_map(|word| word.parse().ok()).take(MOST_GROUPS).collect()
    }

    /// Filesystem uid and gid.
    pub fn filesystem_ids(&self) -> Option<(u32, u32)> {
        // The last of real, effective, saved and filesystem id.
        let last = |name| self.line(name).split_ascii_whitespace().nth(3)?.parse().ok();
        Some((last("Uid:")?, last("Gid:")?))
    }

    /// Effective capabilities, a bit each (linux/capability.h).
    pub fn capabilities(&self) -> u64 {
        u64::from_str_radix(self.line("CapEff:"), 16).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_a_thread_tells_its_filesystem_ids_and_effective_capabilities() {
        let text = "Uid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \nCapPrm:\tffffffff\nCapEff:\t000001ffffffffff\n";
        let status = ThreadCredentials::from_status(text.to_owned());
        assert_eq!(status.filesystem_ids(), Some((4, 8)));
        assert_eq!((status.groups(), status.capabilities()), (vec![9, 10], 0x1ff_ffff_ffff));
    }
}
