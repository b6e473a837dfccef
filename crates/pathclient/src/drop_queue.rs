//! Values that coroutines have dropped.

use std::sync::{Arc, Mutex, PoisonError};

/// Queue of what coroutines have dropped: file ids to close, messages to cancel. A coroutine may drop them while it
/// holds the lock of its session's state, so `Drop` only queues them here. The session releases them at the server
/// before its next round of tasks.
#[derive(Debug)]
pub struct DropQueue<T>(Arc<Mutex<Vec<T>>>);

impl<T> DropQueue<T> {
    pub fn push(&self, dropped: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(dropped);
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Returns all values, in the order in which they were dropped.
    #[must_use]
    pub fn take(&self) -> Vec<T> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T> Clone for DropQueue<T> {
    /// Another reference to the same queue.
    fn clone(&self) -> DropQueue<T> {
        DropQueue(Arc::clone(&self.0))
    }
}

impl<T> Default for DropQueue<T> {
    fn default() -> DropQueue<T> {
        DropQueue(Arc::default())
    }
}
