//! Requests of the kernel, one module per kind, and the replies to their calls.

pub(crate) mod aborting;
pub(crate) mod arrivals;
pub(crate) mod begin;
pub(crate) mod by_number;
pub(crate) mod closing;
pub(crate) mod dir_pages;
pub(crate) mod files;
pub(crate) mod listing_chunks;
pub(crate) mod listings;
pub(crate) mod lock_reclaim;
pub(crate) mod locks;
pub(crate) mod lookup;
pub(crate) mod mutate;
pub(crate) mod names_only;
pub(crate) mod oversized;
pub(crate) mod prefetch_policy;
pub(crate) mod prefetch_use;
pub(crate) mod prefetching;
pub(crate) mod privs;
pub(crate) mod readdir;
pub(crate) mod removed;
pub(crate) mod restart;
pub(crate) mod revalidate;
pub(crate) mod statfs;
pub(crate) mod targets;
pub(crate) mod xattr;
