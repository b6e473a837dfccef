//! A host of which a test sets what it shows of every thread.

use super::{Host, NoHost, Submounts, ThreadCredentials, UserNamespace};
use crate::thread_state::ThreadState;
use nigh_types::IdRange;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Every thread has the groups 5 and 6, and a fatal signal once the test says so. All else is as for [`NoHost`].
#[derive(Default)]
pub(crate) struct TestHost {
    pub has_fatal_signal: AtomicBool,
}

impl Host for TestHost {
    fn credentials(&self, _: u32) -> ThreadCredentials {
        ThreadCredentials::from_status("Groups:\t5 6 \n".to_owned())
    }

    fn has_fatal_signal(&self, _: u32) -> Option<bool> {
        Some(self.has_fatal_signal.load(Ordering::SeqCst))
    }

    fn own_user_namespace(&self) -> Option<UserNamespace> {
        NoHost.own_user_namespace()
    }

    fn user_namespace(&self, thread: u32) -> Option<UserNamespace> {
        NoHost.user_namespace(thread)
    }

    fn mapped_ids(&self, thread: u32) -> (Vec<IdRange>, Vec<IdRange>) {
        NoHost.mapped_ids(thread)
    }

    fn thread_state(&self, thread: u32) -> Option<ThreadState> {
        NoHost.thread_state(thread)
    }

    fn has_ended(&self, thread: u32) -> bool {
        NoHost.has_ended(thread)
    }

    fn submounts(&self, mountpoint: &Path) -> Submounts {
        NoHost.submounts(mountpoint)
    }

    fn watched_inodes(&self, device: (u32, u32)) -> BTreeSet<u64> {
        NoHost.watched_inodes(device)
    }
}

pub(crate) fn local() -> Arc<dyn Host> {
    Arc::new(super::LocalHost)
}

pub(crate) fn absent() -> Arc<dyn Host> {
    Arc::new(NoHost)
}
