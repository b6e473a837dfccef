//! In-memory transport with request and reply queues, for tests without a mount.

use crate::abi::OutHeader;
use crate::{Level, Notification, NotifyOutcome, Transport};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use zerocopy::FromBytes;

type Judge = Box<dyn Fn(&Notification<'_>) -> io::Result<NotifyOutcome> + Send + Sync>;

/// Delivers queued requests and keeps replies and notifications.
pub struct MemoryTransport {
    level: Level,
    state: Mutex<State>,
    changed: Condvar,
    judge: Option<Judge>,
}

#[derive(Default)]
struct State {
    requests: VecDeque<Vec<u8>>,
    closed: bool,
    replies: Vec<Vec<u8>>,
    notifications: Vec<Notification<'static>>,
}

impl MemoryTransport {
    #[must_use]
    pub fn new(level: Level) -> MemoryTransport {
        MemoryTransport { level, state: Mutex::default(), changed: Condvar::new(), judge: None }
    }

    /// Sets a function that returns the outcome of notifications (it may block, as the kernel does); by default all
    /// are `Done`.
    #[must_use]
    pub fn judging(
        self,
        judge: impl Fn(&Notification<'_>) -> io::Result<NotifyOutcome> + Send + Sync + 'static,
    ) -> MemoryTransport {
        MemoryTransport { judge: Some(Box::new(judge)), ..self }
    }

    /// A request to be received: see [`crate::encode`].
    pub fn queue(&self, request: Vec<u8>) {
        self.state().requests.push_back(request);
        self.changed.notify_all();
    }

    /// Simulates an unmount: after the queued requests, receivers get the end.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    /// All replies so far, with headers.
    #[must_use]
    pub fn replies(&self) -> Vec<Vec<u8>> {
        self.state().replies.clone()
    }

    /// Waits for the reply to the request `unique` and removes it. Returns the errno (0: none) and the bytes after
    /// the header, or `None` after `limit`.
    #[must_use]
    pub fn take_reply(&self, unique: u64, limit: Duration) -> Option<(i32, Vec<u8>)> {
        let is_it = |reply: &Vec<u8>| {
            OutHeader::read_from_prefix(reply).is_ok_and(|(header, _)| header.unique == unique)
        };
        let (mut state, _) = self
            .changed
            .wait_timeout_while(self.state(), limit, |state| !state.replies.iter().any(is_it))
            .unwrap_or_else(PoisonError::into_inner);
        let index = state.replies.iter().position(is_it)?;
        let reply = state.replies.remove(index);
        let (header, rest) = OutHeader::read_from_prefix(&reply).ok()?;
        Some((-header.error, rest.to_vec()))
    }

    /// All notifications so far.
    #[must_use]
    pub fn notifications(&self) -> Vec<Notification<'static>> {
        self.state().notifications.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for MemoryTransport {
    fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let mut state = self
            .changed
            .wait_while(self.state(), |state| state.requests.is_empty() && !state.closed)
            .unwrap_or_else(PoisonError::into_inner);
        let Some(request) = state.requests.pop_front() else { return Ok(None) };
        let Some(space) = buffer.get_mut(..request.len()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        space.copy_from_slice(&request);
        Ok(Some(request.len()))
    }

    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        let reply: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        self.state().replies.push(reply);
        self.changed.notify_all();
        Ok(())
    }

    fn notify(&self, notification: &Notification<'_>) -> io::Result<NotifyOutcome> {
        if self.level == Level::None
            || self.level == Level::NoEpoch && *notification == Notification::IncEpoch
        {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.state().notifications.push(notification.clone().into_owned());
        self.changed.notify_all();
        self.judge.as_ref().map_or(Ok(NotifyOutcome::Done), |judge| judge(notification))
    }

    fn level(&self) -> Level {
        self.level
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reply;

    #[test]
    fn memory_transport_delivers_requests_and_records_replies_and_notifications() {
        let transport = MemoryTransport::new(Level::NoEpoch).judging(|notification| match notification {
            Notification::InvalInode { ino: 9, .. } => Ok(NotifyOutcome::Unknown),
            _ => Ok(NotifyOutcome::Done),
        });
        transport.queue(vec![1, 2, 3]);
        let mut buffer = [0; 10];
        assert_eq!(transport.receive(&mut buffer).unwrap(), Some(3));
        assert_eq!(buffer[..3], [1, 2, 3]);
        Reply::error(5, 2).send(&transport).unwrap();
        Reply::data(6, b"abc").send(&transport).unwrap();
        assert_eq!(transport.take_reply(6, Duration::ZERO), Some((0, b"abc".to_vec())));
        assert_eq!(transport.take_reply(5, Duration::ZERO), Some((2, Vec::new())));
        assert_eq!(transport.take_reply(5, Duration::ZERO), None);
        assert_eq!(transport.notify(&Notification::contents(9)).unwrap(), NotifyOutcome::Unknown);
        assert_eq!(transport.notify(&Notification::entry(1, b"x")).unwrap(), NotifyOutcome::Done);
        assert!(transport.notify(&Notification::IncEpoch).is_err());
        assert_eq!(transport.notifications().len(), 2);
        transport.close();
        assert_eq!(transport.receive(&mut buffer).unwrap(), None);
    }

    #[test]
    fn a_receiver_waits_until_something_comes() {
        let transport = MemoryTransport::new(Level::All);
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| transport.receive(&mut [0; 8]).unwrap());
            transport.queue(vec![1]);
            assert_eq!(receiver.join().unwrap(), Some(1));
        });
    }
}
