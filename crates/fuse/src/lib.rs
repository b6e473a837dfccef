//! The kernel FUSE protocol: codec, transports, mounting, notifications.
