//! All client-side I/O: FUSE adapter, driver, notifier.
