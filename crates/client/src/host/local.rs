//! The kernel of this machine, as `/proc` shows it (proc(5)). A mount option of `/proc` may hide threads (hidepid).

use super::{Host, Submounts, ThreadCredentials, UserNamespace, signals, user_namespace, watchers};
use crate::thread_state::ThreadState;
use nigh_types::IdRange;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::collections::BTreeSet;
use std::path::Path;

/// The kernel of this machine, in the daemon's pid and mount namespaces.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalHost;

impl Host for LocalHost {
    fn credentials(&self, thread: u32) -> ThreadCredentials {
        ThreadCredentials::from_status(status_of(thread).unwrap_or_default())
    }

    fn own_user_namespace(&self) -> Option<UserNamespace> {
        UserNamespace::of("self")
    }

    fn user_namespace(&self, thread: u32) -> Option<UserNamespace> {
        UserNamespace::of(&thread.to_string())
    }

    fn mapped_ids(&self, thread: u32) -> (Vec<IdRange>, Vec<IdRange>) {
        let ranges = |map| user_namespace::ranges_of(thread, map);
        (ranges("uid_map"), ranges("gid_map"))
    }

    fn has_fatal_signal(&self, thread: u32) -> Option<bool> {
        status_of(thread).map(|status| signals::is_fatal(&status))
    }

    fn thread_state(&self, thread: u32) -> Option<ThreadState> {
        ThreadState::below("/proc", thread)
    }

    fn has_ended(&self, thread: u32) -> bool {
        let thread = i32::try_from(thread).ok().and_then(Pid::from_raw);
        thread.is_some_and(|thread| test_kill_process(thread) == Err(Errno::SRCH))
    }

    fn submounts(&self, mountpoint: &Path) -> Submounts {
        Submounts::below(mountpoint.to_owned())
    }

    fn watched_inodes(&self, device: (u32, u32)) -> BTreeSet<u64> {
        watchers::watched(device)
    }
}

/// A thread's `/proc/PID/status`; `None` if the thread is not visible.
fn status_of(thread: u32) -> Option<String> {
    if thread == 0 {
        return None;
    }
    std::fs::read_to_string(format!("/proc/{thread}/status")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_thread_has_no_groups_ids_or_capabilities() {
        for thread in [0, u32::MAX] {
            let found = LocalHost.credentials(thread);
            assert_eq!((found.groups(), found.filesystem_ids(), found.capabilities()), (vec![], None, 0));
            assert_eq!(LocalHost.has_fatal_signal(thread), None);
            assert!(LocalHost.user_namespace(thread).is_none() && LocalHost.thread_state(thread).is_none());
        }
    }

    #[test]
    fn thread_of_this_process_is_visible() {
        let own = std::process::id();
        assert_eq!(LocalHost.has_fatal_signal(own), Some(false));
        assert_eq!(LocalHost.user_namespace(own), LocalHost.own_user_namespace());
        assert!(LocalHost.thread_state(own).is_some() && !LocalHost.has_ended(own));
    }
}
