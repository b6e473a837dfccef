//! Whole files that are stored in the kernel's page cache before the reply that opens them (`nigh_cache`'s
//! `ops/page_fill.rs`).
//!
//! A store waits for locked pages. A thread stores a file before it sends any reply, and replies that open, create or
//! truncate the file wait for the store: until then no request of the kernel has a page of it locked, and no truncation
//! is undone. The gate (`driver.rs`) keeps invalidations behind the store as behind replies.

use nigh_fuse::{Notification, Transport};
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A file to store.
pub(crate) struct PageFill {
    pub ino: u64,
    /// The kernel's nodeid of the file.
    pub nodeid: u64,
    pub data: Vec<u8>,
}

/// Files that are being stored.
#[derive(Default)]
pub(crate) struct PageFills {
    inos: Mutex<Vec<u64>>,
    /// Length of `inos`: most replies need not lock it.
    count: AtomicUsize,
    done: Condvar,
}

impl PageFills {
    /// Records a file that this thread is about to store. Call with the core locked.
    pub fn begin(&self, ino: u64) {
        let mut inos = self.inos.lock();
        inos.push(ino);
        self.count.store(inos.len(), Ordering::SeqCst);
    }

    /// Stores the file. Call without the core, before anything that waits.
    pub fn store(&self, transport: &dyn Transport, PageFill { ino, nodeid, data }: PageFill) {
        let store = Notification::Store { ino: nodeid, offset: 0, data: data.into() };
        if let Err(error) = transport.notify(&store) {
            tracing::debug!(target: "nigh::kernel", %error, ino, "contents are not stored");
        }
        let mut inos = self.inos.lock();
        if let Some(at) = inos.iter().position(|stored| *stored == ino) {
            inos.swap_remove(at);
        }
        self.count.store(inos.len(), Ordering::SeqCst);
        self.done.notify_all();
    }

    /// Waits until a file is not being stored. Not for a thread that has files to store itself.
    pub fn wait(&self, ino: u64) {
        if self.count.load(Ordering::SeqCst) > 0 {
            let mut inos = self.inos.lock();
            self.done.wait_while(&mut inos, |inos| inos.contains(&ino));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_fuse::{Level, MemoryTransport, NotifyOutcome};
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::time::Duration;

    fn file(ino: u64) -> PageFill {
        PageFill { ino, nodeid: ino + 100, data: b"text".to_vec() }
    }

    #[test]
    fn reply_waits_for_the_store_of_its_own_file_only() {
        let (open, opened) = mpsc::channel::<()>();
        let opened = Mutex::new(opened);
        let memory = MemoryTransport::new(Level::All).judging(move |_| {
            opened.lock().recv().unwrap();
            Ok(NotifyOutcome::Done)
        });
        let (fills, transport) = (Arc::new(PageFills::default()), Arc::new(memory));
        fills.begin(7);
        fills.wait(8);
        std::thread::scope(|scope| {
            scope.spawn(|| fills.store(&*transport, file(7)));
            let waits = scope.spawn(|| fills.wait(7));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished(), "the store runs");
            open.send(()).unwrap();
        });
        fills.wait(7);
        let stored = Notification::Store { ino: 107, offset: 0, data: b"text".as_slice().into() };
        assert_eq!(transport.notifications(), [stored]);
    }

    #[test]
    fn file_that_the_kernel_refuses_is_no_longer_waited_for() {
        let memory = MemoryTransport::new(Level::All)
            .judging(|_| Err(std::io::Error::from_raw_os_error(rustix::io::Errno::NOENT.raw_os_error())));
        let fills = PageFills::default();
        fills.begin(7);
        fills.store(&memory, file(7));
        fills.wait(7);
    }
}
