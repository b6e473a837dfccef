//! Credentials of a thread (proc_pid_status(5)).

/// Linux allows 65,536 groups; at most this many are sent.
const MOST_GROUPS: usize = 1_024;

/// Contents of a thread's `/proc/PID/status`; empty if it is not visible.
pub(crate) struct Status(String);

impl Status {
    pub fn of(pid: u32) -> Status {
        let text = (pid != 0).then(|| std::fs::read_to_string(format!("/proc/{pid}/status")));
        Status(text.and_then(Result::ok).unwrap_or_default())
    }

    fn line(&self, name: &str) -> &str {
        self.0.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim()
    }

    pub fn groups(&self) -> Vec<u32> {
        let words = self.line("Groups:").split_ascii_whitespace();
        words.filter_map(|word| word.parse().ok()).take(MOST_GROUPS).collect()
    }

    /// Filesystem ids: the last of real, effective, saved and filesystem id.
    pub fn filesystem_ids(&self) -> Option<(u32, u32)> {
        let last = |name| self.line(name).split_ascii_whitespace().nth(3)?.parse().ok();
        Some((last("Uid:")?, last("Gid:")?))
    }

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
        let status = Status(text.to_owned());
        assert_eq!(status.filesystem_ids(), Some((4, 8)));
        assert_eq!((status.groups(), status.capabilities()), (vec![9, 10], 0x1ff_ffff_ffff));
    }
}
