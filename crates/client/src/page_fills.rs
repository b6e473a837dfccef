//! Whole files that are stored in the kernel's page cache before the reply that opens them (`nigh_cache`'s
//! `ops/page_fill.rs`).
//!
//! A store waits for locked pages. A thread stores a file before it sends any reply, and replies that open, create or
//! truncate the file wait for the store: until then no request of the kernel has a page of it locked, and no truncation
//! is undone. The gate (`driver.rs`) keeps invalidations behind the store as behind replies.

use nigh_fuse::{Notification, Transport};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;

/// A file to store. Replies wait for it until it is dropped.
pub(crate) struct PageFill {
    ino: u64,
    /// The kernel's nodeid of the file.
    nodeid: u64,
    data: Vec<u8>,
    fills: Arc<PageFills>,
}

impl PageFill {
    /// Stores the file. Call without the core, before anything that waits.
    pub fn store(mut self, transport: &dyn Transport) {
        let data = std::mem::take(&mut self.data).into();
        let store = Notification::Store { ino: self.nodeid, offset: 0, data };
        if let Err(error) = transport.notify(&store) {
            tracing::debug!(target: "nigh::kernel", %error, ino = self.ino, "contents are not stored");
            // A part may be stored. The reply has the kernel keep its pages.
            let _ = transport.notify(&Notification::contents(self.nodeid));
        }
    }
}

impl Drop for PageFill {
    fn drop(&mut self) {
        let mut inos = self.fills.inos.lock();
        if let Some(at) = inos.iter().position(|stored| *stored == self.ino) {
            inos.swap_remove(at);
        }
        self.fills.done.notify_all();
    }
}

/// Files that are being stored.
#[derive(Default)]
pub(crate) struct PageFills {
    inos: Mutex<Vec<u64>>,
    done: Condvar,
}

impl PageFills {
    /// Begins to store a file. Call with the core locked.
    pub fn begin(self: &Arc<Self>, ino: u64, nodeid: u64, data: Vec<u8>) -> PageFill {
        self.inos.lock().push(ino);
        PageFill { ino, nodeid, data, fills: Arc::clone(self) }
    }

    /// Waits until a file is not being stored. Not for a thread that has files to store itself. A limit would let a late store
    /// undo a truncation; none is needed, since a store waits for no request (`ops/page_fill.rs`).
    pub fn wait(&self, ino: u64) {
        self.done.wait_while(&mut self.inos.lock(), |inos| inos.contains(&ino));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_fuse::{Level, MemoryTransport, NotifyOutcome};
    use std::sync::mpsc;
    use std::time::Duration;

    fn begin(fills: &Arc<PageFills>) -> PageFill {
        fills.begin(7, 107, b"text".to_vec())
    }

    #[test]
    fn reply_waits_for_the_store_of_its_own_file_only() {
        let (open, opened) = mpsc::channel::<()>();
        let opened = Mutex::new(opened);
        let memory = MemoryTransport::new(Level::All).judging(move |_| {
            opened.lock().recv().unwrap();
            Ok(NotifyOutcome::Done)
        });
        let fills = Arc::new(PageFills::default());
        let fill = begin(&fills);
        fills.wait(8);
        std::thread::scope(|scope| {
            scope.spawn(|| fill.store(&memory));
            let waits = scope.spawn(|| fills.wait(7));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished(), "the store runs");
            open.send(()).unwrap();
        });
        fills.wait(7);
        let stored = Notification::Store { ino: 107, offset: 0, data: b"text".as_slice().into() };
        assert_eq!(memory.notifications(), [stored]);
    }

    #[test]
    fn store_that_fails_or_is_dropped_is_no_longer_waited_for() {
        let memory = MemoryTransport::new(Level::All).judging(|_| Err(std::io::Error::from_raw_os_error(12)));
        let fills = Arc::new(PageFills::default());
        begin(&fills).store(&memory);
        fills.wait(7);
        assert_eq!(memory.notifications().last(), Some(&Notification::contents(107)), "a part may be there");
        drop(begin(&fills));
        fills.wait(7);
    }
}
