//! Flow control and priorities of prefetch jobs, received while they run.

use nigh_types::{Call, CallId, NodeRef};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The prefetch jobs of one session. No other lock is taken under these locks, which are held for a moment.
#[derive(Default)]
pub(crate) struct PrefetchJobs(Mutex<BTreeMap<CallId, Arc<PrefetchControl>>>);

/// Control messages that a job has not consumed yet.
#[derive(Default)]
pub(crate) struct PrefetchControl(Mutex<ControlMessages>);

#[derive(Default)]
pub(crate) struct ControlMessages {
    pub(crate) credit: u64,
    pub(crate) wants: Vec<NodeRef>,
    /// The job is to end.
    pub(crate) ends: bool,
    /// The job sleeps until the next control message.
    waits: bool,
}

/// Maximum number of concurrent jobs of a session.
const MOST: usize = 16;
/// Maximum number of requested directories that a job has not consumed yet.
const MOST_REQUESTED: usize = 1_024;

impl PrefetchJobs {
    /// Registers a job. Returns `None` at the limit.
    pub(crate) fn begin(&self, call: CallId) -> Option<Arc<PrefetchControl>> {
        let mut walks = self.0.lock();
        if walks.len() >= MOST {
            return None;
        }
        Some(Arc::clone(walks.entry(call).or_default()))
    }

    /// Handles a control message. Returns false if too many directories are requested. A message for an ended job is
    /// ignored.
    pub(crate) fn handle_control(&self, call: &Call) -> bool {
        let Call::PrefetchCredit { walk, credit, want } = call else { return false };
        let walks = self.0.lock();
        let Some(steering) = walks.get(walk) else { return true };
        let mut said = steering.0.lock();
        said.credit = said.credit.saturating_add(u64::from(*credit));
        said.wants.extend(want.clone());
        said.waits = false;
        said.wants.len() <= MOST_REQUESTED
    }

    /// Ends this call's job, if it is one.
    pub(crate) fn end(&self, call: CallId) {
        self.0.lock().get(&call).into_iter().for_each(|steering| steering.end());
    }

    pub(crate) fn end_all(&self) {
        self.0.lock().values().for_each(|steering| steering.end());
    }

    /// Removes the job of an answered call.
    pub(crate) fn forget(&self, call: CallId) {
        self.0.lock().remove(&call);
    }
}

impl PrefetchControl {
    fn end(&self) {
        let mut said = self.0.lock();
        (said.ends, said.waits) = (true, false);
    }

    /// Takes the control messages received since the last call.
    pub(crate) fn take_messages(&self) -> ControlMessages {
        let mut said = self.0.lock();
        let ends = said.ends;
        ControlMessages { ends, ..std::mem::take(&mut *said) }
    }

    /// Puts the job to sleep until the next message. Returns false if a message is pending.
    pub(crate) fn wait(&self) -> bool {
        let mut said = self.0.lock();
        said.waits = said.credit == 0 && said.wants.is_empty() && !said.ends;
        said.waits
    }

    pub(crate) fn waits(&self) -> bool {
        self.0.lock().waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::NodeId;

    fn steer(walk: u64, credit: u32, want: bool) -> Call {
        let place = NodeRef::without_hint(NodeId { ino: 7, generation: 1 });
        Call::PrefetchCredit { walk: CallId(walk), credit, want: want.then_some(place) }
    }

    #[test]
    fn prefetch_job_sleeps_until_control_message_and_gets_it_once() {
        let walks = PrefetchJobs::default();
        let one = walks.begin(CallId(1)).unwrap();
        assert!(one.wait() && one.waits());
        assert!(walks.handle_control(&steer(2, 5, true)), "of another one, that has ended");
        assert!(one.waits());
        assert!(walks.handle_control(&steer(1, 5, false)) && walks.handle_control(&steer(1, 6, true)));
        assert!(!one.waits() && !one.wait());
        let said = one.take_messages();
        assert_eq!((said.credit, said.wants.len(), said.ends), (11, 1, false));
        assert!(one.wait());
        walks.end(CallId(1));
        assert!(!one.waits() && !one.wait() && one.take_messages().ends);
    }

    #[test]
    fn prefetch_jobs_and_their_requests_are_limited() {
        let walks = PrefetchJobs::default();
        for call in 0..MOST as u64 {
            assert!(walks.begin(CallId(call)).is_some());
        }
        assert!(walks.begin(CallId(99)).is_none());
        walks.forget(CallId(3));
        assert!(walks.begin(CallId(99)).is_some());
        assert!((0..MOST_REQUESTED).all(|_| walks.handle_control(&steer(1, 0, true))));
        assert!(!walks.handle_control(&steer(1, 0, true)));
    }
}
