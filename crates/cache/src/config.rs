//! Settings of a mount.

use crate::kernel::NotifyLevel;
use nigh_types::Span;

/// Treatment of requests while the remote is away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnDisconnect {
    /// Requests wait until it is back.
    Wait,
    /// A request that has waited for this long, for whatever reason, fails with `EIO`; except a wait for another
    /// owner's lock.
    Fail(Span),
    /// Requests are answered from stale facts; changes fail with `EROFS`, unknown facts with `EIO`.
    Stale,
}

/// Settings of one cache; fixed over its life, except `level` ([`crate::Cache::handle_mounted_below`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Memory budget in bytes; whole directories are evicted first.
    pub budget_bytes: u64,
    /// Memory budget of file contents in bytes; 0: none are kept.
    pub data_budget_bytes: u64,
    /// Most bytes that are read ahead of one reader.
    pub readahead_bytes: u64,
    /// Invalidations that the kernel supports.
    pub level: NotifyLevel,
    /// A lookup sent to the remote also lists its directory if one name less than this is known absent there. The lookup
    /// of this number in a directory starts a prefetch below it.
    pub names_before_listing: u32,
    /// The kernel may cache listings of directories below this size.
    pub kernel_listing_below: u64,
    /// Most negative dentries that the kernel is given.
    pub kernel_negative_most: u64,
    /// Listings give the kernel no more inodes than this.
    pub kernel_inodes_most: u64,
    /// The kernel can be asked to forget unused inodes (`FUSE_NOTIFY_PRUNE`).
    pub prunes: bool,
    /// Small files may be stored in the kernel's page cache: it clears what lies behind their ends in their last pages
    /// (`fuse_notify_store` since Linux 6.11).
    pub stores_files: bool,
    /// Most directories in the cache, and the idle time after which one is given back; `None`: no limit.
    pub most_dirs: u64,
    pub dir_timeout: Option<Span>,
    /// Bytes that an entry takes in the kernel's buffer beside its name (padded to 8): without and with attributes
    /// (`struct fuse_dirent`, `struct fuse_direntplus`).
    pub entry_size: (u32, u32),
    /// The kernel drops pages before it writes past them (since Linux 6.6; it comes with `FUSE_DIRECT_IO_ALLOW_MMAP`).
    pub direct_appends: bool,
    pub on_disconnect: OnDisconnect,
    pub prefetch: Prefetch,
    /// Symlink targets are cached; else the remote is asked each time.
    pub keeps_targets: bool,
    /// The kernel caches READLINK replies (`FUSE_CACHE_SYMLINKS`).
    pub kernel_keeps_targets: bool,
    /// Offsets in directories fit 31 bits, for 32-bit programs (docs/decisions/0020-cookies-of-31-bits.md).
    pub short_cookies: bool,
    /// Every reader of a listing gets names first, even one that wants attributes or of which few names are to come
    /// (for tests).
    pub names_first: bool,
    /// Durable identity of this client; see `MutationId`.
    pub client: u64,
    /// Random number of this start.
    pub incarnation: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            budget_bytes: 1 << 30,
            data_budget_bytes: 1 << 28,
            readahead_bytes: 32 << 20,
            level: NotifyLevel::All,
            names_before_listing: 4,
            kernel_listing_below: 1_000,
            kernel_negative_most: 100_000,
            kernel_inodes_most: 900_000,
            prunes: false,
            stores_files: true,
            most_dirs: u64::MAX,
            dir_timeout: None,
            entry_size: (24, 152),
            direct_appends: false,
            on_disconnect: OnDisconnect::Wait,
            prefetch: Prefetch::Auto,
            keeps_targets: true,
            kernel_keeps_targets: true,
            short_cookies: false,
            names_first: false,
            client: 0,
            incarnation: 0,
        }
    }
}

/// Prefetch policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Prefetch {
    Off,
    /// Prefetch while a caller walks a tree, as far ahead as the walk needs.
    #[default]
    Auto,
    /// Prefetch everything below a directory that a caller opens, within the budget.
    All,
}
